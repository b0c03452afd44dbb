"""Patches that use wandb's private names, one function per use.

At an upgrade, `tests/test_patches.py` lists missing names.
"""

from app.system.patches import expects


@expects("wandb.sdk.lib.module:unset_globals")
def forget_run() -> None:
    """Make wandb forget the parent's run in a forked process, which lacks the run's threads.

    At an upgrade: does a forked process still inherit `wandb.run`? Does `wandb.setup` still start
    anew there?
    """
    from wandb.sdk.lib.module import unset_globals

    unset_globals()

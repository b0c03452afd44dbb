"""Patches that use wandb's private names, one function per use.

At an upgrade, `tests/test_patches.py` lists missing names.
"""

from app.system.patches import expects


@expects("wandb.sdk.lib.module:unset_globals")
def forget_run() -> None:
    """Make wandb forget the parent's run in a forked process, because only the parent has the run's threads.

    At an upgrade: does a forked process still inherit `wandb.run`? Does `wandb.setup` still start anew there?
    """
    from wandb.sdk.lib.module import unset_globals

    unset_globals()


@expects("wandb.sdk.wandb_run:Run._detect_and_apply_job_inputs")
def skip_launch_inputs() -> None:
    """Keep `wandb.init` from importing W&B Launch, which takes a CPU second.

    Without this import, `wandb.init` ignores the inputs of Launch jobs, which this application does not use. At an
    upgrade: does `_detect_and_apply_job_inputs` still serve only Launch jobs?
    """
    from wandb.sdk.wandb_run import Run

    Run._detect_and_apply_job_inputs = lambda run: None  # type: ignore[assignment]

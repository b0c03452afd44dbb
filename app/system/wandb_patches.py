"""Patches that use wandb's private names, one function per use.

At an upgrade, `tests/test_patches.py` lists missing names.
"""

import sys

from app.system.patches import expects


@expects("wandb.sdk.lib.module:unset_globals")
def forget_run() -> None:
    """Make wandb forget the parent's run in a forked process, because its threads exist only in the parent.

    At an upgrade: does `wandb.run` still survive a fork, and does `wandb.setup` start again there?
    """
    from wandb.sdk.lib.module import unset_globals

    unset_globals()


@expects("wandb.sdk.wandb_run:Run._detect_and_apply_job_inputs")
def skip_launch_inputs() -> None:
    """Keep `wandb.init` from importing W&B Launch, which takes a CPU second, unless a job has inputs.

    At an upgrade: does `_detect_and_apply_job_inputs` still do nothing else?
    """
    from wandb.sdk.wandb_run import Run

    apply = Run._detect_and_apply_job_inputs

    def apply_where_given(run: Run) -> None:
        if "wandb.sdk.launch.inputs.internal" in sys.modules:  # the module that stages inputs
            apply(run)

    if apply.__module__ != __name__:
        Run._detect_and_apply_job_inputs = apply_where_given  # type: ignore[assignment]

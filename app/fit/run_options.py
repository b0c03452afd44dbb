"""What is settled once for all ranks before a run begins: its checkpoint, its directory, its run in the tracker."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from app.fit.checkpoints import find_checkpoint, newest_checkpoint, tracked_as
from app.monitor.loggers import claim_version
from app.system.files import remove_parts


@dataclass
class Run:
    """Where a run is kept and tracked.

    Args:
        name: Name of the experiment.
        root: Directory of all runs: each gets `root/name/version_N`.
        test: Whether fit ends with a test of the best checkpoint.
        wandb: Whether to track in Weights & Biases; offline without a key.
        project: Project in Weights & Biases.
        group: Group of the run in Weights & Biases.
        tags: Tags of the run in Weights & Biases.
        warmup_epochs: Epochs left out of the throughput in run.json.
        on_nonfinite: What to do when the loss is infinite or NaN: `stop` before a checkpoint has it, `warn` and go on,
            or `skip` the updates whose gradients are, which takes a read of the device on each step.
        profile: Whether to trace some steps of every rank, and to say what limits the run; `--profile` for short.
    """

    name: str = "cifar_cnn"
    root: str = "runs"
    test: bool = True
    wandb: bool = True
    project: str = "data-parallel-lab"
    group: str | None = None
    tags: list[str] | None = None
    warmup_epochs: int = 0
    on_nonfinite: Literal["stop", "warn", "skip"] = "stop"
    profile: bool = False


def decide(
    run: Run,
    command: str,
    launchers: list[str],
    checkpoint: str | None,
    *,
    configs: Sequence[str],
    may_resume: bool,
    is_recorded: bool,
) -> dict[str, Any]:
    """Settle what only one process can. For rank zero.

    Args:
        run: Where the run is kept.
        command: What was typed.
        launchers: Ids of what started the processes of the run.
        checkpoint: What was given as `--ckpt_path`, or None.
        configs: The config files that were given.
        may_resume: Whether a launcher may have started this run before. Then it wants it to go on, without a flag.
        is_recorded: Whether the run leaves anything behind.

    Raises:
        UserError: When there is no such checkpoint, or no folder can be made for the run.
    """
    for folder in (
        *Path(run.root, run.name).glob("version_*"),
        *Path(run.root, run.name).glob("version_*/checkpoints"),
    ):
        remove_parts(folder)
    own = newest_checkpoint(run.root, run.name, (command, launchers)) if may_resume else None
    if own is None and checkpoint == "auto":
        own = newest_checkpoint(run.root, run.name, None)
    tracker, anew = None, (may_resume and checkpoint is None) or own is not None or checkpoint == "auto"
    if own is not None:
        rank_zero_info(f"going on from {own}")
        tracker = tracked_as(own, command)
        checkpoint = own
    elif checkpoint == "auto":
        checkpoint = None
    elif checkpoint is not None:
        checkpoint = find_checkpoint(checkpoint, configs, run.root, run.name)
    return {
        "checkpoint": checkpoint,
        "may_be_finished": anew,  # started again after the end of its training, it has still to be tested
        "version": claim_version(run.root, run.name) if is_recorded else None,
        "launchers": launchers,
        "tracker": tracker,
    }

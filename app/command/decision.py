"""Rank zero's decisions before a run starts: checkpoint and directory."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from app.command.arguments import leaves, load_yaml, read_yaml
from app.command.checkpoints import is_newest, newest_checkpoint, read_earlier
from app.command.configuration import Flags
from app.command.run_options import PLACES, Run, default_name, is_recorded, requested_checkpoint
from app.launch.cluster_environment import may_resume
from app.monitor.loggers import claim_version
from app.record import Record
from app.system.files import remove_parts

_HELD: dict[Path, int] = {}  # descriptors of locked folders
TRAINING = (  # prefixes of flags that define a training
    "seed_everything",
    "model.",
    "data.",
    "trainer.precision",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip",
    "trainer.limit_train_batches",
    "trainer.overfit_batches",
    "trainer.sync_batchnorm",
    "run.virtual_devices",
    "run.loader",
    "run.global_batch",
)


def decide(cli: Flags, launchers: list[str]) -> dict[str, Any]:
    """Decide the run's checkpoint and folder, on rank zero.

    Args:
        cli: The command's flags.
        launchers: Ids of the launchers of the run's processes.

    Returns:
        `checkpoint` and `folder`: paths, or None. `may_be_finished`: see `check_checkpoint`.
        `earlier`: record of the run that this one continues, or None. `launchers`: as above.

    Raises:
        UserError: When the checkpoint is missing, or the run's folder cannot be created.
    """
    run = cli.config.run
    runs = Path(run.root, run.name or default_name(cli.config))
    for pattern in ("version_*", "version_*/checkpoints"):
        for path in runs.glob(pattern):
            remove_parts(path)
    checkpoint = None
    if cli.command == "fit" and may_resume():  # a launcher may have restarted this run
        checkpoint = newest_checkpoint(runs, (cli.command_line, launchers))
    if checkpoint is None and cli.checkpoint == "auto":
        checkpoint = newest_checkpoint(runs, None)
    is_found = checkpoint is not None
    if is_found:
        rank_zero_info(f"resuming from {checkpoint}")
    elif cli.checkpoint not in (None, "auto"):
        checkpoint = requested_checkpoint(cli.config, cli.checkpoint, resumes=cli.command == "fit")
    folder = earlier = None
    if is_recorded(cli.config.trainer):
        folder, earlier = _folder(cli, runs, checkpoint)
        if folder.is_relative_to(run.root):  # the root may differ between nodes
            folder = folder.relative_to(run.root)
    return {
        "checkpoint": checkpoint,
        "may_be_finished": is_found,  # a run killed after training must still run its test
        "folder": folder,
        "earlier": earlier,
        "launchers": launchers,
    }


def _folder(cli: Flags, new: Path, checkpoint: str | None) -> tuple[Path, Record | None]:
    """Return this run's folder, and the earlier training's record, or None in a new folder.

    `fit` continues in an ended run's folder if it resumes from that run's newest checkpoint with
    the same settings. Otherwise, `fit` creates a new folder. Other commands create a folder inside
    the folder of the checkpoint's run.

    Every command creates a new folder if the checkpoint belongs to no run. It also does so if
    `--run.name` or `--run.root` is given, and the checkpoint's run lies elsewhere.
    """
    used = Path(checkpoint or "").parent.parent
    run = cli.config.run
    is_chosen = run.name is not None or run.root != Run.root
    is_elsewhere = is_chosen and used.parent.resolve() != new.resolve()
    if run.name is None and cli.command != "fit":  # the default name depends on the data
        is_elsewhere = is_chosen and Path(run.root).resolve() not in used.resolve().parents
    if checkpoint is None or is_elsewhere or not (used / "config.yaml").exists():
        return _held(claim_version(new)), None
    if cli.command != "fit":
        return _held(claim_version(used, cli.command)), None
    before = _settings(read_yaml(str(used / "config.yaml")))
    here = _settings(load_yaml(cli.parser.dump(cli.config, skip_none=False)))
    reason = None
    if not is_newest(Path(checkpoint)):
        reason = "it has newer checkpoints"
    for name, value in here.items():
        if before.get(name, value) != value:
            reason = f"--{name} differs"
    if reason is None:
        try:
            return _held(used), read_earlier(used / "run.json")
        except BlockingIOError:
            reason = "it is still running"
    rank_zero_info(f"not continuing {used}: {reason}")
    return _held(claim_version(new)), None


def _held(folder: Path) -> Path:
    """Lock a folder, so that no other process continues in it.

    Raises:
        BlockingIOError: When another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        pass
    _HELD[folder] = descriptor
    return folder


def release_folders() -> None:
    """Unlock the folders of this process's runs, and remove those in which no run has begun."""
    for folder, descriptor in _HELD.items():
        os.close(descriptor)
        with suppress(OSError):  # raised for a folder that is not empty
            folder.rmdir()
            folder.parent.rmdir()
    _HELD.clear()


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config's flags that define the training."""
    settings = {}
    # a resumed run may change these
    execution = (*PLACES, "model.channels_last", "model.compile", "model.matmul_precision")
    for flag, value in leaves(config):
        if flag.startswith(TRAINING) and not flag.endswith(execution):
            settings[flag] = value
    return settings

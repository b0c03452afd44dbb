"""Outcome of a run: record, exit code, report, and closing lines."""

import sys
from pathlib import Path

from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from app.data import ImageData
from app.errors import ExitStatus
from app.launch.cluster_environment import OWN_AGENT, Launched
from app.launch.elastic import STOPPED, note
from app.launch.process import end_undisturbed, requeue
from app.launch.signals import cause
from app.launch.spawn import SpawnLauncher
from app.monitor.loggers import trackers
from app.monitor.run_record import RunRecord
from app.monitor.summary import report
from app.record import Record, mark_ended


def record_of(trainer: Trainer, callback: RunRecord | None) -> Record:
    """Return the run's record; read it from its file if spawned processes trained."""
    if callback is None:
        return Record()
    if not isinstance(trainer.strategy.launcher, SpawnLauncher):
        return callback.record
    folder = callback.record.run_dir or str(trainer.loggers[0].log_dir)
    try:
        return Record.load(Path(folder, "run.json"))
    except ValueError:  # no record has been written
        return Record()


def stopped_by(trainer: Trainer, record: Record) -> str | None:
    """Return the name of the signal that ended the run, such as `Ctrl-C` or `SIGUSR1`, or None."""
    signal = cause(trainer)
    is_spawned = isinstance(trainer.strategy.launcher, SpawnLauncher)
    if signal is None and is_spawned and record.status == "interrupted":
        signal = str(record.error).removeprefix("by ")
    return signal


def exit_code(trainer: Trainer, record: Record, launcher: Launched | None) -> int:
    """Return the process's exit code, and requeue the SLURM job after SIGUSR1.

    After Ctrl-C, SIGTERM or SIGHUP, the code is nonzero, so that torchrun can continue without this
    node. Under our agent, only local rank 0 of each node returns the nonzero code. Under srun, only
    rank zero does. The other ranks return 0.
    """
    signal = stopped_by(trainer, record)
    if signal == "SIGUSR1":
        if requeue():
            return 0
        signal = "SIGTERM"
    # our agent needs only one nonzero exit code per node, and srun only one per run
    reports = {OWN_AGENT: trainer.local_rank == 0, "srun": trainer.is_global_zero}
    if signal is None or (launcher is not None and not reports.get(launcher.by, True)):
        return 0
    code = ExitStatus.stopped_by(signal).code
    note(STOPPED, str(code))
    return code


def can(stage: str, model: LightningModule, data: LightningDataModule) -> bool:
    """Return whether model and data define a stage: `test`, `validate` or `predict`."""
    name = stage
    step = f"{stage}_step"
    if stage == "validate":
        name = "val"
        step = "validation_step"
    if isinstance(data, ImageData):
        has_images = name in data.source.splits or (name == "val" and data.val_size > 0)
    else:
        loader = f"{name}_dataloader"
        has_images = is_overridden(loader, data) or is_overridden(loader, model)
    return has_images and is_overridden(step, model)


def end_early(directory: str, end: ExitStatus) -> None:
    """Write a run's end into its record and report, on behalf of ranks that could not."""
    mark_ended(directory, end)
    write_report(directory)


def write_report(directory: str, record: Record | None = None) -> None:
    """Write a run's report. Matplotlib, a fifth of all import time, is imported only now."""
    from app.monitor.report import leave_report

    leave_report(directory, record)


def close(
    trainer: Trainer,
    callback: RunRecord | None,
    fitted: bool,
    model: LightningModule,
    data: LightningDataModule,
) -> None:
    """Write a training's report, finish the tracker's run, and print the closing lines.

    Args:
        trainer: The trainer.
        callback: The callback with the run's record, or None.
        fitted: Whether the command was `fit`.
        model: The model.
        data: The data module.
    """
    if sys.exc_info()[0] is not None:  # otherwise, a late signal still ends the command
        end_undisturbed()
    record = record_of(trainer, callback)
    if fitted and record.run_dir:
        write_report(record.run_dir, record)
    for tracker in trackers(trainer.loggers):
        tracker.finish()
    if record.run_dir and (record.status == "completed" or record.train_s is not None):
        stages = ["test", "validate", "predict"]
        if record.tested or record.test:
            stages = ["predict", "test", "validate"]
        following = next((stage for stage in stages if can(stage, model, data)), None)
        print("\n".join(["", *report(record, trainer.loggers, fitted, following)]))

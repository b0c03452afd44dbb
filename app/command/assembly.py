"""Assembly of the Trainer: plugins, callbacks, and patches of Lightning."""

from typing import Any

from jsonargparse import Namespace
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from lightning.pytorch.cli import LightningArgumentParser

from app.command.checkpoint_file import CheckpointFiles
from app.command.resolved import Resolved
from app.command.run_options import Run
from app.launch.cluster_environment import environment_of
from app.launch.signals import Signals, StopTogether
from app.monitor.balance import Balance
from app.monitor.header import Header
from app.monitor.nonfinite import NonFinite
from app.monitor.progress_bar import ProgressBar
from app.monitor.rank_times import RankTimes
from app.monitor.results import PredictionWriter, TestFigures
from app.monitor.run_record import RunRecord
from app.monitor.step_clock import StepClock
from app.system import lightning_patches
from app.training import DDP
from app.training.step import StraightLoop
from app.training.step_patches import WindowLoop
from app.training.virtual_devices import ShardedLoop


def as_list(value: Any) -> list[Any]:
    """Wrap a value in a list; return a list unchanged, and an empty list for None."""
    return value if isinstance(value, list) else [value] * (value is not None)


def plugins(config: Namespace, resolved: Resolved) -> list[Any]:
    """Return the Trainer's plugins.

    Args:
        config: The configuration with instantiated classes.
        resolved: The resolved configuration.
    """
    chosen = as_list(config.trainer.plugins)
    is_clustered = any(isinstance(plugin, ClusterEnvironment) for plugin in chosen)
    environment = [] if is_clustered else [environment_of(resolved.nodes)]
    adds_io = not (
        any(isinstance(plugin, CheckpointIO) for plugin in chosen)
        or resolved.options.get("checkpoint_io")
    )
    return [*chosen, *[CheckpointFiles()] * adds_io, *environment]


def callbacks(config: Namespace, command: str) -> dict[str, Any]:
    """Return the Trainer's arguments for callbacks and loggers.

    Args:
        config: The configuration with instantiated classes.
        command: The command line.
    """
    trainer = config.trainer
    run = config.run
    timeout = config.cluster.timeout
    chosen = as_list(trainer.callbacks)
    arguments: dict[str, Any] = {}
    added: list[Callback] = []
    ranks = RankTimes(timeout)
    if isinstance(trainer.logger, bool | None):
        arguments["logger"] = False  # add our loggers later, when the directory is known
    if trainer.enable_model_summary is not False and not any(
        isinstance(c, ModelSummary) for c in chosen
    ):
        arguments["enable_model_summary"] = False
        added.append(Header())
    if trainer.enable_progress_bar is not False and not any(
        isinstance(c, LightningBar) for c in chosen
    ):
        added.append(ProgressBar())
    added += [
        NonFinite(run.on_nonfinite),
        StepClock(ranks),
        *[Balance(ranks)] * run.balance,
        StopTogether(
            timeout
        ),  # aborts NCCL, before another callback's `on_exception` reads from the device
        RunRecord(command, run.warmup_epochs, (config.best_checkpoint, config.last_checkpoint)),
        TestFigures(track=run.track_images),
        PredictionWriter(run.top_k),
    ]
    return arguments | {"callbacks": [*chosen, *added]}


def drop_callbacks(parser: LightningArgumentParser, trainer: Namespace) -> None:
    """Drop default callbacks that Lightning would reject."""
    if trainer.enable_checkpointing is False or trainer.fast_dev_run:
        parser.callback_keys = [
            key for key in parser.callback_keys if not key.endswith("_checkpoint")
        ]
    if trainer.barebones:
        parser.callback_keys = []


def patch(trainer: Trainer, run: Run, is_recorded: bool) -> Trainer:
    """Replace the Trainer's loop and, for a recorded run, its signal handlers; check what it saves."""
    if is_recorded:
        Signals.put_into(trainer)
        lightning_patches.count_epochs(trainer)
        lightning_patches.check_saving(trainer)
    if run.virtual_devices is not None:
        ShardedLoop.put_into(trainer)
        trainer.fit_loop.epoch_loop.virtual_devices = int(run.virtual_devices)  # type: ignore[attr-defined]
        if isinstance(trainer.strategy, DDP):
            trainer.strategy.keep_buffers()
    elif run.loop == "straight":
        StraightLoop.put_into(trainer)
    else:
        WindowLoop.put_into(trainer)
    return trainer

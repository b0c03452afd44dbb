"""Assembly of the Trainer: plugins, callbacks, and patches of Lightning."""

from typing import Any

from jsonargparse import Namespace
from lightning import Callback, Trainer
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from lightning.pytorch.cli import LightningArgumentParser

from app.command.checkpoint_file import CheckpointFiles
from app.command.contents import Contents
from app.command.resolved import Resolved, as_list
from app.command.run_options import is_recorded
from app.launch.cluster_environment import environment_of
from app.launch.signals import Signals, StopTogether
from app.monitor.header import Header
from app.monitor.logged_names import LoggedNames
from app.monitor.nonfinite import NonFinite
from app.monitor.progress_bar import ProgressBar
from app.monitor.rank_times import RankTimes
from app.monitor.results import EvaluationFigures, PredictionWriter
from app.monitor.run_record import RunRecord
from app.monitor.step_clock import StepClock
from app.system import lightning_patches
from app.training import DDP
from app.training.step import StraightLoop
from app.training.step_patches import WindowLoop
from app.training.virtual_devices import ShardedLoop


def trainer_arguments(config: Namespace, resolved: Resolved, command: str) -> dict[str, Any]:
    """Return the Trainer's arguments that differ from its flags: devices, plugins and callbacks.

    Args:
        config: The configuration with instantiated classes.
        resolved: The resolved configuration.
        command: The command line.
    """
    devices = resolved.trainer.devices
    if devices == "auto":
        devices = resolved.devices
    arguments = {
        "devices": devices,
        "num_nodes": resolved.nodes,
        "plugins": plugins(config, resolved),
    }
    is_exact = resolved.virtual_devices is not None and resolved.command == "fit"
    if is_exact and resolved.accelerator == "cuda":
        # because nondeterministic kernels would change the bits of the results
        arguments["deterministic"] = True
    if is_recorded(config.trainer):
        arguments |= callbacks(config, command)
    return arguments


def plugins(config: Namespace, resolved: Resolved) -> list[Any]:
    """Return the Trainer's plugins.

    Args:
        config: The configuration with instantiated classes.
        resolved: The resolved configuration.
    """
    chosen = as_list(config.trainer.plugins)
    added: list[Any] = []
    if not has(chosen, CheckpointIO) and not resolved.options.get("checkpoint_io"):
        added.append(CheckpointFiles())
    if not has(chosen, ClusterEnvironment):
        added.append(environment_of(resolved.nodes))
    return [*chosen, *added]


def has(objects: list[Any], cls: type) -> bool:
    """Return whether one of the objects is an instance of a class."""
    return any(isinstance(each, cls) for each in objects)


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
    if isinstance(trainer.logger, bool | None):
        arguments["logger"] = False  # add our loggers later, when the directory is known
    if trainer.enable_model_summary is not False and not has(chosen, ModelSummary):
        arguments["enable_model_summary"] = False
        added.append(Header())
    if trainer.enable_progress_bar is not False and not has(chosen, LightningBar):
        added.append(ProgressBar())
    added += [
        NonFinite(run.on_nonfinite, run.on_divergence),
        LoggedNames(),
        StepClock(RankTimes(timeout)),
        # aborts NCCL, before another callback's `on_exception` reads from the device
        StopTogether(timeout),
        Contents(),
        RunRecord(command, run.warmup_epochs, (config.best_checkpoint, config.last_checkpoint)),
        EvaluationFigures(track=run.track_images),
        PredictionWriter(run.top_k),
    ]
    return arguments | {"callbacks": [*chosen, *added]}


def drop_callbacks(parser: LightningArgumentParser, trainer: Namespace) -> None:
    """Drop default callbacks that Lightning would reject."""
    if trainer.enable_checkpointing is False or trainer.fast_dev_run:
        kept = {*parser.callback_keys} - {"best_checkpoint", "last_checkpoint"}
        parser.callback_keys = sorted(kept)
    if trainer.barebones:
        parser.callback_keys = []


def patch(trainer: Trainer, config: Namespace) -> None:
    """Replace the Trainer's loop and, in a recorded run, its signal and checkpoint handling."""
    run = config.run
    if is_recorded(config.trainer):
        Signals.put_into(trainer)
        lightning_patches.count_epochs(trainer)
        lightning_patches.check_saving(trainer)
    if run.virtual_devices is not None:
        ShardedLoop.put_into(trainer)
        trainer.fit_loop.epoch_loop.virtual_devices = int(run.virtual_devices)  # type: ignore[attr-defined]
        if isinstance(trainer.strategy, DDP):
            trainer.strategy.keeps_buffers = True
    elif run.loop == "straight":
        StraightLoop.put_into(trainer)
    else:
        WindowLoop.put_into(trainer)

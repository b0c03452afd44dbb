"""Functions that fill the run record from the Trainer: configuration and measurements."""

import math
import os
import statistics

import torch
from lightning import LightningModule, Trainer

from app.data.exact_loader import Exactness, order_of
from app.data.module import ImageData
from app.modules import ImageClassifier
from app.modules.networks import count_parameters, title
from app.monitor.nonfinite import NonFinite
from app.monitor.step_clock import StepClock
from app.monitor.windows import Windows
from app.record import (
    Course,
    DataSet,
    DeviceMemory,
    Hardware,
    Metrics,
    Model,
    Record,
    Throughput,
    TrainLoss,
)
from app.system.machine import hardware, peak_memory, versions
from app.training import DataParallelStrategy
from app.training.step import StraightLoop
from app.training.virtual_devices import ShardedLoop


def devices_of(trainer: Trainer) -> list[torch.device]:
    """Return the devices of this process; several only under dp."""
    if isinstance(trainer.strategy, DataParallelStrategy):
        return trainer.strategy.parallel_devices
    return [trainer.strategy.root_device]


def fill_configuration(record: Record, trainer: Trainer) -> None:
    """Fill in strategy, devices, limits, data and machine."""
    record.strategy = getattr(trainer.strategy, "strategy_name", type(trainer.strategy).__name__)
    record.devices = trainer.num_devices
    record.num_nodes = trainer.num_nodes
    loop = trainer.fit_loop.epoch_loop
    record.live = bool(getattr(loop, "live", None))
    record.world_size = trainer.world_size
    record.replicas = trainer.world_size * len(devices_of(trainer))
    record.precision = trainer.precision
    record.threads = torch.get_num_threads()
    record.max_epochs = trainer.max_epochs
    record.max_steps = trainer.max_steps
    if "PL_GLOBAL_SEED" in os.environ:
        record.seed = int(os.environ["PL_GLOBAL_SEED"])
    if isinstance(loop, ShardedLoop) and trainer.state.fn == "fit":
        record.virtual_devices = loop.virtual_devices
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, ImageData):
        place = data.source.root or getattr(data.source, "like", "")
        record.data = DataSet(
            type(data).__name__,
            data.num_classes,
            dict(data.counts),
            list(map(str, data.class_names)),
            list(data.image_shape),
            str(place),
        )
        record.placement = data.placement
        record.images_left_out = data.left_out
        record.duplicates = data.duplicates
        record.files_left_out = dict(data.files_left_out)
        record.global_batch_size = data.global_batch_size
    record.hardware = Hardware(**hardware())
    record.versions = versions()


def fill_model(record: Record, trainer: Trainer, module: LightningModule) -> None:
    """Fill in the model and how it is executed."""
    trainable = count_parameters(module, trainable=True)
    record.model = Model(type(module).__name__, count_parameters(module), trainable)
    if isinstance(module, ImageClassifier):
        record.model.name += f", {title(module.network_name)}"
        for name, value in module.executed.items():
            setattr(record, name, value)
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    record.fused = any(group.get("fused") for group in groups)
    if groups:
        # the base rate, because a warm-up starts lower
        record.lr = float(groups[0].get("initial_lr", groups[0]["lr"]))


def fill_measurements(record: Record, trainer: Trainer, windows: Windows) -> None:
    """Fill in steps, times, throughput and losses so far.

    Args:
        record: The record, with its epochs.
        trainer: The trainer.
        windows: Logging windows since training began or was resumed.
    """
    record.steps = trainer.global_step
    batches = trainer.num_training_batches
    record.steps_per_epoch = batches if batches < math.inf else None
    if windows.first_step is not None:
        seconds = windows.last_step - windows.first_step
        record.train_s = round(record.earlier_s + seconds, 3)
    if record.epochs:
        record.train_loss = TrainLoss(record.epochs[-1].train_loss)
    best = record.best_epoch
    if best is not None:
        record.validation = Metrics(best.val_loss, best.val_acc, best.val_samples)
    loop = trainer.fit_loop.epoch_loop
    record.loop_reason = loop.reason if isinstance(loop, StraightLoop) else "--run.loop lightning"
    record.loop = "lightning" if record.loop_reason else "straight"
    if isinstance(loop, ShardedLoop) and loop.sums is not None:
        record.shards = loop.sums.tree.shares
    record.course = Course(windows.course.points)
    step = None
    if windows.rates:
        rates = windows.rates
        median = statistics.median(rates)
        low = round(min(rates), 1)
        high = round(max(rates), 1)
        record.throughput = Throughput(round(median, 1), low, high, len(rates))
        step = 1000 * statistics.median(windows.samples_per_step) / median
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, NonFinite):
            record.not_finite_since = callback.since
            record.not_finite_step = callback.step
        elif isinstance(callback, Exactness):
            record.not_exact = list(callback.exceptions.values())
        elif isinstance(callback, StepClock):
            record.time_per_step = callback.time_per_step(step)
            record.ranks = callback.ranks.ranks
            record.others_cores = callback.ranks.others_cores
            record.course.memory_gib = callback.ranks.memory.points


def metrics_of(trainer: Trainer, split: str) -> Metrics:
    """Return the loss and accuracy that the model logged for a split: `train`, `val` or `test`."""
    metrics = Metrics()
    for name in ("loss", "acc"):
        value = trainer.callback_metrics.get(f"{split}_{name}")
        if value is not None:
            setattr(metrics, name, value.item())
    order = order_of(getattr(trainer, f"{split}_dataloaders", None))
    if metrics.acc is not None and order is not None:
        batches = getattr(trainer, f"num_{split}_batches")
        metrics.samples = order.start(batches[0])
    return metrics


def memory_of(trainer: Trainer) -> list[DeviceMemory]:
    """Return this process's peak memory on each of its devices."""
    rank = trainer.global_rank
    return [
        DeviceMemory(rank, str(device), **peak_memory(device)) for device in devices_of(trainer)
    ]

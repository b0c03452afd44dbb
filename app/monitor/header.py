"""Header printed before training: network, images, devices, batch, optimizer and folder."""

import inspect
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import RichModelSummary
from rich import get_console
from rich.text import Text
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from app.data.exact_loader import order_of
from app.data.image_files import EncodedSource
from app.data.module import ImageData
from app.modules import ImageClassifier
from app.modules.recipe import Recipe, rate
from app.monitor.fill import fill_configuration, fill_model
from app.monitor.loggers import trackers
from app.record import Record
from app.record.words import batch, counted, settings


class Header(RichModelSummary):
    """Callback that prints a header; with `--verbose` also Lightning's table of layers."""

    def __init__(self) -> None:
        super().__init__(max_depth=3)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fill a record before the strategy converts or shards the network."""
        if stage == "fit" and trainer.is_global_zero:
            self._record = Record()
            fill_configuration(self._record, trainer)
            fill_model(self._record, trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the header."""
        if trainer.is_global_zero:
            fill_recipe(self._record, trainer)
            for name, text in lines(trainer, self._record):
                _print(name, text)
        if "APP_DEBUG" in os.environ:
            super().on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the batch of a user's loader, which Lightning makes after the header."""
        order = order_of(trainer.train_dataloader)
        if trainer.is_global_zero and order is not None and not self._record.global_batch_size:
            self._record.global_batch_size = order.batch_size
            _print("batch", batch(self._record))


def _print(name: str, text: str) -> None:
    get_console().print(Text.assemble((f"{name:<11}", "dim"), text), soft_wrap=True)


def lines(trainer: Trainer, record: Record) -> Iterator[tuple[str, str]]:
    """Yield each line of the header as a name and a text, such as `("precision", "32-true")`.

    Args:
        trainer: A trainer that has been set up.
        record: Record of the run.
    """
    device = trainer.strategy.root_device
    name = device.type.upper()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    yield from settings(record, name)
    source = getattr(trainer.datamodule, "source", None)  # type: ignore[attr-defined]
    if isinstance(source, EncodedSource):
        yield "pixels", _pixels(source)
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        yield "length", counted(trainer.max_epochs, "epoch")
    if trainer.accumulate_grad_batches > 1:
        yield "step", f"{trainer.accumulate_grad_batches} batches"
    if trainer.logger is not None:  # not `trainer.log_dir`, which waits for all ranks
        yield "folder", str(trainer.logger.log_dir)
    for tracker in trackers(trainer.loggers):
        yield "tracked", tracker.where()


def _pixels(source: EncodedSource) -> str:
    """Format how image files become the network's input."""
    geometry = source.geometry
    mean = " ".join(f"{value:g}" for value in source.mean)
    std = " ".join(f"{value:g}" for value in source.std)
    return (
        f"{geometry.interpolation}, resized to {geometry.resize or max(geometry.size)}, cropped to "
        f"{' × '.join(map(str, geometry.size))}; mean {mean}, std {std}"
    )


def fill_recipe(record: Record, trainer: Trainer) -> None:
    """Fill in optimizers and recipe."""
    record.optimizers = []
    for optimizer in trainer.optimizers:
        text = describe(optimizer)
        for config in trainer.lr_scheduler_configs:
            if config.scheduler.optimizer is optimizer:
                text += f"; {_schedule(config.scheduler, config.interval)}"
        record.optimizers.append(text)
    record.recipe = _recipe(trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]


RECIPE = ("loss", "label_smoothing", "class_weights", "head_lr", "norm_bias_lr", "freeze", "ema")
DEFAULTS = inspect.signature(Recipe).parameters


def _recipe(model: LightningModule, data: Any) -> dict[str, str]:
    """Return the non-default settings of RECIPE, augmentation and class balancing, by flag name."""
    recipe = {}
    if isinstance(model, ImageClassifier):
        for name in RECIPE:
            value = vars(model.recipe)[name]
            if value != DEFAULTS[name].default:
                recipe[name] = value
        recipe["no_decay"] = ",".join(sorted(model.recipe.no_decay))
        recipe["views"] = model.views
    if isinstance(data, ImageData):
        if isinstance(data.source, EncodedSource) and data.source.geometry.crop != "none":
            recipe["crop"] = data.source.geometry.crop
        recipe["flip"] = "alternate" if data.alternate else data.transform.flip
        recipe["crop_padding"] = data.transform.crop_padding
        recipe["cutout"] = data.transform.cutout
        recipe["mixup"], recipe["cutmix"] = data.mixing
        recipe["augment"] = " ".join(type(op).__name__ for op in data.augment)
        recipe["balance"] = data.balance
    return {name: str(value) for name, value in recipe.items() if value}


def describe(optimizer: Optimizer) -> str:
    """Format an optimizer and its first group's settings, such as `SGD, lr 0.1, momentum 0.9`."""
    group = optimizer.param_groups[0]
    # the base rate, because a warm-up starts lower
    base = float(group.get("initial_lr", group["lr"]))
    texts = [type(optimizer).__name__, f"lr {base:g}"]
    for name in ("momentum", "betas", "weight_decay"):
        if group.get(name):
            texts.append(f"{name} {group[name]}")
    return ", ".join(texts)


def _schedule(scheduler: Any, interval: str) -> str:
    if isinstance(scheduler, LambdaLR):
        function = scheduler.lr_lambdas[0]
        if isinstance(function, partial) and function.func is rate:
            schedule, warmup, steps = function.args
            text = f"{schedule} over {steps:,} steps"
            if warmup:
                text += f", {warmup:,} of them warm-up"
            return text
    return f"{type(scheduler).__name__}, each {interval}"

"""Header printed before training: network, images, devices, batch, optimizer, folder and tracker."""

import inspect
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichModelSummary
from rich import get_console
from rich.text import Text
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from app.data.module import ImageData
from app.modules import ImageClassifier
from app.modules.networks import count_parameters, title
from app.modules.recipe import Recipe, rate
from app.monitor.loggers import trackers
from app.monitor.run_record import resolved_configuration
from app.record import Record
from app.record.words import batch, listed, threads, way_of_running


class Header(RichModelSummary):
    """Callback that prints the header of a training; with `--verbose` also Lightning's table of layers."""

    def __init__(self) -> None:
        super().__init__(max_depth=3)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Store the network's description before the strategy moves, converts or shards the network."""
        network: nn.Module = pl_module
        name = type(pl_module).__name__
        if isinstance(pl_module, ImageClassifier):
            network = pl_module.network
            name = title(pl_module.network_name)
        self._network = f"{name}, {counted(network)}"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the header."""
        if trainer.is_global_zero:
            for name, text in lines(trainer, self._network):
                get_console().print(Text.assemble((f"{name:<11}", "dim"), text), soft_wrap=True)
        if "APP_DEBUG" in os.environ:
            super().on_fit_start(trainer, pl_module)


def counted(network: nn.Module) -> str:
    """Format a network's number of parameters, such as `1,000 parameters, 10 of them trainable`."""
    total = count_parameters(network)
    trainable = count_parameters(network, trainable=True)
    return f"{total:,} parameters" + (
        f", {trainable:,} of them trainable" if trainable < total else ""
    )


def lines(trainer: Trainer, network: str) -> Iterator[tuple[str, str]]:
    """Yield each line of the header as a name and a text, such as `("precision", "32-true")`.

    Args:
        trainer: A trainer that has been set up.
        network: Description of the network.
    """
    record = Record(**resolved_configuration(trainer))
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, ImageData):
        yield "network", network
    else:
        yield (
            "network",
            f"{network}, {' × '.join(map(str, data.image_shape))} → {data.num_classes} classes",
        )
        place = getattr(data.source, "root", None) or getattr(data.source, "like", "")
        counts = [
            f"{data.counts[name]:,} to {verb}"
            for name, verb in VERBS.items()
            if data.counts.get(name)
        ]
        yield "images", f"{type(data).__name__} ({place}): {', '.join(counts)}"
        yield "classes", listed(data.class_names)
    device = trainer.strategy.root_device
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else device.type.upper()
    yield "runs on", way_of_running(record, name) + ("" if cuda else f", {threads(record)}")
    if record.global_batch_size is not None:
        window = trainer.accumulate_grad_batches
        yield "batch", batch(record) + (f", {window} of them for each step" if window > 1 else "")
    for index, optimizer in enumerate(trainer.optimizers):
        schedules = [
            config
            for config in trainer.lr_scheduler_configs
            if config.scheduler.optimizer is optimizer
        ]
        then = "".join(f"; {_schedule(config.scheduler, config.interval)}" for config in schedules)
        yield "optimizer" if index == 0 else "", describe(optimizer) + then
    chosen = ", ".join(
        f"{name} {value}" for name, value in _chosen(trainer.lightning_module, data).items()
    )
    if chosen:
        yield "recipe", chosen
    yield "precision", str(record.precision)
    if trainer.logger is not None:  # not `trainer.log_dir`, which waits for all ranks
        yield "folder", str(trainer.logger.log_dir)
    for tracker in trackers(trainer.loggers):
        yield "tracked", tracker.where()


def _chosen(model: LightningModule, data: Any) -> dict[str, Any]:
    """Return the non-default settings of RECIPE, augmentation and class balancing, by flag name."""
    settings: dict[str, Any] = {}
    if isinstance(model, ImageClassifier):
        usual = {
            name: parameter.default
            for name, parameter in inspect.signature(Recipe).parameters.items()
        }
        recipe = vars(model.recipe) | {"no_decay": ",".join(sorted(model.recipe.no_decay)) or None}
        settings = {name: recipe[name] for name in RECIPE if recipe[name] != usual[name]}
        settings |= {"views": model.views} if model.views else {}
    if isinstance(data, ImageData):
        transform, (mixup, cutmix) = data.transform, data.mixing
        flip = "alternate" if data.alternate else transform.flip
        values = {"flip": flip, "crop_padding": transform.crop_padding, "cutout": transform.cutout}
        values |= {
            "mixup": mixup,
            "cutmix": cutmix,
            "augment": " ".join(type(op).__name__ for op in data.augment),
        }
        settings |= {
            name: value for name, value in (values | {"balance": data.balance}).items() if value
        }
    return settings


RECIPE = (
    "loss",
    "label_smoothing",
    "class_weights",
    "no_decay",
    "head_lr",
    "norm_bias_lr",
    "freeze",
    "ema",
)
VERBS = {"train": "train", "val": "validate"}
SHOWN = ("lr", "momentum", "betas", "weight_decay")  # optimizer settings to print, unless zero


def describe(optimizer: Optimizer) -> str:
    """Format an optimizer's class and its first group's settings, such as `SGD, lr 0.1, momentum 0.9`."""
    group = optimizer.param_groups[0]
    group = {
        **group,
        "lr": group.get("initial_lr", group.get("lr")),
    }  # the base rate, because a warm-up starts lower
    shown = [f"{name} {_number(group[name])}" for name in SHOWN if group.get(name)]
    return ", ".join([type(optimizer).__name__, *shown])


def _schedule(scheduler: Any, interval: str) -> str:
    function = scheduler.lr_lambdas[0] if isinstance(scheduler, LambdaLR) else None
    if not isinstance(function, partial) or function.func is not rate:
        return f"{type(scheduler).__name__}, each {interval}"
    schedule, warmup, steps = function.args
    return f"{schedule} over {steps:,} steps" + f", {warmup:,} of them warm-up" * bool(warmup)


def _number(value: Any) -> str:
    return (
        " ".join(f"{float(item):g}" for item in value)
        if isinstance(value, list | tuple)
        else f"{float(value):g}"
    )

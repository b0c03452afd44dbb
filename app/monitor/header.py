"""Says what a training is before it begins: network, images, devices, batch, optimizer, and where to look at it."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichModelSummary
from rich import get_console
from rich.text import Text
from torch import nn
from torch.optim import Optimizer

from app.data.module import ImageData
from app.modules import ImageClassifier
from app.monitor.loggers import Tracker
from app.monitor.run_record import resolved_configuration


class Header(RichModelSummary):
    """Prints a few lines on a training; with `--verbose` Lightning's table of layers, too."""

    def __init__(self) -> None:
        super().__init__(max_depth=3)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look at the network before the strategy moves, converts or shards it."""
        network = pl_module.network if isinstance(pl_module, ImageClassifier) else pl_module
        self._network = f"{type(network).__name__}, {counted(network)}"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print them."""
        if trainer.is_global_zero:
            for name, text in lines(trainer, self._network):
                get_console().print(Text.assemble((f"{name:<11}", "dim"), text), soft_wrap=True)
        if "APP_DEBUG" in os.environ:
            super().on_fit_start(trainer, pl_module)


def counted(network: nn.Module) -> str:
    """How many parameters a network has, and how many of them learn."""
    known = [each for each in network.parameters() if not isinstance(each, nn.UninitializedParameter)]
    total, learn = (sum(each.numel() for each in known if each.requires_grad or not only) for only in (False, True))
    return f"{total:,} parameters" + (f", of which {learn:,} learn" if learn < total else "")


def lines(trainer: Trainer, network: str) -> Iterator[tuple[str, str]]:
    """What is to be known of a training: a name and a text for each line.

    Args:
        trainer: With everything set up.
        network: What is to be said of the network.
    """
    settled, data = resolved_configuration(trainer), getattr(trainer, "datamodule", None)
    if not isinstance(data, ImageData):
        yield "network", network
    else:
        yield "network", f"{network}, {' × '.join(map(str, data.image_shape))} → {data.num_classes} classes"
        place = getattr(data.source, "root", None) or getattr(data.source, "like", "")
        counts = [f"{data.counts[name]:,} to {verb}" for name, verb in VERBS.items() if data.counts.get(name)]
        yield "images", f"{type(data).__name__} ({place}): {', '.join(counts)}"
    yield "runs on", ways(settled, trainer.strategy.root_device)
    size, replicas = settled["global_batch_size"], settled["replicas"]
    if size is not None:
        share = f" = {replicas} × {size / replicas:g}" if replicas > 1 else ""
        parts = f", {settled['micro_batch']:,} at a time" if settled["micro_batch"] else ""
        window = trainer.accumulate_grad_batches
        yield "batch", f"{size:,}{share}{parts}{f', {window} of them for each step' if window > 1 else ''}"
    for index, optimizer in enumerate(trainer.optimizers):
        schedules = [each for each in trainer.lr_scheduler_configs if each.scheduler.optimizer is optimizer]
        then = "".join(f"; {type(each.scheduler).__name__}, each {each.interval}" for each in schedules)
        yield "optimizer" if index == 0 else "", described(optimizer) + then
    yield "precision", settled["precision"]
    if trainer.logger is not None:  # `trainer.log_dir` is collective
        yield "folder", str(trainer.logger.log_dir)
    for logger in trainer.loggers:
        if isinstance(logger, Tracker):
            yield "tracked", logger.live()


VERBS = {"train": "train", "val": "validate"}
SHOWN = ("lr", "momentum", "betas", "weight_decay")  # of an optimizer, where they are not zero


def described(optimizer: Optimizer) -> str:
    """Class and settings of an optimizer's first group."""
    group = optimizer.param_groups[0]
    shown = [f"{name} {_number(group[name])}" for name in SHOWN if group.get(name)]
    return ", ".join([type(optimizer).__name__, *shown])


def _number(value: Any) -> str:
    return " ".join(f"{float(each):g}" for each in value) if isinstance(value, list | tuple) else f"{float(value):g}"


def ways(settled: dict[str, Any], device: torch.device) -> str:
    """How a run is spread over devices: `ddp, 2 × CPU, 1 thread each`.

    Args:
        settled: The resolved configuration.
        device: Of this rank.
    """
    cuda, replicas, nodes = device.type == "cuda", settled["replicas"], settled["num_nodes"]
    name = torch.cuda.get_device_name(device) if cuda else device.type.upper()
    threads = settled["threads"]
    each = " each" if settled["world_size"] > 1 else ""
    return ", ".join(
        [
            *([settled["strategy"]] if replicas > 1 else []),
            f"{replicas} × {name}" if replicas > 1 else f"one {name}",
            *([f"on {nodes} nodes"] if nodes > 1 else []),
            *([] if cuda else [f"{threads} thread{'s' * (threads > 1)}{each}"]),
        ]
    )

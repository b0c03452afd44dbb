"""Says what a training is before it begins: network, images, devices, batch, optimizer, and where to look at it."""

import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichModelSummary
from lightning.pytorch.utilities.model_summary import ModelSummary
from rich import get_console
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor, nn
from torch.optim import Optimizer

from app.data.module import ImageData
from app.modules import ImageClassifier
from app.monitor.loggers import Tracker
from app.monitor.run_record import resolved_configuration

SCREEN = 20  # layers that fit on one


class Header(RichModelSummary):
    """Prints a few lines on a training; with `--verbose` the layers of its network, too."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look at the network before the strategy moves, converts or shards it."""
        data = getattr(trainer, "datamodule", None)
        own = isinstance(pl_module, ImageClassifier)
        network = pl_module.network if isinstance(pl_module, ImageClassifier) else pl_module
        self._network = f"{type(network).__name__}, {counted(network)}"
        self._layers: Table | None = None
        self._is_verbose = stage == "fit" and "APP_DEBUG" in os.environ
        if self._is_verbose and own and isinstance(data, ImageData):
            try:
                self._layers = layers(network, data.image_shape)
            except (RuntimeError, NotImplementedError):  # somebody's own network, whose forward reads the pixels
                self._layers = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print them."""
        if trainer.is_global_zero:
            for name, text in lines(trainer, self._network):
                get_console().print(Text.assemble((f"{name:<11}", "dim"), text), soft_wrap=True)
            if self._layers is not None:
                get_console().print(self._layers)
        if self._is_verbose and self._layers is None:
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
        yield "network", f"{network}, {_text([1, *data.image_shape])} → {data.num_classes} classes"
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


def layers(network: nn.Module, image_shape: Sequence[int]) -> Table:
    """List the layers of a network; where they do not fit on a screen, those of a block together.

    Nothing is computed: neither the network nor the random numbers are touched.

    Args:
        network: Maps images to scores.
        image_shape: Of one image, (C, H, W).
    """
    summary = ModelSummary(_Shapes(network, image_shape), max_depth=-1)
    rows = {
        name: (name.removeprefix("network."), kind, _text(shape), f"{count:,}" if count else "")
        for name, kind, shape, count in zip(
            summary.layer_names, summary.layer_types, summary.out_sizes, summary.param_nums, strict=True
        )
    }
    innermost = [name for name in rows if not any(other.startswith(f"{name}.") for other in rows)]
    for depth in (4, 3, 2):  # the network itself is 1
        shown = list(dict.fromkeys(".".join(name.split(".")[:depth]) for name in innermost))
        if len(shown) <= SCREEN:
            break
    table = Table("layer", "type", Column("output", justify="right"), Column("parameters", justify="right"))
    table.add_row("", "image", _text([1, *image_shape]), "")
    for name in shown:
        table.add_row(*rows[name])
    table.add_section()
    work, count, trained = summary.total_flops / 1e6, summary.total_parameters, summary.trainable_parameters
    table.add_row("", type(network).__name__, f"{work:,.1f} MFLOP", f"{count:,}")
    if trained < count:
        table.add_row("", "", "trained", f"{trained:,}")
    return table


class _Shapes(LightningModule):
    """A copy of a network that has shapes but no numbers, in the form that `ModelSummary` takes."""

    def __init__(self, network: nn.Module, image_shape: Sequence[int]) -> None:
        super().__init__()
        tensors = [*network.parameters(), *network.buffers()]
        empty = {id(t): torch.empty_like(t, device="meta", requires_grad=t.requires_grad) for t in tensors}
        self.network = copy.deepcopy(network, empty)
        dtype = tensors[0].dtype if tensors else None
        self.example_input_array = torch.empty(1, *image_shape, dtype=dtype, device="meta")
        self.to("meta")

    def forward(self, images: Tensor) -> Any:
        """Score images: (1, C, H, W) -> (1, classes)."""
        return self.network(images)


def _text(shape: Any) -> str:
    """Write the shape for one image, `6 × 28 × 28`; `?` where a layer is not used."""
    return " × ".join(map(str, shape[1:])) if isinstance(shape, list) else str(shape)

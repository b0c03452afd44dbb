"""Prints the layers of the network before a run, a line for each epoch, and a report at the end."""

import copy
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichModelSummary
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_summary import ModelSummary
from rich import get_console
from rich.table import Column, Table
from torch import Tensor, nn

from app.data.module import ImageData
from app.launch.cluster_environment import OWN_AGENT
from app.launch.process import trust_flags
from app.modules import ImageClassifier
from app.monitor.loggers import Tracker
from app.monitor.rank_times import slow_ranks

SCREEN = 20  # layers that fit on one


class NetworkSummary(RichModelSummary):
    """Shows the layers of the network with their output shapes; of somebody's own module, what Lightning shows."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Show the network before the strategy moves, converts or shards it."""
        data = getattr(trainer, "datamodule", None)
        self._shown = False
        if isinstance(pl_module, ImageClassifier) and isinstance(data, ImageData):
            self._shown = True
            if stage == "fit" and trainer.is_global_zero:
                try:
                    get_console().print(layers(pl_module.network, data.image_shape))
                except (RuntimeError, NotImplementedError):  # somebody's own network, whose forward reads the pixels
                    self._shown = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave any other module to Lightning."""
        if not self._shown:
            super().on_fit_start(trainer, pl_module)


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


def report(record: dict[str, Any], loggers: Iterable[Logger], fitted: bool, testable: bool = True) -> Iterator[str]:
    """Tell how a run went, where its files are and what to try next, line by line.

    Args:
        record: The run record.
        loggers: The run's loggers.
        fitted: Whether it was a training.
        testable: Whether there are images to test on.
    """
    directory = record["run_dir"]
    losses, speed, test = record.get("train_loss"), record["throughput"], record["test"]
    epochs, checkpoints = record["epochs"], record["checkpoint"] or {}
    accuracies = [row["val_acc"] for row in epochs if row["val_acc"] is not None]
    if record["status"] != "completed":
        yield f"{record['status']:<15} {record['error']}"
    if losses and None not in losses.values():
        steps = " -> ".join(f"{loss:.4f}" for loss in losses.values())
        yield f"training loss   {steps}  (first, middle, last of {len(epochs)} epochs)"
    elif record.get("not_finite_since") is not None:
        yield f"training loss   not finite since epoch {record['not_finite_since'] + 1}: the run has diverged"
    if accuracies:
        yield f"validation      best accuracy {max(accuracies):.2%}"
    if test:
        tested = Path(record["tested"]).name if record["tested"] else "last weights"
        yield f"test            {_figures(test)}  ({tested})"
    if record.get("validation"):
        yield f"validation      {_figures(record['validation'])}"
    if fitted and record["train_s"] is not None:
        rate = f", {speed['median']:,.0f} samples/s (median of {speed['n']} windows)" if speed["median"] else ""
        yield f"time            {record['train_s']:.1f} s training, {record['setup_s']:.1f} s set-up{rate}"
        for slow in slow_ranks(record["ranks"]).values():
            yield f"slow            {slow}: the others wait for it in every step"
    kept = sorted(path.name for path in Path(directory).iterdir() if path.name != "wandb")
    yield f"files           {directory}: {', '.join(kept)}"
    for logger in loggers:
        if isinstance(logger, Tracker):
            yield f"tracked         {logger.where()}"
    if fitted and checkpoints.get("last"):
        again = shlex.join([*trust_flags(), "--config", f"{directory}/config.yaml"])
        alone = record["num_nodes"] == 1 and all(launcher.startswith(OWN_AGENT) for launcher in record["launchers"])
        resume = f"python -m app fit {again}" if alone else "the same command, with"
        resume += f" --ckpt_path {checkpoints['last']}"
        if not finished(record):
            yield f"go on           {resume}"
            return
        if checkpoints["best"]:
            command = "predict" if test else "test" if testable else "validate"
            here = "" if alone else " --trainer.num_nodes 1 --trainer.strategy auto --trainer.devices 1"
            yield f"use it          python -m app {command} {again}{here} --ckpt_path {checkpoints['best']}"
        by_steps = 0 <= record["max_steps"] <= record["steps"]
        more = f"--trainer.max_steps {2 * record['steps']}" if by_steps else f"--trainer.max_epochs {2 * len(epochs)}"
        yield f"train longer    {resume} {more}"
        if alone:
            other = "ddp" if record["strategy"] == "dp" else "dp"
            yield f"other ways      python -m app fit {again} --trainer.strategy {other} --trainer.devices 2"


def finished(record: dict[str, Any]) -> bool:
    """Decide whether a training has reached the epochs or steps that were asked for."""
    epochs = max((row["epoch"] + 1 for row in record["epochs"] if row["whole"]), default=0)
    limits = ((epochs, record["max_epochs"]), (record["steps"], record["max_steps"]))
    return any(limit is not None and 0 <= limit <= reached for reached, limit in limits)


def epoch_line(row: dict[str, Any], of: int | None, metrics: Mapping[str, Any], validated: bool) -> str:
    """Write a line of less than 100 columns on an epoch: its metrics, with those of validation if any, rate and time.

    Args:
        row: The epoch's row of the run record.
        of: Number of epochs, where it is known.
        metrics: Everything logged, by name.
        validated: Whether the epoch was validated.
    """
    left_out = re.compile(r".*_step|lr-.*|train_acc" + ("" if validated else "|val.*"))
    figures = [f"{name} {float(value):.4f}" for name, value in metrics.items() if not left_out.fullmatch(name)]
    figures += [f"lr {row['lr']:.3g}"] if row["lr"] is not None else []
    figures += [f"{row['samples_per_s']:,.0f} samples/s"] if row["samples_per_s"] else []
    total = f"/{of}" if of and of > 0 else ""
    part = "" if row["whole"] else ", in part"
    return f"epoch {row['epoch'] + 1}{total}{part}: {', '.join(figures)}, {row['seconds']:.1f} s"


def _figures(measured: Mapping[str, float | None]) -> str:
    """Write accuracy and loss where they were logged; the record has null where a loss was not finite."""
    said = [f"accuracy {measured['acc']:.2%}"] if "acc" in measured else []
    if "loss" in measured:
        loss = measured["loss"]
        said.append("loss not finite" if loss is None else f"loss {loss:.4f}")
    return ", ".join(said)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)

"""Page `report.html` of a training: result, curves, confusion matrix, and bottleneck."""

import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from torch import Tensor

from app.errors import one_line
from app.monitor.rank_times import NAMES, slow_ranks
from app.record import PHASES, Record
from app.record.words import (
    batch,
    bottleneck,
    duration,
    listed,
    percent,
    taken_cores,
    threads,
    way_of_running,
)
from app.system import page
from app.system.files import read_csv, whole, write_text
from app.system.page import Section, code, draw, draw_line, label_lines, plain, png, short, table

SHOWN = 5  # number of rows in each table of mistakes
# the confusion matrix shows counts up to this number of classes, and the step chart is drawn up to
# this number of ranks
CELLS = 20
PHASE_COLOURS = {
    **dict.fromkeys(("forward_backward", "compute"), page.BLUE),
    **dict.fromkeys(("communication", "wait"), page.ORANGE),
    **{"data": page.GREEN, "optimizer": page.PURPLE, "rest": page.GREY},
}
BLUES = LinearSegmentedColormap.from_list(
    "blues", [(0.18, 0.38, 0.79, alpha) for alpha in (0.0, 1.0)]
)


def leave_report(directory: str, record: Record | None = None) -> None:
    """Write a run's report, if the run has a record. Print an error instead of raising it, because training is over.

    Args:
        directory: Directory of the run.
        record: The run record, or None to read it from its file.
    """
    path = Path(directory, "report.html")
    if not path.with_name("run.json").exists():
        return
    try:
        write_text(path, make_report(path.parent, record))
    except Exception as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else f"{type(error).__name__}: {one_line(str(error))}"
        )
        print(f"{path} cannot be written ({why})", file=sys.stderr, flush=True)


def make_report(folder: Path, record: Record | None = None) -> str:
    """Return a run's report as HTML, made from the run record and the other files in the run's folder.

    Raises:
        ValueError: When the run record is unreadable.
        OSError: When another file is unreadable.
    """
    record = record or Record.load(folder / "run.json")
    figures: dict[str, Figure | bytes] = {}
    written = datetime.fromtimestamp((folder / "run.json").stat().st_mtime).strftime(
        "%Y-%m-%d %H:%M"
    )
    place = f"{plain(folder.parent.name)}/{plain(folder.name)}, {written}"
    error = f"> {plain(record.error)}\n\n" if record.error else ""
    lead = f"{error}{place}\n\n{table(['', ''], _facts(record), words=(0, 1))}"
    sections = [
        Section("Learning", _learning(record, read_metrics(folder / "metrics.csv"), figures)),
        Section("What is confused", _mistakes(folder, figures)),
        Section("What limited the run", _speed(record, figures)),
        Section("The command", code(str(record.command))),
    ]
    return page.page(headline(record), lead, sections, figures)


# -- text of the report
# -----------------------------------------------------------------------------------------------


def headline(record: Record) -> str:
    """Return a one-line summary of a training."""
    epochs = record.epochs
    if record.status == "failed":
        where = f"in epoch {len(epochs) + 1}" if record.steps or epochs else "before the first step"
        return f"Failed {where}: {one_line(str(record.error))[:120]}"
    count = sum(row.whole for row in epochs)
    by_steps = not count or 0 <= (record.max_steps or -1) <= record.steps
    after = f"{record.steps:,} steps" if by_steps else f"{count} epoch{'s' * (count != 1)}"
    if record.status == "interrupted" and not record.finished:
        after += f", interrupted {record.error}"
    images = (
        {name: f"{number:,} " for name, number in record.data.images.items() if number}
        if record.data
        else {}
    )
    validated = [row.val_acc for row in epochs if row.val_acc is not None]
    result = "Trained"
    if record.test and record.test.acc is not None:
        result = f"{percent(record.test.acc)} on {images.get('test', '')}test images"
    elif validated:
        result = f"{percent(validated[-1])} on {images.get('val', '')}validation images"
    elif epochs and epochs[-1].train_loss is not None:
        result = f"Training loss {epochs[-1].train_loss:.4g}"
    return f"{result} after {after} ({way_of_running(record)})"


def _facts(record: Record) -> list[tuple[str, str]]:
    """Return names and texts of the recorded settings and hardware."""
    model = record.model
    data = record.data
    machine = record.hardware
    trained = record.train_s
    setup = record.setup_s
    kinds = {"train": "training", "val": "validation", "test": "test"}
    counts = (
        [f"{data.images[name]:,} {kind}" for name, kind in kinds.items() if data.images.get(name)]
        if data
        else []
    )
    facts = {
        "network": model and f"{model.name}, {model.parameters:,} parameters",
        "images": data and f"{data.name}: {', '.join(counts)}; {data.classes} classes",
        "classes": data and listed(data.class_names),
        "way of running": record.strategy and f"{way_of_running(record)}, {threads(record)}",
        "batch": record.global_batch_size and batch(record),
        "precision": record.precision,
        "time": setup
        and trained is not None
        and f"{duration(trained)} of training, {duration(setup)} of set-up",
        "resumed from": record.resumed_from,
        "hardware": machine and "; ".join([f"{machine.cpu}, {machine.cores} cores", *machine.gpus]),
        "versions": ", ".join(
            f"{name} {version}" for name, version in record.versions.items() if version
        ),
    }
    return [(name, str(text)) for name, text in facts.items() if text]


# -- learning
# ---------------------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the rows of metrics.csv, and drop their empty cells; return an empty list if the file is missing."""
    if not path.exists():
        return []
    columns, *rows = read_csv(path) or [[]]
    return [
        {name: float(value) for name, value in zip(columns, row, strict=False) if value}
        for row in rows
    ]


def _learning(
    record: Record, metrics: Sequence[dict[str, float]], figures: dict[str, Figure | bytes]
) -> str:
    epochs = record.epochs
    # optimizer steps per epoch, from the rows logged at epoch ends, because record.steps_per_epoch
    # counts batches
    ends = [
        (row["step"] + 1) / (row["epoch"] + 1)
        for row in metrics
        if "train_loss" in row or "val_loss" in row
    ]
    length = ends[-1] if ends else record.steps_per_epoch or 1

    def by_epoch(name: str) -> np.ndarray:  # (2, epochs)
        points = np.array([(row.epoch + 1, getattr(row, name)) for row in epochs], float).reshape(
            -1, 2
        )
        return points[np.isfinite(points[:, 1])].T

    def by_step(name: str) -> np.ndarray:  # (2, steps)
        return (
            np.array([((row["step"] + 1) / length, row[name]) for row in metrics if name in row])
            .reshape(-1, 2)
            .T
        )

    losses = {"training": by_epoch("train_loss"), "validation": by_epoch("val_loss")}
    accuracies = {"training": by_step("train_acc"), "validation": by_epoch("val_acc")}
    windows = by_step("train_loss_step")
    logged = next((name for row in metrics for name in row if name.startswith("lr-")), None)
    rates = by_step(logged) if logged else by_epoch("lr")
    shown = []

    def against_epochs(axes: Axes) -> None:
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=len(epochs) > 1))

    def loss(axes: Axes) -> None:
        against_epochs(axes)
        axes.plot(*windows, color=page.BLUE, alpha=0.35, linewidth=1)
        _curves(axes, losses)

    def accuracy(axes: Axes) -> None:
        against_epochs(axes)
        _curves(axes, accuracies)
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=None))

    def rate(axes: Axes) -> None:
        against_epochs(axes)
        end = max(len(epochs), rates[0][-1])
        axes.plot(
            [*rates[0], end], [*rates[1], rates[1][-1]], color=page.GREY, drawstyle="steps-post"
        )
        axes.set_ylim(0, 1.2 * rates[1].max() or 1)

    if windows.size or any(line.size for line in losses.values()):
        figures["loss"] = draw_line(loss)
        faint = "; faint: each logging window" * bool(windows.size)
        shown.append(f'![Training and validation loss against epochs](loss "Loss{faint}")')
    if any(line.size for line in accuracies.values()):
        figures["accuracy"] = draw_line(accuracy)
        shown.append('![Training and validation accuracy against epochs](accuracy "Accuracy, %")')
    if shown and rates.size and np.ptp(rates[1]):
        figures["rate"] = draw_line(rate, height=1.6)
        shown.append('![Learning rate against epochs](rate "Learning rate")')
    elif shown and rates.size:
        shown.append(f"\nThe learning rate was {rates[1][0]:g} throughout.")
    return "\n".join(shown) or "No loss was logged as train_loss or val_loss."


def _curves(axes: Axes, lines: dict[str, np.ndarray]) -> None:
    coloured = zip(lines.items(), page.COLOURS, strict=False)
    drawn = [(name, line, colour) for (name, line), colour in coloured if line.size]
    for _, line, colour in drawn:
        axes.plot(*line, color=colour, marker="o" if len(line[0]) < 30 else None, markersize=3)
    axes.grid(axis="y")
    axes.margins(x=0.02)
    label_lines(axes, [(line[1][-1], name, colour) for name, line, colour in drawn])


# -- confusion matrix
# -------------------------------------------------------------------------------------------------


def paint_confusion(axes: Axes, counts: np.ndarray, names: Sequence[str]) -> None:
    """Draw a confusion matrix. A cell's shade is its share of the images with the row's label.

    Args:
        axes: Axes to draw on.
        counts: Numbers of images, int (labels, predictions).
        names: Names of the classes.
    """
    total = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(total, 1)
    axes.imshow(shares, cmap=BLUES, vmin=0, vmax=1, interpolation="none", aspect="auto")
    cell = 72 * 0.6 * axes.figure.get_figwidth() / len(names)  # type: ignore[union-attr]  # points
    size = min(10.0, max(0.75 * cell, 6.0))
    step = math.ceil(6 / cell)
    labels = [short(name, 16) for name in names[::step]]
    axes.set_xticks(
        range(0, len(names), step),
        labels,
        rotation=45,
        ha="right",
        rotation_mode="anchor",
        fontsize=size,
    )
    axes.set_yticks(range(0, len(names), step), labels, fontsize=size)
    axes.set(xlabel="predicted", ylabel="label")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if len(names) > CELLS:
        return
    figures = min(size, 1.4 * cell / len(str(counts.max())))
    for row, column in (
        zip(*counts.nonzero(), strict=True) if figures >= 5 else ()
    ):  # smaller ones cannot be read
        colour = "white" if shares[row, column] > 0.5 else page.INK
        axes.text(
            column,
            row,
            f"{counts[row, column]}",
            ha="center",
            va="center",
            color=colour,
            fontsize=figures,
        )
    for row in range(len(names)):
        recall = f"{shares[row, row]:.0%}" if total[row, 0] else "—"
        axes.text(len(names) - 0.3, row, recall, va="center", fontsize=size)
    axes.text(len(names) - 0.3, -0.8, "recall", va="center", fontsize=size)


def draw_confusion_matrix(matrix: Tensor, names: list[str], path: Path) -> None:
    """Draw a confusion matrix, int (labels, predictions), as a PNG file."""
    side = min(max(5.0, 0.7 * len(names)), 20.0)  # inches
    title = "Confusion matrix: label against prediction"
    with whole(path) as file:
        file.write(
            png(draw(lambda axes: paint_confusion(axes, matrix.numpy(), names), side, side, title))
        )


def draw_images(rows: Sequence[tuple[Tensor, str]]) -> Figure:
    """Draw a grid of images (C, H, W) with captions of two lines.

    An image with 2 or more than 3 channels is drawn in grey, from its first channel.
    """
    columns, width, height, side = (
        5,
        1.8,
        2.1,
        1.6,
    )  # in inches: width and height of a cell, longer side of an image
    lines = max(-(-len(rows) // columns), 1)
    figure = Figure(figsize=(columns * width, lines * height))
    axes = figure.add_axes((0, 0, 1, 1))  # one axes for all images, because 25 axes take a second
    axes.axis("off")
    for cell, (image, caption) in enumerate(rows):
        image = image if len(image) in (1, 3) else image[:1]
        if image.is_floating_point():  # rescale normalised pixels to 0…1
            image = image.nan_to_num(0.0, 0.0, 0.0)
            image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-9)
        centre = (cell % columns + 0.5) * width
        bottom = (lines - cell // columns - 1) * height + 0.05
        high, wide = (side * length / max(image.shape[1:]) for length in image.shape[1:])
        pixels = image.expand(3, -1, -1).permute(1, 2, 0)
        axes.imshow(pixels, extent=(centre - wide / 2, centre + wide / 2, bottom, bottom + high))
        # a grey that is readable on paper and on a dark screen
        axes.text(
            centre,
            bottom + high + 0.05,
            caption,
            fontsize=8,
            color="#767676",
            ha="center",
            va="bottom",
        )
    axes.set(xlim=(0, columns * width), ylim=(0, lines * height))
    return figure


def _mistakes(folder: Path, figures: dict[str, Figure | bytes]) -> str:
    path = folder / "confusion_matrix.csv"
    if not path.exists():  # the run was not tested
        return ""
    (_, *names), *rows = read_csv(path)
    counts = np.array([row[1:] for row in rows], int)  # (labels, predictions)
    images = counts.sum(1)
    recall = np.where(images > 0, counts.diagonal() / np.maximum(images, 1), np.inf)
    wrong = counts - np.diag(counts.diagonal())
    blocks = []
    if wrong.any():
        least = [
            (names[i], percent(recall[i]), f"{images[i]:,}")
            for i in recall.argsort(kind="stable")
            if images[i]
        ]
        pairs = [
            divmod(int(place), len(names))
            for place in (-wrong).argsort(axis=None, kind="stable")[:SHOWN]
        ]
        most = [(names[i], names[j], f"{wrong[i, j]:,}") for i, j in pairs if wrong[i, j]]
        blocks.append(table(["least recognised", "recall", "images"], least[:SHOWN]))
        blocks.append(table(["most confused", "predicted as", "images"], most, words=(0, 1)))
    figures["confusion"] = draw(lambda axes: paint_confusion(axes, counts, names), 5.0, 4.6)
    blocks.append(
        '![Counts of label against prediction](confusion "Confusion matrix: label against prediction")'
    )
    picture = folder / "most_wrong.png"
    if wrong.any() and picture.is_file():
        figures["most_wrong"] = picture.read_bytes()
        blocks.append(
            '![Test images, each with its label and its prediction](most_wrong "Most confidently wrong")'
        )
    return "\n\n".join(blocks)


# -- bottleneck
# -------------------------------------------------------------------------------------------------------


def _speed(record: Record, figures: dict[str, Figure | bytes]) -> str:
    times = record.time_per_step
    ranks = record.ranks
    median = record.throughput.median
    rates = np.array(record.course.samples_per_s)
    memory = np.array(record.course.memory_gib)
    blocks = [
        f"**{plain(line)}**: the others wait for it in every step."
        for line in slow_ranks(ranks).values()
    ]
    shown = []

    def draw_rates(axes: Axes) -> None:
        _over_time(axes, rates)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if median:
            axes.axhline(median, color=page.ORANGE, linewidth=1)
            label_lines(axes, [(median, f"median\n{median:,.0f}", page.ORANGE)])

    def draw_memory(axes: Axes) -> None:
        _over_time(axes, memory)
        largest = memory[-1, 1:].max()
        label_lines(
            axes,
            [
                (
                    largest,
                    f"{'largest' if memory.shape[1] > 2 else 'rank 0'}:\n{largest:.2f}",
                    page.BLUE,
                )
            ],
        )

    if rates.size:
        figures["speed"] = draw_line(draw_rates)
        shown.append(
            '![Samples/s of each logging window, over time](speed "Samples/s of each logging window")'
        )
    if memory.size:
        figures["memory"] = draw_line(draw_memory)
        shown.append('![Memory of each rank, over time](memory "Memory of each rank, GiB")')
    if times and times.step:
        taken = taken_cores(record.others_cores, record.hardware)
        limit, remedy = bottleneck(
            vars(times), record.accelerator != "cpu", record.placement, taken
        )
        blocks.append(f"A step takes {duration(times.step / 1000)}. **{limit}.** Try {remedy}.")
        figures["step"] = draw(lambda axes: stacked_bars(axes, [""], PHASES, [times]), height=1.6)
        shown.append(
            '![Milliseconds of each part of a step](step "Where the time of a step goes, on rank zero")'
        )
    if 1 < len(ranks) <= CELLS:
        labels = [f"rank {row.rank}" for row in ranks]
        height = 1.1 + 0.28 * len(ranks)
        figures["ranks"] = draw(
            lambda axes: stacked_bars(axes, labels, NAMES, ranks), height=height
        )
        shown.append(
            '![Milliseconds of a step on each rank](ranks "A step on each rank: wait is for the others")'
        )
    return "\n\n".join(filter(None, [*blocks, "\n".join(shown)]))


def _over_time(axes: Axes, points: np.ndarray) -> None:
    """Plot lines over time.

    Args:
        axes: Axes to draw on.
        points: Array (points, 1 + lines). The first column holds seconds, and each other column the
            values of a line.
    """
    axes.plot(points[:, 0], points[:, 1:], color=page.BLUE)
    axes.set_xlabel("seconds of training")
    axes.set_ylim(0, 1.1 * axes.dataLim.ymax or 1)
    axes.grid(axis="y")


def stacked_bars(
    axes: Axes, labels: Sequence[str], phases: Sequence[str], rows: Sequence[Any]
) -> None:
    """Draw a stacked bar of phases in milliseconds for each row."""
    times = np.array([[getattr(row, phase) for row in rows] for phase in phases])  # (phases, rows)
    shares = times / np.maximum(times.sum(0), 1e-9)
    room = axes.figure.get_figwidth() - 0.2 - 0.085 * max(map(len, labels))  # type: ignore[union-attr]
    least = 0.33 / room * times.sum(0).max()  # a percentage is 0.33 inches wide
    for phase, widths, share, left in zip(
        phases, times, shares, times.cumsum(0) - times, strict=True
    ):
        bars = axes.barh(
            labels, widths, left=left, color=PHASE_COLOURS[phase], edgecolor=page.PAPER, height=0.65
        )
        bars.set_label(phase.replace("_", " + "))
        written = [
            f"{part:.0%}" if width >= least else ""
            for part, width in zip(share, widths, strict=True)
        ]
        axes.bar_label(bars, written, label_type="center", color="white", fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("milliseconds")
    axes.spines["left"].set_visible(False)
    axes.tick_params("y", length=0)
    axes.figure.legend(
        loc="outside upper center", ncols=3, fontsize=9, handlelength=1, columnspacing=1.2
    )

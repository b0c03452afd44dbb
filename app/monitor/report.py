"""Page `report.html` of a training: result, curves, confusion matrix, and bottleneck."""

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from app.errors import one_line
from app.monitor.loggers import read_rows
from app.monitor.rank_times import RANK_PHASES, slow_ranks
from app.record import PHASES, Record
from app.record.words import (
    accuracy,
    bottleneck,
    counted,
    duration,
    settings,
    taken_cores,
    time_taken,
    way_of_running,
)
from app.system import page
from app.system.files import read_csv, write_text
from app.system.page import Section, code, count_along, draw, plain, short, table

MISTAKES = 5  # number of rows in each table of mistakes
# the confusion matrix shows figures up to this number of classes, and the step chart is drawn up to
# this number of ranks
CELLS = 20
PHASE_COLOURS = {
    "data": page.GREEN,
    "forward_backward": page.BLUE,
    "compute": page.BLUE,
    "communication": page.ORANGE,
    "wait": page.ORANGE,
    "optimizer": page.PURPLE,
    "rest": page.GREY,
}
Figures = dict[str, Figure | bytes]  # a page's figures by name; bytes are a PNG file


def leave_report(directory: str, record: Record | None = None) -> None:
    """Write a run's report, if the run has a record. Print an error instead of raising it.

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
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        print(f"{path} cannot be written ({reason})", file=sys.stderr, flush=True)


def make_report(folder: Path, record: Record | None = None) -> str:
    """Return a run's report as HTML, from the run record and the other files in its folder.

    Raises:
        ValueError: When the run record is unreadable.
        OSError: When another file is unreadable.
    """
    if record is None:
        record = Record.load(folder / "run.json")
    figures: Figures = {}
    written = datetime.fromtimestamp((folder / "run.json").stat().st_mtime)
    lead = f"{plain(folder.parent.name)}/{plain(folder.name)}, {written:%Y-%m-%d %H:%M}\n\n"
    if record.error:
        lead = f"> {plain(record.error)}\n\n{lead}"
    if record.duplicates:
        lead += f"> Training images are in validation or test: {record.duplicates:,} files\n\n"
    lead += table(["", ""], _facts(record), words=(0, 1))
    sections = [
        Section("Learning", _learning(record, read_metrics(folder / "metrics.csv"), figures)),
        Section("Search for the learning rate", _rate_search(record, figures)),
        Section("What is confused", _mistakes(folder, figures)),
        Section("What limited the run", _speed(record, figures)),
        Section("The command", code(str(record.command))),
    ]
    return page.page(headline(record), lead, sections, figures)


def _show(figures: Figures, name: str, figure: Figure | bytes, caption: str) -> str:
    """Add a figure to the page, and return the Markdown that inserts it."""
    figures[name] = figure
    return f"![{caption}]({name})"


# -- text of the report
# -----------------------------------------------------------------------------------------------


def headline(record: Record) -> str:
    """Return a one-line summary of a training."""
    epochs = record.epochs
    if record.status == "failed":
        where = "before the first step"
        if record.steps or epochs:
            where = f"in epoch {len(epochs) + 1}"
        return f"Failed {where}: {one_line(str(record.error))[:120]}"
    count = len([row for row in epochs if row.whole])
    result = "Trained"
    if epochs and epochs[-1].train_loss is not None:
        result = f"Training loss {epochs[-1].train_loss:.4g}"
    for split, metrics in (("validation", record.validation), ("test", record.test)):
        if metrics and metrics.acc is not None:
            samples = f"{metrics.samples:,} " if metrics.samples else ""
            result = f"{accuracy(metrics.acc, metrics.samples)} on {samples}{split} images"
    after = counted(count, "epoch")
    if record.ended_by_steps or not count:
        after = counted(record.steps, "step")
    if record.status == "interrupted" and not record.finished:
        after += f", interrupted {record.error}"
    return f"{result} after {after} ({way_of_running(record)})"


def _facts(record: Record) -> list[tuple[str, str]]:
    """Return names and texts of the recorded settings and hardware."""
    facts = list(settings(record))
    if record.setup_s and record.train_s is not None:
        facts.append(("time", time_taken(record)))
    for part in record.parts:
        facts.append(("ranks", f"{part.world_size} until step {part.steps:,}: {part.error}"))
    if record.resumed_from:
        facts.append(("resumed from", record.resumed_from))
    machine = record.hardware
    if machine:
        parts = [f"{machine.cpu}, {machine.cores} cores", *machine.gpus]
        facts.append(("hardware", "; ".join(parts)))
    versions = [f"{name} {version}" for name, version in record.versions.items() if version]
    if versions:
        facts.append(("versions", ", ".join(versions)))
    return facts


# -- learning
# -----------------------------------------------------------------------------------------------


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the rows of metrics.csv without their empty cells; no rows if the file is missing."""
    rows = []
    for row in read_rows(path):
        # Lightning names a metric `loss_epoch` if it is also logged at each step
        rows.append(
            {name.removesuffix("_epoch"): float(cell) for name, cell in row.items() if cell}
        )
    return rows


def _learning(record: Record, metrics: Sequence[dict[str, float]], figures: Figures) -> str:
    # optimizer steps per epoch, from the last row of an epoch's end, because record.steps_per_epoch
    # counts batches
    length = record.steps_per_epoch or 1
    for row in metrics:
        if "train_loss" in row or "val_loss" in row:
            length = (row["step"] + 1) / (row["epoch"] + 1)
    points = defaultdict(list)  # by metric, pairs of epoch and value
    for row in metrics:
        for name, value in row.items():
            if math.isfinite(value):
                points[name].append(((row["step"] + 1) / length, value))
    captions = {"loss": "Loss; faint: each logging window", "acc": "Accuracy"}
    shown = []
    for metric, caption in captions.items():
        windows = points[f"train_{metric}_step"]
        lines = {"training": points[f"train_{metric}"], "validation": points[f"val_{metric}"]}
        if windows or any(lines.values()):
            shown.append(_show(figures, metric, _draw_curves(windows, lines), caption))
    return "\n".join(shown) or "No loss was logged as train_loss or val_loss."


def _draw_curves(
    windows: Sequence[tuple[float, float]], lines: dict[str, list[tuple[float, float]]]
) -> Figure:
    def paint(axes: Axes) -> None:
        axes.plot(*np.reshape(windows, (-1, 2)).T, color=page.BLUE, alpha=0.35, linewidth=1)
        for (name, points), colour in zip(lines.items(), page.COLOURS, strict=False):
            if points:
                axes.plot(*np.transpose(points), color=colour, label=name, marker="o", markersize=3)
        count_along(axes)
        axes.margins(x=0.02)

    return draw(paint)


def _rate_search(record: Record, figures: Figures) -> str:
    found = record.found_lr
    if found is None:
        return ""

    def paint(axes: Axes) -> None:
        axes.semilogx(found.lr, found.loss)
        axes.xaxis.set_major_formatter("{x:g}")
        if found.suggestion:
            axes.axvline(found.suggestion, color=page.ORANGE, label="suggestion", linewidth=1)

    return _show(figures, "rate_search", draw(paint), "Training loss against the learning rate")


# -- confusion matrix
# -------------------------------------------------------------------------------------------------


def draw_confusion_matrix(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """Draw a confusion matrix. A cell is the percentage of the label's images.

    Args:
        counts: Numbers of images, int (labels, predictions).
        names: Names of the classes.
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # from transparent to blue; SVG files ignore an array of `alpha`
    blues = LinearSegmentedColormap.from_list("blues", [f"{page.BLUE}00", f"{page.BLUE}f0"])
    step = math.ceil(len(names) / CELLS)
    ticks = range(0, len(names), step)
    labels = [short(name, 16) for name in names[::step]]
    size = np.clip(140 / len(names), 6, 10)  # points

    def paint(axes: Axes) -> None:
        axes.imshow(shares, blues, vmin=0, vmax=1, interpolation="none", aspect="auto")
        axes.set_xticks(
            ticks, labels, rotation=45, ha="right", rotation_mode="anchor", fontsize=size
        )
        axes.set_yticks(ticks, labels, fontsize=size)
        axes.set(xlabel="predicted, % of the label's images", ylabel="label")
        if step > 1:
            return
        for row, column in np.argwhere(shares >= 0.005):
            share = shares[row, column]
            colour = "white" if share > 0.5 else page.INK
            text = f"{100 * share:.0f}"
            axes.text(column, row, text, color=colour, fontsize=size, ha="center", va="center")

    return draw(paint, 5.0, 4.6)


def _mistakes(folder: Path, figures: Figures) -> str:
    path = folder / "confusion_matrix.csv"
    if not path.exists():  # the run was not evaluated
        return ""
    (corner, *names), *rows = read_csv(path)
    counts = np.array([row[1:] for row in rows], int)  # (labels, predictions)
    images = counts.sum(1)
    wrong = counts - np.diag(counts.diagonal())
    blocks = []
    if wrong.any():
        shares = wrong.sum(1) / np.maximum(images, 1)
        rows = []
        # classes without images have the share 0, and are never the worst
        for label in np.argsort(-shares, kind="stable")[:MISTAKES]:
            if images[label]:
                recall = accuracy(1 - shares[label], images[label])
                rows.append([names[label], recall, f"{images[label]:,}"])
        blocks.append(table(["least recognised", "recall", "images"], rows))
        rows = []
        for cell in np.argsort(-wrong, axis=None, kind="stable")[:MISTAKES]:
            label, predicted = divmod(cell, len(names))
            if wrong[label, predicted]:
                rows.append([names[label], names[predicted], f"{wrong[label, predicted]:,}"])
        blocks.append(table(["most confused", "predicted as", "images"], rows, words=(0, 1)))
    caption = f"Confusion matrix of {corner.partition(':')[0]}: label against prediction, %"
    blocks.append(_show(figures, "confusion", draw_confusion_matrix(counts, names), caption))
    picture = folder / "most_wrong.png"
    if wrong.any() and picture.is_file():
        blocks.append(_show(figures, "most_wrong", picture.read_bytes(), "Most confidently wrong"))
        header, *rows = read_csv(picture.with_suffix(".csv"))
        blocks.append(table(header, rows, words=range(3)))
    return "\n\n".join(blocks)


# -- bottleneck
# -----------------------------------------------------------------------------------------------


def _speed(record: Record, figures: Figures) -> str:
    times = record.time_per_step
    ranks = record.ranks
    blocks = []
    for line in slow_ranks(ranks).values():
        blocks.append(f"**{plain(line)}**: the others wait for it in every step.")
    charts = []
    if times and times.step:
        taken = taken_cores(record.others_cores, record.hardware)
        limit, remedy = bottleneck(
            vars(times), record.accelerator != "cpu", record.placement, taken
        )
        blocks.append(f"A step takes {duration(times.step / 1000)}. **{limit}.** Try {remedy}.")
        bars = draw_bars([""], PHASES, [times])
        charts.append(_show(figures, "step", bars, "Where the time of a step goes, on rank zero"))
    if 1 < len(ranks) <= CELLS:
        bars = draw_bars([f"rank {row.rank}" for row in ranks], RANK_PHASES, ranks)
        charts.append(_show(figures, "ranks", bars, "A step on each rank: wait is for the others"))
    return "\n\n".join([*blocks, "\n".join(charts)])


def draw_bars(labels: Sequence[str], phases: Sequence[str], rows: Sequence[Any]) -> Figure:
    """Draw a stacked bar of phases in milliseconds for each row."""
    times = np.transpose(list(map(attrgetter(*phases), rows)))  # (phases, rows)
    steps = times.sum(0)
    places = np.arange(len(rows))  # not the labels, because two rows may have the same

    def paint(axes: Axes) -> None:
        left = np.zeros(len(rows))
        for phase, widths in zip(phases, times, strict=True):
            colour = PHASE_COLOURS[phase]
            bars = axes.barh(places, widths, 0.65, left, color=colour, edgecolor=page.PAPER)
            bars.set_label(phase.replace("_", " + "))
            for place in places[widths > 0.1 * steps.max()]:  # room for a percentage
                middle = left[place] + widths[place] / 2
                text = f"{widths[place] / steps[place]:.0%}"
                axes.text(middle, place, text, color="white", fontsize=8, ha="center", va="center")
            left += widths
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.spines["left"].set_visible(False)
        axes.tick_params("y", length=0)

    return draw(paint, height=1.3 + 0.3 * len(rows))

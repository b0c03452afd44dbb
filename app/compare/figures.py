"""Draws the pictures of a comparison."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, whose state a notebook shares
from matplotlib.ticker import MaxNLocator

from app.compare.runner import Outcome
from app.monitor.step_profiler import PHASES

TITLES = {
    "throughput": "Throughput: median of the runs, bars from the slowest to the fastest",
    "efficiency": "Scaling efficiency: speed-up for each device",
    "loss_epoch": "Training loss against epochs",
    "loss_time": "Training loss against time",
    "memory": "Peak memory of a device",
    "step": "Where the time of a step goes",
}
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#97bbf5")


def draw(table: pd.DataFrame, outcomes: Sequence[Outcome], baseline: str, folder: Path) -> dict[str, Path]:
    """Draw every picture for which there are figures.

    Args:
        table: As `app.compare.results.tabulate` makes it.
        outcomes: The variants and their runs.
        baseline: The variant that the ideal line starts from.
        folder: Where to put them.

    Returns:
        Title and file of each picture.
    """
    measured = table.dropna(subset=["samples_per_s"])
    drawn = {}

    def picture(name: str, paint: Callable[[Axes], None], rows: int | None = None) -> None:
        figure = Figure(figsize=(8, 4.5 if rows is None else 1.5 + 0.45 * rows), layout="constrained")
        axes = figure.subplots()
        axes.set_title(TITLES[name], fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        drawn[TITLES[name]] = path

    if len(measured):
        picture("throughput", lambda axes: _throughput(axes, measured, baseline), len(measured))
    if measured["efficiency"].notna().any():
        scaled = measured.dropna(subset=["efficiency"])
        picture("efficiency", lambda axes: _efficiency(axes, scaled), len(scaled))
    if any(outcome.records for outcome in outcomes):
        picture("loss_epoch", lambda axes: _loss(axes, outcomes, against_time=False))
        picture("loss_time", lambda axes: _loss(axes, outcomes, against_time=True))
    known = table.dropna(subset=["memory_main_gib"])
    if len(known):
        picture("memory", lambda axes: _memory(axes, known), len(known))
    timed = table.dropna(subset=["rest_ms"])
    if len(timed):
        picture("step", lambda axes: _step(axes, timed), len(timed))
    return drawn


def _rows(axes: Axes, names: Sequence[str]) -> range:
    """Give each variant a row, the first on top."""
    places = range(len(names))
    axes.set_yticks(places, [name if len(name) <= 32 else f"{name[:31]}…" for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    return places


def _throughput(axes: Axes, table: pd.DataFrame, baseline: str) -> None:
    rates = table["samples_per_s"]
    places = _rows(axes, list(table["variant"]))
    spread = [rates - table["samples_per_s_min"], table["samples_per_s_max"] - rates]
    axes.barh(places, rates, xerr=spread, color=COLOURS[0], ecolor="#333333", capsize=3, height=0.6)
    axes.set_xlabel("samples/s")
    base = table[table["variant"] == baseline]
    if len(base):
        start = base.iloc[0]
        ideal = start["samples_per_s"] / start["replicas"] * table["replicas"]
        for place, value in zip(places, ideal, strict=True):
            axes.plot([value, value], [place - 0.4, place + 0.4], color="#d62728", linewidth=1.5)
        axes.plot([], [], color="#d62728", label=f"ideal: {baseline} times the devices")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


def _efficiency(axes: Axes, table: pd.DataFrame) -> None:
    percent = 100 * table["efficiency"]
    places = _rows(axes, list(table["variant"]))
    bars = axes.barh(places, percent, color=COLOURS[3], height=0.6)
    axes.bar_label(bars, labels=["" if pd.isna(value) else f"{value:.0f} %" for value in percent], padding=3)
    axes.axvline(100, color="#d62728", linewidth=1.5)
    axes.set_xlabel("% of the baseline's samples/s for each device")


def _loss(axes: Axes, outcomes: Sequence[Outcome], against_time: bool) -> None:
    """Draw the first run of each variant: the others have the same loss, but for rounding."""
    styles = ("-", "--", ":", "-.")
    for index, outcome in enumerate(outcomes):
        if not outcome.records:
            continue
        epochs = pd.DataFrame(outcome.records[min(outcome.records)]["epochs"])
        if not len(epochs):
            continue
        x = epochs["seconds"].cumsum() if against_time else epochs["epoch"] + 1
        style = styles[index % len(styles)]
        axes.plot(x, epochs["train_loss"], style, label=outcome.variant.name, marker="o", markersize=3)
    axes.set_xlabel("seconds of training, validation included" if against_time else "epoch")
    axes.set_ylabel("training loss, mean of the epoch")
    if not against_time:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)


def _memory(axes: Axes, table: pd.DataFrame) -> None:
    places = _rows(axes, list(table["variant"]))
    axes.barh([p - 0.2 for p in places], table["memory_main_gib"], height=0.38, color=COLOURS[0], label="main device")
    others = table["memory_others_gib"].fillna(0.0)
    axes.barh([p + 0.2 for p in places], others, height=0.38, color=COLOURS[1], label="largest of the others")
    axes.set_xlabel("GiB")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False, ncols=2)


def _step(axes: Axes, table: pd.DataFrame) -> None:
    places = _rows(axes, list(table["variant"]))
    left = pd.Series(0.0, index=table.index)
    for phase, colour in zip(PHASES, COLOURS, strict=True):
        axes.barh(places, table[f"{phase}_ms"], left=left, height=0.6, color=colour, label=phase.replace("_", " + "))
        left = left + table[f"{phase}_ms"]
    axes.set_xlabel("milliseconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False, ncols=len(PHASES), fontsize=8)

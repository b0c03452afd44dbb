"""Plots of a comparison, for the HTML report and as PNG files."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from app.lab.compare.advice import ACCURACY, RATE, Verdict, ranked
from app.lab.compare.runner import Outcome
from app.monitor.report import draw_bars
from app.record import PHASES, Record
from app.system.page import BLUE, INK, ORANGE, PALE, count_along, draw, short

# Curves coincide if they differ by at most this fraction of the losses' range. It is less than a
# line's width.
ALIKE = 0.005
LEARNT = 0.98  # a variant has learnt if its loss fell below this fraction of the loss of guessing
LONGEST = 28  # characters of the name of a variant or a run


class Picture(NamedTuple):
    """Plot of a report.

    Attributes:
        title: Observation, such as `4 of 4 loss curves coincide`, or a description. Screen readers
            read it, too.
        figure: The plot, without its title.
    """

    title: str
    figure: Figure


def pictures(
    table: pd.DataFrame,
    outcomes: Sequence[Outcome],
    baseline: str,
    verdict: Verdict,
    by: str = RATE,
) -> dict[str, Picture]:
    """Return the plots that have data, by file name. The first one shows the column `by`.

    Args:
        table: Table of `app.lab.compare.results.tabulate`.
        outcomes: The variants and their runs.
        baseline: Name of the variant from which the ideal speed-up is computed.
        verdict: The verdict. Without a recommendation, it is the title of the first plot.
        by: Column that decides.
    """
    rows = ranked(table, by)
    rates = pd.Series({outcome.variant.name: outcome.rate for outcome in outcomes})
    rows = rows.assign(label=[short(name, LONGEST) for name in rows.index], rate=rates)
    drawn = {}
    if len(rows) and by == ACCURACY:
        title = "Validation accuracy against minutes: worst, median and best run"
        drawn["accuracy"] = Picture(title, draw(partial(_accuracy, rows=rows), 6.4, 4.0))
    elif len(rows):
        title = "Samples/s of each variant: the median, the slowest and the fastest run"
        if verdict.recommended is None:
            title = verdict.conclusion
        paint = partial(_throughput, rows=rows, baseline=baseline, best=verdict.recommended)
        drawn["throughput"] = Picture(title, draw(paint, 6.4, 1.2 + 0.36 * len(rows)))
    losses = _losses(outcomes)
    if not losses.empty:
        alike = _alike(losses, baseline)
        title = _coinciding(alike, len(losses.columns))
        if not _has_learnt(losses, outcomes):
            title = "No variant has learnt yet: the loss curves say nothing"
        shown = losses.drop(columns=alike.index[1:])
        if len(alike) > 1:  # they share one line
            shown = shown.rename(columns={alike.index[0]: f"{len(alike)} variants"})
        drawn["loss_epoch"] = Picture(title, draw_curves(shown, "training loss"))
    timed = rows.dropna(subset=["rest_ms"]).rename(columns=lambda name: name.removesuffix("_ms"))
    if len(timed):
        bars = list(timed.itertuples())
        title = "Where the time of a step goes, on rank zero"
        drawn["step"] = Picture(title, draw_bars(list(timed["label"]), PHASES, bars))
    return drawn


def _throughput(axes: Axes, rows: pd.DataFrame, baseline: str, best: str | None) -> None:
    """Draw a bar for each variant, with the range of its runs and the ideal speed-up."""
    places = np.arange(len(rows))
    values = rows["samples_per_s"]
    is_best = rows.index == best
    axes.barh(
        places,
        values,
        0.62,
        color=np.where(is_best, BLUE, PALE),
        label=np.where(is_best, "recommended", "_"),
        xerr=[values - rows["samples_per_s_min"], rows["samples_per_s_max"] - values],
        ecolor=INK,
    )
    ideals = values / rows["efficiency"]
    if ideals.notna().any():
        label = f"ideal: {baseline} times the devices"
        axes.vlines(ideals, places - 0.38, places + 0.38, color=ORANGE, linewidth=2, label=label)
    axes.set_yticks(places, rows["label"])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    numbers = axes.secondary_yaxis("right")
    numbers.set_yticks(places, rows["rate"])
    for side in (axes, numbers):
        side.tick_params("y", length=0)
        side.spines[["left", "right"]].set_visible(False)
    axes.set_xlabel("samples/s")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _accuracy(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the worst, the median and the best run of each variant."""
    for row in rows.to_dict("records"):
        minutes = [row["train_s"] / 60] * 3
        accuracies = [row["best_acc_min"], row[ACCURACY], row["best_acc_max"]]
        axes.plot(minutes, accuracies, marker="o", label=row["label"])
    axes.set(xlabel="minutes of training", ylabel="validation accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid()


def _losses(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Return the training loss of each variant's first run, as `curves_of` does.

    Runs with a non-finite loss are left out, because their large losses would flatten other curves.
    """
    first = {}
    for outcome in outcomes:
        for record in outcome.records[:1]:
            if record.not_finite_since is None:
                first[outcome.variant.name] = record
    return curves_of(first, "train_loss")


def curves_of(records: Mapping[str, Record], metric: str) -> pd.DataFrame:
    """Return a metric of runs: epochs, counted from 1, in rows, and runs in columns."""
    curves = {}
    for name, record in records.items():
        curves[name] = {row.epoch + 1: getattr(row, metric) for row in record.epochs if row.whole}
    return pd.DataFrame(curves, dtype=float).dropna(axis="columns", how="all")


def _has_learnt(losses: pd.DataFrame, outcomes: Sequence[Outcome]) -> bool:
    """Return whether a variant's loss fell below that of guessing; if unknown, below its first."""
    first = losses.bfill().iloc[0]
    for outcome in outcomes:
        for record in outcome.records:
            if record.data is not None and record.data.classes:
                first[:] = math.log(record.data.classes)
    return bool((losses.ffill().iloc[-1] < LEARNT * first).any())


def _alike(losses: pd.DataFrame, baseline: str) -> pd.Series:
    """Return each coinciding curve's largest difference from the baseline's curve.

    If the baseline has no curve, compare with the first curve.
    """
    reference = losses.get(baseline, losses.iloc[:, 0])
    differences = losses.sub(reference, axis="index").abs().max()
    return differences[differences <= ALIKE * (losses.max().max() - losses.min().min())]


def _coinciding(alike: pd.Series, count: int) -> str:
    """Return the plot's title, with the number of curves that coincide with the baseline's."""
    if len(alike) == 1:
        return "Training loss against epochs"
    difference = "to the last digit"
    if alike.max() > 0:
        difference = f"largest difference {alike.max():.0e}".replace("e-0", "e-")
    return f"{len(alike)} of {count} loss curves coincide ({difference})"


def draw_curves(curves: pd.DataFrame, title: str) -> Figure:
    """Draw the curves of `curves_of`."""

    def paint(axes: Axes) -> None:
        for name, curve in curves.items():
            label = str(name)
            if len(label) > LONGEST:
                label = f"…{label[-LONGEST:]}"
            axes.plot(curve.dropna(), marker="o", markersize=3, label=label)
        axes.set_ylabel(title)
        count_along(axes)

    return draw(paint, height=2.8 + 0.16 * len(curves.columns))

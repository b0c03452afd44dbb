"""Plots of a comparison, for the HTML report and as PNG files."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from app.lab.compare.advice import ranked
from app.lab.compare.results import rate
from app.lab.compare.runner import Outcome
from app.monitor.report import stacked_bars
from app.record import PHASES
from app.system.page import BLUE, COLOURS, GREY, INK, ORANGE, PALE, label_lines, short

# Curves coincide if they differ by at most this fraction of the losses' range. It is less than a
# line's width.
ALIKE = 0.005
LEARNT = 0.98  # a variant has learnt if its loss fell below this fraction of the loss of guessing
UNLEARNT = "No variant has learnt yet: the loss curves say nothing"
LONGEST = 28  # characters of a variant's name
# with more curves than this, only the baseline and the recommended variant get a colour and a label
NAMED = 5


class Picture(NamedTuple):
    """Plot of a report.

    Attributes:
        title: Observation, such as `All 4 loss curves coincide`, or a description. Screen readers
            read it, too.
        paint: Function that draws on the axes.
        width: Width in inches.
        height: Height in inches.
    """

    title: str
    paint: Callable[[Axes], None]
    width: float = 4.6
    height: float = 3.2


def pictures(
    table: pd.DataFrame, outcomes: Sequence[Outcome], baseline: str, recommended: str | None
) -> dict[str, Picture]:
    """Return the plots that have data, by file name.

    Args:
        table: Table of `app.lab.compare.results.tabulate`.
        outcomes: The variants and their runs.
        baseline: Name of the variant from which the ideal speed-up is computed.
        recommended: The recommended variant.
    """
    rows = ranked(table)
    drawn = {}
    if len(rows):
        rates = {outcome.variant.name: outcome.medians for outcome in outcomes}
        paint = partial(
            _throughput, rows=rows, rates=rates, baseline=baseline, recommended=recommended
        )
        title = "Samples/s of each variant: the median of the runs"
        drawn["throughput"] = Picture(title, paint, width=6.4, height=1.2 + 0.36 * len(rows))
    diverged = set(table.loc[table["not_finite_since"].notna(), "variant"])
    lines = curves([outcome for outcome in outcomes if outcome.variant.name not in diverged])
    if lines:
        alike = _alike(lines, baseline)
        paint = partial(_loss, lines=lines, alike=alike, baseline=baseline, recommended=recommended)
        title = _coinciding(alike, len(lines)) if _learnt(lines, outcomes) else UNLEARNT
        drawn["loss_epoch"] = Picture(title, paint)
    timed = rows.dropna(subset=["rest_ms"]).rename(
        columns={f"{phase}_ms": phase for phase in PHASES}
    )
    if len(timed):
        labels = [short(name, LONGEST) for name in timed.index]
        steps = list(timed.itertuples())
        paint = partial(stacked_bars, labels=labels, phases=PHASES, rows=steps)
        drawn["step"] = Picture(
            "Where the time of a step goes, on rank zero", paint, height=1.3 + 0.3 * len(timed)
        )
    return drawn


def curves(outcomes: Sequence[Outcome]) -> dict[str, pd.DataFrame]:
    """Return each variant's training loss by epoch: median, minimum and maximum over the runs."""
    lines = {}
    for outcome in outcomes:
        runs = [
            pd.DataFrame([vars(row) for row in record.epochs if row.whole])
            for record in outcome.records.values()
        ]
        if any(map(len, runs)):
            loss = pd.concat(runs).astype({"train_loss": float}).groupby("epoch")["train_loss"]
            lines[outcome.variant.name] = pd.DataFrame(
                {"loss": loss.median(), "least": loss.min(), "most": loss.max()}
            )
    return {name: line.dropna() for name, line in lines.items() if line["loss"].notna().any()}


def _throughput(
    axes: Axes,
    rows: pd.DataFrame,
    rates: dict[str, list[float]],
    baseline: str,
    recommended: str | None,
) -> None:
    places = np.arange(len(rows))
    axes.set_yticks(places, [short(name, LONGEST) for name in rows.index])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params("y", length=0)
    values = rows["samples_per_s"]
    least = rows["samples_per_s_min"]
    most = rows["samples_per_s_max"]
    axes.barh(
        places,
        values,
        color=[BLUE if name == recommended else PALE for name in rows.index],
        height=0.62,
    )
    legend: list[Patch | Line2D] = [Patch(color=BLUE, label="recommended")] if recommended else []
    if (rows["n"] > 1).any():
        spread = [values - least, most - values]
        axes.errorbar(values, places, xerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=3)
        legend.append(
            Line2D([], [], color=INK, linewidth=1, marker="|", label="slowest to fastest run")
        )
    ideals = (values / rows["efficiency"]).where(rows.index != baseline)
    if ideals.notna().any():
        axes.vlines(ideals, places - 0.38, places + 0.38, color=ORANGE, linewidth=2)
        legend.append(Line2D([], [], color=ORANGE, label=f"ideal: {baseline} times the devices"))
    room = 0.2 * most.max()  # width of a label
    # a label starts at the end of its bar; if it would cover the ideal's mark there, it starts at
    # the mark
    ends = most.where(~ideals.between(most, most + room), ideals)
    for place, (name, end) in enumerate(ends.items()):
        axes.annotate(
            rate(rates[str(name)]),
            (end, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_xlim(0, max(ends.max() + 1.25 * room, 1.03 * ideals.fillna(0).max()))
    axes.set_xlabel("samples/s")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.figure.legend(
        handles=legend, loc="outside lower center", ncols=3, fontsize=9, handlelength=1.2
    )


def _learnt(lines: dict[str, pd.DataFrame], outcomes: Sequence[Outcome]) -> bool:
    """Return whether a variant's loss fell below that of guessing; if that is unknown, below its first epoch's."""
    data = [
        record.data for outcome in outcomes for record in outcome.records.values() if record.data
    ]
    guessing = math.log(data[0].classes) if data and data[0].classes else None
    return any(
        line["loss"].iloc[-1] < LEARNT * (guessing or line["loss"].iloc[0])
        for line in lines.values()
    )


def _alike(lines: dict[str, pd.DataFrame], baseline: str) -> dict[str, float]:
    """Return each curve's largest difference from the baseline's curve, for curves that coincide with it.

    If the baseline has no curve, compare with the first curve.
    """
    losses = {name: line["loss"] for name, line in lines.items()}
    reference = losses.get(baseline, next(iter(losses.values())))
    close = ALIKE * (max(map(max, losses.values())) - min(map(min, losses.values())))
    differences = {name: float((loss - reference).abs().max()) for name, loss in losses.items()}
    return {name: difference for name, difference in differences.items() if difference <= close}


def _coinciding(alike: dict[str, float], count: int) -> str:
    """Return the plot's title, with the number of curves that coincide with the baseline's."""
    if len(alike) == 1:
        return "Training loss against epochs"
    largest = max(alike.values())
    by = (
        f"largest difference {largest:.0e}".replace("e-0", "e-") if largest else "to the last digit"
    )
    several = (
        f"{len(alike)} of {count}"
        if len(alike) < count
        else "Both"
        if count == 2
        else f"All {count}"
    )
    return f"{several} loss curves coincide ({by})"


def _loss(
    axes: Axes,
    lines: dict[str, pd.DataFrame],
    alike: dict[str, float],
    baseline: str,
    recommended: str | None,
) -> None:
    """Draw each variant's median loss, and the range of its runs as a band. Curves that coincide share one line."""
    first, *others = alike
    names = [first, *(name for name in lines if name not in alike)]
    colours = dict(zip(names, COLOURS, strict=False))
    if len(names) > NAMED:
        colours = {
            name: BLUE if name == recommended else ORANGE if name == baseline else GREY
            for name in names
        }
    ends = []
    for name in names:
        line = lines[name]
        colour = colours[name]
        axes.plot(line.index + 1, line["loss"], color=colour, marker="o", markersize=3)
        axes.fill_between(
            line.index + 1, line["least"], line["most"], color=colour, alpha=0.2, linewidth=0
        )
        label = f"{len(alike)} variants" if others and name == first else short(name, LONGEST)
        ends.append((line["loss"].iloc[-1], label, colour))
    axes.set(xlabel="epoch", ylabel="training loss")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")
    label_lines(axes, ends if len(ends) <= NAMED else [end for end in ends if end[2] != GREY])

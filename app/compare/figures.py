"""Plots of a comparison, for the HTML report and as PNG files."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from app.compare.advice import ranked
from app.compare.results import rate
from app.compare.runner import Outcome
from app.monitor.report import stacked_bars
from app.record import PHASES
from app.system.page import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, PALE, label_lines

ALIKE = 0.005  # share of the losses' range, less than the width of a line
NAMED = 5  # most lines with a colour and a name each; with more lines, only some have one


class Picture(NamedTuple):
    """Plot of a report.

    Attributes:
        title: Observation, or else a description.
        alt: Description for screen readers.
        paint: Function that draws on the axes.
        width: Width in inches.
        height: Height in inches.
    """

    title: str
    alt: str
    paint: Callable[[Axes], None]
    width: float = 4.6
    height: float = 3.2


def pictures(table: pd.DataFrame, outcomes: Sequence[Outcome], baseline: str, taken: str | None) -> dict[str, Picture]:
    """Return the plots that have data, by file name.

    Args:
        table: As `app.compare.results.tabulate` makes it.
        outcomes: The variants and their runs.
        baseline: Reference of the ideal speed-up.
        taken: The recommended variant.
    """
    rows, found = ranked(table), {}
    bars = 1.3 + 0.3 * len(rows)
    if len(rows):
        rates = {outcome.variant.name: outcome.medians for outcome in outcomes}
        found["throughput"] = Picture(
            "Samples/s: the median of the runs",
            "Samples/s of each variant, the fastest first",
            partial(_throughput, rows=rows, rates=rates, baseline=baseline, taken=taken),
            6.4,
            1.2 + 0.36 * len(rows),
        )
    diverged = set(table.loc[table["not_finite_since"].notna(), "variant"])
    lines = curves([outcome for outcome in outcomes if outcome.variant.name not in diverged])
    if lines:
        groups = _groups(lines, baseline)
        alt = "Training loss of each variant against epochs"
        paint = partial(_loss, lines=lines, groups=groups, baseline=baseline, taken=taken)
        found["loss_epoch"] = Picture(_coinciding(lines, groups), alt, paint)
    if rows["rest_ms"].notna().any():
        found["step"] = Picture(
            "Where the time of a step goes, on rank zero",
            "Milliseconds of each phase of a step, of each variant",
            partial(_step, rows=rows.dropna(subset=["rest_ms"])),
            height=bars,
        )
    if rows["memory_main_gib"].notna().any():
        found["memory"] = Picture(
            "Peak memory of a device",
            "Peak memory of the first device and of the largest of the others, of each variant",
            partial(_memory, rows=rows.dropna(subset=["memory_main_gib"])),
            height=bars,
        )
    return found


def curves(outcomes: Sequence[Outcome]) -> dict[str, pd.DataFrame]:
    """Return each variant's training loss by epoch: median, minimum and maximum over the runs."""
    found = {}
    for outcome in outcomes:
        runs = [pd.DataFrame([vars(row) for row in record.epochs if row.whole]) for record in outcome.records.values()]
        if any(map(len, runs)):
            loss = pd.concat(runs).astype({"train_loss": float}).groupby("epoch")["train_loss"]
            found[outcome.variant.name] = pd.DataFrame({"loss": loss.median(), "least": loss.min(), "most": loss.max()})
    return {name: line.dropna() for name, line in found.items() if line["loss"].notna().any()}


# -- bars -------------------------------------------------------------------------------------------------------------


def _rows(axes: Axes, names: Sequence[str]) -> range:
    """Label one row for each variant, from top to bottom, and return the rows' positions."""
    places = range(len(names))
    axes.set_yticks(places, [_short(name, 32) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params("y", length=0)
    return places


def _below(axes: Axes, handles: Sequence[Patch | Line2D]) -> None:
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9, handlelength=1.2)


def _throughput(
    axes: Axes, rows: pd.DataFrame, rates: dict[str, list[float]], baseline: str, taken: str | None
) -> None:
    places = _rows(axes, list(rows.index))
    values, least, most = (rows[f"samples_per_s{end}"] for end in ("", "_min", "_max"))
    axes.barh(places, values, color=[BLUE if name == taken else PALE for name in rows.index], height=0.62)
    legend: list[Patch | Line2D] = [Patch(color=BLUE, label="recommended")] if taken else []
    if (rows["n"] > 1).any():
        spread = [values - least, most - values]
        axes.errorbar(values, places, xerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=3)
        legend.append(Line2D([], [], color=INK, linewidth=1, marker="|", label="slowest to fastest run"))
    ideals = (values / rows["efficiency"]).where(rows.index != baseline)
    if ideals.notna().any():
        axes.vlines(ideals, np.array(places) - 0.38, np.array(places) + 0.38, color=ORANGE, linewidth=2)
        legend.append(Line2D([], [], color=ORANGE, label=f"ideal: {baseline} times the devices"))
    room = 0.2 * most.max()  # width of a label; move the label beyond an ideal that would cross it
    ends = most.where(~ideals.between(most, most + room), ideals)
    for place, (name, end) in enumerate(ends.items()):
        axes.annotate(rate(rates[str(name)]), (end, place), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, max(ends.max() + 1.25 * room, 1.03 * ideals.fillna(0).max()))
    axes.set_xlabel("samples/s")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _below(axes, legend)


def _memory(axes: Axes, rows: pd.DataFrame) -> None:
    places = np.array(_rows(axes, list(rows.index)))
    several = rows["memory_others_gib"].notna().to_numpy()
    main = axes.barh(places - 0.2 * several, rows["memory_main_gib"], height=0.62 - 0.24 * several, color=BLUE)
    axes.bar_label(main, fmt="%.2f", padding=4, fontsize=9)
    if several.any():
        others = axes.barh(places[several] + 0.2, rows["memory_others_gib"].dropna(), height=0.38, color=GREEN)
        axes.bar_label(others, fmt="%.2f", padding=4, fontsize=9)
        _below(axes, [Patch(color=BLUE, label="first device"), Patch(color=GREEN, label="largest of the others")])
    axes.margins(x=0.2)
    axes.set_xlabel("GiB")


def _step(axes: Axes, rows: pd.DataFrame) -> None:
    phases = rows.rename(columns={f"{phase}_ms": phase for phase in PHASES})
    stacked_bars(axes, [_short(name, 32) for name in rows.index], PHASES, list(phases.itertuples()))


# -- curves -----------------------------------------------------------------------------------------------------------


def _groups(lines: dict[str, pd.DataFrame], baseline: str) -> list[list[str]]:
    """Return groups of variants with coinciding curves, the baseline's group first."""
    losses = [line["loss"] for line in lines.values()]
    close = ALIKE * (max(loss.max() for loss in losses) - min(loss.min() for loss in losses))
    groups: list[list[str]] = []
    for name in sorted(lines, key=lambda each: each != baseline):
        for group in groups:
            apart = (lines[name]["loss"] - lines[group[0]]["loss"]).abs().dropna()
            if len(apart) and apart.max() <= close:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _coinciding(lines: dict[str, pd.DataFrame], groups: list[list[str]]) -> str:
    """Return the plot's title, with the number of curves that coincide with the baseline's."""
    group, count = groups[0], len(lines)
    if len(group) == 1:
        return "Training loss against epochs"
    largest = max(float((lines[name]["loss"] - lines[group[0]]["loss"]).abs().max()) for name in group)
    by = f"largest difference {largest:.0e}".replace("e-0", "e-") if largest else "to the last digit"
    several = f"{len(group)} of {count}" if len(group) < count else "Both" if count == 2 else f"All {count}"
    return f"{several} loss curves coincide ({by})"


def _loss(
    axes: Axes, lines: dict[str, pd.DataFrame], groups: list[list[str]], baseline: str, taken: str | None
) -> None:
    """Draw one line for each group of coinciding curves: the median of the runs, with a band for their range."""
    colours = _colours([group[0] for group in groups], baseline, taken)
    ends = []
    for group in groups:
        line, colour = lines[group[0]], colours[group[0]]
        axes.plot(line.index + 1, line["loss"], color=colour, marker="o", markersize=3)
        axes.fill_between(line.index + 1, line["least"], line["most"], color=colour, alpha=0.2, linewidth=0)
        name = _short(group[0]) if len(group) == 1 else f"{len(group)} variants"
        ends.append((line["loss"].iloc[-1], name, colour))
    _against_epochs(axes, "training loss")
    label_lines(axes, ends if len(ends) <= NAMED else [end for end in ends if end[2] != GREY])


def _colours(names: Sequence[str], baseline: str, taken: str | None) -> dict[str, str]:
    """Choose a colour for each variant; with many variants, only for the recommended one and the baseline."""
    if len(names) <= NAMED:
        return dict(zip(names, COLOURS, strict=False))
    return {name: BLUE if name == taken else ORANGE if name == baseline else GREY for name in names}


def _against_epochs(axes: Axes, label: str) -> None:
    axes.set(xlabel="epoch", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")


def _short(name: str, length: int = 22) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"

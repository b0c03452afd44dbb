"""Draws the figures of a comparison, for the page and as files."""

import math
from collections.abc import Callable, Sequence
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
from app.system.page import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, PALE, label_lines, superscript

WIDE, NARROW = 6.4, 4.6  # inches
ALIKE = 0.005  # of the range of all losses: less than a line is wide
NAMED = 5  # lines that have a colour and a name each; of more, only some
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Picture(NamedTuple):
    """A figure.

    Attributes:
        title: The observation, or else the content.
        alt: The content, for readers who do not see it.
        paint: Fills its axes.
        width: Inches.
        height: Inches.
    """

    title: str
    alt: str
    paint: Callable[[Axes], None]
    width: float = NARROW
    height: float = 3.2


def pictures(table: pd.DataFrame, outcomes: Sequence[Outcome], baseline: str, taken: str | None) -> dict[str, Picture]:
    """List the pictures for which there are figures, by their names.

    Args:
        table: As `app.compare.results.tabulate` makes it.
        outcomes: The variants and their runs.
        baseline: The variant that the ideal is computed from.
        taken: The variant that is recommended.
    """
    rows, found = ranked(table), {}
    if len(rows):
        rates = {outcome.variant.name: outcome.medians for outcome in outcomes}
        found["throughput"] = Picture(
            "Samples/s: the median of the runs",
            "Samples/s of each variant, the fastest first",
            lambda axes: _throughput(axes, rows, rates, baseline, taken),
            WIDE,
            1.2 + 0.36 * len(rows),
        )
    diverged = set(table.loc[table["not_finite_since"].notna(), "variant"])
    lines = curves([outcome for outcome in outcomes if outcome.variant.name not in diverged])
    if lines:
        said, group = _coinciding(lines, baseline)
        found["loss_epoch"] = Picture(
            said, "Training loss of each variant against epochs", lambda axes: _loss(axes, lines, baseline, taken)
        )
        if _largest(lines, group):
            found["loss_difference"] = Picture(
                f"Their difference from {group[0]}",
                f"Difference of the training loss from that of {group[0]}, against epochs",
                lambda axes: _difference(axes, lines, group, taken),
            )
    timed = rows.dropna(subset=["rest_ms"])
    if len(timed):
        found["step"] = Picture(
            "Where the time of a step goes, on rank zero",
            "Milliseconds of each part of a step, of each variant",
            lambda axes: _step(axes, timed),
            NARROW,
            1.3 + 0.3 * len(timed),
        )
    known = rows.dropna(subset=["memory_main_gib"])
    if len(known):
        found["memory"] = Picture(
            "Peak memory of a device",
            "Peak memory of the first device and of the largest of the others, of each variant",
            lambda axes: _memory(axes, known),
            NARROW,
            1.3 + 0.3 * len(known),
        )
    return found


def curves(outcomes: Sequence[Outcome]) -> dict[str, pd.DataFrame]:
    """Return the training loss of each variant by epoch: median, least and most of the runs."""
    found = {}
    for outcome in outcomes:
        runs = [pd.DataFrame([vars(row) for row in record.epochs if row.whole]) for record in outcome.records.values()]
        if any(map(len, runs)):
            loss = pd.concat(runs).astype({"train_loss": float}).groupby("epoch")["train_loss"]
            found[outcome.variant.name] = pd.DataFrame({"loss": loss.median(), "least": loss.min(), "most": loss.max()})
    return {name: line.dropna() for name, line in found.items() if line["loss"].notna().any()}


# -- bars -------------------------------------------------------------------------------------------------------------


def _rows(axes: Axes, names: Sequence[str]) -> range:
    """Give each variant a row, the first on top."""
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
    colours = [BLUE if name == taken else PALE for name in rows.index]
    axes.barh(places, values, color=colours, height=0.62)
    legend: list[Patch | Line2D] = [Patch(color=BLUE, label="recommended")] if taken else []
    if (rows["n"] > 1).any():
        axes.errorbar(
            values, places, xerr=[values - least, most - values], fmt="none", ecolor=INK, elinewidth=1, capsize=3
        )
        legend.append(Line2D([], [], color=INK, linewidth=1, marker="|", label="slowest to fastest run"))
    ends, room = [float(value) for value in most], 0.2 * float(most.max())  # for a value
    limit = max(ends) + 1.25 * room
    ideals = (values / rows["efficiency"]).where(rows.index != baseline)
    for place, ideal in enumerate(ideals.tolist()):
        if math.isfinite(ideal):
            axes.plot([ideal, ideal], [place - 0.38, place + 0.38], color=ORANGE, linewidth=2)
            limit = max(limit, 1.03 * ideal)
            if ends[place] < ideal < ends[place] + room:  # the value stands beyond it
                ends[place], limit = ideal, max(limit, ideal + 1.25 * room)
    if ideals.notna().any():
        legend.append(Line2D([], [], color=ORANGE, label=f"ideal: {baseline} times the devices"))
    for place, (name, end) in enumerate(zip(rows.index, ends, strict=True)):
        axes.annotate(rate(rates[name]), (end, place), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, limit)
    axes.set_xlabel("samples/s")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _below(axes, legend)


def _memory(axes: Axes, rows: pd.DataFrame) -> None:
    places = _rows(axes, list(rows.index))
    main, others = rows["memory_main_gib"], rows["memory_others_gib"]
    several = others.notna()
    height = (0.62 - 0.24 * several).to_numpy()
    bars = axes.barh(np.array(places) - 0.2 * several.to_numpy(), main, height=height, color=BLUE)
    axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=9)
    if several.any():
        bars = axes.barh([p + 0.2 for p in places], others.fillna(0.0), height=0.38, color=GREEN)
        axes.bar_label(bars, ["" if pd.isna(value) else f"{value:.2f}" for value in others], padding=4, fontsize=9)
        _below(axes, [Patch(color=BLUE, label="first device"), Patch(color=GREEN, label="largest of the others")])
    axes.set_xlim(0, 1.2 * max(main.max(), others.fillna(0.0).max()))
    axes.set_xlabel("GiB")


def _step(axes: Axes, rows: pd.DataFrame) -> None:
    phases = rows.rename(columns={f"{phase}_ms": phase for phase in PHASES})
    stacked_bars(axes, [_short(name, 32) for name in rows.index], PHASES, list(phases.itertuples()))


# -- curves -----------------------------------------------------------------------------------------------------------


def _groups(lines: dict[str, pd.DataFrame], baseline: str) -> list[list[str]]:
    """Group variants whose curves coincide, the baseline's group first."""
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


def _largest(lines: dict[str, pd.DataFrame], group: Sequence[str]) -> float:
    return max(float((lines[name]["loss"] - lines[group[0]]["loss"]).abs().max()) for name in group)


def _coinciding(lines: dict[str, pd.DataFrame], baseline: str) -> tuple[str, list[str]]:
    """Return a title that counts the curves equal to the baseline's, and the names of these curves."""
    group = _groups(lines, baseline)[0]
    if len(group) == 1:
        return "Training loss against epochs", group
    largest = _largest(lines, group)
    by = f"largest difference {largest:.0e}".replace("e-0", "e-") if largest else "to the last digit"
    count, of = (WORDS[n] if n < len(WORDS) else str(n) for n in (len(group), len(lines)))
    if len(group) == len(lines):
        return f"{'Both' if len(group) == 2 else f'All {count}'} loss curves coincide ({by})", group
    return f"{count.capitalize()} of {of} loss curves coincide, {_short(group[0])}'s among them ({by})", group


def _loss(axes: Axes, lines: dict[str, pd.DataFrame], baseline: str, taken: str | None) -> None:
    """Draw one line for each group of coinciding curves: the median of the runs, with a band for their range."""
    groups = _groups(lines, baseline)
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


def _difference(axes: Axes, lines: dict[str, pd.DataFrame], group: Sequence[str], taken: str | None) -> None:
    apart = {name: (lines[name]["loss"] - lines[group[0]]["loss"]).dropna() for name in group[1:]}
    power = -math.floor(math.log10(_largest(lines, group)))
    colours = _colours(list(apart), "", taken)
    for name, line in apart.items():
        axes.plot(line.index + 1, line * 10.0**power, color=colours[name], marker="o", markersize=3)
    axes.axhline(0, color=INK, linewidth=0.6)
    _against_epochs(axes, f"difference × 10{superscript(power)}")
    named = sorted(apart, key=lambda name: -abs(apart[name].iloc[-1]))[:NAMED] if len(apart) > NAMED else list(apart)
    label_lines(axes, [(apart[name].iloc[-1] * 10.0**power, _short(name), colours[name]) for name in named])


def _colours(names: Sequence[str], baseline: str, taken: str | None) -> dict[str, str]:
    """Choose a colour for each variant; of many, only the recommended one and the baseline stand out."""
    if len(names) <= NAMED:
        return dict(zip(names, COLOURS, strict=False))
    return {name: BLUE if name == taken else ORANGE if name == baseline else GREY for name in names}


def _against_epochs(axes: Axes, label: str) -> None:
    axes.set(xlabel="epoch", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")


def _short(name: str, length: int = 22) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"

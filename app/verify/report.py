"""What `verify` says: a table, the causes, and a page with the curves."""

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.system.files import write_text
from app.system.page import COLOURS, INK, PALE, Section, code, draw, label_lines, page, superscript
from app.system.page import table as page_table
from app.verify.differences import COLUMNS
from app.verify.proof import Verdict, Way


def cell(way: Way, column: str) -> str:
    """What stands in the table for a way and a column."""
    if way.recorded is None:
        return "—"
    place = way.found.get(column)
    if place is None:
        return "✓ ≈" if column in way.rounding else "✓"
    return f"✗ {place.where}" if place.step is not None else "✗"


def table(verdict: Verdict) -> list[list[str]]:
    """Rows of the table, the header first."""
    rows = [["", *COLUMNS]]
    return rows + [[way.name, *(cell(way, column) for column in COLUMNS)] for way in verdict.ways]


def explained(verdict: Verdict) -> Iterator[str]:
    """Explain the rows of the table, line by line; ways with the same fault are listed once."""
    faults: dict[str, list[Way]] = {}
    for way in verdict.ways:
        causes = [cause.said for cause in way.causes] or [*way.found]
        fault = way.name if way.same else re.sub(r"\d", "", "; ".join([way.failed or "", *causes]))
        faults.setdefault(fault, []).append(way)
    for first, *others in faults.values():
        yield from said_of(first)
        if others:
            yield f"  also    {'; '.join(way.name for way in others)}"


def said_of(way: Way) -> list[str]:
    """What there is to say of a way, beside its row."""
    if way.left_out:
        return [f"{way.name}: left out: {way.left_out}"]
    lines = [f"{way.name}: does not run: {way.failed}"] if way.failed else []
    if way.rounding:
        shown = ", ".join(f"{name} by {place.size:.1g}" for name, place in way.rounding.items())
        lines.append(f"{way.name}: rounding ({shown}): in float64 they agree to {way.in_float64:.1g}")
    for column, place in way.found.items():
        lines.append(f"{way.name}: {column}, {place}")
    if way.in_float64 is not None and not way.rounding:
        lines.append(f"  in float64 the difference is {way.in_float64:.1g}; rounding would all but vanish")
    for cause in way.causes:
        lines += [f"  because {cause.said}", f"  do      {cause.remedy}"]
    if way.found and not way.causes:
        lines.append("  the cause is not known")
    return lines


def conclusion(verdict: Verdict) -> str:
    """The result, in a sentence."""
    tried = [way for way in verdict.ways if way.left_out is None]
    other = [way.name for way in tried if not way.same]
    if not tried:
        return "Nothing was proven: there is no other way of running here."
    seen, batches = verdict.reference.epoch(0), verdict.reference.facts["batches"]
    made = sum(step.micro_batches for step in seen)
    cut = f", in the first {made} of {batches} batches of an epoch" if made < batches else ""
    if not other:
        return f"The same training in all {len(tried) + 1} ways of running{cut}."
    return f"Not the same training as on one device: {', '.join(other)}{cut}."


def show(verdict: Verdict, console: Console) -> None:
    """Print table and causes."""
    rows = table(verdict)
    shown = Table(*rows[0])
    for row in rows[1:]:
        shown.add_row(*(f"[red]{escape(text)}[/red]" if text[0] == "✗" else escape(text) for text in row))
    console.print(shown)
    for line in explained(verdict):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(conclusion(verdict), highlight=False)


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict for other programs."""
    return {
        "same": bool(verdict),
        "said": conclusion(verdict),
        "steps": len(verdict.reference.steps),
        "ways": [
            {
                "name": way.name,
                "command": way.command,
                "same": way.same,
                "left_out": way.left_out,
                "failed": way.failed,
                "rounding": {name: place._asdict() for name, place in way.rounding.items()},
                "in_float64": way.in_float64,
                "differences": {name: place._asdict() for name, place in way.found.items()},
                "causes": [cause._asdict() for cause in way.causes],
            }
            for way in verdict.ways
        ],
    }


def write(verdict: Verdict, command: str, folder: Path) -> Path:
    """Write `report.html`: what is the same, the curves on top of each other with their differences, and why."""
    wanted = np.array([step.loss for step in verdict.reference.steps])
    losses = {way.name: [step.loss for step in way.recorded.steps] for way in verdict.ways if way.recorded is not None}
    apart = {name: np.array(line[: len(wanted)]) - wanted[: len(line)] for name, line in losses.items() if line}
    finite = [abs(line[np.isfinite(line)]).max(initial=0.0) for line in apart.values()]
    largest = max(finite, default=0.0)
    power = -math.floor(math.log10(largest)) if largest else 0
    colours = dict(zip(losses, itertools.cycle(COLOURS)))

    def curves(axes: Axes) -> None:
        axes.plot(range(1, len(wanted) + 1), wanted, color=PALE, linewidth=5, solid_capstyle="round")
        for name, line in losses.items():
            axes.plot(range(1, len(line) + 1), line, color=colours[name], linewidth=1.2)
        axes.set(xlabel="step", ylabel="training loss")
        _by_step(axes)
        label_lines(axes, [(wanted[-1], "one device (pale)\nand the others", INK)])

    def difference(axes: Axes) -> None:
        for name, line in apart.items():
            axes.plot(range(1, len(line) + 1), line * 10.0**power, color=colours[name], linewidth=1.2)
        axes.set(xlabel="step", ylabel=f"difference × 10{superscript(power)}")
        _by_step(axes)
        ends = [(line[-1] * 10.0**power, name, colours[name]) for name, line in apart.items()]
        label_lines(axes, [end for end in ends if math.isfinite(end[0])])

    said = (
        f"Difference from one device: at most {largest:.0e}".replace("e-0", "e-")
        if largest
        else "No difference from one device"
    )
    figures: dict[str, Figure | bytes] = {"losses": draw(curves), "differences": draw(difference)}
    shown = '![Training loss of each step, in every way](losses "Training loss of each step")\n'
    shown += f'![Difference of the losses from those on one device](differences "{said}")'
    header, *rows = table(verdict)
    causes = "\n".join(explained(verdict))
    sections = [
        Section("What is the same", page_table(header, rows, words=range(len(header)))),
        Section("Why", code(causes)),
        Section("Losses", shown),
        Section("The command", code(command)),
    ]
    steps = f"{len(wanted)} steps in {len(losses) + 1} ways of running, against one device."
    file = folder / "report.html"
    write_text(file, page(conclusion(verdict), steps, sections, figures))
    return file


def _by_step(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")

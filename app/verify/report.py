"""What `verify` says: a table, the causes, and a page with the curves."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.compare.report import page
from app.monitor.summary import markdown_table
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


def said(way: Way) -> list[str]:
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
    for way in verdict.ways:
        for line in said(way):
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
    """Write `report.html`: the curves on top of each other, their differences below, and the table."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    wanted = np.array([step.loss for step in verdict.reference.steps])
    above.plot(range(1, len(wanted) + 1), wanted, color="#222", linewidth=3, alpha=0.3, label="one device")
    for way in verdict.ways:
        if way.recorded is None:
            continue
        losses = np.array([step.loss for step in way.recorded.steps])
        count = min(len(losses), len(wanted))
        above.plot(range(1, len(losses) + 1), losses, linewidth=1, label=way.name)
        below.plot(range(1, count + 1), (losses[:count] - wanted[:count]) * 1e6, linewidth=1)
    above.set(ylabel="training loss", title="Loss of each step")
    below.set(xlabel="step", ylabel="difference × 10⁶", title="Difference from one device")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture := folder / "losses.png", dpi=120)
    lines = [line for way in verdict.ways for line in said(way)]
    header, *rows = table(verdict)
    text = "\n\n".join(
        [
            f"# {conclusion(verdict)}",
            f"    {command}",
            markdown_table(header, rows),
            f"![Losses of all ways, and their differences]({picture.name})",
            "\n".join(f"    {line}" for line in lines),
        ]
    )
    file = folder / "report.html"
    file.write_text(page(conclusion(verdict), text, {"losses": picture}))
    return file

"""Report of a verification: table, losses of all variants, differences, and causes."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from app.lab.verify.verdict import Verdict
from app.system.files import write_text
from app.system.page import PALE, Section, code, count_along, draw, page, table


def write_report(verdict: Verdict, command: str, folder: Path) -> Path:
    """Write `report.html`, and return its path.

    Args:
        verdict: The verdict.
        command: The command line.
        folder: Folder of the report.
    """
    recorded = {"one device": verdict.reference.losses}
    for result in verdict.results:
        if result.recorded is not None:
            recorded[result.name] = result.recorded.losses
    losses = pd.DataFrame(recorded)
    losses.index += 1
    differences = losses.sub(losses["one device"], axis="index")
    sizes = differences.abs()
    largest: Any = sizes[sizes < math.inf].max(axis=None)

    def draw_lines(lines: pd.DataFrame, label: str, axes: Axes) -> None:
        reference, *_ = axes.plot(lines, label=[*lines], linewidth=1.2)
        reference.set(color=PALE, linewidth=5)
        axes.set_ylabel(label)
        count_along(axes, "step")

    title = f"Difference from one device: at most {largest:.1g}"
    header, *rows = verdict.table()
    pictures = f"![Training loss of each step](losses)\n![{title}](differences)"
    sections = [
        Section("What is the same", table(header, rows, words=range(len(header)))),
        Section("Why", code("\n".join(verdict.explained()))),
        Section("Losses", pictures),
        Section("The command", code(command)),
    ]
    steps = f"{len(verdict.reference.steps)} steps in {len(recorded)} variants, against one device."
    figures = {
        "losses": draw(partial(draw_lines, losses, "training loss")),
        "differences": draw(partial(draw_lines, differences, "difference")),
    }
    file = folder / "report.html"
    write_text(file, page(verdict.conclusion, steps, sections, figures))
    return file

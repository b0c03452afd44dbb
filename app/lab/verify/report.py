"""Report of a verification: table, losses of all variants, differences, and causes."""

import itertools
import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from app.lab.verify.verdict import Verdict
from app.system.files import write_text
from app.system.page import COLOURS, INK, PALE, Section, code, draw, label_lines, page, table


def write_report(verdict: Verdict, command: str, folder: Path) -> Path:
    """Write `report.html`, and return its path.

    Args:
        verdict: The verdict.
        command: The command line.
        folder: Folder of the report.
    """
    reference = np.array([step.loss for step in verdict.reference.steps])
    runs = {
        result.name: result.recorded for result in verdict.results if result.recorded is not None
    }
    losses = {name: np.array([step.loss for step in run.steps]) for name, run in runs.items()}
    differences = {
        name: line[: len(reference)] - reference[: len(line)]
        for name, line in losses.items()
        if len(line)
    }
    largest = max(
        (abs(line[np.isfinite(line)]).max(initial=0.0) for line in differences.values()),
        default=0.0,
    )
    colours = dict(zip(losses, itertools.cycle(COLOURS)))

    def paint(axes: Axes, lines: dict[str, np.ndarray], label: str) -> None:
        for name, line in lines.items():
            axes.plot(range(1, len(line) + 1), line, color=colours[name], linewidth=1.2)
        axes.set(xlabel="step", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(axis="y")

    def paint_losses(axes: Axes) -> None:
        axes.plot(
            range(1, len(reference) + 1), reference, color=PALE, linewidth=5, solid_capstyle="round"
        )
        paint(axes, losses, "training loss")
        label_lines(axes, [(reference[-1], "one device (pale)\nand the others", INK)])

    def paint_differences(axes: Axes) -> None:
        paint(axes, differences, "difference")
        axes.ticklabel_format(axis="y", scilimits=(0, 0))
        ends = [(line[-1], name, colours[name]) for name, line in differences.items()]
        label_lines(axes, [end for end in ends if math.isfinite(end[0])])

    title = (
        f"Difference from one device: at most {largest:.0e}".replace("e-0", "e-")
        if largest
        else "No difference"
    )
    header, *rows = verdict.table()
    pictures = (
        '![Training loss of each step, in every variant](losses "Training loss of each step")\n'
    )
    pictures += f'![Difference of the losses from those on one device](differences "{title}")'
    sections = [
        Section("What is the same", table(header, rows, words=range(len(header)))),
        Section("Why", code("\n".join(verdict.explained()))),
        Section("Losses", pictures),
        Section("The command", code(command)),
    ]
    steps = f"{len(reference)} steps in {len(losses) + 1} ways of running, against one device."
    figures = {"losses": draw(paint_losses), "differences": draw(paint_differences)}
    file = folder / "report.html"
    write_text(file, page(verdict.conclusion, steps, sections, figures))
    return file

"""Report of a verification: table, losses of all variants, differences, and causes."""

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from app.lab.verify.verdict import Verdict
from app.system.files import write_text
from app.system.page import PALE, Section, code, draw, page, table


def write_report(verdict: Verdict, command: str, folder: Path) -> Path:
    """Write `report.html`, and return its path.

    Args:
        verdict: The verdict.
        command: The command line.
        folder: Folder of the report.
    """
    reference = verdict.reference.losses
    losses: dict[str, np.ndarray] = {}
    differences: dict[str, np.ndarray] = {}
    for result in verdict.results:
        if result.recorded is not None and len(result.recorded.losses):
            line = result.recorded.losses
            losses[result.name] = line
            differences[result.name] = line[: len(reference)] - reference[: len(line)]
    sizes = np.abs(np.concatenate([*differences.values(), np.zeros(1)]))
    largest = sizes[np.isfinite(sizes)].max()

    def draw_lines(lines: dict[str, np.ndarray], label: str, axes: Axes) -> None:
        for name, line in lines.items():
            axes.plot(range(1, len(line) + 1), line, label=name, linewidth=1.2)
        axes.set(xlabel="step", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(axis="y")
        axes.figure.legend(loc="outside lower center", ncols=3, fontsize=9)

    def draw_losses(axes: Axes) -> None:
        steps = range(1, len(reference) + 1)
        axes.plot(steps, reference, color=PALE, linewidth=5, label="one device")
        draw_lines(losses, "training loss", axes)

    title = "No difference"
    if largest:
        title = f"Difference from one device: at most {largest:.0e}".replace("e-0", "e-")
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
    steps = f"{len(reference)} steps in {len(losses) + 1} variants, against one device."
    figures = {
        "losses": draw(draw_losses),
        "differences": draw(partial(draw_lines, differences, "difference")),
    }
    file = folder / "report.html"
    write_text(file, page(verdict.conclusion, steps, sections, figures))
    return file

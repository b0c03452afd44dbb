"""Command `python -m app runs`: lists the trainings below a folder, and draws their curves.

FOLDER/runs.html has all runs' validation accuracy and loss on top of each other. The accuracy is
the test's, or else the best of validation, with its 95 % interval. --diff lists the settings in
which two runs differ.
"""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from app.command.arguments import leaves, read_yaml
from app.command.parser import PlainParser
from app.errors import UserError, printable
from app.record import Record
from app.record.words import counted, interval
from app.system import page
from app.system.files import write_text
from app.system.page import Section, draw, table
from app.system.terminal import make_console

USAGE = "python -m app runs [FOLDER] [--sort COLUMN] | --diff RUN RUN"
Column = Literal[
    "name", "data", "model", "lr", "epochs", "accuracy", "images/s", "minutes", "status"
]
COLUMNS: tuple[str, ...] = Column.__args__  # type: ignore[attr-defined]
WORDS = ("name", "data", "model", "status")  # columns of text
# files of a training, ours or another program's
TRACES = ("run.json", "metrics.csv", "hparams.yaml")
CURVES = 10  # runs with a colour and a line style of their own; further ones are grey
LONGEST = 40  # characters of a run's name in a legend, of which the last ones differ
WIDEST = 1000  # columns of a file or a pipe, so that a run is one line
NONE = "—"


def run(arguments: list[str]) -> int:
    """List the runs, or the settings in which two runs differ.

    Args:
        arguments: The arguments after `runs`.

    Raises:
        UserError: When there are no runs, or a run has no readable config.
    """
    parser = PlainParser(usage=USAGE, description=__doc__)
    parser.add_argument("folder", nargs="?", default="runs", help="folder of the runs")
    parser.add_argument(
        "--sort", type=Column, default="accuracy", help="column; the largest number is first"
    )
    parser.add_argument("--diff", nargs=2, metavar="RUN", help="folders of two runs to compare")
    options = parser.parse_args(arguments)
    console = make_console(highlight=False)
    if not console.is_terminal:
        console.width = WIDEST
    if options.diff:
        differing = differences(*options.diff)
        console.print(_table(["setting", *options.diff], differing, words=(0, 1, 2)))
        console.print(f"{counted(len(differing), 'setting')} in which the runs differ")
        return 0
    folder = Path(options.folder)
    if not folder.is_dir():
        raise UserError(f"runs {folder}: there is no such folder: name the folder of your runs")
    records, problems = read(folder)
    for problem in problems:
        console.print(Text(printable(problem), "yellow"), soft_wrap=True)
    if not records:
        raise UserError(f"runs {folder}: no run is below this folder: name that of --run.root")
    rows = tabulate(records, options.sort)
    cells = [_cells(row) for row in rows.to_dict("records")]
    words = list(map(COLUMNS.index, WORDS))
    console.print(_table(COLUMNS, cells, words))
    path = folder / "runs.html"
    title = counted(len(cells), "run")
    best = rows["accuracy"].argmax() if rows["accuracy"].notna().any() else None
    if best is not None:
        cell = dict(zip(COLUMNS, cells[best], strict=True))
        title += f"; the most accurate is {cell['name']}: {cell['accuracy']}"
    drawn, figures = _figures({name: records[name] for name in rows["name"]})
    sections = [Section("Validation", drawn), Section("Runs", table(COLUMNS, cells, words))]
    write_text(path, page.page(title, "", sections, figures))
    console.print(f"curves  {path}", soft_wrap=True)
    return 0


def read(folder: Path) -> tuple[dict[str, Record], list[str]]:
    """Return the record of each run below a folder by the run's name, and a line for each problem.

    Runs inside another run's folder, such as `test_1`, belong to that run.
    """
    records = {}
    problems = []
    for run_folder in _run_folders(folder):
        try:
            record = Record.load(run_folder / "run.json")
        except ValueError as error:
            problems.append(f"left out: {error}")
            continue
        if record.run_dir is None:
            problems.append(f"left out: {run_folder} is not a run of this program")
        else:
            records[str(run_folder.relative_to(folder))] = record
    return records, problems


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of trainings in the order of their names, without descending into them."""
    for path, folders, files in os.walk(folder):
        folders.sort()
        if not set(TRACES).isdisjoint(files):
            folders.clear()
            yield Path(path)


def tabulate(records: dict[str, Record], column: str) -> pd.DataFrame:
    """Return a row for each run, sorted by a column: words from A to Z, the largest number first.

    The column `split` is the split of `accuracy`; `low` and `high` are the ends of its 95 %
    interval. A missing value is NaN or None, and comes last.
    """
    rows = []
    for name, record in records.items():
        rate = record.lr
        if rate is None:  # an earlier version's record
            rate = max((row.lr for row in record.epochs if row.lr is not None), default=None)
        row = {
            "name": name,
            "data": record.data.name if record.data else NONE,
            "model": record.model.name.rpartition(", ")[2] if record.model else NONE,
            "lr": rate,
            "epochs": len([row for row in record.epochs if row.whole]),
            "images/s": record.throughput.median,
            "minutes": record.train_s and record.train_s / 60,
            "status": record.status,
            "limit": record.max_epochs or 0,
        }
        rows.append(row | _accuracy(record))
    runs = pd.DataFrame(rows).astype({column: float for column in COLUMNS if column not in WORDS})
    return runs.sort_values(column, ascending=column in WORDS, kind="stable")


def _accuracy(record: Record) -> dict[str, Any]:
    """Return the accuracy of the test, or else the best of validation, and its 95 % interval."""
    split = "test"
    accuracy = record.test and record.test.acc
    if accuracy is None:
        split = "val"
        validated = [row.val_acc for row in record.epochs if row.val_acc is not None]
        accuracy = max(validated, default=None)
    found = {"accuracy": accuracy, "split": split, "low": math.nan, "high": math.nan}
    images = record.data and record.data.images.get(split)
    if accuracy is not None and images:
        found["low"], found["high"] = interval(accuracy, images)
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    """Format a row of `tabulate`."""
    texts = {name: printable(row[name]) for name in WORDS}
    texts["lr"] = f"{row['lr']:.3g}"
    texts["epochs"] = f"{row['epochs']:.0f}"
    if row["limit"] > row["epochs"]:
        texts["epochs"] += f"/{row['limit']:.0f}"
    texts["accuracy"] = f"{row['split']} {100 * row['accuracy']:.1f} %"
    if not math.isnan(row["low"]):
        texts["accuracy"] += f" ({100 * row['low']:.0f} to {100 * row['high']:.0f})"
    texts["images/s"] = f"{row['images/s']:,.0f}"
    texts["minutes"] = f"{row['minutes']:.2f}"
    for name in COLUMNS:
        if name not in WORDS and math.isnan(row[name]):
            texts[name] = NONE
    return [texts[name] for name in COLUMNS]


def _table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], words: Sequence[int] = (0,)
) -> Table:
    """Return a table for the terminal, with the columns `words` on the left."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column, header in enumerate(headers):
        justify: Any = "left" if column in words else "right"
        # only the first column, and long settings, may take several lines
        is_fixed = column > 0 and len(headers) > 3
        shown.add_column(Text(header), justify=justify, overflow="fold", no_wrap=is_fixed)
    for row in rows:
        shown.add_row(*(Text(printable(str(cell))) for cell in row))
    return shown


def _figures(records: dict[str, Record]) -> tuple[str, dict[str, Any]]:
    """Return the curves of validation as Markdown and figures; the first runs have colours."""
    figures = {}
    lines = []
    for field, caption in (("val_acc", "Accuracy"), ("val_loss", "Loss")):
        curves = {}
        for name, record in records.items():
            points = pd.Series(
                [getattr(row, field) for row in record.epochs],
                [row.epoch + 1 for row in record.epochs],
                dtype=float,
            ).dropna()
            if len(points):
                curves[name] = points
        if curves:
            labels = min(len(curves), CURVES)
            paint = partial(_curves, curves=curves, title=f"validation {caption.lower()}")
            figures[field] = draw(paint, height=3 + 0.2 * labels)
            lines.append(f"![{caption} against epochs]({field})")
    return "\n".join(lines), figures


def _curves(axes: Axes, curves: dict[str, pd.Series], title: str) -> None:
    styles = itertools.product(("-", "--"), page.COLOURS)
    for points in list(curves.values())[CURVES:]:
        axes.plot(points, color=page.GREY, alpha=0.4, linewidth=1)
    for (name, points), (line, colour) in zip(curves.items(), styles, strict=False):
        label = name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}"
        axes.plot(points, line, color=colour, label=label, marker="o", markersize=3)
    axes.set(xlabel="epoch", ylabel=title)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")


def differences(first: str, second: str) -> list[tuple[str, Any, Any]]:
    """Return the settings in which two runs differ: the flag, and its value in each run.

    Args:
        first: Folder of a run.
        second: Folder of another run.

    Raises:
        UserError: When a run's `config.yaml` is missing or unreadable.
    """
    settings = []
    for folder in (first, second):
        config = read_yaml(str(Path(folder, "config.yaml")), "--diff")
        settings.append(dict(leaves(config)))
    one, other = settings
    rows = []
    for flag in sorted(one.keys() | other.keys()):
        values = one.get(flag, NONE), other.get(flag, NONE)
        if values[0] != values[1]:
            rows.append((f"--{flag.removesuffix('.class_path')}", *values))
    return rows

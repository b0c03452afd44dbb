"""Command `python -m app runs`: lists the trainings below a folder, and draws their curves.

FOLDER/runs.html has all runs' validation accuracy and loss on top of each other. The accuracy is
the test's, or else the best of validation, with its 95 % interval. --diff lists the settings in
which two runs differ.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.command.arguments import leaves, read_yaml
from app.command.parser import PlainParser
from app.errors import UserError, printable
from app.lab.compare.figures import curves_of, draw_curves
from app.lab.compare.report import number
from app.record import Record
from app.record.words import counted, interval
from app.system.files import write_text
from app.system.page import Section, page, table
from app.system.terminal import make_console

USAGE = "python -m app runs [FOLDER] [--sort COLUMN] | --diff RUN RUN"
COLUMNS = {  # and the format of their numbers; the others are text
    "name": "",
    "data": "",
    "model": "",
    "lr": ".3g",
    "epochs": "d",
    "accuracy": ".1%",
    "images/s": ",.0f",
    "minutes": ".2f",
    "status": "",
}
WORDS = [place for place, form in enumerate(COLUMNS.values()) if not form]
# files of a training, ours or another program's
TRACES = {"run.json", "metrics.csv", "hparams.yaml"}
CURVES = {"val_acc": "validation accuracy", "val_loss": "validation loss"}
DRAWN = 15  # largest number of runs in a figure
WIDEST = 1000  # columns of a file or a pipe, so that a run is one line


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
        "--sort", choices=COLUMNS, default="accuracy", help="column; the largest number is first"
    )
    parser.add_argument("--diff", nargs=2, metavar="RUN", help="folders of two runs to compare")
    options = parser.parse_args(arguments)
    console = make_console(highlight=False)
    if not console.is_terminal:
        console.width = WIDEST
    if options.diff:
        _print(console, ("setting", *options.diff), differences(*options.diff))
        return 0
    folder = Path(options.folder)
    records = {}
    for place in _run_folders(folder):
        try:
            records[str(place.relative_to(folder))] = _read(place)
        except ValueError as error:
            console.print(f"[yellow]left out: {escape(printable(str(error)))}", soft_wrap=True)
    if not records:
        raise UserError(f"runs {folder}: there is no run below this folder: give that of your runs")
    rows = tabulate(records, options.sort)
    cells = rows.drop(columns="value").to_numpy().tolist()
    _print(console, list(COLUMNS), cells)
    lines = []
    figures = {}
    for metric, title in CURVES.items():
        curves = curves_of({name: records[name] for name in rows["name"]}, metric)
        if not curves.empty:
            lines.append(f"![The {title} of up to {DRAWN} runs, by {options.sort}]({metric})")
            figures[metric] = draw_curves(curves.iloc[:, :DRAWN], title)
    listed = Section("Runs", table(list(COLUMNS), cells, WORDS))
    text = page(counted(len(records), "run"), "\n".join(lines), [listed], figures)
    write_text(folder / "runs.html", text)
    console.print(f"curves  {folder}/runs.html", soft_wrap=True)
    return 0


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of trainings in the order of their names.

    Trainings inside another one's folder, such as those of `replay`, belong to it.
    """
    for place, folders, files in os.walk(folder):
        folders.sort()
        if not TRACES.isdisjoint(files):
            folders.clear()
            yield Path(place)


def _read(folder: Path) -> Record:
    """Return the record of a run.

    Raises:
        ValueError: When it is unreadable, or another program's.
    """
    record = Record.load(folder / "run.json")
    if record.run_dir is None:
        raise ValueError(f"{folder}/run.json is not the record of a run")
    return record


def tabulate(records: dict[str, Record], column: str) -> pd.DataFrame:
    """Return a row of texts for each run, in the order of a column.

    Words are ordered from A to Z, numbers from the largest. `value` is the column's value.
    """
    rows = []
    for name, record in records.items():
        accuracy, note = _accuracy(record)
        values: dict[str, Any] = {
            "name": name,
            "data": record.data and record.data.name,
            "model": record.model and record.model.name.rpartition(", ")[2],
            "lr": record.lr or max((row.lr or 0.0 for row in record.epochs), default=None),
            "epochs": sum(row.whole for row in record.epochs),
            "accuracy": accuracy,
            "images/s": record.throughput.median,
            "minutes": record.train_s and record.train_s / 60,
            "status": record.status,
        }
        row = {name: number(value, COLUMNS[name]) for name, value in values.items()}
        row["accuracy"] += note
        rows.append(row | {"value": values[column]})
    is_text = not COLUMNS[column]
    return pd.DataFrame(rows).sort_values("value", ascending=is_text, kind="stable")


def _accuracy(record: Record) -> tuple[float | None, str]:
    """Return the accuracy of the test, or else the best of validation, and a note on it."""
    split = "test"
    accuracy = record.test.acc if record.test else None
    if accuracy is None:
        split = "val"
        validated = [row.val_acc for row in record.epochs if row.val_acc is not None]
        accuracy = max(validated, default=None)
    if accuracy is None:
        return None, ""
    images = record.data and record.data.images.get(split)
    if not images:
        return accuracy, f" {split}"
    low, high = interval(accuracy, images)
    return accuracy, f" ({100 * low:.0f} to {100 * high:.0f}) {split}"


def _print(console: Console, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; the terminal's width may break a cell into several lines."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for header in headers:
        is_number = bool(COLUMNS.get(header))
        shown.add_column(header, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(escape(printable(str(cell))) for cell in row))
    console.print(shown)


def differences(first: str, second: str) -> list[tuple[str, Any, Any]]:
    """Return the settings in which two runs differ: the flag, and its value in each run.

    Args:
        first: Folder of a run.
        second: Folder of another run.

    Raises:
        UserError: When a run's `config.yaml` is missing or unreadable.
    """
    configs = []
    for folder in (first, second):
        configs.append(dict(leaves(read_yaml(f"{folder}/config.yaml", "--diff"))))
    one, other = configs
    rows = []
    for flag in sorted(one | other):
        if one.get(flag) != other.get(flag):
            rows.append((f"--{flag}", one.get(flag), other.get(flag)))
    return rows

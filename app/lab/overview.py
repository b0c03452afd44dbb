"""Command `python -m app runs`: lists the trainings below a folder, and draws their curves.

FOLDER/runs.html has all runs' validation accuracy and loss on top of each other. The accuracy is
the test's, or else the best of validation, with its 95 % interval. --diff lists the settings in
which two runs differ.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

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
# columns, and the formats of numbers: a width aligns them in the terminal
FORMS = {
    "name": "",
    "data": "",
    "model": "",
    "lr": "7.3g",
    "epochs": "6d",
    "accuracy": "6.1%",
    "images/s": "8,.0f",
    "minutes": "7.2f",
    "status": "",
}
WORDS = (0, 1, 2, 8)
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
        "--sort", choices=FORMS, default="accuracy", help="column; the largest number is first"
    )
    parser.add_argument("--diff", nargs=2, metavar="RUN", help="folders of two runs to compare")
    options = parser.parse_args(arguments)
    if options.diff:
        _print(["setting", *options.diff], differences(*options.diff))
        return 0
    folder = Path(options.folder)
    records = read(folder)
    if not records:
        raise UserError(f"runs {folder}: there is no run below this folder: give that of your runs")
    rows = tabulate(records, options.sort)
    cells = rows.to_numpy().tolist()
    _print(list(FORMS), cells)
    lines = []
    figures = {}
    for metric, title in CURVES.items():
        curves = curves_of({name: records[name] for name in rows["name"]}, metric)
        if not curves.empty:
            lines.append(f"![The {title} of up to {DRAWN} runs, by {options.sort}]({metric})")
            figures[metric] = draw_curves(curves.iloc[:, :DRAWN], title)
    listed = Section("Runs", table(list(FORMS), cells, WORDS))
    title = counted(len(records), "run")
    write_text(folder / "runs.html", page(title, "\n".join(lines), [listed], figures))
    print(f"curves  {folder}/runs.html")
    return 0


def read(folder: Path) -> dict[str, Record]:
    """Return the record of each run below a folder, by the run's name; print what is no record.

    Runs directly inside another run's folder, such as `test_1`, belong to that run.
    """
    records = {}
    for path in sorted(folder.rglob("run.json")):
        if (path.parent.parent / path.name).exists():
            continue
        try:
            record = Record.load(path)
            if record.run_dir is None:
                raise ValueError(f"{path} is not the record of a run")
            records[str(path.parent.relative_to(folder))] = record
        except ValueError as error:
            print(printable(f"left out: {error}"))
    return records


def tabulate(records: dict[str, Record], column: str) -> pd.DataFrame:
    """Return a row of texts for each run, in the order of a column.

    Words are ordered from A to Z, numbers from the largest; missing ones come last.
    """
    rows = []
    notes = []
    for name, record in records.items():
        accuracy, note = _accuracy(record)
        notes.append(note)
        rows.append(
            {
                "name": name,
                "data": record.data and record.data.name,
                "model": record.model and record.model.name.rpartition(", ")[2],
                "lr": record.lr,
                "epochs": sum(row.whole for row in record.epochs),
                "accuracy": accuracy,
                "images/s": record.throughput.median,
                "minutes": record.train_s and record.train_s / 60,
                "status": record.status,
            }
        )
    values = pd.DataFrame(rows)
    texts = values.apply(lambda cells: [number(cell, FORMS[cells.name]) for cell in cells])
    texts["accuracy"] += notes
    order = values[column].sort_values(ascending=not FORMS[column], kind="stable")
    return texts.loc[order.index]


def _accuracy(record: Record) -> tuple[float | None, str]:
    """Return the accuracy of the test, or else the best of validation, and a note on it."""
    split = "test"
    accuracy = record.test.acc if record.test else None
    if accuracy is None:
        split = "val"
        accuracy = record.best_acc
    if accuracy is None:
        return None, ""
    images = record.data and record.data.images.get(split)
    if not images:
        return accuracy, f" {split}"
    low, high = interval(accuracy, images)
    return accuracy, f" ({100 * low:.0f} to {100 * high:.0f}) {split}"


def _print(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; in a narrow terminal, a cell takes several lines."""
    console = make_console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDEST
    columns = [Column(header, overflow="fold") for header in headers]
    shown = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for row in rows:
        shown.add_row(*map(printable, row))
    console.print(shown)


def differences(first: str, second: str) -> list[list[str]]:
    """Return the settings in which two runs differ: the flag, and its value in each run.

    Args:
        first: Folder of a run.
        second: Folder of another run.

    Raises:
        UserError: When a run's `config.yaml` is missing or unreadable.
    """
    settings = []
    for folder in (first, second):
        config = leaves(read_yaml(f"{folder}/config.yaml", "--diff"))
        settings.append({f"--{flag}": str(value) for flag, value in config})
    values = pd.DataFrame(settings).T.fillna("—").reset_index()
    return values[values[0] != values[1]].to_numpy().tolist()

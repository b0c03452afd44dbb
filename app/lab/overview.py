"""Command `python -m app runs`: lists the trainings below a folder, and draws their curves.

FOLDER/runs.html has all runs' validation accuracy and loss on top of each other. The accuracy is
the best of validation, with its 95 % interval. --diff lists the settings in which two runs differ.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.markdown import Markdown

from app.command.arguments import leaves, read_yaml
from app.command.parser import PlainParser
from app.errors import UserError, printable
from app.lab.compare.figures import curves_of, draw_curves
from app.lab.compare.report import number
from app.record import Record
from app.record.words import accuracy, counted
from app.system.files import write_text
from app.system.page import Section, page, table

USAGE = "python -m app runs [FOLDER] [--sort COLUMN] | --diff RUN RUN"
# columns, and the formats of numbers
FORMS = {
    "name": "",
    "data": "",
    "model": "",
    "lr": ".3g",
    "epochs": "d",
    "accuracy": "f",
    "images/s": ",.0f",
    "minutes": ".2f",
    "status": "",
}
CURVES = {"val_acc": "validation accuracy", "val_loss": "validation loss"}
DRAWN = 15  # largest number of runs in a figure


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
        _print(table(["setting", *options.diff], differences(options.diff), range(3)))
        return 0
    folder = Path(options.folder)
    records = read(folder)
    if not records:
        raise UserError(f"runs {folder}: there is no run below this folder: give that of your runs")
    rows = tabulate(records, options.sort)
    listed = table(list(FORMS), rows.to_numpy(), (0, 1, 2, 8))
    _print(listed)
    lines = []
    figures = {}
    for metric, title in CURVES.items():
        curves = curves_of({name: records[name] for name in rows["name"]}, metric)
        if not curves.empty:
            lines.append(f"![The {title} of up to {DRAWN} runs, by {options.sort}]({metric})")
            figures[metric] = draw_curves(curves.iloc[:, :DRAWN], title)
    sections = [Section("Runs", listed)]
    html = page(counted(len(records), "run"), "\n".join(lines), sections, figures)
    write_text(folder / "runs.html", html)
    print(f"curves  {folder}/runs.html")
    return 0


def _print(markdown: str) -> None:
    """Print a table with one line for each row, also in a narrow terminal or a pipe."""
    Console(width=1000, highlight=False).print(Markdown(printable(markdown)))


def read(folder: Path) -> dict[str, Record]:
    """Read the records of the runs below a folder, by name. Print each file that is no record.

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
    accuracies = []
    for name, record in records.items():
        best = record.best_epoch
        accuracies.append(accuracy(best.val_acc or 0.0, best.val_samples) if best else "—")
        rows.append(
            {
                "name": name,
                "data": record.data and record.data.name,
                "model": record.model and record.model.name.rpartition(", ")[2],
                "lr": record.lr,
                "epochs": sum(row.whole for row in record.epochs),
                "accuracy": best and best.val_acc,
                "images/s": record.throughput.median,
                "minutes": record.train_s and record.train_s / 60,
                "status": record.status,
            }
        )
    values = pd.DataFrame(rows)
    texts = values.apply(lambda cells: [number(cell, FORMS[cells.name]) for cell in cells])
    texts["accuracy"] = accuracies
    order = values[column].sort_values(ascending=not FORMS[column], kind="stable")
    return texts.loc[order.index]


def differences(runs: Sequence[str]) -> list[list[str]]:
    """Return the settings in which two runs differ: the flag, and its value in each run.

    Args:
        runs: Folders of the runs.

    Raises:
        UserError: When a run's `config.yaml` is missing or unreadable.
    """
    settings = []
    for folder in runs:
        config = leaves(read_yaml(f"{folder}/config.yaml", "--diff"))
        settings.append({f"--{flag}": str(value) for flag, value in config})
    values = pd.DataFrame(settings).T.fillna("—").reset_index()
    return values[values[0] != values[1]].to_numpy().tolist()

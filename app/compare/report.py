"""Writes the report of an experiment: Markdown, HTML made from it, CSV, JSON, PNGs."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from markdown_it import MarkdownIt

from app.compare.advice import advice
from app.compare.experiment import Experiment, command
from app.compare.figures import draw
from app.compare.results import COLUMNS, tabulate
from app.compare.runner import Outcome
from app.monitor.step_profiler import PHASES
from app.monitor.summary import markdown_table
from app.system.files import write_json

STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { border: 1px solid #ccc; padding: .3rem .6rem; text-align: right } th { background: #f3f3f3 }
th:first-child, td:first-child { text-align: left } img { max-width: 100% }
pre { background: #f6f6f6; padding: .7rem; white-space: pre-wrap } code { font-size: .9em }"""


def write_report(
    experiment: Experiment, outcomes: Sequence[Outcome], head: dict[str, Any], folder: Path
) -> tuple[str, pd.DataFrame, dict[str, Path]]:
    """Write report.md, report.html, results.csv, results.json and the pictures.

    Args:
        experiment: What was compared.
        outcomes: What became of each variant.
        head: What it was measured on: command, date, versions, hardware, driver.
        folder: The directory of the report.

    Returns:
        What to show in a terminal, as Markdown; the table; title and file of each picture.
    """
    baseline = experiment.baseline or outcomes[0].variant.name
    table = tabulate(outcomes, baseline)
    pictures = draw(table, outcomes, baseline, folder)
    table.to_csv(folder / "results.csv", index=False)
    commands = {outcome.variant.name: command(outcome.variant.processes()) for outcome in outcomes}
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    results = [
        {
            **row,
            "command": commands[outcome.variant.name],
            "reason": outcome.reason,
            "tail": outcome.tail,
            "runs": [record["run_dir"] for record in outcome.records.values()],
        }
        for row, outcome in zip(rows, outcomes, strict=True)
    ]
    write_json(folder / "results.json", {**head, "baseline": baseline, "variants": results})

    said = advice(table, baseline, commands)
    short = [f"# {experiment.name}", experiment.description, _head(head), _state(outcomes), "## Advice", *said]
    short += [*_tables(table, baseline), *_published(experiment, table), *_failures(outcomes)]
    long = [*short, "## Pictures", *(f"![{title}]({path.name})" for title, path in pictures.items())]
    long += ["## How it was measured", _method(experiment), "## Commands"]
    long += [f"{name}:\n\n{_code(typed)}" for name, typed in commands.items()]
    text = "\n\n".join(part for part in long if part) + "\n"
    (folder / "report.md").write_text(text)
    (folder / "report.html").write_text(page(str(experiment.name), text, pictures))
    return "\n\n".join(part for part in short if part), table, pictures


def _state(outcomes: Sequence[Outcome]) -> str:
    open_ = [outcome.variant.name for outcome in outcomes if outcome.status in ("waiting", "running")]
    return f"**Not complete**: {', '.join(open_)}. The same command goes on." if open_ else ""


def _code(text: str) -> str:
    """Quote text as it is, whatever is in it."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _number(value: Any, form: str, unit: str = "") -> str:
    return "—" if value is None or pd.isna(value) else f"{value:{form}}{unit}"


def _tables(table: pd.DataFrame, baseline: str) -> list[str]:
    rows = [row for _, row in table.iterrows() if not pd.isna(row["devices"])]
    if not rows:
        return []

    def speed(row: pd.Series) -> list[str]:
        rates = [_number(row[name], ",.0f") for name in ("samples_per_s", "samples_per_s_min", "samples_per_s_max")]
        return [
            row["variant"],
            f"{row['devices']:.0f} × {row['nodes']:.0f}",
            rates[0],
            "–".join(rates[1:]) if row["n"] > 1 else "—",
            f"{row['n']:.0f}",
            _number(row["speed_up"], ".2f"),
            _number(row["efficiency"], ".0%"),
        ]

    def training(row: pd.Series) -> list[str]:
        losses = [_number(row[f"loss_{name}"], ".4f") for name in ("first", "middle", "last")]
        times = [_number(row[name], ",.1f") for name in ("train_s", "setup_s")]
        return [row["variant"], *losses, _number(row["val_acc"], ".2%"), *times]

    def resources(row: pd.Series) -> list[str]:
        memory = [
            f"{_number(row[f'memory_{which}_gib'], '.3f')} ({_number(row[f'memory_{which}_percent'], '.0f', ' %')})"
            for which in ("main", "others")
        ]
        batch = f"{_number(row['global_batch'], '.0f')} / {_number(row['replica_batch'], 'g')}"
        processes = f"{row['processes']:.0f} × {row['threads']:.0f}"
        return [row["variant"], processes, batch, row["precision"], row["placement"] or "—", *memory]

    return [
        "## Speed",
        markdown_table(
            [
                "variant",
                "devices × nodes",
                "samples/s",
                "min–max",
                "n",
                f"speed-up over {baseline}",
                "scaling efficiency",
            ],
            map(speed, rows),
        ),
        "## Training",
        markdown_table(
            ["variant", "loss, first", "middle", "last epoch", "validation accuracy", "training (s)", "set-up (s)"],
            map(training, rows),
        ),
        "## Processes, batch and memory",
        markdown_table(
            [
                "variant",
                "processes × threads",
                "batch, global / per replica",
                "precision",
                "placement",
                "peak GiB, main device",
                "largest other",
            ],
            map(resources, rows),
        ),
        "## Where the time of a step goes, in milliseconds",
        markdown_table(
            ["variant", *(phase.replace("_", " + ") for phase in PHASES)],
            ([row["variant"], *(_number(row[f"{phase}_ms"], ".2f") for phase in PHASES)] for row in rows),
        ),
    ]


def _published(experiment: Experiment, table: pd.DataFrame) -> list[str]:
    """Set what was published beside what was measured here."""
    published = experiment.published
    if not published:
        return []
    here = table.set_index("variant")
    small = " **Here it is the small form of the experiment**, whose seconds are not comparable." * experiment.quick
    rows = []
    for entry in published.rows:
        for key, value in entry.figures.items():
            mine = here[key].get(entry.variant) if entry.variant in here.index else None
            theirs = value if isinstance(value, str) else f"{value:,g}" if value >= 1000 else f"{value:.7g}"
            rows.append([entry.what, COLUMNS.get(key, key), theirs, _number(mine, ",.6g"), entry.variant or "—"])
    return [
        "## Published, and here",
        f"Published on {published.hardware}. {published.note}{small}".strip(),
        markdown_table(["published for", "figure", "published", "here", "variant"], rows),
    ]


def _failures(outcomes: Sequence[Outcome]) -> list[str]:
    absent = [outcome for outcome in outcomes if outcome.reason]
    if not absent:
        return []
    rows = [[outcome.variant.name, outcome.status, str(outcome.reason)] for outcome in absent]
    parts = ["## Not measured", markdown_table(["variant", "status", "why"], rows)]
    for outcome in absent:
        if outcome.tail and outcome.status != "skipped":
            parts.append(f"The last lines that {outcome.variant.name} said:\n\n{_code(chr(10).join(outcome.tail))}")
    return parts


def _method(experiment: Experiment) -> str:
    batch = (
        "The global batch and the learning rate grow with the number of replicas (linear scaling rule; the rate of a "
        "scheduler is left as it is): variants do not take the same steps, and losses at the same epoch differ."
        if experiment.scale_batch
        else "The global batch is the same for all variants unless one sets it, so that they take the same steps: "
        "their losses differ by rounding alone, which a high learning rate amplifies over many steps."
    )
    return (
        f"{batch} Runs were made in turn ({experiment.repeats} of each variant), each a process of its own. samples/s "
        f"is the median over a run's logging windows after {experiment.warmup_epochs} epoch(s) of warm-up, then the "
        "median over the runs; min–max is over the runs, n is their number. Training runs from the first step to the "
        "last, validation included; set-up from the start of the process to the first step. Peak memory is what torch "
        "allocated on an accelerator; on a CPU it is that of the process. The phases of a step are medians over 20 "
        "steps near the beginning of rank zero; communication is what a step waits for after its last gradient."
    )


def _head(head: dict[str, Any]) -> str:
    """Say on what it was measured, when, and how to do it again."""
    hardware, versions = head["hardware"], head["versions"]
    gpus = f"{', '.join(hardware['gpus'])} (driver {head['driver']})" if hardware["gpus"] else "no GPU"
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return (
        f"Measured on {hardware['cpu']}, {hardware['cores']} cores, {gpus}, at {head['date'] or '—'}, with {known}; "
        f"load average at the start {head['load']:.1f}; by\n\n"
        f"{_code(head['command'])}"
    )


def page(title: str, text: str, pictures: dict[str, Path]) -> str:
    """Make a page of Markdown that needs no other file; HTML in a name or an output is shown, not interpreted."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    for path in pictures.values():
        data = base64.b64encode(path.read_bytes()).decode()
        body = body.replace(f'src="{path.name}"', f'src="data:image/png;base64,{data}"')
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>\n{STYLE}\n</style>\n{body}</html>\n"
    )

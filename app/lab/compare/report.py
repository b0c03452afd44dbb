"""Report of a comparison: HTML, Markdown, CSV, JSON, and plots as PNG."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from app.lab.compare.advice import Verdict, advice, busy, excluded, load_explains, ranks, verdict
from app.lab.compare.experiment import Experiment
from app.lab.compare.figures import Picture, pictures
from app.lab.compare.results import rate, tabulate
from app.lab.compare.runner import Outcome
from app.system.files import inert, write_json, write_text
from app.system.page import Section, code, page, plain, png, table

LINEAR_RULE = (
    "The global batch and the learning rate grow with the number of replicas (linear rule), "
    "so that losses differ."
)
SAME_BATCH = (
    "The global batch is the same unless a variant sets it, so that losses differ only by rounding."
)
SMALL_FORM = " **Here it is the small form of the experiment**, whose seconds are not comparable."


def write_report(
    experiment: Experiment, outcomes: Sequence[Outcome], head: dict[str, Any], folder: Path
) -> tuple[str, str | None, pd.DataFrame, dict[str, Path]]:
    """Write report.html, report.md, results.csv, results.json and the pictures.

    If other programs' load may explain why variants differ in speed, the report has no verdict,
    ranking or advice.

    Args:
        experiment: The experiment.
        outcomes: The outcome of each variant.
        head: Description of the measurement: command, date, versions, hardware, driver, usable
            cores.
        folder: The directory of the report.

    Returns:
        Four values: Markdown for the terminal, the command to run next or None, the table of
        results, and the file of each picture by the picture's title.
    """
    baseline = experiment.baseline or outcomes[0].variant.name
    results = tabulate(outcomes, baseline)
    commands = {outcome.variant.name: _command(outcome) for outcome in outcomes}
    cores = head["hardware"]["cores"]
    usable = head["usable_cores"]
    load = busy(results, cores, usable)
    if load and load_explains(results, cores, usable):
        result = Verdict(load, None, "Measure again when it is quiet:")
        shown = results.assign(speed_up=math.nan, efficiency=math.nan)
        places: dict[str, int] = {}
        advised = [result.reason]
        following = head["command"].removesuffix(" --fresh") + " --fresh"
        cautions = []
    else:
        result = verdict(results, baseline)
        shown = results
        places = ranks(results)
        advised = advice(results, baseline, usable)
        following = commands.get(str(result.recommended))
        cautions = excluded(results, baseline)
        if load:
            cautions.insert(0, f"**{load}.** Measure again when it is quiet, with `--fresh`.")
    drawn = pictures(shown, outcomes, baseline, result.recommended)
    if not places and "throughput" in drawn:
        drawn["throughput"] = drawn["throughput"]._replace(title=result.conclusion)
    results.map(inert).to_csv(folder / "results.csv", index=False)
    content = {
        "baseline": baseline,
        "verdict": {"said": result.conclusion, "taken": result.recommended},
        "variants": _rows(results, outcomes, commands),
    }
    write_json(folder / "results.json", head | content)

    lead = _lead(experiment, outcomes, cautions)
    heading = "Ranking"
    if not places:
        heading = "Measured"
    ranking = Section(heading, _ranking(shown, outcomes, baseline, places))
    recommended = Section("Recommendation", "\n\n".join(advised))
    tails = {o.variant.name: "\n".join(o.tail) for o in outcomes if o.tail}
    failures = Section("Last lines of failed runs", _listings(tails), folded=True)
    sections = [
        ranking,
        Section("Recommendation", "\n\n".join([*advised, code(following or "")])),
        Section("Loss and time", _images(drawn, "loss_epoch", "step")),
        Section("All figures", _figures(results), folded=True),
        Section("Published, and here", _published(experiment, results), folded=True),
        failures,
        Section("How it was measured", _method(experiment, head), folded=True),
        Section("Commands", _listings(commands), folded=True),
    ]
    above = f"{lead}\n\n{_images(drawn, 'throughput')}"
    figures = {f"{name}.png": picture.figure for name, picture in drawn.items()}
    write_text(folder / "report.html", page(result.conclusion, above, sections, figures))
    files = {}
    for name, (title, figure) in drawn.items():
        figure.suptitle(title, fontsize=11)  # a page has the title beside the figure
        files[title] = folder / f"{name}.png"
        files[title].write_bytes(png(figure))
    write_text(folder / "report.md", _markdown(result, above, sections))
    return _markdown(result, lead, [ranking, recommended, failures]), following, results, files


def _markdown(result: Verdict, lead: str, sections: Sequence[Section]) -> str:
    texts = [f"# {plain(result.conclusion)}", lead]
    for section in sections:
        if section.text:
            texts.append(f"## {section.heading}\n\n{section.text}")
    return "\n\n".join(texts) + "\n"


def _listings(texts: dict[str, str]) -> str:
    """Return a code block for each variant."""
    return "\n\n".join(f"{plain(name)}:\n\n{code(text)}" for name, text in texts.items())


def _rows(
    results: pd.DataFrame, outcomes: Sequence[Outcome], commands: dict[str, str]
) -> list[dict[str, Any]]:
    """Return a row for each variant, to write to results.json."""
    rows = json.loads(results.to_json(orient="records", double_precision=15))
    for row, outcome in zip(rows, outcomes, strict=True):
        row["command"] = commands[outcome.variant.name]
        row["reason"] = outcome.reason
        row["tail"] = outcome.tail
        row["runs"] = [record.run_dir for record in outcome.records.values()]
    return rows


def _command(outcome: Outcome) -> str:
    """Return the command that repeats a variant's runs; on a CPU, it sets OMP_NUM_THREADS, too."""
    threads = None
    for record in outcome.records.values():
        if record.accelerator == "cpu":
            threads = record.threads
    return outcome.variant.commands(threads)


def _images(drawn: dict[str, Picture], *names: str) -> str:
    images = []
    for name in names:
        if name in drawn:
            title = plain(drawn[name].title)
            images.append(f'![{title}]({name}.png "{title}")')
    return "\n".join(images)


def _lead(experiment: Experiment, outcomes: Sequence[Outcome], cautions: list[str]) -> str:
    """Return the top of the report: description, cautions, and variants whose runs are missing."""
    lead = plain(experiment.name)
    if experiment.description:
        lead += f": {plain(experiment.description)}"
    missing = ", ".join(outcome.variant.name for outcome in outcomes if outcome.status == "waiting")
    if missing:
        cautions.append(f"**Not complete: {plain(missing)}.** The same command continues.")
    return "\n\n> ".join([lead, *cautions])


def _number(value: Any, form: str = ",.6g") -> str:
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return "—"
    return f"{value:{form}}".replace("%", " %")


def _ranking(
    results: pd.DataFrame, outcomes: Sequence[Outcome], baseline: str, places: dict[str, int]
) -> str:
    """Return the table of variants by speed; unmeasured variants come last, with the reason."""
    rows = []
    for row, outcome in zip(results.to_dict("records"), outcomes, strict=True):
        name = row["variant"]
        notes = []
        if name == baseline:
            notes.append("baseline")
            row["efficiency"] = math.nan
        if outcome.status not in ("measured", "waiting") or outcome.reason:
            notes.append(f"{outcome.status}: {outcome.reason}")
        rates = outcome.medians
        rows.append(
            {
                "": str(places.get(name, "")),
                "variant": name,
                "samples/s": rate(rates) if rates else "—",
                f"× {baseline}": _number(row["speed_up"], ".2f"),
                "of the ideal": _number(row["efficiency"], ".0%"),
                "loss": _number(row["loss_last"], ".4f"),
                "validation": _number(row["val_acc"], ".1%"),
                "GiB": _number(row["memory_main_gib"], ".2f"),
                "note": "; ".join(notes),
            }
        )
    rows.sort(key=lambda row: places.get(row["variant"], math.inf))
    return table(
        list(rows[0]), [list(row.values()) for row in rows], words=(0, 1, len(rows[0]) - 1)
    )


def _figures(results: pd.DataFrame) -> str:
    """Return the table of all measurements: measurements in rows, variants in columns."""
    measured = results.drop(columns=["variant"]).dropna(axis="columns", how="all")
    rows = [[name, *map(_number, values)] for name, values in measured.items()]
    return table(["", *results["variant"]], rows)


def _published(experiment: Experiment, results: pd.DataFrame) -> str:
    """Return the table of published figures beside this machine's."""
    published = experiment.published
    if not published:
        return ""
    here: Any = results.set_index("variant").astype(object).T
    rows = []
    for entry in published.rows:
        for key, value in entry.figures.items():
            measured = here.get(entry.variant, {}).get(key)
            cells = [_number(value, ",.7g"), _number(measured)]
            rows.append([entry.what, key, *cells, entry.variant or "—"])
    headers = ["published for", "figure", "published", "here", "variant"]
    note = published.note
    if experiment.quick:
        note += SMALL_FORM
    return f"Published on {published.hardware}. {note}\n\n{table(headers, rows, words=(0, 1, 4))}"


def _method(experiment: Experiment, head: dict[str, Any]) -> str:
    """Return the method, the machine, the versions, and the command of the comparison."""
    batch = SAME_BATCH
    if experiment.scale_batch:
        batch = LINEAR_RULE
    machine = head["hardware"]
    gpus = "no GPU"
    if machine["gpus"]:
        gpus = f"{', '.join(machine['gpus'])} (driver {head['driver']})"
    versions = ", ".join(f"{name} {number}" for name, number in head["versions"].items() if number)
    return (
        f"{batch} Each run was a process of its own, in turn ({experiment.repeats} of each "
        "variant). "
        "samples/s is the median over a run's logging windows after "
        f"{experiment.warmup_epochs} epoch(s) of warm-up, then over the runs; ± is the largest "
        "deviation of a run. Two variants differ when the ranges of their runs do not overlap, and "
        "their medians differ by more than either range. Training time includes validation; set-up "
        "lasts until the first step. Peak memory is torch's on an accelerator, the process's on a "
        "CPU. Phases are those of 20 early steps on rank zero, scaled to samples/s.\n\n"
        f"Measured on {machine['cpu']}, {machine['cores']} cores, {gpus}, "
        f"at {head['date'] or '—'}, "
        f"with {versions}, "
        f"by\n\n{code(head['command'])}"
    )

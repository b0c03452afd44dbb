"""Report of a comparison: HTML, Markdown, CSV, JSON, and plots as PNG."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from app.lab.compare.advice import ACCURACY, RATE, Verdict, verdict
from app.lab.compare.experiment import Experiment
from app.lab.compare.figures import pictures
from app.lab.compare.results import tabulate
from app.lab.compare.runner import Outcome
from app.system.files import inert, write_json, write_text
from app.system.page import Section, code, page, plain, table, write_png

LINEAR_RULE = (
    "The global batch and the learning rate grow with the number of replicas (linear rule), "
    "so that losses differ."
)
SAME_BATCH = (
    "The global batch is the same unless a variant sets it, so that losses differ only by rounding."
)
# figures in the table of variants, and their formats
FORMS = {
    "speed_up": ".2f",
    "efficiency": ".0%",
    "loss_last": ".4f",
    "val_acc": ".1%",
    "memory_main_gib": ".2f",
}
FORMS_BY_ACCURACY = {
    "best_acc": ".2%",
    "best_acc_min": ".2%",
    "best_acc_max": ".2%",
    "train_s": ",.0f",
    "loss_last": ".4f",
}


def write_report(
    experiment: Experiment, outcomes: Sequence[Outcome], head: dict[str, Any], folder: Path
) -> tuple[str, str]:
    """Write report.html, report.md, results.csv, results.json and the pictures.

    Args:
        experiment: The experiment.
        outcomes: The outcome of each variant.
        head: Description of the measurement: command, date, versions, hardware, driver, usable
            cores.
        folder: The directory of the report.

    Returns:
        Markdown for the terminal, and the command to run next (may be empty).
    """
    baseline = experiment.baseline or outcomes[0].variant.name
    results = tabulate(outcomes, baseline)
    by = RATE if experiment.by == "speed" else ACCURACY
    result = verdict(results, baseline, head["hardware"]["cores"], head["usable_cores"], by)
    following = ""
    shown = results
    if result.is_busy:
        following = head["command"].removesuffix(" --fresh") + " --fresh"
        shown = results.assign(speed_up=math.nan, efficiency=math.nan)
    whole = results.convert_dtypes()  # without `.0` after whole numbers
    whole.map(inert).to_csv(folder / "results.csv", index=False)
    rows = json.loads(whole.to_json(orient="records", double_precision=15))
    failures = []
    for row, outcome in zip(rows, outcomes, strict=True):
        row["command"] = outcome.variant.commands()
        row["reason"] = outcome.reason
        row["tail"] = outcome.tail
        row["runs"] = [record.run_dir for record in outcome.records]
        if outcome.tail:
            lines = "\n".join(outcome.tail)
            failures.append(f"{plain(outcome.variant.name)}:\n\n{code(lines)}")
        if outcome.variant.name == result.recommended:
            following = row["command"]
    head |= {
        "baseline": baseline,
        "verdict": {"said": result.conclusion, "taken": result.recommended},
        "variants": rows,
    }
    write_json(folder / "results.json", head)

    drawn = pictures(shown, outcomes, baseline, result, by)
    figures = {}
    images = {}  # Markdown of each picture
    for name, (title, figure) in drawn.items():
        images[name] = f"![{plain(title)}]({name}.png)"
        figures[f"{name}.png"] = figure
    lead = _lead(experiment, outcomes, result)
    first = images.pop("throughput", "") or images.pop("accuracy", "")
    above = f"{lead}\n\n{first}"
    advice = "\n\n".join(result.advice)
    ranking = Section("Variants", _ranking(shown, outcomes, baseline, result, by))
    failed = Section("Last lines of failed runs", "\n\n".join(failures), folded=True)
    sections = [
        ranking,
        Section("Recommendation", f"{advice}\n\n{code(following)}"),
        Section("Loss and time", "\n".join(images.values())),
        Section("Published elsewhere", experiment.published, folded=True),
        failed,
        Section("How it was measured", _method(experiment, head), folded=True),
    ]
    write_text(folder / "report.html", page(result.conclusion, above, sections, figures))
    for name, (title, figure) in drawn.items():
        figure.suptitle(title)  # a page has the title beside the figure
        write_png(folder / f"{name}.png", figure)
    write_text(folder / "report.md", _markdown(result, above, sections))
    short = [ranking, Section("Recommendation", advice), failed]
    return _markdown(result, lead, short), following


def _markdown(result: Verdict, lead: str, sections: Sequence[Section]) -> str:
    texts = [f"# {plain(result.conclusion)}", lead]
    for section in sections:
        if section.text:
            texts.append(f"## {section.heading}\n\n{section.text}")
    return "\n\n".join(texts) + "\n"


def _lead(experiment: Experiment, outcomes: Sequence[Outcome], result: Verdict) -> str:
    """Return the top of the report: description, cautions, and variants whose runs are missing."""
    missing = ", ".join(outcome.variant.name for outcome in outcomes if outcome.status == "waiting")
    lead = [plain(": ".join(filter(None, [experiment.name, experiment.description])))]
    lead += result.cautions
    if missing:
        lead.append(f"**Not complete: {plain(missing)}.** The same command continues.")
    return "\n\n> ".join(lead)


def number(value: Any, form: str) -> str:
    """Format a number; text stays as it is, and a missing value becomes a dash."""
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return "—"
    return f"{value:{form}}".replace("%", " %")


def _ranking(
    results: pd.DataFrame, outcomes: Sequence[Outcome], baseline: str, result: Verdict, by: str
) -> str:
    """Return the table of variants, the best first; unmeasured ones come last, with the reason."""
    rows = []
    forms = FORMS
    headers = [f"× {baseline}", "of the ideal", "loss", "validation", "GiB"]
    if by == ACCURACY:
        forms = FORMS_BY_ACCURACY
        headers = ["accuracy", "lowest", "highest", "seconds", "loss"]
    for row, outcome in zip(results.to_dict("records"), outcomes, strict=True):
        name = row["variant"]
        note = outcome.note
        if name == baseline:
            note = f"baseline {note}"
        cells = [result.places.get(name, ""), name, outcome.rate]
        for column, form in forms.items():
            cells.append(number(row[column], form))
        rows.append([*cells, note])
    rows.sort(key=lambda row: row[0] or math.inf)
    return table(["", "variant", "samples/s", *headers, "note"], rows, words=(0, 1, 8))


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
    if experiment.by == "accuracy":
        batch += (
            " The accuracy is the best of a run's validation, then the median over the runs, each "
            "of which has another seed."
        )
    return (
        f"{batch} Each run was a process of its own, in turn ({experiment.repeats} of each "
        "variant). samples/s is the median over a run's logging windows after "
        f"{experiment.warmup_epochs} epoch(s) of warm-up, then over the runs; ± is the largest "
        "deviation of a run. Two variants differ when the ranges of their runs do not overlap, and "
        "their medians differ by more than either range. Training time includes validation; set-up "
        "lasts until the first step. Peak memory is torch's on an accelerator, the process's on a "
        "CPU. Phases are those of 20 early steps on rank zero, scaled to samples/s.\n\n"
        f"Measured on {machine['cpu']}, {machine['cores']} cores, {gpus}, with {versions}. "
        f"Report of {head['date']}, by\n\n{code(head['command'])}"
    )

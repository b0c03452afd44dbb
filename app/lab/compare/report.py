"""Report of a comparison: HTML, Markdown, CSV, JSON, and plots as PNG."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from app.lab.compare.advice import Verdict, advice, busy, excluded, load_explains, ranks, verdict
from app.lab.compare.experiment import Experiment
from app.lab.compare.figures import Picture, pictures
from app.lab.compare.results import COLUMNS, Column, rate, tabulate
from app.lab.compare.runner import Outcome
from app.system.files import inert, write_json, write_text
from app.system.page import Section, code, draw, page, plain, png, table


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
            cores, load.
        folder: The directory of the report.

    Returns:
        Four values: Markdown for the terminal, the command to run next or None, the table of
        results, and the file of each picture by the picture's title.
    """
    baseline = experiment.baseline or outcomes[0].variant.name
    results = tabulate(outcomes, baseline)
    cores = head["hardware"]["cores"]
    usable = head["usable_cores"]
    load = busy(results, cores, usable)
    commands = {outcome.variant.name: _command(outcome) for outcome in outcomes}
    if load and load_explains(results, cores, usable):
        result = Verdict(load, None)
        shown = results.assign(speed_up=math.nan, efficiency=math.nan)
        places = {}
        advised = ["Measure again when it is quiet:"]
        following = head["command"] + " --fresh" * ("--fresh" not in head["command"])
        cautions = []
    else:
        result = verdict(results, baseline)
        shown = results
        places = ranks(results)
        advised = advice(results, baseline, usable)
        following = commands.get(result.recommended or "")
        cautions = [f"**{load}.** Measure again when it is quiet, with `--fresh`."] if load else []
    drawn = pictures(shown, outcomes, baseline, result.recommended)
    if not places and "throughput" in drawn:
        drawn["throughput"] = drawn["throughput"]._replace(title=result.conclusion)
    summary = {"said": result.conclusion, "taken": result.recommended}  # keys of results.json
    results.map(inert).to_csv(folder / "results.csv", index=False)
    rows = _rows(results, outcomes, commands)
    write_json(
        folder / "results.json",
        {**head, "baseline": baseline, "verdict": summary, "variants": rows},
    )
    files = {picture.title: folder / f"{name}.png" for name, picture in drawn.items()}
    for picture, file in zip(drawn.values(), files.values(), strict=True):
        file.write_bytes(png(draw(picture.paint, picture.width, picture.height, picture.title)))

    lead = _lead(experiment, outcomes, [*cautions, *excluded(results, baseline)])
    ranking = Section(
        "Ranking" if places else "Measured", _ranking(shown, outcomes, baseline, places)
    )
    recommended = Section("Recommendation", "\n\n".join(advised))
    tails = [
        f"{plain(o.variant.name)}:\n\n{code(chr(10).join(o.tail))}" for o in outcomes if o.tail
    ]
    failures = Section("Last lines of failed runs", "\n\n".join(tails), folded=True)
    sections = [
        ranking,
        recommended._replace(
            text="\n\n".join([*advised, *([code(following)] if following else [])])
        ),
        Section("Loss and time", _images(drawn, "loss_epoch", "step")),
        Section("All figures", _figures(results), folded=True),
        Section("Published, and here", _published(experiment, results), folded=True),
        failures,
        Section("How it was measured", _method(experiment, head), folded=True),
        Section(
            "Commands",
            "\n\n".join(f"{plain(n)}:\n\n{code(line)}" for n, line in commands.items()),
            folded=True,
        ),
    ]
    above = "\n\n".join(filter(None, (lead, _images(drawn, "throughput"))))
    figures = {
        f"{name}.png": draw(picture.paint, picture.width, picture.height)
        for name, picture in drawn.items()
    }
    write_text(folder / "report.html", page(result.conclusion, above, sections, figures))
    write_text(folder / "report.md", _markdown(result, above, sections))
    return _markdown(result, lead, [ranking, recommended, failures]), following, results, files


def _markdown(result: Verdict, lead: str, sections: Sequence[Section]) -> str:
    texts = [
        f"# {plain(result.conclusion)}",
        lead,
        *(f"## {s.heading}\n\n{s.text}" for s in sections if s.text),
    ]
    return "\n\n".join(texts) + "\n"


def _rows(
    results: pd.DataFrame, outcomes: Sequence[Outcome], commands: dict[str, str]
) -> list[dict[Any, Any]]:
    """Return a row for each variant, to write to results.json."""
    rows = results.astype(object).where(results.notna(), None).to_dict("records")
    for row, outcome in zip(rows, outcomes, strict=True):
        runs = [record.run_dir for record in outcome.records.values()]
        row.update(
            command=commands[outcome.variant.name],
            reason=outcome.reason,
            tail=outcome.tail,
            runs=runs,
        )
    return rows


def _command(outcome: Outcome) -> str:
    """Return the command that repeats a variant's runs. For runs on a CPU, the command sets OMP_NUM_THREADS, too."""
    records = outcome.records.values()
    threads = {record.threads for record in records if record.hardware and not record.hardware.gpus}
    return outcome.variant.commands(threads.pop() if len(threads) == 1 else None)


def _images(drawn: dict[str, Picture], *names: str) -> str:
    titles = {name: plain(drawn[name].title) for name in names if name in drawn}
    return "\n".join(f'![{title}]({name}.png "{title}")' for name, title in titles.items())


def _lead(experiment: Experiment, outcomes: Sequence[Outcome], cautions: list[str]) -> str:
    """Return the top of the report as Markdown: description, cautions, and variants whose runs are missing."""
    missing = [outcome.variant.name for outcome in outcomes if outcome.status == "waiting"]
    if missing:
        cautions.append(
            f"**Not complete: {plain(', '.join(missing))}.** The same command continues."
        )
    description = f": {plain(experiment.description)}" if experiment.description else ""
    return "\n\n".join(
        [plain(experiment.name) + description, *(f"> {caution}" for caution in cautions)]
    )


def _number(value: Any, form: str = ",.6g") -> str:
    if isinstance(value, str):
        return value
    return "—" if value is None or pd.isna(value) else f"{value:{form}}".replace("%", " %")


def _ranking(
    results: pd.DataFrame, outcomes: Sequence[Outcome], baseline: str, place: dict[str, int]
) -> str:
    """Return the table of variants in order of speed; unmeasured variants come last, with the reason."""
    rows = []
    for row, outcome in zip(results.to_dict("records"), outcomes, strict=True):
        name = row["variant"]
        notes = ["baseline"] if name == baseline else []
        if outcome.status not in ("measured", "waiting") or outcome.reason:
            notes.append(f"{outcome.status}: {outcome.reason}")
        if not pd.isna(row["not_finite_since"]):
            notes.append(f"loss not finite from epoch {row['not_finite_since'] + 1:.0f} on")
        rows.append(
            {
                "": place.get(name, ""),
                "variant": name,
                "samples/s": rate(outcome.medians) if outcome.medians else "—",
                f"× {baseline}": _number(row["speed_up"], ".2f"),
                "of the ideal": _number(row["efficiency"] if name != baseline else None, ".0%"),
                "loss": _number(row["loss_last"], ".4f"),
                "validation": _number(row["val_acc"], ".1%"),
                "GiB": _number(row["memory_main_gib"], ".2f"),
                "note": "; ".join(notes),
            }
        )
    rows.sort(key=lambda row: row[""] or len(rows) + 1)
    kept = [
        name
        for name in rows[0]
        if name in ("", "variant") or any(row[name] not in ("—", "") for row in rows)
    ]
    words = [index for index, name in enumerate(kept) if name in ("", "variant", "note")]
    text = table(kept, [[row[name] for name in kept] for row in rows], words)
    if list(place.values()).count(1) > 1 and (results["n"] > 1).any():
        text += "\n\nVariants in place 1 tie within the spread of their runs."
    return text


def _figures(results: pd.DataFrame) -> str:
    """Return the table of all measurements, with a row for each measurement and a column for each variant."""
    names = [
        name
        for name in COLUMNS
        if name not in ("variant", "slow_rank") and results[name].notna().any()
    ]
    return table(
        ["", *results["variant"]],
        [[COLUMNS[name].heading, *map(_number, results[name])] for name in names],
    )


def _published(experiment: Experiment, results: pd.DataFrame) -> str:
    """Return the table of published figures beside this machine's."""
    published = experiment.published
    if not published:
        return ""
    here = results.set_index("variant")
    small = (
        " **Here it is the small form of the experiment**, whose seconds are not comparable."
        * experiment.quick
    )
    rows = [
        [
            entry.what,
            COLUMNS.get(key, Column(key)).heading,
            _number(value, ",g" if isinstance(value, float) and value >= 1000 else ".7g"),
            _number(here[key].get(entry.variant) if key in here else None),
            entry.variant or "—",
        ]
        for entry in published.rows
        for key, value in entry.figures.items()
    ]
    shown = table(
        ["published for", "figure", "published", "here", "variant"], rows, words=(0, 1, 4)
    )
    return f"Published on {published.hardware}. {published.note}{small}\n\n{shown}"


def _method(experiment: Experiment, head: dict[str, Any]) -> str:
    """Return the method, the machine and the versions, with the command to repeat the comparison."""
    batch = (
        "The global batch and the learning rate grow with the number of replicas (linear rule), so that losses differ."
        if experiment.scale_batch
        else "The global batch is the same unless a variant sets it, so that losses differ only by rounding."
    )
    machine = head["hardware"]
    gpus = (
        f"{', '.join(machine['gpus'])} (driver {head['driver']})" if machine["gpus"] else "no GPU"
    )
    versions = ", ".join(
        f"{name} {version}" for name, version in head["versions"].items() if version
    )
    return (
        f"{batch} Each run was a process of its own, in turn ({experiment.repeats} of each variant). samples/s is the "
        f"median over a run's logging windows after {experiment.warmup_epochs} epoch(s) of warm-up, then over the "
        "runs; ± is the largest deviation of a run. Two variants differ when the ranges of their runs do not overlap, "
        "and their medians differ by more than either range. Training time includes validation; set-up lasts until "
        "the first step. Peak memory is torch's on an accelerator, the process's on a CPU. Phases are those of 20 "
        "early steps on rank zero, scaled to samples/s.\n\n"
        f"Measured on {machine['cpu']}, {machine['cores']} cores, {gpus}, at {head['date'] or '—'}, with {versions}; "
        f"load average at the start {head['load']:.1f}; by\n\n{code(head['command'])}"
    )

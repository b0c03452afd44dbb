"""Writes the report of an experiment: a page, the same as Markdown, CSV, JSON, and the figures as PNG."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from app.compare.advice import Verdict, advice, busy, diverged, load_explains, ranks, verdict
from app.compare.experiment import Experiment
from app.compare.figures import Picture, pictures
from app.compare.results import COLUMNS, rate, tabulate
from app.compare.runner import Outcome
from app.monitor.report import read_metrics
from app.record import Record
from app.system.files import write_json, write_text
from app.system.page import Section, code, draw, page, plain, png, table

AGAIN = "Measure again when it is quiet, with `--fresh`."
ROUNDING = 1e-5  # largest relative difference of two losses that agree


def write_report(
    experiment: Experiment, outcomes: Sequence[Outcome], head: dict[str, Any], folder: Path
) -> tuple[str, str | None, pd.DataFrame, dict[str, Path]]:
    """Write report.html, report.md, results.csv, results.json and the pictures.

    If the load of other programs may explain the differences, the report has no verdict, ranking or advice.

    Args:
        experiment: The experiment.
        outcomes: The outcome of each variant.
        head: Circumstances: command, date, versions, hardware, driver, usable cores, load.
        folder: The directory of the report.

    Returns:
        Markdown for the terminal; the next command, or None; the table; title and file of each picture.
    """
    baseline = experiment.baseline or outcomes[0].variant.name
    found, cores, usable = tabulate(outcomes, baseline), head["hardware"]["cores"], head["usable_cores"]
    load = busy(found, cores, usable)
    withheld = load if load_explains(found, cores, usable) else None
    commands = {outcome.variant.name: _command(outcome) for outcome in outcomes}
    if withheld:
        result, shown, places = Verdict(withheld, None), found.assign(speed_up=math.nan, efficiency=math.nan), {}
        advised = ["Measure again when it is quiet:"]
        following = head["command"] + " --fresh" * ("--fresh" not in head["command"])
    else:
        result, shown, places = verdict(found, baseline), found, ranks(found)
        advised, following = advice(found, baseline, usable), commands.get(result.taken or "")
    drawn = pictures(shown, outcomes, baseline, result.taken)
    if withheld:
        drawn["throughput"] = drawn["throughput"]._replace(title=withheld)
    _write_results(found, outcomes, commands, {**head, "baseline": baseline, "verdict": result._asdict()}, folder)
    files = {}
    for name, picture in drawn.items():
        files[picture.title] = folder / f"{name}.png"
        files[picture.title].write_bytes(png(draw(picture.paint, picture.width, picture.height, picture.title)))

    lead = _lead(experiment, outcomes, [None if withheld else load and f"**{load}.** {AGAIN}", diverged(found)])
    ranking = Section("Ranking" if places else "Measured", _ranking(shown, outcomes, baseline, places))
    recommended = Section("Recommendation", "\n\n".join(advised))
    failures = Section("What the others said last", _tails(outcomes), folded=True)
    sections = [
        ranking,
        recommended._replace(text="\n\n".join([*advised, *([code(following)] if following else [])])),
        Section("Loss", f"{_images(drawn, 'loss_epoch', 'loss_difference')}\n\n{rounding(outcomes, baseline)}".strip()),
        Section("Time and memory", _images(drawn, "step", "memory")),
        Section("All figures", _figures(found), folded=True),
        Section("Published, and here", _published(experiment, found), folded=True),
        failures,
        Section("How it was measured", f"{_method(experiment)}\n\n{_head(head)}", folded=True),
        Section("Commands", "\n\n".join(f"{plain(n)}:\n\n{code(typed)}" for n, typed in commands.items()), folded=True),
    ]
    above = "\n\n".join(filter(None, (lead, _images(drawn, "throughput"))))
    figures = {f"{name}.png": draw(picture.paint, picture.width, picture.height) for name, picture in drawn.items()}
    write_text(folder / "report.html", page(result.said, above, sections, figures))
    write_text(folder / "report.md", _markdown(result, above, sections))
    return _markdown(result, lead, [ranking, recommended, failures]), following, found, files


def _markdown(result: Verdict, lead: str, sections: Sequence[Section]) -> str:
    parts = [f"# {plain(result.said)}", lead, *(f"## {s.heading}\n\n{s.text}" for s in sections if s.text)]
    return "\n\n".join(parts) + "\n"


def _write_results(
    found: pd.DataFrame, outcomes: Sequence[Outcome], commands: dict[str, str], head: dict[str, Any], folder: Path
) -> None:
    found.to_csv(folder / "results.csv", index=False)
    rows = found.astype(object).where(found.notna(), None).to_dict("records")
    results = [
        {
            **row,
            "command": commands[outcome.variant.name],
            "reason": outcome.reason,
            "tail": outcome.tail,
            "runs": [record.run_dir for record in outcome.records.values()],
        }
        for row, outcome in zip(rows, outcomes, strict=True)
    ]
    write_json(folder / "results.json", {**head, "variants": results})


def _command(outcome: Outcome) -> str:
    """Write what a person types to repeat the runs; on a CPU, with their threads."""
    records = outcome.records.values()
    threads = {record.threads for record in records if record.hardware and not record.hardware.gpus}
    return outcome.variant.commands(threads.pop() if len(threads) == 1 else None)


def _images(drawn: dict[str, Picture], *names: str) -> str:
    return "\n".join(
        f'![{plain(drawn[name].alt)}]({name}.png "{plain(drawn[name].title)}")' for name in names if name in drawn
    )


def _lead(experiment: Experiment, outcomes: Sequence[Outcome], cautions: list[str | None]) -> str:
    """Return the experiment's description, cautions, and unmeasured variants, as Markdown."""
    open_ = [outcome.variant.name for outcome in outcomes if outcome.status in ("waiting", "running")]
    if open_:
        cautions.append(f"**Not complete: {plain(', '.join(open_))}.** The same command continues.")
    asked = f"{plain(experiment.name)}: {plain(experiment.description)}" if experiment.description else ""
    return "\n\n".join([asked or plain(experiment.name), *(f"> {caution}" for caution in cautions if caution)])


def rounding(outcomes: Sequence[Outcome], baseline: str) -> str:
    """Return a sentence on how many steps each variant's loss agrees with the baseline's, or an empty string.

    Variants that differ in the first step are omitted.
    """
    runs = {outcome.variant.name: next(iter(outcome.records.values())) for outcome in outcomes if outcome.records}
    if baseline not in runs:
        return ""
    wanted, parts = _step_losses(runs[baseline]), []
    for name, record in runs.items():
        agrees = (_step_losses(record) / wanted - 1).abs().dropna() <= ROUNDING
        if name != baseline and agrees.iloc[:1].any():  # else it trains something else
            last = "in every logged step" if agrees.all() else f"until step {agrees.index[int(agrees.argmin()) - 1]:,}"
            parts.append(f"{plain(name)}: {last}")
    if not parts:
        return ""
    return (
        f"Losses within {ROUNDING:.0e} of {plain(baseline)}'s, relative: {'; '.join(parts)}. Devices sum in another "
        "order, which rounds differently; every step amplifies the difference; `python -m app verify` shows in "
        "float64 whether it is rounding."
    ).replace("e-0", "e-", 1)


def _step_losses(record: Record) -> pd.Series:
    rows = [row for row in read_metrics(Path(str(record.run_dir), "metrics.csv")) if "train_loss_step" in row]
    return pd.Series({int(row["step"]) + 1: row["train_loss_step"] for row in rows}, dtype=float)


def _number(value: Any, form: str, unit: str = "") -> str:
    return "—" if value is None or pd.isna(value) else f"{value:{form}}{unit}"


def _percent(value: float | None, digits: int) -> str:
    return "—" if value is None or pd.isna(value) else f"{100 * value:.{digits}f} %"


def _ranking(found: pd.DataFrame, outcomes: Sequence[Outcome], baseline: str, place: dict[str, int]) -> str:
    """Return a table of the variants in order of place; unmeasured ones follow, with the reason."""
    by_name = {outcome.variant.name: outcome for outcome in outcomes}
    order = [*place, *(name for name in by_name if name not in place)]
    ordered = sorted(found.to_dict("records"), key=lambda row: order.index(row["variant"]))
    learnt = bool(found["val_acc"].notna().any())
    headers = [
        "",
        "variant",
        "samples/s",
        f"× {baseline}",
        "of the ideal",
        "loss",
        *["validation"] * learnt,
        "GiB",
        "note",
    ]
    rows = []
    for row in ordered:
        outcome = by_name[row["variant"]]
        notes = ["baseline"] if row["variant"] == baseline else []
        if outcome.status not in ("measured", "waiting", "running") or outcome.reason:
            notes.append(f"{outcome.status}: {outcome.reason}")
        if not pd.isna(row["not_finite_since"]):
            notes.append(f"loss not finite from epoch {row['not_finite_since'] + 1:.0f} on")
        ideal = row["efficiency"] if row["variant"] != baseline else None
        shown = [place.get(row["variant"], ""), row["variant"], rate(outcome.medians) if outcome.medians else "—"]
        shown += [_number(row["speed_up"], ".2f"), _percent(ideal, 0), _number(row["loss_last"], ".4f")]
        shown += [_percent(row["val_acc"], 1)] * learnt + [_number(row["memory_main_gib"], ".2f"), "; ".join(notes)]
        rows.append(shown)
    kept = [i for i in range(len(headers)) if i < 2 or any(row[i] not in ("—", "") for row in rows)]
    cells = [[row[i] for i in kept] for row in rows]
    text = table([headers[i] for i in kept], cells, words=(0, 1, len(kept) - 1 if headers[kept[-1]] == "note" else 0))
    if list(place.values()).count(1) > 1 and (found["n"] > 1).any():
        text += "\n\nThose in place 1 are not told apart by their runs."
    return text


def _figures(found: pd.DataFrame) -> str:
    """Return a table of all figures, a row for each."""
    columns = {
        name: [value if isinstance(value, str) else _number(value, ",.6g") for value in found[name]]
        for name in COLUMNS
        if name not in ("variant", "slow_rank") and found[name].notna().any()
    }
    return table(["", *found["variant"]], [[COLUMNS[name], *values] for name, values in columns.items()])


def _published(experiment: Experiment, found: pd.DataFrame) -> str:
    """Set published figures beside those measured here."""
    published = experiment.published
    if not published:
        return ""
    here = found.set_index("variant")
    small = " **Here it is the small form of the experiment**, whose seconds are not comparable." * experiment.quick
    rows = []
    for entry in published.rows:
        for key, value in entry.figures.items():
            mine = here[key].get(entry.variant) if entry.variant in here.index else None
            theirs = value if isinstance(value, str) else f"{value:,g}" if value >= 1000 else f"{value:.7g}"
            rows.append([entry.what, COLUMNS.get(key, key), theirs, _number(mine, ",.6g"), entry.variant or "—"])
    parts = [
        f"Published on {published.hardware}. {published.note}{small}".strip(),
        table(["published for", "figure", "published", "here", "variant"], rows, words=(0, 1, 4)),
    ]
    return "\n\n".join(parts)


def _tails(outcomes: Sequence[Outcome]) -> str:
    """Return the last lines of output of failed runs."""
    tails = [outcome for outcome in outcomes if outcome.tail and outcome.status != "skipped"]
    return "\n\n".join(f"{plain(each.variant.name)}:\n\n{code(chr(10).join(each.tail))}" for each in tails)


def _method(experiment: Experiment) -> str:
    batch = (
        "The global batch and the learning rate grow with the number of replicas (linear rule), so that losses differ."
        if experiment.scale_batch
        else "The global batch is the same unless a variant sets it, so that losses differ by rounding alone."
    )
    return (
        f"{batch} Each run was a process of its own, in turn ({experiment.repeats} of each variant). samples/s is the "
        f"median over a run's logging windows after {experiment.warmup_epochs} epoch(s) of warm-up, then over the "
        "runs; ± is the largest deviation of a run. Two variants differ when the ranges of their runs do not overlap, "
        "and their medians differ by more than either range. A slow run was stopped at the time limit, and measured so "
        "far. Accuracies that guessing may reach are omitted. Training time includes validation; set-up lasts until "
        "the first step. Peak memory is torch's on an accelerator, the process's on a CPU. The phases of a step are "
        "those of 20 early steps on rank zero, scaled to samples/s; communication is the wait after the last gradient."
    )


def _head(head: dict[str, Any]) -> str:
    """Describe the circumstances of the measurement, and the command to repeat it."""
    hardware, versions = head["hardware"], head["versions"]
    gpus = f"{', '.join(hardware['gpus'])} (driver {head['driver']})" if hardware["gpus"] else "no GPU"
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return (
        f"Measured on {hardware['cpu']}, {hardware['cores']} cores, {gpus}, at {head['date'] or '—'}, with {known}; "
        f"load average at the start {head['load']:.1f}; by\n\n"
        f"{code(head['command'])}"
    )

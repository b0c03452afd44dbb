"""Recommendation from a comparison's measurements, in sentences."""

from dataclasses import dataclass, field

import pandas as pd

from app.record import PHASES, Hardware
from app.record.words import BUSY, accuracy, bottleneck, taken_cores
from app.system.page import plain

RATE = "samples_per_s"
ACCURACY = "best_acc"
# words, format, and the order of variants that tie
TERMS = {
    RATE: ("the fastest", "as fast as", "{:,.0f} samples/s".format, ["replicas", "is_other"]),
    ACCURACY: ("the most accurate", "as accurate as", "{:.2%}".format, ["train_s"]),
}
NEARLY_FULL = 80.0  # percent of a device's memory; a variant that uses more is limited by memory


@dataclass
class Verdict:
    """Result of a comparison.

    Attributes:
        conclusion: Result, one line of plain text.
        advice: Recommendation, sentences of Markdown.
        cautions: Warnings, sentences of Markdown.
        recommended: Name of the recommended variant, or None without a recommendation.
        places: Place of each ranked variant; variants that tie with the fastest have place 1.
        is_busy: Whether other programs' load may explain the differences, so that there is neither
            recommendation nor place.
    """

    conclusion: str
    advice: list[str]
    cautions: list[str] = field(default_factory=list)
    recommended: str | None = None
    places: dict[str, int] = field(default_factory=dict)
    is_busy: bool = False


def ranked(table: pd.DataFrame, by: str = RATE) -> pd.DataFrame:
    """Return the rows of measured variants, indexed by name, the best first.

    Variants with a non-finite loss are excluded; by speed, also those with a lower accuracy than
    the baseline's.
    """
    measured = table.dropna(subset=[by]).set_index("variant")
    excluded = measured["not_finite_since"].notna()
    if by == RATE:
        excluded |= measured["less_accurate"].eq(1)
    return measured[~excluded].sort_values(by, ascending=False)


def verdict(table: pd.DataFrame, baseline: str, cores: int, usable: int, by: str = RATE) -> Verdict:
    """Recommend the fastest or the most accurate variant, or report a tie or a busy machine.

    Two variants differ if the ranges of their runs do not overlap and their medians differ by more
    than either range. Otherwise, they tie. Among variants that tie with the fastest, recommend the
    one with the fewest devices; with the most accurate, the one that trains in the least time. If
    every variant has a single run, recommend the best, with a warning that its lead may be chance.

    Args:
        table: Table of `app.lab.compare.results.tabulate`.
        baseline: Name of the baseline.
        cores: Number of cores of this machine.
        usable: Number of cores that a process may use.
        by: Column that decides: `RATE` or `ACCURACY`.
    """
    rows = ranked(table, by)
    cautions = []
    others = table["others_cores"].max()
    if by == RATE and others > cores - (1 - BUSY) * usable:
        load = f"The machine was busy: other programs took up to {others:.1f} of its {cores} cores"
        if _load_explains(rows, cores, usable):
            return Verdict(load, ["Measure again when it is quiet:"], is_busy=True)
        cautions.append(f"**{load}.** Measure again when it is quiet, with `--fresh`.")
    cautions += _excluded(table, baseline, by)
    if rows.empty:
        return Verdict("Nothing was measured", ["The reasons are below."], cautions)
    tied = _tied(rows, by)
    best = rows.iloc[0]
    superlative, equal, form, keys = TERMS[by]
    figure = form(best[by])
    if len(rows) == 1:
        conclusion = f"{best.name}: {figure}"
        reason = "no other was measured"
    elif (rows["n"] < 2).all():
        conclusion = f"{best.name} was {superlative}, in a single run of each: {figure}"
        reason = "a single run of each does not tell a difference from chance. Give `--repeats 3`"
    elif len(tied) == 1:
        other = rows.iloc[1]
        reason = f"it is {plain(_lead(best, other, by))}, more than the spread of its runs"
        if baseline in rows.index[1:]:
            other = rows.loc[[baseline]].iloc[0]
        conclusion = f"{best.name} is {superlative}: {figure}, {_lead(best, other, by)}"
    else:
        tied = tied.assign(is_other=tied.index != baseline).sort_values(keys)
        best = tied.iloc[0]
        most = tied["replicas"].max()
        conclusion = (
            f"No winner: {len(tied)} variants are {equal} each other, within the spread of "
            "their runs"
        )
        reason = f"it is {equal} any"
        if by == ACCURACY:
            reason += ", and trains in the least time"
        elif best["replicas"] < most:
            reason += f", on {best['replicas']:g} of the {most:g} devices that others take"
    advice = [f"**Take {plain(best.name)}**: {reason}."]
    if by == ACCURACY and best["val_images"] > 0:
        measured = accuracy(best[by], best["val_images"])
        advice.append(f"{best['val_images']:,.0f} images measure its accuracy: {measured}.")
    elif rows["global_batch"].nunique() > 1:
        advice.append(
            "The global batches of the variants differ, and so does the number of steps per epoch: "
            "compare losses, too."
        )
    if by == RATE:
        advice += _of_one_processor(rows, baseline, usable) + _limit(best, usable)
    places = {str(name): place for place, name in enumerate(rows.index, 1)}
    places |= dict.fromkeys(tied.index, 1)
    return Verdict(conclusion, advice, cautions, str(best.name), places)


def _load_explains(rows: pd.DataFrame, cores: int, usable: int) -> bool:
    """Return whether other programs' load may explain why a variant is slower than the fastest.

    Suppose that other programs took s cores from a run of T seconds, on average. Then they delayed
    the run by at most s · T seconds. So on a quiet machine, the run would be at most 1 / (1 - s)
    times as fast. If s is 1 or more, the formula gives no limit.
    """
    needed = rows["replicas"] * rows["threads"].where(rows["accelerator"] == "cpu", 1)
    lacked = (needed.clip(upper=usable) - cores + rows["others_cores"]).clip(0, 1)
    undisturbed = rows["samples_per_s_max"] / (1 - lacked)
    return bool((undisturbed.iloc[1:] >= rows["samples_per_s_min"].head(1).max()).any())


def _excluded(table: pd.DataFrame, baseline: str, by: str) -> list[str]:
    """Return warnings about variants that cannot win because of their loss or accuracy."""
    warnings = []
    names = table.loc[table["not_finite_since"].notna(), "variant"]
    if len(names):
        warnings.append(f"**The loss of {plain(', '.join(names))} is not finite**: excluded below.")
    if by == ACCURACY:
        return warnings
    share = 100 * table.set_index("variant")["val_acc"]
    for name in table.loc[table["less_accurate"].eq(1), "variant"]:
        warnings.append(
            f"**{plain(name)} is less accurate than {plain(baseline)}**: {share[name]:.1f} %, "
            f"not {share[baseline]:.1f} %. No winner."
        )
    return warnings


def _lead(one: pd.Series, other: pd.Series, by: str) -> str:
    if by == ACCURACY:
        return f"{100 * (one[by] - other[by]):.2f} points above {other.name}"
    return f"{one[by] / other[by]:.2f} times as fast as {other.name}"


def _of_one_processor(rows: pd.DataFrame, baseline: str, cores: int) -> list[str]:
    """Return caveats for devices that are processes or threads of one CPU."""
    if not ((rows["accelerator"] == "cpu") & (rows["replicas"] > 1)).any():
        return []
    sentences = [
        "The devices here are processes or threads of one CPU: their gain says little about GPUs."
    ]
    if rows["threads"].get(baseline, 0) >= cores:
        sentences.append(
            f"{plain(baseline)} already uses all {cores} cores: more devices add no cores, so no "
            "ideal is shown. `OMP_NUM_THREADS=1` compares one core with several."
        )
    return sentences


def _tied(rows: pd.DataFrame, by: str = RATE) -> pd.DataFrame:
    """Return the best variant, and those that tie with it by the rule of `verdict`.

    Two variants with a single run each never tie.
    """
    best = rows.iloc[0]
    lead = best[by] - rows[by]
    spread = rows[f"{by}_max"] - rows[f"{by}_min"]
    overlap = rows[f"{by}_max"] >= best[f"{by}_min"]
    close = overlap | (lead <= spread.clip(lower=spread.iloc[0]))
    repeated = (rows["n"] > 1) | (best["n"] > 1)
    return rows[(rows.index == best.name) | (close & repeated)]


def _limit(row: pd.Series, cores: int) -> list[str]:
    """Return a remedy sentence for each limit of a variant: memory, and its steps' bottleneck."""
    fullest = row[["memory_main_percent", "memory_others_percent"]].max()
    name = plain(row.name)
    sentences = []
    if fullest >= NEARLY_FULL:
        remedy = "`--trainer.precision bf16-mixed` or a smaller `--data.batch_size`"
        sentences.append(
            f"**Memory limits {name}**: {fullest:.0f} % of a device is used. Try {remedy}."
        )
    if row["rest_ms"] >= 0:  # false if no step was timed, because the time is then NaN
        times = {phase: float(row[f"{phase}_ms"]) for phase in (*PHASES, "launch")}
        taken = taken_cores(row["others_cores"], Hardware("", cores))
        limit, remedy = bottleneck(times, row["accelerator"] != "cpu", row["placement"], taken)
        sentences.append(f"**{name} is limited by {limit[0].lower()}{limit[1:]}.** Try {remedy}.")
    return sentences

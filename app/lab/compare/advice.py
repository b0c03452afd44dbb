"""Recommendation from a comparison's measurements, in sentences."""

from dataclasses import dataclass, field

import pandas as pd

from app.record import PHASES, Hardware
from app.record.words import BUSY, bottleneck, taken_cores
from app.system.page import plain

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


def ranked(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of measured variants, indexed by name, the fastest first.

    Variants with a non-finite loss, or a lower accuracy than the baseline's, are excluded.
    """
    measured = table.dropna(subset=["samples_per_s"]).set_index("variant")
    measured = measured[measured["not_finite_since"].isna() & ~measured["less_accurate"].eq(1)]
    return measured.sort_values("samples_per_s", ascending=False)


def verdict(table: pd.DataFrame, baseline: str, cores: int, usable: int) -> Verdict:
    """Recommend the fastest variant, or report a tie or a busy machine.

    Two variants differ if the ranges of their runs do not overlap and their medians differ by more
    than either range. Otherwise, they tie. Among variants that tie with the fastest, recommend the
    one with the fewest devices. If every variant has a single run, recommend the fastest, with a
    warning that its lead may be chance.

    Args:
        table: Table of `app.lab.compare.results.tabulate`.
        baseline: Name of the baseline.
        cores: Number of cores of this machine.
        usable: Number of cores that a process may use.
    """
    rows = ranked(table)
    cautions = []
    others = table["others_cores"].max()
    if others > cores - (1 - BUSY) * usable:
        load = f"The machine was busy: other programs took up to {others:.1f} of its {cores} cores"
        if _load_explains(rows, cores, usable):
            return Verdict(load, ["Measure again when it is quiet:"], is_busy=True)
        cautions.append(f"**{load}.** Measure again when it is quiet, with `--fresh`.")
    cautions += _excluded(table, baseline)
    if rows.empty:
        return Verdict("Nothing was measured", ["The reasons are below."], cautions)
    tied = _tied(rows)
    best = rows.iloc[0]
    rate = f"{best['samples_per_s']:,.0f} samples/s"
    if len(rows) == 1:
        conclusion = f"{best.name}: {rate}"
        reason = "no other was measured"
    elif (rows["n"] < 2).all():
        conclusion = f"{best.name} was the fastest, in a single run of each: {rate}"
        reason = "a single run of each does not tell a difference from chance. Give `--repeats 3`"
    elif len(tied) == 1:
        other = rows.iloc[1]
        reason = f"it is {plain(_times(best, other))}, more than the spread of its runs"
        if baseline in rows.index[1:]:
            other = rows.loc[[baseline]].iloc[0]
        conclusion = f"{best.name} is the fastest: {rate}, {_times(best, other)}"
    else:
        tied = tied.assign(is_other=tied.index != baseline).sort_values(["replicas", "is_other"])
        best = tied.iloc[0]
        most = tied["replicas"].max()
        conclusion = (
            f"No winner: {len(tied)} variants are as fast as each other, within the spread of "
            "their runs"
        )
        reason = "it is as fast as any"
        if best["replicas"] < most:
            reason += f", on {best['replicas']:g} of the {most:g} devices that others take"
    advice = [f"**Take {plain(best.name)}**: {reason}."]
    if rows["global_batch"].nunique() > 1:
        advice.append(
            "The global batches of the variants differ, and so does the number of steps per epoch: "
            "compare losses, too."
        )
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


def _excluded(table: pd.DataFrame, baseline: str) -> list[str]:
    """Return warnings about variants that cannot win because of their loss or accuracy."""
    warnings = []
    names = table.loc[table["not_finite_since"].notna(), "variant"]
    if len(names):
        warnings.append(f"**The loss of {plain(', '.join(names))} is not finite**: excluded below.")
    percent = 100 * table.set_index("variant")["val_acc"]
    for name in table.loc[table["less_accurate"].eq(1), "variant"]:
        warnings.append(
            f"**{plain(name)} is less accurate than {plain(baseline)}**: {percent[name]:.1f} %, "
            f"not {percent[baseline]:.1f} %. No winner."
        )
    return warnings


def _times(one: pd.Series, other: pd.Series) -> str:
    return f"{one['samples_per_s'] / other['samples_per_s']:.2f} times as fast as {other.name}"


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


def _tied(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest variant, and those that tie with it by the rule of `verdict`.

    Two variants with a single run each never tie.
    """
    best = rows.iloc[0]
    lead = best["samples_per_s"] - rows["samples_per_s"]
    spread = rows["samples_per_s_max"] - rows["samples_per_s_min"]
    overlap = rows["samples_per_s_max"] >= best["samples_per_s_min"]
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

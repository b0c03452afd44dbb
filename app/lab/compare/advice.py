"""Recommendation from a comparison's measurements, in sentences."""

from typing import NamedTuple

import pandas as pd

from app.record import PHASES, Hardware
from app.record.words import BUSY, bottleneck, taken_cores
from app.system.page import plain

NEARLY_FULL = 80.0  # percent of a device's memory; a variant that uses more is limited by memory


class Verdict(NamedTuple):
    """Result of a comparison.

    Attributes:
        conclusion: Result, one line of plain text.
        recommended: Name of the recommended variant, or None without a recommendation.
        reason: The recommendation and its reason, a sentence of Markdown.
    """

    conclusion: str
    recommended: str | None
    reason: str = ""


def ranked(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of measured variants, indexed by name, the fastest first.

    Variants with a non-finite loss, or a lower accuracy than the baseline's, are excluded.
    """
    measured = table.dropna(subset=["samples_per_s"]).set_index("variant")
    measured = measured[measured["not_finite_since"].isna() & ~measured["less_accurate"].eq(1)]
    return measured.sort_values("samples_per_s", ascending=False)


def verdict(table: pd.DataFrame, baseline: str) -> Verdict:
    """Recommend the fastest variant, or report a tie.

    Two variants differ if the ranges of their runs do not overlap and their medians differ by more
    than either range. Otherwise, they tie. Among variants that tie with the fastest, recommend the
    one with the fewest devices. If every variant has a single run, recommend the fastest, with a
    warning that its lead may be chance.

    Args:
        table: Table of `app.lab.compare.results.tabulate`.
        baseline: Name of the baseline.
    """
    rows = ranked(table)
    if rows.empty:
        return Verdict("Nothing was measured", None, "Nothing was measured: the reasons are below.")
    best = rows.iloc[0]
    name = str(best.name)
    rate = f"{best['samples_per_s']:,.0f} samples/s"
    take = f"**Take {plain(name)}**"
    if len(rows) == 1:
        return Verdict(f"{name}: {rate}", name, f"{take}: no other was measured.")
    if (rows["n"] < 2).all():
        conclusion = f"{name} was the fastest, in a single run of each: {rate}"
        chance = "a single run of each does not tell a difference from chance. Give `--repeats 3`."
        return Verdict(conclusion, name, f"{take} for now: {chance}")
    tied = _tied(rows)
    if len(tied) == 1:
        second = rows.iloc[1]
        other = second
        if baseline in rows.index[1:]:
            other = rows.loc[[baseline]].iloc[0]
        conclusion = f"{name} is the fastest: {rate}, {_times(best, other)}"
        lead = plain(_times(best, second))
        return Verdict(conclusion, name, f"{take}: it is {lead}, more than the spread of its runs.")
    tied = tied.assign(is_other=tied.index != baseline).sort_values(["replicas", "is_other"])
    name = str(tied.index[0])
    few = tied["replicas"].min()
    most = tied["replicas"].max()
    fewer = ""
    if few < most:
        fewer = f", on {few} of the {most} devices that others take"
    conclusion = f"No winner: {len(tied)} variants are as fast as each other"
    return Verdict(
        f"{conclusion}, within the spread of their runs",
        name,
        f"**Take {plain(name)}**: it is as fast as any{fewer}.",
    )


def busy(table: pd.DataFrame, cores: int, usable: int) -> str | None:
    """Return a warning if other programs left too few of the usable cores free, else None.

    Args:
        table: Table of `app.lab.compare.results.tabulate`.
        cores: Number of cores of this machine.
        usable: Number of cores that a process may use.
    """
    others = table["others_cores"].max()
    if others > cores - (1 - BUSY) * usable:
        return f"The machine was busy: other programs took up to {others:.1f} of its {cores} cores"
    return None


def load_explains(table: pd.DataFrame, cores: int, usable: int) -> bool:
    """Return whether other programs' load may explain why a variant is slower than the fastest.

    Suppose that other programs took s cores from a run of T seconds, on average. Then they delayed
    the run by at most s · T seconds. So on a quiet machine, the run would be at most 1 / (1 - s)
    times as fast. If s is 1 or more, the formula gives no limit.

    Args:
        table: Table of `app.lab.compare.results.tabulate`.
        cores: Number of cores of this machine.
        usable: Number of cores that a process may use.
    """
    rows = ranked(table)
    needed = rows["replicas"] * rows["threads"].where(rows["accelerator"] == "cpu", 1)
    lacked = (needed.clip(upper=usable) - cores + rows["others_cores"]).clip(0, 1)
    undisturbed = rows["samples_per_s_max"] / (1 - lacked)
    return bool((undisturbed.iloc[1:] >= rows["samples_per_s_min"].head(1).max()).any())


def excluded(table: pd.DataFrame, baseline: str) -> list[str]:
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


def advice(table: pd.DataFrame, baseline: str, cores: int) -> list[str]:
    """Recommend a variant for this machine, in sentences of Markdown.

    Args:
        table: Table of `app.lab.compare.results.tabulate`.
        baseline: Name of the baseline.
        cores: Number of cores that a process may use.
    """
    rows = ranked(table)
    result = verdict(table, baseline)
    sentences = [result.reason]
    if result.recommended is None:
        return sentences
    if rows["global_batch"].nunique() > 1:
        sentences.append(
            "The global batches of the variants differ, and so does the number of steps per epoch: "
            "compare losses, too."
        )
    best = rows.loc[[result.recommended]].iloc[0]
    return [*sentences, *_of_one_processor(rows, baseline, cores), *_limit(best, cores)]


def _times(one: pd.Series, other: pd.Series) -> str:
    return f"{one['samples_per_s'] / other['samples_per_s']:.2f} times as fast as {other.name}"


def _of_one_processor(rows: pd.DataFrame, baseline: str, cores: int) -> list[str]:
    """Return caveats for devices that are processes or threads of one CPU."""
    several = rows[(rows["accelerator"] == "cpu") & (rows["replicas"] > 1)]
    if several.empty:
        return []
    sentences = [
        "The devices here are processes or threads of one CPU: their gain says little about GPUs."
    ]
    alone = rows["threads"].get(baseline, 0)
    if baseline not in several.index and alone >= cores > 1:
        sentences.append(
            f"{plain(baseline)} already uses all {cores} cores, with {alone} threads: more devices "
            "add no cores, so no ideal is shown. `OMP_NUM_THREADS=1` compares one core with "
            "several."
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


def ranks(table: pd.DataFrame) -> dict[str, int]:
    """Return each ranked variant's place; variants that tie with the fastest have place 1."""
    rows = ranked(table)
    if rows.empty:
        return {}
    places = {str(name): place for place, name in enumerate(rows.index, 1)}
    return places | dict.fromkeys(_tied(rows).index, 1)


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

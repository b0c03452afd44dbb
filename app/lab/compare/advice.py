"""Recommendation from a comparison's measurements, in sentences."""

from typing import NamedTuple

import pandas as pd

from app.record import PHASES, Hardware
from app.record.words import BUSY, bottleneck, taken_cores
from app.system.page import plain

NEARLY_FULL = (
    80.0  # from this percentage of a device's memory on, a variant counts as limited by memory
)


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
        chance = "a single run of each does not tell a difference from chance. Give `--repeats 3`."
        return Verdict(
            f"{name} was the fastest, in a single run of each: {rate}",
            name,
            f"{take} for now: {chance}",
        )
    tied = [best, *_as_good(rows, best)]
    if len(tied) == 1:
        other = rows.loc[[baseline]].iloc[0] if baseline in rows.index[1:] else rows.iloc[1]
        reason = (
            f"{take}: it is {plain(_times(best, rows.iloc[1]))}, more than the spread of its runs."
        )
        return Verdict(f"{name} is the fastest: {rate}, {_times(best, other)}", name, reason)
    fewest = min(tied, key=lambda row: (row["replicas"], row.name != baseline))
    few = fewest["replicas"]
    most = max(row["replicas"] for row in tied)
    fewer = f", on {few} device{'s' * (few > 1)} where others take {most}" if few < most else ""
    return Verdict(
        f"No winner: {len(tied)} variants are as fast as each other, within the spread of their runs",
        str(fewest.name),
        f"**Take {plain(fewest.name)}**: it is as fast as any{fewer}.",
    )


def busy(table: pd.DataFrame, cores: int, usable: int) -> str | None:
    """Return a warning if other programs left less than 90 % (`1 - BUSY`) of the usable cores free, else None.

    Args:
        table: Table of `app.lab.compare.results.tabulate`.
        cores: Number of cores of this machine.
        usable: Number of cores that a process may use.
    """
    others = table["others_cores"].max()
    took = f"The machine was busy: other programs took up to {others:.1f} of its {cores} cores"
    return took if others > cores - (1 - BUSY) * usable else None


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
    """Return Markdown warnings that name variants with a non-finite loss, or a lower accuracy than the baseline's."""
    warnings = []
    names = [str(name) for name in table.loc[table["not_finite_since"].notna(), "variant"]]
    if names:
        warnings.append(f"**The loss of {plain(', '.join(names))} is not finite**: excluded below.")
    accuracies = table.set_index("variant")["val_acc"]
    for name in table.loc[table["less_accurate"].eq(1), "variant"]:
        warnings.append(
            f"**{plain(name)} is less accurate than {plain(baseline)}**: {100 * accuracies[name]:.1f} %"
            f", not {100 * accuracies[baseline]:.1f} %. No winner."
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
            "The global batches of the variants differ, and so does the number of steps per epoch: compare losses, too."
        )
    sentences += [
        f"**{plain(variant)}: {plain(slow)}**, in each of its runs: the others wait for it in every step."
        for variant, slow in rows["slow_rank"].dropna().items()
    ]
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
    alone = rows["threads"].get(baseline)
    if baseline not in several.index and alone is not None and alone >= cores > 1:
        sentences.append(
            f"{plain(baseline)} already uses all {cores} cores, with {alone} threads: more devices add no cores, so no "
            "ideal is shown. `OMP_NUM_THREADS=1` compares one core with several."
        )
    return sentences


def _apart(one: pd.Series, other: pd.Series) -> bool:
    """Return whether `one` is faster than `other` beyond chance, by the rule of `verdict`."""
    spread = max(row["samples_per_s_max"] - row["samples_per_s_min"] for row in (one, other))
    faster = one["samples_per_s_min"] > other["samples_per_s_max"]
    return bool(faster and one["samples_per_s"] - other["samples_per_s"] > spread)


def _as_good(rows: pd.DataFrame, best: pd.Series) -> list[pd.Series]:
    """Return the other variants that tie with the fastest. Two variants with a single run each never tie."""
    others = [
        row for _, row in rows.iterrows() if row.name != best.name and max(row["n"], best["n"]) > 1
    ]
    return [row for row in others if not _apart(best, row)]


def ranks(table: pd.DataFrame) -> dict[str, int]:
    """Return each ranked variant's place in the order of speed. Variants that tie with the fastest have place 1."""
    rows = ranked(table)
    if rows.empty:
        return {}
    tied = {row.name for row in _as_good(rows, rows.iloc[0])}
    return {str(name): 1 if name in tied else place for place, name in enumerate(rows.index, 1)}


def _limit(row: pd.Series, cores: int) -> list[str]:
    """Return a sentence with a remedy for each limit of a variant: its memory, and the bottleneck of its steps."""
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

"""Sentences about the figures of a comparison, which claim only what the figures show."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from app.record import PHASES
from app.record.words import bottleneck
from app.system.page import plain

NEARLY_FULL = 80.0  # percent of a device's memory
BUSY = 0.1  # above this share of the cores, other programs disturb
NAMED = 3  # variants that a sentence names


class Verdict(NamedTuple):
    """Result of a comparison.

    Attributes:
        said: The result in a line of plain text.
        taken: The recommended variant, or None without a measurement.
    """

    said: str
    taken: str | None


def ranked(table: pd.DataFrame) -> pd.DataFrame:
    """Return the variants with samples/s and a finite loss, by their names, the fastest first."""
    measured = table.dropna(subset=["samples_per_s"]).set_index("variant")
    measured = measured[measured["not_finite_since"].isna()]
    return measured.sort_values("samples_per_s", ascending=False)


def verdict(table: pd.DataFrame, baseline: str) -> Verdict:
    """Name the fastest variant, or state that the runs do not decide.

    Two variants differ when the ranges of their runs do not overlap and their medians differ by more than either
    range; a single run has no range, and decides nothing. Of equally fast variants, the one with the fewest devices is
    recommended. A variant whose loss is not finite is excluded.

    Args:
        table: Table of `app.compare.results.tabulate`.
        baseline: Name of the baseline.
    """
    rows = ranked(table)
    if rows.empty:
        return Verdict("Nothing was measured", None)
    best = rows.iloc[0]
    rate = f"{best['samples_per_s']:,.0f} samples/s"
    if len(rows) == 1:
        return Verdict(f"{best.name}: {rate}", str(best.name))
    if (rows["n"] < 2).all():
        return Verdict(f"{best.name} was the fastest, in a single run of each: {rate}", str(best.name))
    tied = _as_good(rows, best)
    if tied:
        fewest = min([best, *tied], key=lambda row: (row["replicas"], row.name != baseline))
        names = _listed([str(row.name) for row in [best, *tied]])
        return Verdict(
            f"No winner: {names} are as fast as each other, within the spread of their runs", str(fewest.name)
        )
    other = rows.loc[[baseline]].iloc[0] if baseline in rows.index[1:] else rows.iloc[1]
    return Verdict(f"{best.name} is the fastest: {rate}, {_times(best, other)}", str(best.name))


def busy(table: pd.DataFrame, cores: int, usable: int) -> str | None:
    """Return a sentence on the cores that other programs took, or None where they left enough.

    Args:
        table: As `app.compare.results.tabulate` makes it.
        cores: Number of cores of this machine.
        usable: Number of cores that a process may use.
    """
    others = table["others_cores"].max()
    took = f"The machine was busy: other programs took up to {others:.1f} of its {cores} cores"
    return took if others > cores - (1 - BUSY) * usable else None


def load_explains(table: pd.DataFrame, cores: int, usable: int) -> bool:
    """Decide whether a variant may be slower than the fastest only because other programs took its cores.

    Each second that a core spends on another program delays a step by at most one second. On a quiet machine, a run
    that lacked a share of a core would be at most 1 / (1 - share) times as fast. A run that lacked a whole core has no
    such bound.

    Args:
        table: As `app.compare.results.tabulate` makes it.
        cores: Number of cores of this machine.
        usable: Number of cores that a process may use.
    """
    rows = ranked(table)
    needed = rows["replicas"] * rows["threads"].where(rows["accelerator"] == "cpu", 1)
    lacked = (needed.clip(upper=usable) - cores + rows["others_cores"]).clip(0, 1)
    undisturbed = rows["samples_per_s_max"] / (1 - lacked)
    return bool((undisturbed.iloc[1:] >= rows["samples_per_s_min"].head(1).max()).any())


def diverged(table: pd.DataFrame) -> str | None:
    """Return a sentence of Markdown on the variants whose loss is not finite, or None."""
    names = [str(name) for name in table.loc[table["not_finite_since"].notna(), "variant"]]
    return f"**The loss of {plain(', '.join(names))} is not finite**: excluded below." if names else None


def advice(table: pd.DataFrame, baseline: str, cores: int) -> list[str]:
    """Recommend a variant for this machine, in sentences of Markdown.

    Args:
        table: Table of `app.compare.results.tabulate`.
        baseline: Name of the baseline.
        cores: Cores of this machine.
    """
    rows, taken = ranked(table), verdict(table, baseline).taken
    if taken is None:
        return ["Nothing was measured: see below why."]
    best, take = rows.iloc[0], rows.loc[[taken]].iloc[0]
    name = f"**Take {plain(taken)}**"
    if len(rows) == 1:
        said = [f"{name}: no other was measured."]
    elif (rows["n"] < 2).all():
        said = [f"{name} for now: a single run of each does not tell a difference from chance. Give `--repeats 3`."]
    elif tied := _as_good(rows, best):
        most = max(row["replicas"] for row in (best, *tied))
        few = f"{take['replicas']} device{'' if take['replicas'] == 1 else 's'}"
        fewer = f", on {few} where others take {most}" if take["replicas"] < most else ""
        said = [f"{name}: it is as fast as any{fewer}."]
    else:
        second = rows.iloc[1]
        said = [f"{name}: it is {plain(_times(best, second))}, more than runs of the same differ."]
    if rows["global_batch"].nunique() > 1:
        said.append(
            "Their global batches differ: at the same epoch they have taken different steps, so compare losses, too."
        )
    for each, slow in rows["slow_rank"].dropna().items():
        said.append(f"**{plain(each)}: {plain(slow)}**, in each of its runs: the others wait for it in every step.")
    impossible = rows[(rows["efficiency"] > 1.2) & (rows["replicas"] > 1)]
    if len(impossible):
        said.append(
            f"**{plain(', '.join(map(str, impossible.index)))}: more than the ideal**. Something must have disturbed "
            "the others: measure again on a quiet machine, with `--fresh`."
        )
    said += _of_one_processor(rows, baseline, cores)
    return said + _limit(take)


def _listed(names: Sequence[str]) -> str:
    """Name the first of several: `a, b and c`, `a, b, c and 4 more`."""
    shown = [*names[:NAMED], *[f"{len(names) - NAMED} more"] * (len(names) > NAMED)]
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _times(one: pd.Series, other: pd.Series) -> str:
    return f"{one['samples_per_s'] / other['samples_per_s']:.2f} times as fast as {other.name}"


def _of_one_processor(rows: pd.DataFrame, baseline: str, cores: int) -> list[str]:
    """Explain results of several devices on one processor, from the threads of the runs."""
    several = rows[(rows["accelerator"] == "cpu") & (rows["replicas"] > 1)]
    if several.empty:
        return []
    said = ["The devices here are processes or threads of one CPU: what they gain says little about GPUs."]
    alone = rows["threads"].get(baseline)
    if baseline not in several.index and alone is not None and alone >= cores > 1:
        said[0] += (
            f" {plain(baseline)} uses all {cores} cores already, by its {alone} threads: more devices add none, and "
            "there is no ideal; `OMP_NUM_THREADS=1` would compare one core with several."
        )
    threads = several["threads"] * several["processes"]
    if (threads > cores).any():
        said.append(
            f"{plain(threads.idxmax())} runs {threads.max()} threads on {cores} cores, which take turns: try a smaller "
            "`OMP_NUM_THREADS`."
        )
    return said


def apart(one: pd.Series, other: pd.Series) -> bool:
    """Decide whether all runs of one are faster than all of the other, and by more than runs of either differ."""
    spread = max(row["samples_per_s_max"] - row["samples_per_s_min"] for row in (one, other))
    faster = one["samples_per_s_min"] > other["samples_per_s_max"]
    return bool(faster and one["samples_per_s"] - other["samples_per_s"] > spread)


def _as_good(rows: pd.DataFrame, best: pd.Series) -> list[pd.Series]:
    """List the variants that equal the best one within the spread of the runs, if either has several runs."""
    others = [row for _, row in rows.iterrows() if row.name != best.name and max(row["n"], best["n"]) > 1]
    return [row for row in others if not apart(best, row)]


def ranks(table: pd.DataFrame) -> dict[str, int]:
    """Rank the variants, the fastest first; variants that equal it within the spread share the first place."""
    rows = ranked(table)
    if rows.empty:
        return {}
    tied = {row.name for row in _as_good(rows, rows.iloc[0])}
    return {str(name): 1 if name in tied else place for place, name in enumerate(rows.index, 1)}


def _limit(best: pd.Series) -> list[str]:
    """Name a variant's bottleneck, and a remedy."""
    said = []
    fullest = max(best["memory_main_percent"], best["memory_others_percent"], key=lambda v: -1 if pd.isna(v) else v)
    if fullest >= NEARLY_FULL:
        said.append(
            f"**Memory limits {plain(best.name)}**: {fullest:.0f} % of a device is used. Try "
            "`--trainer.precision bf16-mixed` or a smaller `--data.batch_size`."
        )
    times = {phase: float(best[f"{phase}_ms"]) for phase in (*PHASES, "launch")}
    if not sum(times[phase] for phase in PHASES) > 0:
        return said  # no step was timed
    limit, remedy = bottleneck(times, best["accelerator"] == "cuda", best["placement"])
    return [*said, f"**{plain(best.name)} is limited by {limit[0].lower()}{limit[1:]}.** Try {remedy}."]

"""Says in sentences what the figures of a comparison mean."""

from collections.abc import Mapping

import pandas as pd

from app.monitor.step_profiler import PHASES

OVERHEAD = 0.35  # share of a step from which on a phase, other than the model's own work, is what limits it
LAUNCH_BOUND = 0.9  # share of its own work from which on a GPU waits for the host to launch it
MOSTLY = 0.65  # share of a step that the model's own work should have
NEARLY_FULL = 80.0  # percent of a device's memory


def advice(table: pd.DataFrame, baseline: str, commands: Mapping[str, str]) -> list[str]:
    """Recommend what to use here, in sentences of Markdown.

    Two variants differ when the ranges of their runs do not overlap and their medians differ by more than either
    range; with a single run there is no range, and nothing is claimed. A variant whose loss is not finite is not
    recommended.

    Args:
        table: As `app.compare.results.tabulate` makes it.
        baseline: The variant that the others are compared with.
        commands: The command of each variant.
    """
    measured = table.dropna(subset=["samples_per_s"]).set_index("variant")
    diverged = [str(name) for name in measured.index[measured["not_finite_since"].notna()]]
    measured = measured.assign(per_device=measured["samples_per_s"] / measured["replicas"]).drop(diverged)
    said = [f"**The loss of {', '.join(diverged)} is not finite**: left out of what follows."] if diverged else []
    if measured.empty:
        return [*said, "Nothing was measured: see below why."]
    ranked = measured.sort_values("samples_per_s", ascending=False)
    best, taken = ranked.iloc[0], ranked.iloc[0]
    said.append(f"**Fastest: {best.name}**, {best['samples_per_s']:,.0f} samples/s.")
    if len(ranked) > 1:
        said[-1] += f" {_against(best, ranked.iloc[1])}"
    if best.name != baseline and baseline in ranked.index[2:]:
        said.append(_against(best, ranked.iloc[list(ranked.index).index(baseline)]))
    if ranked["global_batch"].nunique() > 1:
        said.append(
            "Their global batches differ: at the same epoch they have taken different steps, so compare losses, too."
        )
    for name, slow in ranked["slow_rank"].dropna().items():
        said.append(f"**{name}: {slow}**, in each of its runs: the others wait for it in every step.")
    fewer = [row for row in _as_good(ranked, best) if row["replicas"] < best["replicas"]]
    if fewer:
        taken = min(fewer, key=lambda row: row["replicas"])
        said.append(f"**{taken.name} is as fast with {int(taken['replicas'])} device(s)**: take that.")
    frugal = ranked.sort_values("per_device").iloc[-1]
    if frugal.name != best.name:
        others = [str(row.name) for row in _as_good(ranked, frugal, "per_device")]
        same = f", no better than {', '.join(others)} by the spread of the runs" if others else ""
        said.append(f"**Best for each device: {frugal.name}**, {frugal['per_device']:,.0f} samples/s from each{same}.")
    impossible = ranked[(ranked["efficiency"] > 1.2) & (ranked["replicas"] > 1)]
    if len(impossible):
        said.append(
            f"**{', '.join(map(str, impossible.index))}: more than the ideal**. Something must have disturbed the "
            "others: measure again on a quiet machine, with `--fresh`."
        )
    if (ranked["accelerator"] == "cpu").any() and (ranked["replicas"] > 1).any():
        said.append(
            "The devices here are processes or threads of one CPU, which share its cores: what they gain says little "
            "about GPUs, and the ideal line cannot be reached, for one process already uses several cores."
        )
    said += _limit(taken, ranked)
    return [*said, f"The command of {taken.name}:\n\n```\n{commands[str(taken.name)]}\n```"]


def _against(one: pd.Series, other: pd.Series) -> str:
    """Say how much faster one variant is, and whether that is more than the spread of the runs."""
    ratio = one["samples_per_s"] / other["samples_per_s"]
    if min(one["n"], other["n"]) < 2:
        return (
            f"It is {ratio:.2f} times as fast as {other.name} in a single run: whether that is more than chance is not "
            "known, so give `--repeats 3`."
        )
    if apart(one, other):
        return f"It is {ratio:.2f} times as fast as {other.name}, more than runs of the same differ."
    return f"**No real difference to {other.name}**: {ratio:.2f} times as fast, which is within the spread of the runs."


def apart(one: pd.Series, other: pd.Series) -> bool:
    """Decide whether all runs of one are faster than all of the other, and by more than runs of either differ."""
    spread = max(row["samples_per_s_max"] - row["samples_per_s_min"] for row in (one, other))
    faster = one["samples_per_s_min"] > other["samples_per_s_max"]
    return bool(faster and one["samples_per_s"] - other["samples_per_s"] > spread)


def _as_good(ranked: pd.DataFrame, best: pd.Series, by: str = "samples_per_s") -> list[pd.Series]:
    """List the variants that several runs do not tell apart from the best one."""
    rates = [name for name in ranked.columns if name.startswith("samples_per_s")]

    def scaled(row: pd.Series) -> pd.Series:
        return row[rates] / (row["replicas"] if by == "per_device" else 1)

    rows = [row for _, row in ranked.iterrows() if row.name != best.name and min(row["n"], best["n"]) > 1]
    return [row for row in rows if not apart(scaled(best), scaled(row))]


def _limit(best: pd.Series, ranked: pd.DataFrame) -> list[str]:
    """Say what limits a variant, and what to try next that was not tried here."""
    said = []
    fullest = max(best["memory_main_percent"], best["memory_others_percent"], key=lambda v: -1 if pd.isna(v) else v)
    if fullest >= NEARLY_FULL:
        said.append(
            f"**Memory limits {best.name}**: {fullest:.0f} % of a device is used. Try "
            "`--trainer.precision bf16-mixed` or a smaller `--data.batch_size`."
        )
    times = best[[f"{phase}_ms" for phase in PHASES]].astype(float)
    if times.isna().any() or not times.sum():
        return said
    share = times / times.sum()
    remedies = {
        "data": ("Data loading", _for_data(best)),
        "communication": (
            "Communication",
            "a larger `--data.batch_size`, which needs fewer exchanges for the same images, or fewer devices",
        ),
        "optimizer": ("The optimizer", "a larger `--data.batch_size`, which needs fewer updates for the same images"),
        "rest": (
            "Launch overhead",
            "a larger `--data.batch_size`: Python's work between the calls is the same for every step",
        ),
    }
    phase = max(remedies, key=lambda name: share[f"{name}_ms"])
    part, own = share[f"{phase}_ms"], share["forward_backward_ms"]
    waits = best["accelerator"] == "cuda" and best["launch_ms"] >= LAUNCH_BOUND * best["forward_backward_ms"]
    if part < OVERHEAD and waits:
        phase, part = "rest", own
    if part >= OVERHEAD:
        what, remedy = remedies[phase]
        return [*said, f"**{what} limits {best.name}**: {part:.0%} of a step. Try {remedy}."]
    ideas = []
    if best["accelerator"] == "cuda" and not (ranked["replicas"] > best["replicas"]).any():
        ideas.append("more devices")
    if best["accelerator"] == "cuda" and not ranked["precision"].str.startswith("bf16").any():
        ideas.append("`--trainer.precision bf16-mixed`")
    ideas.append("a larger `--data.batch_size`, which keeps the hardware busier")
    judged = ", as it should be" if own >= MOSTLY else ""
    said.append(
        f"**The model's own computation limits {best.name}**: {own:.0%} of a step{judged}. Try {' or '.join(ideas)}."
    )
    return said


def _for_data(best: pd.Series) -> str:
    """Say what may help a variant that waits for its data."""
    if best["placement"] == "disk":
        return "another `--data.num_workers`, or `--data.placement memory` where nothing is augmented image by image"
    return "`--data.placement device`, or less augmentation" if best["placement"] == "memory" else "less augmentation"

"""What the figures mean, in words."""

from collections.abc import Mapping

import pandas as pd

from app.profiling import PHASES

OVERHEAD = 0.35  # share of a step from which on a phase, other than the model's own work, is what limits it
NEARLY_FULL = 80.0  # percent of a device's memory


def advice(table: pd.DataFrame, baseline: str, commands: Mapping[str, str], on_gpu: bool) -> list[str]:
    """Sentences on what to use here, in Markdown.

    Two variants differ when the ranges of their runs do not overlap; with a single run there is no range, and
    nothing is claimed.

    Args:
        table: As `app.compare.results.tabulate` makes it.
        baseline: The variant that the others are compared with.
        commands: The command of each variant.
        on_gpu: Whether the devices are GPUs; several processes on one CPU compete for its cores.
    """
    measured = table.dropna(subset=["samples_per_s"]).set_index("variant")
    if measured.empty:
        return ["Nothing was measured: see below why."]
    ranked = measured.sort_values("samples_per_s", ascending=False)
    best = ranked.iloc[0]
    said = [f"**Fastest: {best.name}**, {best['samples_per_s']:,.0f} samples/s."]
    if len(ranked) > 1:
        said[0] = f"{said[0]} {_against(best, ranked.iloc[1])}"
    if best.name != baseline and baseline in measured.index and (len(ranked) < 2 or ranked.index[1] != baseline):
        said.append(_against(best, ranked.iloc[list(ranked.index).index(baseline)]))
    said += _others_no_better(ranked, best)
    per_device = measured["samples_per_s"] / (measured["devices"] * measured["nodes"])
    frugal = str(per_device.idxmax())
    if per_device.nunique() > 1:
        said.append(f"**Best for each device: {frugal}**, {per_device[frugal]:,.0f} samples/s from each.")
    if not on_gpu and (measured["devices"] * measured["nodes"] > 1).any():
        said.append(
            "The devices here are processes or threads of one CPU, which share its cores: what they gain says little "
            "about GPUs, and the ideal line cannot be reached, for one process already uses several cores."
        )
    said += _limit(best, ranked, on_gpu)
    said += [f"The command of {best.name}:\n\n```\n{commands[str(best.name)]}\n```"]
    return said


def _against(one: pd.Series, other: pd.Series) -> str:
    """Compare two variants, with regard to the spread of their runs."""
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
    """Whether the runs of the one are all faster than those of the other."""
    return bool(one["samples_per_s_min"] > other["samples_per_s_max"])


def _others_no_better(ranked: pd.DataFrame, best: pd.Series) -> list[str]:
    """Name the simplest variant that is as good as the best."""
    same = [row for _, row in ranked.iloc[1:].iterrows() if row["n"] > 1 and best["n"] > 1 and not apart(best, row)]
    fewer = [row for row in same if row["devices"] * row["nodes"] < best["devices"] * best["nodes"]]
    if not fewer:
        return []
    least = min(fewer, key=lambda row: row["devices"] * row["nodes"])
    return [f"{least.name} is as fast with {int(least['devices'] * least['nodes'])} device(s): take that."]


def _limit(best: pd.Series, ranked: pd.DataFrame, on_gpu: bool) -> list[str]:
    """What limits the best variant, and what to try next that was not tried here."""
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
        "data": (
            "Data loading",
            "`--data.placement memory` or `device` where the images fit and are not augmented one by one, else another "
            "`--data.num_workers`",
        ),
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
    part = share[f"{phase}_ms"]
    if part >= OVERHEAD:
        what, remedy = remedies[phase]
        said.append(f"**{what} limits {best.name}**: {part:.0%} of a step. Try {remedy}.")
    else:
        replicas = ranked["devices"] * ranked["nodes"]
        ideas = ["more devices"] if on_gpu and not (replicas > best["devices"] * best["nodes"]).any() else []
        if not ranked["precision"].str.startswith("bf16").any():
            ideas.append("`--trainer.precision bf16-mixed`")
        ideas.append("a larger `--data.batch_size`, which keeps the hardware busier")
        said.append(
            f"**The model's own computation limits {best.name}**: {share['forward_backward_ms']:.0%} of a step, as it "
            f"should be. Try {' or '.join(ideas)}."
        )
    return said

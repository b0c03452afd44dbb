"""Collects the figures of each variant from the records of its runs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from app.compare.runner import Outcome
from app.monitor.rank_times import slow_ranks
from app.record import PHASES
from app.system.machine import usable_cores

# name in results.csv: heading in the report, with its unit
COLUMNS = {
    "variant": "variant",
    "status": "status",
    "devices": "devices",
    "nodes": "nodes",
    "replicas": "devices in all",
    "processes": "processes",
    "threads": "threads per process",
    "global_batch": "global batch",
    "replica_batch": "batch per replica",
    "precision": "precision",
    "placement": "placement",
    "loss_first": "loss, first epoch",
    "loss_middle": "loss, middle epoch",
    "loss_last": "loss, last epoch",
    "val_acc": "validation accuracy",
    "train_s": "training (s)",
    "setup_s": "set-up (s)",
    "samples_per_s": "samples/s",
    "samples_per_s_min": "samples/s, min",
    "samples_per_s_max": "samples/s, max",
    "n": "n",
    "speed_up": "speed-up",
    "efficiency": "scaling efficiency",
    "memory_main_gib": "peak memory, main device (GiB)",
    "memory_others_gib": "peak memory, largest other (GiB)",
    "memory_main_percent": "peak memory, main device (%)",
    "memory_others_percent": "peak memory, largest other (%)",
    **{f"{phase}_ms": f"{phase.replace('_', ' + ')} (ms)" for phase in PHASES},
    "launch_ms": "of which launching (ms)",
    "accelerator": "accelerator",
    "not_finite_since": "loss not finite since epoch",
    "slow_rank": "slow rank",
    "others_cores": "cores taken by other programs",
}

# figure: its field of the run record, and how to combine several runs
FIGURES = {
    "devices": ("devices", "first"),
    "nodes": ("num_nodes", "first"),
    "replicas": ("replicas", "first"),
    "processes": ("world_size", "first"),
    "threads": ("threads", "first"),
    "global_batch": ("global_batch_size", "first"),
    "precision": ("precision", "first"),
    "placement": ("placement", "first"),
    **{f"loss_{name}": (f"train_loss.{name}", "median") for name in ("first", "middle", "last")},
    "train_s": ("train_s", "median"),
    "setup_s": ("setup_s", "median"),
    "samples_per_s": ("throughput.median", "median"),
    "samples_per_s_min": ("throughput.median", "min"),
    "samples_per_s_max": ("throughput.median", "max"),
    "n": ("throughput.median", "count"),
    **{f"{phase}_ms": (f"time_per_step.{phase}", "median") for phase in (*PHASES, "launch")},
    "not_finite_since": ("not_finite_since", "first"),
    "others_cores": ("others_cores", "median"),
}
TEXT = ("precision", "placement")
WHOLE = ("devices", "nodes", "replicas", "processes", "threads", "global_batch", "n")
RUN = ("variant", "repeat")
OF_THE_WHOLE = ("loss_middle", "loss_last", "val_acc", "train_s")  # figures that a run without its end does not have


def rate(rates: Sequence[float]) -> str:
    """Write samples/s of several runs: their median, and the most by which one of them differs from it."""
    median = statistics.median(rates)
    spread = max(max(rates) - median, median - min(rates))
    return f"{median:,.0f} ± {spread:,.0f}" if len(rates) > 1 else f"{median:,.0f}"


def tabulate(outcomes: Sequence[Outcome], baseline: str) -> pd.DataFrame:
    """Make one row for each variant, in order; the columns are those of `COLUMNS`, missing figures NaN.

    samples_per_s is the median over the runs of each run's median over its windows, with min and max of the same
    medians. Times, losses and accuracies are medians over the runs; peak memory is the largest. Speed-up is the ratio
    of samples/s to the baseline's. Efficiency is the speed-up divided by the ratio of device counts; except for the
    baseline, it is NaN if these counts are equal or the baseline uses all cores. The phases of a step add up to the
    step time of samples_per_s, in the proportions of the timed steps.
    """
    records = [
        {**asdict(record), "variant": outcome.variant.name, "repeat": repeat}
        for outcome in outcomes
        for repeat, record in outcome.records.items()
    ]
    variants = pd.DataFrame([{"variant": o.variant.name, "status": o.status} for o in outcomes]).set_index("variant")
    table = variants.join([_figures(records), _accuracy(records), _memory(records), _slow_rank(outcomes)])
    base = table.loc[[baseline]].iloc[0]
    table.loc[table["status"] == "slow", list(OF_THE_WHOLE)] = math.nan
    table["replica_batch"] = table["global_batch"] / table["replicas"]
    table["speed_up"] = table["samples_per_s"] / base["samples_per_s"]
    grown = table["replicas"] / base["replicas"]
    all_cores = base["accelerator"] == "cpu" and base["threads"] * base["replicas"] >= usable_cores() > 1
    scaled = (grown != 1) & (not all_cores)
    table["efficiency"] = (table["speed_up"] / grown).where(scaled | (table.index == baseline))
    return table.reset_index().reindex(columns=list(COLUMNS)).astype(dict.fromkeys(WHOLE, "Int64"))


def _figures(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Take the figures of `FIGURES`, for each variant."""
    runs = pd.json_normalize(records).reindex(columns=["variant", *{field for field, _ in FIGURES.values()}])
    numbers = {field: float for field, _ in FIGURES.values() if field not in TEXT}
    return runs.astype(numbers).groupby("variant").agg(**FIGURES)


def _accuracy(records: list[dict[str, Any]]) -> pd.Series:
    """Take the validation accuracy of each run's last validated epoch, and the median for each variant.

    All are dropped if guessing may reach most of them: if they are not above chance by three standard deviations.
    """
    fields = ["data.classes", "data.images.val"]
    epochs = pd.json_normalize(records, "epochs", [*RUN]).reindex(columns=[*RUN, "val_acc"]).astype({"val_acc": float})
    accuracy = epochs.groupby([*RUN])["val_acc"].last().groupby("variant").median()
    of = (
        pd.json_normalize(records)
        .reindex(columns=["variant", *fields])
        .groupby("variant")[fields]
        .first()
        .astype(float)
    )
    chance = 1 / of["data.classes"]
    guessed = chance + 3 * (chance * (1 - chance) / of["data.images.val"]) ** 0.5
    at_chance = accuracy <= guessed.reindex(accuracy.index)
    return accuracy * math.nan if at_chance.mean() > 0.5 else accuracy


def _memory(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Take the peak memory of the first device and of the largest of the others: torch's, or the process' on a CPU."""
    fields = {"rank": int, "device": str, "allocated_gib": float, "host_rss_gib": float, "total_gib": float}
    peaks = pd.json_normalize(records, "peak_memory", [*RUN]).reindex(columns=[*RUN, *fields]).astype(fields)
    peaks = peaks.drop_duplicates([*RUN, "rank", "device"])
    peaks["gib"] = peaks["allocated_gib"].fillna(peaks["host_rss_gib"])
    peaks["percent"] = 100 * peaks["gib"] / peaks["total_gib"]
    others = peaks.groupby([*RUN]).cumcount() > 0
    largest = [
        peaks[of].groupby("variant")[["gib", "percent"]].max().add_prefix(f"memory_{which}_")
        for which, of in (("main", ~others), ("others", others))
    ]
    accelerator = peaks.groupby("variant")["device"].first().str.replace(":.*", "", regex=True).rename("accelerator")
    return pd.concat([*largest, accelerator], axis=1)


def _slow_rank(outcomes: Sequence[Outcome]) -> pd.Series:
    """Describe the ranks that were slower than the others in every run of a variant."""
    lines = {}
    for outcome in outcomes:
        runs = [slow_ranks(record.ranks) for record in outcome.records.values()]
        always = [line for rank, line in (runs[-1] if runs else {}).items() if all(rank in run for run in runs)]
        lines[outcome.variant.name] = "; ".join(always) or None
    return pd.Series(lines, name="slow_rank", dtype=object)

"""Table of results: one row per variant, from its runs' records."""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from app.lab.compare.runner import Outcome
from app.monitor.rank_times import slow_ranks
from app.record import PHASES, Record
from app.system.machine import usable_cores

FIRST = itemgetter(0)


class Column(NamedTuple):
    """Column of results.csv.

    Attributes:
        heading: Heading in the report, with the unit.
        field: Field of the run record; None for a computed column.
        combine: Function that combines the values of several runs.
    """

    heading: str
    field: str | None = None
    combine: Callable[[list[Any]], Any] = FIRST


COLUMNS = {
    "variant": Column("variant"),
    "status": Column("status"),
    "devices": Column("devices", "devices"),
    "nodes": Column("nodes", "num_nodes"),
    "replicas": Column("devices in all", "replicas"),
    "processes": Column("processes", "world_size"),
    "threads": Column("threads per process", "threads"),
    "global_batch": Column("global batch", "global_batch_size"),
    "replica_batch": Column("batch per replica"),
    "precision": Column("precision", "precision"),
    "placement": Column("placement", "placement"),
    "loss_first": Column("loss, first epoch", "train_loss.first", median),
    "loss_middle": Column("loss, middle epoch", "train_loss.middle", median),
    "loss_last": Column("loss, last epoch", "train_loss.last", median),
    "val_acc": Column("validation accuracy"),
    "val_images": Column("validation images"),
    "less_accurate": Column("less accurate than the baseline"),
    "train_s": Column("training (s)", "train_s", median),
    "setup_s": Column("set-up (s)", "setup_s", median),
    "samples_per_s": Column("samples/s", "throughput.median", median),
    "samples_per_s_min": Column("samples/s, min", "throughput.median", min),
    "samples_per_s_max": Column("samples/s, max", "throughput.median", max),
    "n": Column("n", "throughput.median", len),
    "speed_up": Column("speed-up"),
    "efficiency": Column("scaling efficiency"),
    "memory_main_gib": Column("peak memory, main device (GiB)"),
    "memory_others_gib": Column("peak memory, largest other (GiB)"),
    "memory_main_percent": Column("peak memory, main device (%)"),
    "memory_others_percent": Column("peak memory, largest other (%)"),
    **{
        f"{p}_ms": Column(f"{p.replace('_', ' + ')} (ms)", f"time_per_step.{p}", median)
        for p in PHASES
    },
    "launch_ms": Column("of which launching (ms)", "time_per_step.launch", median),
    "accelerator": Column("accelerator", "accelerator"),
    "not_finite_since": Column("loss not finite since epoch", "not_finite_since"),
    "slow_rank": Column("slow rank"),
    "others_cores": Column("cores taken by other programs", "others_cores", median),
}
TEXT = ("variant", "status", "precision", "placement", "accelerator", "slow_rank")
WHOLE = ("devices", "nodes", "replicas", "processes", "threads", "global_batch", "n")
OF_THE_WHOLE = (
    "loss_middle",
    "loss_last",
    "val_acc",
    "train_s",
)  # NaN for a run stopped by the time limit


def rate(rates: Sequence[float]) -> str:
    """Format samples/s of several runs: their median ± the largest deviation from it."""
    middle = median(rates)
    spread = max(max(rates) - middle, middle - min(rates))
    return f"{middle:,.0f} ± {spread:,.0f}" if len(rates) > 1 else f"{middle:,.0f}"


def tabulate(outcomes: Sequence[Outcome], baseline: str) -> pd.DataFrame:
    """Return one row for each variant, in order, with the columns of `COLUMNS`; a missing value is NaN.

    - samples_per_s: median over the runs. A run's value is the median over its logging windows. The
      columns with `_min` and `_max` are the minimum and the maximum over the runs.
    - Times, losses, accuracies: medians over the runs.
    - Peak memory: maximum over the runs.
    - speed_up: samples/s divided by the baseline's.
    - efficiency: speed-up divided by the ratio of device counts; 1 for the baseline. Another
      variant's efficiency is NaN if it has as many devices as the baseline, or if the baseline uses
      all cores of a CPU.
    - less_accurate: 1 if val_acc is below the baseline's by more than two standard errors, else 0.
    - Phases of a step: milliseconds, measured in a few steps, and scaled to add up to the step time
      of samples_per_s.
    """
    table = pd.DataFrame([_row(outcome) for outcome in outcomes]).reindex(columns=list(COLUMNS))
    table = table.astype({name: float for name in table if name not in TEXT})
    table.loc[table["status"] == "slow", list(OF_THE_WHOLE)] = math.nan
    base = table[table["variant"] == baseline].iloc[0]
    table["replica_batch"] = table["global_batch"] / table["replicas"]
    table["speed_up"] = table["samples_per_s"] / base["samples_per_s"]
    # two standard errors of a difference between two accuracies, each measured on `val_images`
    # images
    error = 2 * (2 * base["val_acc"] * (1 - base["val_acc"]) / base["val_images"]) ** 0.5
    table["less_accurate"] = (base["val_acc"] - table["val_acc"] > error).astype(float)
    grown = table["replicas"] / base["replicas"]
    all_cores = (
        base["accelerator"] == "cpu" and base["threads"] * base["replicas"] >= usable_cores() > 1
    )
    scaled = (grown != 1) & (not all_cores)
    table["efficiency"] = (table["speed_up"] / grown).where(scaled | (table["variant"] == baseline))
    return table.astype(dict.fromkeys(WHOLE, "Int64"))


def _row(outcome: Outcome) -> dict[str, Any]:
    """Return a variant's row, combined from its runs' records."""
    records = list(outcome.records.values())
    row: dict[str, Any] = {"variant": outcome.variant.name, "status": outcome.status}
    for name, column in COLUMNS.items():
        if column.field is not None:
            values = [
                value for record in records if (value := _field(record, column.field)) is not None
            ]
            row[name] = column.combine(values) if values else None
    accuracies = [
        [epoch.val_acc for epoch in record.epochs if epoch.val_acc is not None]
        for record in records
    ]
    if any(accuracies):
        row["val_acc"] = median(accuracy[-1] for accuracy in accuracies if accuracy)
        row["val_images"] = next(
            (record.data.images.get("val") for record in records if record.data), None
        )
    for name, first in (("main", True), ("others", False)):
        peaks = [peak for record in records for peak in _peaks(record, first)]
        if peaks:
            row[f"memory_{name}_gib"], row[f"memory_{name}_percent"] = map(
                max, zip(*peaks, strict=True)
            )
    slow = [slow_ranks(record.ranks) for record in records]
    always = [
        line
        for rank, line in (slow[-1] if slow else {}).items()
        if all(rank in run for run in slow)
    ]
    row["slow_rank"] = "; ".join(always) or None
    return row


def _field(record: Any, path: str) -> Any:
    """Return a field by its dotted path; None if a parent is missing."""
    return reduce(lambda value, name: getattr(value, name, None), path.split("."), record)


def _peaks(record: Record, first: bool) -> list[tuple[float, float]]:
    """Return the first device's peak memory in GiB and percent; if `first` is false, all other devices'.

    On a CPU, this is the peak memory of each process.
    """
    peaks = list({(peak.rank, peak.device): peak for peak in record.peak_memory}.values())
    gib = [(peak.allocated_gib or peak.host_rss_gib or 0.0, peak.total_gib) for peak in peaks]
    return [
        (used, 100 * used / total if total else math.nan)
        for used, total in (gib[:1] if first else gib[1:])
    ]

"""Table of results: one row per variant, from its runs' records."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from app.lab.compare.runner import Outcome
from app.record import Record
from app.system.machine import usable_cores

# columns of results.csv with figures of the runs: a field of the run record, or a key of `_figures`
FIGURES = {
    "devices": "devices",
    "nodes": "num_nodes",
    "replicas": "replicas",
    "processes": "world_size",
    "threads": "threads",
    "global_batch": "global_batch_size",
    "precision": "precision",
    "placement": "placement",
    "loss_last": "train_loss.last",
    "val_acc": "val_acc",
    "val_images": "data.images.val",
    "best_acc": "best_acc",
    "best_acc_min": "best_acc",
    "best_acc_max": "best_acc",
    "train_s": "train_s",
    "setup_s": "setup_s",
    "samples_per_s": "throughput.median",
    "samples_per_s_min": "throughput.median",
    "samples_per_s_max": "throughput.median",
    "n": "steps",
    "memory_main_gib": "main_gib",
    "memory_others_gib": "others_gib",
    "memory_main_percent": "main_percent",
    "memory_others_percent": "others_percent",
    "data_ms": "time_per_step.data",
    "forward_backward_ms": "time_per_step.forward_backward",
    "communication_ms": "time_per_step.communication",
    "optimizer_ms": "time_per_step.optimizer",
    "rest_ms": "time_per_step.rest",
    "launch_ms": "time_per_step.launch",
    "accelerator": "accelerator",
    "not_finite_since": "not_finite_since",
    "others_cores": "others_cores",
}
# how several runs are combined, if not by their median
AGGREGATIONS = {
    "precision": "first",
    "placement": "first",
    "accelerator": "first",
    "best_acc_min": "min",
    "best_acc_max": "max",
    "samples_per_s_min": "min",
    "samples_per_s_max": "max",
    "n": "count",
}
COMPUTED = ("replica_batch", "less_accurate", "speed_up", "efficiency")
COLUMNS = ["variant", "status", *FIGURES, *COMPUTED]
# NaN for a run stopped by the time limit
OF_THE_WHOLE = ["loss_last", "val_acc", "best_acc", "train_s"]


def tabulate(outcomes: Sequence[Outcome], baseline: str) -> pd.DataFrame:
    """Return a row for each variant, with the columns of `COLUMNS`; a missing value is NaN.

    - samples_per_s: median over the runs. A run's value is the median over its logging windows. The
      columns with `_min` and `_max` are the minimum and the maximum over the runs.
    - Times, losses, accuracies, peak memory: medians over the runs.
    - speed_up: samples/s divided by the baseline's.
    - efficiency: speed-up divided by the ratio of device counts. It is NaN for a variant with as
      many devices as the baseline, and if the baseline uses all cores of a CPU.
    - best_acc: best validation accuracy of a run, with `_min` and `_max` over the runs.
    - less_accurate: 1 if val_acc is below the baseline's by more than two standard errors, else 0.
    - Phases of a step: milliseconds, measured in a few steps, and scaled to add up to the step time
      of samples_per_s.
    """
    table = _combine(outcomes)
    table["status"] = [outcome.status for outcome in outcomes]
    table.loc[table["status"] == "slow", OF_THE_WHOLE] = math.nan
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
    table["efficiency"] = (table["speed_up"] / grown).where((grown != 1) & (not all_cores))
    return table[COLUMNS]


def _combine(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Return a row for each variant: its runs' figures, combined."""
    rows = []
    for outcome in outcomes:
        for record in outcome.records:
            rows.append({"variant": outcome.variant.name, **asdict(record), **_figures(record)})
    combined = {}
    types = {}
    for name, figure in FIGURES.items():
        aggregation = AGGREGATIONS.get(name, "median")
        combined[name] = (figure, aggregation)
        types[figure] = object if aggregation == "first" else float
    runs = pd.json_normalize(rows).reindex(columns=["variant", *types]).astype(types)
    names = [outcome.variant.name for outcome in outcomes]
    return runs.groupby("variant").agg(**combined).reindex(names).reset_index()


def _figures(record: Record) -> dict[str, Any]:
    """Return figures of a run that its record lacks: accelerator, accuracies, and peak memory.

    On a CPU, the peak memory is that of each process.
    """
    best = record.best_epoch
    figures: dict[str, Any] = {"accelerator": record.accelerator}
    figures["best_acc"] = best and best.val_acc
    for epoch in record.epochs:
        if epoch.val_acc is not None:
            figures["val_acc"] = epoch.val_acc
    gib = []
    percent = []
    for peak in record.peak_memory:
        used = peak.allocated_gib or peak.host_rss_gib
        gib.append(used)
        percent.append(100 * used / (peak.total_gib or math.nan))
    if gib:
        figures["main_gib"] = gib[0]
        figures["main_percent"] = percent[0]
        figures["others_gib"] = max(gib[1:], default=math.nan)
        figures["others_percent"] = max(percent[1:], default=math.nan)
    return figures

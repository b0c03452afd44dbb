"""The figures of each variant, from the records of its runs."""

import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd

from app.compare.runner import Outcome
from app.monitor.step_profiler import PHASES

# name in results.csv: how it is headed in the report, with its unit
COLUMNS = {
    "variant": "variant",
    "status": "status",
    "devices": "devices",
    "nodes": "nodes",
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
}


def tabulate(outcomes: Sequence[Outcome], baseline: str) -> pd.DataFrame:
    """One row for each variant, in order; the columns are those of `COLUMNS`, missing figures NaN.

    samples_per_s is the median over the runs of each run's median over its windows; min and max are over the
    runs, and n is their number. Times, losses and memory are medians over the runs, but for peak memory, which
    is the largest. Speed-up is the ratio of samples/s to the baseline's; efficiency, of variants with another number of
    devices, the speed-up over what the number of devices has grown by.
    """
    table = pd.DataFrame([_row(outcome) for outcome in outcomes], columns=list(COLUMNS))
    base = table[table["variant"] == baseline].iloc[0]
    table["speed_up"] = table["samples_per_s"] / base["samples_per_s"]
    replicas, base_replicas = table["devices"] * table["nodes"], base["devices"] * base["nodes"]
    scaled = (replicas != base_replicas) | (table["variant"] == baseline)  # else nothing was scaled
    table["efficiency"] = (table["speed_up"] / (replicas / base_replicas)).where(scaled)
    return table.astype(dict.fromkeys(("devices", "nodes", "processes", "threads", "global_batch", "n"), "Int64"))


def _row(outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": outcome.variant.name, "status": outcome.status}
    records = list(outcome.records.values())
    if not records:
        return row
    record = records[0]
    replicas = record["devices"] * record["num_nodes"]
    batch = record["global_batch_size"]
    row |= {
        "devices": record["devices"],
        "nodes": record["num_nodes"],
        "processes": record["world_size"],
        "threads": record["threads"],
        "global_batch": batch,
        "replica_batch": batch and batch / replicas,
        "precision": record["precision"],
        "placement": record["placement"],
    }
    for name in ("first", "middle", "last"):
        row[f"loss_{name}"] = _median((r.get("train_loss") or {}).get(name) for r in records)
    accuracies = ([e["val_acc"] for e in r["epochs"] if e["val_acc"] is not None] for r in records)
    row["val_acc"] = _median(measured[-1] if measured else None for measured in accuracies)
    for name in ("train_s", "setup_s"):
        row[name] = _median(r[name] for r in records)
    rates = [r["throughput"]["median"] for r in records if r["throughput"]["median"] is not None]
    row["n"] = len(rates)
    if rates:
        row |= {
            "samples_per_s": statistics.median(rates),
            "samples_per_s_min": min(rates),
            "samples_per_s_max": max(rates),
        }
    row["not_finite_since"] = next((since for r in records if (since := r.get("not_finite_since")) is not None), None)
    row["accelerator"] = record["peak_memory"][0]["device"].partition(":")[0] if record["peak_memory"] else None
    for phase in (*PHASES, "launch"):
        row[f"{phase}_ms"] = _median((r.get("time_per_step") or {}).get(phase) for r in records)
    return row | _memory(records)


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _memory(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Peak memory of the first device and of the largest of the others: torch's, or the process' on a CPU."""
    peaks: dict[str, list[tuple[float, float]]] = {"main": [], "others": []}
    for record in records:
        seen: dict[tuple[int, str], tuple[float, float]] = {}
        for row in record["peak_memory"]:
            used = row["host_rss_gib"] if row["allocated_gib"] is None else row["allocated_gib"]
            seen.setdefault((row["rank"], row["device"]), (used, 100 * used / row["total_gib"]))
        main, *others = seen.values() or [(float("nan"), float("nan"))]
        peaks["main"].append(main)
        peaks["others"] += others
    return {
        f"memory_{which}_{unit}": max(values)[index]
        for which, values in peaks.items()
        if values
        for index, unit in enumerate(("gib", "percent"))
    }

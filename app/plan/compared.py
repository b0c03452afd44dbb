"""Measurements of `compare` for the planned training on this machine."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from app.errors import UserError
from app.fit.arguments import read_yaml
from app.record import Count, Positive, Record, load_json

# settings that leave the time of a step as it is, or nearly so
BESIDE = {
    "model": ("num_classes", "optimizer", "scheduler", "scheduler_interval"),
    "data": ("root", "size", "data_seed", "seed", "val_size", "cache", "batch_size"),
}
KEY = ["strategy", "devices", "global_batch", "threads"]
FIGURES = ["measured_samples_per_s", "measured_low", "measured_high"]


@dataclass
class MeasuredVariant:
    """A row of a comparison's results.json."""

    runs: list[str]
    replicas: Count | None = None
    nodes: Count | None = None
    threads: Count | None = None
    global_batch: Count | None = None
    accelerator: str | None = None
    samples_per_s: Positive | None = None
    samples_per_s_min: Positive | None = None
    samples_per_s_max: Positive | None = None


@dataclass
class Results:
    """The part of a comparison's results.json that a plan needs."""

    hardware: dict[str, Any] = field(default_factory=dict)
    verdict: dict[str, Any] = field(default_factory=dict)
    variants: list[MeasuredVariant] = field(default_factory=list)


def add_measured(
    table: pd.DataFrame, root: Path, config: Mapping[str, Any], hardware: dict[str, Any], cuda: bool
) -> tuple[pd.DataFrame, str]:
    """Add the newest comparison's measurements of the same training on the same machine to the predictions.

    Only a comparison with a verdict counts, because its machine was quiet.

    Args:
        table: Table of `app.plan.cost_model.predict`, with the threads of a process.
        root: Folder of comparisons.
        config: The resolved configuration of the plan.
        hardware: Hardware of the predictions.
        cuda: Whether the plan is for GPUs.

    Returns:
        The table with measured samples/s and those of the slowest and the fastest run; and a sentence on their source,
        or on why there are none.
    """
    here, key = table[table["nodes"] == 1].reset_index(), KEY[:-1] if cuda else KEY
    files = sorted(root.glob("*/version_*/results.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    other: list[pd.DataFrame] = []
    for file in files:
        rows = _measured(file, _what_matters(config), hardware, "cuda" if cuda else "cpu").drop_duplicates(key)
        found = here.merge(rows, on=key).set_index("index")[FIGURES]
        if len(found):
            return table.join(found), f"Measured: {file.parent}."
        other.append(rows)
    seen = pd.concat(other) if other else pd.DataFrame(columns=KEY)
    said = f"`compare` has measured nothing of it on this machine (looked for in {root})."
    for name, flag in (("global_batch", "--data.batch_size"), ("threads", "OMP_NUM_THREADS")):
        known = sorted(set(seen[name]) - set(here[name]))
        if known:
            said = f"`compare` has measured it with {flag} {' or '.join(f'{value:g}' for value in known)} only."
    return table.assign(**dict.fromkeys(FIGURES, float("nan"))), said


def _what_matters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the settings on which the time of a step on one device depends."""
    trainer = config["trainer"]
    chosen = {"precision": trainer["precision"] or "32-true", "parts": trainer["accumulate_grad_batches"]}
    for section, beside in BESIDE.items():
        arguments = (config[section].get("init_args") or {}).items()
        chosen[section] = config[section]["class_path"], {k: v for k, v in arguments if k not in beside}
    return chosen


def _measured(file: Path, wanted: dict[str, Any], hardware: dict[str, Any], accelerator: str) -> pd.DataFrame:
    """Read the variants of a comparison that train the same on one node of the machine, a row for each."""
    rows = []
    try:
        results = load_json(file, Results)
        conclusive = results.hardware == hardware and results.verdict.get("taken")
        for variant in results.variants if conclusive else []:
            if not variant.samples_per_s or variant.nodes != 1 or variant.accelerator != accelerator:
                continue
            run = file.parent.joinpath("runs", *Path(variant.runs[0]).parts[-3:])
            if _what_matters(read_yaml(str(run / "config.yaml"))) != wanted:
                continue
            strategy = "one device" if variant.replicas == 1 else Record.load(run / "run.json").strategy
            key = [strategy, variant.replicas, variant.global_batch, variant.threads]
            rows.append([*key, variant.samples_per_s, variant.samples_per_s_min, variant.samples_per_s_max])
    except ValueError as error:
        print(f"{error}: it is left out", file=sys.stderr)
    except (LookupError, UserError):  # of another version
        pass
    return pd.DataFrame(rows, columns=KEY + FIGURES)

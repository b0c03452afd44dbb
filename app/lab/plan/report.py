"""Report of predictions: sentences, tables and plots."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, because notebooks share its state

from app.lab.plan.cost_model import Machines, Step
from app.record.words import duration
from app.system.interconnect import Link
from app.system.page import BLUE, GREY, draw, plain
from app.system.page import table as page_table

PICTURES = {
    "samples_per_s": "Samples/s",
    "efficiency": "Samples/s of each device, relative to one device's",
}
ENOUGH = 0.5  # a variant is recommended only above this efficiency


def recommended(table: pd.DataFrame) -> pd.Series:
    """Return the row with the largest `speed_up_low` of those that use the devices well.

    They share the batch equally, and their `efficiency_low` is above `ENOUGH`.
    """
    candidates = table[table["shared_equally"] & (table["efficiency_low"] > ENOUGH)]
    return candidates.nlargest(1, "speed_up_low").iloc[0]


def heading(table: pd.DataFrame, config: Mapping[str, Any], batch: int, doubts: str) -> str:
    """Return the recommendation in one line; `doubts` is appended to `predicted`."""
    model = config["model"]
    row = recommended(table)
    name = (model.get("init_args") or {}).get("network") or model["class_path"].rpartition(".")[2]
    if row["devices"] == 1:
        return f"{name}, batch {batch}: take one device"
    devices = f"{row['devices']} devices"
    if row["nodes"] > 1:
        devices += f" of {row['nodes']} nodes"
    gain = f"{row['speed_up']:.2f} × one device ({_range(row, 'speed_up', '.2f')})"
    return f"{name}, batch {batch}: take ddp on {devices}: {gain}, predicted{doubts}"


def advice(table: pd.DataFrame, scaled: bool) -> Iterator[str]:
    """Yield sentences that explain the recommendation."""
    if recommended(table)["devices"] > 1 or len(table) == 1:
        return
    larger = "a larger `--data.batch_size`"
    if not scaled:
        larger += ", or `--scale_batch true`"
    yield (
        "No other variant certainly reaches half of the ideal. Try "
        f"{larger}: more work per exchange."
    )


def _range(row: pd.Series, name: str, form: str) -> str:
    return f"{row[f'{name}_low']:{form}}–{row[f'{name}_high']:{form}}"


def predictions(table: pd.DataFrame) -> str:
    """Return the table of predictions in Markdown."""
    marks = table["shared_equally"].map({True: "", False: " *"})
    columns = {
        "devices": table["devices"],
        "nodes": table["nodes"],
        "batch": table["replica_batch"].astype(str) + marks,
        "step (ms)": table["step_ms"].map("{:.2f}".format),
        "wait (ms)": table["waiting_ms"].map("{:.2f}".format),
        "samples/s": table["samples_per_s"].map("{:,.0f}".format),
        "range": [_range(row, "samples_per_s", ",.0f") for _, row in table.iterrows()],
        "speed-up": table["speed_up"].map("{:.2f}".format),
    }
    if "cost_per_million_samples" in table:
        columns["cost of 10⁶"] = table["cost_per_million_samples"].map("{:.4g}".format)
    return page_table([*columns], zip(*columns.values(), strict=True), words=())


def notes(table: pd.DataFrame, machines: Machines) -> Iterator[str]:
    """Yield sentences that explain the table."""
    yield (
        "The range shows how far measured steps and all-reduces were from the formulas. `compare` "
        "measures real runs."
    )
    if not table["shared_equally"].all():
        yield "\\* hypothetical: `fit` rejects a batch that the devices cannot share equally."
    if machines.node_link is None:
        yield (
            f"More than {machines.per_node} devices are not predicted: give `--node_bandwidth` and "
            "`--node_latency` between machines like this one, or `--per_node`, `--bandwidth` and "
            "`--latency` of another."
        )


def origin(step: Step, machines: Machines, source: str, network: str) -> Iterator[str]:
    """Yield paragraphs about the origin of the predictions: step, network, and cost model."""
    buckets = []
    for bucket in step.buckets:
        buckets.append(f"{bucket.size / 2**20:.2f} MiB at {bucket.ready:.0%}")
    yield (
        f"Step: {plain(source)}. It took {step.spread[0]:.2f} to {step.spread[1]:.2f} times the "
        "fitted time. Buckets of gradients, and when in the backward pass they are ready: "
        f"{', '.join(buckets)}."
    )
    speeds = []
    if machines.per_node > 1:
        speeds.append(f"{_speed(machines.link)} in a node")
    if machines.node_link is not None:
        speeds.append(f"{_speed(machines.node_link)} between nodes")
    low, high = machines.link_spread
    yield (
        f"Network: {', '.join(speeds)}; {network}. All-reduces took {low:.2f} to {high:.2f} times "
        "the fitted time. Waiting is communication that the backward pass does not hide. The model "
        "is a ring all-reduce of DDP's buckets that overlaps with the backward pass; its formulas "
        "and sources are in app/lab/plan/cost_model.py."
    )


def _speed(link: Link) -> str:
    return f"{link.bandwidth / 1e9:.3g} GB/s and {duration(link.latency)}"


def draw_pictures(table: pd.DataFrame, machines: Machines) -> dict[str, Figure | bytes]:
    """Draw predicted throughput and efficiency against the number of devices."""
    figures: dict[str, Figure | bytes] = {}
    for name in PICTURES:
        figures[name] = draw(partial(_draw, table=table, name=name, per_node=machines.per_node))
    return figures


def _draw(axes: Axes, table: pd.DataFrame, name: str, per_node: int) -> None:
    """Plot a column of the table, its range, and the ideal against the number of devices."""
    counts = table["devices"]
    axes.fill_between(
        counts, table[f"{name}_low"], table[f"{name}_high"], color=BLUE, alpha=0.15, linewidth=0
    )
    axes.plot(counts, table[name], "o-", color=BLUE, label="predicted")
    ideal = counts * table[name].iloc[0]
    axes.yaxis.set_major_formatter("{x:,.0f}")
    if name == "efficiency":
        ideal = counts * 0 + 1
        axes.yaxis.set_major_formatter("{x:.0%}")
    axes.plot(counts, ideal, ":", color=GREY, label="ideal")
    axes.set_ylim(0, 1.1 * max(table[f"{name}_high"].max(), ideal.iloc[0]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, counts.map("{:,}".format), rotation=60 if len(counts) > 8 else 0)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("devices")
    if counts.max() > per_node:
        axes.set_xlabel(f"devices, {per_node} in each node")
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize=9)

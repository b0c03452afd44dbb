"""Report of predictions: sentences, tables and plots."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, because notebooks share its state

from app.lab.plan.cost_model import Machines, Step
from app.record.words import duration
from app.system.page import BLUE, GREY, ORANGE, draw, plain
from app.system.page import table as page_table

ENDS = ("_low", "", "_high")
PICTURES = {
    "samples_per_s": "Samples/s",
    "efficiency": "Samples/s of each device, relative to one device's",
}
ENOUGH = 0.5  # a variant is recommended only above this efficiency


def recommended(table: pd.DataFrame) -> pd.Series:
    """Return the row with the largest `speed_up_low`.

    Only rows that share the batch equally, and whose `efficiency_low` is above `ENOUGH`, are
    candidates.
    """
    return (
        table[table["shared_equally"] & (table["efficiency_low"] > ENOUGH)]
        .nlargest(1, "speed_up_low")
        .iloc[0]
    )


def heading(table: pd.DataFrame, config: Mapping[str, Any], batch: int, doubts: str) -> str:
    """Return the recommendation in one line; `doubts` may add ` on a busy machine` to `predicted`."""
    model = config["model"]
    row = recommended(table)
    name = (model.get("init_args") or {}).get("network") or model["class_path"].rpartition(".")[2]
    gain = (
        f"{row['speed_up']:.2f} × one device ({_range(row, 'speed_up', '.2f')}), predicted{doubts}"
    )
    nodes = f" of {row['nodes']} nodes" if row["nodes"] > 1 else ""
    taken = (
        f"{row['strategy']} on {row['devices']} devices{nodes}: {gain}"
        if row["devices"] > 1
        else "one device"
    )
    return f"{name}, batch {batch}: take {taken}"


def advice(table: pd.DataFrame, scaled: bool) -> Iterator[str]:
    """Yield sentences that explain the recommendation."""
    if recommended(table)["devices"] == 1 and len(table) > 1:
        larger = "a larger `--data.batch_size`" + ("" if scaled else ", or `--scale_batch true`")
        yield f"No other variant certainly reaches half of the ideal. Try {larger}: more work per exchange."


def _range(row: pd.Series, name: str, form: str) -> str:
    return f"{row[f'{name}_low']:{form}}–{row[f'{name}_high']:{form}}"


def predictions(table: pd.DataFrame) -> str:
    """Return the table of predictions in Markdown."""
    columns = {
        "": table["strategy"],
        "devices": table["devices"],
        "nodes": table["nodes"],
        "batch": table["replica_batch"].astype(str)
        + table["shared_equally"].map({True: "", False: " *"}),
        "step (ms)": table["step_ms"].map("{:.2f}".format),
        "wait (ms)": table["waiting_ms"].map("{:.2f}".format).replace("nan", "—"),
        "samples/s": table["samples_per_s"].map("{:,.0f}".format),
        "range": [_range(row, "samples_per_s", ",.0f") for _, row in table.iterrows()],
        "speed-up": table["speed_up"].map("{:.2f}".format),
    }
    if "cost_per_million_samples" in table:
        columns["cost of 10⁶"] = table["cost_per_million_samples"].map("{:.4g}".format)
    return page_table([*columns], zip(*columns.values(), strict=True))


def notes(table: pd.DataFrame, machines: Machines) -> Iterator[str]:
    """Yield sentences that explain the table."""
    yield "The range shows how far measured steps and all-reduces were from the formulas. `compare` measures real runs."
    if not table["shared_equally"].all():
        yield "\\* hypothetical: `fit` rejects a batch that the devices cannot share equally."
    if machines.node_link is None:
        yield (
            f"More than {machines.per_node} devices are not predicted: give `--node_bandwidth` and `--node_latency` "
            "between machines like this one, or `--per_node`, `--bandwidth` and `--latency` of another."
        )


def origin(step: Step, machines: Machines, source: str, network: str) -> Iterator[str]:
    """Yield paragraphs about the origin of the predictions: the step, the network, and the cost model."""
    buckets = ", ".join(
        f"{bucket.size / 2**20:.2f} MiB at {bucket.ready:.0%}" for bucket in step.buckets
    )
    links = {
        "in a node": machines.link if machines.per_node > 1 else None,
        "between nodes": machines.node_link,
    }
    known = [
        (link.bandwidth / 1e9, duration(link.latency), place)
        for place, link in links.items()
        if link
    ]
    speeds = ", ".join(
        f"{bandwidth:.3g} GB/s and {latency} {place}" for bandwidth, latency, place in known
    )
    yield (
        f"Step: {plain(source)}. It took {step.spread[0]:.2f} to {step.spread[1]:.2f} times the fitted time. "
        f"Buckets of gradients, and when in the backward pass they are ready: {buckets}."
    )
    yield (
        f"Network: {speeds}; {network}. All-reduces took {machines.link_spread[0]:.2f} to "
        f"{machines.link_spread[1]:.2f} times the fitted time. Waiting is communication that the backward "
        "pass does not hide. The model is a ring all-reduce of DDP's buckets that overlaps with the backward pass; its "
        "formulas and sources are in app/lab/plan/cost_model.py."
    )


def draw_pictures(table: pd.DataFrame, machines: Machines) -> dict[str, Figure | bytes]:
    """Draw predicted throughput and efficiency against the number of devices."""
    return {
        name: draw(partial(_draw_ways, table=table, name=name, per_node=machines.per_node))
        for name in PICTURES
    }


def _draw_ways(axes: Axes, table: pd.DataFrame, name: str, per_node: int) -> None:
    """Plot a column of the table against the number of devices: ddp and the ideal as curves, dp as points."""
    ddp = table[table["strategy"] != "dp"].set_index("devices")
    dp = table[table["strategy"] == "dp"].set_index("devices")
    low, middle, high = (ddp[name + end] for end in ENDS)
    axes.fill_between(ddp.index, low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(middle, "o-", color=BLUE, label="ddp, predicted")
    if len(dp):
        low, middle, high = (dp[name + end] for end in ENDS)
        ends = [middle - low, high - middle]
        axes.errorbar(
            1.06 * dp.index,
            middle,
            yerr=ends,
            fmt="s",
            color=ORANGE,
            capsize=3,
            label="dp, predicted",
        )
    is_share = name == "efficiency"
    counts = sorted(set(table["devices"]))
    ideal = [table[name].iloc[0] * (1 if is_share else count) for count in counts]
    axes.plot(counts, ideal, ":", color=GREY, label="ideal")
    axes.set_ylim(0, 1.1 * max(table[f"{name}_high"].max(), ideal[0]))
    axes.yaxis.set_major_formatter("{x:.0%}" if is_share else "{x:,.0f}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        counts, [f"{count:,}" for count in counts], rotation=60 if len(counts) > 8 else 0
    )
    axes.set_xticks([], minor=True)
    axes.set_xlabel("devices" if counts[-1] <= per_node else f"devices, {per_node} in each node")
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=9)

"""Sentences and pictures of predictions, beside measurements."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, because notebooks share its state
from matplotlib.lines import Line2D
from rich import box
from rich.table import Column, Table

from app.plan.cost_model import Machines, Step
from app.system.page import BLUE, GREY, ORANGE, draw, plain

ENDS = ("samples_per_s_low", "samples_per_s", "samples_per_s_high")
PICTURES = {"throughput": "Samples/s", "efficiency": "Samples/s of each device, % of one device's"}
ENOUGH = 0.5  # a recommended way uses more than this share of each device


def recommended(table: pd.DataFrame) -> pd.Series:
    """Choose the fastest way that uses enough of each device, by the low end of the prediction."""
    sure = table["speed_up_low"].where(table["devices"] > 1, 1.0)
    enough = table["shared_equally"] & (sure > ENOUGH * table["devices"])
    return table.assign(sure=sure)[enough].nlargest(1, "sure").iloc[0]


def heading(table: pd.DataFrame, config: Mapping[str, Any], batch: int) -> str:
    """Write the recommendation in one line."""
    model, row = config["model"], recommended(table)
    name = (model.get("init_args") or {}).get("network") or model["class_path"].rpartition(".")[2]
    gain = f"{row['strategy']} on {_devices(row)}: at least {row['sure']:.2f} × one device, predicted"
    return f"{name}, batch {batch}: take {gain if row['devices'] > 1 else 'one device'}"


def _devices(row: pd.Series) -> str:
    nodes = f" of {row['nodes']} nodes" if row["nodes"] > 1 else ""
    return f"{row['devices']} devices{nodes}"


def advice(table: pd.DataFrame, scaled: bool) -> Iterator[str]:
    """Explain the recommendation, and report measurements that contradict a prediction."""
    row = recommended(table)
    if row["devices"] > 1:
        yield f"Predicted: {_range(row, 'speed_up', '.2f')} times one device, {row['efficiency']:.0%} of the ideal."
    elif len(table) > 1:
        larger = "a larger `--data.batch_size`" + ("" if scaled else ", or `--scale_batch true`")
        yield f"No other way is sure to use half of each device. Try {larger}: more work for each exchange."


def _range(row: pd.Series, name: str, form: str) -> str:
    return f"{row[f'{name}_low']:{form}}–{row[f'{name}_high']:{form}}"


def cells(table: pd.DataFrame, machines: Machines) -> tuple[list[str], list[list[str]]]:
    """Return the headers and rows of the table."""
    headers = ["", "devices", "batch each", "step (ms)", "waiting (ms)", "samples/s", "range", "speed-up", "range"]
    headers += ["cost of 10⁶"] * (machines.price_per_hour is not None)
    rows = []
    for _, row in table.iterrows():
        nodes = f" = {row['nodes']} × {machines.per_node}" if row["nodes"] > 1 else ""
        rows.append(
            [
                row["strategy"],
                f"{row['devices']}{nodes}",
                f"{row['replica_batch']}{'' if row['shared_equally'] else ' *'}",
                f"{row['step_ms']:.2f}",
                "—" if pd.isna(row["waiting_ms"]) else f"{row['waiting_ms']:.2f}",
                f"{row['samples_per_s']:,.0f}",
                _range(row, "samples_per_s", ",.0f"),
                f"{row['speed_up']:.2f}",
                _range(row, "speed_up", ".2f"),
                *([f"{row['cost_per_million_samples']:.4g}"] if machines.price_per_hour is not None else []),
            ]
        )
    return headers, rows


def screen(headers: list[str], rows: list[list[str]]) -> Table:
    """Make the table for a terminal."""
    first, *others = headers
    shown = Table(first, *(Column(name, justify="right") for name in others), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        shown.add_row(*row)
    return shown


def notes(table: pd.DataFrame, machines: Machines) -> Iterator[str]:
    """Say how the table is to be read."""
    yield (
        "The range shows how far the measured steps and all-reduces lay from the formulas. `compare` measures what is "
        "true here."
    )
    if not table["shared_equally"].all():
        yield "\\* on paper only: `fit` refuses a batch that the devices cannot share equally."
    if machines.node_link is None:
        yield (
            f"More than {machines.per_node} devices are not predicted: more would share those of this machine. Give "
            "`--node_bandwidth` and `--node_latency` between machines like it, or `--per_node`, `--bandwidth` and "
            "`--latency` of another."
        )


def origin(step: Step, machines: Machines, source: str, network: str) -> Iterator[str]:
    """Describe the measurements, the given figures, and the model behind the predictions."""
    buckets = ", ".join(f"{bucket.size / 2**20:.2f} MiB at {bucket.ready:.0%}" for bucket in step.buckets)
    links = [
        f"{link.bandwidth / 1e9:.3g} GB/s and {link.latency * 1e6:.3g} µs {where}"
        for link, where in (
            (machines.link if machines.per_node > 1 else None, "in a node"),
            (machines.node_link, "between nodes"),
        )
        if link is not None
    ]
    yield (
        f"Step: {plain(source)}. It took {step.spread[0]:.2f} to {step.spread[1]:.2f} times what was fitted to it. "
        f"Buckets of gradients, and when in the backward pass they are ready: {buckets}."
    )
    yield (
        f"Network: {', '.join(links)}; {network} All-reduces took {machines.link_spread[0]:.2f} to "
        f"{machines.link_spread[1]:.2f} times what was fitted to them. Waiting is communication that the backward "
        "pass does not hide. The model is a ring all-reduce of DDP's buckets that overlaps with the backward pass; its "
        "formulas and sources are in app/plan/cost_model.py. Among many ranks NCCL takes trees for small buffers, "
        "whose latency grows less than that of a ring."
    )


def draw_pictures(table: pd.DataFrame, machines: Machines) -> dict[str, Figure | bytes]:
    """Draw predicted throughput and efficiency against the number of devices, with the measurements."""
    single, share = table[table["devices"] == 1].iloc[0], 100 / table["devices"]
    rates = table[["strategy", "devices", *ENDS]]
    shares = rates.assign(**{name: share * table[name.replace("samples_per_s", "speed_up")] for name in ENDS})
    ideal = pd.Series(100.0, table.index)
    drawn = {"throughput": (rates, single["samples_per_s"] * table["devices"]), "efficiency": (shares, ideal)}
    return {
        name: draw(partial(_draw_ways, table=rows, ideal=line, machines=machines, name=name))
        for name, (rows, line) in drawn.items()
    }


def _draw_ways(axes: Axes, table: pd.DataFrame, ideal: pd.Series, machines: Machines, name: str) -> None:
    """Draw one figure of each way of running against the number of devices."""
    ddp, dp = table[table["strategy"] != "dp"], table[table["strategy"] == "dp"]
    low, middle, high = (ddp[name] for name in ENDS)
    axes.fill_between(ddp["devices"], low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.plot(ddp["devices"], middle, "o-", color=BLUE)
    axes.plot(table["devices"], ideal, ":", color=GREY)
    if len(dp):
        low, middle, high = (dp[name] for name in ENDS)
        ends = [middle - low, high - middle]
        axes.errorbar(1.06 * dp["devices"], middle, yerr=ends, fmt="s", color=ORANGE, capsize=3, zorder=3)
    top = table[[*ENDS]].max().max()
    axes.set_ylim(0, 1.1 * top)
    if name == "throughput" and table["samples_per_s"].max() > 50 * table["samples_per_s"].min():
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _mark_devices(axes, sorted(set(table["devices"])), machines.per_node)
    ways = [Line2D([], [], color=BLUE, marker="o", label="ddp, predicted")]
    ways += [Line2D([], [], color=ORANGE, marker="s", linestyle="", label="dp, predicted")] * bool(len(dp))
    ways += [Line2D([], [], color=GREY, linestyle=":", label="ideal")]
    axes.figure.legend(handles=ways, loc="outside lower center", ncols=2, fontsize=9)


def _mark_devices(axes: Axes, counts: list[int], per_node: int) -> None:
    """Mark the numbers of devices, and the end of one node."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=60 if len(counts) > 8 else 0)
    axes.set_xticks([], minor=True)
    axes.margins(x=0.12)
    axes.set_xlabel("devices")
    if counts[-1] > per_node:
        axes.axvline(per_node * 2**0.5, color=GREY, linewidth=0.8)
        for text, side in (("one node\u00a0", "right"), ("\u00a0more nodes", "left")):
            place = per_node * 2**0.5, 0.98
            axes.text(*place, text, transform=axes.get_xaxis_transform(), color=GREY, fontsize=9, ha=side, va="top")

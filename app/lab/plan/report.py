"""Report of predictions: sentences, a table and a plot."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, because notebooks share its state

from app.lab.plan.cost_model import Machines, Step
from app.record.words import duration
from app.system.interconnect import Link
from app.system.page import BLUE, GREY, draw
from app.system.page import table as page_table

CAPTION = "Speed-up over one device"
ENOUGH = 0.5  # a number of devices is recommended only above this efficiency
COLUMNS = {  # column of the predictions, and its format, by header
    "devices": ("devices", "{}"),
    "nodes": ("nodes", "{}"),
    "batch": ("replica_batch", "{}"),
    "step (ms)": ("step_ms", "{:.2f}"),
    "wait (ms)": ("waiting_ms", "{:.2f}"),
    "samples/s": ("samples_per_s", "{:,.0f}"),
    "at least": ("samples_per_s_low", "{:,.0f}"),
    "at most": ("samples_per_s_high", "{:,.0f}"),
    "speed-up": ("speed_up", "{:.2f}"),
    "efficiency": ("efficiency", "{:.0%}"),
}


def recommended(table: pd.DataFrame) -> pd.Series:
    """Return the row with the largest `speed_up_low` of those that use the devices well.

    They share the batch equally, and their `efficiency_low` is above `ENOUGH`.
    """
    candidates = table[table["shared_equally"] & (table["efficiency_low"] > ENOUGH)]
    return candidates.nlargest(1, "speed_up_low").iloc[0]


def recommendation(table: pd.DataFrame, step: Step) -> str:
    """Return the recommendation in one line, with doubts about its figures."""
    row = recommended(table)
    if row["devices"] == 1:
        return "take one device"
    devices = f"{row['devices']} devices"
    if row["nodes"] > 1:
        devices += f" of {row['nodes']} nodes"
    text = (
        f"take ddp on {devices}: {row['speed_up']:.2f} × one device "
        f"({row['speed_up_low']:.2f}–{row['speed_up_high']:.2f}), predicted"
    )
    if step.taken:
        text += " on a busy machine"
    if not step.launch_known:
        text += " without the cost of launching a step"
    return text


def advice(table: pd.DataFrame, scaled: bool) -> str:
    """Return why one device is recommended, with a remedy; nothing if more are."""
    if recommended(table)["devices"] > 1 or len(table) == 1:
        return ""
    larger = "a larger `--data.batch_size`"
    if not scaled:
        larger += ", or `--scale_batch true`"
    return (
        "No other variant certainly reaches half of the ideal. Try "
        f"{larger}: more work per exchange."
    )


def predictions(table: pd.DataFrame) -> str:
    """Return the table of predictions in Markdown."""
    columns = {}
    for header, (name, form) in COLUMNS.items():
        if name in table:
            columns[header] = table[name].map(form.format)
    columns["batch"] += table["shared_equally"].map({True: "", False: " *"})
    return page_table([*columns], zip(*columns.values(), strict=True), words=())


def notes(table: pd.DataFrame, step: Step) -> list[str]:
    """Return sentences that explain the table."""
    sentences = [
        "`at least` and `at most` show how far measured steps and all-reduces were from the "
        "formulas. `compare` measures real runs."
    ]
    if not table["shared_equally"].all():
        sentences.append(
            "\\* hypothetical: `fit` rejects a batch that the devices cannot share equally."
        )
    if step.taken:
        sentences.append(
            f"Other programs took {step.taken} while the steps were measured: measure again when "
            "they are done."
        )
    if not step.launch_known:
        sentences.append(
            "The steps have one batch size, so that the cost of launching a step is unknown and "
            "counts as none: real speed-ups are smaller. Give `--run` a run with another batch, "
            "too."
        )
    return sentences


def origin(step: Step, machines: Machines) -> str:
    """Return two paragraphs about the origin of the predictions: step, network, and cost model."""
    sizes = ", ".join(f"{images:g}" for images in step.images)
    buckets = []
    for bucket in step.buckets:
        buckets.append(f"{bucket.size / 2**20:.2f} MiB at {bucket.ready:.0%}")
    links = []
    if machines.per_node > 1:
        links.append(f"{_speed(machines.link)} in a node")
    if machines.node_link is not None:
        links.append(f"{_speed(machines.node_link)} between nodes")
    source = "given"
    if machines.link_spread != (1.0, 1.0):
        low, high = machines.link_spread
        source = (
            "measured between two processes of this machine, which took "
            f"{low:.2f} to {high:.2f} times the fitted time"
        )
    return (
        f"Step: measured with batches of {sizes} images. It took {step.spread[0]:.2f} to "
        f"{step.spread[1]:.2f} times the fitted time. Buckets of gradients, and when in the "
        f"backward pass they are ready: {', '.join(buckets)}.\n\n"
        f"Network: {', '.join(links)}, {source}. Waiting is communication that the backward pass "
        "does not hide. The model is a ring all-reduce of DDP's buckets that overlaps with the "
        "backward pass; its formulas and sources are in app/lab/plan/cost_model.py."
    )


def _speed(link: Link) -> str:
    return f"{link.bandwidth / 1e9:.3g} GB/s and {duration(link.latency)}"


def draw_picture(table: pd.DataFrame, per_node: int) -> Figure:
    """Draw the predicted speed-up, its range, and the ideal against the number of devices."""
    counts = table["devices"]

    def paint(axes: Axes) -> None:
        low = table["speed_up_low"]
        high = table["speed_up_high"]
        axes.fill_between(counts, low, high, color=BLUE, alpha=0.15, linewidth=0)
        axes.loglog(counts, table["speed_up"], "o-", base=2, color=BLUE, label="predicted")
        axes.plot(counts, counts, ":", color=GREY, label="ideal")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_xticks(counts, counts.map("{:,}".format), rotation=60 if len(counts) > 8 else 0)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("devices")
        if counts.max() > per_node:
            axes.set_xlabel(f"devices, {per_node} in each node")

    return draw(paint)

"""`python -m app plan`: reads its flags, measures, predicts, and writes the plan."""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch
from jsonargparse import Namespace
from matplotlib.figure import Figure  # not pyplot, whose state a notebook shares
from rich.console import Console
from rich.markdown import Markdown

from app.errors import UserError
from app.fit.configuration import split_flags
from app.fit.parser import PlainParser, read_yaml
from app.monitor.loggers import next_version
from app.monitor.summary import markdown_table
from app.plan.cost_model import Machines, Step, fit_step, make_buckets, predict
from app.plan.measure import measure_steps, profile_gradients, read_record
from app.system.files import write_json
from app.system.interconnect import Link, fit_link, measure_all_reduce
from app.system.machine import hardware, usable_cores, versions

USAGE = """\
python -m app plan [--SETTING VALUE ...] [--config FILE] [--FLAG.OF.FIT VALUE ...]

Predicts step time, throughput, efficiency and cost on more devices and nodes, from a step measured here, or in runs
that you name, and a network measured here, or given. What to train is said by the flags of fit."""

PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def bandwidth(text: str) -> float:
    """Read `25GB/s` or `100Mbit/s`: bytes per second."""
    match = re.fullmatch(r"([\d.]+)\s*([kMGT]?)(B|bit)/s", text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{text}: give bytes or bits per second, such as 25GB/s or 100Mbit/s")
    return float(match[1]) * PREFIXES[match[2]] / (8 if match[3] == "bit" else 1)


def latency(text: str) -> float:
    """Read `20us` or `1ms`: seconds."""
    match = re.fullmatch(r"([\d.]+)\s*(s|ms|us|µs|ns)", text.strip())
    if match is None:
        raise ValueError(f"{text}: give a time, such as 20us or 1ms")
    return float(match[1]) * SECONDS[match[2]]


def run(arguments: list[str]) -> int:
    """Measure, predict, and write the plan.

    Args:
        arguments: The arguments after `plan`.

    Returns:
        Exit code.

    Raises:
        UserError: For what a user did wrong.
    """
    own, flags = split_flags(arguments)
    options = _parse(own)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    fit = ["fit", *(part for pair in flags for part in pair)]
    for flag, value in flags:
        if options.run and not flag.startswith("--data."):
            raise UserError(f"{flag} {value}: with --run the steps are those of the run: leave it out")
    step, batch, source = _step(options, fit, console)
    typed = [value for flag, value in flags if flag == "--data.batch_size" and options.run]
    if typed:
        if not typed[-1].isdigit() or int(typed[-1]) < 1:
            raise UserError(f"--data.batch_size {typed[-1]}: give a number of images to plan for")
        batch = int(typed[-1])
    machines, network = _machines(options, console)
    most = options.max_devices if options.scale_batch else min(options.max_devices, batch)
    table = predict(step, batch, _counts(most, machines.per_node), machines, options.scale_batch)
    if most < options.max_devices:
        network += f" More than {most} devices have no images of a batch of {batch}: see `--scale_batch true`."

    folder = Path(options.root, "plan")
    folder = folder / next_version(str(folder.parent), "plan")
    folder.mkdir(parents=True)
    text = "\n\n".join(_report(table, step, machines, source, network, options.scale_batch))
    command = shlex.join(["python", "-m", "app", "plan", *arguments])
    head = f"`{command}`, torch {versions()['torch']}, on {hardware()['cpu']}"
    (folder / "plan.md").write_text(f"{text}\n\n{head}\n\n![scaling](plan.png)\n")
    table.to_csv(folder / "plan.csv", index=False)
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    what = {"command": command, "versions": versions(), "hardware": hardware()}
    write_json(folder / "plan.json", {**what, "step": asdict(step), "machines": asdict(machines), "predicted": rows})
    _draw(table, folder / "plan.png")
    console.print(Markdown(text))
    console.print(f"\nplan  {folder}/plan.md, plan.csv, plan.json, plan.png", soft_wrap=True)
    return 0


def _parse(arguments: list[str]) -> Namespace:
    parser = PlainParser(prog="python -m app plan", usage=USAGE)
    parser.add_argument("--run", nargs="+", default=[], metavar="DIR", help="directories of runs whose steps to take")
    parser.add_argument("--bandwidth", help="between devices of a node, such as 25GB/s; by default measured")
    parser.add_argument("--latency", help="between devices of a node, such as 20us; by default measured")
    parser.add_argument("--node_bandwidth", help="between nodes; by default as between devices")
    parser.add_argument("--node_latency", help="between nodes; by default as between devices")
    parser.add_argument("--per_node", type=int, help="devices of a node; by default those of this machine")
    parser.add_argument("--max_devices", type=int, default=16, help="up to how many devices to predict")
    parser.add_argument("--price_per_hour", type=float, help="price of one device for an hour")
    parser.add_argument("--scale_batch", type=bool, default=False, help="let the global batch grow with the devices")
    parser.add_argument("--root", default="runs", help="plans go to ROOT/plan")
    options = parser.parse_args(arguments)
    for name, most in (("per_node", None), ("max_devices", 16384)):
        value = options[name]
        if value is not None and (value < 1 or (most is not None and value > most)):
            raise UserError(f"--{name} {value}: give 1 or more{f', up to {most:,}' if most else ''}")
    if options.price_per_hour is not None and options.price_per_hour < 0:
        raise UserError(f"--price_per_hour {options.price_per_hour}: give 0 or more")
    readers: dict[str, Callable[[str], float]] = {
        "bandwidth": bandwidth,
        "latency": latency,
        "node_bandwidth": bandwidth,
        "node_latency": latency,
    }
    for name, read in readers.items():
        if options[name] is not None:
            try:
                options[name] = read(options[name])
            except ValueError as error:
                raise UserError(f"--{name} {error}") from error
    return options


def _counts(most: int, per_node: int) -> list[int]:
    """List numbers of devices: powers of two within a node, then whole nodes, doubled."""
    doubled = [2**exponent for exponent in range(most.bit_length())]
    counts = {count for count in doubled if count < per_node} | {count * per_node for count in doubled}
    return sorted(count for count in counts if count <= most)


def _step(options: Namespace, fit: list[str], console: Console) -> tuple[Step, int, str]:
    """Measure the step, or read it from runs: step, global batch, and a sentence on where both come from."""
    if options.run:
        read = [read_record(path) for path in options.run]
        configs = [record["config"] for _, _, record in read]
        models = [
            (read_yaml(config).get("model"), record["precision"])
            for config, (_, _, record) in zip(configs, read, strict=True)
        ]
        if any(model != models[0] for model in models):
            raise UserError("the runs of --run are of different models or precisions: give runs of one")
        measured = [(batch, times) for batch, times, _ in read]
        whole = max(record["global_batch_size"] for _, _, record in read)
        fit = ["fit", "--config", configs[0], *fit[1:]]
        if len({record.get("threads") for _, _, record in read}) > 1:
            raise UserError("the runs of --run had different numbers of threads: give runs of one")
        source = f"the steps of {', '.join(options.run)}"
        if len({batch for batch, _ in measured}) == 1:
            source += (
                ", of one batch size: what it costs to launch a step is not known and taken to be nothing, so that the "
                "predictions are the best that can be hoped for, and dp, which it matters most to, is left out"
            )
    else:
        console.print("measuring steps on one device …")
        measured = measure_steps(fit)
        whole = int(measured[0][0])
        source = f"steps measured here, with batches of {', '.join(f'{batch:.0f}' for batch, _ in measured)}"
    backward, gradients = profile_gradients(fit, max(int(measured[0][0]), 1))
    return fit_step(measured, backward, make_buckets(gradients)), whole, source


def _machines(options: Namespace, console: Console) -> tuple[Machines, str]:
    """Describe the machines, and say where the figures of their network come from."""
    given = options.bandwidth is not None and options.latency is not None
    link = Link(options.bandwidth or 1.0, options.latency or 0.0)
    source = "given"
    if not given:
        console.print("measuring an all-reduce of two processes …")
        try:
            measured = measure_all_reduce()
        except (RuntimeError, TimeoutError) as error:
            raise UserError(f"the network could not be measured ({error}): give --bandwidth and --latency") from error
        found = fit_link(measured, 2)
        link = Link(options.bandwidth or found.bandwidth, found.latency if options.latency is None else options.latency)
        names = [name for name in ("bandwidth", "latency") if options[name] is None]
        source = f"{' and '.join(names)} measured between two processes of this machine"
    if options.node_bandwidth is None and options.node_latency is None:
        source += ", between nodes taken to be the same (see --node_bandwidth, --node_latency)"
    node_latency = link.latency if options.node_latency is None else options.node_latency
    gpus = torch.cuda.device_count()
    machines = Machines(
        per_node=options.per_node or gpus or usable_cores() // max(torch.get_num_threads(), 1) or 1,
        link=link,
        node_link=Link(options.node_bandwidth or link.bandwidth, node_latency),
        shared=not gpus,
        price_per_hour=options.price_per_hour,
    )
    return machines, source


def _report(
    table: pd.DataFrame, step: Step, machines: Machines, source: str, network: str, scaled: bool
) -> Iterator[str]:
    def cells(row: pd.Series) -> list[str]:
        shown = [
            row["strategy"],
            f"{row['devices']} = {row['nodes']} × {min(row['devices'], machines.per_node)}",
            f"{row['global_batch']} / {row['replica_batch']}{'' if row['shared_equally'] else ' *'}",
            f"{row['step_ms']:.2f}",
            "—" if pd.isna(row["waiting_ms"]) else f"{row['waiting_ms']:.2f}",
            f"{row['samples_per_s']:,.0f}",
            f"{row['speed_up']:.2f}",
            f"{row['efficiency']:.0%}",
        ]
        return [*shown, f"{row['cost_per_million_samples']:.4g}"] if machines.price_per_hour is not None else shown

    headers = ["", "devices = nodes × each", "batch, global / each", "step (ms)", "waiting (ms)", "samples/s"]
    headers += ["speed-up", "efficiency"] + ["cost of 10⁶ samples"] * (machines.price_per_hour is not None)
    buckets = ", ".join(f"{bucket.size / 2**20:.2f} MiB at {bucket.ready:.0%}" for bucket in step.buckets)
    links = [
        f"{link.bandwidth / 1e9:.3g} GB/s and {link.latency * 1e6:.3g} µs {where}"
        for link, where in ((machines.link, "in a node"), (machines.node_link, "between nodes"))
    ]
    yield "# Plan"
    yield from _advice(table, scaled)
    yield "## Predicted"
    yield markdown_table(headers, [cells(row) for _, row in table.iterrows()])
    yield "Waiting is communication that the backward pass does not hide."
    if not table["shared_equally"].all():
        yield "\\* on paper only: `fit` refuses a batch that the devices cannot share equally."
    yield "## From what"
    yield f"Step: {source}. Buckets of gradients, and when in the backward pass they are ready: {buckets}."
    yield (
        f"Network: {', '.join(links)}; {network}. The model is a ring all-reduce of DDP's buckets that overlaps with "
        "the backward pass; its formulas and sources are in app/plan/cost_model.py. Among many ranks NCCL takes trees "
        "for small buffers, whose latency grows less than that of a ring."
    )


def _advice(table: pd.DataFrame, scaled: bool) -> Iterator[str]:
    table = table[table["shared_equally"]]
    ranked = table.sort_values("samples_per_s", ascending=False)
    best = ranked.iloc[0]
    worth = table[(table["efficiency"] >= 0.5) & (table["strategy"] != "dp")].iloc[-1]
    if best["devices"] == 1:
        yield "**One device is the fastest**: whatever a second one gains, exchanging gradients costs more."
        limit = "a larger `--data.batch_size`" + ("" if scaled else ", or `--scale_batch true`")
        yield f"Try {limit}: more work for each exchange."
        return
    yield (
        f"**Fastest: {best['devices']} devices in {best['nodes']} node(s) under {best['strategy']}**, "
        f"{best['speed_up']:.2f} times one device, {best['efficiency']:.0%} of the ideal."
    )
    if worth["devices"] == table["devices"].max():
        yield f"**Worth it up to {worth['devices']} devices at least**, the most that were looked at."
    else:
        yield f"**Worth it up to {worth['devices']} device(s)**: from there on less than half of each one is used."
    ddp = table[table["strategy"] != "dp"]
    if (ddp["nodes"] == 2).any():
        gain = ddp[ddp["nodes"] == 2].iloc[-1]["samples_per_s"] / ddp[ddp["nodes"] == 1].iloc[-1]["samples_per_s"]
        verdict = "at twice the price" if gain > 1 else "so it is of no use"
        yield f"A second node gives {gain:.2f} times the throughput of one, {verdict}."


def _draw(table: pd.DataFrame, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, parts = figure.subplots(1, 2)
    single = table[table["devices"] == 1]
    for strategy, style in (("ddp", "o-"), ("dp", "s--")):
        rows = pd.concat([single, table[(table["strategy"] == strategy) & (table["devices"] > 1)]])
        if len(rows) > 1:
            speed.plot(rows["devices"], rows["speed_up"], style, label=strategy)
            parts.plot(rows["devices"], 100 * rows["efficiency"], style, label=strategy)
    speed.plot(table["devices"], table["devices"], color="#999999", linestyle=":", label="ideal")
    speed.set(xlabel="devices", ylabel="speed-up over one device", title="Predicted speed-up")
    parts.set(xlabel="devices", ylabel="% of the ideal", title="Predicted scaling efficiency", ylim=(0, 105))
    for axes in (speed, parts):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(set(table["devices"])), sorted(set(table["devices"])), rotation=60)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    speed.set_yscale("log", base=2)
    speed.yaxis.set_major_formatter("{x:g}")
    figure.savefig(path, dpi=120)

"""Command `python -m app plan`: predicts step time, throughput and cost on more devices.

The predictions come from the time of a step (measured here, or recorded in runs) and the speed of
the links between devices (measured here, or given by flags). Flags of fit define the training.
"""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from matplotlib.ticker import EngFormatter
from rich.markdown import Markdown

from app.command.configuration import resolve, split_flags
from app.command.parser import PlainParser
from app.command.resolved import Resolved
from app.command.run_options import default_name
from app.errors import UserError
from app.lab.plan.cost_model import Machines, predict, spread_of
from app.lab.plan.measure import measure_step, read_records
from app.lab.plan.report import (
    CAPTION,
    advice,
    draw_picture,
    notes,
    origin,
    predictions,
    recommendation,
)
from app.lab.runs import CommandLine
from app.monitor.loggers import claim_version
from app.record import Record
from app.system.files import write_json, write_text
from app.system.interconnect import Link, fit_link, measure_all_reduce
from app.system.machine import hardware, usable_cores, versions
from app.system.page import Section, code, page, plain
from app.system.terminal import make_console

USAGE = "python -m app plan [--SETTING VALUE ...] [--config FILE] [--FLAG.OF.FIT VALUE ...]"
# power of ten of each prefix, such as 9 of `G`
POWERS = {prefix: power for power, prefix in EngFormatter.ENG_PREFIXES.items()}


def quantity(name: str, text: str) -> float:
    """Parse a bandwidth such as `25GB/s` into bytes per second, or a latency into seconds.

    Raises:
        UserError: When number or unit is missing, or the bandwidth is zero.
    """
    is_latency = name.endswith("latency")
    unit = "([kMGT]?)(?:B|bit)/s"
    example = "bytes or bits per second, such as 25GB/s or 100Mbit/s"
    if is_latency:
        unit = "([nuµm]?)s"
        example = "a time, such as 20us or 1ms"
    match = re.fullmatch(r"(\d*\.?\d+)\s*" + unit, text.strip())
    if match is None or not (is_latency or float(match[1])):
        raise UserError(f"--{name} {text}: give {example}")
    value = float(match[1]) * 10.0 ** POWERS[match[2].replace("u", "µ")]
    if "bit" in text:
        value /= 8
    return value


@dataclass
class Settings:
    """Settings of `plan`, in addition to flags of `fit`.

    Args:
        max_devices: Largest number of devices to predict.
        scale_batch: Let the global batch grow with the devices.
        per_node: Devices per node; by default this machine's.
        bandwidth: Within a node, such as 25GB/s; measured by default.
        latency: Within a node, such as 20us; measured by default.
        node_bandwidth: Between nodes; by default --bandwidth.
        node_latency: Between nodes; by default --latency.
        root: Plans go to ROOT/plan.
    """

    max_devices: PositiveInt = 16
    scale_batch: bool = False
    per_node: PositiveInt | None = None
    bandwidth: str | None = None
    latency: str | None = None
    node_bandwidth: str | None = None
    node_latency: str | None = None
    root: str = "runs"


def run(arguments: list[str]) -> int:
    """Measure, predict, and write the report.

    Args:
        arguments: The arguments after `plan`.

    Returns:
        Exit code.

    Raises:
        UserError: For invalid flags, or a failed measurement.
    """
    remaining, flags = split_flags(arguments)
    options = _parse(remaining)
    for flag, value in flags:
        if options.run and not flag.startswith("--data."):
            raise UserError(f"{flag} {value}: --run already defines the steps: leave it out")
    fit = ["fit", *itertools.chain.from_iterable(flags)]
    records = read_records(options.run or [])
    if records:
        fit[1:1] = ["--config", str(Path(options.run[0].removesuffix("run.json"), "config.yaml"))]
    resolved = Resolved(resolve(fit))
    console = make_console(highlight=False)
    with console.status("") as status:
        devices, cuda = _devices(resolved, records)
        machines = _machines(options, devices, cuda, status.update)
        step, batch = measure_step(fit, records, resolved, status.update)
    most = options.max_devices
    limits = []
    if batch < most and not options.scale_batch:
        most = batch
        limits.append(
            f"A batch of {most} has no images for more than {most} devices: see "
            "`--scale_batch true`."
        )
    if machines.per_node < most and machines.node_link is None:
        most = machines.per_node
        limits.append(
            f"More than {most} devices are not predicted: give `--node_bandwidth` and "
            "`--node_latency` between machines like this one, or `--per_node`, `--bandwidth` and "
            "`--latency` of another."
        )
    counts = _counts(most, machines.per_node)
    table = predict(step, batch, counts, machines, options.scale_batch)

    folder = claim_version(Path(options.root, "plan"))
    command = str(CommandLine(["plan", *arguments]))
    title = f"{default_name(resolved.config)}, batch {batch}: {recommendation(table, step)}"
    text = advice(table, options.scale_batch)
    rows = predictions(table)
    reading = "\n\n".join([*notes(table, step), *limits])
    figures = {"speed_up": draw_picture(table, machines.per_node)}
    picture = f"![{CAPTION}](speed_up)"
    machine = f"With torch {versions()['torch']}, on {plain(hardware()['cpu'])}."
    sections = [
        Section("Predicted", f"{picture}\n\n{rows}\n\n{reading}"),
        Section("How it was predicted", origin(step, machines), folded=True),
        Section("The command", f"{code(command)}\n\n{machine}"),
    ]
    write_text(folder / "report.html", page(title, text, sections, figures))
    table.to_csv(folder / "plan.csv", index=False)
    plan = {
        "command": command,
        "versions": versions(),
        "hardware": hardware(),
        "step": asdict(step),
        "machines": asdict(machines),
        "predicted": table.to_dict("records"),
    }
    write_json(folder / "plan.json", plan)
    console.print(f"\n{title}\n", style="bold")
    console.print(Markdown(f"{rows}\n\n{text}\n\n{reading}"))
    console.print(
        f"\nplan  {folder}/report.html, plan.csv, plan.json", soft_wrap=True, markup=False
    )
    return 0


def _parse(arguments: list[str]) -> Namespace:
    parser = PlainParser(usage=USAGE, description=__doc__)
    parser.add_argument(
        "--run", nargs="+", metavar="DIR", help="read the steps from runs; measured by default"
    )
    parser.add_class_arguments(Settings)
    return parser.parse_args(arguments)


def _counts(most: int, per_node: int) -> list[int]:
    """Return 1, 2, 4, … devices within a node, then those of 1, 2, 4, … whole nodes."""
    counts = set()
    for exponent in range(most.bit_length()):
        count = 2**exponent
        if count < per_node:
            counts.add(count)
        if count * per_node <= most:
            counts.add(count * per_node)
    return sorted(counts)


def _devices(resolved: Resolved, records: list[Record]) -> tuple[int, bool]:
    """Return how many processes the measured machine can run, and whether they run on GPUs."""
    cuda = resolved.accelerator == "cuda"
    gpus = torch.cuda.device_count()
    threads = resolved.config.run.threads
    if threads == "auto":
        threads = torch.get_num_threads()
    if records:
        first = records[0]
        assert first.hardware
        cuda = first.accelerator == "cuda"
        gpus = len(first.hardware.gpus)
        threads = first.threads
    if cuda:
        return gpus, cuda
    return max(usable_cores() // threads, 1), cuda


def _machines(options: Namespace, devices: int, cuda: bool, say: Callable[[str], None]) -> Machines:
    """Return the machines to predict.

    Two processes measure the links, each with its own GPU or cores.

    Args:
        options: Settings of `plan`.
        devices: Number of processes that the measured machine can run.
        cuda: Whether they run on GPUs.
        say: Function called with a description of the measurement.

    Raises:
        UserError: When flags are missing. Nodes with more devices than this machine need
            `--bandwidth` and `--latency`. Nodes with a single device need these two, or
            `--node_bandwidth` and `--node_latency`.
    """
    within: dict[str, float] = {}
    between: dict[str, float] = {}
    for name in ("bandwidth", "latency"):
        for given, flag in ((within, name), (between, f"node_{name}")):
            if options[flag] is not None:
                given[name] = quantity(flag, options[flag])
    per_node = options.per_node or devices
    link = Link(math.inf, 0.0)
    spread = (1.0, 1.0)
    gpus = torch.cuda.device_count()
    if len(within) < 2 and 1 < per_node <= devices and (gpus > 1 or not cuda):
        say("measuring an all-reduce of two processes")
        try:
            measured = measure_all_reduce()
        except (RuntimeError, TimeoutError) as error:
            raise UserError(
                f"the network could not be measured ({error}): give --bandwidth and --latency"
            ) from error
        link = fit_link(measured, 2)
        spread = spread_of(seconds / link.all_reduce(size, 2) for size, seconds in measured)
    elif len(within) < 2 and (per_node > 1 or len(between) < 2):
        has = f"cores for {devices} process(es) of this training; see --run.threads"
        if cuda:
            has = f"{gpus} GPU(s)"
        raise UserError(
            f"--per_node {per_node}: this machine has {has}: give --per_node, --bandwidth and "
            "--latency of another machine, or --node_bandwidth and --node_latency between machines "
            "like this one"
        )
    link = replace(link, **within)
    node_link = None
    if between or len(within) == 2:
        node_link = replace(link, **between)
    return Machines(per_node, link, node_link, spread)

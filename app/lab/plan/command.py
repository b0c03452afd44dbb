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
from typing import Any

import torch
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeFloat, PositiveInt
from rich.markdown import Markdown

from app.command.configuration import resolve, split_flags
from app.command.parser import PlainParser
from app.command.resolved import Resolved
from app.errors import UserError
from app.lab.plan.cost_model import Machines, Step, fit_step, make_buckets, predict, spread_of_link
from app.lab.plan.measure import measure_steps, profile_gradients, read_record, timed
from app.lab.plan.report import PICTURES, advice, draw_pictures, heading, notes, origin, predictions
from app.lab.runs import CommandLine
from app.monitor.loggers import claim_version
from app.system.files import write_json, write_text
from app.system.interconnect import Link, fit_link, measure_all_reduce
from app.system.machine import hardware, usable_cores, versions
from app.system.page import Section, code, page, plain
from app.system.terminal import make_console

USAGE = "python -m app plan [--SETTING VALUE ...] [--config FILE] [--FLAG.OF.FIT VALUE ...]"
BANDWIDTHS = {  # in bytes per second
    "B/s": 1.0,
    "kB/s": 1e3,
    "MB/s": 1e6,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "bit/s": 0.125,
    "kbit/s": 125.0,
    "Mbit/s": 125e3,
    "Gbit/s": 125e6,
    "Tbit/s": 125e9,
}
LATENCIES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}  # in seconds


def quantity(name: str, text: str) -> float:
    """Parse a bandwidth such as `25GB/s` into bytes per second, or a latency into seconds.

    Raises:
        UserError: When number or unit is missing, or the bandwidth is zero.
    """
    units = BANDWIDTHS
    example = "bytes or bits per second, such as 25GB/s or 100Mbit/s"
    if name.endswith("latency"):
        units = LATENCIES
        example = "a time, such as 20us or 1ms"
    match = re.fullmatch(r"(\d*\.?\d+)\s*(\D+)", text.strip())
    if match is None or match[2] not in units or (units is BANDWIDTHS and not float(match[1])):
        raise UserError(f"--{name} {text}: give {example}")
    return float(match[1]) * units[match[2]]


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
        price_per_hour: Price of one device; adds the cost.
        root: Plans go to ROOT/plan.
    """

    max_devices: PositiveInt = 16
    scale_batch: bool = False
    per_node: PositiveInt | None = None
    bandwidth: str | None = None
    latency: str | None = None
    node_bandwidth: str | None = None
    node_latency: str | None = None
    price_per_hour: NonNegativeFloat | None = None
    root: str = "runs"


@dataclass
class Basis:
    """Inputs of a plan: the measured step, and the settings that it was measured with.

    Attributes:
        step: Step on one device.
        batch: Global batch size.
        config: Resolved configuration of the measurement.
        source: Origin of the step's times, as text for the report.
        machines: Machines to predict.
        network: Origin of the speed of their links, as text for the report.
        cautions: Sentences about effects that the predictions ignore.
        doubts: Words that the title adds to `predicted`.
    """

    step: Step
    batch: int
    config: dict[str, Any]
    source: str
    machines: Machines
    network: str
    cautions: list[str]
    doubts: str = ""


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
    console = make_console(highlight=False)
    for flag, value in flags:
        if options.run and not flag.startswith("--data."):
            raise UserError(f"{flag} {value}: --run already defines the steps: leave it out")
    with console.status("") as status:
        basis = _basis(options, flags, status.update)
    machines = basis.machines
    most = options.max_devices
    if basis.batch < most and not options.scale_batch:
        most = basis.batch
        basis.cautions.append(
            f"A batch of {most} has no images for more than {most} devices: see "
            "`--scale_batch true`."
        )
    if machines.node_link is None:
        most = min(most, machines.per_node)
    counts = _counts(most, machines.per_node)
    table = predict(basis.step, basis.batch, counts, machines, options.scale_batch)

    folder = claim_version(Path(options.root, "plan"))
    command = str(CommandLine(["plan", *arguments]))
    title = heading(table, basis.config, basis.batch, basis.doubts)
    text = "\n\n".join(advice(table, options.scale_batch))
    reading = "\n\n".join([*notes(table, machines), *basis.cautions])
    figures = ""
    for name, caption in PICTURES.items():
        figures += f'![{caption}]({name} "{caption}")\n'
    rows = predictions(table)
    origins = "\n\n".join(origin(basis.step, machines, basis.source, basis.network))
    machine = f"With torch {versions()['torch']}, on {plain(hardware()['cpu'])}."
    sections = [
        Section("Predicted", f"{figures}\n{rows}\n\n{reading}"),
        Section("How it was predicted", origins, folded=True),
        Section("The command", f"{code(command)}\n\n{machine}"),
    ]
    write_text(folder / "report.html", page(title, text, sections, draw_pictures(table, machines)))
    table.to_csv(folder / "plan.csv", index=False)
    plan = {
        "command": command,
        "versions": versions(),
        "hardware": hardware(),
        "step": asdict(basis.step),
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
    options = parser.parse_args(arguments)
    for name in ("bandwidth", "latency", "node_bandwidth", "node_latency"):
        if options[name] is not None:
            options[name] = quantity(name, options[name])
    return options


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


def _basis(options: Namespace, flags: list[tuple[str, str]], say: Callable[[str], None]) -> Basis:
    """Return the basis of the plan: measure the step, or read it from runs."""
    fit = ["fit", *itertools.chain.from_iterable(flags)]
    records = list(map(read_record, options.run or []))
    if records:
        fit[1:1] = ["--config", str(Path(options.run[0].removesuffix("run.json"), "config.yaml"))]
    resolved = Resolved(resolve(fit))
    config = resolved.config.as_dict()
    cuda = resolved.accelerator == "cuda"
    gpus = torch.cuda.device_count()
    threads = config["run"]["threads"]
    if threads == "auto":
        threads = torch.get_num_threads()
    if records:
        first = records[0]
        for record in records:
            for name in ("model", "precision", "threads"):
                if getattr(record, name) != getattr(first, name):
                    raise UserError(f"the runs of --run differ in {name}: vary only the batch size")
        cuda = first.accelerator == "cuda"
        threads = first.threads
        gpus = len(first.hardware.gpus) if first.hardware else 0
    devices = gpus if cuda else max(usable_cores() // threads, 1)
    machines, network = _machines(options, devices, cuda, say)
    # no warm-up, because `fit` rejects one that is as long as the run, and the measured runs have
    # only 30 steps
    if "warmup" in config["model"].get("init_args", {}):
        fit += ["--model.warmup", "0"]
    if records:
        measured = list(map(timed, records))
        batch = max(record.global_batch_size or 1 for record in records)
        source = f"the steps of {', '.join(options.run)}"
        if "--data.batch_size" in dict(flags):
            batch = config["data"]["init_args"]["batch_size"]
    else:
        measured = measure_steps(fit, say)
        batch = int(measured[0].images)
        sizes = ", ".join(f"{steps.images:.0f}" for steps in measured)
        source = f"steps measured here, with batches of {sizes}"
    say("timing the gradients of a backward pass")
    backward, gradients = profile_gradients(fit, max(int(measured[0].images), 1))
    step = fit_step(measured, backward, make_buckets(gradients))
    basis = Basis(step, batch, config, source, machines, network, [])
    taken = max(steps.taken for steps in measured)
    if taken:
        basis.doubts += " on a busy machine"
        basis.cautions.append(
            f"Other programs took {taken} while the steps were measured: measure again when they "
            "are done."
        )
    if not step.launch_known:
        basis.doubts += " without the cost of launching a step"
        basis.cautions.append(
            "The steps have one batch size, so that the cost of launching a step is unknown and "
            "counts as none: real speed-ups are smaller. Give `--run` a run with another batch, "
            "too."
        )
    return basis


def _machines(
    options: Namespace, devices: int, cuda: bool, say: Callable[[str], None]
) -> tuple[Machines, str]:
    """Return the machines to predict, and the origin of their links' speed, as text.

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
    within = {}
    between = {}
    for name in ("bandwidth", "latency"):
        if options[name] is not None:
            within[name] = options[name]
        if options[f"node_{name}"] is not None:
            between[name] = options[f"node_{name}"]
    per_node = options.per_node or devices
    link = Link(math.inf, 0.0)
    spread = (1.0, 1.0)
    source = "given"
    gpus = torch.cuda.device_count()
    if len(within) == 2:
        if not between:
            source += ", between nodes taken to be the same (see --node_bandwidth, --node_latency)"
    elif 1 < per_node <= devices and (gpus > 1 or not cuda):
        say("measuring an all-reduce of two processes")
        try:
            measured = measure_all_reduce(timeout=300)
        except (RuntimeError, TimeoutError) as error:
            raise UserError(
                f"the network could not be measured ({error}): give --bandwidth and --latency"
            ) from error
        link = fit_link(measured, 2)
        spread = spread_of_link(measured, link, 2)
        missing = {"bandwidth", "latency"} - within.keys()
        source = f"{' and '.join(sorted(missing))} measured between two processes of this machine"
    elif per_node > 1 or len(between) < 2:
        flag = ""
        if options.per_node:
            flag = f"--per_node {per_node}: "
        has = f"cores for {devices} process(es) of this training; see --run.threads"
        if cuda:
            has = f"{gpus} GPU(s)"
        raise UserError(
            f"{flag}this machine has {has}: give --per_node, --bandwidth and --latency of another "
            "machine, or --node_bandwidth and --node_latency between machines like this one"
        )
    link = replace(link, **within)
    node_link = None
    if between or len(within) == 2:
        node_link = replace(link, **between)
    return Machines(per_node, link, node_link, spread, options.price_per_hour), source

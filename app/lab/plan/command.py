"""Command `python -m app plan`: predicts step time, throughput, efficiency and cost on more devices and nodes.

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

import psutil
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
from app.system.machine import busy, hardware, usable_cores, versions
from app.system.page import Section, code, page, plain
from app.system.terminal import make_console

USAGE = "python -m app plan [--SETTING VALUE ...] [--config FILE] [--FLAG.OF.FIT VALUE ...]"
# units of bandwidth in bytes per second, and of latency in seconds
BANDWIDTHS = {
    f"{prefix}{unit}/s": factor * size
    for prefix, factor in {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
    for unit, size in {"B": 1.0, "bit": 1 / 8}.items()
}
LATENCIES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def quantity(name: str, text: str) -> float:
    """Parse a bandwidth such as `25GB/s` into bytes per second, or a latency such as `20us` into seconds.

    Raises:
        UserError: When number or unit is missing, or the bandwidth is zero.
    """
    units = BANDWIDTHS
    example = "bytes or bits per second, such as 25GB/s or 100Mbit/s"
    if name.endswith("latency"):
        units = LATENCIES
        example = "a time, such as 20us or 1ms"
    match = re.fullmatch(rf"(\d*\.?\d+)\s*({'|'.join(units)})", text.strip())
    if match is None or (units is BANDWIDTHS and not float(match[1])):
        raise UserError(f"--{name} {text}: give {example}")
    return float(match[1]) * units[match[2]]


@dataclass
class Basis:
    """Inputs of a plan: the measured step, and the settings that it was measured with.

    Attributes:
        step: Step on one device.
        batch: Global batch size.
        config: Resolved configuration of the measurement.
        cuda: Whether the device is a GPU.
        threads: Number of threads of a process on a CPU.
        source: Origin of the step's times, as text for the report.
        devices: Number of processes that the measured machine can run, each with its own GPU or
            cores.
        cautions: Sentences about effects that the predictions ignore.
        taken: Cores that other programs took during the measurement, as text of `taken_cores`.
    """

    step: Step
    batch: int
    config: dict[str, Any]
    cuda: bool
    threads: int
    source: str
    devices: int
    cautions: list[str]
    taken: str = ""


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
    warning = busy()
    if warning:
        console.print(f"[yellow]busy[/yellow]  {warning}")
    with console.status("") as status:
        basis = _basis(options, flags, status.update)
        machines, network = _machines(options, basis, status.update)
    most = options.max_devices if options.scale_batch else min(options.max_devices, basis.batch)
    counts = _counts(
        most if machines.node_link else min(most, machines.per_node), machines.per_node
    )
    table = predict(basis.step, basis.batch, counts, machines, options.scale_batch).assign(
        threads=basis.threads
    )
    if most < options.max_devices:
        basis.cautions.append(
            f"A batch of {basis.batch} has no images for more than {most} devices: see `--scale_batch true`."
        )

    folder = claim_version(Path(options.root, "plan"))
    command = str(CommandLine(["plan", *arguments]))
    doubts = " on a busy machine" if warning or basis.taken else ""
    doubts += "" if basis.step.launch_known else " without the cost of launching a step"
    title = heading(table, basis.config, basis.batch, doubts)
    text = "\n\n".join(advice(table, options.scale_batch))
    reading = "\n\n".join([*notes(table, machines), *basis.cautions])
    figures = "\n".join(f'![{caption}]({name} "{caption}")' for name, caption in PICTURES.items())
    rows = predictions(table)
    sections = [
        Section("Predicted", f"{figures}\n\n{rows}\n\n{reading}"),
        Section(
            "How it was predicted",
            "\n\n".join(origin(basis.step, machines, basis.source, network)),
            folded=True,
        ),
        Section(
            "The command",
            f"{code(command)}\n\nWith torch {versions()['torch']}, on {plain(hardware()['cpu'])}.",
        ),
    ]
    lead = f"> {warning}\n\n{text}" if warning else text
    write_text(folder / "report.html", page(title, lead, sections, draw_pictures(table, machines)))
    table.to_csv(folder / "plan.csv", index=False)
    known = {
        "command": command,
        "versions": versions(),
        "hardware": hardware(),
        "load": psutil.getloadavg()[0],
    }
    known |= {
        "step": asdict(basis.step),
        "machines": asdict(machines),
        "predicted": table.to_dict("records"),
    }
    write_json(folder / "plan.json", known)
    console.print(f"\n{title}\n", style="bold")
    console.print(Markdown(f"{rows}\n\n{text}\n\n{reading}"))
    console.print(
        f"\nplan  {folder}/report.html, plan.csv, plan.json", soft_wrap=True, markup=False
    )
    return 0


def _parse(arguments: list[str]) -> Namespace:
    parser = PlainParser(usage=USAGE, description=__doc__)
    number: Any = PositiveInt
    for name, settings in {
        "max_devices": {
            "type": number,
            "default": 16,
            "metavar": "N",
            "help": "largest number of devices to predict",
        },
        "scale_batch": {
            "type": bool,
            "default": False,
            "help": "let the global batch grow with the devices",
        },
        "per_node": {
            "type": number,
            "metavar": "N",
            "help": "devices per node; by default this machine's",
        },
        "bandwidth": {"metavar": "X", "help": "within a node, such as 25GB/s; measured by default"},
        "latency": {"metavar": "X", "help": "within a node, such as 20us; measured by default"},
        "node_bandwidth": {"metavar": "X", "help": "between nodes; by default --bandwidth"},
        "node_latency": {"metavar": "X", "help": "between nodes; by default --latency"},
        "price_per_hour": {
            "type": NonNegativeFloat,
            "metavar": "X",
            "help": "of one device; adds the cost",
        },
        "run": {
            "nargs": "+",
            "metavar": "DIR",
            "help": "read the steps from runs; measured by default",
        },
        "root": {"default": "runs", "help": "plans go to ROOT/plan"},
    }.items():
        parser.add_argument(f"--{name}", **settings)
    options = parser.parse_args(arguments)
    for name in ("bandwidth", "latency", "node_bandwidth", "node_latency"):
        if options[name] is not None:
            options[name] = quantity(name, options[name])
    return options


def _counts(most: int, per_node: int) -> list[int]:
    """Return the device counts to predict: 1, 2, 4, … devices within a node, then 1, 2, 4, … whole nodes."""
    doubled = [2**exponent for exponent in range(most.bit_length())]
    counts = {count for count in doubled if count < per_node} | {
        count * per_node for count in doubled
    }
    return sorted(count for count in counts if count <= most)


def _basis(options: Namespace, flags: list[tuple[str, str]], say: Callable[[str], None]) -> Basis:
    """Return the basis of the plan: measure the step, or read it from runs."""
    fit = ["fit", *itertools.chain.from_iterable(flags)]
    records = [read_record(path) for path in options.run or ()]
    if records:
        fit[1:1] = ["--config", str(Path(options.run[0].removesuffix("run.json"), "config.yaml"))]
    resolved = Resolved(resolve(fit))
    config = resolved.config.as_dict()
    cuda = resolved.accelerator == "cuda"
    gpus = torch.cuda.device_count()
    threads = config["run"]["threads"]
    threads = torch.get_num_threads() if threads == "auto" else threads
    cautions: list[str] = []
    if records:
        settings = [(record.model, record.precision, record.threads) for record in records]
        if any(other != settings[0] for other in settings):
            raise UserError(
                "the runs of --run differ in model, precision or threads: vary only the batch size"
            )
        cuda = records[0].accelerator == "cuda"
        threads = records[0].threads
        gpus = len(records[0].hardware.gpus) if records[0].hardware else 0
        if len({timed(record).images for record in records}) == 1:
            cautions.append(
                "The steps of `--run` have one batch size, so that the cost of launching a step is unknown and counts "
                "as none: real speed-ups are smaller, and dp is not predicted. Give a run with another batch, too."
            )
    devices = gpus if cuda else max(usable_cores() // threads, 1)
    _require_links(options, devices, cuda)
    # no warm-up, because `fit` rejects one that is as long as the run, and the measured runs have
    # only 30 steps
    fit += ["--model.warmup", "0"] if "warmup" in config["model"].get("init_args", {}) else []
    measured = [timed(record) for record in records] or measure_steps(fit, say)
    sizes = ", ".join(f"{steps.images:.0f}" for steps in measured)
    source = (
        f"the steps of {', '.join(options.run)}"
        if records
        else f"steps measured here, with batches of {sizes}"
    )
    batch = max(
        [record.global_batch_size or 1 for record in records], default=int(measured[0].images)
    )
    if records and any(flag == "--data.batch_size" for flag, _ in flags):
        batch = config["data"]["init_args"]["batch_size"]
    say("timing the gradients of a backward pass")
    backward, gradients = profile_gradients(fit, max(int(measured[0].images), 1))
    step = fit_step(measured, backward, make_buckets(gradients))
    taken = max(steps.taken for steps in measured)
    if taken:
        cautions.append(
            f"Other programs took {taken} while the steps were measured: measure again when they are done."
        )
    return Basis(step, batch, config, cuda, threads, source, devices, cautions, taken)


def _require_links(options: Namespace, devices: int, cuda: bool) -> None:
    """Require flags for the speed of the links between devices, unless this machine can measure it.

    The measurement needs two processes, each with its own GPU or cores.

    Raises:
        UserError: When flags are missing. Nodes with more devices than this machine need
            `--bandwidth` and `--latency`. Nodes with a single device need these two, or
            `--node_bandwidth` and `--node_latency`.
    """
    per_node = options.per_node or devices
    network = options.bandwidth is not None and options.latency is not None
    nodes = options.node_bandwidth is not None and options.node_latency is not None
    gpus = torch.cuda.device_count()
    can_measure = 1 < per_node <= devices and (gpus > 1 or not cuda)
    if network or can_measure or (per_node == 1 and nodes):
        return
    flag = f"--per_node {options.per_node}: " if options.per_node else ""
    has = (
        f"{gpus} GPU(s)"
        if cuda
        else f"cores for {devices} process(es) of this training; see --run.threads"
    )
    raise UserError(
        f"{flag}this machine has {has}: give --per_node, --bandwidth and --latency of another "
        "machine, or --node_bandwidth and --node_latency between machines like this one"
    )


def _machines(options: Namespace, basis: Basis, say: Callable[[str], None]) -> tuple[Machines, str]:
    """Return the machines whose training is predicted, and the origin of their links' speed, as text for the report."""
    within, between = (
        {
            name: options[prefix + name]
            for name in ("bandwidth", "latency")
            if options[prefix + name] is not None
        }
        for prefix in ("", "node_")
    )
    missing = [name for name in ("bandwidth", "latency") if name not in within]
    per_node = options.per_node or basis.devices
    link = Link(math.inf, 0.0)
    spread = (1.0, 1.0)
    source = "given"
    if missing and per_node > 1:
        say("measuring an all-reduce of two processes")
        try:
            measured = measure_all_reduce(timeout=300 if busy() else 60)
        except (RuntimeError, TimeoutError) as error:
            raise UserError(
                f"the network could not be measured ({error}): give --bandwidth and --latency"
            ) from error
        link = fit_link(measured, 2)
        spread = spread_of_link(measured, link, 2)
        source = f"{' and '.join(missing)} measured between two processes of this machine"
    elif not missing and not between:
        source += ", between nodes taken to be the same (see --node_bandwidth, --node_latency)"
    link = replace(link, **within)
    node_link = replace(link, **between) if between or not missing else None
    price = options.price_per_hour
    machines = Machines(
        per_node, link, node_link, not basis.cuda, link_spread=spread, price_per_hour=price
    )
    return machines, source

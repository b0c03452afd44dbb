"""Report of this machine, and a test of what works on it: `python -m app doctor`.

Every line is green, yellow (it works, with a caution) or red (it does not work), with a remedy. A self-test ends the
report: a training step under each strategy that can run here, an all-reduce of two processes, a checkpoint written and
read. A timeout is red on a quiet machine only, because a busy or slow one proves nothing.
"""

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Literal

import pandas as pd
import psutil
import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from torch.utils import collect_env

from app.data.sources import CIFAR10Source, FashionMNISTSource
from app.errors import UserError
from app.fit.parser import PlainParser
from app.launch.process import ADDRESSES, RANKS
from app.monitor.loggers import tracking_mode
from app.runs import run_fit
from app.system.machine import GIB, busy, driver, hardware, usable_cores
from app.system.terminal import working

USAGE = """\
python -m app doctor [--json] [--data_root DIR]

Says what this machine has and what will work on it, and tests it. Exit code 1
where something does not work."""

Level = Literal["green", "yellow", "red"]
LEVELS: tuple[Level, ...] = ("green", "yellow", "red")
LONGEST = 300.0  # seconds for a run of one step; on a quiet machine with two cores it takes 4


@dataclass
class Check:
    """A line of the report.

    Attributes:
        name: Name of the check.
        level: `green`, `yellow` or `red`.
        found: The result.
        remedy: The remedy, or an empty string.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""


def run(arguments: list[str]) -> int:
    """Look at the machine and report.

    Args:
        arguments: The arguments after `doctor`.

    Returns:
        Exit code: 1 where something is red.
    """
    parser = PlainParser(prog="python -m app doctor", usage=USAGE)
    parser.add_argument("--json", type=bool, default=False, help="print JSON, for machines")
    parser.add_argument("--data_root", default="data", help="where the data sets are, or will be")
    options = parser.parse_args(arguments)
    width = None if sys.stdout.isatty() else 110  # a pipe has none
    console = Console(stderr=options.json, highlight=False, width=width)
    checks, began = [], monotonic()
    with working(console) as say:
        for check in examine(options.data_root, lambda what: say(f"looking at {what}")):
            checks.append(check)
            if not options.json:
                console.print(_line(check))
    worst = max((check.level for check in checks), key=LEVELS.index)
    if options.json:
        print(json.dumps({"level": worst, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        count = sum(check.level == worst for check in checks)
        said = {"green": "everything works", "yellow": f"it works; look at the {count} in yellow"}
        text = said.get(worst, f"{count} of {len(checks)} do not work")
        console.print(f"[{worst}]{text}[/{worst}], after {monotonic() - began:.0f} s")
    return int(worst == "red")


def _line(check: Check) -> Table:
    """Set level, name and result side by side, and the remedy below."""
    grid = Table.grid(Column(width=6), Column(width=14), Column(overflow="fold"), padding=(0, 2, 0, 0))
    text = Text(check.found)
    if check.remedy:
        text.append(f"\n→ {check.remedy}", style="dim" if check.level == "green" else "bold")
    grid.add_row(Text(check.level, style=check.level), Text(check.name), text)
    return grid


def examine(data_root: str, say: Callable[[str], None] = lambda what: None) -> Iterator[Check]:
    """Make every check, in order; the self-test comes last.

    Args:
        data_root: Folder of the data sets.
        say: Receives the name of the next check, if it takes more than a moment.
    """
    say("this machine")
    yield _load()
    yield from _packages()
    yield _accelerators()
    yield _cores()
    yield from _room()
    yield _backends()
    yield from environment(os.environ)
    say("the data sets")
    yield from _data(data_root)
    yield _tracker()
    yield from _self_test(say)


def _load() -> Check:
    said, _, remedy = (busy() or "").partition("; ")
    if said:
        return Check("load", "yellow", said, remedy)
    return Check("load", "green", f"{psutil.getloadavg()[0]:.1f} on {usable_cores()} cores")


def _packages() -> Iterator[Check]:
    try:
        needed = [Requirement(text) for text in importlib.metadata.requires("data-parallel-lab") or []]
        needed = [requirement for requirement in needed if requirement.marker is None]
        found = {requirement.name: importlib.metadata.version(requirement.name) for requirement in needed}
    except importlib.metadata.PackageNotFoundError as error:
        yield Check("versions", "red", f"{error.name} is not installed", "pip install -e .")
        return
    wrong = [r for r in needed if not r.specifier.contains(found[r.name], prereleases=True)]
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "torchvision", "lightning", "torchmetrics"))
    system = f"{collect_env.get_os(collect_env.run)}, {collect_env.get_libc_version()}"  # the rest of it takes seconds
    text = f"Python {sys.version.split()[0]}, {versions}, wandb {found['wandb']}; {system}"
    yield Check("versions", "green", text)
    for requirement in wrong:
        text = f"{requirement.name} {found[requirement.name]}, but {requirement} is needed"
        yield Check("versions", "red", text, f"pip install '{requirement}'")


def _accelerators() -> Check:
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        text = ", ".join(f"{device.name} with {device.total_memory / GIB:.0f} GiB" for device in devices)
        return Check("accelerators", "green", f"{text}; driver {driver()}")
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
    return Check(
        "accelerators", "yellow", f"no GPU ({built})", "training runs on the CPU; see nvidia-smi if there is one"
    )


def _cores() -> Check:
    """Examine processor and memory."""
    usable, cores, memory = usable_cores(), os.cpu_count() or 1, psutil.virtual_memory()
    free = f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free"
    text = f"{hardware()['cpu']}, {usable} of {cores} cores, {free}"
    threads = os.environ.get("OMP_NUM_THREADS", str(cores))
    if threads.isdigit() and int(threads) > usable:
        return Check("processor", "yellow", text, f"OMP_NUM_THREADS={usable}: more threads would share the cores")
    return Check("processor", "green", text)


def _room() -> Iterator[Check]:
    """Examine the space for batches of workers, and for runs."""
    shared = "workers hand over batches there; docker run --shm-size=8g, or --data.num_workers 0"
    for name, place, least, enough, remedy in (
        ("/dev/shm", Path("/dev/shm"), 0.06, 1, shared),
        ("disk", Path.cwd(), 0.5, 5, "runs and data sets need room"),
    ):
        if place.exists():
            free = shutil.disk_usage(place).free / GIB
            level: Level = "red" if free < least else "yellow" if free < enough else "green"
            yield Check(name, level, f"{free:.1f} GiB free in {place}", "" if level == "green" else remedy)
    if not os.access(".", os.W_OK):
        yield Check("disk", "red", f"{Path.cwd()} cannot be written to", "go elsewhere, or give --run.root")


def _backends() -> Check:
    distributed = torch.distributed
    there = {
        "nccl": distributed.is_available() and distributed.is_nccl_available(),
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
    }
    text = ", ".join(name for name, available in there.items() if available) or "none"
    if not there["gloo"] or (torch.cuda.is_available() and not there["nccl"]):
        return Check("backends", "red", text, "ddp needs gloo on CPUs and nccl on GPUs: install another build of torch")
    return Check("backends", "green", text)


def environment(variables: Mapping[str, str]) -> Iterator[Check]:
    """Check which variables a launcher has set, or left behind."""
    left = [name for name in RANKS if name in variables]
    addresses = [name for name in ADDRESSES if name in variables]
    launchers = {
        "torchrun": {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"} <= variables.keys(),
        f"SLURM job {variables.get('SLURM_JOB_ID')}": "SLURM_JOB_ID" in variables,
        "MPI": bool({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} & variables.keys()),
    }
    found = [name for name, there in launchers.items() if there]
    if found:
        level: Level = "yellow" if found[-1] == "MPI" else "green"
        remedy = "runs are not started by mpirun: use torchrun or srun" if level == "yellow" else ""
        yield Check("launcher", level, ", ".join(found), remedy)
    elif left:
        text = ", ".join(f"{name}={variables[name]}" for name in left)
        remedy = f"a run would take itself for one of several and wait for them: unset {' '.join(left + addresses)}"
        yield Check("launcher", "red", f"none, but {text} left over", remedy)
    elif addresses:
        text = ", ".join(f"{name}={variables[name]}" for name in addresses)
        remedy = f"ddp would meet there: right on several nodes, else unset {' '.join(addresses)}"
        yield Check("launcher", "yellow", f"none, but {text} set", remedy)
    else:
        yield Check("launcher", "green", "none: runs start their own processes")


def _data(root: str) -> Iterator[Check]:
    for name, source in (("CIFAR10", CIFAR10Source(root)), ("FashionMNIST", FashionMNISTSource(root))):
        there = [file for file in source.files if file.exists()]
        if len(there) < len(source.files):
            text = f"{'parts are missing' if there else 'not there'} in {root}"
            yield Check(name, "yellow", text, "it is downloaded when it is first used; --data Synthetic needs no files")
            continue
        try:
            source.prepare()
            source.load("train")  # loading checks CIFAR's checksums
            source.load("test")
        except UserError as error:
            yield Check(name, "red", str(error))
        else:
            yield Check(name, "green", f"in {root}, intact")


def _tracker() -> Check:
    by = ", by WANDB_MODE" if os.environ.get("WANDB_MODE") else "; --run.wandb online uploads"
    return Check("tracker", "green", f"Weights & Biases {tracking_mode(None)}{by}")


def _self_test(say: Callable[[str], None]) -> Iterator[Check]:
    """Train a step under every strategy."""
    gpus = torch.cuda.device_count()
    several = "2" if gpus != 1 else "1"
    runs = {"auto": "1", **dict.fromkeys(("dp", "ddp", "ddp_spawn"), several)}
    if not gpus:
        runs["ddp_fork"] = several  # a fork must not follow the use of CUDA
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for strategy, devices in runs.items():
            name = "one step" if strategy == "auto" else f"{strategy} x{devices}"
            say(name)
            check = _one_step(name, strategy, devices, Path(folder, strategy), losses)
            yield check
            if check.level != "green" and strategy == "auto":
                return  # the others would fail, too


def _one_step(name: str, strategy: str, devices: str, folder: Path, losses: dict[str, float]) -> Check:
    """Train one step of each strategy on the same batch, and compare the losses."""
    flags = {
        "data": "Synthetic",
        "data.size": "80",
        "data.batch_size": "8",
        "trainer.strategy": strategy,
        "trainer.devices": devices,
        "trainer.max_steps": "1",
        "trainer.limit_val_batches": "0",
        "trainer.log_every_n_steps": "1",
        "run.wandb": "false",
    }
    record = run_fit([f"--{flag}={value}" for flag, value in flags.items()], LONGEST, folder)
    if record.time_limit is not None and busy():
        return Check(
            name, "yellow", f"not done after {LONGEST:.0f} s, on a busy machine", "run doctor again when it is quiet"
        )
    if record.time_limit is not None:
        remedy = "is a firewall or a wrong network interface in the way?"
        return Check(name, "red", f"not done after {LONGEST:.0f} s", remedy)
    if record.status != "completed":
        return Check(name, "red", str(record.error), "APP_DEBUG=1 python -m app fit … shows more")
    written = pd.read_csv(folder / "version_0" / "metrics.csv")["train_loss_step"].dropna()
    losses[strategy] = float(written.iloc[0])
    if abs(losses[strategy] - losses.get("auto", losses[strategy])) > 1e-4:
        return Check(name, "red", f"its loss is {losses[strategy]:.6f}, not {losses['auto']:.6f} as on one device")
    return Check(name, "green", f"trains; loss {losses[strategy]:.6f}")

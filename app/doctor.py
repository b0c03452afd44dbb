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
from app.modules import CIFARCNN
from app.monitor.loggers import tracking_mode
from app.runs import run_fit
from app.system.interconnect import fit_link, measure_all_reduce
from app.system.machine import GIB, busy, driver, hardware, usable_cores
from app.system.terminal import working

USAGE = """\
python -m app doctor [--json] [--data_root DIR]

Says what this machine has and what will work on it, and tests it. Exit code 1
where something does not work."""

Level = Literal["green", "yellow", "red"]
LEVELS: tuple[Level, ...] = ("green", "yellow", "red")
LONGEST = 300.0  # seconds for one step on one device
# seconds: on a quiet machine with two cores it takes 4, as do two processes with all that they import
SLOW, LEAST, TIMES = 30.0, 60.0, 10


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
    usable, there = usable_cores(), os.cpu_count() or 1
    memory = psutil.virtual_memory()
    text = (
        f"{hardware()['cpu']}, {usable} of {there} cores, {memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB"
    )
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads and threads.isdigit() and int(threads) > usable:
        return Check("processor", "yellow", f"{text} free, OMP_NUM_THREADS={threads}", f"set it to {usable} at most")
    if usable < there and not threads:
        return Check(
            "processor", "yellow", f"{text} free", f"OMP_NUM_THREADS={usable}, or torch may start too many threads"
        )
    return Check("processor", "green", f"{text} free")


def _room() -> Iterator[Check]:
    shared = Path("/dev/shm")
    if shared.exists():
        free = shutil.disk_usage(shared).free / GIB
        remedy = "workers hand over batches there; docker run --shm-size=8g, or --data.num_workers 0"
        level: Level = "red" if free < 0.06 else "yellow" if free < 1 else "green"
        yield Check("/dev/shm", level, f"{free:.1f} GiB free", "" if level == "green" else remedy)
    free = shutil.disk_usage(".").free / GIB
    level = "red" if free < 0.5 else "yellow" if free < 5 else "green"
    yield Check("disk", level, f"{free:.1f} GiB free here", "" if level == "green" else "runs and data sets need room")
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
    gpus = torch.cuda.device_count()
    several = "2" if gpus != 1 else "1"
    runs = {"auto": "1", "dp": several, "ddp": several, "ddp_spawn": several}
    if not gpus:
        runs["ddp_fork"] = several  # a fork must not follow the use of CUDA
    losses: dict[str, float] = {}
    limit, took = LONGEST, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for strategy, devices in runs.items():
            name, began = "one step" if strategy == "auto" else f"{strategy} x{devices}", monotonic()
            say(name)
            check = _one_step(name, strategy, devices, folder, losses, limit, took)
            if strategy == "auto":
                took = monotonic() - began
                if took >= LONGEST:
                    check.found += "; nothing else was tested"
                    yield check
                    return
                limit = max(LEAST, TIMES * took)
                if check.level == "green" and took > SLOW:
                    check = Check(name, "yellow", f"{check.found}, but only after {took:.0f} s", AGAIN)
            yield check
        if losses:
            yield _checkpoint(Path(folder, "auto", "version_0", "checkpoints", "last.ckpt"))
    say("an all-reduce of two processes")
    try:
        link = fit_link(measure_all_reduce(timeout=limit), 2)
    except TimeoutError:
        check = _not_done("all-reduce", limit, took, "ddp will not work: is loopback up?")
        if "ddp" in losses:
            check = Check("all-reduce", "yellow", f"{check.found}, but ddp has trained", AGAIN)
        yield check
    except RuntimeError as error:
        yield Check("all-reduce", "red", str(error).strip().splitlines()[-1], "ddp will not work: is loopback up?")
    else:
        text = f"two processes: {link.bandwidth / 1e9:.2f} GB/s, {1e6 * link.latency:.0f} µs"
        yield Check("all-reduce", "green", text)


AGAIN = "run doctor again when nothing else runs here"


def _not_done(name: str, limit: float, one_step: float, remedy: str) -> Check:
    """Judge a timeout, given the seconds that one step on one device took."""
    if one_step > SLOW or busy():
        return Check(name, "yellow", f"not done after {limit:.0f} s, on a busy or slow machine", AGAIN)
    return Check(name, "red", f"not done after {limit:.0f} s", remedy)


def _one_step(
    name: str, strategy: str, devices: str, folder: str, losses: dict[str, float], limit: float, took: float
) -> Check:
    """Train one step in a process of its own, and compare its loss with that on one device."""
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
    record = run_fit([f"--{flag}={value}" for flag, value in flags.items()], limit, Path(folder, strategy))
    if record.time_limit is not None:
        return _not_done(name, limit, took, "is a firewall or a wrong network interface in the way?")
    if record.status != "completed":
        return Check(name, "red", str(record.error), "APP_DEBUG=1 python -m app fit … shows more")
    written = pd.read_csv(Path(folder, strategy, "version_0", "metrics.csv"))["train_loss_step"].dropna()
    losses[strategy] = float(written.iloc[0])
    if abs(losses[strategy] - losses.get("auto", losses[strategy])) > 1e-4:
        return Check(name, "red", f"its loss is {losses[strategy]:.6f}, not {losses['auto']:.6f} as on one device")
    return Check(name, "green", f"trains; loss {losses[strategy]:.6f}")


def _checkpoint(path: Path) -> Check:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
        CIFARCNN().load_state_dict(state)
    except (OSError, RuntimeError, KeyError) as error:
        return Check("checkpoint", "red", str(error).splitlines()[0], "is the temporary directory full?")
    return Check("checkpoint", "green", f"written and read, {path.stat().st_size / 2**10:.0f} KiB")

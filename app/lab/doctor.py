"""Command `python -m app doctor`: checks of this machine, and a training step under the common strategies.

Each check is green, yellow (works, with a caution) or red (does not work), with a remedy. The last
checks train one step on one device, and under dp, ddp, ddp_spawn and, without a GPU, ddp_fork. A
timeout is red only on a quiet machine; on a busy one, it proves nothing. Exit code 1 if a check is
red.
"""

import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Literal, get_args

import pandas as pd
import psutil
import torch
from packaging.requirements import Requirement
from rich.table import Column, Table
from rich.text import Text
from torch.utils import collect_env

from app.command.parser import PlainParser
from app.command.rules import MPI_SIZES
from app.lab.runs import run_fit
from app.launch.process import ADDRESSES, RANKS
from app.monitor.loggers import tracking_mode
from app.system.machine import GIB, busy, driver, hardware, nccl, usable_cores
from app.system.terminal import make_console

Level = Literal["green", "yellow", "red"]
LEVELS = get_args(Level)
LONGEST = 300.0  # timeout of a one-step run in seconds; a quiet machine with two cores needs 4 s
ONE_STEP = (
    *("--data=Synthetic", "--data.images=80", "--data.batch_size=8", "--trainer.max_steps=1"),
    *("--trainer.limit_val_batches=0", "--trainer.log_every_n_steps=1", "--run.wandb=false"),
)


@dataclass
class Check:
    """Line of the report.

    Attributes:
        name: Name of the check.
        level: `green`, `yellow` or `red`.
        found: Result, such as `8.0 GiB free in /dev/shm`.
        remedy: Remedy, or an empty string.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""


def run(arguments: list[str]) -> int:
    """Run all checks, and print the report.

    Args:
        arguments: The arguments after `doctor`.

    Returns:
        Exit code: 1 if a check is red, else 0.
    """
    parser = PlainParser(usage="python -m app doctor [--json]", description=__doc__)
    parser.add_argument("--json", type=bool, default=False, help="print JSON, for machines")
    options = parser.parse_args(arguments)
    console = make_console(stderr=options.json, highlight=False)
    checks = []
    began = monotonic()
    with console.status("") as status:
        for check in examine(lambda what: status.update(f"looking at {what}")):
            checks.append(check)
            if not options.json:
                console.print(_line(check))
    worst = max((check.level for check in checks), key=LEVELS.index)
    if options.json:
        print(json.dumps({"level": worst, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        count = sum(check.level == worst for check in checks)
        summary = {
            "green": "everything works",
            "yellow": f"it works; look at the {count} in yellow",
        }
        text = summary.get(worst, f"{count} of {len(checks)} do not work")
        console.print(f"[{worst}]{text}[/{worst}], after {monotonic() - began:.0f} s")
    return int(worst == "red")


def _line(check: Check) -> Table:
    """Return a table row with level, name and result, and the remedy on the next line."""
    grid = Table.grid(
        Column(width=6), Column(width=14), Column(overflow="fold"), padding=(0, 2, 0, 0)
    )
    text = Text(check.found)
    if check.remedy:
        text.append(f"\n→ {check.remedy}", style="dim" if check.level == "green" else "bold")
    grid.add_row(Text(check.level, style=check.level), Text(check.name), text)
    return grid


def examine(say: Callable[[str], None] = lambda activity: None) -> Iterator[Check]:
    """Yield all checks in order; the self-test comes last.

    Args:
        say: Function called with the name of each slow check before it runs.
    """
    say("this machine")
    load, _, remedy = (
        busy() or f"{psutil.getloadavg()[0]:.1f} on {usable_cores()} cores"
    ).partition("; ")
    yield Check("load", "yellow" if remedy else "green", load, remedy)
    yield from _packages()
    yield _accelerators()
    yield _cores()
    yield from _room()
    yield environment(os.environ)
    source = (
        "by WANDB_MODE"
        if os.environ.get("WANDB_MODE")
        else "by default; --run.wandb online uploads"
    )
    yield Check("tracker", "green", f"Weights & Biases {tracking_mode(None)}, {source}")
    yield from _self_test(say)


def _packages() -> Iterator[Check]:
    installed = {
        name: importlib.metadata.version(name)
        for name in ("torch", "torchvision", "lightning", "wandb")
    }
    # not get_env_info: it is slow
    system = f"{collect_env.get_os(collect_env.run)}, {collect_env.get_libc_version()}"
    libraries = ", ".join(
        f"{name} {version}" for name, version in {**installed, "NCCL": nccl()}.items() if version
    )
    yield Check("versions", "green", f"Python {sys.version.split()[0]}, {libraries}; {system}")
    try:
        for requirement in map(Requirement, importlib.metadata.requires("data-parallel-lab") or []):
            version = "" if requirement.marker else importlib.metadata.version(requirement.name)
            if version and not requirement.specifier.contains(version, prereleases=True):
                yield Check(
                    "versions",
                    "red",
                    f"{requirement.name} {version}, but {requirement} is needed",
                    f"pip install '{requirement}'",
                )
    except importlib.metadata.PackageNotFoundError as error:
        yield Check("versions", "red", f"{error.name} is not installed", "pip install -e .")


def _accelerators() -> Check:
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        text = ", ".join(
            f"{device.name} with {device.total_memory / GIB:.0f} GiB" for device in devices
        )
        return Check("accelerators", "green", f"{text}; driver {driver()}")
    return Check(
        "accelerators",
        "yellow",
        f"no GPU (torch is built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'})",
        "training runs on the CPU; nvidia-smi shows whether there is a GPU",
    )


def _cores() -> Check:
    """Report the processor and the free memory."""
    usable = usable_cores()
    cores = os.cpu_count() or 1
    memory = psutil.virtual_memory()
    return Check(
        "processor",
        "green",
        f"{hardware()['cpu']}, {usable} of {cores} cores, "
        f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free",
    )


def _room() -> Iterator[Check]:
    """Check the free space of /dev/shm (for loader workers) and of the disk, and whether this folder is writable."""
    shared = (
        "loader workers pass batches through it: docker run --shm-size=8g, or --data.num_workers 0"
    )
    for name, place, least, enough, remedy in (
        ("/dev/shm", Path("/dev/shm"), 0.06, 1, shared),
        ("disk", Path.cwd(), 0.5, 5, "runs and data sets need room"),
    ):
        if place.exists():
            free = shutil.disk_usage(place).free / GIB
            level: Level = "red" if free < least else "yellow" if free < enough else "green"
            yield Check(
                name, level, f"{free:.1f} GiB free in {place}", "" if level == "green" else remedy
            )
    if not os.access(".", os.W_OK):
        yield Check(
            "disk",
            "red",
            f"{Path.cwd()} is not writable",
            "change to another folder, or give --run.root",
        )


def environment(variables: Mapping[str, str]) -> Check:
    """Check whether launchers' environment variables come from a running launcher, or are left over."""

    def values(names: Iterable[str]) -> str:
        return ", ".join(f"{name}={variables[name]}" for name in names)

    left = [name for name in RANKS if name in variables]
    addresses = [name for name in ADDRESSES if name in variables]
    if any(variables.get(name, "1") != "1" for name in MPI_SIZES):
        return Check("launcher", "yellow", "MPI", "mpirun cannot start runs: use torchrun or srun")
    if "SLURM_JOB_ID" in variables:
        return Check("launcher", "green", f"SLURM job {variables['SLURM_JOB_ID']}")
    if variables.keys() >= {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"}:
        return Check("launcher", "green", "torchrun")
    if left:
        return Check(
            "launcher",
            "red",
            f"none, but {values(left)} left over",
            f"a run would wait for other ranks: unset {' '.join(left + addresses)}",
        )
    if addresses:
        return Check(
            "launcher",
            "yellow",
            f"none, but {values(addresses)} set",
            f"ddp would connect to this address: right on several nodes, else unset {' '.join(addresses)}",
        )
    return Check("launcher", "green", "none: runs start their own processes")


def _self_test(say: Callable[[str], None]) -> Iterator[Check]:
    """Train one step under auto, dp, ddp, ddp_spawn and, without a GPU, ddp_fork. If auto fails, skip the others."""
    gpus = torch.cuda.device_count()
    several = "2" if gpus != 1 else "1"
    forks = () if gpus else ("ddp_fork",)  # CUDA does not work in a forked process
    runs = {"auto": "1", **dict.fromkeys(("dp", "ddp", "ddp_spawn", *forks), several)}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for strategy, devices in runs.items():
            name = "one step" if strategy == "auto" else f"{strategy} x{devices}"
            say(name)
            check = Check(name, *_one_step(strategy, devices, Path(folder, strategy), losses))
            yield check
            if check.level != "green" and strategy == "auto":
                return  # the other strategies would fail, too


def _one_step(
    strategy: str, devices: str, folder: Path, losses: dict[str, float]
) -> tuple[Level, str, str]:
    """Train one step under a strategy, and compare its loss with the loss on one device.

    Returns:
        Level, result and remedy.
    """
    flags = [*ONE_STEP, f"--trainer.strategy={strategy}", f"--trainer.devices={devices}"]
    record = run_fit(flags, LONGEST, folder)
    if record.time_limit is not None:
        text = f"not done after {LONGEST:.0f} s"
        if busy():
            return "yellow", f"{text}, on a busy machine", "run doctor again when it is quiet"
        return "red", text, "is a firewall or a wrong network interface in the way?"
    if record.status != "completed":
        return "red", str(record.error), "APP_DEBUG=1 python -m app fit … shows more"
    written = pd.read_csv(folder / "version_0" / "metrics.csv")["train_loss_step"].dropna()
    loss = losses[strategy] = float(written.iloc[0])
    if abs(loss - losses["auto"]) > 1e-4:
        return "red", f"its loss is {loss:.6f}, not {losses['auto']:.6f} as on one device", ""
    return "green", f"trains; loss {loss:.6f}", ""

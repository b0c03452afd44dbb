"""Command `python -m app doctor`: checks this machine, and a step under the common strategies.

Each check is green, yellow (works, with a caution) or red (does not work), with a remedy. The last
checks train one step on one device, and under dp, ddp, ddp_spawn and, without a GPU, ddp_fork. A
timeout is red only on a quiet machine; on a busy one, it proves nothing. Exit code 1 if a check is
red.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Literal, get_args

import pandas as pd
import psutil
import torch
from rich.markup import escape

from app.command.parser import PlainParser
from app.command.rules import MPI_SIZES
from app.lab.runs import run_fit
from app.launch.process import ADDRESSES, RANKS
from app.monitor.loggers import tracking_mode
from app.system.machine import GIB, busy, driver, hardware, usable_cores, versions
from app.system.terminal import make_console

Level = Literal["green", "yellow", "red"]
LEVELS = get_args(Level)
LONGEST = 300.0  # timeout of a one-step run in seconds; a quiet machine with two cores needs 4 s
ONE_STEP = (
    "--data=Synthetic",
    "--data.images=80",
    "--data.batch_size=8",
    "--trainer.max_steps=1",
    "--trainer.limit_val_batches=0",
    "--trainer.log_every_n_steps=1",
    "--run.wandb=false",
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
    console = make_console(stderr=options.json, highlight=False, soft_wrap=True)
    checks = []
    began = monotonic()
    with console.status("") as status:
        for check in examine(status.update):
            checks.append(check)
            if not options.json:
                console.print(_line(check))
    levels = [check.level for check in checks]
    worst = max(levels, key=LEVELS.index)
    if options.json:
        print(json.dumps({"level": worst, "checks": list(map(asdict, checks))}, indent=2))
        return int(worst == "red")
    count = levels.count(worst)
    summaries = {
        "green": "everything works",
        "yellow": f"it works; look at the {count} in yellow",
        "red": f"{count} of {len(checks)} do not work",
    }
    console.print(f"[{worst}]{summaries[worst]}[/{worst}], after {monotonic() - began:.0f} s")
    return int(worst == "red")


def _line(check: Check) -> str:
    """Return level, name and result, and the remedy on the next line, with rich's markup."""
    line = f"[{check.level}]{check.level:8}[/]{check.name:16}{escape(check.found)}"
    if check.remedy and check.level != "green":
        line += f"\n{'':24}→ [bold]{escape(check.remedy)}[/]"
    return line


def examine(show: Callable[[str], None] = print) -> Iterator[Check]:
    """Yield all checks in order; the self-test comes last.

    Args:
        show: Function called with the name of each slow check before it runs.
    """
    cores = usable_cores()
    load = busy()
    if load is None:
        yield Check("load", "green", f"{psutil.getloadavg()[0]:.1f} on {cores} cores")
    else:
        yield Check("load", "yellow", *load.split("; "))
    packages = {name: importlib.metadata.version(name) for name in ("torchvision", "wandb")}
    installed = {**versions(), **packages}
    names = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    yield Check("versions", "green", f"{names}; {platform.platform()}")
    yield _accelerators()
    memory = psutil.virtual_memory()
    processor = f"{hardware()['cpu']}, {cores} of {os.cpu_count()} cores"
    free = f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free"
    yield Check("processor", "green", f"{processor}, {free}")
    yield from _room()
    yield environment(os.environ)
    yield Check("tracker", "green", f"Weights & Biases {tracking_mode(None)}")
    yield from _self_test(show)


def _accelerators() -> Check:
    names = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        names.append(f"{device.name} with {device.total_memory / GIB:.0f} GiB")
    if names:
        return Check("accelerators", "green", f"{', '.join(names)}; driver {driver()}")
    build = f"torch is built for CUDA {torch.version.cuda}"
    if torch.version.cuda is None:
        build = "torch is built for CPUs"
    remedy = "training runs on the CPU; nvidia-smi shows whether there is a GPU"
    return Check("accelerators", "yellow", f"no GPU ({build})", remedy)


def _room() -> Iterator[Check]:
    """Check the free space of /dev/shm and the disk, and whether this folder is writable."""
    shared = "loader workers need it: docker run --shm-size=8g, or --data.num_workers 0"
    places = (("/dev/shm", 0.06, 1, shared), (os.getcwd(), 0.5, 5, "runs and data sets need room"))
    for folder, least, enough, remedy in places:
        if os.path.exists(folder):
            free = shutil.disk_usage(folder).free / GIB
            level: Level = "green"
            if free < least:
                level = "red"
            elif free < enough:
                level = "yellow"
            yield Check("room", level, f"{free:.1f} GiB free in {folder}", remedy)
    if not os.access(".", os.W_OK):
        remedy = "change to another folder, or give --run.root"
        yield Check("room", "red", f"{os.getcwd()} is not writable", remedy)


def environment(variables: Mapping[str, str]) -> Check:
    """Check whether launchers' variables come from a running launcher, or are left over."""
    left = {name: variables[name] for name in RANKS if name in variables}
    addresses = {name: variables[name] for name in ADDRESSES if name in variables}
    if any(variables.get(name, "1") != "1" for name in MPI_SIZES):
        return Check("launcher", "yellow", "MPI", "mpirun cannot start runs: use torchrun or srun")
    if "SLURM_JOB_ID" in variables:
        return Check("launcher", "green", f"SLURM job {variables['SLURM_JOB_ID']}")
    if variables.keys() >= {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"}:
        return Check("launcher", "green", "torchrun")
    if left:
        remedy = f"a run would wait for other ranks: unset {' '.join(left | addresses)}"
        return Check("launcher", "red", f"none, but {_values(left)} left over", remedy)
    if addresses:
        right = "ddp would connect to this address: right on several nodes, else unset"
        remedy = f"{right} {' '.join(addresses)}"
        return Check("launcher", "yellow", f"none, but {_values(addresses)} set", remedy)
    return Check("launcher", "green", "none: runs start their own processes")


def _values(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())


def _self_test(show: Callable[[str], None]) -> Iterator[Check]:
    """Train one step under each strategy. If one device fails, skip the others."""
    gpus = torch.cuda.device_count()
    strategies = ["auto", "dp", "ddp", "ddp_spawn"]
    if not gpus:  # CUDA does not work in a forked process
        strategies.append("ddp_fork")
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for strategy in strategies:
            devices = 2
            if strategy == "auto" or gpus == 1:
                devices = 1
            name = f"{strategy} x{devices}"
            show(f"one step: {name}")
            check = Check(name, *_one_step(strategy, devices, Path(folder, strategy), losses))
            yield check
            if check.level != "green" and strategy == "auto":
                return  # the other strategies would fail, too


def _one_step(
    strategy: str, devices: int, folder: Path, losses: dict[str, float]
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
    loss = float(written.iloc[0])
    losses[strategy] = loss
    if abs(loss - losses["auto"]) > 1e-4:
        return "red", f"its loss is {loss:.6f}, not {losses['auto']:.6f} as on one device", ""
    return "green", f"trains; loss {loss:.6f}", ""

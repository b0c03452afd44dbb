"""Command `python -m app doctor`: checks this machine, and a step under the common strategies.

Each check is green, yellow (works, with a caution) or red (does not work), with a remedy. The last
checks train one step on one device, and under dp, ddp, ddp_spawn and, without a GPU, ddp_fork. A
timeout is red only on a quiet machine; on a busy one, it proves nothing. Exit code 1 if a check is
red.
"""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

import psutil
import torch
from rich.markup import escape

from app.command.parser import PlainParser
from app.lab.runs import run_fit
from app.record import Record
from app.system.machine import GIB, busy, driver, hardware, usable_cores, versions
from app.system.terminal import make_console

LONGEST = 300.0  # timeout of a one-step run in seconds; a quiet machine with two cores needs 4 s
ONE_STEP = (
    "--data=Synthetic",
    "--data.images=80",
    "--data.batch_size=8",
    "--trainer.max_steps=1",
    "--trainer.limit_val_batches=0",
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
    level: str
    found: str
    remedy: str = ""


def run(arguments: list[str]) -> int:
    """Run all checks, and print the report.

    Args:
        arguments: The arguments after `doctor`.

    Returns:
        Exit code: 1 if a check is red, else 0.
    """
    PlainParser(usage="python -m app doctor", description=__doc__).parse_args(arguments)
    console = make_console(highlight=False, soft_wrap=True)
    levels = []
    began = monotonic()
    with console.status("") as status:
        for check in examine(status.update):
            levels.append(check.level)
            console.print(_line(check))
    worst = max(levels, key=("green", "yellow", "red").index)
    count = levels.count(worst)
    summaries = {
        "green": "everything works",
        "yellow": f"it works; look at the {count} in yellow",
        "red": f"{count} of {len(levels)} do not work",
    }
    console.print(f"[{worst}]{summaries[worst]}[/], after {monotonic() - began:.0f} s")
    return int(worst == "red")


def _line(check: Check) -> str:
    """Return level, name and result, and the remedy on the next line, with rich's markup."""
    line = f"[{check.level}]{check.level:8}[/]{check.name:16}{escape(check.found)}"
    if check.remedy and check.level != "green":
        line += f"\n{'':24}→ [bold]{escape(check.remedy)}[/]"
    return line


def examine(show: Callable[[str], None]) -> Iterator[Check]:
    """Yield all checks in order; the self-test comes last.

    Args:
        show: Function called with the name of each slow check before it runs.
    """
    cores = usable_cores()
    memory = psutil.virtual_memory()
    load = busy()
    level = "green"
    if load:
        level = "yellow"
    found = f"{hardware()['cpu']}, a load of {psutil.getloadavg()[0]:.1f} on {cores} of "
    found += f"{os.cpu_count()} cores, {memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB"
    yield Check("processor", level, f"{found} free", load or "")
    installed = versions()
    names = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    yield Check("versions", "green", f"{names}; {platform.platform()}")
    yield _accelerators()
    yield from _room()
    yield from _self_test(show)


def _accelerators() -> Check:
    names = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        names.append(f"{device.name} with {device.total_memory / GIB:.0f} GiB")
    if names:
        return Check("accelerators", "green", f"{', '.join(names)}; driver {driver()}")
    return Check(
        "accelerators",
        "yellow",
        f"no GPU (torch is built for CUDA: {torch.version.cuda or 'no'})",
        "training runs on the CPU; nvidia-smi shows whether there is a GPU",
    )


def _room() -> Iterator[Check]:
    """Check the free space of /dev/shm and the disk."""
    shared = "loader workers need it: docker run --shm-size=8g, or --data.num_workers 0"
    places = (("/dev/shm", 0.06, 1, shared), (os.getcwd(), 0.5, 5, "runs and data sets need room"))
    for folder, least, enough, remedy in places:
        if os.path.exists(folder):
            free = shutil.disk_usage(folder).free / GIB
            level = "green"
            if free < least:
                level = "red"
            elif free < enough:
                level = "yellow"
            yield Check("room", level, f"{free:.1f} GiB free in {folder}", remedy)


def _self_test(show: Callable[[str], None]) -> Iterator[Check]:
    """Train one step under each strategy. If one device fails, skip the others."""
    gpus = torch.cuda.device_count()
    strategies = ["auto", "dp", "ddp", "ddp_spawn"]
    if not gpus:  # CUDA does not work in a forked process
        strategies.append("ddp_fork")
    losses: list[float] = []  # one device's is the first
    for strategy in strategies:
        devices = 2
        if strategy == "auto" or gpus == 1:
            devices = 1
        name = f"{strategy} x{devices}"
        show(f"one step: {name}")
        flags = [f"--trainer.strategy={strategy}", f"--trainer.devices={devices}"]
        yield _trained(name, run_fit([*ONE_STEP, *flags], LONGEST), losses)
        if not losses:
            return  # the other strategies would fail, too


def _trained(name: str, record: Record, losses: list[float]) -> Check:
    """Check a run of one step; append its loss, and compare it with the first one."""
    if record.time_limit is not None:
        load = busy()
        level = "red"
        if load:
            level = "yellow"
        remedy = load or "is a firewall or a wrong network interface in the way?"
        return Check(name, level, f"not done after {LONGEST:.0f} s", remedy)
    if record.status != "completed":
        remedy = "APP_DEBUG=1 python -m app fit … shows more"
        return Check(name, "red", str(record.error), remedy)
    assert record.train_loss
    assert record.train_loss.last
    loss = record.train_loss.last
    losses.append(loss)
    if abs(loss - losses[0]) > 1e-4:
        return Check(name, "red", f"its loss is {loss:.6f}, not {losses[0]:.6f} as on one device")
    return Check(name, "green", f"trains; loss {loss:.6f}")

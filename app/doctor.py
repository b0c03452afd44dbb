"""Says what this machine has and what will work on it: `python -m app doctor`.

Every line is green, yellow (it works, but look at it) or red (it does not work), with what to do. A self-test ends it:
a training step under each strategy that can run here, an all-reduce of two processes, a checkpoint written and read.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import psutil
import torch
from packaging.requirements import Requirement
from rich.console import Console
from torch.utils import collect_env

from app.data.sources import CIFAR10Source, FashionMNISTSource
from app.errors import UserError
from app.fit.parser import PlainParser
from app.launch.process import ADDRESSES, RANKS, run_app
from app.modules import CIFARCNN
from app.monitor.loggers import logged_in
from app.system.interconnect import fit_link, measure_all_reduce
from app.system.machine import GIB, driver, hardware, usable_cores

USAGE = """\
python -m app doctor [--json] [--data_root DIR]

Says what this machine has and what will work on it, and tests it. Exit code 1 where something does not work."""

LEVELS = ("green", "yellow", "red")
LIMIT = 60  # seconds for one run of the self-test


@dataclass
class Check:
    """One line of the report.

    Attributes:
        name: What was looked at.
        level: `green`, `yellow` or `red`.
        found: What was found.
        remedy: What to do, where there is something to do.
    """

    name: str
    level: Literal["green", "yellow", "red"]
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
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    parser.add_argument("--data_root", default="data", help="where the data sets are, or will be")
    options = parser.parse_args(arguments)
    console = Console(quiet=options.json, highlight=False, soft_wrap=True)
    checks = []
    for check in examine(options.data_root):
        checks.append(check)
        colour = f"[{check.level}]{check.level:<6}[/{check.level}]"
        console.print(colour, f"{check.name:<16}", end="")
        console.print(check.found + (f": {check.remedy}" if check.remedy else ""), markup=False)
    worst = max((check.level for check in checks), key=LEVELS.index)
    if options.json:
        print(json.dumps({"level": worst, "checks": [asdict(check) for check in checks]}, indent=2))
    return int(worst == "red")


def examine(data_root: str) -> Iterator[Check]:
    """Make every check, in order; the self-test comes last."""
    yield from _packages()
    yield _accelerators()
    yield _cores()
    yield from _room()
    yield _backends()
    yield from environment(os.environ)
    yield from _data(data_root)
    yield _tracker()
    yield from _self_test()


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
        level: Literal["green", "yellow", "red"] = "red" if free < 0.06 else "yellow" if free < 1 else "green"
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
        level: Literal["green", "yellow"] = "yellow" if found[-1] == "MPI" else "green"
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
            source.load("train")  # CIFAR's checksums are those of what is read
            source.load("test")
        except UserError as error:
            yield Check(name, "red", str(error))
        else:
            yield Check(name, "green", f"in {root}, intact")


def _tracker() -> Check:
    mode = os.environ.get("WANDB_MODE")
    if mode:
        return Check("tracker", "green", f"Weights & Biases {mode}, by WANDB_MODE")
    if logged_in():
        return Check("tracker", "green", "Weights & Biases online, with a key")
    return Check("tracker", "yellow", "Weights & Biases offline, for there is no key", "wandb login, or leave it")


def _self_test() -> Iterator[Check]:
    gpus = torch.cuda.device_count()
    several = "2" if gpus != 1 else "1"
    runs = {"auto": "1", "dp": several, "ddp": several, "ddp_spawn": several}
    if not gpus:
        runs["ddp_fork"] = several  # not where CUDA may be in use
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for strategy, devices in runs.items():
            yield _one_step(strategy, devices, folder, losses)
        if losses:
            yield _checkpoint(Path(folder, "auto", "version_0", "checkpoints", "last.ckpt"))
    try:
        link = fit_link(measure_all_reduce(), 2)
    except (RuntimeError, TimeoutError) as error:
        yield Check("all-reduce", "red", str(error).strip().splitlines()[-1], "ddp will not work: is loopback up?")
    else:
        text = f"two processes: {link.bandwidth / 1e9:.2f} GB/s, {1e6 * link.latency:.0f} µs"
        yield Check("all-reduce", "green", text)


def _one_step(strategy: str, devices: str, folder: str, losses: dict[str, float]) -> Check:
    """Train one step in a process of its own, and compare its loss with that of the first."""
    name = "one step" if strategy == "auto" else f"{strategy} x{devices}"
    flags = {
        "data": "Synthetic",
        "data.size": "80",
        "data.batch_size": "8",
        "trainer.strategy": strategy,
        "trainer.devices": devices,
        "trainer.max_steps": "1",
        "trainer.limit_val_batches": "0",
        "trainer.log_every_n_steps": "1",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "run.root": folder,
        "run.name": strategy,
        "run.test": "false",
        "run.wandb": "false",
    }
    try:
        done = run_app(["fit", *(part for k, v in flags.items() for part in (f"--{k}", v))], LIMIT)
    except subprocess.TimeoutExpired:
        remedy = "a firewall or a wrong network interface may be in the way"
        return Check(name, "red", f"not done after {LIMIT} s", remedy)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        return Check(name, "red", lines[-1].removeprefix("error: "), "APP_DEBUG=1 python -m app fit … shows more")
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

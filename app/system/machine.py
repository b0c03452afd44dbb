"""Description of this machine and this installation."""

import multiprocessing
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import psutil
import torch

import app

GIB = 2**30
CONTROL_GROUPS = Path("/sys/fs/cgroup")  # control groups, version 2


def versions() -> dict[str, str | None]:
    """Return the versions of Python, the main libraries and the app, with its commit.

    The commit ends in `-dirty` if the checkout is modified; it is None outside a checkout.
    """
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "nccl": nccl(),
        "app": app.__version__,
        "commit": _output(
            "git", "-C", *app.__path__, "describe", "--always", "--dirty", "--abbrev=12"
        )
        or None,
    }


def nccl() -> str | None:
    """Return NCCL's version; None without CUDA."""
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None


def _output(*command: str) -> str:
    """Return a program's output; an empty string if the program is missing or fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def hardware() -> dict[str, Any]:
    """Return the names of processor and GPUs, and the number of cores."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(
        r"^model name\s*: (.+)", info.read_text() if info.exists() else "", re.MULTILINE
    )
    gpus = []
    if torch.cuda.is_initialized():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    elif torch.cuda.device_count():
        gpus = _nvidia_smi("name")  # not torch, which would allocate memory on unused GPUs
    return {
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpus": gpus,
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use, by affinity and control-group quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for group in _control_groups():
        quota, period = (group / "cpu.max").read_text().split()  # microseconds, or `max`
        cores = cores if quota == "max" else min(cores, max(int(quota) // int(period), 1))
    return cores


def busy() -> str | None:
    """Return a message about other processes' load, with a remedy; None if enough cores are free.

    The one-minute load average counts the whole host. If this process may use only some of the
    cores, load that fits on the other cores is ignored.
    """
    load = psutil.getloadavg()[0]
    cores = usable_cores()
    if load <= max(cores, (os.cpu_count() or 1) - cores):
        return None
    remedy = (
        "use fewer threads (OMP_NUM_THREADS=1)"
        if torch.get_num_threads() > 1
        else "wait until they are done"
    )
    return (
        f"other processes keep this machine busy: a load of {load:.1f} on {cores} cores; {remedy}"
    )


def busy_seconds(cores: Collection[int] = ()) -> float:
    """Return the CPU seconds of all programs since boot, summed over the given cores; by default over all cores."""
    some = 0 < len(cores) < (os.cpu_count() or 1)
    times = (
        [t for i, t in enumerate(psutil.cpu_times(True)) if i in cores]
        if some
        else [psutil.cpu_times()]
    )
    idle = (
        "idle",
        "iowait",
        "guest",
        "guest_nice",
    )  # guests are excluded, because user time includes them
    return sum(
        seconds for row in times for name, seconds in row._asdict().items() if name not in idle
    )


def time_when_done(device: torch.device | None = None) -> float:
    """Wait until a device has finished its work, and return the time in seconds.

    Args:
        device: The device; by default the calling thread's current accelerator.
    """
    if device is None or device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def own_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    total = sum(
        psutil.Process().cpu_times()[:4]
    )  # user and system time, then those of ended children
    for child in multiprocessing.active_children():  # such as a loader's workers
        with suppress(psutil.Error):
            total += sum(psutil.Process(child.pid).cpu_times()[:2])
    return total


def core_wait_seconds() -> float:
    """Return the seconds that this process's main thread waited for a core. Linux only; 0 elsewhere."""
    with suppress(OSError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _control_groups() -> list[Path]:
    """Return the folders of this process's control group and its parents that have a `cpu.max` file."""
    file = Path("/proc/self/cgroup")
    lines = file.read_text().splitlines() if file.exists() else []
    folder = CONTROL_GROUPS / next(
        (line.removeprefix("0::/") for line in lines if line.startswith("0::/")), ""
    )
    around = [group for group in (folder, *folder.parents) if group.is_relative_to(CONTROL_GROUPS)]
    return [group for group in around if (group / "cpu.max").exists()]


def driver() -> str | None:
    """Return the version of NVIDIA's driver, or None.

    `torch.utils.collect_env` is no alternative: it expects a heading that nvidia-smi 610 no longer
    prints.
    """
    return next(iter(_nvidia_smi("driver_version")), None)


def _nvidia_smi(field: str) -> list[str]:
    """Return a field of each GPU; an empty list without a driver."""
    lines = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").splitlines()
    return [line.strip() for line in lines if line.strip()]


def peak_memory(rank: int, devices: Iterable[torch.device]) -> list[dict[str, Any]]:
    """Return this process's peak memory in GiB, on each of its devices and on the host.

    On CUDA, `allocated_gib` and `reserved_gib` are the peaks of torch's allocator. `in_use_gib` is
    the driver's count of memory in use now: it includes CUDA's context, libraries, NCCL's buffers
    and other processes.
    """
    rows = []
    for device in devices:
        sizes = dict.fromkeys(("allocated", "reserved", "in_use"))
        sizes |= {"host_rss": _peak_rss(), "total": psutil.virtual_memory().total}
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            sizes |= {
                "in_use": total - free,
                "total": total,
                "allocated": torch.cuda.max_memory_allocated(device),
            }
            sizes["reserved"] = torch.cuda.max_memory_reserved(device)
        gib = {
            f"{name}_gib": None if size is None else round(size / GIB, 4)
            for name, size in sizes.items()
        }
        rows.append({"rank": rank, "device": str(device), **gib})
    return rows


def _peak_rss() -> int:
    """Return this process's peak memory in bytes. On Linux, getrusage would include the parent's peak."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

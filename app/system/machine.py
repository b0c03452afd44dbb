"""Describes this machine and this installation."""

import multiprocessing
import os
import platform
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
CONTROL_GROUPS = Path("/sys/fs/cgroup")  # of version 2


def versions() -> dict[str, str | None]:
    """List the versions of Python, of the main libraries, and of the app with its commit."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "app": app.__version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Name the commit of this package's checkout, with `-dirty` where it was changed; None outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """Name processor and accelerators, and count the cores."""
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "gpus": _gpus()}


def _gpus() -> list[str]:
    """Name the GPUs, without taking memory on one that this process does not use."""
    if torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return _nvidia_smi("name") if torch.cuda.device_count() else []


def usable_cores() -> int:
    """Count the cores that this process may use, by its affinity and by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups():
        quota, period = (group / "cpu.max").read_text().split()  # in microseconds; or `max`
        cores = cores if quota == "max" else min(cores, max(int(quota) // int(period), 1))
    return cores


def busy() -> str | None:
    """Describe how busy other processes keep this machine, and a remedy; None if enough cores are free.

    The one-minute load average is the whole host's; at the start of a command, hardly its own. Load on the host's other
    cores slows down a process that may use only some.
    """
    load, cores = psutil.getloadavg()[0], usable_cores()
    if load <= max(cores, (os.cpu_count() or 1) - cores):
        return None
    helps = "it helps to wait until they are done"
    if torch.get_num_threads() > 1:
        helps = "fewer threads help: OMP_NUM_THREADS=1, or --run.threads 1"
    return f"other processes keep this machine busy: a load of {load:.1f} on {cores} cores; {helps}"


def busy_seconds(cores: Collection[int] = ()) -> float:
    """Return the busy seconds since boot, summed over some cores, or over all."""
    some = 0 < len(cores) < (os.cpu_count() or 1)
    times = [t for i, t in enumerate(psutil.cpu_times(True)) if i in cores] if some else [psutil.cpu_times()]
    idle = ("idle", "iowait", "guest", "guest_nice")  # guests are in the user's time, too
    return sum(seconds for each in times for name, seconds in each._asdict().items() if name not in idle)


def own_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in multiprocessing.active_children():  # such as a loader's workers
        with suppress(psutil.Error):
            times = psutil.Process(child.pid).cpu_times()
            total += times.user + times.system
    return total


def core_wait_seconds() -> float:
    """Return the seconds that this process's main thread was ready to run but had no core; 0 except on Linux."""
    with suppress(OSError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _control_groups() -> list[Path]:
    """Folders of the control groups that limit this process: its own, and those around it."""
    own = Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.exists() else []
    folder = CONTROL_GROUPS / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    around = [each for each in (folder, *folder.parents) if each.is_relative_to(CONTROL_GROUPS)]
    return [each for each in around if (each / "cpu.max").exists()]


def driver() -> str | None:
    """Return the version of NVIDIA's driver, or None.

    `torch.utils.collect_env` fails, because it expects a heading that nvidia-smi 610 no longer prints.
    """
    return next(iter(_nvidia_smi("driver_version")), None)


def _nvidia_smi(field: str) -> list[str]:
    """Return a field of each GPU; an empty list without a driver."""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in said.splitlines() if line.strip()]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def peak_memory(rank: int, devices: Iterable[torch.device]) -> list[dict[str, Any]]:
    """Measure the peak memory of this process in GiB, a row for each of its devices: there, and on the host.

    On CUDA, allocated and reserved are the peaks of torch's allocator. `in_use_gib` is the driver's current count, with
    CUDA's context, libraries, NCCL's buffers and other processes.
    """
    rows = []
    for device in devices:
        cuda = device.type == "cuda"
        rows.append(
            {
                "rank": rank,
                "device": str(device),
                "allocated_gib": round(torch.cuda.max_memory_allocated(device) / GIB, 4) if cuda else None,
                "reserved_gib": round(torch.cuda.max_memory_reserved(device) / GIB, 4) if cuda else None,
                "in_use_gib": round(_in_use(device) / GIB, 4) if cuda else None,
                "host_rss_gib": round(_peak_rss() / GIB, 4),
                "total_gib": round(_total(device) / GIB, 4),
            }
        )
    return rows


def _in_use(device: torch.device) -> int:
    """Return the bytes of a GPU that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _total(device: torch.device) -> int:
    """Return the bytes of memory that a device has; of the CPU, the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def _peak_rss() -> int:
    """Return the peak memory of this process in bytes; on Linux not getrusage's, which begins with the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

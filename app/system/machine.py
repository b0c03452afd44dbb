"""Description of this machine and this installation."""

import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Collection
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
    commit = _output("git", "-C", *app.__path__, "describe", "--always", "--dirty", "--abbrev=12")
    nccl = None
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "app": app.__version__,
        "commit": commit or None,
    }


def _output(*command: str) -> str:
    """Return a program's output; an empty string if the program is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def hardware() -> dict[str, Any]:
    """Return the names of processor and GPUs, and the number of cores."""
    cpu = platform.machine()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        cpu = text.partition("model name")[2].split("\n")[0].lstrip("\t: ") or cpu
    gpus = []
    if torch.cuda.is_initialized():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    elif torch.cuda.device_count():
        gpus = nvidia_smi("name")  # not torch, which would allocate memory on unused GPUs
    return {"cpu": cpu, "cores": os.cpu_count(), "gpus": gpus}


def usable_cores() -> int:
    """Return the number of cores that this process may use, by affinity and control-group quota."""
    if sys.platform == "darwin":
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError):
        group = Path("/proc/self/cgroup").read_text().partition("0::/")[2].partition("\n")[0]
        for folder in (CONTROL_GROUPS / group / "cpu.max").parents:
            file = folder / "cpu.max"
            if file.exists():  # not in the root
                quota, period = file.read_text().split()  # microseconds, or `max`
                if quota != "max":
                    cores = min(cores, max(int(quota) // int(period), 1))
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
    remedy = "wait until they are done"
    if torch.get_num_threads() > 1:
        remedy = "use fewer threads (OMP_NUM_THREADS=1)"
    return (
        f"other processes keep this machine busy: a load of {load:.1f} on {cores} cores; {remedy}"
    )


def busy_seconds(cores: Collection[int] = ()) -> float:
    """Return the CPU seconds of all programs since boot, over the given cores or all cores."""
    times = [psutil.cpu_times()]
    every = psutil.cpu_times(percpu=True)  # in containers, perhaps numbered anew
    if cores and max(cores) < len(every):
        times = [every[core] for core in cores]
    total = 0.0
    for figures in times:
        for name, seconds in figures._asdict().items():
            # guests are excluded, because user time includes them
            if name not in ("idle", "iowait", "guest", "guest_nice"):
                total += seconds
    return total


def time_when_done(device: torch.device) -> float:
    """Wait until a device has finished its work, and return the time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def own_seconds() -> float:
    """Return the CPU seconds of this process and its children."""
    # user and system time, then those of ended children
    total = sum(psutil.Process().cpu_times()[:4])
    for child in multiprocessing.active_children():  # such as a loader's workers
        with suppress(psutil.Error):
            total += sum(psutil.Process(child.pid).cpu_times()[:2])
    return total


def core_wait_seconds() -> float:
    """Return the seconds that the main thread waited for a core. Linux only; 0 elsewhere."""
    with suppress(OSError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def driver() -> str | None:
    """Return the version of NVIDIA's driver, or None.

    `torch.utils.collect_env` is no alternative: it expects a heading that nvidia-smi 610 no longer
    prints.
    """
    return "".join(nvidia_smi("driver_version")[:1]) or None


def nvidia_smi(field: str) -> list[str]:
    """Return a field of each GPU; an empty list without a driver."""
    return _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").splitlines()


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return this process's peak memory in GiB, on a device and on the host.

    On CUDA, `allocated_gib` and `reserved_gib` are the peaks of torch's allocator. `in_use_gib` is
    the driver's count of memory in use now: it includes CUDA's context, libraries, NCCL's buffers
    and other processes.
    """
    sizes = {"host_rss_gib": _peak_rss(), "total_gib": psutil.virtual_memory().total}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        sizes["total_gib"] = total
        sizes["in_use_gib"] = total - free
        sizes["allocated_gib"] = torch.cuda.max_memory_allocated(device)
        sizes["reserved_gib"] = torch.cuda.max_memory_reserved(device)
    return {name: round(size / GIB, 4) for name, size in sizes.items()}


def _peak_rss() -> int:
    """Return this process's peak memory in bytes; Linux's getrusage would include the parent's."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

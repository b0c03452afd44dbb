"""Network between devices: measured all-reduces, a fitted link, and the choice of interfaces."""

import os
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import psutil
import torch
from torch import distributed

from app.system.machine import time_when_done

# an address for documentation, which no machine has: https://www.rfc-editor.org/rfc/rfc5737
NOBODY = ("192.0.2.1", 9)
TIMEOUT = 300.0  # of a measurement, in seconds
SIZES = [4**exponent for exponent in range(5, 13)]  # 1 KiB to 16 MiB


@dataclass(frozen=True)
class Link:
    """Link between two devices.

    Attributes:
        bandwidth: Bandwidth in bytes per second, in each direction.
        latency: Latency in seconds.
    """

    bandwidth: float
    latency: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Predict the seconds of an all-reduce over a ring of ranks.

        Each rank sends 2(N-1) chunks of 1/N of the buffer, one after the other. Source: Patarasuk
        and Yuan, https://doi.org/10.1016/j.jpdc.2008.09.002.

        Args:
            size: Bytes of the buffer.
            ranks: Number of ranks, N.
        """
        steps = 2 * (ranks - 1)
        return steps / ranks * size / self.bandwidth + steps * self.latency


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit a line by least squares of y's relative errors; return offset and slope, nonnegative."""
    weights = 1 / np.asarray(y)
    slope, offset = np.polyfit(x, y, 1, w=weights)
    if slope < 0:  # fit a constant
        return weights.sum() / (weights @ weights), 0.0
    if offset < 0:  # fit a line through zero
        scaled = np.asarray(x) * weights
        return 0.0, scaled.sum() / (scaled @ scaled)
    return offset, slope


def fit_link(measured: Sequence[tuple[int, float]], ranks: int) -> Link:
    """Fit a link to measured all-reduces.

    Args:
        measured: Bytes and seconds of each all-reduce.
        ranks: Number of ranks of the measurement.
    """
    steps = 2 * (ranks - 1)
    offset, slope = fit_line(*zip(*measured, strict=True))
    return Link(bandwidth=steps / ranks / max(slope, 1e-15), latency=offset / steps)


def measure_all_reduce() -> list[tuple[int, float]]:
    """Measure all-reduces between two processes of this machine: by NCCL on two GPUs, else by gloo.

    Returns:
        A pair for each buffer size: its bytes, and the median seconds.

    Raises:
        TimeoutError: When the processes do not finish in time.
        RuntimeError: When a process fails.
    """
    cuda = torch.cuda.device_count() >= 2 and distributed.is_nccl_available()
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(2) as pool:
        ranks = pool.imap_unordered(partial(_rank, f"file://{folder}/rendezvous", cuda), range(2))
        try:
            return ranks.next(TIMEOUT)  # the first to finish, or to fail
        except context.TimeoutError as error:
            raise TimeoutError(f"the processes have not answered within {TIMEOUT:g} s") from error


def _rank(url: str, cuda: bool, rank: int) -> list[tuple[int, float]]:
    """Measure all-reduces as one of two ranks."""
    device = torch.device("cpu")
    backend = "gloo"
    torch.set_num_threads(1)
    use_loopback()
    if cuda:
        device = torch.device("cuda", rank)
        backend = "nccl"
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, url, rank=rank, world_size=2)
    measured = []
    for size in SIZES:
        buffer = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(23):
            distributed.barrier()
            began = time.perf_counter()
            distributed.all_reduce(buffer)
            times.append(time_when_done(device) - began)
        measured.append((size, float(np.median(times[3:]))))
    distributed.destroy_process_group()
    return measured


def own_addresses() -> list[str]:
    """Return this machine's IP addresses, loopback addresses last."""
    addresses = []
    for entry in chain.from_iterable(psutil.net_if_addrs().values()):
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            addresses.append(entry.address)
    return sorted(
        addresses, key=lambda address: (address.startswith(("127.", "::1")), ":" in address)
    )


def outward_address() -> str:
    """Return the address of this machine for other hosts: gloo's, or that of the default route."""
    chosen = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), [])
    addresses = [entry.address for entry in chosen if entry.family == socket.AF_INET]
    with suppress(OSError):  # no route
        addresses.append(_own_address_towards(NOBODY))
    return (addresses or own_addresses())[0]


def _own_address_towards(target: Any, family: int = socket.AF_INET) -> str:
    """Return the address from which this machine reaches another, without sending a packet."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def use_loopback() -> None:
    """Make gloo use the loopback interface, unless the user configured one."""
    if "lo" in psutil.net_if_addrs():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def use_interface_to(address: str) -> None:
    """Make gloo and NCCL use the interface towards an address, unless the user configured one.

    By default, gloo resolves the host's name, which often leads to the loopback interface.
    """
    try:
        family, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        source = _own_address_towards(target, family)
        if source == "127.0.0.1" and not address.startswith(("127.", "localhost")):
            # the host's own name often resolves to the loopback
            source = _own_address_towards(NOBODY)
    except OSError:
        return
    if source in ("127.0.0.1", "::1"):
        use_loopback()
    for name, entries in psutil.net_if_addrs().items():
        if name != "lo" and source in [entry.address for entry in entries]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # `=`: exact name, not a prefix

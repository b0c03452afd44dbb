"""Cost model of a step under ddp, for notebook 04: predicts many devices from one."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import distributed

from app.system.addresses import use_loopback

SIZES = [4**exponent for exponent in range(5, 13)]  # 1 KiB to 16 MiB
AGREEMENT = 16  # bytes of the all-reduce by which ranks agree on stopping, in app.launch.signals


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit a line by least squares of y's relative errors; return offset and slope, nonnegative."""
    line = np.polyfit(x, y, 1, w=1 / np.asarray(y))
    slope = float(line[0])
    offset = float(line[1])
    if slope < 0:
        return float(np.mean(y)), 0.0
    if offset < 0:
        return 0.0, float(np.mean(np.asarray(y) / np.asarray(x)))
    return offset, slope


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
        """
        steps = 2 * (ranks - 1)
        return steps / ranks * size / self.bandwidth + steps * self.latency


@dataclass(frozen=True)
class Line:
    """Seconds as a linear function of a size: a batch's images, or a buffer's bytes."""

    fixed: float
    per_unit: float

    def __call__(self, size: float) -> float:
        """Return the seconds for a size."""
        return self.fixed + self.per_unit * size


@dataclass(frozen=True)
class Step:
    """Step on one device: seconds of its phases, and bytes of its gradients.

    The gradients fit into DDP's first bucket, so that no part of the all-reduce is hidden.
    """

    data: Line
    compute: Line
    update: float
    rest: float
    gradients: float

    def ddp(self, batch: float, devices: int, link: Link) -> float:
        """Predict the seconds of a step with a global batch."""
        images = -(-batch // devices)
        sent = link.all_reduce(self.gradients, devices) + link.all_reduce(AGREEMENT, devices)
        return self.data(images) + self.compute(images) + sent + self.update + self.rest


def fit_step(rows: pd.DataFrame, gradients: float) -> Step:
    """Fit a step to rows of `compare`'s results: one device, several batch sizes."""
    images = rows["global_batch"].tolist()
    seconds = (rows.filter(regex="_ms$") / 1000).clip(lower=1e-9)
    return Step(
        data=Line(*fit_line(images, seconds["data_ms"].tolist())),
        compute=Line(*fit_line(images, seconds["forward_backward_ms"].tolist())),
        update=seconds["optimizer_ms"].mean(),
        rest=seconds["rest_ms"].mean(),
        gradients=gradients,
    )


def measure_link() -> Link:
    """Measure all-reduces between two processes of this machine by gloo, and fit a link."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(2) as pool:
        results = pool.map_async(partial(_rank, f"file://{folder}/rendezvous"), range(2))
        line = Line(*fit_line(SIZES, results.get(300)[0]))
    return Link(bandwidth=1 / max(line.per_unit, 1e-15), latency=line.fixed / 2)


def _rank(url: str, rank: int) -> list[float]:
    """Return the median seconds of an all-reduce of each size, as one of two ranks."""
    torch.set_num_threads(1)
    use_loopback()
    distributed.init_process_group("gloo", url, rank=rank, world_size=2)
    medians = []
    for size in SIZES:
        buffer = torch.zeros(size // 4)
        times = []
        for _ in range(23):
            distributed.barrier()
            began = time.perf_counter()
            distributed.all_reduce(buffer)
            times.append(time.perf_counter() - began)
        medians.append(float(np.median(times[3:])))
    distributed.destroy_process_group()
    return medians

"""Predicts how training scales: step time on 1…N devices × nodes, from a step and a network.

A step of a batch of b images on one device takes data(b) + forward(b) + backward(b) + update + rest. The first three
are lines in b, fitted to measured steps; their offset is the cost of launching them.

ddp: each of N devices takes b = B/N images of a global batch B. The gradients lie in buckets, as DDP makes them; a
bucket is added up over a ring once the backward pass has made its last gradient, one bucket after the other:

    all_reduce(bytes) = 2(N-1)/N · bytes/bandwidth + 2(N-1) · latency
    end of bucket i   = max(end of bucket i-1, ready_i · backward(b)) + all_reduce(bytes_i)
    step              = data(b) + forward(b) + max(backward(b), end of the last bucket) + update + rest
                        + all_reduce(8 bytes), by which the ranks agree whether to stop

so that communication costs only what the backward pass does not hide. Over several nodes the ring is as fast as its
slowest link. Sources: Patarasuk and Yuan (ring), https://doi.org/10.1016/j.jpdc.2008.09.002; Li et al., VLDB 2020
(buckets, overlap), https://arxiv.org/abs/2006.15704.

dp: one process feeds all devices of one node. Python launches the replicas one after the other (they share its lock),
the parameters go out to N-1 devices and their gradients come back on every step, nothing of it overlaps, and data,
update and rest are those of the whole batch on the first device:

    step = data(B) + N · (launch of forward and backward) + (forward + backward)(b) without launch
           + 2(N-1) · (bytes of the parameters/bandwidth + latency) + update + rest

On a CPU nothing is copied, and autograd takes the backward pass of all replicas in one thread, where it has one for
each GPU: https://docs.pytorch.org/docs/stable/notes/autograd.html#multithreaded-autograd.

Processes that share cores are not predicted, because the formulas ignore how they disturb each other.

Each prediction has a range: the same formulas with all steps as much faster or slower than their lines as any window of
the measured ones was, and with the link as much faster or slower than its line as any measured all-reduce was.

Not modelled: stragglers, other traffic, and algorithms other than the ring. For small buffers among many ranks, NCCL
uses trees, whose latency grows with log N.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from app.system.interconnect import Link, fit_line

AGREEMENT = 8  # bytes: app.launch.signals
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes: torch.nn.parallel.DistributedDataParallel's defaults


@dataclass(frozen=True)
class Line:
    """Seconds as a function of the images of a batch."""

    launch: float
    per_image: float

    def __call__(self, images: float) -> float:
        """Predict the seconds for a batch."""
        return self.launch + self.per_image * images


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        size: Bytes.
        ready: Share of the backward pass after which the last gradient is ready, 0…1.
    """

    size: int
    ready: float


@dataclass(frozen=True)
class Step:
    """Seconds of the phases of a step on one device, and its gradients.

    Attributes:
        data: Fetching and preparing the batch.
        forward: The forward pass.
        backward: The backward pass.
        update: The optimizer.
        rest: Everything else.
        buckets: The gradients, in the order in which they become ready.
        launch_known: Whether the lines were fitted to more than one batch size.
        spread: The fastest and the slowest measurement, relative to the lines.
    """

    data: Line
    forward: Line
    backward: Line
    update: float
    rest: float
    buckets: tuple[Bucket, ...]
    launch_known: bool = True
    spread: tuple[float, float] = (1.0, 1.0)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all gradients, as many as of the parameters."""
        return sum(bucket.size for bucket in self.buckets)

    def single(self, batch: float) -> float:
        """Predict the seconds of a step on one device."""
        return self.data(batch) + self.forward(batch) + self.backward(batch) + self.update + self.rest

    def ddp(self, batch: int, devices: int, link: Link) -> float:
        """Predict the seconds of a step of a global batch under ddp; `link` is the slowest one of the ring."""
        if devices == 1:
            return self.single(batch)
        images = -(-batch // devices)
        backward, end = self.backward(images), 0.0
        for bucket in self.buckets:
            end = max(end, bucket.ready * backward) + link.all_reduce(bucket.size, devices)
        agreed = link.all_reduce(AGREEMENT, devices)
        return self.data(images) + self.forward(images) + max(backward, end) + self.update + self.rest + agreed

    def dp(self, batch: int, devices: int, link: Link, shared: bool = False) -> float:
        """Predict the seconds of a step under dp.

        Args:
            batch: The global batch.
            devices: Replicas.
            link: Between the devices.
            shared: Whether they are threads on one CPU: there are no parameters to copy, and one of them takes the
                backward pass of all.
        """
        if devices == 1:
            return self.single(batch)
        images = -(-batch // devices)
        launch = self.forward.launch + self.backward.launch
        forward = self.forward.per_image * images
        backward = self.backward.per_image * (batch if shared else images)
        copies = 0.0 if shared else 2 * (devices - 1) * (self.parameter_bytes / link.bandwidth + link.latency)
        return self.data(batch) + devices * launch + forward + backward + copies + self.update + self.rest


@dataclass(frozen=True)
class Timed:
    """Steps of one batch size that were measured on one device.

    Attributes:
        images: Images of a batch on that device.
        phases: Milliseconds of each phase, as `time_per_step` in run.json.
        windows: Rates of the median window over those of the fastest and the slowest one.
        threads: Threads of the process.
    """

    images: float
    phases: dict[str, Any]
    windows: tuple[float, float] = (1.0, 1.0)
    threads: int = 1


def fit_step(measured: Sequence[Timed], backward: float, buckets: Iterable[Bucket]) -> Step:
    """Fit the step of one device to measurements with several batch sizes.

    Args:
        measured: The measurements; with one batch size, data, forward and backward are proportional to the images.
        backward: Share of forward and backward that is backward, 0…1.
        buckets: The gradients.
    """
    images = [timed.images for timed in measured]

    def line(phase: str) -> Line:
        seconds = [max(timed.phases[phase], 1e-6) / 1000 for timed in measured]
        if len(set(images)) == 1:
            return Line(0.0, sum(seconds) / len(seconds) / images[0])
        return Line(*fit_line(images, seconds))

    def mean(phase: str) -> float:
        return sum(timed.phases[phase] for timed in measured) / len(measured) / 1000

    both = line("forward_backward")
    step = Step(
        data=line("data"),
        forward=Line(both.launch * (1 - backward), both.per_image * (1 - backward)),
        backward=Line(both.launch * backward, both.per_image * backward),
        update=mean("optimizer"),
        rest=mean("rest"),
        buckets=tuple(buckets),
        launch_known=len(set(images)) > 1,
    )
    phases = ("data", "forward_backward", "optimizer", "rest")
    fits = [(sum(t.phases[p] for p in phases) / 1000 / step.single(t.images), *t.windows) for t in measured]
    lows, highs = [fit * low for fit, low, _ in fits], [fit * high for fit, _, high in fits]
    return replace(step, spread=(min(1.0, *lows), max(1.0, *highs)))


def spread_of_link(measured: Sequence[tuple[int, float]], link: Link, ranks: int) -> tuple[float, float]:
    """Find the fastest and the slowest measured all-reduce, relative to a link's prediction.

    Args:
        measured: Bytes and seconds.
        link: The fitted link.
        ranks: Number of ranks of the measurement.
    """
    off = [seconds / link.all_reduce(size, ranks) for size, seconds in measured]
    return min(1.0, *off), max(1.0, *off)


def make_buckets(gradients: Iterable[tuple[int, float]]) -> list[Bucket]:
    """Fill buckets as DDP does once it knows the order: the first one to 1 MiB, the others to 25 MiB.

    Args:
        gradients: Bytes of each gradient and the part of the backward pass after which it is ready, in order.
    """
    buckets: list[Bucket] = []
    size = 0
    for number, ready in gradients:
        size += number
        if size >= (BUCKET if buckets else FIRST_BUCKET):
            buckets.append(Bucket(size, ready))
            size = 0
    if size:
        buckets.append(Bucket(size, 1.0))
    return buckets


@dataclass(frozen=True)
class Machines:
    """The machines to train on, real or imagined.

    Attributes:
        per_node: Devices of a node.
        link: Link between the devices of a node.
        node_link: Link between nodes; None if unknown, so that only one node can be predicted.
        shared: Whether the devices of a node share one memory and one feeding thread, as cores of a CPU do.
        link_spread: The fastest and the slowest measured all-reduce, relative to `link`.
        price_per_hour: Price of one device for an hour, or None.
    """

    per_node: int
    link: Link
    node_link: Link | None
    shared: bool = False
    link_spread: tuple[float, float] = (1.0, 1.0)
    price_per_hour: float | None = None

    def slowest(self, devices: int) -> Link:
        """Find the slowest link of a ring over that many devices."""
        if devices <= self.per_node:
            return self.link
        assert self.node_link is not None
        bandwidth = min(self.link.bandwidth, self.node_link.bandwidth)
        return Link(bandwidth, max(self.link.latency, self.node_link.latency))


def predict(
    step: Step, batch: int, counts: Iterable[int], machines: Machines, scale_batch: bool = False
) -> pd.DataFrame:
    """Predict training on each number of devices, under ddp, and under dp within a node.

    Args:
        step: A step on one device.
        batch: The global batch; each device's batch with `scale_batch`.
        counts: Numbers of devices.
        machines: The machines.
        scale_batch: Whether the global batch grows with the devices.

    Returns:
        A row for each, with step_ms, samples_per_s, speed_up, efficiency, waiting_ms (communication that the backward
        pass does not hide) and, with a price, cost_per_million_samples. `_low` and `_high` are the ends of the range.
    """
    rows: list[dict[str, Any]] = []
    alone = batch / step.single(batch)
    for count in counts:
        images = batch * count if scale_batch else batch
        both = 1 < count <= machines.per_node and step.launch_known
        for strategy in ("ddp", "dp") if both else ("ddp",):
            time, *ends = (
                _seconds(strategy, step, images, count, machines, compute, sending)
                for compute, sending in ((1.0, 1.0), *zip(step.spread, machines.link_spread, strict=True))
            )
            rates = {"": images / time, "_low": images / ends[1], "_high": images / ends[0]}
            hidden = step.ddp(images, count, Link(float("inf"), 0.0))
            row = {
                "strategy": strategy if count > 1 else "one device",
                "devices": count,
                "nodes": -(-count // machines.per_node),
                "global_batch": images,
                "replica_batch": -(-images // count),
                "shared_equally": images % count == 0,
                "step_ms": 1000 * time,
                "waiting_ms": 1000 * (time - hidden) if strategy == "ddp" else float("nan"),
                **{f"samples_per_s{end}": rate for end, rate in rates.items()},
                **{f"speed_up{end}": rate / alone if count > 1 else 1.0 for end, rate in rates.items()},
                "efficiency": rates[""] / alone / count,
            }
            if machines.price_per_hour is not None:
                row["cost_per_million_samples"] = 1e6 / rates[""] / 3600 * machines.price_per_hour * count
            rows.append(row)
    return pd.DataFrame(rows)


def _seconds(
    strategy: str, step: Step, images: int, count: int, machines: Machines, compute: float, sending: float
) -> float:
    """Predict the seconds of a step on devices that compute, and a link that sends, slower by a factor each.

    Devices slower by a factor are the same as a link faster by it, with all of the step slower by it.
    """
    link = machines.slowest(count)
    link = Link(link.bandwidth * compute / sending, link.latency * sending / compute)
    return compute * (
        step.ddp(images, count, link) if strategy == "ddp" else step.dp(images, count, link, machines.shared)
    )

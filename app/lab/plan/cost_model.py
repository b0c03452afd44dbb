"""Cost model of scaling: step time on several devices and nodes, from a step on one device and the devices' links.

On one device, a step with b images takes data(b) + forward(b) + backward(b) + update + rest. The
first three are linear functions of b, fitted to measured steps. The offset of such a function is
its launch time.

ddp: each of N devices computes b = B/N images of a global batch B. DDP groups the gradients into
buckets. When the last gradient of a bucket is ready, the bucket is summed over a ring of all
devices. Buckets are summed one after the other:

    all_reduce(bytes) = 2(N-1)/N · bytes/bandwidth + 2(N-1) · latency
    end of bucket i   = max(end of bucket i-1, ready_i · backward(b)) + all_reduce(bytes_i)
    step              = data(b) + forward(b) + max(backward(b), end of the last bucket) + update + rest
                        + all_reduce(8 bytes)

Here, ready_i is the fraction of the backward pass after which bucket i's last gradient is ready. By
the all-reduce of 8 bytes, the ranks agree whether to stop.

Communication costs only the time that the backward pass does not hide. Over several nodes, the ring
is as fast as its slowest link. Sources: Patarasuk and Yuan (ring),
https://doi.org/10.1016/j.jpdc.2008.09.002; Li et al., VLDB 2020 (buckets, overlap),
https://arxiv.org/abs/2006.15704.

dp: one process feeds all devices of one node. Python launches the replicas one after the other,
because the GIL serialises them. On every step, parameters are sent to N-1 devices and gradients are
sent back, without overlap. Data, update and rest are those of the whole batch on the first device:

    step = data(B) + N · (launch of forward and backward) + (forward + backward)(b) without launch
           + 2(N-1) · (bytes of the parameters/bandwidth + latency) + update + rest

On a CPU, nothing is copied, and autograd runs all replicas' backward passes in one thread. GPUs
have one thread each:
https://docs.pytorch.org/docs/stable/notes/autograd.html#multithreaded-autograd.

Processes that share cores are not predicted, because the formulas ignore their interference.

Each prediction has a range. Its ends come from the same formulas: one end with a faster step and
link, the other with a slower step and link. The step changes by the largest deviation of a logging
window from the fitted step. The link changes by the largest deviation of an all-reduce from the
fitted link.

Not modelled: stragglers, other traffic, and algorithms other than the ring. For small buffers among
many ranks, NCCL uses trees, whose latency grows with log N.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from app.system.interconnect import Link, fit_line

AGREEMENT = 8  # bytes of the all-reduce by which ranks agree on stopping, in app.launch.signals
FIRST_BUCKET, BUCKET = (
    2**20,
    25 * 2**20,
)  # bytes; defaults of torch.nn.parallel.DistributedDataParallel


@dataclass(frozen=True)
class Line:
    """Seconds as a linear function of the number of images in a batch."""

    launch: float
    per_image: float

    def __call__(self, images: float) -> float:
        """Return the seconds for a batch."""
        return self.launch + self.per_image * images


@dataclass(frozen=True)
class Bucket:
    """Bucket of gradients that are reduced together.

    Attributes:
        size: Size in bytes.
        ready: Share of the backward pass after which the bucket's last gradient is ready, 0…1.
    """

    size: int
    ready: float


@dataclass(frozen=True)
class Step:
    """Step on one device: seconds of its phases, and its gradients.

    Attributes:
        data: Fetching and preparing the batch.
        forward: Forward pass.
        backward: Backward pass.
        update: Optimizer step.
        rest: Remaining time.
        buckets: Buckets of gradients, in the order in which they become ready.
        launch_known: Whether data, forward and backward were fitted to several batch sizes. With
            one size, their launch time is assumed to be 0.
        spread: Smallest and largest ratio of a measured step time to the fitted one. The range
            always includes 1.
    """

    data: Line
    forward: Line
    backward: Line
    update: float
    rest: float
    buckets: tuple[Bucket, ...]
    launch_known: bool = True
    spread: tuple[float, float] = (1.0, 1.0)

    def single(self, batch: float) -> float:
        """Predict the seconds of a step on one device."""
        return (
            self.data(batch) + self.forward(batch) + self.backward(batch) + self.update + self.rest
        )

    def ddp(self, batch: int, devices: int, link: Link) -> float:
        """Predict the seconds of a step under ddp.

        Args:
            batch: Global batch size.
            devices: Number of devices.
            link: Slowest link of the ring.
        """
        images = -(-batch // devices)
        backward = self.backward(images)
        end = 0.0
        for bucket in self.buckets:
            end = max(end, bucket.ready * backward) + link.all_reduce(bucket.size, devices)
        agreed = link.all_reduce(AGREEMENT, devices)
        return (
            self.data(images)
            + self.forward(images)
            + max(backward, end)
            + self.update
            + self.rest
            + agreed
        )

    def dp(self, batch: int, devices: int, link: Link, shared: bool = False) -> float:
        """Predict the seconds of a step under dp.

        Args:
            batch: Global batch size.
            devices: Number of replicas.
            link: Link between the devices.
            shared: Whether the replicas are threads on one CPU. Then no parameters are copied, and
                one thread runs the backward pass of all replicas.
        """
        images = -(-batch // devices)
        launch = self.forward.launch + self.backward.launch
        forward = self.forward.per_image * images
        backward = self.backward.per_image * (batch if shared else images)
        size = sum(
            bucket.size for bucket in self.buckets
        )  # bytes of the gradients; the parameters have as many
        copies = 0.0 if shared else 2 * (devices - 1) * (size / link.bandwidth + link.latency)
        return (
            self.data(batch)
            + devices * launch
            + forward
            + backward
            + copies
            + self.update
            + self.rest
        )


@dataclass(frozen=True)
class Timed:
    """Measured steps with one batch size on one device.

    Attributes:
        images: Number of images of a batch on the device.
        phases: Milliseconds of each phase, as `time_per_step` in run.json.
        windows: Step times of the fastest and the slowest logging window, relative to the median
            window's.
        taken: Cores that other programs took meanwhile, as text of `taken_cores`.
    """

    images: float
    phases: dict[str, Any]
    windows: tuple[float, float] = (1.0, 1.0)
    taken: str = ""


def fit_step(measured: Sequence[Timed], backward: float, buckets: Iterable[Bucket]) -> Step:
    """Fit the step of one device to measurements with several batch sizes.

    Args:
        measured: Measurements. If all have one batch size, data, forward and backward are assumed
            to be proportional to the number of images.
        backward: The backward pass's share of the time of forward and backward, 0…1.
        buckets: Gradients, grouped into DDP's buckets.
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
    fits = [
        (sum(t.phases[p] for p in phases) / 1000 / step.single(t.images), *t.windows)
        for t in measured
    ]
    lows = [fit * low for fit, low, _ in fits]
    highs = [fit * high for fit, _, high in fits]
    return replace(step, spread=(min(1.0, *lows), max(1.0, *highs)))


def spread_of_link(
    measured: Sequence[tuple[int, float]], link: Link, ranks: int
) -> tuple[float, float]:
    """Return the smallest and largest ratio of a measured time to the link's prediction. The range includes 1.

    Args:
        measured: Bytes and seconds of each all-reduce.
        link: The fitted link.
        ranks: Number of ranks of the measurement.
    """
    off = [seconds / link.all_reduce(size, ranks) for size, seconds in measured]
    return min(1.0, *off), max(1.0, *off)


def make_buckets(gradients: Iterable[tuple[int, float]]) -> list[Bucket]:
    """Group gradients into buckets as DDP does after its first step: the first bucket of 1 MiB, the others of 25 MiB.

    Args:
        gradients: For each gradient, its bytes and the share of the backward pass after which it is
            ready; sorted by share.
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
    """Machines whose training is predicted.

    Attributes:
        per_node: Number of devices per node.
        link: Link between devices within a node.
        node_link: Link between nodes; None if unknown, so that only one node can be predicted.
        shared: Whether the devices of a node are cores of one CPU. If so, dp copies no parameters,
            and one thread runs the backward pass of all replicas.
        link_spread: Smallest and largest ratio of a measured all-reduce time to `link`'s
            prediction. The range always includes 1.
        price_per_hour: Price of one device for an hour, or None.
    """

    per_node: int
    link: Link
    node_link: Link | None
    shared: bool = False
    link_spread: tuple[float, float] = (1.0, 1.0)
    price_per_hour: float | None = None

    def slowest(self, devices: int) -> Link:
        """Return a link with the lowest bandwidth and highest latency in a ring of devices."""
        if devices <= self.per_node:
            return self.link
        assert self.node_link is not None
        bandwidth = min(self.link.bandwidth, self.node_link.bandwidth)
        return Link(bandwidth, max(self.link.latency, self.node_link.latency))


def predict(
    step: Step, batch: int, counts: Iterable[int], machines: Machines, scale_batch: bool = False
) -> pd.DataFrame:
    """Predict training on several numbers of devices, under ddp, and under dp within a node.

    Args:
        step: Step on one device.
        batch: Global batch size; with `scale_batch`, each device's batch size.
        counts: Numbers of devices.
        machines: The machines.
        scale_batch: Whether the global batch grows with the devices.

    Returns:
        A row for each strategy and number of devices, with step_ms, samples_per_s, speed_up,
        efficiency, waiting_ms (communication that the backward pass does not hide) and, with a
        price, cost_per_million_samples. Columns with the suffix `_low` or `_high` are the ends of
        the prediction's range.
    """
    rows: list[dict[str, Any]] = []
    alone = batch / step.single(batch)
    for count in counts:
        images = batch * count if scale_batch else batch
        both = 1 < count <= machines.per_node and step.launch_known
        for strategy in ("ddp", "dp") if both else ("ddp",):
            factors = ((1.0, 1.0), *zip(step.spread, machines.link_spread, strict=True))
            time, *ends = (
                _seconds(strategy, step, images, count, machines, *pair) for pair in factors
            )
            rates = {"": images / time, "_low": images / ends[1], "_high": images / ends[0]}
            speed_ups = {end: rate / alone if count > 1 else 1.0 for end, rate in rates.items()}
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
                **{f"speed_up{end}": speed_up for end, speed_up in speed_ups.items()},
                **{f"efficiency{end}": speed_up / count for end, speed_up in speed_ups.items()},
            }
            if machines.price_per_hour is not None:
                row["cost_per_million_samples"] = (
                    1e6 / rates[""] / 3600 * machines.price_per_hour * count
                )
            rows.append(row)
    return pd.DataFrame(rows)


def _seconds(
    strategy: str,
    step: Step,
    images: int,
    count: int,
    machines: Machines,
    compute: float,
    sending: float,
) -> float:
    """Predict the seconds of a step with slower devices and a slower link.

    First predict the step with a link that is slower by `sending / compute`, then multiply the
    whole step by `compute`. Computation thus becomes slower by `compute`, and communication by
    `sending`.

    Args:
        strategy: `ddp` or `dp`.
        step: Step on one device.
        images: Global batch size.
        count: Number of devices.
        machines: The machines.
        compute: Factor by which devices are slower.
        sending: Factor by which the link is slower.
    """
    link = machines.slowest(count)
    link = Link(link.bandwidth * compute / sending, link.latency * sending / compute)
    return compute * (
        step.ddp(images, count, link)
        if strategy == "ddp"
        else step.dp(images, count, link, machines.shared)
    )

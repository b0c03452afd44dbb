"""Cost model of scaling: step time on several devices, from a step on one and the links.

On one device, a step with b images takes data(b) + forward(b) + backward(b) + update + rest. The
first three are linear functions of b, fitted to measured steps. The offset of such a function is
its launch time.

With DDP, each of N devices computes b = B/N images of a global batch B. DDP groups the gradients
into buckets. When the last gradient of a bucket is ready, the bucket is summed over a ring of all
devices. Buckets are summed one after the other:

    all_reduce(bytes) = 2(N-1)/N · bytes/bandwidth + 2(N-1) · latency
    end of bucket i   = max(end of bucket i-1, ready_i · backward(b)) + all_reduce(bytes_i)
    step              = data(b) + forward(b) + max(backward(b), end of the last bucket) + update
                        + rest + all_reduce(8 bytes)

Here, ready_i is the fraction of the backward pass after which bucket i's last gradient is ready. By
the all-reduce of 8 bytes, the ranks agree whether to stop.

Communication costs only the time that the backward pass does not hide. Over several nodes, the ring
is as fast as its slowest link. Sources: Patarasuk and Yuan (ring),
https://doi.org/10.1016/j.jpdc.2008.09.002; Li et al., VLDB 2020 (buckets, overlap),
https://arxiv.org/abs/2006.15704.

Processes that share cores are not predicted, because the formulas ignore their interference.

Each prediction has a range. Its ends come from the same formulas: one end with a faster step and
link, the other with a slower step and link. The step changes by the largest deviation of a logging
window from the fitted step. The link changes by the largest deviation of an all-reduce from the
fitted link.

Not modelled: stragglers, other traffic, and algorithms other than the ring. For small buffers among
many ranks, NCCL uses trees, whose latency grows with log N.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from app.record import Record
from app.record.words import taken_cores
from app.system.interconnect import Link, fit_line

ALONE = Link(math.inf, 0.0)  # a link that takes no time
PHASES = ["data", "forward_backward", "optimizer", "rest"]
AGREEMENT = 8  # bytes of the all-reduce by which ranks agree on stopping, in app.launch.signals
# bytes; defaults of torch.nn.parallel.DistributedDataParallel
FIRST_BUCKET = 2**20
BUCKET = 25 * 2**20


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
        images: Sizes of the measured batches.
        taken: Cores that other programs took meanwhile, as text of `taken_cores`.
        spread: Smallest and largest ratio of a measured step time to the fitted one. The range
            always includes 1.
    """

    data: Line
    forward: Line
    backward: Line
    update: float
    rest: float
    buckets: tuple[Bucket, ...]
    images: tuple[float, ...] = ()
    taken: str = ""
    spread: tuple[float, float] = (1.0, 1.0)

    @property
    def launch_known(self) -> bool:
        """Whether several batch sizes were measured; with one, launch times count as 0."""
        return len(set(self.images)) > 1

    def ddp(self, batch: float, devices: int, link: Link) -> float:
        """Predict the seconds of a step.

        Args:
            batch: Global batch size.
            devices: Number of devices.
            link: Slowest link of the ring.
        """
        images = -(-batch // devices)
        backward = self.backward(images)
        end = backward
        reduced = 0.0
        for bucket in self.buckets:
            reduced = max(reduced, bucket.ready * backward) + link.all_reduce(bucket.size, devices)
            end = max(end, reduced)
        agreed = link.all_reduce(AGREEMENT, devices)
        return self.data(images) + self.forward(images) + end + self.update + self.rest + agreed


def fit_step(records: Sequence[Record], backward: float, buckets: Iterable[Bucket]) -> Step:
    """Fit the step of one device to runs with several batch sizes.

    Args:
        records: Records of the runs. If all have one batch size, data, forward and backward are
            assumed to be proportional to the number of images.
        backward: The backward pass's share of the time of forward and backward, 0…1.
        buckets: Gradients, grouped into DDP's buckets.
    """
    images = []
    for record in records:
        assert record.global_batch_size
        images.append(record.global_batch_size / record.replicas)
    seconds = pd.DataFrame([vars(record.time_per_step) for record in records])[PHASES] / 1000
    times = seconds.clip(lower=1e-9)

    def line(phase: str, share: float = 1.0) -> Line:
        if len(set(images)) == 1:
            return Line(0.0, share * times[phase].mean() / images[0])
        launch, per_image = fit_line(images, times[phase].tolist())
        return Line(share * launch, share * per_image)

    step = Step(
        data=line("data"),
        forward=line("forward_backward", 1 - backward),
        backward=line("forward_backward", backward),
        update=seconds["optimizer"].mean(),
        rest=seconds["rest"].mean(),
        buckets=tuple(buckets),
        images=tuple(images),
        taken=max(taken_cores(record.others_cores, record.hardware) for record in records),
    )
    ratios = []
    for record, size, time in zip(records, images, seconds.sum(axis=1), strict=True):
        ratio = time / step.ddp(size, 1, ALONE)
        ratios.append(ratio)
        rates = record.throughput
        if rates.median and rates.min and rates.max:
            ratios.append(ratio * rates.median / rates.max)
            ratios.append(ratio * rates.median / rates.min)
    return replace(step, spread=spread_of(ratios))


def spread_of(ratios: Iterable[float]) -> tuple[float, float]:
    """Return the smallest and largest ratio of a measured time to the predicted one, with 1."""
    ratios = [1.0, *ratios]
    return min(ratios), max(ratios)


def make_buckets(gradients: Iterable[tuple[int, float]]) -> list[Bucket]:
    """Group gradients into buckets of 1 MiB (the first) and 25 MiB, as DDP does.

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
        link_spread: Smallest and largest ratio of a measured all-reduce time to `link`'s
            prediction. The range always includes 1.
    """

    per_node: int
    link: Link
    node_link: Link | None
    link_spread: tuple[float, float] = (1.0, 1.0)

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
    """Predict training on several numbers of devices.

    Args:
        step: Step on one device.
        batch: Global batch size; with `scale_batch`, each device's batch size.
        counts: Numbers of devices.
        machines: The machines.
        scale_batch: Whether the global batch grows with the devices.

    Returns:
        A row for each number of devices, with step_ms, samples_per_s, speed_up, efficiency
        and waiting_ms (communication that the backward pass does not hide). Columns with the suffix
        `_low` or `_high` are the ends of the prediction's range.
    """
    rows = []
    alone = batch / step.ddp(batch, 1, ALONE)
    # factors by which devices and link are slower, by suffix of the columns
    factors = {
        "": (1.0, 1.0),
        "_low": (step.spread[1], machines.link_spread[1]),
        "_high": (step.spread[0], machines.link_spread[0]),
    }
    for count in counts:
        images = batch * count if scale_batch else batch
        link = machines.slowest(count)
        time = step.ddp(images, count, link)
        row = {
            "devices": count,
            "nodes": -(-count // machines.per_node),
            "global_batch": images,
            "replica_batch": -(-images // count),
            "shared_equally": images % count == 0,
            "step_ms": 1000 * time,
            "waiting_ms": 1000 * (time - step.ddp(images, count, ALONE)),
        }
        for end, (compute, sending) in factors.items():
            # the whole step is slower by `compute`, so that the link is slower by `sending`
            slower = Link(link.bandwidth * compute / sending, link.latency * sending / compute)
            speed = images / (compute * step.ddp(images, count, slower))
            speed_up = 1.0
            if count > 1:
                speed_up = speed / alone
            row[f"samples_per_s{end}"] = speed
            row[f"speed_up{end}"] = speed_up
            row[f"efficiency{end}"] = speed_up / count
        rows.append(row)
    return pd.DataFrame(rows)

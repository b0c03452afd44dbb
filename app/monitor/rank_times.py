"""Step times of all ranks, and detection of slow ranks."""

import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import torch
from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import distributed

from app.launch.agree import gather_objects, host_group
from app.launch.watchdog import connecting
from app.monitor.series import Series
from app.record import RankTime
from app.system.machine import GIB, busy_seconds, core_wait_seconds, own_seconds

# in a window, a rank is slower if its data and compute times exceed the others' median by this
# share
SLOWER = 0.1
# a rank counts as slow if it was slower in more windows than the number expected by chance plus
# this many standard deviations; see `RankTimes`
DEVIATIONS = 4
KEPT = 1000  # number of latest windows that enter the medians


class RankTimes:
    """Step times of all ranks, exchanged once per logging window, and detection of slow ranks.

    A rank counts as slow if it was slower than the others in more than n/2 + 4·√n/2 of n windows.
    For a rank that is slower by chance in half of the windows, this limit is the mean plus four
    standard deviations. If ranks share cores, the wait for a core is subtracted from compute,
    because chance decides which rank waits.

    Args:
        timeout: Timeout of an exchange in seconds.

    Attributes:
        places: Node and usable cores of each rank.
        others_cores: Mean number of rank zero's cores that other programs used during training.
        memory: Time series of each rank's memory in GiB: reserved by torch on a GPU, resident on a
            CPU.
    """

    def __init__(self, timeout: float) -> None:
        self.memory = Series()
        self.others_cores: float | None = None
        self.places: list[tuple[int, tuple[int, ...]]] = []
        self._slower: Counter[int] = Counter()
        self._named: set[int] = set()
        self._heard = 0
        self._timeout = timeout
        self._group: Any = None
        self._windows: deque[np.ndarray] = deque(maxlen=KEPT)  # times of each window: (ranks, 3)

    def connect(self, trainer: Trainer) -> None:
        """Create a process group of all ranks for the exchange. Collective."""
        if trainer.world_size > 1 and self._group is None:
            with connecting():
                self._group = host_group(self._timeout)

    def begin(self, trainer: Trainer) -> None:
        """Store the CPU times at the start, and gather each rank's node and cores. Collective."""
        self._started = time.perf_counter()
        self._cores: tuple[int, ...] = ()  # unknown on macOS
        if sys.platform == "linux":
            self._cores = tuple(sorted(os.sched_getaffinity(0)))
        self._busy = busy_seconds(self._cores)
        self._own = own_seconds()
        self._delay = core_wait_seconds()
        self.places = gather_objects((trainer.node_rank, self._cores))

    @property
    def ranks(self) -> list[RankTime]:
        """Median step times of each rank over the latest windows, in milliseconds."""
        if not self._windows:
            return []
        medians = 1000 * np.median(list(self._windows), axis=0)  # (ranks, 3)
        rows = []
        for rank, (data, compute, wait) in enumerate(medians.round(4).tolist()):
            node, _ = self.places[rank]
            rows.append(RankTime(rank, node, data, compute, wait, self._is_slow(rank)))
        return rows

    def share(self, trainer: Trainer, steps: list[Sequence[float]]) -> None:
        """Gather and process the ranks' figures of a window. Collective.

        The figures are median step times, memory, and CPU times of the rank and its cores.

        Args:
            trainer: The trainer.
            steps: Five points in time of each step, in seconds: end of the previous step, start of
                the computation, last gradient ready, gradients averaged, end of the step. If empty,
                nothing happens.
        """
        if not steps:
            return
        ended, began, ready, averaged, now = np.array(steps).T
        wait = averaged - ready
        times = np.median([began - ended, now - began - wait, wait], axis=1)
        delay = core_wait_seconds()
        device = trainer.strategy.root_device
        memory = psutil.Process().memory_info().rss
        if device.type == "cuda":
            memory = torch.cuda.memory_reserved(device)
        figures = [
            *times.tolist(),
            memory / GIB,
            busy_seconds(self._cores) - self._busy,
            own_seconds() - self._own,
            (delay - self._delay) / len(steps),
        ]
        self._delay = delay
        mine = torch.tensor(figures, dtype=torch.float64)
        rows = mine.repeat(trainer.world_size, 1)
        if trainer.world_size > 1:
            distributed.all_gather(list(rows), mine, self._group)
        self.hear(time.perf_counter() - self._started, rows.tolist())

    def hear(self, seconds: float, rows: list[list[float]]) -> None:
        """Process a window's figures of all ranks.

        Args:
            seconds: Seconds since the start of training.
            rows: Figures of each rank: data, compute and wait in seconds; memory in GiB; CPU
                seconds of all programs on its cores, and of the rank alone, since the start of
                training; wait for a core in seconds per step.
        """
        data, compute, wait, memory, busy, own, delay = np.array(rows).T
        self._heard += 1
        self._windows.append(np.stack([data, compute, wait], axis=1))
        self.memory.add(seconds, *memory.tolist())
        here = [place == self.places[0] for place in self.places]
        self.others_cores = round(max(busy[0] - own[here].sum(), 0.0) / seconds, 2)
        # for ranks that share cores, subtract the wait for a core
        shared = [self.places.count(place) > 1 for place in self.places]
        compute = np.maximum(compute - np.where(shared, delay, 0.0), 0.0)
        slow = slower(np.stack([data, compute], axis=1), [node for node, _ in self.places])
        self._slower.update(slow.keys())
        for rank in slow.keys() - self._named:
            if self._is_slow(rank):
                self._named.add(rank)
                rank_zero_info(slow[rank])

    def _is_slow(self, rank: int) -> bool:
        return 2 * self._slower[rank] - self._heard > DEVIATIONS * math.sqrt(self._heard)


RANK_PHASES = ("data", "compute", "wait")


def slower(rows: Any, nodes: Sequence[int]) -> dict[int, str]:
    """Find the ranks whose data plus compute exceeds the other ranks' median by `SLOWER`.

    Args:
        rows: Data and compute of each rank, in any unit; further columns are ignored.
        nodes: Node of each rank.

    Returns:
        Dictionary from each slower rank to a line such as `rank 1 (node 0): 25 % slower than the
        median, in compute`.
    """
    lines: dict[int, str] = {}
    if len(rows) < 2:
        return lines
    times = np.array(rows)[:, :2]
    for rank in range(len(times)):
        others = np.delete(times, rank, axis=0)
        excess = times[rank].sum() / np.median(others.sum(1)) - 1
        if excess > SLOWER:
            data, compute = times[rank] - np.median(others, axis=0)
            phase = "compute" if compute > data else "data"
            slowness = f"{100 * excess:.0f} % slower than the median, in {phase}"
            lines[rank] = f"rank {rank} (node {nodes[rank]}): {slowness}"
    return lines


def slow_ranks(ranks: Sequence[RankTime]) -> dict[int, str]:
    """Return the lines of `slower` for the ranks that are recorded as slow."""
    times = [(row.data, row.compute) for row in ranks]
    lines = slower(times, [row.node for row in ranks])
    return {rank: line for rank, line in lines.items() if ranks[rank].slow}

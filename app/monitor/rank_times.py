"""Times the step of every rank, finds the rank that is slower than the others, and tells its watchdog where it is."""

import contextlib
import math
import os
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, distributed

from app.launch import watchdog
from app.launch.agree import gather_objects, host_group
from app.launch.watchdog import DATA, EVALUATION, GRADIENTS, SET_UP, STEP, UPDATE
from app.modules import log_window
from app.monitor.course import Course
from app.record import RankTime
from app.system.machine import GIB, busy_seconds, core_wait_seconds, own_seconds, usable_cores

SLOWER = 0.1  # than the median of the other ranks
DEVIATIONS = 4  # standard deviations of a fair coin, by which a slow rank's slower windows exceed half of all
ADAPTED = (2, 4)  # windows after which fewer threads may be taken
KEPT = 1000  # windows, of which the medians are taken


class RankTimes(Callback):
    """Times, in each rank, waiting for data, computing, and waiting for the other ranks' gradients.

    Nothing is synchronised: on a GPU, events are recorded in its stream, and read when they have long happened. Once in
    a logging window the ranks tell each other their medians, and how much memory they take, in the background, and
    hear of them one window later.

    * data: from the end of a step to the beginning of the next one's computation
    * compute: the rest of the step; where a rank waits for others before its last gradient is ready, as in
      SyncBatchNorm or under `fsdp`, that is part of it
    * wait: from its last gradient to the end of the backward pass, in which the gradients are averaged

    A rank is called slow when it is slower than the others in more than half of the windows, by four standard
    deviations of a fair coin. Waiting for a core counts only where the rank shares its cores with no other rank. Among
    ranks that share cores, chance decides which one waits.

    Args:
        timeout: Seconds to wait for another rank.
        adapts: Whether a single process reduces its threads when other programs take cores.

    Attributes:
        places: Node and cores of each rank.
        others_cores: Mean number of rank zero's cores that other programs took during training.
        memory: Seconds since the start of training, and GiB of each rank: of a GPU what torch has reserved, on a CPU
            what the process has in memory.
    """

    def __init__(self, timeout: float, adapts: bool = False) -> None:
        self.memory = Course()
        self.others_cores: float | None = None
        self._adapts = adapts
        self.places: list[tuple[int, tuple[int, ...]]] = []
        self._slower: Counter[int] = Counter()
        self._named: set[int] = set()
        self._heard = 0
        self._busy = self._own = self._delay = 0.0
        self.timeout = timedelta(seconds=timeout)
        self._group: Any = None
        self._handles: list[Any] = []
        self._beat: Any = [0, 0, 0]  # nobody reads it where there is no watchdog
        self._now: Callable[[], Any] = time.perf_counter
        self._seconds: Callable[[list[tuple[Any, ...]]], list[Any]] = list
        self._steps: list[tuple[Any, ...]] = []
        self._whole: list[tuple[Any, ...]] = []  # the window before: a GPU has done what was asked of it then
        self._process: Any = None
        self._started = 0.0
        self._asked: tuple[float, list[Tensor], Any] | None = None
        self._windows: deque[list[list[float]]] = deque(maxlen=KEPT)  # of each rank: data, compute, wait and memory
        self._last_parameter: Tensor | None = None
        self._step = self._window = self._left = 0
        self._accumulated = 1

    # -- for the watchdog -----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connect with the other ranks. Collective."""
        watched = watchdog.heartbeat if watchdog.heartbeat and watchdog.heartbeat.folder else None
        if watched is not None:
            self._beat = watched.values
            self._beat[1] = SET_UP
        if trainer.world_size > 1 and self._group is None:
            with watched.connecting() if watched is not None else contextlib.nullcontext():
                self._group = host_group(self.timeout)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nobody waits any more."""
        if watchdog.heartbeat is not None:
            watchdog.heartbeat.end()
        self._beat = [0, 0, 0]

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """This rank ends: its watchdog shall not take that for hanging."""
        if watchdog.heartbeat is not None:
            watchdog.heartbeat.end()

    def _evaluate(self, *_: Any, **__: Any) -> None:
        beat = self._beat
        beat[1], beat[2] = EVALUATION, beat[2] + 1

    on_validation_start = on_validation_batch_start = on_test_start = on_test_batch_start = _evaluate
    on_predict_start = on_predict_batch_start = _evaluate

    # -- the step -------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settle how to time."""
        cuda = trainer.strategy.root_device.type == "cuda"
        self._now, self._seconds = (_recorded, _since_first) if cuda else (time.perf_counter, list)
        self._ready = self._averaged = self._began = self._waited_since = self._now()
        self._started, self._process = time.perf_counter(), psutil.Process()
        self.memory = Course(trainer.world_size)
        self._step = trainer.global_step + 1
        self._steps, self._whole, self._accumulated = [], [], trainer.accumulate_grad_batches
        self._window = self._left = int(min(log_window(trainer), trainer.num_training_batches))
        self._cores = tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else ()
        self._busy, self._own = busy_seconds(self._cores), own_seconds()
        self._delay, place = core_wait_seconds(), (trainer.node_rank, self._cores)
        self.places = gather_objects(place) if trainer.world_size > 1 else [place]
        if trainer.world_size > 1:
            learnt = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
            self.on_after_backward = self._on_averaged  # type: ignore[method-assign]  # a hook that one process lacks
            self._handles = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in learnt]
        self._begin()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to wait for data."""
        self._step = trainer.global_step + 1
        self._begin()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to wait for data again, where training was interrupted by it."""
        self._begin()

    def _begin(self) -> None:
        beat = self._beat
        beat[0], beat[1], beat[2] = self._step, DATA, beat[2] + 1
        self._ended = self._now()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The data is there."""
        self._beat[1] = STEP
        self._ready = self._averaged = self._began = self._waited_since = self._now()

    def _on_gradient(self, parameter: Tensor) -> None:
        self._last_parameter, self._ready = parameter, self._now()
        self._beat[1] = GRADIENTS

    def _on_averaged(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._beat[1] = UPDATE
        if self._ready is self._waited_since:  # the parameter had no part in this backward pass
            return
        self._averaged, self._waited_since = self._now(), self._ready
        if len(self._handles) > 1 and self._last_parameter is not None:  # only the one that comes last is looked at
            self._unhook()
            self._handles = [self._last_parameter.register_post_accumulate_grad_hook(self._on_gradient)]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the times of the step, and share those of a window that ends here."""
        now = self._now()
        self._steps.append((self._ended, self._began, self._ready, self._averaged, now))
        self._ended = now
        self._step += (batch_idx + 1) % self._accumulated == 0
        beat = self._beat
        beat[0], beat[1] = self._step, DATA
        self._left -= 1
        if not self._left:
            self._left = self._window
            self._whole, whole, self._steps = self._steps, self._whole, []
            self._share(trainer, whole)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share what is left, and sum up. Collective."""
        self._unhook()
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)
        self._share(trainer, self._whole + self._steps)
        self._share(trainer, [])

    @property
    def ranks(self) -> list[RankTime]:
        """Medians of each rank in milliseconds, of the windows that it has heard of, for the run record."""
        columns = torch.tensor(list(self._windows)).permute(1, 2, 0).tolist() if self._windows else []
        medians = [[round(1000 * statistics.median(times), 4) for times in parts[:3]] for parts in columns]
        return [
            RankTime(rank, node, data, compute, wait, self._is_slow(rank))
            for rank, ((node, _), (data, compute, wait)) in enumerate(zip(self.places, medians, strict=False))
        ]

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- the ranks ------------------------------------------------------------------------------------------

    def _share(self, trainer: Trainer, steps: list[tuple[Any, ...]]) -> None:
        """Process the last shared window, and share this window's medians, memory, and times of cores."""
        if self._asked is not None:
            (seconds, rows, answer), self._asked = self._asked, None
            answer.wait()
            self.hear(seconds, [row.tolist() for row in rows])
        if not steps:
            return
        ended, began, ready, averaged, now = np.array(self._seconds(steps)).T
        wait = averaged - ready
        own = [float(np.median(times)) for times in (began - ended, now - began - wait, wait)]
        own.append(self._memory(trainer.strategy.root_device))
        delay, self._delay = self._delay, core_wait_seconds()
        own += [busy_seconds(self._cores) - self._busy, own_seconds() - self._own, (self._delay - delay) / len(steps)]
        elapsed = time.perf_counter() - self._started
        if trainer.world_size == 1:
            self.hear(elapsed, [own])
            return
        mine = torch.tensor(own, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(trainer.world_size)]
        self._asked = elapsed, rows, distributed.all_gather(rows, mine, self._group, async_op=True)

    def _memory(self, device: torch.device) -> float:
        cuda = device.type == "cuda"
        return (torch.cuda.memory_reserved(device) if cuda else self._process.memory_info().rss) / GIB

    def hear(self, seconds: float, rows: list[list[float]]) -> None:
        """Process the figures of a window that the ranks have shared.

        Args:
            seconds: Seconds since the start of training.
            rows: A row for each rank: data, compute and wait in seconds; memory in GiB; busy seconds of its cores since
                the start of training; CPU seconds of the rank since then; seconds per step of waiting for a core.
        """
        self._heard += 1
        self._windows.append([row[:4] for row in rows])
        self.memory.add(seconds, *(row[3] for row in rows))
        ours = sum(row[5] for row, place in zip(rows, self.places, strict=True) if place == self.places[0])
        self.others_cores = round(max(rows[0][4] - ours, 0.0) / seconds, 2)
        # ranks that share cores: compute without the wait for a core
        shared = [self.places.count(place) > 1 for place in self.places]
        busy = [[row[0], max(row[1] - row[6] * alike, 0.0)] for row, alike in zip(rows, shared, strict=True)]
        slow = slower(busy, [node for node, _ in self.places])
        self._slower.update(slow.keys())
        for rank in slow.keys() - self._named:
            if self._is_slow(rank):
                self._named.add(rank)
                rank_zero_info(slow[rank])
        if self._adapts and len(rows) == 1 and self._heard in ADAPTED:
            self._adapt(self.others_cores)

    def _is_slow(self, rank: int) -> bool:
        return 2 * self._slower[rank] - self._heard > DEVIATIONS * math.sqrt(self._heard)

    def _adapt(self, taken: float) -> None:
        """Reduce the threads to the cores that other programs leave free."""
        fewer = max(round(usable_cores() - taken), 1)
        if fewer < torch.get_num_threads():
            rank_zero_info(f"other programs take {taken:.1f} of {usable_cores()} cores: reducing threads to {fewer}")
            torch.set_num_threads(fewer)


NAMES = ("data", "compute", "wait")


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _since_first(steps: list[tuple[Any, ...]]) -> list[list[float]]:
    """Seconds from the first event to each."""
    first = steps[0][0]
    return [[first.elapsed_time(event) / 1000 for event in step] for step in steps]


def slower(rows: Sequence[Sequence[float]], nodes: Sequence[int]) -> dict[int, str]:
    """The ranks that take longer for a step than the others, without the time in which they wait for each other.

    Args:
        rows: Data, compute and wait of each rank, in any unit.
        nodes: On which node each rank is.

    Returns:
        A line for each such rank, which says by how much, and in what.
    """
    found = {}
    for rank, row in enumerate(rows):
        others = [other for index, other in enumerate(rows) if index != rank]
        if not others:
            continue
        usual = [statistics.median(other[part] for other in others) for part in range(2)]
        whole = statistics.median(other[0] + other[1] for other in others)
        excess = (row[0] + row[1]) / whole - 1 if whole else 0.0
        if excess > SLOWER:
            part = NAMES[row[1] - usual[1] > row[0] - usual[0]]
            found[rank] = f"rank {rank} (node {nodes[rank]}): {100 * excess:.0f} % slower than the median, in {part}"
    return found


def slow_ranks(ranks: Sequence[RankTime]) -> dict[int, str]:
    """Describe each rank that was slower than the others, by its number."""
    lines = slower([[row.data, row.compute, row.wait] for row in ranks], [row.node for row in ranks])
    return {rank: line for rank, line in lines.items() if ranks[rank].slow}

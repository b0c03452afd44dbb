"""Clock of training steps: data, compute and wait of every step, and all phases of a few steps."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from app.launch import watchdog
from app.launch.watchdog import DATA, ELSEWHERE, EVALUATION, GRADIENTS, SET_UP, STEP, UPDATE
from app.modules.sums import log_window
from app.monitor.rank_times import RankTimes
from app.record import PHASES, Phases
from app.system.machine import time_when_done

MEASURED = (*PHASES, "forward", "backward", "launch")
# phase of each action that the loops report to the profiler, by the action's name
ACTIONS = {
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "training_step": "forward",
    "backward": "backward",
    "agree": "communication",
}

Marks = list[tuple[Any, ...]]  # points in time of each step; on a GPU, events


class StepClock(Callback):
    """Callback that times each step, and reports the rank's phase to its watchdog.

    The clock measures these times of every step, without synchronising the device. On a GPU, it
    records events, and reads them one logging window later.

    * data: from the end of a step to the start of the next step's computation
    * compute: the rest of the step, including waits before the last gradient, such as
      SyncBatchNorm's
    * wait: from the last gradient to the end of the backward pass, while gradients are averaged

    The clock measures these phases of 20 steps, after the first 5 steps. It synchronises the device
    between phases.

    * data: the wait for the batch, its transfer to the device, augmentation and normalisation
    * forward_backward: the model's `training_step` (forward) and its backward pass. The part in
      which the host issues work is called launch; on a CPU, launch is the whole phase.
    * communication: the wait above, and the ranks' agreement on stopping. Under dp, there is none:
      scattering and gathering count as forward, and the sum of the gradients as backward. With
      several ranks, data and communication are rank zero's data and wait over the windows.
    * optimizer: the update
    * rest: metrics, logging, and Python between the calls

    Args:
        ranks: Exchange of the times among ranks.
    """

    skipped = 5
    window = 20

    def __init__(self, ranks: RankTimes) -> None:
        self.ranks = ranks
        self._beat: Any = [0, 0, 0]  # step, phase and a counter; read by a watchdog, if any
        self._now: Callable[[], Any] = time.perf_counter
        self._handles: list[Any] = []
        self._last_parameter: Tensor | None = None
        self._seen = 0
        self._phases: list[list[float]] = []  # seconds of each phase of MEASURED, by step
        self._profiler: _PhaseProfiler | None = None

    # -- watchdog
    # -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connect to the watchdog and the other ranks. Collective."""
        if watchdog.heartbeat is not None:
            self._beat = watchdog.heartbeat.values
            self._beat[1] = SET_UP
        self.ranks.connect(trainer)

    def _stop_beating(self, *_: Any, **__: Any) -> None:
        """Suspend the watchdog, because no rank waits for this one any more."""
        self._beat[1] = ELSEWHERE
        self._beat = [0, 0, 0]

    teardown = on_exception = _stop_beating

    def _evaluate(self, *_: Any, **__: Any) -> None:
        self._beat[1] = EVALUATION
        self._beat[2] += 1

    on_validation_start = on_validation_batch_start = on_test_start = on_test_batch_start = (
        _evaluate
    )
    on_predict_start = on_predict_batch_start = _evaluate

    # -- every step
    # -----------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the clock, and register gradient hooks. Collective."""
        self._seconds: Callable[[Marks], list[Any]] = list
        if trainer.strategy.root_device.type == "cuda":
            self._now = _recorded
            self._seconds = _since_first
        self._ready = self._averaged = self._began = self._waited_since = self._now()
        self._steps: Marks = []
        # read one window later, when the GPU has finished its steps
        self._last_window: Marks = []
        self._accumulated = trainer.accumulate_grad_batches
        self._window = self._left = int(min(log_window(trainer), trainer.num_training_batches))
        self.ranks.begin(trainer)
        if trainer.world_size > 1:
            # a hook costs time, so a single rank has none
            self.on_after_backward = self._on_averaged  # type: ignore[method-assign]
            self._hook([each for each in pl_module.parameters() if each.requires_grad])
        self._begin(trainer)

    def _begin(self, trainer: Trainer, *_: Any) -> None:
        """Mark the start of the wait for data."""
        self._step = trainer.global_step + 1
        self._beat[0] = self._step
        self._beat[1] = DATA
        self._beat[2] += 1
        self._ended = self._now()
        if self._profiler is not None:
            self._profiler.restart()

    on_train_epoch_start = on_validation_end = _begin  # type: ignore[assignment]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Mark the end of the wait for data."""
        self._beat[1] = STEP
        self._ready = self._averaged = self._began = self._waited_since = self._now()

    def _on_gradient(self, parameter: Tensor) -> None:
        self._last_parameter = parameter
        self._ready = self._now()
        self._beat[1] = GRADIENTS

    def _on_averaged(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._beat[1] = UPDATE
        if (
            self._ready is self._waited_since
        ):  # the backward pass did not reach the hooked parameter
            return
        self._averaged = self._now()
        self._waited_since = self._ready
        # from the second step on, hook only the parameter whose gradient is the last
        if len(self._handles) > 1 and self._last_parameter is not None:
            self._hook([self._last_parameter])

    def _wait(self) -> float:
        """Return the seconds from the step's last gradient to its averaged gradients.

        The caller must synchronise the device before.
        """
        ready, averaged = self._seconds([(self._began, self._ready, self._averaged)])[0][1:]
        return averaged - ready

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Store the step's times. At the end of a window, share the previous window's times.

        The GPU has finished the previous window, so reading its events does not block.
        """
        now = self._now()
        self._steps.append((self._ended, self._began, self._ready, self._averaged, now))
        self._ended = now
        if (batch_idx + 1) % self._accumulated == 0:
            self._step += 1
        self._beat[0] = self._step
        self._beat[1] = DATA
        self._left -= 1
        if self._left == 0:
            self._left = self._window
            finished = self._last_window
            self._last_window = self._steps
            self._steps = []
            self.ranks.share(trainer, self._seconds(finished))
        self._seen += 1
        if self._seen <= self.skipped + self.window:
            self._profile(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Share the remaining step times with all ranks. Collective."""
        self._hook([])
        self._end_profile()
        time_when_done(trainer.strategy.root_device)
        self.ranks.share(trainer, self._seconds(self._last_window + self._steps))

    def _hook(self, parameters: Iterable[Tensor]) -> None:
        """Note the time when a gradient of these parameters is ready, and of no other."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)
            self._handles.append(handle)

    # -- phases of a few steps
    # ------------------------------------------------------------------------------

    def time_per_step(self, step: float | None) -> Phases | None:
        """Return the median milliseconds of each phase; None if no step was profiled.

        If several ranks run, rank zero's data time and wait over the latest windows replace the
        profiled data and communication, because both vary too much to be measured in a few steps.

        Args:
            step: Median step time in the logging windows, in milliseconds, or None if unknown. The
                phases are scaled so that their sum equals this time.
        """
        if not self._phases:
            return None
        medians = 1000 * np.median(self._phases, axis=0)
        times: dict[str, Any] = dict(zip(MEASURED, medians.tolist(), strict=True))
        known: dict[str, float] = {}
        scale = 1.0
        if step is not None:
            ranks = self.ranks.ranks
            if len(ranks) > 1 and ranks[0].data + ranks[0].wait < step:
                known = {"data": ranks[0].data, "communication": ranks[0].wait}
            rest = sum(times[phase] for phase in PHASES if phase not in known)
            scale = (step - sum(known.values())) / rest
        times = {name: round(scale * time, 4) for name, time in times.items()} | known
        return Phases(n=len(self._phases), **times)

    def _profile(self, trainer: Trainer) -> None:
        """Store a profiled step; start and stop the profiler at the right steps."""
        if self._profiler is not None:
            self._phases.append(self._profiler.take())
            if len(self._phases) == self.window:
                self._end_profile()
        elif self._seen == self.skipped and type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]
            self._profiler = _PhaseProfiler(trainer, self._wait)

    def _end_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.detach()
            self._profiler = None


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _since_first(steps: Marks) -> list[list[float]]:
    """Convert each step's CUDA events to seconds since the first event of all."""
    return [[steps[0][0].elapsed_time(event) / 1000 for event in step] for step in steps]


class _PhaseProfiler(PassThroughProfiler):
    """Profiler that times the phases of a few steps, in place of the trainer's profiler."""

    def __init__(self, trainer: Any, wait: Callable[[], float]) -> None:
        super().__init__()
        self.trainer = trainer
        self.wait = wait
        self.device = trainer.strategy.root_device
        self._begun: dict[str, float] = {}
        self._before = trainer.profiler
        trainer.profiler = self
        self._handle = register_optimizer_step_post_hook(self._on_stepped)
        self.restart()

    def restart(self) -> None:
        self._spent = dict.fromkeys(MEASURED, 0.0)
        self._began = time_when_done(self.device)

    def take(self) -> list[float]:
        """Return the seconds of MEASURED in the step that ends here, and start the next step."""
        spent = self._spent
        whole = time_when_done(self.device) - self._began
        spent["forward_backward"] = spent["forward"] + spent["backward"]
        spent["rest"] = max(whole - sum(spent[phase] for phase in PHASES), 0.0)
        self.restart()
        return list(spent.values())

    def detach(self) -> None:
        if self.trainer.profiler is self:  # a callback may have set another one
            self.trainer.profiler = self._before
        self._handle.remove()

    def start(self, action_name: str) -> None:
        name = action_name.rpartition(".")[2]
        if name in ACTIONS and self.trainer.training:
            self._begun[name] = time_when_done(self.device)

    def stop(self, action_name: str) -> None:
        issued = time.perf_counter()  # the host is done; the device may still compute
        name = action_name.rpartition(".")[2]
        if name == "on_before_optimizer_step":  # the last hook before the update
            self._begun["optimizer"] = time_when_done(self.device)
        if name not in self._begun:
            return
        began = self._begun.pop(name)
        seconds = time_when_done(self.device) - began
        if name == "backward":
            waited = self.wait()
            self._spent["communication"] += waited
            seconds -= waited
        phase = ACTIONS[name]
        self._spent[phase] += seconds
        if phase in ("forward", "backward"):
            self._spent["launch"] += min(issued - began, seconds)

    def _on_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if "optimizer" in self._begun:
            self._spent["optimizer"] += time_when_done(self.device) - self._begun.pop("optimizer")

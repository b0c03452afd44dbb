"""Measures where the time of a step goes, in a short window near the start of training."""

import statistics
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from torch.optim import Optimizer

from app.parallel import SplitForward
from app.record import PHASES, Phases, RankTime

PARTS = ("data", "forward", "backward", "communication", "optimizer", "launch")


class StepProfile(Callback):
    """Times the phases of 20 steps after the first 5, and gives their medians to the run record.

    Phases of rank zero's step, which add up to the whole of it:

    * data: waiting for the batch, moving it to the device, augmenting and normalising it
    * forward_backward: the model's step (forward) and its backward pass; launch is the part of both in which the host
      was still handing out work, all of it on a CPU: on a GPU that is nearly idle, both are nearly the same
    * communication: what the step waits for other ranks after its last gradient is ready; what overlaps with
      the backward pass costs nothing and is not seen. Under dp: scattering the batch, copying the model and
      gathering the outputs; the gradients that dp adds up during the backward pass are not told apart from it.
      The agreement of the ranks whether to stop belongs to it, too.
    * optimizer: its update
    * rest: everything else, such as metrics, logging and Python between the calls

    The device is synchronised at each border, inside of this window only.
    """

    skipped, window = 5, 20

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []
        self._seen = 0
        self._began = 0.0
        self._watch: _Stopwatch | None = None
        self._ended_now = False

    @property
    def timing(self) -> bool:
        """Whether timing has disturbed the step that ends now: on a CPU it does not."""
        return self._watch is not None and self._watch.cuda and (self._watch.attached or self._ended_now)

    @property
    def time_per_step(self) -> Phases | None:
        """Median milliseconds of each phase; None when training was too short."""
        if not self._steps:
            return None
        phases: dict[str, Any] = {
            name: round(1000 * statistics.median(step[name] for step in self._steps), 4) for name in NAMES
        }
        return Phases(n=len(self._steps), **phases)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out what is between epochs."""
        self._begin()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out validation."""
        self._begin()

    def _begin(self) -> None:
        if self._watch is not None and self._watch.attached:
            self._watch.take()
            self._began = self._watch.now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step; begin to time after the first ones, and end after the last."""
        self._seen += 1
        self._ended_now = False
        watch = self._watch
        if watch is None:
            alone = isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]
            if alone and self._seen == self.skipped:
                self._watch = watch = _Stopwatch(trainer)
                watch.attach()
        elif watch.attached:
            whole = watch.now() - self._began
            spent = watch.take()
            rest = max(whole - sum(spent[name] for name in PHASES if name in spent), 0.0)
            self._steps.append({**spent, "rest": rest})
            if len(self._steps) == self.window:
                watch.detach()
                self._ended_now = True
        if watch is not None and watch.attached:
            self._began = watch.now()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a window that training has not filled."""
        if self._watch is not None:
            self._watch.detach()
            self._watch = None


NAMES = (*PHASES, "forward", "backward", "launch")


def phases_of_windows(profiled: Phases, step: float, rank: RankTime | None) -> Phases:
    """Divide the step time of the throughput's windows among its phases, in milliseconds.

    Args:
        profiled: Median of each phase over a few profiled steps.
        step: Median step time in the windows.
        rank: Rank zero's median times over all windows, or None without other ranks. They replace the profiled data and
            communication, because a few steps say little about waiting for other ranks.
    """
    known = {"data": rank.data, "communication": rank.wait} if rank and rank.data + rank.wait < step else {}
    scale = (step - sum(known.values())) / sum(getattr(profiled, phase) for phase in PHASES if phase not in known)
    scaled = {name: getattr(profiled, name) * scale for name in NAMES} | known
    return Phases(n=profiled.n, **{name: round(value, 4) for name, value in scaled.items()})


class _Stopwatch(PassThroughProfiler):
    """Stands in for the trainer's profiler, which Lightning tells when each part of a step begins and ends."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer
        self.device = trainer.strategy.root_device
        self.cuda = self.device.type == "cuda"
        self.attached = False
        self._handles: list[Any] = []
        self._begun: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._last_gradient = 0.0
        self._ready = torch.cuda.Event(enable_timing=True) if self.cuda else None
        self._replicas: list[float] = []

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def take(self) -> dict[str, float]:
        """Return the seconds of the phases in the step that ends here, and begin anew."""
        spent = {name: self._spent.get(name, 0.0) for name in PARTS}
        self._spent = {}
        return {**spent, "forward_backward": spent["forward"] + spent["backward"]}

    def _add(self, phase: str, seconds: float) -> None:
        self._spent[phase] = self._spent.get(phase, 0.0) + seconds

    # -- what is watched ------------------------------------------------------------------------------------

    def attach(self) -> None:
        self.attached = True
        self._before, self.trainer.profiler = self.trainer.profiler, self  # type: ignore[attr-defined]
        for optimizer in self.trainer.optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._on_stepped))
        module = self.trainer.lightning_module
        strategy = self.trainer.strategy
        if isinstance(strategy, SplitForward) and len(strategy.parallel_devices) > 1:
            assert strategy.replica is not None
            self._handles += [
                module.register_forward_pre_hook(self._on_scatter),
                strategy.replica.register_forward_pre_hook(self._on_replica),
                strategy.replica.register_forward_hook(self._on_replica),
                module.register_forward_hook(self._on_gathered),
            ]
        if self.trainer.world_size > 1:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def detach(self) -> None:
        if self.attached:
            self.attached = False
            self.trainer.profiler = self._before  # type: ignore[attr-defined]
            for handle in self._handles:
                handle.remove()

    def start(self, action_name: str) -> None:
        name = action_name.rsplit(".", 1)[-1]
        if name in _ACTIONS and self.trainer.training:
            self._begun[name] = self.now()

    def stop(self, action_name: str) -> None:
        name = action_name.rsplit(".", 1)[-1]
        if name == "on_before_optimizer_step":  # of the module, after those of the callbacks: the update follows
            self._begun["optimizer"] = self.now()
        if name not in _ACTIONS or name not in self._begun:
            return
        launched = time.perf_counter()  # the device may go on
        waited = self._waited() if name == "backward" else 0.0
        began = self._begun.pop(name)
        self._add(_ACTIONS[name], self.now() - began - waited)
        self._add("communication", waited)
        if _ACTIONS[name] in ("forward", "backward"):
            self._add("launch", max(launched - began - (0.0 if self.cuda else waited), 0.0))

    def _waited(self) -> float:
        """Measure the seconds from the last gradient to the end of the backward pass, where ranks add up gradients."""
        if self.cuda and self._last_gradient:
            assert self._ready is not None
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            torch.cuda.synchronize(self.device)  # of all streams: the gradient may have come on another one
            waited = self._ready.elapsed_time(end) / 1000
        else:
            waited = time.perf_counter() - self._last_gradient if self._last_gradient else 0.0
        self._last_gradient = 0.0
        return waited

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter()
        if self._ready is not None:
            self._ready.record()

    def _on_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        captured = self.cuda and torch.cuda.is_current_stream_capturing()  # in a graph, where nothing may wait
        if "optimizer" in self._begun and not captured:
            self._add("optimizer", self.now() - self._begun.pop("optimizer"))

    def _on_scatter(self, *_: Any) -> None:
        if self.trainer.training:
            self._begun["dp"] = self.now()
            self._replicas = []

    def _on_replica(self, *_: Any) -> None:
        if self.cuda:
            torch.cuda.synchronize()  # of this thread's device
        self._replicas.append(time.perf_counter())

    def _on_gathered(self, *_: Any) -> None:
        if "dp" not in self._begun:
            return
        overhead = self.now() - self._begun.pop("dp") - (max(self._replicas) - min(self._replicas))
        self._add("communication", overhead)
        for phase in ("forward", "launch"):  # it is inside of the step
            self._add(phase, -overhead)


_ACTIONS = {
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "training_step": "forward",
    "backward": "backward",
    "agree": "communication",
}

"""Measurement of throughput: samples per second over logging windows."""

import math
import time

from lightning.pytorch import Trainer

from app.modules.sums import log_window
from app.monitor.series import Series
from app.system.machine import time_when_done


class Windows:
    """Samples/s of all ranks over windows of `log_every_n_steps` batches, or of an epoch.

    The device is synchronised only at the end of a window. Validation is excluded.

    Args:
        warmup_epochs: Number of first epochs whose windows are not kept.

    Attributes:
        rates: Samples/s of each window after the run's first window and `warmup_epochs` epochs.
        samples_per_step: Samples per batch of the same windows.
        epoch_rates: Samples/s of all windows of the epoch.
        course: Samples/s of all windows over the seconds since the first step.
        rate: Samples/s of the last window; None before the first window's end.
        first_step: Time of the first step's start, in seconds; None before.
        last_step: Time of the last step's end, in seconds.
    """

    def __init__(self, warmup_epochs: int) -> None:
        self._warmup_epochs = warmup_epochs
        self.rates: list[float] = []
        self.samples_per_step: list[float] = []
        self.epoch_rates: list[float] = []
        self.course = Series()
        self.rate: float | None = None
        self.first_step: float | None = None
        self.last_step = 0.0
        self._first_batch = 0
        self._epoch_start = 0.0
        self._length = 1.0

    def begin_training(self, trainer: Trainer) -> None:
        """Start the clock at the first step's start."""
        self.first_step = time.perf_counter()
        self._first_batch = _batches(trainer)
        if self._epoch_start == 0.0:  # a resume within an epoch begins no epoch
            self.begin_epoch(trainer)

    def begin_epoch(self, trainer: Trainer) -> None:
        """Start an epoch and its first window."""
        self._length = min(log_window(trainer), trainer.num_training_batches)
        self._epoch_start = time.perf_counter()
        self.epoch_rates = []
        self._begin_window(self._epoch_start)

    def end_epoch(self, trainer: Trainer) -> float:
        """Return the seconds of the epoch."""
        self.last_step = time_when_done(trainer.strategy.root_device)
        return self.last_step - self._epoch_start

    def interrupt(self, trainer: Trainer) -> None:
        """Drop the open window, and start another one."""
        self._begin_window(time_when_done(trainer.strategy.root_device))

    def _begin_window(self, now: float) -> None:
        self._start = now
        self._samples = 0
        self._steps = 0

    def add_step(self, trainer: Trainer, samples: int) -> None:
        """Count a step that has ended; at the window's last step, compute its samples/s.

        Args:
            trainer: The trainer.
            samples: Samples of all ranks; 0 if unknown.
        """
        self._samples += samples
        self._steps += 1
        self.last_step = time.perf_counter()
        if self._steps < self._length:
            return
        now = time_when_done(trainer.strategy.root_device)
        self.last_step = now
        if self._samples:
            assert self.first_step is not None
            is_first = self.rate is None
            self.rate = self._samples / (now - self._start)
            self.epoch_rates.append(self.rate)
            self.course.add(now - self.first_step, self.rate)
            if not is_first and trainer.current_epoch >= self._warmup_epochs:
                self.rates.append(self.rate)
                self.samples_per_step.append(self._samples / self._steps)
        self._begin_window(now)

    @property
    def seconds(self) -> float:
        """Seconds from the first step's start to the last step's end."""
        if self.first_step is None:
            return 0.0
        return max(self.last_step - self.first_step, 0.0)

    def time_left(self, trainer: Trainer) -> float | None:
        """Estimate the seconds to the end of training, validation included; None if unknown."""
        by_epochs = (trainer.max_epochs or -1) * trainer.num_training_batches
        by_steps = trainer.max_steps * trainer.accumulate_grad_batches
        batches = min((limit for limit in (by_epochs, by_steps) if limit > 0), default=math.inf)
        done = _batches(trainer)
        if self.first_step is None or batches == math.inf or done <= self._first_batch:
            return None
        seconds = time.perf_counter() - self.first_step
        return (batches - done) * seconds / (done - self._first_batch)


def _batches(trainer: Trainer) -> int:
    """Return the number of training batches of all epochs so far."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)

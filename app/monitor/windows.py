"""Measurement of throughput: samples per second over logging windows."""

import math
import time

from lightning import Trainer

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
        # a run that resumes at an epoch's end, before its validation, begins neither epoch nor step
        self.last_step = self._epoch_start = time.perf_counter()
        self._steps_before = 0

    def begin_training(self, trainer: Trainer) -> None:
        """Start the clock at the first step's start."""
        self._steps_before = trainer.global_step
        self.begin_epoch(trainer)  # a resume within an epoch has begun none
        self.first_step = self.last_step = self._epoch_start

    def begin_epoch(self, trainer: Trainer) -> None:
        """Start an epoch and its first window."""
        self._length = min(log_window(trainer), trainer.num_training_batches)
        self.epoch_rates = []
        self.begin_window(trainer)
        self._epoch_start = self._start

    def end_epoch(self, trainer: Trainer) -> float:
        """Return the seconds of the epoch."""
        self.last_step = time_when_done(trainer.strategy.root_device)
        return self.last_step - self._epoch_start

    def begin_window(self, trainer: Trainer) -> None:
        """Drop the open window, and start another one."""
        self._start = time_when_done(trainer.strategy.root_device)
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
        start = self._start
        samples = self._samples
        self.begin_window(trainer)
        self.last_step = self._start
        if samples:
            is_first = self.rate is None
            self.rate = samples / (self._start - start)
            self.epoch_rates.append(self.rate)
            assert self.first_step is not None
            self.course.add(self._start - self.first_step, self.rate)
            if not is_first and trainer.current_epoch >= self._warmup_epochs:
                self.rates.append(self.rate)
                self.samples_per_step.append(samples / self._length)

    def time_left(self, trainer: Trainer) -> float | None:
        """Estimate the seconds to the end of training, validation included; None if unknown."""
        total = trainer.estimated_stepping_batches
        done = trainer.global_step - self._steps_before
        if self.first_step is None or done <= 0 or not trainer.global_step < total < math.inf:
            return None
        seconds = time.perf_counter() - self.first_step
        return (total - trainer.global_step) * seconds / done

"""Signals (Ctrl-C, SIGTERM, SLURM's warning): training stops after the current step and saves a checkpoint.

Signal handlers only set a flag. With several ranks, all stop at the same step, one step later, so that no rank blocks
in a collective call.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed
from torch.utils.data import DataLoader

from app.data.sources import work_apart
from app.launch.agree import host_group
from app.launch.cluster_environment import in_slurm_job
from app.launch.failures import leave_nccl
from app.launch.process import heard, is_worker
from app.system.lightning_patches import leave_out_sigterm_broadcast, signal_connector
from app.system.patches import expects

CAUSES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
GRACE = 5.0  # seconds for the main thread to handle a signal; afterwards, the rank aborts NCCL
IN_SLURM = CAUSES | {signal.SIGUSR1: "SIGUSR1"}  # SLURM's warning before the job ends: `--signal=SIGUSR1@90`


@expects(f"{_SignalConnector.__module__}:_SignalConnector.register_signal_handlers")
class Signals(_SignalConnector):
    """Signal connector that records SIGINT and SIGTERM during training. Outside training, they end the process at once.

    Replaces Lightning's connector, whose handler makes a collective call that other ranks do not join.

    Python runs no handler while the main thread blocks on a device that waits for another rank. In this case, a
    second thread aborts NCCL after `GRACE` seconds.

    Attributes:
        noted: Number of the signal that this process received, or 0.
        stopped_by: Number of the signal that stopped all ranks, or 0.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.noted = self.stopped_by = self._process = self._writer = 0

    def register_signal_handlers(self) -> None:
        """Install the handlers for training. Lightning calls this in every process; `teardown` undoes it."""
        if self.trainer.state.fn != TrainerFn.FITTING or threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        numbers = heard(IN_SLURM if in_slurm_job() else CAUSES)
        super().register_signal_handlers()  # saves the current handlers for `teardown`
        for number in numbers:
            signal.signal(number, self._note)
        if self.trainer.strategy.root_device.type == "cuda" and self.trainer.world_size > 1:
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))  # workers must not use the pipe
            threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def teardown(self) -> None:
        """Restore the earlier handlers, and end the thread."""
        super().teardown()
        if self._writer:
            signal.set_wakeup_fd(-1)
            os.close(self._writer)
            self._writer = 0

    def _watch(self, reader: int) -> None:
        with open(reader, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] not in IN_SLURM:
                    continue
                time.sleep(GRACE)
                if not self.noted and self._writer:
                    leave_nccl()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader's worker, forked with this handler
            return
        # a launcher forwards signals, so that one Ctrl-C may arrive twice
        has_launcher = is_worker() or multiprocessing.parent_process() is not None
        if self.noted:
            # an agent forwards a first Ctrl-C as SIGINT, a second one as SIGTERM
            if number != self.noted if has_launcher else number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.noted = number
        if number == signal.SIGINT and self.trainer.is_global_zero:
            # not print(), because the signal may have interrupted another print()
            os.write(2, b"\nstopping after this step, with a checkpoint (Ctrl-C again: at once)\n")


class StopTogether(Callback):
    """Callback that stops all ranks at the same step after any rank received a signal.

    A single process stops after the current step. Several ranks start an all-reduce after each step and read its result
    after the next step, so that no rank waits; they stop one step later. The all-reduce runs on the host, so that the
    device is not synchronized.

    Args:
        timeout: Seconds to wait for another rank's answer.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timedelta(seconds=timeout)
        self._group: Any = None
        self._pending: tuple[np.ndarray, Any] | None = None  # buffer and handle of the pending all-reduce

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the all-reduce. Disable Lightning's SIGTERM broadcast, which raises without saving a checkpoint."""
        leave_out_sigterm_broadcast(trainer)
        self._pending = None
        if trainer.world_size > 1:
            self._group = host_group(self.timeout)
        loader = trainer.train_dataloader
        if isinstance(loader, DataLoader):  # workers of a user's loader must not receive an agent's signals
            loader.worker_init_fn = partial(_work_apart, loader.worker_init_fn)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step, stop training if any rank received a signal."""
        has_stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if has_stepped and self._agree(trainer):
            stop_training(trainer, batch_idx)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Abort NCCL first, because moving the model to the host would wait for other ranks."""
        leave_nccl()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree on signals that arrived during the last step or validation, so that all or no ranks start the test."""
        self._agree(trainer, at_once=True)

    def _agree(self, trainer: Trainer, at_once: bool = False) -> int:
        """Return the lowest signal that any rank received, or 0. Collective.

        With several ranks, the result lags by one step: it covers signals up to the previous step. With `at_once`, wait
        for an all-reduce that covers signals up to now.
        """
        signals: Signals = signal_connector(trainer)
        if trainer.world_size == 1:
            signals.stopped_by = signals.noted
            return signals.stopped_by
        with trainer.profiler.profile("agree"):  # type: ignore[attr-defined]
            signals.stopped_by = self._answer()
            if not signals.stopped_by:
                lowest = np.array([signals.noted or signal.NSIG])  # read `noted` once: it may change at any time
                operation, shared = distributed.ReduceOp.MIN, torch.from_numpy(lowest)
                self._pending = lowest, distributed.all_reduce(shared, operation, self._group, async_op=True)
                if at_once:
                    signals.stopped_by = self._answer()
        return signals.stopped_by

    def _answer(self) -> int:
        """Wait for the pending all-reduce, and return the lowest signal or 0."""
        if self._pending is None:
            return 0
        (lowest, work), self._pending = self._pending, None
        work.wait()
        return int(lowest[0]) % signal.NSIG


@expects("lightning.pytorch.callbacks.early_stopping:EarlyStopping._check_on_train_epoch_end")
def stop_training(trainer: Trainer, batch_idx: int) -> None:
    """Stop training after the current step, so that a resumed run neither repeats nor skips work."""
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
    if trainer.is_last_batch or (batch_idx + 1) % (trainer.val_check_batch or 1) == 0:
        return  # run the validation that is due, because a resumed run would skip it
    trainer.limit_val_batches = 0
    for callback in trainer.early_stopping_callbacks:  # early stopping would look for the skipped validation's metric
        callback._check_on_train_epoch_end = False


def _work_apart(then: Callable[[int], None] | None, worker: int) -> None:
    """Move a loader's worker into its own process group, then call the user's `worker_init_fn`."""
    work_apart(worker)
    if then is not None:
        then(worker)


def cause(trainer: Trainer) -> str | None:
    """Return the name of the signal that stopped training, such as `Ctrl-C`, or None."""
    number = getattr(signal_connector(trainer), "stopped_by", 0)
    return IN_SLURM[number] if number else None

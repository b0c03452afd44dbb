"""Signals (Ctrl-C, SIGTERM, SIGHUP, SLURM's warning): training stops with a checkpoint.

Signal handlers only set a flag, and training stops after the step. With several ranks, all stop at
the same step, one step later, so that no rank blocks in a collective call.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed
from torch.utils.data import DataLoader

from app.data.sources import work_apart
from app.errors import CAUSES, ExitStatus
from app.launch import watchdog
from app.launch.agree import host_group
from app.launch.failures import leave_nccl
from app.launch.process import handle, is_task_of_srun, is_worker, stop_only_once
from app.record import mark_ended
from app.system.lightning_patches import do_nothing, in_window, leave_out_sigterm_broadcast
from app.system.patches import expects

# seconds without progress after a signal, before a rank ends; torchrun kills its ranks after 30 s
GRACE = 20
START_GRACE = 3  # the same before training, when there is nothing to save
PERIOD = 0.1  # seconds between two agreements on signals
MOST_STEPS = 16  # between two agreements, because later steps may take longer
# SLURM sends SIGUSR1 before the job ends: `--signal=SIGUSR1@90`
IN_SLURM = CAUSES | {signal.SIGUSR1: "SIGUSR1"}


@expects(
    "lightning.pytorch.trainer.trainer:Trainer._signal_connector",
    f"{_SignalConnector.__module__}:_SignalConnector.register_signal_handlers",
)
class Signals(_SignalConnector):
    """Signal connector that records signals during training; at other times, they end the process.

    Replaces Lightning's connector, whose SIGTERM handler makes a collective call that other ranks
    do not join. Source: signal_connector.py, `_sigterm_notifier_fn`. At an upgrade: does Lightning
    call only the connector's `register_signal_handlers` and `teardown`?

    Attributes:
        noted: Number of the signal that this process received, or 0.
        stopped_by: Number of the signal that stopped all ranks, or 0.
        member: This rank's membership in a live run, or None.
        regroups: Whether all ranks of a live run meet after this step.
    """

    member: Any = None
    regroups = False

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.noted = 0
        self.stopped_by = 0
        self._process = 0

    @classmethod
    def put_into(cls, trainer: Trainer) -> None:
        """Replace a Trainer's signal connector by an instance of this class."""
        trainer._signal_connector = cls(trainer)

    @staticmethod
    def of(trainer: Trainer) -> Any:
        """Return the Trainer's signal connector."""
        return trainer._signal_connector

    def register_signal_handlers(self) -> None:
        """Install the handlers for training. Lightning calls this in each process."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        self._process = os.getpid()
        super().register_signal_handlers()  # saves the current handlers for `teardown`
        handle(IN_SLURM if is_task_of_srun() else CAUSES, self._note)

    def teardown(self) -> None:
        """Restore the earlier handlers; after SIGTERM or SIGHUP, ignore further ones."""
        super().teardown()
        if self.noted in (signal.SIGTERM, signal.SIGHUP):
            stop_only_once()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader's worker, forked with this handler
            return
        if self.noted:
            is_second = number == signal.SIGINT
            # a launcher forwards signals, so that one Ctrl-C may arrive twice. An agent forwards a
            # first Ctrl-C as SIGINT, a second one as SIGTERM
            if is_worker() or multiprocessing.parent_process() is not None:
                is_second = {number, self.noted} == {signal.SIGINT, signal.SIGTERM}
            if is_second:
                raise KeyboardInterrupt
            return
        self.noted = number
        if number == signal.SIGINT and self.trainer.is_global_zero:
            # not print(), because the signal may have interrupted another print()
            os.write(2, b"\nstopping after this step, with a checkpoint (Ctrl-C again: at once)\n")


@contextmanager
def ended_in_time() -> Iterator[None]:
    """End this rank if, after a signal, it makes no progress for `GRACE` seconds and does not save.

    Ranks may wait for each other in different collective calls, where Python runs no handler. A
    second thread therefore reads the signals from Python's wakeup pipe.
    """
    if watchdog.heartbeat is None:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # workers must not use the pipe
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
    over = threading.Event()
    arguments = (reader, watchdog.heartbeat, over)
    threading.Thread(target=_end_in_time, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(-1)
        os.close(writer)  # ends the thread, which leaves the pipe open for further signals


def _end_in_time(reader: int, beat: watchdog.Heartbeat, over: threading.Event) -> None:
    number = 0
    while number not in CAUSES:
        received = os.read(reader, 1)
        if not received:
            return
        number = received[0]
    end = ExitStatus.stopped_by(CAUSES[number])
    still = 0
    limit = GRACE
    last = beat.values[:3].tolist()
    while still <= limit:
        if over.wait(1.0):
            return
        now = beat.values[:3].tolist()
        limit = START_GRACE if now[1] == watchdog.SET_UP else GRACE
        still += 1
        if now != last or now[1] == watchdog.ELSEWHERE or _is_saving():
            still = 0
        last = now
    message = f"{end.reason}: no progress for {still} s, so this rank ends without saving"
    print(message, file=sys.stderr)
    if beat.rank == 0:
        mark_ended(str(beat.folder.parent), end)
    os._exit(end.code)


def _is_saving() -> bool:
    """Return whether the main thread saves a checkpoint, or waits for the rank that saves it."""
    frame = sys._current_frames()[threading.main_thread().ident]  # type: ignore[index]
    return Trainer.save_checkpoint.__code__ in [inner.f_code for inner, _ in walk_stack(frame)]


class StopTogether(Callback):
    """Callback that stops all ranks at the same step after any rank received a signal.

    A single process stops after the current step. Several ranks start an all-reduce ten times a
    second, but at least every 16 steps and at most after each step. They read its result after the
    next step, so that no rank waits, and then stop. The all-reduce runs on the host, so that the
    device is not synchronized. It also tells all ranks after how many steps to start the next one.

    Args:
        timeout: Seconds to wait for another rank's answer.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the all-reduce, and disable Lightning's broadcast of SIGTERM."""
        leave_out_sigterm_broadcast(trainer)
        self._work: Any = None  # the pending all-reduce
        self._left = 1  # number of steps until the next one
        self._last = time.monotonic()  # when the last step ended
        if trainer.world_size > 1:
            self._group = host_group(self.timeout)
        loader = trainer.train_dataloader
        if isinstance(loader, DataLoader):
            # workers of a user's loader must not receive an agent's signals
            loader.worker_init_fn = partial(work_apart, then=loader.worker_init_fn)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step, stop training if any rank received a signal."""
        if not in_window(trainer) and self._agree(trainer):
            stop_training(trainer, batch_idx)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Abort NCCL first, because moving the model to the host would wait for other ranks."""
        leave_nccl()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree on signals since the last step, so that all ranks start the test, or none does."""
        self._agree(trainer, at_once=True)

    def _agree(self, trainer: Trainer, at_once: bool = False) -> int:
        """Return the highest signal that any rank received, or 0. Collective.

        With several ranks, the result covers signals up to the previous all-reduce. With `at_once`,
        wait for an all-reduce that covers signals up to now.
        """
        signals = Signals.of(trainer)
        mine = [signals.noted, 0]
        if signals.member is not None:
            mine = signals.member.shared(signals.noted)
        if trainer.world_size == 1:
            signals.stopped_by, signals.regroups = mine
            return signals.stopped_by
        with trainer.profiler.profile("agree"):  # type: ignore[attr-defined]
            self._read(signals)
            self._left -= 1
            now = time.monotonic()
            steps = min(max(int(PERIOD / (now - self._last)), 1), MOST_STEPS)
            self._last = now
            is_due = at_once or self._left == 0
            if is_due and not signals.stopped_by and not signals.regroups:
                self._highest = torch.tensor([*mine, -steps])
                self._work = distributed.all_reduce(
                    self._highest, distributed.ReduceOp.MAX, self._group, async_op=True
                )
                if at_once:
                    self._read(signals)
        return signals.stopped_by

    def _read(self, signals: Signals) -> None:
        """Wait for the pending all-reduce, and store its result."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            signals.stopped_by, signals.regroups, steps = self._highest.tolist()
            self._left = -steps


def stop_training(trainer: Trainer, batch_idx: int) -> None:
    """Stop after the current step, so that a resumed run neither repeats nor skips work.

    `app.command.checkpoints.RunCheckpoint` then saves `last.ckpt`.
    """
    trainer.should_stop = True
    trainer.fit_loop.min_epochs = None
    trainer.fit_loop.epoch_loop.min_steps = None
    if trainer.is_last_batch or (batch_idx + 1) % (trainer.val_check_batch or 1) == 0:
        return  # run the validation that is due, because a resumed run would skip it
    trainer.limit_val_batches = 0
    for callback in trainer.early_stopping_callbacks:
        # it would check the skipped validation's metric
        callback.on_train_epoch_end = do_nothing  # type: ignore[method-assign, assignment]


def cause(trainer: Trainer) -> str | None:
    """Return the name of the signal that stopped training, such as `Ctrl-C`, or None."""
    return IN_SLURM.get(getattr(Signals.of(trainer), "stopped_by", 0))

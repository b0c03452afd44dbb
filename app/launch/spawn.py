"""Launcher of `ddp_spawn`, `ddp_fork` and `ddp_notebook`: if one process fails, the others end."""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import connection, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from lightning import Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch.distributed.elastic.multiprocessing import ProcessFailure

from app.errors import CAUSES, EXIT_CODES, RankError, UserError
from app.launch.failures import (
    callstack,
    error_file,
    explain,
    explaining_errors,
    root_cause,
    stopped,
)
from app.launch.process import SPAWNED, end_with_parent, handle, restored_signals, stop_only_once
from app.launch.rendezvous import host_store
from app.launch.signals import Signals, ended_in_time
from app.launch.watchdog import watched
from app.system.addresses import use_loopback
from app.system.lightning_patches import hide_lines
from app.system.patches import expects
from app.system.torch_patches import end_process_group
from app.system.tracebacks import MADE_BY, users_part

SHUTDOWN = 30  # seconds that the other processes have to end after a failure, as in torch elastic
_LAUNCHER = f"{_MultiProcessingLauncher.__module__}:_MultiProcessingLauncher"


@expects(f"{_LAUNCHER}.launch", f"{_LAUNCHER}.kill", f"{_LAUNCHER}.procs")
class SpawnLauncher(_MultiProcessingLauncher):
    """Lightning's multiprocessing launcher, which also forwards signals to its processes.

    The first signal ends the processes cleanly, a second Ctrl-C at once.

    Attributes:
        timeout: Seconds that ranks wait for each other; None for a single rank.
        stacks: Folder for the stacks of hung ranks, or None.
        stopped_by: Number of the signal that this process received, or 0.
    """

    def __init__(self, strategy: Any, start_method: Any, timeout: float | None) -> None:
        self.timeout = timeout
        self.stopped_by = 0
        self.stacks: Path | None = None
        self._error_file = ""  # path of the processes' error files, with {} for a process's index
        self.made_by = MADE_BY  # an attribute, so that pickle copies MADE_BY into the processes
        self.place = strategy.cluster_environment
        super().__init__(strategy, start_method)

    def launch(
        self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Start the processes and wait for them.

        Raises:
            SystemExit: When a signal killed the processes.
            RankError: When a rank failed.
            UserError: When a rank raised a UserError, or model or data cannot be pickled.
        """
        self._processes: list[Any] = []
        # failed processes by index, in the order of their ends
        self._failures: dict[int, ProcessFailure] = {}
        os.environ[SPAWNED] = "1"
        with tempfile.TemporaryDirectory(prefix="data-parallel-lab-") as folder, restored_signals():
            self._error_file = f"{folder}/error_{{}}.json"
            handle(CAUSES, self._forward)
            # the tracker inherits this mask, so that it does not end with the terminal. Block the
            # other signals later, because the tracker's start unblocks them
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
            resource_tracker.ensure_running()
            # block signals, because a process that still imports would print a traceback on Ctrl-C;
            # the setter of `procs` unblocks them
            signal.pthread_sigmask(signal.SIG_BLOCK, CAUSES)
            try:
                results = super().launch(self._rank, function, *args, trainer=trainer, **kwargs)
            except Exception as error:
                raise self._explained(error) from None
            finally:
                del os.environ[SPAWNED]
                if self.stopped_by:
                    stop_only_once()
        if self.stopped_by and trainer:
            Signals.of(trainer).stopped_by = self.stopped_by
        return results

    def _explained(self, error: Exception) -> BaseException:
        """Kill all processes, and return the exception to raise for a failed launch."""
        for process in multiprocessing.active_children():
            process.kill()
        signal_name = CAUSES.get(self.stopped_by)
        if self._failures:
            rank, failure = root_cause(self._failures)
            signal_name = signal_name or stopped(failure)
        if signal_name:
            return SystemExit(EXIT_CODES[signal_name])
        if self._failures:
            cause = explain(rank, failure)
            if type(cause) is RankError:  # the stack of a rank that lost another one shows no cause
                print(users_part(callstack(failure)) or "", end="", file=sys.stderr)
            return cause
        if "pickle" in str(error).lower():
            return UserError(
                f"ddp_spawn cannot pickle model and data for its processes ({error}): use "
                "--trainer.strategy ddp, or define its class or function at the top level of a "
                "module"
            )
        return error

    @property
    def procs(self) -> list[Any]:
        """The processes; Lightning sets this after all have started, and then joins them."""
        return self._processes

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self._processes = processes
        if processes:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUSES)
            if self.stopped_by:
                self.kill(signal.SIGKILL)
            self._wait()

    def _wait(self) -> None:
        """Wait until all processes end. If one fails, or ends before its run, end the others.

        Lightning would not notice an early end with exit code 0, as by `os._exit(0)`.

        Raises:
            ChildProcessError: When a process has failed.
        """
        running = {process.sentinel: index for index, process in enumerate(self._processes)}
        timeout = None
        while running:
            ended = connection.wait(running, timeout)
            for sentinel in ended:
                index = running.pop(sentinel)
                process = self._processes[index]
                process.join()
                if process.exitcode or not self._mark(index).exists():
                    self._failures[index] = ProcessFailure(
                        index, process.pid, process.exitcode, self._error_file.format(index)
                    )
                    timeout = SHUTDOWN
            if self._failures:
                self.kill(signal.SIGTERM if ended else signal.SIGKILL)
        if self._failures:
            raise ChildProcessError

    def _mark(self, index: int) -> Path:
        """Return the file that a process creates at the end of the run."""
        return Path(self._error_file.format(index)).with_suffix(".ended")

    def _forward(self, number: int, frame: FrameType | None) -> None:
        # while the processes start, `procs` is empty, and `kill` has no effect; the setter of
        # `procs` kills them later
        if not self.stopped_by:
            self.stopped_by = number
            self.kill(number)
        elif number == signal.SIGINT:
            self.kill(signal.SIGKILL)

    def _rank(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run the rank in the new process. Unblock signals first, so that they end the process."""
        index = int(os.environ["LOCAL_RANK"])
        handle(CAUSES, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUSES)
        end_with_parent(multiprocessing.parent_process().pid)  # type: ignore[union-attr, arg-type]
        os.environ["TORCHELASTIC_ERROR_FILE"] = self._error_file.format(index)
        hide_lines()
        MADE_BY.update(self.made_by)
        try:
            with (
                error_file(),
                watched(self.timeout, self.stacks, index),
                ended_in_time(),
                explaining_errors(),
            ):
                if self.timeout is not None:
                    use_loopback()
                    if index == 0:  # torch's own store would listen on all addresses
                        place = self.place
                        self._store = host_store(place.main_address, place.main_port, self.timeout)
                result = function(*args, **kwargs)
        finally:
            end_process_group()
        self._mark(index).touch()
        return result

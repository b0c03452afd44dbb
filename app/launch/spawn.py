"""Launcher of `ddp_spawn`, `ddp_fork` and `ddp_notebook`. When one process fails or is stopped, all processes end."""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record

from app.errors import EXIT_CODES, UserError
from app.launch.failures import callstack, explain, explaining_errors, root_cause
from app.launch.process import SPAWNED, end_with_parent, heard, restored_signals
from app.launch.rendezvous import host_store
from app.launch.signals import CAUSES
from app.launch.watchdog import watched
from app.system import lightning_patches
from app.system.interconnect import use_loopback
from app.system.patches import expects
from app.system.tracebacks import MADE_BY, users_part

_LAUNCHER = f"{_MultiProcessingLauncher.__module__}:_MultiProcessingLauncher"


@expects(*(f"{_LAUNCHER}.{name}" for name in ("_wrapping_function", "_strategy", "_start_method", "launch", "kill")))
class SpawnLauncher(_MultiProcessingLauncher):
    """Lightning's multiprocessing launcher, which also forwards SIGINT and SIGTERM to its processes.

    The first signal ends the processes cleanly, a second Ctrl-C at once.

    Attributes:
        timeout: Seconds that ranks wait for each other; None for a single rank.
        stacks: Folder for the stacks of hung ranks, or None.
        stopped_by: Number of the signal that this process received, or 0.
    """

    def __init__(self, strategy: Any, start_method: Any, timeout: float | None) -> None:
        self.timeout, self.stopped_by = timeout, 0
        self.stacks: Path | None = None
        self._error_file = ""  # path of the processes' error files, with {} for a process's index
        self.made_by = MADE_BY  # an attribute, so that pickle copies MADE_BY into the processes
        super().__init__(strategy, start_method)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the processes and wait for them.

        Raises:
            KeyboardInterrupt: When Ctrl-C killed the processes.
            SystemExit: When SIGTERM killed the processes.
            RankError: When a rank failed.
            UserError: When a rank raised a UserError, or model or data cannot be pickled.
        """
        self._processes: list[Any] = []
        os.environ[SPAWNED] = "1"
        with tempfile.TemporaryDirectory(prefix="data-parallel-lab-") as folder, restored_signals():
            self._error_file = f"{folder}/error_{{}}.json"
            for number in heard(CAUSES) if threading.current_thread() is threading.main_thread() else ():
                signal.signal(number, self._forward)
            resource_tracker.ensure_running()  # before `pthread_sigmask`, because the tracker's start unblocks signals
            # block signals, because a process that still imports would print a traceback on Ctrl-C; the setter of
            # `procs` unblocks them
            signal.pthread_sigmask(signal.SIG_BLOCK, CAUSES)
            try:
                results = super().launch(function, *args, trainer=trainer, **kwargs)
            except Exception as error:
                raise self._explained(error) from (error if "APP_DEBUG" in os.environ else None)
            finally:
                del os.environ[SPAWNED]
        if self.stopped_by and trainer:
            lightning_patches.signal_connector(trainer).stopped_by = self.stopped_by
        return results

    def _explained(self, error: Exception) -> BaseException:
        """Kill all processes, and return the exception to raise for a failed launch."""
        failures = {
            index: ProcessFailure(index, process.pid, process.exitcode, self._error_file.format(index))
            for index, process in enumerate(self._processes)
            if process.exitcode
        }
        for process in multiprocessing.active_children():
            process.kill()
        if self.stopped_by:
            return KeyboardInterrupt() if self.stopped_by == signal.SIGINT else SystemExit(EXIT_CODES["SIGTERM"])
        if failures:
            rank, failure = root_cause(failures)
            cause = explain(rank, failure)
            if not isinstance(cause, UserError):
                print(users_part(callstack(failure)) or "", end="", file=sys.stderr)
            return cause
        if "pickle" in str(error).lower():
            remedy = "use --trainer.strategy ddp, or define its class or function at the top level of a module"
            return UserError(f"ddp_spawn cannot pickle model and data for its processes ({error}): {remedy}")
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

    def _forward(self, number: int, frame: FrameType | None) -> None:
        again = self.stopped_by and number == signal.SIGINT
        self.stopped_by = self.stopped_by or number
        # while the processes start, `procs` is empty, and `kill` has no effect; the setter of `procs` kills them later
        self.kill(signal.SIGKILL if again else number)

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        """Run the rank in the new process. Unblock signals first, so that they end the process."""
        for number in CAUSES:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUSES)
        end_with_parent(multiprocessing.parent_process().pid)  # type: ignore[union-attr, arg-type]
        os.environ["TORCHELASTIC_ERROR_FILE"] = self._error_file.format(process_idx)
        record(self._run)(process_idx, *args, **kwargs)

    def _run(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        strategy: Any = self._strategy
        os.environ["LOCAL_RANK"] = str(process_idx)
        lightning_patches.hide_lines()
        MADE_BY.update(self.made_by)
        with watched(self.timeout, self.stacks, process_idx), explaining_errors():
            if self.timeout is not None:
                use_loopback()
                if process_idx == 0:  # torch's own store would listen on all addresses
                    place = strategy.cluster_environment
                    self._store = host_store(place.main_address, place.main_port, self.timeout)
            super()._wrapping_function(process_idx, *args, **kwargs)

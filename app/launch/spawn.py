"""`ddp_spawn`, `ddp_fork`, `ddp_notebook`: Lightning's launcher, whose processes end together and in order."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from app.errors import EXIT_CODES, UserError
from app.launch.agree import begin_process_group
from app.launch.failures import explain, noticing_other_ranks, root_cause
from app.launch.process import end_with_parent
from app.launch.signals import CAUSES, Signals
from app.launch.watchdog import watched
from app.system import lightning_patches


class SpawnLauncher(lightning_patches.SpawnLauncher):
    """Starts the processes of a strategy, and tells them of SIGINT and SIGTERM.

    The first signal lets them end in order, the second Ctrl-C ends them.

    Attributes:
        timeout: Seconds for which the ranks wait for each other, or None where there is one.
        stopped_by: Number of the signal that this process got, or 0.
    """

    def __init__(self, strategy: Any, start_method: Any, timeout: float | None) -> None:
        self.timeout, self.stopped_by = timeout, 0
        self._folder = ""
        self._launches = 0
        self._processes: list[Any] = []
        super().__init__(strategy, start_method)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the processes and wait for them.

        Raises:
            KeyboardInterrupt: When they ended out of order after Ctrl-C.
            SystemExit: When they did so after SIGTERM.
            RankError: When one of them has failed.
            UserError: What a user did wrong, as one of them has found; or model or data cannot be pickled.
        """
        handlers = {}
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in CAUSES if signal.getsignal(number) is not signal.SIG_IGN]
            handlers = {number: signal.signal(number, self._tell) for number in heard}
        self._processes, self._launches = [], self._launches + 1
        resource_tracker.ensure_running()  # which would unblock them
        # a process that is still importing would report a Ctrl-C with a traceback; `procs` ends this
        before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUSES)
        try:
            with tempfile.TemporaryDirectory(prefix="data-parallel-lab-") as self._folder:
                results = self._launch(function, *args, trainer=trainer, **kwargs)
            signals = trainer and lightning_patches.signal_connector(trainer)
            if self.stopped_by and isinstance(signals, Signals):
                signals.stopped_by = self.stopped_by
            return results
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _launch(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().launch(*args, **kwargs)
        except (ProcessRaisedException, ProcessExitedException) as error:
            self._raise_stopped()
            raise explain(*root_cause(self._failures())) from (error if "APP_DEBUG" in os.environ else None)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self._kill()
            if "pickle" not in str(error).lower():
                raise
            raise UserError(
                f"ddp_spawn hands model and data to its processes as pickles, which fails here ({error}): use "
                "--trainer.strategy ddp, or define what is named at the top level of a module"
            ) from error
        except Exception:
            self._kill()
            self._raise_stopped()
            raise

    def _raise_stopped(self) -> None:
        if self.stopped_by == signal.SIGINT:
            raise KeyboardInterrupt from None
        if self.stopped_by == signal.SIGTERM:
            raise SystemExit(EXIT_CODES["SIGTERM"]) from None

    def _failures(self) -> dict[int, ProcessFailure]:
        first = self._strategy.node_rank * self._strategy.num_processes  # type: ignore[attr-defined]
        return {
            first + index: ProcessFailure(index, process.pid, process.exitcode, self._error_file(index))
            for index, process in enumerate(self._processes)
            if process.exitcode
        }

    def _error_file(self, index: int) -> str:
        return str(Path(self._folder, f"error_{index}.json"))

    def _kill(self) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    @property
    def procs(self) -> list[Any]:
        """The processes; Lightning sets them when it has started them all, and will wait for them."""
        return self._processes

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self._processes = processes
        if processes:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUSES)
            if self.stopped_by:
                self._kill()

    def _tell(self, number: int, frame: FrameType | None) -> None:
        again = self.stopped_by and number == signal.SIGINT
        self.stopped_by = self.stopped_by or number
        os.write(2, b"\nstopping (Ctrl-C again: at once)\n")
        for process in self._processes:  # none while they start: one that ends then would leave this one waiting
            if again:
                process.kill()
                continue
            if number == signal.SIGINT and process.pid is not None:  # one in training notes what it was
                os.kill(process.pid, signal.SIGINT)
            process.terminate()  # one that is starting ends, ignoring SIGINT

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        """Run in the new process: it may be ended from here on, and not by a Ctrl-C in the terminal."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUSES)
        end_with_parent()
        parent = multiprocessing.parent_process()
        assert parent is not None
        if not parent.is_alive():
            os._exit(1)
        os.environ["TORCHELASTIC_ERROR_FILE"] = self._error_file(process_idx)
        record(self._run)(process_idx, *args, **kwargs)

    def _run(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        strategy: Any = self._strategy
        os.environ["LOCAL_RANK"] = str(process_idx)
        with watched(self.timeout), noticing_other_ranks():
            if strategy.num_nodes > 1:
                assert self.timeout is not None
                rank, world_size = (n * strategy.num_processes for n in (strategy.node_rank, strategy.num_nodes))
                key = f"app/launch{self._launches}"
                begin_process_group(strategy, rank + process_idx, world_size, self.timeout, key)
            super()._wrapping_function(process_idx, *args, **kwargs)

"""Lightning's launchers, so that the processes of a run end together and in order."""

import contextlib
import multiprocessing
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import distributed

from app.errors import RankError, UserError
from app.launch.failures import lost, silent
from app.launch.process import PARENT, end_with_parent
from app.launch.signals import CAUSES, EXIT_CODES, Signals
from app.launch.watchdog import guarded
from app.system import lightning_patches
from app.system.torch_patches import abort_process_group

OnFailure = Callable[[Trainer, LightningModule, BaseException], None]
GRACE = 10.0  # seconds in which rank zero may notice by itself that another rank has failed


class ScriptLauncher(lightning_patches.ScriptLauncher):
    """Starts the processes of `ddp`.

    Attributes:
        on_failure: Notes in the run's record, if it has one, that another process has failed.
        timeout: Seconds for which other ranks wait for this one, or None where there are none.
    """

    on_failure: OnFailure | None = None
    timeout: float | None = None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the processes, of which this one is rank zero, and run the function in it.

        Raises:
            RankError: When another process has failed, and this one has lost the connection.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            threading.Thread(target=self._watch, args=(trainer,), daemon=True).start()
        lightning_patches.set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            first = PARENT in os.environ and self.cluster_environment.local_rank() == 1 and hasattr(os, "pidfd_open")
            with guarded(self.timeout), _noticing_the_end_of(self._rank(0)) if first else contextlib.nullcontext():
                return function(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit):
            self._end()
            raise
        except Exception as error:
            failed = self._explain(error)
            self._end()
            if failed is not None:
                raise failed from error
            raise

    def _rank(self, local_rank: int) -> int:
        return self.cluster_environment.node_rank() * self.num_processes + local_rank

    def _end(self) -> None:
        """End the other processes, before they complain that this one is gone, and this one's part in NCCL.

        Otherwise NCCL would wait, when this process exits, for what is under way between the others.
        Source: https://docs.pytorch.org/docs/stable/distributed.html#shutdown.
        """
        self.kill(signal.SIGKILL)
        self.procs.clear()  # ends the watch
        if distributed.is_initialized() and distributed.get_backend() == "nccl":
            abort_process_group()

    def _explain(self, error: Exception) -> RankError | None:
        """What another rank has done that this one fails in a communication."""
        if self.timeout is None or not (type(error) is RuntimeError or isinstance(error, distributed.DistError)):
            return None
        if gone := lost(str(error), self.cluster_environment):
            return self._failed(5.0) or gone
        hung = silent(str(error))
        return hung and (self._failed(1.0) or hung)

    def _failed(self, seconds: float) -> RankError | None:
        """The first other process that has failed, if one does within a time."""
        limit = time.monotonic() + seconds
        while True:
            for index, process in enumerate(self.procs):
                if process.poll():
                    return RankError.ended(self._rank(index + 1), process.pid, process.returncode)
            if time.monotonic() > limit:
                return None
            time.sleep(0.1)

    def _watch(self, trainer: Trainer) -> None:
        """End this process where another one has failed and it does not notice, as in a collective call of NCCL.

        In place of Lightning's watch, which ends it with SIGKILL: no word in the record, exit code 137.
        """
        live = True
        while live:
            live = any(process.poll() is None for process in list(self.procs))
            failed = self._failed(1.0)
            if failed is not None:
                time.sleep(GRACE)
                if self.procs:
                    print(f"error: {failed}", file=sys.stderr, flush=True)
                    if self.on_failure is not None:
                        self.on_failure(trainer, trainer.lightning_module, failed)
                    self.kill(signal.SIGKILL)
                    os._exit(failed.exit_code)

    def _call_children_scripts(self) -> None:
        """Start them deaf to signals that are sent to all: rank zero hears them, and they end with it.

        One that ended by itself while they meet would leave rank zero waiting. In training they hear SIGTERM.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUSES)
        os.environ[PARENT] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            del os.environ[PARENT]


class ProcessLauncher(lightning_patches.SpawnLauncher):
    """Starts the processes of `ddp_spawn` and `ddp_fork`, and tells them of SIGINT and SIGTERM.

    The first signal lets them end in order, the second Ctrl-C ends them.

    Attributes:
        timeout: Seconds for which the ranks wait for each other, or None where there is one.
    """

    timeout: float | None = None

    def __init__(self, *args: Any) -> None:
        self.stopped_by = 0
        self._starting = False
        super().__init__(*args)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the processes and wait for them.

        Raises:
            KeyboardInterrupt: When they ended out of order after Ctrl-C.
            SystemExit: When they did so after SIGTERM.
            RankError: When one of them was ended.
            UserError: When model or data cannot be pickled.
        """
        handlers = {}
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in CAUSES if signal.getsignal(number) is not signal.SIG_IGN]
            handlers = {number: signal.signal(number, self._tell) for number in heard}
        self._starting = True
        resource_tracker.ensure_running()  # which would unblock them
        # a process that is still importing would report a Ctrl-C with a traceback
        before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUSES)
        try:
            results = super().launch(function, *args, trainer=trainer, **kwargs)
        except Exception as error:  # a Ctrl-C is not raised here, but comes to _tell
            strategy: Any = self._strategy
            for process in multiprocessing.active_children():
                process.kill()
            if self.stopped_by == signal.SIGINT:
                raise KeyboardInterrupt from None
            if self.stopped_by == signal.SIGTERM:
                raise SystemExit(EXIT_CODES["SIGTERM"]) from None
            if "pickle" in str(error).lower() and isinstance(error, pickle.PicklingError | TypeError | AttributeError):
                raise UserError(
                    f"ddp_spawn hands model and data to its processes as pickles, which fails here ({error}): use "
                    "--trainer.strategy ddp, or define what is named at the top level of a module"
                ) from error
            if isinstance(error, torch.multiprocessing.ProcessExitedException):
                rank = strategy.node_rank * strategy.num_processes + error.error_index
                raise RankError.ended(rank, error.error_pid, error.exit_code) from error
            if isinstance(error, torch.multiprocessing.ProcessRaisedException):  # whose text is a traceback
                *earlier, failed = re.split(r"^(?=RuntimeError|torch\.distributed\.)", str(error), flags=re.MULTILINE)
                if self.timeout is None or not earlier:
                    raise
                if seen := lost(failed, strategy.cluster_environment) or silent(failed):
                    raise seen from error
            raise
        else:
            signals = trainer and lightning_patches.signal_connector(trainer)
            if self.stopped_by and isinstance(signals, Signals):
                signals.stopped_by = self.stopped_by
            return results
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "procs" and self._starting:  # launch has started them all, and will wait for them
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUSES)
            self._starting = False
            for process in multiprocessing.active_children() if self.stopped_by else ():
                process.kill()

    def _tell(self, number: int, frame: FrameType | None) -> None:
        again = self.stopped_by and number == signal.SIGINT
        self.stopped_by = self.stopped_by or number
        os.write(2, b"\nstopping (Ctrl-C again: at once)\n")
        if self._starting:  # one that ends while it is handed its work would leave this process waiting for ever
            return
        for process in multiprocessing.active_children():
            if again:
                process.kill()
                continue
            if number == signal.SIGINT and process.pid is not None:  # one in training notes what it was
                os.kill(process.pid, signal.SIGINT)
            process.terminate()  # one that is starting ends, being deaf to SIGINT

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        """Run in the new process: it may be ended from here on, and not by a Ctrl-C in the terminal."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUSES)
        end_with_parent()
        parent = multiprocessing.parent_process()
        assert parent is not None
        if not parent.is_alive():
            os._exit(1)
        with guarded(self.timeout):
            super()._wrapping_function(*args, **kwargs)


@contextlib.contextmanager
def _noticing_the_end_of(rank: int) -> Iterator[None]:
    """Have a process say that the one that started it, of this rank, was killed, and end.

    Otherwise the kernel would end all of them without a word.
    """
    parent, done = os.pidfd_open(int(os.environ[PARENT])), threading.Event()

    def watch() -> None:
        while not done.is_set():
            if select.select([parent], [], [], 0.5)[0]:
                print(f"error: rank {rank} (process {os.environ[PARENT]}) was killed", file=sys.stderr, flush=True)
                os._exit(1)

    watching = threading.Thread(target=watch, daemon=True)
    end_with_parent(None)
    watching.start()
    try:
        yield
    except RuntimeError as error:
        if lost(str(error), None) and select.select([parent], [], [], 1.0)[0]:
            watching.join()
        raise
    finally:
        done.set()
        end_with_parent()


def use_our_launcher(trainer: Trainer, timeout: float, on_failure: OnFailure | None) -> None:
    """Put our launcher in the place of Lightning's of the same kind.

    Args:
        trainer: The run's.
        timeout: Seconds for which ranks wait for each other.
        on_failure: Notes in the run's record, if it has one, that another process has failed.
    """
    strategy: Any = trainer.strategy
    environment = lightning_patches.cluster_environment(trainer)
    ours: ScriptLauncher | ProcessLauncher
    if method := lightning_patches.start_method(strategy):
        ours = ProcessLauncher(strategy, method)
    elif (
        isinstance(strategy.launcher, lightning_patches.ScriptLauncher) or trainer.world_size > 1
    ):  # fsdp may have none
        ours = ScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)
        ours.on_failure = on_failure
    else:
        return
    if trainer.world_size > 1:
        ours.timeout = timeout
    lightning_patches.set_launcher(strategy, ours)

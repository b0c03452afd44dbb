"""Lightning's launchers, so that the processes of a run end together and in order."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from app.process import PARENT, end_with_parent
from app.stopping import Signals

BOTH = (signal.SIGINT, signal.SIGTERM)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the processes of `ddp`."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the processes, of which this one is rank zero; a failure that is known here is reported here."""
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):  # told to stop: before they complain that it is gone
                self.kill(signal.SIGKILL)
            self.procs.clear()  # Lightning's watch over them would end this process for their exit codes
            raise

    def _call_children_scripts(self) -> None:
        """Start them deaf to signals that are sent to all: rank zero hears them, and they end with it.

        One that ended by itself while they meet would leave rank zero waiting. In training they hear SIGTERM.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BOTH)
        os.environ[PARENT] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            del os.environ[PARENT]


class ProcessLauncher(_MultiProcessingLauncher):
    """Starts the processes of `ddp_spawn` and `ddp_fork`, and tells them of SIGINT and SIGTERM.

    The first signal lets them end in order, the second Ctrl-C ends them.
    """

    def __init__(self, *args: Any) -> None:
        self.stopped_by = 0
        self._starting = False
        super().__init__(*args)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the processes and wait for them.

        Raises:
            KeyboardInterrupt: When they ended out of order after Ctrl-C.
            SystemExit: When they did so after SIGTERM.
        """
        handlers = {}
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in BOTH if signal.getsignal(number) is not signal.SIG_IGN]
            handlers = {number: signal.signal(number, self._tell) for number in heard}
        self._starting = True
        resource_tracker.ensure_running()  # which would unblock them
        # a process that is still importing would report a Ctrl-C with a traceback
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BOTH)
        try:
            results = super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            if self.stopped_by == signal.SIGINT:
                raise KeyboardInterrupt from None
            if self.stopped_by == signal.SIGTERM:
                raise SystemExit(128 + signal.SIGTERM) from None
            raise
        else:
            if self.stopped_by and trainer is not None and isinstance(trainer._signal_connector, Signals):
                trainer._signal_connector.stopped_by = self.stopped_by
            return results
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "procs" and self._starting:  # launch has started them all, and will wait for them
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BOTH)
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BOTH)
        end_with_parent()
        parent = multiprocessing.parent_process()
        assert parent is not None
        if not parent.is_alive():
            os._exit(1)
        super()._wrapping_function(*args, **kwargs)


def use_our_launcher(trainer: Trainer) -> None:
    """Put our launcher in the place of Lightning's of the same kind."""
    strategy: Any = trainer.strategy
    launcher = strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        strategy._launcher = ScriptLauncher(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
    elif isinstance(launcher, _MultiProcessingLauncher):
        strategy._launcher = ProcessLauncher(strategy, launcher._start_method)

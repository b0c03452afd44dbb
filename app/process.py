"""How a process of this application begins, before anything heavy is imported."""

import ctypes
import os
import signal
import sys
import threading

PARENT = "APP_PARENT"  # environment of a process that `ddp` starts: id of the one that started it
STARTER = "APP_STARTER"  # environment of a run that another command of this application starts: that one's id
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def begin() -> None:
    """Settle how this process ends: with the one that started it, where that is ours; in order on SIGTERM."""
    starters = (os.environ.pop(STARTER, None), os.environ.get(PARENT))
    for pid in starters:
        if pid is not None:
            end_with_parent()
            if os.getppid() != int(pid):
                os._exit(1)
    if PARENT not in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def started_by_me() -> dict[str, str]:
    """Environment for a run that shall not outlive this process.

    Not a `preexec_fn`: Python runs hooks after such a fork, and a Ctrl-C that comes in one of them is lost.
    """
    return {STARTER: str(os.getpid())}


def end_with_parent() -> None:
    """Have the kernel end this process when its parent dies, however that happens; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

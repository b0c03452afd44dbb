"""How a process of this application begins, before anything heavy is imported."""

import ctypes
import os
import signal
import sys
import threading

PARENT = "APP_PARENT"  # environment of a process that `ddp` starts: id of the one that started it
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def begin() -> None:
    """Settle how this process ends: one that `ddp` started with its parent, any other in order on SIGTERM."""
    if PARENT in os.environ:
        end_with_parent()
        if os.getppid() != int(os.environ[PARENT]):
            os._exit(1)
    elif threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end_with_parent() -> None:
    """Have the kernel end this process when its parent dies, however that happens; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

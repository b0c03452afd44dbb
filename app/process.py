"""How a process of this application begins, before anything heavy is imported."""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def begin() -> None:
    """Settle how this process ends: one that `ddp` started with its parent, any other in order on SIGTERM."""
    if os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ:
        end_with_parent()
    elif threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def end_with_parent() -> None:
    """Have the kernel end this process when its parent dies, however that happens; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

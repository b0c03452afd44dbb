"""A small process beside each rank, which ends it where it is stopped for longer than the others wait for it.

They give up by themselves. It would stay for ever, with its GPU and its port, and may be alone on its node.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LATER = 5  # seconds, in which the others have said that it does not answer
BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}  # what is sent to all processes of a run, to end in order


@contextlib.contextmanager
def watched(timeout: float | None) -> Iterator[None]:
    """Have this process ended if it is stopped (SIGSTOP) for longer than a time; Linux only.

    Args:
        timeout: Seconds; None for a process that nobody waits for.
    """
    if timeout is None or sys.platform != "linux":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:  # the file alone, without what it takes to import this package
        command = [sys.executable, "-IS", __file__, str(os.getpid()), str(timeout)]
        watchdog = subprocess.Popen(command, stdin=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield
    finally:
        watchdog.kill()
        watchdog.communicate()


def watch(process: int, timeout: float) -> None:
    """End the process that has started this one if it is stopped for too long; return when it has ended.

    It counts seconds in which it runs itself: not those in which all of a job is suspended, as by Ctrl-Z.
    """
    stopped = 0
    while os.getppid() == process and stopped <= timeout + LATER:
        select.select([sys.stdin], [], [], 1.0)  # readable at once when the process has ended
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            stopped = stopped + 1 if state == "T" else 0
    if os.getppid() == process:
        os.kill(process, signal.SIGKILL)
        said = f"process {process} was stopped for longer than --cluster.timeout ({timeout:g} s): it was ended"
        with contextlib.suppress(OSError):  # nobody reads
            print(f"error: {said}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))

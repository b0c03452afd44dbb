"""Watchdog process of each rank: writes a hung rank's stacks, and kills it after the others left.

The other ranks time out after `--cluster.timeout`. Without a watchdog, a hung rank would run
forever, and occupy its GPU and its port.

Shortly before the timeout, the watchdog of a rank without progress makes this rank write the Python
stacks of its threads. The other ranks read these files, so that their error can name the hung rank.

The watchdog runs this file as a script, so the file imports only the standard library.
"""

import contextlib
import faulthandler
import mmap
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LATER = 5  # seconds for the other ranks to report the hung rank
# the run's signals, which the watchdog ignores
BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
# A rank is in one of these phases. No other rank waits for a rank that is `elsewhere`.
PHASES = (
    "elsewhere",
    "set-up",
    "its data",
    "its step",
    "its gradients",
    "its update",
    "the evaluation",
)
ELSEWHERE, SET_UP, DATA, STEP, GRADIENTS, UPDATE, EVALUATION = range(len(PHASES))
# makes a process write its stacks, or kills it if it has no handler
WRITE_STACKS = getattr(signal, "SIGRTMAX", 0)
SIZE = 2**15  # of the shared memory, in bytes
PEERS = 64  # offset of its list of connections


class Heartbeat:
    """Step and phase of this process, in memory shared with its watchdog.

    Attributes:
        values: Step, phase, and a counter that shows progress. Callers assign them directly,
            because that is fast.
        rank: The rank.
        folder: Folder of the stacks.
        file: File of the stacks, `rank_N.txt`.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.folder = folder
        self.file = folder / f"rank_{rank}.txt"
        beats = os.memfd_create("heartbeat")
        stacks = os.memfd_create("stacks")
        self.files = (beats, stacks)
        os.ftruncate(beats, SIZE)
        self.memory = mmap.mmap(beats, SIZE)
        self.values = memoryview(self.memory).cast("q")
        self.values[1] = SET_UP
        self.file.unlink(missing_ok=True)
        faulthandler.register(WRITE_STACKS, stacks, all_threads=True)


heartbeat: Heartbeat | None = None  # set while this process is watched


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Record the connections to other ranks that the block opens.

    If one of them closes later, `watch` concludes that another rank has left.
    """
    before = connections(os.getpid())
    yield
    if heartbeat is not None:
        peers = " ".join(sorted(connections(os.getpid()) - before)[:1000])
        heartbeat.memory[PEERS:] = peers.encode().ljust(SIZE - PEERS, b"\0")


@contextlib.contextmanager
def watched(timeout: float | None, folder: Path | None, rank: int) -> Iterator[None]:
    """Start a watchdog for this process, and stop it after the block. Linux only.

    Args:
        timeout: Timeout of the other ranks in seconds, or None for no watchdog.
        folder: Folder of the stacks, or None for no watchdog.
        rank: The rank.
    """
    global heartbeat
    if timeout is None or folder is None or sys.platform != "linux":
        yield
        return
    beat = Heartbeat(folder, rank)
    # run the file, because importing the package takes seconds
    command = [sys.executable, "-IS", __file__, os.getpid(), timeout, beat.file, *beat.files]
    watchdog = subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, pass_fds=beat.files)
    heartbeat = beat
    try:
        yield
    finally:
        heartbeat = None
        watchdog.kill()
        watchdog.communicate()
        for file in beat.files:
            os.close(file)


# -- in the watchdog process
# ------------------------------------------------------------------------------------------


def watch(process: int, timeout: float, file: Path, beats: int, stacks: int) -> None:
    """Watch the parent process until it ends.

    Kill the parent when it has made no progress for `timeout` + LATER seconds and another rank has
    closed a connection. Time does not count while the whole job is suspended, as by Ctrl-Z.

    Args:
        process: Id of the parent.
        timeout: Timeout of the other ranks in seconds.
        file: File of the stacks for the other ranks.
        beats: File descriptor of the parent's heartbeat.
        stacks: File descriptor of the parent's stacks.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    memory = mmap.mmap(beats, SIZE, prot=mmap.PROT_READ)
    values = memoryview(memory).cast("q")
    still = 0.0  # seconds without progress
    last = [0, 0, 0]  # step, phase and counter
    clock = time.monotonic()
    written = False
    while os.getppid() == process:
        select.select([sys.stdin], [], [], 1.0)  # returns at once when the parent has ended
        passed = min(time.monotonic() - clock, 2.0)
        clock = time.monotonic()
        now = values[:3].tolist()
        if now == last and now[1] != ELSEWHERE:
            still += passed
        else:
            still = 0.0
        last = now
        with contextlib.suppress(OSError):  # raised if the disk is full, or the process has ended
            if written and not still and now[1] != ELSEWHERE:  # the written stacks are outdated
                file.unlink(missing_ok=True)
                written = False
            others_give_up = still > 1 and set(file.parent.glob("rank_*.txt")) - {file}
            if (others_give_up or still >= timeout - min(10.0, 1 + timeout / 4)) and not written:
                written = True
                file.parent.mkdir(parents=True, exist_ok=True)
                temporary = file.with_suffix(".part")
                text = f"step {now[0]}, in {PHASES[now[1]]}\n"
                for stack in take_stacks(process, stacks):
                    text += stack  # write after each stack, because other ranks may give up soon
                    temporary.write_text(text)
                    temporary.rename(file)
        peers = set(memory[PEERS:].rstrip(b"\0").decode().split())
        if still > timeout + LATER and peers - connections(process) and os.getppid() == process:
            os.kill(process, signal.SIGKILL)
            hung = f"rank {file.stem.removeprefix('rank_')} hangs (stacks: {file})"
            message = f"error: {hung}; the other ranks timed out, and it was killed"
            with contextlib.suppress(OSError):  # in case stderr is closed
                print(message, file=sys.stderr, flush=True)
            return


def connections(process: int) -> set[str]:
    """Return a process's established TCP connections, each as `socket:[INODE]`."""
    rows = []
    sockets = set()
    with contextlib.suppress(OSError):
        for table in ("tcp", "tcp6"):
            rows += Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
        for file in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # the file is closed
                sockets.add(os.readlink(file))
    return sockets & {f"socket:[{row.split()[9]}]" for row in rows if row.split()[3] == "01"}


def take_stacks(process: int, stacks: int) -> Iterator[str]:
    """Yield the stacks of a process and of its forked children, such as a loader's workers."""
    processes = [process]
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        processes += map(int, file.read_text().split())
    for pid in processes:
        with contextlib.suppress(OSError):  # the process has ended
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
            if caught is None or not int(caught[1], 16) >> (WRITE_STACKS - 1) & 1:
                continue
            begin = os.fstat(stacks).st_size
            os.kill(pid, WRITE_STACKS)
            time.sleep(0.5)  # until the handler has written
            text = os.pread(stacks, 2**20, begin).decode(errors="replace")
            yield f"\nprocess {pid}\n{text}"


# -- reading the stacks
# ------------------------------------------------------------------------------------------

FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
LIBRARY = re.compile(
    rf"/(site|dist)-packages/|/lib/python3[.\d]*/|^<|^{re.escape(str(Path(__file__).parents[1]))}"
)
LOOP = re.compile(
    r"(lightning/pytorch/(loops/.*|trainer/trainer)|app/training/step)\.py "
    r"(run|advance|__call__|_run\w*)$"
)
Frame = tuple[str, str, str]  # file, line, function


class Place(NamedTuple):
    """Position of a rank in the program.

    Attributes:
        waits: How likely the rank waits for another one, as a sort key: whether it is in the
            backward pass, in a call of torch.distributed, and in a library. A process that has
            written no stack, as after SIGSTOP, counts as in the user's code.
        text: Step or phase, and the line, of the user's code if possible.
    """

    waits: tuple[bool, bool, bool]
    text: str


def read_place(text: str) -> Place:
    """Parse a file that `watch` wrote."""
    head, *stacks = text.split("\nprocess ")
    step, phase = re.match(r"step (\d+), in (.+)", head).groups()  # type: ignore[union-attr]
    frames = []
    for stack in stacks:  # the main process's stack first
        frames += within_loop(stack)
    users = [frame for frame in frames if not LIBRARY.search(frame[0])]
    hooks = [frame for frame in frames if frame[2].startswith("on_")]
    line = "no stack"
    communicates = False
    if frames:
        path, number, function = (users or hooks or frames)[0]
        line = f"{Path(path).name}:{number} {function}"
        communicates = bool(re.search("/torch/distributed/|/system/connections", frames[0][0]))
    if phase == PHASES[EVALUATION]:
        line = f"the evaluation, {line}"
    elif phase not in PHASES[:2]:
        line = f"step {int(step):,}, {line}"
    is_in_library = not users and bool(frames)
    return Place((phase == PHASES[GRADIENTS], communicates, is_in_library), line)


def within_loop(text: str) -> list[Frame]:
    """Return the main thread's frames inside training or evaluation loop, innermost first."""
    main = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[-1]  # listed last
    frames = []
    for frame in FRAME.findall(main):
        if LOOP.search(f"{frame[0]} {frame[2]}"):
            break
        frames.append(frame)
    return frames


def where(folder: Path) -> str | None:
    """Describe the ranks that wrote stacks: first hung ranks, then ranks that wait for them.

    Args:
        folder: A run's folder of stacks.
    """
    places = {}
    for file in folder.glob("rank_*.txt"):
        with contextlib.suppress(OSError, AttributeError):  # removed, or not a watchdog's file
            rank = int(file.stem.removeprefix("rank_"))
            places[rank] = read_place(file.read_text(errors="replace"))
    if not places:
        return None
    least = min(place.waits for place in places.values())
    hanging = [rank for rank in sorted(places) if places[rank].waits == least]
    in_gradients, communicates, is_in_library = least
    calls = {places[rank].text for rank in hanging}
    may_wait = in_gradients or (communicates and len(calls) == 1)
    if len(hanging) == len(places) and (may_wait or (is_in_library and len(places) > 1)):
        hanging = []  # no single rank is to blame, as after a cut link
    waiting = sorted(places.keys() - set(hanging))
    # a library may only wait
    preposition = "at" if is_in_library else "in"
    clauses = [f"rank {rank} is {preposition} {places[rank].text}" for rank in hanging]
    if waiting:
        clauses.append(f"waiting: rank {', '.join(map(str, waiting))}")
    return "; ".join(clauses)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))

"""Watchdog process of each rank: writes the stacks of a hung rank, and kills it after the other ranks have left.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

LATER = 5  # seconds for the other ranks to report the hung rank
BLOCKED = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
}  # the run's signals, which the watchdog ignores
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
WRITE_STACKS = getattr(
    signal, "SIGRTMAX", 0
)  # makes a process write its stacks, or kills it if it has no handler
SIZE, PEERS = 2**15, 64  # size in bytes of the shared memory, and offset of its list of connections


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
        self.files = os.memfd_create("heartbeat"), os.memfd_create("stacks")
        os.ftruncate(self.files[0], SIZE)
        self._memory = mmap.mmap(self.files[0], SIZE)
        self.values = memoryview(self._memory).cast("q")
        self.values[1] = SET_UP
        self.file.unlink(missing_ok=True)
        faulthandler.register(WRITE_STACKS, self.files[1], all_threads=True)
        # prefix of the files that NCCL's flight recorder writes after a timeout; torch 2.10 reads
        # the second variable
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            os.environ.setdefault(name, f"{folder}/nccl_rank_")

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Record the connections to other ranks that the block opens.

        If one of them closes later, `watch` concludes that another rank has left.
        """
        before = connections(os.getpid())
        yield
        peers = " ".join(sorted(connections(os.getpid()) - before)[:1000])
        self._memory[PEERS:] = peers.encode().ljust(SIZE - PEERS, b"\0")

    def end(self) -> None:
        """Suspend the watchdog, because no rank waits for this one any more."""
        self.values[1] = ELSEWHERE


heartbeat: Heartbeat | None = None  # set while this process is watched


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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:  # run the file, because importing the package takes seconds
        command = [sys.executable, "-IS", __file__, os.getpid(), timeout, beat.file, *beat.files]
        watchdog = subprocess.Popen(
            [*map(str, command)], stdin=subprocess.PIPE, pass_fds=beat.files
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
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
# --------------------------------------------------------------------------------------


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
    memory = mmap.mmap(beats, SIZE, prot=mmap.PROT_READ)
    values = memoryview(memory).cast("q")
    still, last = 0.0, [0] * 3  # seconds without progress; latest step, phase and counter
    clock = time.monotonic()
    written = False
    while os.getppid() == process:
        select.select([sys.stdin], [], [], 1.0)  # returns at once when the parent has ended
        before = clock
        clock = time.monotonic()
        now = values[:3].tolist()
        still = still + min(clock - before, 2.0) if now == last and now[1] != ELSEWHERE else 0.0
        last = now
        with contextlib.suppress(OSError):  # raised if the disk is full, or the process has ended
            if (
                written and not still and now[1] != ELSEWHERE
            ):  # progress again: the written stacks are outdated
                file.unlink(missing_ok=True)
                written = False
            others_give_up = still > 1 and any(
                other != file for other in file.parent.glob("rank_*.txt")
            )
            if (others_give_up or still >= timeout - min(10.0, 1 + timeout / 4)) and not written:
                written = True
                file.parent.mkdir(parents=True, exist_ok=True)
                temporary = file.with_suffix(".part")
                text = f"step {now[0]}, in {PHASES[now[1]]}\n"
                for stack in take_stacks(process, stacks):
                    text += stack  # write after each stack, because other ranks may give up soon
                    temporary.write_text(text)
                    temporary.rename(file)
        peers = memory[PEERS:].rstrip(b"\0").decode().split()
        if still > timeout + LATER and {*peers} - connections(process) and os.getppid() == process:
            os.kill(process, signal.SIGKILL)
            place = where(file.parent, file.name) or f"process {process} hangs"
            with contextlib.suppress(OSError):  # in case stderr is closed
                print(
                    f"error: {place}; the other ranks timed out, and it was killed",
                    file=sys.stderr,
                    flush=True,
                )
            return


def connections(process: int) -> set[str]:
    """Return a process's established TCP connections, each as `socket:[INODE]`."""
    rows: list[str] = []
    sockets: set[str] = set()
    with contextlib.suppress(OSError):
        for table in ("tcp", "tcp6"):
            rows += Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
        for file in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # the file is closed
                sockets.add(os.readlink(file))
    return sockets & {f"socket:[{row.split()[9]}]" for row in rows if row.split()[3] == "01"}


def take_stacks(process: int, stacks: int) -> Iterator[str]:
    """Yield the stacks of a process and of its forked children, such as a loader's workers."""
    _, _, status = Path(f"/proc/{process}/stat").read_text().rpartition(")")
    if status.split()[0] == "T":
        yield "stopped (SIGSTOP)\n"
        return
    children = "".join(
        file.read_text() for file in Path(f"/proc/{process}/task").glob("*/children")
    ).split()
    for pid in (process, *map(int, children)):
        with contextlib.suppress(OSError):  # the process has ended
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
            if caught is None or not int(caught[1], 16) >> (WRITE_STACKS - 1) & 1:
                continue
            begin = size = os.fstat(stacks).st_size
            os.kill(pid, WRITE_STACKS)
            for _ in range(20):  # wait until the file stops growing
                time.sleep(0.05)
                before = size
                size = os.fstat(stacks).st_size
                if begin < size == before:
                    break
            yield f"\nprocess {pid}\n" + os.pread(stacks, size - begin, begin).decode(
                errors="replace"
            )


# -- reading the stacks
# -------------------------------------------------------------------------------------------

FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
OWN = str(Path(__file__).parents[1])  # folder of this application
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<")
Frame = tuple[str, str, str]  # file, line, function
LOOP = re.compile(
    r"(lightning/pytorch/(loops/.*|trainer/trainer)|app/training/step)\.py (run|advance|__call__|_run\w*)$"
)


class Place(NamedTuple):
    """Position of a rank in the program.

    Attributes:
        step: Number of the optimizer step, counted from 1.
        phase: Activity, one of `PHASES`.
        line: File, line and function, of the user's code if possible.
        is_users: Whether the line is in the user's code; also true if no stack was written, as
            after SIGSTOP.
        communicates: Whether the rank is in a call of torch.distributed.
    """

    step: int
    phase: str
    line: str
    is_users: bool
    communicates: bool

    @classmethod
    def read(cls, text: str) -> "Place":
        """Parse a file that `watch` wrote."""
        head, _, rest = text.partition("\n")
        step, phase = re.match(r"step (\d+), in (.+)", head).groups()  # type: ignore[union-attr]
        stacks = [threads(chunk) for chunk in rest.split("\nprocess ")[1:]]
        inner = [frame for frames in stacks for frame in within_loop(frames)]  # main process first
        users = next(
            (f for f in inner if not LIBRARY.search(f[0]) and not f[0].startswith(OWN)), None
        )
        hook = next((f for f in inner if f[2].startswith("on_")), inner[0] if inner else None)
        frame = users or hook
        line = (
            f"{Path(frame[0]).name}:{frame[1]} {frame[2]}" if frame else rest.strip() or "no stack"
        )
        communicates = bool(inner) and "/torch/distributed/" in inner[0][0]
        return cls(int(step), phase, line, users is not None or not stacks, communicates)

    def __str__(self) -> str:
        """Format the place: `in …` for the user's code; `at …` for library code, where the rank may only be waiting."""
        evaluates = self.phase == PHASES[EVALUATION]
        step = (
            ""
            if self.phase in PHASES[:2]
            else "the evaluation, "
            if evaluates
            else f"step {self.step:,}, "
        )
        return f"{'in' if self.is_users else 'at'} {step}{self.line}"


def within_loop(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames called by the training or evaluation loop, innermost first."""
    ends = (index for index, (path, _, name) in enumerate(frames) if LOOP.search(f"{path} {name}"))
    return frames[: next(ends, None)]


def threads(text: str) -> list[Frame]:
    """Return the frames of a process's main thread, innermost first: file, line and function."""
    chunks = re.split(r"^(Current thread|Thread) .*$", text, flags=re.MULTILINE)
    kinds = chunks[1::2]
    stacks = chunks[2::2]
    if not stacks:
        return []
    main = (
        kinds.index("Current thread") if "Current thread" in kinds else -1
    )  # the main thread is listed last
    return FRAME.findall(stacks[main])


def where(folder: Path, names: str = "rank_*.txt") -> str | None:
    """Describe the ranks that wrote stacks: first the hung ranks, then the ranks that wait for them.

    Args:
        folder: A run's folder of stacks.
        names: Pattern of the files; by default, of all ranks.
    """
    places = {}
    for file in folder.glob(names):
        with contextlib.suppress(OSError, AttributeError):  # removed, or not a watchdog's file
            places[int(file.stem.removeprefix("rank_"))] = Place.read(
                file.read_text(errors="replace")
            )
    gradients = {rank for rank, place in places.items() if place.phase == PHASES[GRADIENTS]}
    communicating = {rank for rank, place in places.items() if place.communicates}
    hanging = (places.keys() - gradients - communicating) or (places.keys() - gradients)
    if communicating == places.keys() and len({place[:3] for place in places.values()}) == 1:
        hanging = (
            set()
        )  # no single rank is to blame: all wait in the same call, as after a cut link
    elif users := {rank for rank in hanging or places if places[rank].is_users}:
        hanging = users
    elif (
        len(hanging) == len(places) > 1
    ):  # no rank hangs: all wait in a library, as after a cut link
        hanging = set()
    waiting = sorted(places.keys() - hanging)
    clauses = [f"rank {rank} is {places[rank]}" for rank in sorted(hanging)]
    if waiting:
        whose = {0: "", 1: "its "}.get(len(hanging), "their ")
        ranks = (
            f"rank {waiting[0]} waits"
            if len(waiting) == 1
            else f"ranks {', '.join(map(str, waiting))} wait"
        )
        clauses.append(f"{ranks} for {whose}{'gradients' if gradients & {*waiting} else 'answers'}")
    return "; ".join(clauses) or None


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))

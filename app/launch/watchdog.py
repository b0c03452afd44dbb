"""A small process beside each rank that reports where the rank hangs, and ends it if nobody else would.

The other ranks time out after `--cluster.timeout`. A hung rank would stay forever, with its GPU and its port. Before
that, each watchdog makes its rank write the Python stacks of its threads, so that the others can name the rank for
which they waited.

The process runs this file alone, so it imports the standard library only.
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

LATER = 5  # seconds in which the other ranks report the silent one
BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}  # signals that end all processes of a run in order
# a rank's activity; nobody waits for a rank in another one
PHASES = ("elsewhere", "set-up", "its data", "its step", "its gradients", "its update", "the evaluation")
ELSEWHERE, SET_UP, DATA, STEP, GRADIENTS, UPDATE, EVALUATION = range(len(PHASES))
WRITE_STACKS = getattr(signal, "SIGRTMAX", 0)  # nobody else's; a process that does not expect it would end
PATH, PEERS = 64, mmap.PAGESIZE  # offsets in the shared memory
PATHS = mmap.PAGESIZE - PATH  # bytes of each
SIZE = 2 * mmap.PAGESIZE


class Heartbeat:
    """Step and phase of this process, in memory that its watchdog reads.

    Attributes:
        values: Step, phase, and a count that differs with every sign of life: assigned, without a call.
        folder: Where the stacks are written, once a run has one.
    """

    def __init__(self) -> None:
        self.files = os.memfd_create("heartbeat"), os.memfd_create("stacks")
        os.ftruncate(self.files[0], SIZE)
        self._memory = mmap.mmap(self.files[0], SIZE)
        self.values = memoryview(self._memory).cast("q")
        self.folder: Path | None = None

    def begin(self, folder: Path, rank: int) -> None:
        """From here on the others wait for this process.

        Args:
            folder: Where `rank_N.txt` is to be written when it hangs.
            rank: Its number.
        """
        self.folder, file = folder, folder / f"rank_{rank}.txt"
        file.unlink(missing_ok=True)
        # NCCL's flight recorder writes when a call times out; the second name is torch 2.10's
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            os.environ.setdefault(name, f"{folder}/nccl_rank_")
        self._write(PATH, os.fsencode(file))
        faulthandler.register(WRITE_STACKS, self.files[1], all_threads=True)
        self.values[0], self.values[1] = 0, SET_UP

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Record connections to other ranks that are opened within; losing them means that the ranks left."""
        before = connections(os.getpid())
        yield
        sockets = b" ".join(os.fsencode(each) for each in sorted(connections(os.getpid()) - before))
        self._write(PEERS, sockets[: sockets.rfind(b" ", 0, PATHS)] if len(sockets) > PATHS else sockets)

    def _write(self, offset: int, text: bytes) -> None:
        self._memory[offset : offset + PATHS] = text[:PATHS].ljust(PATHS, b"\0")

    def end(self) -> None:
        """From here on nobody waits."""
        self.values[1] = ELSEWHERE


heartbeat: Heartbeat | None = None  # of this process, while it is watched


@contextlib.contextmanager
def watched(timeout: float | None, folder: Path | None = None, rank: int = 0) -> Iterator[None]:
    """Have this process ended if it hangs for longer than a time; Linux only.

    Args:
        timeout: Seconds; None for a process that nobody waits for.
        folder: Where a rank's stacks are to be written; None where the process is no rank.
        rank: Its number.
    """
    global heartbeat
    if timeout is None or sys.platform != "linux":
        yield
        return
    mine, before = Heartbeat(), signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:  # the file alone: importing the package would take seconds
        command = [sys.executable, "-IS", __file__, str(os.getpid()), str(timeout), *map(str, mine.files)]
        watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=mine.files)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    heartbeat = mine
    try:
        if folder is not None:
            mine.begin(folder, rank)
        yield
    finally:
        heartbeat = None
        watchdog.kill()
        watchdog.communicate()
        for file in mine.files:
            os.close(file)


# -- in the process beside it -------------------------------------------------------------------------------------


def watch(process: int, timeout: float, beats: int, stacks: int) -> None:
    """Watch the process that has started this one; return when it has ended.

    It is ended when it is stopped (SIGSTOP) for too long, or shows no sign of life and others have left it. The time in
    which all of a job is suspended, as by Ctrl-Z, is not counted.

    Args:
        process: Its id.
        timeout: Seconds for which the others wait for it.
        beats: File of its heartbeat.
        stacks: File into which it writes its stacks.
    """
    memory = mmap.mmap(beats, SIZE, prot=mmap.PROT_READ)
    values = memoryview(memory).cast("q")
    stopped = still = 0.0  # seconds
    last, clock, written = [0] * 3, time.monotonic(), False
    while os.getppid() == process:
        select.select([sys.stdin], [], [], 1.0)  # readable at once when the process has ended
        before, clock = clock, time.monotonic()
        passed = min(clock - before, 2.0)
        file = Path(os.fsdecode(memory[PATH : PATH + PATHS].rstrip(b"\0")))
        now = values[:3].tolist()
        still, last = (still + passed if now == last and now[1] != ELSEWHERE else 0.0), now
        with contextlib.suppress(OSError):
            stopped = stopped + passed if state(process) == "T" else 0.0
            if (
                not still and written and now[1] != ELSEWHERE
            ):  # the rank continues; otherwise it ends and reports the hung rank
                file.unlink(missing_ok=True)
                written = False
            others_give_up = still > 1 and any(other != file for other in file.parent.glob("rank_*.txt"))
            if (others_give_up or still >= timeout - min(10.0, 1 + timeout / 4)) and not written:
                written = True  # tried
                file.parent.mkdir(parents=True, exist_ok=True)
                part, text = file.with_suffix(".part"), f"step {now[0]}, in {PHASES[now[1]]}\n"
                for stack in take_stacks(process, stacks):  # its own first, for the others may not wait
                    text += stack
                    part.write_text(text)
                    part.rename(file)
        peers = set(memory[PEERS : PEERS + PATHS].rstrip(b"\0").decode().split())
        left = still > timeout + LATER and bool(peers - connections(process))
        if stopped > timeout + LATER or left:
            break
    if os.getppid() == process:
        os.kill(process, signal.SIGKILL)
        said = f"process {process} was stopped for longer than --cluster.timeout ({timeout:g} s): it was ended"
        if stopped <= timeout + LATER:
            found = where(file.parent, [int(file.stem.removeprefix("rank_"))]) or f"process {process} hangs"
            said = f"{found}; the others have given up, and it was ended"
        with contextlib.suppress(OSError):  # nobody reads
            print(f"error: {said}", file=sys.stderr, flush=True)


def state(process: int) -> str:
    """Return the kernel's state of a process: `T` when stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def connections(process: int) -> set[str]:
    """Return the TCP connections of a process that are established, by the numbers of their sockets."""
    rows: list[str] = []
    sockets: set[str] = set()
    with contextlib.suppress(OSError):
        for table in ("tcp", "tcp6"):
            rows += Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
        for file in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile, such as the descriptor of this listing
                sockets.add(os.readlink(file))
    return sockets & {f"socket:[{row.split()[9]}]" for row in rows if row.split()[3] == "01"}


def take_stacks(process: int, stacks: int) -> Iterator[str]:
    """The stacks of a process, and of those that it has forked, such as the workers of a loader."""
    if state(process) == "T":
        yield "stopped (SIGSTOP)\n"
        return
    children = "".join(each.read_text() for each in Path(f"/proc/{process}/task").glob("*/children")).split()
    for each in (process, *map(int, children)):
        with contextlib.suppress(OSError):  # a worker has ended meanwhile
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{each}/status").read_text())
            if caught is None or not int(caught[1], 16) >> (WRITE_STACKS - 1) & 1:
                continue
            begin = size = os.fstat(stacks).st_size
            os.kill(each, WRITE_STACKS)
            for _ in range(20):  # until it has written, and writes no more
                time.sleep(0.05)
                before, size = size, os.fstat(stacks).st_size
                if begin < size == before:
                    break
            yield f"\nprocess {each}\n" + os.pread(stacks, size - begin, begin).decode(errors="replace")


# -- what the stacks say ------------------------------------------------------------------------------------------

FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
OWN = str(Path(__file__).parents[1])  # this application
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<")
Frame = tuple[str, str, str]  # file, line, function
LOOP = re.compile(
    r"(lightning/pytorch/(loops/.*|trainer/trainer)|app/loop/straight_step)\.py (run|advance|__call__|_run\w*)$"
)


class Place(NamedTuple):
    """Where a rank was.

    Attributes:
        step: The step of the optimizer in hand, from 1 on.
        phase: One of `PHASES`.
        line: File, line and function, of the user's code where it was in that.
        theirs: Whether that is the user's.
        waits_for: `gradients` or `answer` of the other ranks, or nothing.
    """

    step: int
    phase: str
    line: str
    theirs: bool
    waits_for: str

    @classmethod
    def read(cls, text: str) -> "Place":
        """Parse a file that `watch` wrote."""
        head, _, rest = text.partition("\n")
        step, phase = re.match(r"step (\d+), in (.+)", head).groups()  # type: ignore[union-attr]
        stacks = [threads(part) for part in rest.split("\nprocess ")[1:]]
        inner = [frame for frames in stacks for frame in within_loop(frames)]  # its own first
        theirs = next((f for f in inner if not LIBRARY.search(f[0]) and not f[0].startswith(OWN)), None)
        hook = next((f for f in inner if f[2].startswith("on_")), inner[0] if inner else None)
        frame = theirs or hook
        line = f"{Path(frame[0]).name}:{frame[1]} {frame[2]}" if frame else rest.strip() or "no stack"
        agrees = any(path.startswith(OWN) and name in ("_hear", "_share") for path, _, name in inner)
        agrees = agrees or bool(inner and "/torch/distributed/" in inner[0][0])
        waits_for = "gradients" if phase == PHASES[GRADIENTS] else "answer" if agrees else ""
        return cls(int(step), phase, line, theirs is not None or not stacks, waits_for)


def within_loop(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames below the training or evaluation loop."""
    ends = (index for index, (path, _, name) in enumerate(frames) if LOOP.search(f"{path} {name}"))
    return frames[: next(ends, None)]


def threads(text: str) -> list[Frame]:
    """Return the frames of a process's main thread, innermost first: file, line and function."""
    parts = re.split(r"^(Current thread|Thread) .*$", text, flags=re.MULTILINE)
    kinds, stacks = parts[1::2], parts[2::2]
    if not stacks:
        return []
    main = kinds.index("Current thread") if "Current thread" in kinds else -1  # the first one is listed last
    return FRAME.findall(stacks[main])


def where(folder: Path, ranks: Sequence[int] | None = None) -> str | None:
    """Describe the ranks that have written stacks: first hung ranks, then the ranks that wait for them.

    Args:
        folder: `stacks` of a run.
        ranks: Ranks to describe; by default all.
    """
    places = {}
    for file in folder.glob("rank_*.txt"):
        rank = int(file.stem.removeprefix("rank_"))
        if ranks is None or rank in ranks:
            with contextlib.suppress(OSError, AttributeError):  # removed, or somebody else's
                places[rank] = Place.read(file.read_text(errors="replace"))
    waiting = {rank for rank, place in places.items() if place.waits_for}
    # not at one place, as when a link is cut: a call of the user, if any, keeps the others waiting; or one rank has
    # left the training steps
    if len(waiting) == len(places) and len({place[:3] for place in places.values()}) > 1:
        waiting = {rank for rank in waiting if not places[rank].theirs}
        steps = {rank for rank in waiting if places[rank].waits_for == "gradients"}
        waiting = steps if steps and len(waiting) == len(places) else waiting
    hanging = set(places) - waiting
    if theirs := {rank for rank in hanging if places[rank].theirs}:  # the others wait for these ranks
        waiting, hanging = set(places) - theirs, theirs
    said = []
    for rank in sorted(hanging):
        step, phase, line, known, _ = places[rank]
        at = "" if phase in PHASES[:2] else "the evaluation, " if phase == PHASES[EVALUATION] else f"step {step:,}, "
        said.append(f"rank {rank} is {'in' if known else 'at'} {at}{line}")  # `at`: it may only wait, too
    if waiting:
        them = f"rank{'s' * (len(waiting) > 1)} {', '.join(map(str, sorted(waiting)))} wait{'s' * (len(waiting) == 1)}"
        whose = {0: "", 1: "its "}.get(len(hanging), "their ")
        gradients = any(places[rank].waits_for == "gradients" for rank in waiting)
        said.append(f"{them} for {whose}{'gradients' if gradients else 'answer' if whose else 'an answer'}")
    return "; ".join(said) or None


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

"""Exceptions for user errors and failed ranks, and the exit status of a run."""

import difflib
import errno
import re
import resource
import signal
from collections.abc import Iterable
from dataclasses import dataclass

# signals that stop a run, and their names for the user; the kernel sends SIGHUP when the terminal
# closes
CAUSES: dict[int, str] = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP",
}
EXIT_CODES = {name: 128 + number for number, name in CAUSES.items()}


class UserError(Exception):
    """Error that the user can correct. Exit code 2.

    Args:
        message: Problem, place and remedy. Line breaks become spaces; a word of more than 300
            characters is cut.
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            re.sub(r"(\S{200})\S{100,}", r"\1…", re.sub(r"\s*[\r\n]+\s*", " ", message))
        )


class RankError(Exception):
    """Failure of a process of the run.

    Args:
        message: Reason of the failure.
        exit_code: Exit code of the command.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLostError(RankError):
    """Loss of the connection to another rank. The other rank's messages show the cause."""


class RankSilentError(RankError):
    """Timeout while waiting for another rank."""


@dataclass(frozen=True)
class ExitStatus:
    """Exit status of a command or a run.

    Attributes:
        code: Exit code of the process.
        status: Status in the run record: `completed`, `interrupted` or `failed`.
        reason: Reason in one line; None for a completed run.
    """

    code: int = 0
    status: str = "completed"
    reason: str | None = None

    @classmethod
    def stopped_by(cls, name: str) -> "ExitStatus":
        """Return the status of a run that a signal ended: `Ctrl-C`, `SIGTERM` or `SIGHUP`."""
        return cls(EXIT_CODES[name], "interrupted", f"by {name}")

    @classmethod
    def of(cls, error: BaseException) -> "ExitStatus":
        """Return the status of a run that an exception ended."""
        if isinstance(error, SystemExit):
            if isinstance(
                error.__context__, KeyboardInterrupt
            ):  # Lightning exits with 1 after Ctrl-C
                return cls.stopped_by("Ctrl-C")
            if error.code in EXIT_CODES.values():
                return cls.stopped_by(CAUSES[error.code - 128])  # type: ignore[operator]
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            return cls(code, "failed", f"exit code {code}") if code else cls()
        if isinstance(error, KeyboardInterrupt):
            return cls.stopped_by("Ctrl-C")
        if isinstance(error, RankError):
            return cls(error.exit_code, "failed", str(error))
        message = str(error) if isinstance(error, UserError) else shortage(error)
        if message:
            return cls(2, "failed", message)
        return cls(1, "failed", f"{type(error).__name__}: {one_line(str(error))}")


# prefix of the note that proposes a batch size after an out-of-memory error
SMALLER = "--data.batch_size"
# torch's out-of-memory messages, for an accelerator and for the host
NO_MEMORY = (
    r"(?P<device>\w+) out of memory\. Tried to allocate (?P<size>[\d.]+ \w+)\.(?:.*?(?P<free>[\d.]+ \w+) is free)?",
    r"(?P<device>CUDA) error: out of memory",
    r"DefaultCPUAllocator: .*?you tried to allocate (?P<size>\d+ bytes)",
)


def out_of_memory(error: BaseException) -> str | None:
    """Return a message with requested memory, free memory and a remedy; None if memory did not run out."""
    matches = (re.search(pattern, str(error), re.DOTALL) for pattern in NO_MEMORY)
    match = next(filter(None, matches), None)
    if match is None:
        return None
    known = match.groupdict()
    size = f": {known['size']} were requested" if known.get("size") else ""
    free = f", and {known['free']} are free" if known.get("free") else ""
    notes = getattr(error, "__notes__", [])
    smaller = f"a lower {SMALLER} with a higher --trainer.accumulate_grad_batches"
    proposal = next((note for note in notes if note.startswith(SMALLER)), smaller)
    other = (
        "--trainer.precision bf16-mixed, --data.placement memory"
        if "device" in known
        else "--data.placement disk"
    )
    return (
        f"out of memory on the {known.get('device', 'host')}{size}{free}: give {proposal}, for the "
        f"same training step, or {other}, or more devices"
    )


def shortage(error: BaseException) -> str | None:
    """Return a message with a remedy if memory, shared memory or open files ran out; None for other errors."""
    text = str(error)
    # "ancdata" is in torch's error when workers send files
    if getattr(error, "errno", None) == errno.EMFILE or re.search(
        "Too many open files|items of ancdata", text
    ):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too many open files for this shell's limit of {limit}: run `ulimit -n 4096`, then the command again"
    # torch's errors when loader workers find /dev/shm full
    if re.search(
        "signal: Bus error|out of shared memory|unable to (write to file|mmap|allocate shared memory).*torch_",
        text,
        re.DOTALL,
    ):
        return "/dev/shm is too small for the loader's workers: give --data.num_workers 0, or enlarge it"
    return out_of_memory(error)


SYNONYMS = {  # flag names of other programs
    **dict.fromkeys(("gpu", "gpus", "num_gpus", "nproc_per_node"), "--trainer.devices"),
    **dict.fromkeys(("amp", "bf16", "fp16"), "--trainer.precision"),
    **{
        "learning_rate": "--model.optimizer.lr",
        "output_dir": "--run.root",
        "resume": "--ckpt_path",
    },
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `: did you mean …?` with the nearest known names, or an empty string.

    Flags are compared by their last part, ignoring case: `--lr` is near `--model.optimizer.lr`.
    Flags of the same section rank higher.
    """
    if name.startswith("--"):
        name = SYNONYMS.get(name.rpartition(".")[2].lstrip("-"), name)
    section, _, last = name.rpartition(".")

    def likeness(candidate: str) -> float:
        if candidate.endswith(f".{name}"):
            return 1.0
        other_section, _, word = candidate.rpartition(".")
        elsewhere = name.startswith("--") and "." in name and other_section != section
        a, b = (last.lstrip("-"), word.lstrip("-")) if name.startswith("--") else (name, candidate)
        return difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio() - 0.15 * elsewhere

    scores = {candidate: likeness(candidate) for candidate in known}
    best = max(scores.values(), default=0.0)
    matches = sorted(candidate for candidate, score in scores.items() if score == best >= 0.6)
    return f": did you mean {' or '.join(matches[:3])}?" if matches else ""


def printable(text: str) -> str:
    """Replace characters that would control the terminal, such as ESC, by their escape sequence in Python."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(text: str) -> str:
    """Replace each run of whitespace by one space."""
    return " ".join(text.split())

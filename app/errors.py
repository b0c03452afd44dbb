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
    """Failure of a process of the run."""


class RankLostError(RankError):
    """Loss of the connection to another rank. The other rank's messages show the cause."""


class RankSilentError(RankError):
    """Timeout while waiting for another rank."""


class RanksDifferError(RankError):
    """Ranks whose learning rates or weights differ."""


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
            if isinstance(error.__context__, KeyboardInterrupt):
                return cls.stopped_by("Ctrl-C")  # Lightning exits with 1 after Ctrl-C
            for name, code in EXIT_CODES.items():
                if error.code == code:
                    return cls.stopped_by(name)
            if not error.code:
                return cls()
            code = error.code if isinstance(error.code, int) else 1
            return cls(code, "failed", f"exit code {code}")
        if isinstance(error, KeyboardInterrupt):
            return cls.stopped_by("Ctrl-C")
        if isinstance(error, RankError):
            return cls(1, "failed", str(error))
        message = str(error) if isinstance(error, UserError) else shortage(error)
        if message:
            return cls(2, "failed", message)
        return cls(1, "failed", f"{type(error).__name__}: {one_line(str(error))}")


# prefix of the note that proposes a batch size after an out-of-memory error
SMALLER = "--data.batch_size"
# torch's out-of-memory messages, for an accelerator and for the host
NO_MEMORY = (
    r"(?P<device>\w+) out of memory\. Tried to allocate (?P<size>[\d.]+ \w+)\."
    r"(?:.*?(?P<free>[\d.]+ \w+) is free)?",
    r"(?P<device>CUDA) error: out of memory",
    r"DefaultCPUAllocator: .*?you tried to allocate (?P<size>\d+ bytes)",
)


def out_of_memory(error: BaseException) -> str | None:
    """Return a message with memory and a remedy, or None if memory did not run out."""
    for pattern in NO_MEMORY:
        match = re.search(pattern, str(error), re.DOTALL)
        if match:
            break
    else:
        return None
    known = match.groupdict()
    amounts = ""
    if known.get("size"):
        amounts += f": {known['size']} were requested"
    if known.get("free"):
        amounts += f", and {known['free']} are free"
    proposal = f"a lower {SMALLER} with a higher --trainer.accumulate_grad_batches"
    for note in getattr(error, "__notes__", []):
        if note.startswith(SMALLER):
            proposal = note
    other = "--data.placement disk"
    if "device" in known:
        other = "--trainer.precision bf16-mixed, --data.placement memory"
    return (
        f"out of memory on the {known.get('device', 'host')}{amounts}: give {proposal}, for the "
        f"same training step, or {other}, or more devices"
    )


def shortage(error: BaseException) -> str | None:
    """Return a message with a remedy if memory or open files ran out; None for other errors."""
    text = str(error)
    # "ancdata" is in torch's error when workers send files
    if getattr(error, "errno", None) == errno.EMFILE or re.search(
        "Too many open files|items of ancdata", text
    ):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"too many open files for this shell's limit of {limit}: run `ulimit -n 4096`, then "
            "the command again"
        )
    # torch's errors when loader workers find /dev/shm full
    full = "signal: Bus error|out of shared memory|unable to (write|mmap|allocate).*torch_"
    if re.search(full, text, re.DOTALL):
        return "/dev/shm is too small for loader workers: give --data.num_workers 0, or enlarge it"
    return out_of_memory(error)


def unusable(error: BaseException) -> str | None:
    """Return a message for a path that a program cannot use; None for other errors."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be used ({error.strerror}): give another path"
    return None


SYNONYMS = {  # flag names of other programs
    "gpus": "--trainer.devices",
    "epochs": "--trainer.max_epochs",
    "learning_rate": "--model.optimizer.lr",
    "output_dir": "--run.root",
    "resume": "--ckpt_path",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `: did you mean …?` with the nearest known names, or an empty string.

    Names are compared by their last part, ignoring case: `--lr` is near `--model.optimizer.lr`.
    """

    def last_part(name: str) -> str:
        return name.rpartition(".")[2].lstrip("-").lower()

    names = sorted(set(known))
    word = last_part(name)
    if name.startswith("--"):
        word = last_part(SYNONYMS.get(word, word))
    for match in difflib.get_close_matches(word, map(last_part, names)):
        near = [name for name in names if last_part(name) == match]
        return f": did you mean {' or '.join(near[:3])}?"
    return ""


def printable(text: str) -> str:
    """Escape characters that would control the terminal, such as ESC, as Python does."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def one_line(text: str) -> str:
    """Replace each run of whitespace by one space."""
    return " ".join(text.split())

"""What a user did wrong, reported in one line with exit code 2; and how a run ends."""

import difflib
import importlib.util
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

EXIT_CODES = {"Ctrl-C": 128 + signal.SIGINT, "SIGTERM": 128 + signal.SIGTERM}


class UserError(Exception):
    """Names the thing that is wrong, where it is, and the remedy, in one line."""


class RankError(Exception):
    """A process of the run has failed.

    Args:
        message: What is known of it.
        exit_code: Of the command.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    @classmethod
    def ended(cls, rank: int, pid: int | None, code: int, message: str = "") -> "RankError":
        """One that has left an exit code, below zero for a signal, and maybe the exception that ended it."""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        reason = f": {message.splitlines()[0]}" if message else ""
        return cls(f"rank {rank} (process {pid}) {how}{reason}", 2 if code == 2 else 1)


class RankLostError(RankError):
    """Another rank is gone: the consequence of what has happened there."""


class RankSilentError(RankError):
    """Another rank did not answer in time."""


@dataclass(frozen=True)
class ExitStatus:
    """How a command or a run has ended.

    Attributes:
        code: Exit code of the process.
        status: Of the run record: `completed`, `interrupted` or `failed`.
        reason: Why, in one line; None when it has completed.
    """

    code: int = 0
    status: str = "completed"
    reason: str | None = None

    @classmethod
    def stopped_by(cls, name: str) -> "ExitStatus":
        """Of a run that a signal has ended, `Ctrl-C` or `SIGTERM`."""
        return cls(EXIT_CODES[name], "interrupted", f"by {name}")

    @classmethod
    def of(cls, error: BaseException) -> "ExitStatus":
        """Of what an exception has ended."""
        if isinstance(error, SystemExit):
            if isinstance(error.__context__, KeyboardInterrupt):  # Lightning exits with 1 after Ctrl-C
                return cls.stopped_by("Ctrl-C")
            if error.code == EXIT_CODES["SIGTERM"]:
                return cls.stopped_by("SIGTERM")
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            return cls(code, "failed", f"exit code {code}") if code else cls()
        if isinstance(error, KeyboardInterrupt):
            return cls.stopped_by("Ctrl-C")
        if isinstance(error, UserError):
            return cls(2, "failed", str(error))
        if isinstance(error, RankError):
            return cls(error.exit_code, "failed", str(error))
        said = out_of_memory(error)
        return (
            cls(2, "failed", said)
            if said
            else cls(1, "failed", f"{type(error).__name__}: {' '.join(str(error).split())}")
        )


PARTS = "--data.micro_batch"  # begins a note of an error of memory: how much to take at once
# what torch says of an accelerator, and of the host
NO_MEMORY = (
    r"(?P<what>\w+) out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)\.(?:.*?(?P<free>[\d.]+ \w+) is free)?",
    r"(?P<what>CUDA) error: out of memory",
    r"DefaultCPUAllocator: .*?you tried to allocate (?P<asked>\d+ bytes)",
)


def out_of_memory(error: BaseException) -> str | None:
    """What was asked for and what there was, and which settings take less, where an error is one of memory."""
    found = (re.search(pattern, str(error), re.DOTALL) for pattern in NO_MEMORY)
    match = next(filter(None, found), None)
    if match is None:
        return None
    known = match.groupdict()
    asked = f": {known['asked']} were asked for" if known.get("asked") else ""
    free = f", and {known['free']} are free" if known.get("free") else ""
    notes: list[str] = getattr(error, "__notes__", [])
    parts = next((note for note in notes if note.startswith(PARTS)), f"{PARTS} auto")
    less = (
        "--data.placement disk" if "what" not in known else "--trainer.precision bf16-mixed, or --data.placement memory"
    )
    return (
        f"out of memory on the {known.get('what', 'host')}{asked}{free}: give {parts}, for "
        f"the same training in parts, or a lower --data.batch_size; or {less}; or more --trainer.devices"
    )


SYNONYMS = {  # flag names of other programs
    **dict.fromkeys(("gpu", "gpus", "num_gpus", "nproc_per_node"), "--trainer.devices"),
    **dict.fromkeys(("amp", "bf16", "fp16"), "--trainer.precision"),
    **{"learning_rate": "--model.optimizer.lr", "output_dir": "--run.root", "resume": "--ckpt_path"},
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Phrase `: did you mean …?` for the nearest known name; nothing when none is near.

    Flags are compared by their last part, and a flag of the same section ranks higher. Case is ignored. A name that
    ends a class's import path matches it fully.
    """
    if name.startswith("--"):
        name = SYNONYMS.get(name.rpartition(".")[2].lstrip("-"), name)
    section, _, last = name.rpartition(".")

    def likeness(candidate: str) -> float:
        if candidate.endswith(f".{name}"):
            return 1.0
        theirs, _, word = candidate.rpartition(".")
        elsewhere = name.startswith("--") and "." in name and theirs != section
        a, b = (last.lstrip("-"), word.lstrip("-")) if name.startswith("--") else (name, candidate)
        return difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio() - 0.15 * elsewhere

    ranked = sorted({(likeness(candidate), candidate) for candidate in known}, reverse=True)
    near = 0.135 if len(name) <= 3 else 0.0  # of short names, several may be meant: dp and ddp by dpp
    found = [candidate for score, candidate in ranked if score >= 0.6 and score >= ranked[0][0] - near]
    found = found if near else sorted(found)
    return f": did you mean {' or '.join(found[:3])}?" if found else ""


def one_line(
    message: str, known_flags: Iterable[str] = (), known_classes: Mapping[str, Iterable[str]] | None = None
) -> str:
    """Say in one line what jsonargparse or Lightning says in many.

    Args:
        message: Their message.
        known_flags: Flags as typed, with `--`, among which to look for the one that was meant.
        known_classes: Names of the classes that a flag takes, by the last part of the flag.

    Returns:
        The flag, its value, what is wrong with it and the nearest right one; a message of a form that is not
        known here comes back with its white space folded.
    """
    text = " ".join(message.split())
    flags = list(known_flags)
    if match := re.match(r"No supported (\w+) backend found|`(\w+)Accelerator` can not run", text):
        name = (match[1] or match[2]).lower()
        return f"--trainer.accelerator {name}: there is none on this machine: leave it out, or use cpu"
    if match := re.match(r"`Trainer\(devices=(.+?)\)` value is not a valid input using (\w+)", text):
        return f"--trainer.devices {match[1]}: the {match[2]} accelerator cannot give that: give a count from 1 on"
    if match := re.match(r"unrecognized arguments: (\S+)", text):
        flag = match[1].split("=")[0]
        if flag.endswith((".yaml", ".yml")):
            config = "--experiment" if "--experiment" in flags else "--config"
            return f"{flag}: a value without a flag: did you mean {config} {flag}?"
        return f"{flag}: there is no such flag{nearest(flag, flags)}"
    if match := re.match(r"Subcommand '(\w+)' does not accept option '([^']+)'", text):
        return f"{match[2]} in the config: {match[1]} has no such setting{nearest('--' + match[2], flags)}"
    if match := re.search(r"invalid choice: '([^']*)' \(choose from (.+)\)", text):
        choices = re.findall(r"[\w-]+", match[2])
        return f"{match[1]}: there is no such command{nearest(match[1], choices)} ({', '.join(choices)})"
    if match := re.search(r'Parser key "(?:config|cfg)": (.+)', text):
        return f"--config: {match[1]}"
    key = re.search(r'Parser key "([^"]+)"', text)
    nested = re.search(r"NestedArg\(key='([^']+)'(?:, val='([^']*)'\))?", text)
    through_here = r"- --([\w.+]+)(.*?) (?:- Expected a <class 'NoneType'>|- Option|Given value type)"
    if match := re.search(through_here, text):
        inner = match[1]
        spec = rf"'(\w+)': {{'class_path': '[^']*', 'init_args': {{[^{{}}]*'{re.escape(inner)}': "
        if owner := re.search(spec, text):
            inner = f"{owner[1]}.{inner}"
        if key and not inner.startswith(key[1]):
            within = nested[1] if nested else inner
            inner = f"{key[1]}.{within}" if f".{within}".endswith(f".{inner}") else f"{key[1]}.{within}.{inner}"
        return f"--{inner}{match[2]}"
    if key is None:
        return text
    inner = re.findall(r'Parser key "([^"]+)"', text)[-1]
    within = nested[1] if nested else inner if inner != key[1] else ""
    flag = f"--{key[1]}.{within}" if within else f"--{key[1]}"
    if match := re.search(r"the following arguments are required: (\w+)", text):
        return f"{flag}: its {match[1]} is required"
    if match := re.search(r"Option '([^']+)' is not accepted", text):
        flag = flag if nested else f"--{key[1]}.{match[1]}"
        elsewhere = ", though another class has" if flag in flags else nearest(flag, flags) or ": see --help"
        return f"{flag}: the chosen class has no such setting{elsewhere}"
    if match := re.search(r"Unable to load config ['\"](.*?)['\"]", text):
        return f"{flag} {match[1]}: neither a file nor settings: give {flag}.NAME VALUE"
    got = re.search(r"Got value: (.+?)(?: - |$)", text) or re.search(r"Given value: (.+)$", text)
    value = nested[2] if nested and nested[2] is not None else got[1] if got else ""
    if match := re.search(r"Importing '([^']+)' is not allowed", text):
        if importlib.util.find_spec(match[1].partition(".")[0]) is None:
            return f"{flag} {match[1]}: No module named '{match[1].partition('.')[0]}'"
        return (
            f"{flag} {match[1]}: only classes of app, torch, torchvision, lightning, torchmetrics and of the current "
            f"folder are made unasked: give --trust {match[1].partition('.')[0]} if you know what it does"
        )
    kinds = r"Expected '([^']+)' to be a (?:subclass of|function that returns) (?:<class '|Union\[)(?:\w+\.)*(\w+)"
    if match := re.search(kinds, text):
        return f"{flag} {match[1]}: expected a subclass of {match[2]}"
    if match := re.search(r"(No module named '[^']+'|module '[^']+' has no attribute '[^']+')", text):
        return f"{flag} {value}: {match[1]}"
    if "Multiple subclasses with name" in text:
        return f"{flag} {value}: several classes have this name: give its import path, lightning.pytorch.cli.{value}"
    expected, choices = _expected(text)
    match = re.search(r"Expected a dot import path string: (\S+)", text)
    if match and "a number" not in expected:
        near = nearest(match[1], (known_classes or {}).get(flag.rpartition(".")[2].lstrip("-"), ()))
        return f"{flag} {match[1]}: there is no such class{near or ': give its import path, package.module.Class'}"
    if expected:
        near = f": give [{value}]" if "," in value and "list" in expected else nearest(value, choices)
        return f"{flag} {value}: expected {' or '.join(expected)}{near}"
    known = "Expected a path", "Expected a <class 'None", "Expected <class 'None"
    reasons = re.split(r"Errors:| - ", text.partition("Errors:")[2].partition("Given value type:")[0])
    why = next(
        (part for each in reasons if (part := each.strip(" -")) and not part.startswith(known)), "not what it takes"
    )
    why = re.sub(r"Expected <class '(\w+)'>", r"expected \1", why)[:200]
    return f"{flag} {value}: {why}" if "Does not validate" in text else text


def _expected(text: str) -> tuple[list[str], list[str]]:
    """Types and choices that a message says it wanted."""
    names: list[str] = []
    choices: list[str] = []
    for wanted in re.findall(r"Expected an? (<class '[^']+'>|typing\.Literal\[[^\]]*\])", text):
        if wanted.startswith("<class"):
            name = wanted.split("'")[1].rsplit(".", 1)[-1]
            name = {"NoneType": "null", "float": "a number", "tuple": "list", "Sequence": "list"}.get(name, name)
            if name not in ("null", "LightningModule", "LightningDataModule"):
                names.append(name)
        else:
            choices += [choice.strip("' ") for choice in wanted[len("typing.Literal[") : -1].split(",")]
    if "a number" in names:
        names = [name for name in names if name != "int"]
    if choices:
        names.append(f"one of {', '.join(dict.fromkeys(choices))}")
    return list(dict.fromkeys(names)), choices

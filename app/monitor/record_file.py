"""Reads a run record, `run.json`, and refuses one that is damaged."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from app.monitor.rank_times import NAMES
from app.monitor.step_profiler import PHASES
from app.system.files import read_json, write_json

MOST = 1e15  # of a number that a reader can compute with


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MOST  # nan is not


def _whole(value: Any) -> bool:
    return type(value) is int and abs(value) < MOST


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


# the fields that readers of a record count on: null may stand in place of each but those in a tuple
FORM: dict[str, Any] = {
    "status": (_text,),
    **dict.fromkeys(("error", "command", "run_dir", "config", "tracker", "resumed_from", "precision"), _text),
    **dict.fromkeys(("strategy", "placement", "tested"), _text),
    **dict.fromkeys(("devices", "num_nodes", "world_size", "replicas", "threads", "global_batch_size"), _positive),
    **dict.fromkeys(("steps", "max_epochs", "max_steps", "micro_batch", "not_finite_since", "skipped_steps"), _whole),
    **dict.fromkeys(("setup_s", "train_s", "others_cores", "time_limit", "steps_per_epoch"), _number),
    "wall_s": _positive,
    "launchers": [_text],
    "parts": [{"status": _text, "train_s": (_number,)}],
    "ranks": [{"rank": (_whole,), "node": (_whole,), "slow": _flag, **dict.fromkeys(NAMES, (_number,))}],
    "epochs": [
        {"epoch": (_whole,), "whole": (_flag,)}
        | dict.fromkeys(("train_loss", "val_loss", "val_acc", "seconds", "lr", "samples_per_s"), _number)
    ],
    "peak_memory": [
        {"rank": (_whole,), "device": (_text,)} | dict.fromkeys(("allocated_gib", "host_rss_gib", "total_gib"), _number)
    ],
    "checkpoint": {"best": _text, "last": _text},
    "throughput": {**dict.fromkeys(("median", "min", "max"), _positive), "n": _whole},
    "test": {"acc": _number, "loss": _number},
    "validation": {"acc": _number, "loss": _number},
    "train_loss": dict.fromkeys(("first", "middle", "last"), _number),
    "time_per_step": dict.fromkeys((*PHASES, "launch"), (_number,)),
    "model": {"name": (_text,), "parameters": (_whole,)},
    "data": {"name": (_text,), "classes": (_whole,), "images": dict.fromkeys(("train", "val", "test"), _whole)},
    "course": {"samples_per_s": [[_number]], "memory_gib": [[_number]]},
    "hardware": {"cpu": (_text,), "cores": (_whole,), "gpus": [_text]},
    "versions": {},
    "profile": {"limit": (_text,), "ranks": [{"rank": (_whole,), "host": _number, "trace": _text}]},
}
RATES = ("samples_per_s", "samples_per_s_min", "samples_per_s_max")
RESULTS: dict[str, Any] = {  # of a comparison
    "hardware": FORM["hardware"],
    "variants": [
        {**dict.fromkeys((*RATES, "nodes", "replicas", "threads", "global_batch"), _positive), "runs": [_text]}
    ],
}


def _misfit(value: Any, form: Any, place: str) -> str | None:
    """Return the place of the first value that has not its form."""
    if isinstance(form, tuple):
        return place if value is None else _misfit(value, form[0], place)
    if value is None:
        return None
    if isinstance(form, dict) and isinstance(value, dict):
        places = (_misfit(value.get(key), inner, f"{place}.{key}".lstrip(".")) for key, inner in form.items())
    elif isinstance(form, list) and isinstance(value, list):
        places = (_misfit(row, (form[0],), f"{place}[{index}]") for index, row in enumerate(value))
    else:
        return None if callable(form) and form(value) else place
    return next(filter(None, places), None)


def load_record(path: Path, form: dict[str, Any] = FORM) -> dict[str, Any]:
    """Read a run's record, or another file of JSON.

    Args:
        path: The file.
        form: Types of its fields.

    Raises:
        ValueError: When it cannot be read, or a field is not what it should be; the message names the file.
    """
    record = read_json(path)
    if place := _misfit(record, form, ""):
        raise ValueError(f"{path} cannot be read ({place} is not what it should be)")
    return record


def mark_failed(directory: str, reason: str) -> None:
    """Say in a run's record why it has failed, where its own processes could not, or saw only the consequence.

    Args:
        directory: The directory of the run.
        reason: Why, in one line.
    """
    path = Path(directory, "run.json")
    with suppress(ValueError, OSError):  # none, or damaged; or the disk is full
        record = load_record(path)
        if record["status"] != "completed":
            write_json(path, {**record, "status": "failed", "error": reason})

"""Reads a run record, `run.json`, and refuses one that is damaged."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from app.monitor.rank_times import NAMES
from app.monitor.step_profiler import PHASES
from app.system.files import read_json, write_json

MOST = 1e15  # limit of numbers in a record
POSITIVE = "more than 0"  # a form, like str, bool, int (whole numbers) and float (finite numbers)

# forms of the fields that readers of a record use; a form in a tuple does not allow null
FORM: dict[str, Any] = {
    "status": (str,),
    **dict.fromkeys(("error", "command", "run_dir", "config", "tracker", "resumed_from", "precision"), str),
    **dict.fromkeys(("strategy", "placement", "tested"), str),
    **dict.fromkeys(("devices", "num_nodes", "world_size", "replicas", "threads", "global_batch_size"), POSITIVE),
    **dict.fromkeys(("steps", "max_epochs", "max_steps", "micro_batch", "not_finite_since", "skipped_steps"), int),
    **dict.fromkeys(("setup_s", "train_s", "others_cores", "time_limit", "steps_per_epoch"), float),
    "wall_s": POSITIVE,
    "launchers": [str],
    "parts": [{"status": str, "train_s": (float,)}],
    "ranks": [{"rank": (int,), "node": (int,), "slow": bool, **dict.fromkeys(NAMES, (float,))}],
    "epochs": [
        {"epoch": (int,), "whole": (bool,)}
        | dict.fromkeys(("train_loss", "val_loss", "val_acc", "seconds", "lr", "samples_per_s"), float)
    ],
    "peak_memory": [
        {"rank": (int,), "device": (str,)} | dict.fromkeys(("allocated_gib", "host_rss_gib", "total_gib"), float)
    ],
    "checkpoint": {"best": str, "last": str},
    "throughput": {**dict.fromkeys(("median", "min", "max"), POSITIVE), "n": int},
    "test": {"acc": float, "loss": float},
    "validation": {"acc": float, "loss": float},
    "train_loss": dict.fromkeys(("first", "middle", "last"), float),
    "time_per_step": dict.fromkeys((*PHASES, "launch"), (float,)),
    "model": {"name": (str,), "parameters": (int,)},
    "data": {"name": (str,), "classes": (int,), "images": dict.fromkeys(("train", "val", "test"), int)},
    "course": {"samples_per_s": [[float]], "memory_gib": [[float]]},
    "hardware": {"cpu": (str,), "cores": (int,), "gpus": [str]},
    "versions": {},
    "profile": {"limit": (str,), "ranks": [{"rank": (int,), "host": float, "trace": str}]},
}
RATES = ("samples_per_s", "samples_per_s_min", "samples_per_s_max")
RESULTS: dict[str, Any] = {  # of a comparison
    "hardware": FORM["hardware"],
    "variants": [{**dict.fromkeys((*RATES, "nodes", "replicas", "threads", "global_batch"), POSITIVE), "runs": [str]}],
}


def _fits(value: Any, form: Any) -> bool:
    if form in (str, bool):
        return isinstance(value, form)
    is_number = form in (int, float, POSITIVE) and type(value) in (int, float) and abs(value) < MOST  # false for NaN
    return is_number and (form is not int or type(value) is int) and (form is not POSITIVE or value > 0)


def _misfit(value: Any, form: Any, place: str) -> str | None:
    """Return the place of the first value that does not fit its form, or None."""
    if isinstance(form, tuple):
        return place if value is None else _misfit(value, form[0], place)
    if value is None:
        return None
    if isinstance(form, dict) and isinstance(value, dict):
        places = (_misfit(value.get(key), inner, f"{place}.{key}".lstrip(".")) for key, inner in form.items())
    elif isinstance(form, list) and isinstance(value, list):
        places = (_misfit(row, (form[0],), f"{place}[{index}]") for index, row in enumerate(value))
    else:
        return None if _fits(value, form) else place
    return next(filter(None, places), None)


def load_record(path: Path, form: dict[str, Any] = FORM) -> dict[str, Any]:
    """Read and check a run's record, or another JSON file.

    Args:
        path: The file.
        form: Forms of its fields.

    Raises:
        ValueError: When it cannot be read, or a field does not fit its form; the message names file and field.
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

"""Reads a run record, `run.json`, and refuses one that is damaged."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from app.monitor.rank_times import NAMES
from app.monitor.step_profiler import PHASES
from app.system.files import read_json, write_json

NUMBER = (int, float)
# what readers of a record count on; null may stand anywhere
FORM: dict[str, Any] = {
    **dict.fromkeys(("status", "error", "command", "run_dir", "config", "tracker", "resumed_from", "precision"), str),
    **dict.fromkeys(("devices", "num_nodes", "world_size", "replicas", "steps", "threads", "global_batch_size"), int),
    **dict.fromkeys(("setup_s", "train_s", "wall_s", "others_cores", "time_limit", "not_finite_since"), NUMBER),
    "launchers": [str],
    "parts": [{"status": str, "train_s": NUMBER}],
    "ranks": [{"rank": int, "node": int, **dict.fromkeys(NAMES, NUMBER)}],
    "epochs": [dict.fromkeys(("epoch", "train_loss", "val_loss", "val_acc", "seconds"), NUMBER)],
    "peak_memory": [{"rank": int, "device": str, "allocated_gib": NUMBER, "host_rss_gib": NUMBER}],
    "checkpoint": {"best": str, "last": str},
    "throughput": dict.fromkeys(("median", "min", "max", "n"), NUMBER),
    "train_loss": dict.fromkeys(("first", "middle", "last"), NUMBER),
    "time_per_step": dict.fromkeys((*PHASES, "launch"), NUMBER),
    "model": {"name": str, "parameters": int},
    "data": {"name": str, "classes": int, "images": dict.fromkeys(("train", "val", "test"), int)},
    "course": {"samples_per_s": [[NUMBER]], "memory_gib": [[NUMBER]]},
}


def load_record(path: Path) -> dict[str, Any]:
    """Read a run's record.

    Raises:
        ValueError: When it cannot be read, or a field is not what it should be; the message names the file.
    """
    record = read_json(path)

    def wrong(value: Any, form: Any, place: str) -> str | None:
        if value is None:
            return None
        if isinstance(form, dict) and isinstance(value, dict):
            found = (wrong(value.get(key), inner, f"{place}.{key}") for key, inner in form.items())
        elif isinstance(form, list) and isinstance(value, list):
            found = (wrong(each, form[0], f"{place}[{index}]") for index, each in enumerate(value))
        else:
            return None if isinstance(form, type | tuple) and isinstance(value, form) else place
        return next(filter(None, found), None)

    if not isinstance(record.get("status"), str):
        raise ValueError(f"{path} cannot be read (it has no status)")
    if place := wrong(record, FORM, ""):
        raise ValueError(f"{path} cannot be read ({place[1:]} is not what it should be)")
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

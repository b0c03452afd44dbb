"""Writes files that are either whole or absent."""

import json
import math
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is never half written, even where this process is killed.

    Args:
        path: The file; its folder is made.
        value: NaN and infinity, which JSON does not have, become null.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")
    os.replace(temporary, path)


def finite(value: Any) -> Any:
    """A value as JSON has it: NaN and infinity are null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

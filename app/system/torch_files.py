"""Files of `torch.save`: found, verified by their checksums, and loaded without running their code.

Torch's files are zip archives with a checksum of each member, but torch does not verify it. Its old
format has none.
"""

import io
import os
import pickle
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from app.errors import UserError
from app.system.files import open_file


def load(path: Path, flag: str = "") -> Any:
    """Verify a file's checksums, and load it on the host; load only tensors and plain values.

    Args:
        path: Path of the file.
        flag: Flag that named the file, for messages.

    Raises:
        UserError: When the file is missing, damaged, or holds other objects.
    """
    check_exists(path, flag)
    try:
        with open_file(path) as file:
            damaged = None
            if file.read(2) == b"PK":  # torch's old format has no checksums
                damaged = zipfile.ZipFile(file).testzip()
            if damaged is None:
                file.seek(0)
                return _load(file)
            reason = f"damaged ({damaged})"
    except OSError as error:
        reason = f"it cannot be read ({error.strerror or error})"
    except Exception as error:  # unpickling arbitrary bytes can raise anything
        reason = _refusal(str(error)) or f"not a checkpoint, or damaged ({type(error).__name__})"
    raise UserError(f"{flag} {path}: {reason}".lstrip())


def _load(file: IO[bytes]) -> Any:
    # many published files hold the training's options as a Namespace
    allowed = torch.serialization.safe_globals([Namespace])
    with allowed, warnings.catch_warnings(action="ignore"):
        return torch.load(file, "cpu", weights_only=True)


class _Emptying(pickle.Pickler):
    """Pickler that replaces torch's own tensors by an empty one."""

    def reducer_override(self, value: Any) -> Any:
        is_torchs = type(value).__module__.partition(".")[0] == "torch"
        if isinstance(value, torch.Tensor) and is_torchs:
            return _EMPTY.__reduce_ex__(2)
        return NotImplemented


# what pickling raises for an object that it cannot save, and torch for one that it does not load
UNREADABLE = (pickle.PickleError, AttributeError, ImportError, RuntimeError, TypeError, ValueError)
_EMPTY = torch.empty(0)
_EMPTYING: Any = SimpleNamespace(__name__="pickle", Pickler=_Emptying)


def unreadable(value: Any, place: str = "") -> tuple[str, Any] | None:
    """Return the place and value of the first object that `load` would reject in a saved value.

    Return None if `load` would read the value. Tensors are replaced by an empty one, because they
    may be large.

    Args:
        value: A value for `torch.save`.
        place: Expression for the value, such as `checkpoint`.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file, pickle_module=_EMPTYING)
        file.seek(0)
        _load(file)
        return None
    except UNREADABLE:
        members: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list | tuple):
        members = enumerate(value)
    for key, member in members:
        found = unreadable(member, f"{place}[{key!r}]")
        if found is not None:
            return found
    return place, value


def _refusal(message: str) -> str | None:
    """Return why torch refuses to load objects; hide its advice to run the file's code instead."""
    match = re.search(r"GLOBAL (\S+)", message)
    if match:
        content = match[1]
    elif "TorchScript" in message:
        content = "a TorchScript program"
    else:
        return None
    return (
        f"it holds {content}, but only tensors and plain values are loaded: "
        "save a state_dict() of tensors"
    )


def check_exists(path: Path, flag: str = "") -> None:
    """Check that a file exists.

    Raises:
        UserError: When there is no such file; the message has the nearest existing name.
    """
    if not os.path.exists(path):  # unlike Path.exists, false for a name that is too long
        raise UserError(f"{flag} {path}: there is no such file{_nearest(path)}".lstrip())


def _nearest(path: Path) -> str:
    """Return `: did you mean PATH?` for a mistyped path; else names beside the missing one."""
    start = Path(path.anchor)
    found = start
    for part in path.parts[len(start.parts) :]:
        names = sorted(entry.name for entry in found.glob("*"))
        similar = get_close_matches(part, names, 1)  # the best match first, so the name itself
        if similar:
            found /= similar[0]
        elif names and found != start:
            return f": {found} has {', '.join(names[:3])}"
        else:
            return ""
    return f": did you mean {found}?"

"""Files that `torch.save` wrote: found, verified by their checksums, and loaded without running their code.

Torch's files are zip archives. They hold a checksum of each member, so that a copied file has its
checksums, too, but torch does not verify them. Its old format has none.
"""

import os
import re
import warnings
import zipfile
from argparse import Namespace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

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
            reason = _damage(file)
            if reason is None:
                file.seek(0)
                allowed = torch.serialization.safe_globals(
                    [Namespace]
                )  # the options of many published trainings
                with allowed, warnings.catch_warnings(action="ignore"):
                    return torch.load(file, "cpu", weights_only=True)
    except OSError as error:
        reason = f"it cannot be read ({error.strerror or error})"
    except Exception as error:  # unpickling arbitrary bytes can raise anything
        reason = _refusal(str(error)) or f"not a checkpoint, or damaged ({type(error).__name__})"
    raise UserError(f"{flag} {path}: {reason}".lstrip())


def _damage(file: Any) -> str | None:
    """Verify a file's checksums, and return a description of the damage, or None."""
    if file.read(2) != b"PK":
        return None  # torch's old format, which has no checksums
    try:
        with zipfile.ZipFile(file) as archive:
            member = archive.testzip()
    except Exception:  # zipfile raises many types on a damaged file
        return "damaged or truncated"
    return f"damaged ({member})" if member else None


def _refusal(message: str) -> str | None:
    """Return the reason why torch refuses to load objects; hide its advice to run the file's code instead."""
    match = re.search(r"GLOBAL (\S+)", message)
    if match is None and "TorchScript" not in message:
        return None
    content = match[1] if match else "a TorchScript program"
    return f"it holds {content}, but only tensors and plain values are loaded: save a state_dict() of tensors"


def check_exists(path: Path, flag: str = "") -> None:
    """Check that a file exists.

    Raises:
        UserError: When there is no such file; the message has the nearest existing name.
    """
    if not os.path.exists(path):  # unlike Path.exists, false for a name that is too long
        raise UserError(f"{flag} {path}: there is no such file{_nearest(path)}".lstrip())


def _nearest(path: Path) -> str:
    """Return `: did you mean PATH?` for a path with mistyped parts; else some names beside the missing one."""
    start = found = Path(path.anchor)
    for part in path.parts[len(start.parts) :]:
        names = sorted(entry.name for entry in found.glob("*"))
        similar = [part] if part in names else get_close_matches(part, names, 1)
        if not similar:
            return f": {found} has {', '.join(names[:3])}" if names and found != start else ""
        found /= similar[0]
    return f": did you mean {found}?"

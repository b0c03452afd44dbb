"""Opens files that users name, and writes files that are either whole or absent."""

import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

PART = ".part"  # suffix of a file while it is written


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; reject a pipe, which would block, and a device, which may never end.

    Raises:
        OSError: When the file cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(descriptor, "rb")


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name only once it is complete and on the disk.

    It is written in the same folder under another name. A lock distinguishes it from incomplete files of killed
    processes, which `remove_parts` removes.

    Args:
        path: The file; its folder is created.

    Raises:
        OSError: When the file cannot be written; an existing file stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part, file = _part(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)


def _part(path: Path) -> tuple[Path, BinaryIO]:
    """Create a locked file in the path's folder; until it is locked, another process may remove it."""
    while True:
        part = path.with_name(f".{path.name[:200]}.{os.urandom(4).hex()}{PART}")
        file = part.open("xb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if part.exists():
            return part, file
        file.close()


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk, so that a loss of power does not undo a renaming."""
    with suppress(OSError):  # a file system without fsync of folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Remove incomplete files of killed processes."""
    for part in folder.glob(f".*{PART}"):
        with suppress(OSError), part.open("r+b") as file:  # NFS locks only files that are open for writing
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while it is written
            part.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 by `whole`; a lone surrogate becomes a question mark.

    Raises:
        OSError: When the file cannot be written.
    """
    with whole(path) as file:
        file.write(text.encode(errors="replace"))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file by `whole`.

    Args:
        path: The file; its folder is created.
        value: Its content; NaN and infinity become null.

    Raises:
        OSError: When the file cannot be written.
    """
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: When the file cannot be read or holds no object; the message names the file.
    """
    try:
        with open_file(path) as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read ({reason})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read (no JSON object)")
    return content


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""File access: opens files that users name, and writes files atomically."""

import csv
import errno
import fcntl
import io
import json
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from app.errors import UserError

PART = ".part"  # suffix of an unfinished file


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; reject pipes, which block, and devices, which may not end.

    Every file that a user names is opened here. For a library that needs a path, open it around the
    library's call: `with open_file(path): torch.load(path, mmap=True)`.

    Raises:
        OSError: When the file cannot be opened, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name has a NUL character", str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(descriptor, "rb")


@contextmanager
def downloading(problem: str, remedy: str) -> Iterator[None]:
    """Set a timeout for downloads, as torchvision does not, and turn errors into a UserError.

    Args:
        problem: Error message before the reason, such as `no weights of resnet18`.
        remedy: Error message after the reason.

    Raises:
        UserError: When the download fails.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20)
    try:
        yield
    except (OSError, RuntimeError, EOFError) as error:  # URLError is an OSError
        # torchvision's first line names the file, the last one the reason
        reason = str(error).strip().rpartition("\n")[2] or type(error).__name__
        raise UserError(f"{problem} ({reason}): {remedy}") from error
    finally:
        socket.setdefaulttimeout(before)


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; when it is complete and on disk, rename it to `path`.

    The temporary file is in the same folder, and locked while its writer lives. `remove_parts`
    deletes unlocked temporary files, whose writers were killed.

    Args:
        path: Path of the file; its folder is created.

    Raises:
        OSError: When the file cannot be written; an existing file is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, file = _part(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno:
            error.filename = str(path)  # a full disk's error names no file
        raise
    sync_folder(path.parent)


def _part(path: Path) -> tuple[Path, BinaryIO]:
    """Create and lock a temporary file beside `path`; retry if `remove_parts` was faster."""
    while True:
        temporary = path.with_name(f".{path.name[:200]}.{os.urandom(4).hex()}{PART}")
        file = temporary.open("xb")
        with suppress(OSError):  # raised by a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if temporary.exists():
            return temporary, file
        file.close()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a power failure does not undo a rename."""
    with suppress(OSError):  # raised by a file system without fsync of folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Delete unfinished files of killed processes."""
    for temporary in folder.glob(f".*{PART}"):
        # NFS locks only files that are open for writing
        with suppress(OSError), temporary.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if a process is writing it
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically; a lone surrogate becomes a question mark.

    Raises:
        OSError: When the file cannot be written.
    """
    with whole(path) as file:
        file.write(text.encode(errors="replace"))


def inert(cell: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would compute; `read_csv` removes it."""
    # source: https://owasp.org/www-community/attacks/CSV_Injection
    if not isinstance(cell, str) or not cell.startswith(tuple("=+-@\t\r\n＝＋－＠'")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def write_csv(path: Path, lines: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file atomically, with `inert` cells; keep bytes that are not UTF-8.

    Raises:
        OSError: When the file cannot be written.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for line in lines:
        writer.writerow(map(inert, line))
    with whole(path) as file:
        file.write(text.getvalue().encode(errors="surrogateescape"))


def read_csv(path: Path) -> list[list[str]]:
    """Read the lines of a file of `write_csv`; replace bytes that are not UTF-8.

    Raises:
        OSError: When the file cannot be read.
    """
    lines = []
    with io.TextIOWrapper(open_file(path), "utf-8", "replace", newline="") as file:
        for line in csv.reader(file):
            if line:
                lines.append([cell.removeprefix("'") for cell in line])
    return lines


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically.

    Args:
        path: Path of the file; its folder is created.
        value: Content; NaN and infinity become null.

    Raises:
        OSError: When the file cannot be written.
    """
    strict = json.loads(json.dumps(value), parse_constant=lambda name: None)
    write_text(path, json.dumps(strict, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: When the file is unreadable or not a JSON object; the message names the file.
    """
    try:
        with open_file(path) as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read ({reason})") from error
    return content

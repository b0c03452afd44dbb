"""Set-up of this program's processes; programs that import `app` as a library do not need it."""

import ctypes
import io
import logging
import os
import sys
import warnings
from contextlib import suppress
from typing import Any

from app.system.deferred_imports import defer_imports

M_TRIM_THRESHOLD = -1  # options of malloc.h
M_MMAP_MAX = -4
IGNORED = (  # patterns of the first words of ignored warnings
    ".*LeafSpec",  # Lightning 2.6 uses a class that newer torch deprecates
    "Corrupt EXIF data",  # such images are read without their EXIF data
    # warns of fewer batches than log_every_n_steps; epochs are logged anyway
    "The number of training batches",
    # the exact loader's callback says so, too
    "You're resuming from a checkpoint that ended before the epoch",
    "Experiment logs directory",  # the tracker creates the folder first
    "The `srun` command is available",  # the rules of `fit` check this
)


class _Output(io.FileIO):
    """Standard stream that drops unwritable text, so that a closed pipe ends no run."""

    is_noted = False

    def write(self, text: Any) -> int:
        """Write bytes. After the first error on stdout, print a line on stderr."""
        try:
            return super().write(text)
        except OSError as error:
            if self.fileno() == 1 and not self.is_noted:
                self.is_noted = True
                message = f"stdout cannot be written ({error.strerror}): the command continues"
                print(message, file=sys.stderr)
            return len(text)


def keep_output() -> None:
    """Make unwritable output harmless, and open closed standard streams.

    Characters that a terminal of another encoding lacks, such as `×` in ASCII, are escaped.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell, as by `>&-`
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
        elif stream is getattr(sys, f"__{name}__") and name != "stdin":
            stream.flush()
            text = io.TextIOWrapper(
                io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
                stream.encoding,
                "backslashreplace",
                # PYTHONUNBUFFERED sets `write_through`
                line_buffering=stream.line_buffering or stream.write_through,
            )
            setattr(sys, name, text)


def keep_memory() -> None:
    """Make malloc keep what a step frees, so that the next step need not get it from the kernel.

    glibc returns large blocks, and the kernel clears them page by page for their next use. That
    took a fifth of LeNet's step in batches of 256.
    """
    with suppress(AttributeError):  # raised by other C libraries
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def set_up() -> None:
    """Make output safe, keep memory, defer imports, and hide warnings that users cannot fix.

    Prepare deterministic training on a GPU, because torch reads the variable only once, at the
    first matrix product. Safe to call again.
    """
    keep_output()
    keep_memory()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    defer_imports()
    for message in IGNORED:
        warnings.filterwarnings("ignore", message)
    # hides a warning about a read-only home
    logging.getLogger("matplotlib").setLevel(logging.ERROR)

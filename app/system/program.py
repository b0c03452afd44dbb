"""Set-up of this program's processes; programs that import `app` as a library do not need it."""

import io
import logging
import sys
import warnings

from app.system.deferred_imports import defer_imports

IGNORED = (  # patterns of the first words of ignored warnings
    ".*LeafSpec",  # Lightning 2.6 uses a class that newer torch deprecates
    "The number of training batches",  # warns of fewer batches than log_every_n_steps; epochs are logged anyway
    "Experiment logs directory",  # the tracker creates the folder first
    "The `srun` command is available",  # the rules of `fit` check this
)


def set_up() -> None:
    """Defer imports that most runs never use, and hide warnings that users cannot fix. Safe to call again.

    Also escape characters that a terminal of another encoding lacks, such as `×` in ASCII.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    defer_imports()
    for message in IGNORED:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # hides a warning about a read-only home

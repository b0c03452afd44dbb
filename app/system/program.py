"""Set-up of this program's processes; programs that import `app` as a library do not need it."""

import logging
import os
import warnings

from app.system.deferred_imports import defer_imports

IGNORED = (  # patterns of the first words of ignored warnings
    ".*LeafSpec",  # Lightning 2.6 uses a class that newer torch deprecates
    "Corrupt EXIF data",  # such images are read without their EXIF data
    "The number of training batches",  # warns of fewer batches than log_every_n_steps; epochs are logged anyway
    "Experiment logs directory",  # the tracker creates the folder first
    "The `srun` command is available",  # the rules of `fit` check this
)


def set_up() -> None:
    """Defer imports that most runs never use, and hide warnings that users cannot fix. Safe to call again.

    Prepare deterministic training on a GPU, because torch reads the variable only once, at the first matrix product.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    defer_imports()
    for message in IGNORED:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # hides a warning about a read-only home

"""Set-up of the program's processes; a program that imports `app` as a library does not need it."""

import logging
import warnings

from app.system.deferred_imports import defer_imports

IGNORED = (  # warnings, by their beginning
    ".*LeafSpec",  # Lightning 2.6 with newer torch
    r".*'(train|val|test)_(loss|acc|loss_step)'.*sync_dist=True",  # synchronized before they are logged
    "The number of training batches",  # epochs are logged, too
    "Experiment logs directory",  # the tracker's folder exists first
    "The `srun` command is available",  # the rules of fit check for srun
)


def set_up() -> None:
    """Defer imports that most runs never use, and hide warnings on which users cannot act. Safe to call again."""
    defer_imports()
    for message in IGNORED:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns about a read-only home

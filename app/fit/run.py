"""How a command line of Lightning's ends: what is said of an error, and the exit code."""

import logging
import os
from collections.abc import Sequence

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from app.errors import ReportedUserError, UserError, one_line
from app.fit.command import CLI
from app.launch.cluster_environment import launched
from app.launch.process import PARENT, requeue
from app.launch.signals import EXIT_CODES
from app.system.lightning_patches import complaint


def _quiet(record: logging.LogRecord) -> bool:
    """Leave out Lightning's advertisements, and that there is no TPU."""
    return not record.getMessage().startswith(("💡", "TPU available"))


def run(argv: Sequence[str]) -> int:
    """Run a command line.

    Args:
        argv: The arguments of `python -m app`.

    Returns:
        Exit code.

    Raises:
        UserError: For what a user did wrong.
    """
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_quiet)
    try:
        cli = CLI(argv)
    except SIGTERMException:
        return 143
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning exits with 1 after Ctrl-C
            return 130
        if isinstance(end.code, str):
            raise
        return end.code or 0
    except ReportedUserError:
        return 2
    except (UserError, torch.multiprocessing.ProcessRaisedException) as error:
        # a worker or a spawned process hands on its error as the text of a traceback
        *_, last = str(error).rsplit("UserError: ", 1)
        if last == str(error) and isinstance(error, torch.multiprocessing.ProcessRaisedException):
            raise
        raise UserError(one_line(last)) from error
    except (MisconfigurationException, RuntimeError, ValueError) as error:
        said = complaint(error)
        if said is None:
            raise
        raise UserError(said) from error
    stopped_by = cli.stopped_by
    if stopped_by == "SIGUSR1":
        stopped_by = None if requeue() else "SIGTERM"
    # what started the others would take anything but 0 for a failure; torchrun has to, to go on without a node
    launcher = launched()
    first = PARENT not in os.environ and (launcher is None or launcher.by == "torchrun" or cli.trainer.is_global_zero)
    return EXIT_CODES.get(stopped_by or "", 0) if first else 0

"""Root cause of a failed run, and one-line messages for the user."""

import faulthandler
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import distributed
from torch.distributed.elastic.multiprocessing import ProcessFailure

from app.errors import (
    CAUSES,
    RankError,
    RankLostError,
    RanksDifferError,
    RankSilentError,
    UserError,
    one_line,
    shortage,
    unusable,
)
from app.launch import watchdog
from app.system.files import write_json
from app.system.lightning_patches import complaint
from app.system.torch_patches import abort_process_group
from app.system.tracebacks import blamed, users_part

# patterns of messages with which gloo, NCCL and TCPStore report a lost rank and a timeout
GONE = re.compile(
    "(closed|reset) by (remote )?peer|Broken pipe|(likely|remotely) closed|remote process"
    "|was aborted"
)
SILENT = re.compile("[Tt]imed out|[Tt]imeout")
# address of the lost rank in these messages, unless it is on this machine
PEER = re.compile(r"(?:peer |remote=|error )\[(?!127\.|::1)([\w.:]+)\]")
ANOTHER = "another rank"
# exceptions with which libraries reject a setting
SETTING = (MisconfigurationException, ValueError, TypeError, ImportError)
_has_left = False  # whether `leave_nccl` has aborted the process group
# exceptions of a rank that the command raises unchanged
UNCHANGED = {
    error.__name__: error for error in (UserError, RankLostError, RankSilentError, RanksDifferError)
}


def lost(text: str) -> RankError | None:
    """Return a RankLostError or RankSilentError for a communication error's message, or None."""
    if GONE.search(text):
        peer = PEER.search(text)
        other = peer[1] if peer else ANOTHER
        return RankLostError(f"lost the connection to {other}: see its messages")
    if SILENT.search(text) and "DataLoader" not in text:
        return RankSilentError(
            f"no answer from another rank within --cluster.timeout: {who_hangs()}"
        )
    return None


def who_hangs() -> str:
    """Name the ranks that hang, by the watchdogs' stacks, or else the possible causes."""
    unknown = "it hangs, or the link to it is cut"
    if watchdog.heartbeat is None:
        return unknown
    places = watchdog.where(watchdog.heartbeat.folder)
    if not places:
        return unknown
    if " is in " not in places:
        places = f"{unknown}; {places}"
    return f"{places} (stacks: {watchdog.heartbeat.folder})"


def leave_nccl() -> None:
    """Abort an NCCL process group after an error.

    The group's pending calls would block the move of the model to the host, and later the process's
    exit. Source: https://docs.pytorch.org/docs/stable/distributed.html#shutdown.
    """
    global _has_left
    if distributed.is_initialized() and distributed.get_backend() == "nccl":
        _has_left = True
        abort_process_group()


def explained(
    error: BaseException, flags: Iterable[tuple[str, Any]] | None = None
) -> BaseException:
    """Replace an exception by one with a one-line message for the user, if its cause is known.

    `ExitStatus.of` maps the result to exit code and line. A communication error and `sys.exit(0)`
    become a RankError. A shortage of memory or files, a path that cannot be used, an exception in
    an object that a flag created, and a known complaint of Lightning become a UserError.

    Args:
        error: The exception.
        flags: Flags and values, while model, data and Trainer are built. There, any exception that
            has not passed through the user's code is about a setting, and becomes a UserError.

    Returns:
        The replacement, or the exception itself.
    """
    if isinstance(error, SystemExit) and not error.code:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno} {place.name}"
        return RankError(
            f"sys.exit() in {where} ended the run early: set trainer.should_stop to end it in order"
        )
    # gloo raises RuntimeError
    has_group = _has_left or distributed.is_initialized()
    is_gloos = type(error) is RuntimeError and has_group
    rank_error = lost(str(error))
    if rank_error and (is_gloos or isinstance(error, distributed.DistError)):
        return rank_error
    if isinstance(error, UserError | RankError) or not isinstance(error, Exception):
        return error
    message = shortage(error)
    if message:
        return UserError(message)
    is_users = users_part("".join(traceback.format_exception(error))) is not None
    if flags is not None and not is_users:
        return _setting_error(error, flags)
    if flags is None:
        message = complaint(error)
    if not is_users:
        message = message or unusable(error)
    return blamed(error, message) or error


def _setting_error(error: Exception, flags: Iterable[tuple[str, Any]]) -> UserError:
    """Return a UserError that names the setting which made a library raise an exception.

    It is the flag that created the failing object or, if unknown, the first flag whose name and
    value the message contains.
    """
    while "jsonargparse" in traceback.extract_tb(error.__traceback__)[-1].filename:
        wrapped = error.__cause__ or error.__context__
        if not isinstance(wrapped, Exception):
            break
        error = wrapped
    known = error if isinstance(error, UserError) else blamed(error)
    if known:
        return known
    text = one_line(str(error))
    if not isinstance(error, SETTING):
        text = f"{type(error).__name__}: {text} (--verbose shows where)"
    words = set(re.findall(r"-?\w+", text))
    for flag, value in flags:
        if value is not None and {flag.rpartition(".")[2], str(value)} <= words:
            return UserError(f"--{flag} {value}: {text}")
    return UserError(text)


@contextmanager
def explaining_errors(flags: Iterable[tuple[str, Any]] | None = None) -> Iterator[None]:
    """Translate the block's exceptions with `explained`, and leave NCCL after an error.

    Args:
        flags: As for `explained`.

    Raises:
        RankError: When another rank is lost or silent.
        UserError: When memory ran out, an object that a flag created raised an exception, or
            Lightning rejected a setting.
    """
    try:
        yield
    except BaseException as error:
        translated = explained(error, flags)
        leave_nccl()
        if translated is not error:
            raise translated from error
        raise


def root_cause(
    failures: Mapping[int, ProcessFailure], nodes: int = 1
) -> tuple[int, ProcessFailure]:
    """Return the rank whose failure caused the others, and this failure.

    Torch selects the rank that failed in the earliest second. This rank may have failed because of
    another one: it may have lost a connection, received a signal, or timed out while another rank
    hung.

    Args:
        failures: Failures by rank, in the order in which they were seen.
        nodes: Number of nodes.
    """

    def order(rank: int) -> tuple[bool, ...]:
        """Return a sort key: causes before their consequences."""
        failure = failures[rank]
        message = message_of(failure)
        has_lost = message.startswith(RankLostError.__name__)
        was_stopped = stopped(failure) is not None
        # On a single node, a signal causes lost connections; elsewhere, the launcher may have sent
        # it after a loss. Prefer a message with the lost node's address to one that says "another
        # rank". The watchdog kills a hung rank by SIGKILL, and other ranks time out. Prefer their
        # timeout, because only its message names the hung rank.
        return (
            was_stopped and nodes > 1,
            has_lost,
            has_lost and ANOTHER in message,
            was_stopped,
            failure.exitcode == -signal.SIGKILL,
        )

    cause = next(iter(failures))
    # if the first rank was stopped, another process has done it: the launcher stops ranks only
    # after the first failure
    if not stopped(failures[cause]):
        cause = min(failures, key=order)
    return cause, failures[cause]


def stopped(failure: ProcessFailure) -> str | None:
    """Return the name of the signal that stopped a rank, such as `SIGTERM`, or None.

    A rank with an error has failed by itself, even if the launcher has stopped it before its
    process ended.
    """
    if message_of(failure):
        return None
    # negative if the signal killed the process
    return CAUSES.get(-failure.exitcode) or CAUSES.get(failure.exitcode - 128)


def explain(rank: int, failure: ProcessFailure) -> UserError | RankError:
    """Return the exception that the command raises when one of its ranks failed."""
    message = message_of(failure)
    name, _, text = message.partition(": ")
    if name in UNCHANGED:
        return UNCHANGED[name](text)
    if name == RankError.__name__:
        return RankError(f"rank {rank}: {text}")
    code = failure.exitcode
    how = f"failed with exit code {max(code, 1)}"
    if message:
        how += f": {message.splitlines()[0]}"
    elif code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    elif code == 0:
        how = "ended with exit code 0 before the end of the run"
    return RankError(f"rank {rank} (process {failure.pid}) {how}")


@contextmanager
def error_file() -> Iterator[None]:
    """Write the block's exception into the error file of a rank that torch elastic or we started.

    The file is written atomically, because the launcher may kill the rank meanwhile, and then reads
    the file. If the disk is full, there is no file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with suppress(Exception):  # stderr may be no file
            faulthandler.enable()
    try:
        yield
    except Exception as error:
        details = {"py_callstack": traceback.format_exc(), "timestamp": int(time.time())}
        content = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
        if path:
            with suppress(OSError):
                write_json(Path(path), {"message": content})
        raise


def message_of(failure: ProcessFailure) -> str:
    """Return exception name and text from a rank's error file; empty for a killed rank."""
    return _content(failure).get("message", "")


def callstack(failure: ProcessFailure) -> str:
    """Return the traceback from a rank's error file; empty for a killed rank."""
    return _content(failure).get("extraInfo", {}).get("py_callstack", "")


def _content(failure: ProcessFailure) -> dict[str, Any]:
    return failure.message if isinstance(failure.message, dict) else {}

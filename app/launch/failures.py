"""Root cause of a failed run: the rank that failed first, and its traces on the other ranks."""

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from app.errors import EXIT_CODES, RankError, RankLostError, RankSilentError, UserError, out_of_memory
from app.launch import watchdog
from app.system.lightning_patches import complaint
from app.system.torch_patches import abort_process_group
from app.system.tracebacks import blamed

# messages of gloo, NCCL and TCPStore about a lost rank, or about a timeout
GONE = re.compile("(closed|reset) by (remote )?peer|Broken pipe|(likely|remotely) closed|remote process|was aborted")
SILENT = re.compile("[Tt]imed out|[Tt]imeout")
ANOTHER = "another rank"
_has_left = False  # whether an error path has left NCCL's process group
_nodes: dict[str, int] = {}  # address: the other node that has it


def name_nodes(nodes: list[tuple[int, list[str]]], this_node: int) -> None:
    """Remember the addresses that only one other node has, from number and addresses of each node."""
    all_addresses = {address for _, addresses in nodes for address in addresses}
    owners = {address: {node for node, addresses in nodes if address in addresses} for address in all_addresses}
    _nodes.clear()
    _nodes.update({address: min(has) for address, has in owners.items() if len(has) == 1 and this_node not in has})


def node_of(text: str) -> str | None:
    """Return the other node whose address an error message contains."""
    for address, node in _nodes.items():
        if re.search(rf"(?<![\w.:]){re.escape(address)}(?![\w.])", text):
            return f"node {node}"
    return None


def lost(text: str) -> RankError | None:
    """Return the error of a lost or silent rank for a communication error's text, or None."""
    if GONE.search(text):
        return RankLostError(f"lost the connection to {node_of(text) or ANOTHER}: see its messages")
    if SILENT.search(text) and "DataLoader" not in text:
        return RankSilentError(f"no answer from another rank within --cluster.timeout: {who_hangs()}")
    return None


def who_hangs() -> str:
    """Return the places of this run's ranks, if their watchdogs' folder is visible here."""
    folder = watchdog.heartbeat and watchdog.heartbeat.folder
    places = folder and watchdog.where(folder)
    unknown = "it hangs, or the link to it is cut"
    if not places:
        return unknown
    return f"{places if ' is in ' in places else f'{unknown}; {places}'} (stacks: {folder})"


def leave_nccl() -> None:
    """Leave an NCCL process group after an error, because its pending calls would wait for the other ranks.

    Moving the model to the host and the exit of the process would wait for them, too.
    Source: https://docs.pytorch.org/docs/stable/distributed.html#shutdown.
    """
    global _has_left
    if distributed.is_initialized() and distributed.get_backend() == "nccl":
        _has_left = True
        abort_process_group()


def explained(error: BaseException) -> BaseException:
    """Translate an error of communication, of memory, or of an object that a flag made; return others unchanged."""
    has_group = _has_left or distributed.is_initialized()
    communicates = type(error) is RuntimeError or isinstance(error, distributed.DistError)
    is_communication = (has_group and communicates) or isinstance(error, distributed.DistBackendError)
    if is_communication and (rank_error := lost(str(error))):
        return rank_error
    if isinstance(error, UserError | RankError) or not isinstance(error, Exception):
        return error
    if message := out_of_memory(error):
        return UserError(message)
    return blamed(error, complaint(error)) or error


@contextmanager
def explaining_errors() -> Iterator[None]:
    """Translate exceptions by `explained`, and leave an NCCL group.

    Raises:
        RankError: When another rank is lost or silent.
        UserError: When memory ran out, or an object that a flag made raised.
    """
    try:
        yield
    except BaseException as error:
        translated = explained(error)
        leave_nccl()
        if translated is not error:
            raise translated from error
        raise


def root_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank whose failure ended the others, and its failure.

    torch takes the earliest failure, to the second. But a rank that lost a connection may end first, a signal ends the
    other ranks, and the ranks that wait for a hung rank fail before it is killed.
    """

    def is_consequence(rank: int) -> tuple[bool, bool, bool, bool]:
        code, message = failures[rank].exitcode, message_of(failures[rank].error_file_data)
        lost = message.startswith(RankLostError.__name__)
        # a rank that lost the connection to another node comes before one that lost it to "another rank"
        order = (lost, lost and ANOTHER in message, code == -signal.SIGKILL)
        return code in (-signal.SIGTERM, -signal.SIGINT, *EXIT_CODES.values()), *order

    first = min(failures, key=is_consequence)
    message = message_of(failures[first].error_file_data)
    # several ranks with the same message: report the first
    rank = min(r for r in failures if r == first or (message and message_of(failures[r].error_file_data) == message))
    return rank, failures[rank]


def explain(rank: int, failure: ProcessFailure) -> UserError | RankError:
    """Return the exception for the command that started a failed rank."""
    message = message_of(failure.error_file_data)
    name, _, text = message.partition(": ")
    if name == UserError.__name__:
        return UserError(f"rank {rank}: {text}" if failure.local_rank else text)
    if kind := {"RankLostError": RankLostError, "RankSilentError": RankSilentError}.get(name):
        return kind(text)
    return RankError.ended(rank, failure.pid, failure.exitcode, message)


def message_of(error_file: Mapping[str, Any]) -> str:
    """Return exception name and text from a rank's torch error file; empty for a killed rank."""
    message = error_file.get("message")
    return str(message.get("message", "")) if isinstance(message, dict) else ""


def callstack(failure: ProcessFailure) -> str:
    """Return the traceback in a rank's torch error file; empty when the rank was killed."""
    message = failure.error_file_data.get("message")
    return str(message["extraInfo"]["py_callstack"]) if isinstance(message, dict) else ""

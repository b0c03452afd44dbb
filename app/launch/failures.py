"""Which rank has failed, and what the others see of it."""

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from app.errors import EXIT_CODES, RankError, RankLostError, RankSilentError, UserError
from app.system.torch_patches import abort_process_group

# what gloo, NCCL and TCPStore say of a rank that is gone, and of one that does not answer in time
GONE = re.compile("(closed|reset) by (remote )?peer|Broken pipe|(likely|remotely) closed|remote process|was aborted")
SILENT = re.compile("[Tt]imed out|[Tt]imeout")
ANOTHER = "another rank"
_nodes: dict[str, str] = {}  # address: which other node has it


def own_addresses() -> list[str]:
    """Addresses of this machine, but for the loopback."""
    found = {entry.address for name, entries in psutil.net_if_addrs().items() for entry in entries if name != "lo"}
    return sorted(found)


def name_nodes(nodes: list[tuple[int, list[str]]], own: int) -> None:
    """Remember which other node has which address, where only one has it.

    Args:
        nodes: Number and addresses of the node of each rank.
        own: Number of this node.
    """
    owners: dict[str, set[int]] = {}
    for node, addresses in nodes:
        for address in addresses:
            owners.setdefault(address, set()).add(node)
    _nodes.clear()
    _nodes.update(
        {address: f"node {min(found)}" for address, found in owners.items() if len(found) == 1 and own not in found}
    )


def node_of(text: str) -> str | None:
    """The other node whose address stands in an error message."""
    places = re.split(r"[^\w.:]", text.replace("]:", " "))
    spoken = {part for place in places for part in (place, place.rpartition(":")[0])}
    return next((name for address, name in _nodes.items() if address in spoken), None)


def lost(text: str) -> RankError | None:
    """What an error of a communication tells of another rank, if it does.

    Args:
        text: The error.
    """
    if GONE.search(text):
        return RankLostError(f"lost the connection to {node_of(text) or ANOTHER}: see what that one says")
    if SILENT.search(text) and "DataLoader" not in text:
        return RankSilentError(
            "no answer from another rank within --cluster.timeout: it hangs, or the link to it is cut"
        )
    return None


@contextmanager
def noticing_other_ranks() -> Iterator[None]:
    """Turn an error of a communication into what it tells of another rank, and leave the group of NCCL.

    Otherwise NCCL would wait, when this process exits, for what is under way between the others.
    Source: https://docs.pytorch.org/docs/stable/distributed.html#shutdown.

    Raises:
        RankError: When another rank is gone or silent.
    """
    try:
        yield
    except Exception as error:
        if not distributed.is_available() or not distributed.is_initialized():
            raise
        if distributed.get_backend() == "nccl":
            abort_process_group()
        communicated = type(error) is RuntimeError or isinstance(error, distributed.DistError)
        if communicated and (seen := lost(str(error))):
            raise seen from error
        raise


def root_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank whose failure ended the others, and its failure.

    torch takes the earliest one, to the second. But a rank that has lost the connection to another may end first, the
    others are ended by a signal, and one that hangs is seen by those that wait for it before it is killed.

    Args:
        failures: By rank, in the order in which they were seen.
    """

    def is_consequence(rank: int) -> tuple[bool, bool, bool, bool]:
        failure, message = failures[rank], _message(failures[rank])
        ended = failure.exitcode in (-signal.SIGTERM, -signal.SIGINT, *EXIT_CODES.values())
        killed = failure.exitcode == -signal.SIGKILL
        # of those that have lost a connection, one that has lost it to another node comes first
        lost = message.startswith(RankLostError.__name__)
        return ended, lost, lost and ANOTHER in message, killed

    first = min(failures, key=is_consequence)
    same = [rank for rank in failures if _message(failures[rank]) == _message(failures[first])]
    rank = min(same) if _message(failures[first]) else first  # what several have found, the first one says
    return rank, failures[rank]


def explain(rank: int, failure: ProcessFailure) -> UserError | RankError:
    """What a failed rank means for the command that started it."""
    name, _, text = _message(failure).partition(": ")
    if name == UserError.__name__:
        return UserError(f"rank {rank}: {text}" if failure.local_rank else text)
    for kind in (RankLostError, RankSilentError):
        if name == kind.__name__:
            return kind(text)
    return RankError.ended(rank, failure.pid, failure.exitcode, _message(failure))


def _message(failure: ProcessFailure) -> str:
    """What a rank has left in its error file: the name of the exception, and its text."""
    message = failure.error_file_data.get("message", "")
    return str(message.get("message", "")) if isinstance(message, dict) else ""

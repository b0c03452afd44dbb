"""What another rank has done, as far as an error of a communication tells."""

import re
from typing import Any

from app.errors import RankError
from app.launch.rendezvous import Rendezvous

# what gloo, NCCL and TCPStore say of a rank that is gone, and of one that does not answer in time
GONE = re.compile("(closed|reset) by (remote )?peer|Broken pipe|(likely|remotely) closed|remote process|was aborted")
SILENT = re.compile("[Tt]imed out|[Tt]imeout")


def lost(text: str, environment: Any) -> RankError | None:
    """Another rank is gone.

    Args:
        text: The error.
        environment: The run's ClusterEnvironment, which may know names for addresses.
    """
    if not GONE.search(text):
        return None
    where = environment.name_of(text) if isinstance(environment, Rendezvous) else None
    return RankError(f"lost the connection to {where or 'another rank'}: see what that one says")


def silent(text: str) -> RankError | None:
    """Another rank did not answer in time."""
    if not SILENT.search(text) or "DataLoader" in text:
        return None
    return RankError("no answer from another rank within --cluster.timeout: it hangs, or the link to it is cut")

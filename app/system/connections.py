"""TCP connections of process groups, closed from another thread to end a blocked collective call.

Gloo cannot abort a process group, and a rank that waits for one would block until its timeout.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

_groups: set[tuple] = set()  # connections of the process groups
_before: set[tuple] | None = None  # connections before the block that opens more


def _connections() -> set[tuple]:
    return {
        (row.fd, row.laddr, row.raddr)
        for row in psutil.Process().net_connections("tcp")
        if row.raddr
    }


@contextmanager
def connecting() -> Iterator[None]:
    """Note the connections that the block opens as those of a process group."""
    global _before
    _before = _connections()
    try:
        yield
    finally:  # otherwise, `disconnect` would also close the connections that are opened later
        _groups.update(_connections() - _before)
        _before = None


def disconnect() -> None:
    """Close the process groups' connections, so that collective calls fail on both sides."""
    before = _before  # another thread may end its block meanwhile, and note connections
    now = _connections()
    ours = _groups & now
    if before is not None:
        ours |= now - before
    _groups.difference_update(ours)
    for descriptor, *_ in ours:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)

"""TCP connections of process groups, closed from another thread to end a blocked collective call.

Gloo cannot abort a process group, and a rank that waits for another one would block until its
timeout, or forever while the group is formed.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import psutil

_groups: set[tuple] = set()  # connections of the process groups, also of earlier ones
_is_lost = threading.Event()  # set by `disconnect`


def _connections() -> set[tuple]:
    return {
        (row.fd, row.laddr, row.raddr)
        for row in psutil.Process().net_connections("tcp")
        if row.raddr
    }


def call_apart(call: Callable[[], Any], check: Callable[[], Any]) -> Any:
    """Call a blocking function in a thread, and return its result.

    Args:
        call: The function.
        check: Function that is called every 5 ms. The thread is abandoned if it raises, or returns
            true because a rank is lost.

    Raises:
        RuntimeError: When a rank is lost.
    """
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # also SystemExit; `result` raises it again
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not future.done():
        if check():
            raise RuntimeError("Connection closed by peer")
        time.sleep(0.005)
    return future.result()


def form(create: Callable[[], Any]) -> Any:
    """Call a function that forms a process group, and note the connections that it opens.

    If a rank is lost after it has announced its address, gloo waits for its connection, even beyond
    the timeout. There is no connection yet to close, so `disconnect` abandons the wait.

    Raises:
        RuntimeError: When `disconnect` is called meanwhile.
    """
    before = _connections()
    _is_lost.clear()
    try:
        return call_apart(create, _is_lost.is_set)
    finally:
        _groups.update(_connections() - before)


def disconnect() -> None:
    """Close the process groups' connections, so that collective calls fail on both sides."""
    _is_lost.set()
    for descriptor, *_ in _groups & _connections():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)

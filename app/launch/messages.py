"""What nodes say to each other, and to a person, before there is a process group: one line of JSON each."""

import json
import socket
import time
from typing import Any

from app.errors import UserError

ANSWER = 5.0  # seconds in which one that has connected must say what it is
PAUSE = 0.25  # seconds between attempts


class Patience:
    """Says now and then what is waited for, and ends the wait.

    Args:
        seconds: How long to wait.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began, self.due = seconds, time.monotonic(), 5.0

    def check(self, what: str, remark: str = "", say: bool = True) -> None:
        """Say what is missing, unless another process does.

        Raises:
            UserError: When time is up.
        """
        passed = time.monotonic() - self.began
        hint = f" ({remark})" if remark else ""
        if passed > self.seconds:
            raise UserError(f"waited {self.seconds:g} s (--cluster.timeout) for {what}{hint}: see how it fares there")
        if passed > self.due and say:
            print(f"waiting for {what}, {passed:.0f} s{hint}", flush=True)
            self.due = min(2 * self.due, self.due + 30)


def keep_alive(connection: socket.socket) -> None:
    """Have a connection break within 20 s after the other end has lost power, or the link to it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # seconds, seconds, times; Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket, seconds: float = ANSWER) -> dict[str, Any]:
    """One message; ValueError for what is none, TimeoutError for one that takes too long."""
    line, ends = b"", time.monotonic() + seconds
    while not line.endswith(b"\n") and len(line) < 2**20:
        connection.settimeout(max(ends - time.monotonic(), 0.001))
        part = connection.recv(1)  # not into the next message
        if not part:
            raise ConnectionResetError("it closed the connection")
        line += part
    connection.settimeout(ANSWER)
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ValueError("what listens there is no run of this application")
    return message

"""The meeting of the first processes of all nodes, at an address of node 0: one line of JSON each way, then the word.

Nothing but this application is answered; who is missing is said while it is waited for.
"""

import contextlib
import json
import os
import select
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from app.errors import UserError
from app.launch.messages import ANSWER, PAUSE, Patience, keep_alive, receive, send
from app.system.files import write_json

GREETING = "data-parallel-lab"


def _free_port() -> int:
    """A port of this machine on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Place(NamedTuple):
    """Where nodes meet.

    Attributes:
        method: As the user gave it.
        host: Name or address of node 0; empty where a file tells it.
        port: Port of node 0.
        file: The file in which node 0 leaves its addresses, or None.
    """

    method: str
    host: str
    port: int
    file: Path | None

    def __str__(self) -> str:
        return str(self.file or f"{self.host}:{self.port}")


class _Node:
    """One of those that meet.

    Args:
        place: Where they meet.
        hello: Number of this node, of all nodes, and of devices.
        timeout: Seconds to wait.
    """

    def __init__(self, place: Place, hello: dict[str, Any], timeout: float) -> None:
        self.place, self.hello, self.patience = place, hello, Patience(timeout)
        self.address, self.port = place.host, place.port

    def _answer(self, other: socket.socket, awaited: str) -> dict[str, Any]:
        while not select.select([other], [], [], PAUSE)[0]:
            self.patience.check(awaited)
        return receive(other)


class Host(_Node):
    """Node 0, which listens until every other node has come."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.id = uuid.uuid4().hex
        self.guests: dict[int, socket.socket] = {}

    def meet(self, decide: Callable[[], Any], check: Callable[[Any], None]) -> dict[str, Any]:
        """Wait for all, tell them what node 0 decides then, and hear whether it will do.

        Args:
            decide: What is called when all are there.
            check: Raises what is wrong with the decision on this node.

        Returns:
            What they were told.
        """
        file = self.place.file
        if file is not None:
            self._refuse_live(file)
        with self._listen() as listener, contextlib.ExitStack() as stack:
            self.port = listener.getsockname()[1]
            if file is not None:
                stack.callback(self._remove, file)
                self._publish(file)
            while missing := [node for node in range(1, self.hello["nodes"]) if not self._here(node)]:
                nodes = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.hello['nodes']}"
                self.patience.check(f"{nodes} at {self.place}", self._remark())
                if file is not None and _read(file).get("id") != self.id:
                    raise UserError(f"{file} was taken over by another run that meets there: give each its own")
                with contextlib.suppress(TimeoutError):
                    self._welcome(listener.accept()[0])
        # nobody listens now: a process group that comes early tries again, instead of being cut off
        self.address = _plain(self.guests[1].getsockname())  # not the name of this host, which may be on the loopback
        names = {_plain(guest.getpeername()): f"node {node}" for node, guest in self.guests.items()}
        word: dict[str, Any] = {"wrong": None, "names": {**names, self.address: "node 0"}}
        with contextlib.ExitStack() as stack:
            for guest in self.guests.values():
                stack.enter_context(guest)
            try:
                word["decided"] = decide()
                check(word["decided"])
            except Exception as error:
                self._tell({"wrong": f"node 0: {error}"})
                raise
            self._tell(word)
            for node, guest in self.guests.items():
                try:
                    wrong = self._answer(guest, f"node {node} of {self.hello['nodes']} to be ready")["wrong"]
                except (OSError, ValueError, KeyError):
                    wrong = "it has ended: see what it says"
                if wrong:
                    self._tell({"wrong": f"node {node}: {wrong}"})
                    raise UserError(f"node {node}: {wrong}")
            self._tell({"wrong": None})
        return word

    def _tell(self, word: dict[str, Any]) -> None:
        for guest in self.guests.values():
            with contextlib.suppress(OSError):  # one that is gone does not answer, either
                send(guest, word)

    def _listen(self) -> socket.socket:
        port = self.port or _free_port()
        try:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise UserError(
                f"--cluster.init_method {self.place.method}: node 0 cannot listen on port {port} ({reason}): "
                "give another port, or end what uses it"
            ) from error
        listener.settimeout(PAUSE)
        return listener

    def _publish(self, file: Path) -> None:
        addresses = [
            a.address for entries in psutil.net_if_addrs().values() for a in entries if a.family == socket.AF_INET
        ]
        addresses.sort(key=lambda address: address.startswith("127."))  # those that others can reach come first
        try:
            write_json(file, {"id": self.id, "addresses": addresses, "port": self.port})
        except OSError as error:
            raise UserError(
                f"--cluster.init_method {self.place.method}: {error.strerror}: name a file that can be made"
            ) from error

    def _remove(self, file: Path) -> None:
        if _read(file).get("id") == self.id:
            file.unlink(missing_ok=True)

    def _refuse_live(self, file: Path) -> None:
        """Tell a file that another run is meeting through from one that a dead run has left."""
        content = _read(file)
        for address in content.get("addresses", ()):
            with (
                contextlib.suppress(OSError, ValueError),
                socket.create_connection((address, content["port"]), 1) as host,
            ):
                send(host, {"greeting": GREETING})
                if receive(host, 1.0).get("id") == content["id"]:
                    raise UserError(
                        f"another run is meeting at {file} just now: give --cluster.init_method another one"
                    )
        if content:
            print(f"replacing {file}, which a run that is gone has left", flush=True)

    def _remark(self) -> str:
        if self.place.file is not None:
            return ""
        try:
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(self.place.host, None)}
        except OSError:
            return f"{self.place.host} is unknown here"
        own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
        here = found & own or any(address.startswith("127.") for address in found)
        return "" if here else f"{self.place.host} is no address of this machine, which is node 0"

    def _here(self, node: int) -> bool:
        """Whether a node has come, and has not left again."""
        guest = self.guests.get(node)
        if guest is None:
            return False
        with contextlib.suppress(OSError):
            if not select.select([guest], [], [], 0)[0] or guest.recv(1, socket.MSG_PEEK):
                return True
        self.guests.pop(node).close()
        return False

    def _welcome(self, guest: socket.socket) -> None:
        """Let one in, or tell it why not; one that is not of this application gets no answer."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            keep_alive(guest)
            hello = receive(guest)
            if hello.get("greeting") == GREETING:
                wrong = self._wrong(hello)
                send(guest, {"id": self.id, "wrong": wrong})
                if "node" in hello and wrong is None:
                    self.guests[hello["node"]] = guest
                    return
        guest.close()

    def _wrong(self, hello: dict[str, Any]) -> str | None:
        if "node" not in hello:  # it only asks whether somebody is here
            return None
        for key, flag in (("nodes", "--trainer.num_nodes"), ("devices", "--trainer.devices")):
            if hello[key] != self.hello[key]:
                return f"{flag} is {self.hello[key]} on node 0 and {hello[key]} on node {hello['node']}: give the same"
        if hello["node"] == 0 or self._here(hello["node"]):
            return f"another node has --cluster.node_rank {hello['node']}: give each its own"
        return None


class Guest(_Node):
    """Any other node, which goes to node 0 until it is there, and waits until all are."""

    def meet(self, decide: Callable[[], Any], check: Callable[[Any], None]) -> dict[str, Any]:
        """Wait for all.

        Args:
            decide: Not used: node 0 decides.
            check: Raises what is wrong with the decision on this node.

        Returns:
            What node 0 says.
        """
        remark = ""
        while True:
            for address, port, wanted in self._places():
                try:
                    with socket.create_connection((address, port), timeout=ANSWER) as host:
                        self.address, self.port = address, port
                        return self._attend(host, wanted, check)
                except ConnectionRefusedError:
                    remark = "nobody listens there yet"
                except (OSError, ValueError, KeyError) as error:
                    remark = str(error)
            self.patience.check(f"node 0 of {self.hello['nodes']} at {self.place}", remark)
            time.sleep(PAUSE)

    def _places(self) -> Iterator[tuple[str, int, str | None]]:
        """Address and port at which node 0 may be, and the id that it must have."""
        if self.place.file is None:
            yield self.place.host, self.place.port, None
            return
        content = _read(self.place.file)  # anew each time: node 0 replaces a stale one when it comes
        for address in content.get("addresses", ()):
            yield address, content["port"], content["id"]

    def _attend(self, host: socket.socket, wanted: str | None, check: Callable[[Any], None]) -> dict[str, Any]:
        keep_alive(host)
        send(host, {"greeting": GREETING, **self.hello})
        answer = receive(host)
        if wanted not in (None, answer.get("id")):
            raise ValueError("what listens there is another run")
        if answer["wrong"]:
            raise UserError(answer["wrong"])
        others = f"the other nodes of {self.hello['nodes']}, with node 0 at {self.address}:{self.port}"
        word = self._answer(host, others)
        if word["wrong"]:
            raise UserError(word["wrong"])
        try:
            check(word["decided"])
        except Exception as error:
            send(host, {"wrong": str(error)})
            raise UserError(str(error)) from error  # not an OSError, after which it would come again
        send(host, {"wrong": None})
        if wrong := self._answer(host, others)["wrong"]:
            raise UserError(wrong)
        return word


def _plain(address: Any) -> str:
    return str(address[0]).removeprefix("::ffff:")  # IPv4 on a socket that serves both


def _read(file: Path) -> dict[str, Any]:
    """What a file says, or nothing: it may not be there yet, or be of something else."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and {"id", "addresses", "port"} <= content.keys() else {}

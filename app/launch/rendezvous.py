"""How the nodes of a run find each other without a launcher: at a TCP address, through a shared file, or by variables.

Node 0 hosts a `TCPStore`, in which every node says who it is. It is torch elastic's rendezvous for our own agent, and
adds to torch's static one what a user needs: it says for whom it waits and for how long, refuses nodes that do not fit
together with the flag in question, and ends within its deadline where something else listens on the port.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psutil
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from app.errors import UserError
from app.system.files import write_json
from app.system.interconnect import use_interface_to

T = TypeVar("T")
PAUSE = 0.25  # seconds between two looks
ALIVE = 5.0  # seconds after which a node whose heartbeat stands still is gone


@dataclass
class Cluster:
    """How the processes of a run are started, and how nodes find each other without torchrun or SLURM.

    Args:
        init_method: Where nodes meet: `tcp://HOST:PORT`, an address of node 0; `file:///PATH`, a file that all nodes
            share; `env://`, which several nodes take by default: MASTER_ADDR, MASTER_PORT and NODE_RANK.
        node_rank: Number of this node, from 0.
        timeout: Seconds to wait for the other nodes and processes to start, and later for an answer of another rank.
        max_restarts: How often the processes are started again when one of them fails; they go on from the last
            checkpoint of the run.
        log_dir: Folder in which each rank's output is kept; rank zero's comes to the terminal, too.
    """

    init_method: str | None = None
    node_rank: int | None = None
    timeout: float = 1800.0
    max_restarts: int = 0
    log_dir: str | None = None


class Deadline:
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

    def within(self, call: Callable[[], T], what: str) -> T:
        """Call what may wait for ever, in a thread that is left behind when time is up."""
        results: list[tuple[T | None, Exception | None]] = []

        def run() -> None:
            try:
                results.append((call(), None))
            except Exception as error:
                results.append((None, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while not results:
            thread.join(PAUSE)
            if not results:
                self.check(what)
        result, error = results[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


def host_store(address: str, port: int, timeout: float) -> TCPStore:
    """A store that this process hosts.

    It listens on the address alone, where that is one of this machine; else on all of them: behind a translated
    address, or where `/etc/hosts` has this host's name on 127.0.1.1, as Debian's installer leaves it.

    Args:
        address: Name or address at which the other processes reach this machine.
        port: Port, or 0 for a free one.
        timeout: Seconds that an operation of the store may take.

    Raises:
        OSError: When it cannot listen there.
    """
    listener = None
    with contextlib.suppress(OSError):
        family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if not str(found[0]).startswith("127.") or found[0] == "127.0.0.1":
            listener = socket.create_server(found[:2], family=family, backlog=1024)
    if listener is None:
        address, dual = "localhost", socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)
    port = listener.getsockname()[1]
    limit, descriptor = timedelta(seconds=timeout), listener.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=descriptor)


class NodeRendezvous(StaticTCPRendezvous):
    """The rendezvous of nodes at one address, or of this process alone; the rules of `fit` have looked at the flags.

    Args:
        cluster: How they find each other.
        num_nodes: How many there are.
        devices: `--trainer.devices` of this node, as a number, in which the nodes must agree.

    Attributes:
        rank: Number of this node.
        master_addr: Name or address of node 0 as this node reaches it.
        master_port: Port of the store.
    """

    def __init__(self, cluster: Cluster, num_nodes: int, devices: int) -> None:
        self.method = cluster.init_method or "env://"
        url, env = urlsplit(self.method), os.environ
        self.file = Path(url.path) if url.scheme == "file" and num_nodes > 1 else None
        address, port = url.hostname or "", url.port or 0
        if num_nodes == 1:
            address, port = "127.0.0.1", int(env.get("MASTER_PORT", 0))
        elif url.scheme == "env":
            address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        rank = int(env.get("NODE_RANK", 0)) if cluster.node_rank is None else cluster.node_rank
        name = uuid.uuid4().hex
        super().__init__(
            address, port, rank if num_nodes > 1 else 0, num_nodes, f"app_{name[:8]}", int(cluster.timeout)
        )
        self.hello = {"id": name, "nodes": num_nodes, "devices": devices}
        self.before_restart: Callable[[], None] = lambda: None
        self._rounds = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without the store, which spawned ranks reach by its address: the command line holds this, and they get it."""
        return {**vars(self), "_store": None, "before_restart": None}

    def get_backend(self) -> str:
        """Name of this rendezvous in torch elastic's registry."""
        return "nodes"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes, at the start and whenever ranks are started again.

        Raises:
            UserError: When they are not all there in time, do not fit together, or cannot use the address; or when
                what has ended the ranks is no reason to start them again.
        """
        if self._rounds:
            self.before_restart()
        self._rounds += 1
        store = PrefixStore(f"round{self._rounds}", self.store())
        store.set(f"here{self.rank}", "")
        deadline = Deadline(self.timeout.total_seconds())
        while missing := [node for node in range(self.world_size) if not store.check([f"here{node}"])]:
            deadline.check(f"node {missing[0]} of {self.world_size} to start again")
            time.sleep(PAUSE)
        if self.world_size > 1:
            use_interface_to(self.master_addr)
        # a rank that is starting would report a Ctrl-C with a traceback; it unblocks them when it has begun
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        place = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(store, self.rank, self.world_size, place)

    def num_nodes_waiting(self) -> int:
        """Nobody joins later; the agent asks when it has started its ranks."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        return 0

    # -- the nodes come together ----------------------------------------------------------------------------

    def store(self) -> Store:
        """The store that all nodes share, when they are all there."""
        if self._store is None:
            deadline = Deadline(self.timeout.total_seconds())
            self._store = self._host(deadline) if self.rank == 0 else self._join(deadline)
        return self._store

    def _host(self, deadline: Deadline) -> TCPStore:
        """Node 0: host the store, and let the others go when they are all there and alive."""
        if self.file is not None:
            self._refuse_live_file(self.file)
        try:
            store = host_store(self.master_addr, self.master_port, deadline.seconds)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise UserError(
                f"--cluster.init_method {self.method}: node 0 cannot listen on port {self.master_port} ({reason}): "
                "give another port, or end what uses it"
            ) from error
        self.master_port = store.port
        store.set("node0", json.dumps(self.hello))
        with contextlib.ExitStack() as stack:
            if self.file is not None:
                stack.callback(self._remove, self.file)
                self._publish(self.file)
            beats: dict[int, tuple[bytes, float]] = {}
            while missing := [node for node in range(1, self.world_size) if not _beats(store, node, beats)]:
                nodes = f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.world_size}"
                deadline.check(f"{nodes} at {self._where}", self._doubt())
                if self.file is not None and _read(self.file).get("id") != self.hello["id"]:
                    raise UserError(f"{self.file} was taken over by another run that meets there: give each its own")
                time.sleep(PAUSE)
        if self.file is not None:
            self.master_addr = store.get("address").decode()  # as the others reach it
        store.set("go", "")
        return store

    def _join(self, deadline: Deadline) -> TCPStore:
        """Any other node: find node 0, say who this is, and wait until all are there."""
        remark, node0 = "", f"node 0 of {self.world_size} at {self._where}"
        while True:
            for address, port, wanted in self._candidates():
                try:
                    socket.create_connection((address, port), timeout=ALIVE).close()
                    self.master_addr, self.master_port = address, port
                    store = deadline.within(lambda: TCPStore(address, port, timeout=timedelta(seconds=5)), node0)  # noqa: B023
                    self._attend(store, wanted, deadline)
                    store.set_timeout(self.timeout)
                    return store
                except ConnectionRefusedError:
                    remark = "nobody listens there yet"
                except (RuntimeError, OSError, ValueError) as error:  # DistError is a RuntimeError
                    remark = str(error).splitlines()[0]
            deadline.check(node0, remark)
            time.sleep(PAUSE)

    def _attend(self, store: TCPStore, wanted: str | None, deadline: Deadline) -> None:
        host = json.loads(store.get("node0"))
        if wanted not in (None, host["id"]):
            raise ValueError("what listens there is another run")
        for key, flag in (("nodes", "--trainer.num_nodes"), ("devices", "--trainer.devices")):
            if host[key] != self.hello[key]:
                raise UserError(
                    f"{flag} is {host[key]} on node 0 and {self.hello[key]} on node {self.rank}: give the same"
                )
        mine, beats = json.dumps(self.hello), {}  # type: ignore[var-annotated]
        other = store.compare_set(f"node{self.rank}", "", mine).decode()
        limit = time.monotonic() + ALIVE
        while other != mine and time.monotonic() < limit:
            if _beats(store, self.rank, beats):
                raise UserError(f"another node has --cluster.node_rank {self.rank}: give each its own")
            time.sleep(PAUSE)
        store.set(f"node{self.rank}", mine)
        store.set("address", self.master_addr)
        while not store.check(["go"]):
            store.set(f"beat{self.rank}", str(time.monotonic()))
            deadline.check(
                f"the other nodes of {self.world_size}, with node 0 at {self.master_addr}:{self.master_port}"
            )
            time.sleep(PAUSE)

    def _doubt(self) -> str:
        """What is odd about the address of node 0, which this is."""
        if self.file is not None:
            return ""
        try:
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(self.master_addr, None)}
        except OSError:
            return f"{self.master_addr} is unknown here"
        own = {a.address for entries in psutil.net_if_addrs().values() for a in entries}
        here = found & own or any(address.startswith("127.") for address in found)
        return "" if here else f"{self.master_addr} is no address of this machine, which is node 0"

    @property
    def _where(self) -> str:
        return str(self.file or f"{self.master_addr}:{self.master_port}")

    def _candidates(self) -> list[tuple[str, int, str | None]]:
        """Address and port at which node 0 may be, and the id that it must have."""
        if self.file is None:
            return [(self.master_addr, self.master_port, None)]
        content = _read(self.file)  # anew each time: node 0 replaces a stale one when it comes
        return [(address, content["port"], content["id"]) for address in content.get("addresses", ())]

    # -- the shared file ------------------------------------------------------------------------------------

    def _publish(self, file: Path) -> None:
        addresses = [
            a.address for entries in psutil.net_if_addrs().values() for a in entries if a.family == socket.AF_INET
        ]
        addresses.sort(key=lambda address: address.startswith("127."))  # those that others can reach come first
        try:
            write_json(file, {"id": self.hello["id"], "addresses": addresses, "port": self.master_port})
        except OSError as error:
            raise UserError(
                f"--cluster.init_method {self.method}: {error.strerror}: name a file that can be made"
            ) from error

    def _remove(self, file: Path) -> None:
        if _read(file).get("id") == self.hello["id"]:
            file.unlink(missing_ok=True)

    def _refuse_live_file(self, file: Path) -> None:
        """Tell a file that another run is meeting through from one that a dead run has left."""
        content = _read(file)
        for address in content.get("addresses", ()):
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                socket.create_connection((address, content["port"]), timeout=1).close()
                store = TCPStore(address, content["port"], timeout=timedelta(seconds=1))
                if json.loads(store.get("node0"))["id"] == content["id"]:
                    raise UserError(
                        f"another run is meeting at {file} just now: give --cluster.init_method another one"
                    )
        if content:
            print(f"replacing {file}, which a run that is gone has left", flush=True)


def _beats(store: TCPStore, node: int, seen: dict[int, tuple[bytes, float]]) -> bool:
    """Whether a node is waiting: its heartbeat has changed since it was first seen, and not too long ago."""
    if not store.check([f"beat{node}"]):
        return False
    beat, now = store.get(f"beat{node}"), time.monotonic()
    first = node not in seen
    if first or seen[node][0] != beat:
        seen[node] = beat, -ALIVE if first else now
    return now - seen[node][1] < ALIVE


def _read(file: Path) -> dict[str, Any]:
    """What a file says, or nothing: it may not be there yet, or be of something else."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and {"id", "addresses", "port"} <= content.keys() else {}

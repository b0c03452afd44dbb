"""Rendezvous of nodes without a launcher: at a TCP address, through a shared file, or by environment variables.

It extends torch elastic's static rendezvous. It reports which nodes are missing and for how long, rejects nodes whose
flags differ and names the flag, and times out when another program owns the port.
"""

import json
import os
import pickle
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from jsonargparse.typing import NonNegativeInt, PositiveFloat
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.utils.store import synchronize

from app.errors import UserError
from app.system.files import open_file, write_json
from app.system.interconnect import outward_address, own_addresses, use_interface_to

T = TypeVar("T")
PAUSE = 0.25  # seconds between two looks


@dataclass
class Cluster:
    """How processes start, and how nodes find each other without torchrun or SLURM.

    Args:
        init_method: Meeting place of nodes: `tcp://HOST:PORT`, an address of node 0; `file:///PATH`, a file that all
            nodes share; `env://`, the default of several nodes: MASTER_ADDR, MASTER_PORT and NODE_RANK.
        node_rank: Number of this node, from 0.
        timeout: Seconds to wait for other nodes and processes at the start, and later for another rank's answer.
        max_restarts: Number of restarts when a process fails; they resume from the run's last checkpoint.
        log_dir: Folder for each rank's output; rank zero also prints to the terminal.
    """

    init_method: str | None = None
    node_rank: int | None = None
    timeout: PositiveFloat = 1800.0
    max_restarts: NonNegativeInt = 0
    log_dir: str | None = None


class Deadline:
    """A wait that reports its reason now and then, and times out."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began, self.due = seconds, time.monotonic(), 5.0

    def check(self, what: str, remark: str = "", say: bool = True) -> None:
        """Report missing nodes, unless another process does.

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

    def within(self, call: Callable[[], T], what: str, say: bool = True) -> T:
        """Call a function that may block forever in a thread, and abandon the thread when time is up."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not wait([future], PAUSE).done:
            self.check(what, say=say)
        return future.result()


def host_store(address: str, port: int, timeout: float) -> TCPStore:
    """Host a store.

    It listens on the address alone, where that is one of this machine; else on all of them: behind a translated
    address, or where `/etc/hosts` has this host's name on 127.0.1.1, as Debian's installer leaves it.

    Args:
        address: Name or address at which the other processes reach this machine.
        port: Port, or 0 for a free one.
        timeout: Seconds that an operation of the store may take.
    """
    listener = None
    with suppress(OSError):
        family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if not str(found[0]).startswith("127.") or found[0] == "127.0.0.1":
            listener = socket.create_server(found[:2], family=family, backlog=1024)
    if listener is None:
        address, listener = "localhost", socket.create_server(("", port), backlog=1024)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        multi_tenant=True,  # the process group of this process may use it, too
        master_listen_fd=listener.detach(),
    )


def reach_store(address: str, port: int, timeout: float = 5.0) -> TCPStore:
    """Connect to a store that another process hosts; torch would wait and log if nobody listens."""
    socket.create_connection((address, port), timeout=timeout).close()
    return TCPStore(address, port, timeout=timedelta(seconds=timeout))


class NodeRendezvous(StaticTCPRendezvous):
    """The rendezvous of nodes at one address, or of this process alone; the rules of `fit` have looked at the flags.

    Args:
        cluster: How they find each other.
        num_nodes: How many there are.
        devices: `--trainer.devices` of this node, as a number, in which the nodes must agree.
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
        elif url.scheme == "file":
            address = outward_address()
        rank = int(env.get("NODE_RANK", 0)) if cluster.node_rank is None else cluster.node_rank
        name = f"app_{uuid.uuid4().hex[:8]}"
        super().__init__(address, port, rank if num_nodes > 1 else 0, num_nodes, name, int(cluster.timeout))
        self.where = str(self.file or f"{address}:{port}")
        self.flags = {"--trainer.num_nodes": num_nodes, "--trainer.devices": devices}
        self.before_restart: Callable[[], None] = lambda: None  # may raise, and they are not
        self._rounds = self._gathered = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without the store, which spawned ranks reach by its address: the command line holds this, and they get it."""
        return {**vars(self), "_store": None, "before_restart": None}

    def get_backend(self) -> str:
        """Name of this rendezvous in torch elastic's registry."""
        return "nodes"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes, at the start and whenever ranks are started again.

        Raises:
            UserError: When they are not all there in time, do not fit together, or cannot use the address.
        """
        if self._rounds:
            self.before_restart()
        self._rounds += 1
        store = PrefixStore(f"round{self._rounds}", self.store())
        store.set(f"node{self.rank}", "")
        self._wait_for_all(store, Deadline(self.timeout.total_seconds()))
        # a rank that is starting would report a Ctrl-C with a traceback; it unblocks them when it has begun
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        place = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(store, self.rank, self.world_size, place)

    def num_nodes_waiting(self) -> int:
        """Nobody joins later; the agent asks when it has started its ranks."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        return 0

    def store(self) -> Store:
        """Wait for all nodes, and return the store that they share."""
        if self._store is None:
            deadline = Deadline(self.timeout.total_seconds())
            self._store = self._host(deadline) if self.rank == 0 else self._join(deadline)
            if self.world_size > 1:
                use_interface_to(self.master_addr)
                os.environ.update(MASTER_ADDR=self.master_addr, MASTER_PORT=str(self.master_port))  # for spawned ranks
        return self._store

    def gather(self, mine: Any, seconds: float | None = None) -> list[Any]:
        """Return every node's picklable object, in order of the nodes, on every node.

        Args:
            mine: This node's.
            seconds: To wait for the others; by default `--cluster.timeout`.
        """
        self._gathered += 1
        key, seconds = f"gathered{self._gathered}/", seconds or self.timeout.total_seconds()
        found = synchronize(self.store(), pickle.dumps(mine), self.rank, self.world_size, key, seconds)
        return [pickle.loads(each) for each in found]

    def _host(self, deadline: Deadline) -> TCPStore:
        """Node 0: host the store, and wait for the others."""
        try:
            store = host_store(self.master_addr, self.master_port, deadline.seconds)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise UserError(
                f"--cluster.init_method {self.method}: node 0 cannot listen on port {self.master_port} ({reason}): "
                "give another port, or end what uses it"
            ) from error
        self.master_port = store.port
        store.set("flags", json.dumps(self.flags))
        store.set("node0", self.run_id)
        with self._told_in_file():
            self._wait_for_all(store, deadline)
        return store

    def _join(self, deadline: Deadline) -> TCPStore:
        """Find node 0, introduce this node, and wait until all nodes have come."""
        remark, node0 = "", f"node 0 of {self.world_size} at {self.where}"
        while True:
            for address, port, name in self._candidates():
                try:
                    store = deadline.within(partial(reach_store, address, port), node0)
                    self._introduce(store, name)
                    self.master_addr, self.master_port = address, port
                    try:
                        self._wait_for_all(store, deadline)
                    except BaseException:
                        with suppress(RuntimeError):
                            store.delete_key(f"node{self.rank}")  # it may come again
                        raise
                    store.set_timeout(self.timeout)
                    return store
                except ConnectionRefusedError:
                    remark = "nobody listens there yet"
                except (RuntimeError, OSError, ValueError) as error:  # DistError is a RuntimeError
                    remark = str(error).splitlines()[0]
            deadline.check(node0, remark)
            time.sleep(PAUSE)

    def _introduce(self, store: TCPStore, name: str | None) -> None:
        """Introduce this node; reject settings that differ from node 0's, and a number that another node has."""
        if name not in (None, store.get("node0").decode()):
            raise ValueError("what listens there is another run")
        for flag, value in json.loads(store.get("flags")).items():
            if value != self.flags[flag]:
                raise UserError(
                    f"{flag} is {value} on node 0 and {self.flags[flag]} on node {self.rank}: give the same"
                )
        if store.compare_set(f"node{self.rank}", "", self.run_id).decode() != self.run_id:
            raise UserError(f"another node has --cluster.node_rank {self.rank}: give each its own")

    def _wait_for_all(self, store: Store, deadline: Deadline) -> None:
        """Wait until all nodes have come; node 0 reports missing nodes to the others."""
        while True:
            if self.rank == 0:
                absent = [str(node) for node in range(self.world_size) if not store.check([f"node{node}"])]
                store.set("missing", ", ".join(absent))
            missing = store.get("missing").decode() if store.check(["missing"]) else "0"
            if not missing:
                return
            nodes = f"node{'s' * (',' in missing)} {missing} of {self.world_size} at {self.where}"
            deadline.check(nodes, self._doubt() if self.rank == 0 else "")
            time.sleep(PAUSE)

    def _doubt(self) -> str:
        """Return a warning about node 0's address; this is node 0."""
        with suppress(OSError):
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(self.master_addr, None)}
            if found & set(own_addresses()) or any(address.startswith("127.") for address in found):
                return ""
        return "" if self.file else f"{self.master_addr} is no address of this machine, which is node 0"

    def _candidates(self) -> list[tuple[str, int, str | None]]:
        """Address and port at which node 0 may be, and the name that its run must have."""
        if self.file is None:
            return [(self.master_addr, self.master_port, None)]
        with suppress(OSError, ValueError, LookupError, TypeError):  # not there yet, or of something else
            with open_file(self.file) as file:
                content = json.load(file)
            return [(content["address"], content["port"], content["id"])]
        return []

    @contextmanager
    def _told_in_file(self) -> Iterator[None]:
        """Write node 0's address to the shared file while the other nodes come."""
        if self.file is None:
            yield
            return
        there = self._candidates()
        for address, port, name in there:
            with suppress(RuntimeError, OSError, ValueError):
                if reach_store(address, port, timeout=1).get("node0").decode() == name:
                    said = f"another run is meeting at {self.file} just now: give --cluster.init_method another one"
                    raise UserError(said)
        if there:
            print(f"replacing {self.file}, which a run that is gone has left", flush=True)
        try:
            write_json(self.file, {"id": self.run_id, "address": self.master_addr, "port": self.master_port})
        except OSError as error:
            said = f"--cluster.init_method {self.method}: {error.strerror}: name a file that can be made"
            raise UserError(said) from error
        try:
            yield
        finally:
            if any(name == self.run_id for *_, name in self._candidates()):
                self.file.unlink(missing_ok=True)

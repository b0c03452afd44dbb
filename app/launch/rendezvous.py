"""Rendezvous of nodes without a launcher: by TCP address, shared file or environment variables.

Extends torch elastic's static rendezvous: reports missing nodes, rejects nodes with other flags,
and raises an error if another program uses the port.
"""

import json
import os
import signal
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from app.errors import CAUSES, UserError
from app.system.addresses import outward_address, use_interface_to
from app.system.connections import call_apart
from app.system.files import read_json, write_json

PAUSE = 0.25  # seconds between two attempts


@dataclass
class Cluster:
    """Start of processes, and rendezvous of nodes without torchrun or SLURM.

    Args:
        init_method: Rendezvous of nodes: `tcp://HOST:PORT`, an address of node 0; `file:///PATH`, a
            file that all nodes share; or `env://`, the default for several nodes: MASTER_ADDR,
            MASTER_PORT and NODE_RANK.
        node_rank: Number of this node, from 0.
        timeout: Seconds to wait for other nodes and processes at the start, and later for another
            rank's answer.
        max_restarts: Number of restarts after a failed process; a restart resumes from the run's
            last checkpoint.
        log_dir: Folder for each rank's output; rank zero also prints to the terminal.
        live: Let ranks come and go without a restart, with the same results: `join` adds machines.
        min_ranks: Number of ranks below which a live run waits.
    """

    init_method: str | None = None
    node_rank: NonNegativeInt | None = None
    timeout: PositiveFloat = 1800.0
    max_restarts: NonNegativeInt = 0
    log_dir: str | None = None
    live: bool = False
    min_ranks: PositiveInt = 1


@dataclass
class Deadline:
    """Timeout of a wait; prints from time to time which nodes or processes are missing.

    Args:
        seconds: The timeout.
        quiet: Whether to print nothing, because another process of this node prints.
    """

    seconds: float
    quiet: bool = False

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.due = 5.0

    def check(self, missing: str) -> None:
        """Print the missing nodes or processes from time to time; raise after the deadline.

        Args:
            missing: Missing nodes or processes, such as `node 1 of 2 at 10.0.0.1:29500`, and
                possibly a cause in brackets.

        Raises:
            UserError: After the deadline.
        """
        passed = time.monotonic() - self.began
        if passed > self.seconds:
            raise UserError(
                f"waited {self.seconds:g} s (--cluster.timeout) for {missing}: check it"
            )
        if passed > self.due and not self.quiet:
            print(f"waiting for {missing}, {passed:.0f} s", flush=True)
            self.due *= 2


def host_store(address: str, port: int, timeout: float) -> TCPStore:
    """Host a store that listens only on `address`, or on all addresses if no interface has it.

    Behind NAT, no interface has this machine's public address. The store also listens on all
    addresses if `address` resolves to 127.0.1.1, as a host's own name may on Debian, because other
    nodes cannot reach 127.0.1.1.

    Args:
        address: Name or address of this machine for the other processes.
        port: Port, or 0 for a free one.
        timeout: Timeout of the store's operations in seconds.

    Raises:
        UserError: When this machine cannot listen on the port.
    """
    listener = None
    with suppress(OSError, OverflowError):
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if place[0] != "127.0.1.1":
            listener = socket.create_server(place[:2], family=family, backlog=1024)
    if listener is None:
        address = "localhost"
        try:
            listener = socket.create_server(("", port), backlog=1024)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"this machine cannot listen on port {port} ({error}): "
                "end the program that uses it, or "
                "give another --cluster.init_method or MASTER_PORT"
            ) from error
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        # because this process's process group opens another store on the same port
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def reach_store(address: str, port: int) -> TCPStore:
    """Connect to another process's store.

    Raise at once if no program listens, because torch would retry and log.
    """
    socket.create_connection((address, port), timeout=5).close()
    return TCPStore(address, port, timeout=timedelta(seconds=5))


class NodeRendezvous(StaticTCPRendezvous):
    """Rendezvous of nodes at one address, or of a single node.

    `app.command.rules` has checked the flags.

    Args:
        cluster: The flags of rendezvous and launch.
        num_nodes: Number of nodes.
        devices: Number of devices per node, equal on all nodes.

    Attributes:
        ranks: This node's `elastic.Ranks`. `refuse_restart` is called before ranks are restarted,
            and may raise to prevent it. `check` is called several times a second while ranks run,
            and may raise to end them.
    """

    def __init__(self, cluster: Cluster, num_nodes: int, devices: int) -> None:
        self.cluster = cluster
        url = urlsplit(cluster.init_method or "env://")
        env = os.environ
        self.file: Path | None = None
        address = url.hostname or ""
        port = url.port or 0
        if num_nodes == 1:
            address = "127.0.0.1"
            port = int(env.get("MASTER_PORT", 0))
        elif url.scheme == "env":
            address = env["MASTER_ADDR"]
            port = int(env["MASTER_PORT"])
        elif url.scheme == "file":
            self.file = Path(url.path)
            address = outward_address()
        rank = cluster.node_rank
        if rank is None:
            rank = int(env.get("NODE_RANK", 0))
        name = f"app_{uuid.uuid4().hex[:8]}"
        super().__init__(address, port, rank, num_nodes, name, int(cluster.timeout))
        self.where = str(self.file or f"{address}:{port}")
        self.flags = {"--trainer.num_nodes": num_nodes, "--trainer.devices": devices}
        self.ranks: Any = None
        self._rounds = 0

    def get_backend(self) -> str:
        """Return this rendezvous's name in torch elastic's registry."""
        return "nodes"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes; the agent calls this at the start and before each restart.

        Raises:
            UserError: When nodes are missing at the deadline, flags differ from node 0's, or node 0
                cannot listen.
        """
        if self._rounds:
            self.ranks.refuse_restart()
        self._rounds += 1
        deadline = Deadline(self.cluster.timeout)
        if self._store is None and self.rank == 0:
            self._store = self._host()
        if self._store is None:
            self._store = self._join(deadline)
        if self.world_size > 1:
            use_interface_to(self.master_addr)
        store = PrefixStore(f"round{self._rounds}", self._store)
        try:
            self._wait_for_all(store, deadline)
        finally:
            place = self._place()
            # another run may have written the file since then
            if self.file and self.rank == 0 and place and place[-1] == self.run_id:
                self.file.unlink(missing_ok=True)
        # block signals, because a starting rank would print a traceback on Ctrl-C; the rank
        # unblocks them in `process.begin`
        signal.pthread_sigmask(signal.SIG_BLOCK, CAUSES)
        info = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(store, self.rank, self.world_size, info)

    def num_nodes_waiting(self) -> int:
        """Return 0, because nodes never join later.

        Also unblock the signals that `next_rendezvous` has blocked: the agent calls this while its
        ranks run.
        """
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUSES)
        self.ranks.check()
        return 0

    def _host(self) -> TCPStore:
        """Host the store on node 0, and write its address to the file."""
        store = host_store(self.master_addr, self.master_port, self.cluster.timeout)
        self.master_port = store.port
        store.set("flags", json.dumps(self.flags))
        store.set("id", self.run_id)
        if self.file:
            place = {"address": self.master_addr, "port": store.port, "id": self.run_id}
            write_json(self.file, place)
        return store

    def _join(self, deadline: Deadline) -> TCPStore:
        """Connect to node 0's store."""
        node0 = f"node 0 of {self.world_size} at {self.where}"
        missing = node0
        while True:
            try:
                place = self._place()
                if place:
                    store = call_apart(
                        partial(reach_store, *place[:2]), partial(deadline.check, missing)
                    )
                    self._check(store, place[-1])
                    store.set_timeout(self.timeout)
                    self.master_addr, self.master_port = place[:2]
                    return store
            except (RuntimeError, OSError, ValueError) as error:  # DistError is a RuntimeError
                missing = f"{node0} ({str(error).splitlines()[0]})"
            deadline.check(missing)
            time.sleep(PAUSE)

    def _check(self, store: TCPStore, name: str | None) -> None:
        """Reject another run's store, and flags that differ from node 0's."""
        if name not in (None, store.get("id").decode()):
            raise ValueError("another run listens there")
        for flag, value in json.loads(store.get("flags")).items():
            if value != self.flags[flag]:
                raise UserError(
                    f"{flag} is {value} on node 0 and {self.flags[flag]} on node {self.rank}: "
                    "give the same"
                )

    def _wait_for_all(self, store: Store, deadline: Deadline) -> None:
        """Wait until all nodes have called this method."""
        store.set(f"node{self.rank}", "")
        while True:
            missing = [
                str(node) for node in range(self.world_size) if not store.check([f"node{node}"])
            ]
            if not missing:
                return
            deadline.check(f"node {', '.join(missing)} of {self.world_size} at {self.where}")
            time.sleep(PAUSE)

    def _place(self) -> tuple[str, int, str | None] | None:
        """Return node 0's address, port and run id; None while the shared file lacks them."""
        if self.file is None:
            return self.master_addr, self.master_port, None
        with suppress(ValueError, LookupError):
            content = read_json(self.file)
            return content["address"], content["port"], content["id"]
        return None

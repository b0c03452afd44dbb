"""Membership of a live run: ranks come and go, and the others continue without a restart.

Torchft's lighthouse knows which ranks are alive. After each change, all of them meet: they form a
new process group, and continue from the newest state. Node 0's agent hosts a store, whose address
`python -m app join` takes; it holds the lighthouse's address and the run's settings. Source:
https://docs.pytorch.org/torchft.
"""

import json
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import distributed

from app.errors import RankLostError, RankSilentError, UserError
from app.launch.agree import gather_objects
from app.launch.failures import explained, leave_nccl
from app.launch.rendezvous import Cluster, Deadline, host_store, reach_store
from app.system.addresses import use_interface_to
from app.system.connections import disconnect, form
from app.system.patches import expects
from app.system.torch_patches import end_process_group

CONFIG = "config"  # key of the run's configuration in the store
IDENTITY = "identity"  # key of the flags, versions and checksums that all machines share
ENDED = "ended"  # key that is set when the run has ended
LIVE = "APP_LIVE"  # environment variable: address of the run's store, for its ranks
JOINED = "APP_JOINED"  # environment variable of the ranks on a machine that has joined
HEARTBEAT = 0.1  # seconds between a rank's signs of life
DEAD = 0.5  # seconds without one, after which a rank is dead
SOON = timedelta(seconds=10)  # timeout of a connection


def choose_device() -> None:
    """Hide all GPUs from this rank except its own, before CUDA starts."""
    place = int(os.environ["TORCHELASTIC_RUN_ID"].rpartition("_")[2])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place]


def open_run(cluster: Cluster, processes: int, config: str) -> tuple[Any, ...]:
    """Host the store and the lighthouse of a live run, and print how to join it.

    Args:
        cluster: Settings of the launch.
        processes: Number of ranks with which the run begins.
        config: The run's configuration as YAML, for machines that join.

    Returns:
        Objects to keep until the run's end.
    """
    from torchft.coordination import LighthouseServer

    url = (cluster.init_method or "tcp://127.0.0.1:0").removeprefix("tcp://")
    host, _, port = url.rpartition(":")
    store = host_store(host, int(port), cluster.timeout)
    lighthouse = LighthouseServer(
        bind=f"{host}:0",
        min_replicas=cluster.min_ranks,
        join_timeout_ms=int(1000 * cluster.timeout),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * DEAD),
    )
    store.set("processes", str(processes))
    store.set(CONFIG, config)
    store.set("lighthouse", f"http://{host}:{lighthouse.address().rpartition(':')[2]}")
    os.environ[LIVE] = f"{host}:{store.port}"
    print(f"live  join with  python -m app join {host}:{store.port}", flush=True)
    return store, lighthouse


@expects("torchft.coordination:ManagerClient._quorum")
class Member:
    """This rank's membership in a live run, which begins once all of its first ranks have started.

    Args:
        address: Address of the run's store.
        timeout: Seconds to wait for other ranks.

    Attributes:
        members: Ids of the ranks that met last, in order of rank. An id is a number, and the
            address of the rank's own store.
        lost: Whether one of them has left since.
        is_awaited: Whether another rank waits to join.
    """

    def __init__(self, address: str, timeout: float) -> None:
        from torchft.coordination import ManagerClient, ManagerServer

        host, _, port = address.rpartition(":")
        use_interface_to(host)
        self.store = reach_store(host, int(port))
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            self._host = connection.getsockname()[0]
        self._own_store = host_store(self._host, 0, timeout)
        number = self.store.add("members", 1) - 1
        self.id = f"{number:06}@{self._host}:{self._own_store.port}"
        self._server = ManagerServer(
            replica_id=self.id,
            lighthouse_addr=self.store.get("lighthouse").decode(),
            hostname=self._host,
            bind=f"{self._host}:0",
            store_addr=self.id.partition("@")[2],
            world_size=1,
            heartbeat_interval=timedelta(seconds=HEARTBEAT),
            connect_timeout=SOON,
            quorum_retries=0,
        )
        self._client = ManagerClient(self._server.address(), connect_timeout=SOON)
        self.timeout = timedelta(seconds=timeout)
        self.members: list[str] = []
        self._peers: list[socket.socket] = []
        self._door = socket.socket()  # closed to tell the others that this rank leaves
        self._quorum = 0
        count = int(self.store.get("processes"))
        deadline = Deadline(timeout)
        while self.store.add("members", 0) < count:
            deadline.check(f"all {count} ranks")
            time.sleep(HEARTBEAT)

    def check(self, identity: dict[str, Any]) -> None:
        """Compare this rank with the run's first one.

        Args:
            identity: Everything that must be equal, by name.

        Raises:
            UserError: When something differs.
        """
        text = json.dumps(identity)
        first = self.store.compare_set(IDENTITY, "", text).decode()
        expected = json.loads(first)
        for name in expected | identity:
            here = identity.get(name)
            there = expected.get(name)
            if here != there:
                raise UserError(
                    f"{name} is {here} here and {there} in the live run: give this machine the same"
                )

    def meet(self, step: int, backend: str) -> None:
        """Wait for all living ranks, and form a process group with them.

        Args:
            step: Number of this rank's newest state.
            backend: Communication library.

        Raises:
            UserError: When the lighthouse does not answer.
        """
        while True:
            self._leave()
            self._door = socket.create_server((self._host, 0))
            self.store.set(self.id, f"{self._quorum} {self._door.getsockname()[1]}")
            ticket = self.store.add("tickets", 1)
            quorum = self._client._quorum(
                group_rank=0,
                step=step,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=self.timeout,
                commit_failures=1,  # so that each quorum has a new number
                init_sync=False,
            )
            self._quorum = quorum.quorum_id
            # ValueError: a group exists, because an abandoned formation has succeeded after all
            with suppress(RuntimeError, OSError, ValueError):
                self._connect(quorum, backend)
                tickets = gather_objects(ticket)
                break
        if quorum.replica_rank == 0:
            threading.Thread(
                target=self._watch_door, args=(max(tickets), self.is_awaited), daemon=True
            ).start()

    def _connect(self, quorum: Any, backend: str) -> None:
        self.members = list(quorum.replica_ids)
        rank = str(quorum.replica_rank)
        size = str(len(self.members))
        host, _, port = quorum.store_address.rpartition(":")
        os.environ.update(
            RANK=rank,
            GROUP_RANK=rank,
            WORLD_SIZE=size,
            GROUP_WORLD_SIZE=size,
            MASTER_ADDR=host,
            MASTER_PORT=port,
        )
        for member in self.members:
            if member != self.id:
                left, door = self.store.get(member).decode().split()
                if int(left) == quorum.quorum_id:
                    raise RuntimeError("a rank has left")
                place = member.partition("@")[2].rpartition(":")[0]
                self._peers.append(socket.create_connection((place, int(door)), timeout=5))
        threading.Thread(
            target=self._watch_peers, args=(self._peers, self.lost), daemon=True
        ).start()
        form(
            lambda: distributed.init_process_group(
                backend,
                store=distributed.PrefixStore(
                    f"quorum{quorum.quorum_id}", distributed.TCPStore(host, int(port), timeout=SOON)
                ),
                rank=quorum.replica_rank,
                world_size=int(size),
                timeout=self.timeout,
            )
        )

    def _leave(self) -> None:
        """Leave the process group, and stop watching its ranks."""
        peers = self._peers
        self._peers = []
        self.lost = threading.Event()
        self.is_awaited = threading.Event()
        for connection in (*peers, self._door):
            connection.close()
        leave_nccl()
        disconnect()
        end_process_group()

    def _watch_peers(self, peers: list[socket.socket], lost: threading.Event) -> None:
        """Wait until another rank ends; then make collective calls fail, also blocked ones."""
        while peers is self._peers:
            with suppress(OSError, ValueError):  # `_leave` has closed them
                if select.select(peers, [], [], HEARTBEAT)[0]:
                    break
        lost.set()
        time.sleep(HEARTBEAT)  # a rank may have ended after the last collective call
        while peers is self._peers:  # this rank may still open connections
            leave_nccl()
            disconnect()
            time.sleep(HEARTBEAT)

    def _watch_door(self, ticket: int, is_awaited: threading.Event) -> None:
        """Notice a rank that waits to join."""
        with suppress(RuntimeError):  # the store is gone: nobody can join any more
            while is_awaited is self.is_awaited and not is_awaited.is_set():
                if self.store.add("tickets", 0) > ticket:
                    is_awaited.set()
                time.sleep(HEARTBEAT)

    def shared(self, signal: int) -> list[int]:
        """Return the signal that stops all ranks, or 0; and whether ranks come or leave.

        Args:
            signal: The signal that this rank received, or 0. On a machine that has joined, only
                its ranks leave.
        """
        comes_or_leaves = self.is_awaited.is_set()
        if JOINED in os.environ:
            comes_or_leaves |= signal != 0
            signal = 0
        return [signal, int(comes_or_leaves)]

    def has_changed(self, error: BaseException | None) -> bool:
        """Return whether an exception is due to a change of the ranks."""
        if isinstance(error, UserError) or not isinstance(error, Exception):
            return False
        return isinstance(explained(error), RankLostError | RankSilentError) or self.lost.wait(DEAD)

    def changes(self, before: Sequence[str]) -> str:
        """Return in words which ranks have come and left."""
        texts = []
        for word, ids, others in (("left", before, self.members), ("joined", self.members, before)):
            ranks = [_name(member) for member in ids if member not in others]
            if ranks:
                texts.append(f"rank {', '.join(ranks)} {word}")
        return ", ".join(texts) or "the ranks have met again"


def _name(member: str) -> str:
    number, _, address = member.partition("@")
    host = address.rpartition(":")[0]
    place = "" if host.startswith("127.") else f" ({host})"
    return f"{int(number)}{place}"

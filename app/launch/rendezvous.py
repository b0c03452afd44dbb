"""How the nodes of a run meet without a launcher: at a TCP address, through a shared file, or by variables.

The first process of each node meets the others here, before any process group begins: torch's own rendezvous says
nothing while it waits, waits longer than it was told for a foreign listener, and leaves its file behind.
"""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.fabric.plugins.environments import LightningEnvironment

from app.errors import UserError
from app.launch.meeting import Guest, Host, Place


@dataclass
class Cluster:
    """How the nodes of a run find each other where neither torchrun nor SLURM sees to it.

    Args:
        init_method: Where they meet: `tcp://HOST:PORT`, an address of node 0; `file:///PATH`, a file that all nodes
            share; `env://`, which several nodes take by default: MASTER_ADDR, MASTER_PORT and NODE_RANK.
        node_rank: Number of this node, from 0.
        timeout: Seconds to wait for the other nodes and processes to start, and later for an answer of another rank.
    """

    init_method: str | None = None
    node_rank: int | None = None
    timeout: float = 1800.0


class Rendezvous(LightningEnvironment):
    """Nodes that meet at one address, of which each starts its own processes.

    The processes that a node starts are told the address by it, in MASTER_ADDR and MASTER_PORT.

    Args:
        cluster: How they find each other.
        num_nodes: How many there are.

    Raises:
        UserError: When the address, or the number of this node, is missing or wrong.
    """

    def __init__(self, cluster: Cluster, num_nodes: int) -> None:
        super().__init__()
        self.num_nodes, self.timeout = num_nodes, cluster.timeout
        self.method = cluster.init_method or "env://"
        rank, where = cluster.node_rank, "--cluster.node_rank"
        if rank is None and "NODE_RANK" in os.environ:
            where = "NODE_RANK"
            rank = _integer(where, os.environ[where])
        self.place = Place(self.method, *self._parse())
        if rank is None:
            raise UserError(
                f"--trainer.num_nodes {num_nodes}: which of them is this? give --cluster.node_rank 0, 1, …, or set "
                "NODE_RANK"
            )
        if not 0 <= rank < num_nodes:
            raise UserError(f"{where} {rank}: the nodes are 0 to {num_nodes - 1}, for --trainer.num_nodes {num_nodes}")
        self.rank = rank
        self.names: dict[str, str] = {}  # address of another node: which one it is

    def _parse(self) -> tuple[str, int, Path | None]:
        url = urlsplit(self.method)
        if url.scheme == "file" and url.path and not url.netloc:
            return "", 0, Path(url.path)
        if url.scheme == "tcp":
            with contextlib.suppress(ValueError):  # of a port out of range
                if url.hostname and url.port:
                    return url.hostname, url.port, None
        if self.method == "env://":
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
            if not missing:
                port = _integer("MASTER_PORT", os.environ["MASTER_PORT"])
                if not 0 < port < 2**16:
                    raise UserError(f"MASTER_PORT={port} in the environment: give a port, 1 to 65535")
                return os.environ["MASTER_ADDR"], port, None
            raise UserError(
                f"--trainer.num_nodes {self.num_nodes}: where do the nodes meet? give --cluster.init_method "
                f"tcp://HOST:PORT, or set {' and '.join(missing)}, or start them with torchrun or srun"
            )
        raise UserError(f"--cluster.init_method {self.method}: give tcp://HOST:PORT, file:///PATH or env://")

    def node_rank(self) -> int:
        """Number of this node."""
        return self.rank

    @property
    def main_address(self) -> str:
        """Address of node 0 as this node reaches it."""
        return os.environ.get("MASTER_ADDR", self.place.host)

    @property
    def main_port(self) -> int:
        """The port at which the process group meets: that of the nodes."""
        return int(os.environ.get("MASTER_PORT", self.place.port))

    def meet(self, devices: int, decide: Callable[[], Any], check: Callable[[Any], None]) -> Any:
        """Wait for all nodes. For the first process of a node, not for those that it starts.

        Args:
            devices: Processes of this node.
            decide: What node 0 calls when all are there, and tells the others.
            check: What each of them calls with it, and node 0.

        Returns:
            What node 0 has decided.

        Raises:
            UserError: When the nodes are not all there in time, do not fit together, or cannot use the address; or when
                one of them finds that the decision is one.
        """
        hello = {"node": self.rank, "nodes": self.num_nodes, "devices": devices}
        meeting = (Guest if self.rank else Host)(self.place, hello, self.timeout)
        word = meeting.meet(decide, check)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meeting.address, str(meeting.port)
        self.names = word["names"]
        return word["decided"]

    def name_of(self, message: str) -> str | None:
        """The node whose address stands in a message."""
        words = re.split(r"[^\w.:]", message.replace("]:", " "))
        spoken = {part for word in words for part in (word, word.rpartition(":")[0])}
        return next((name for address, name in self.names.items() if address in spoken), None)


def _integer(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{name}={text} in the environment: give a number")
    return int(text)

"""Sums over the shards of a global batch in one fixed binary tree, for any number of ranks.

Node (level, i) is the sum of shards i · 2^level to (i + 1) · 2^level - 1. Floating-point addition
is not associative: the order of additions changes a sum's last bits. The tree fixes this order.
Addition is commutative, so either of two siblings may arrive first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from app.data.shares import equal_shares, run_of

Node = tuple[int, int]


@dataclass(eq=False)
class Tree:
    """Binary tree over all shards, with the exchange of partial sums between ranks.

    Args:
        count: Number of shards.
        rank: Rank of this process.
        world_size: Number of processes.
        group: Process group, or None for one process.

    Attributes:
        shares: Number of shards of each rank.
        shards: Indices of this rank's shards.
    """

    count: int
    rank: int = 0
    world_size: int = 1
    group: Any = None

    def __post_init__(self) -> None:
        self.root = ((self.count - 1).bit_length(), 0)
        shares = equal_shares(self.world_size, self.count)
        self.shares = list(shares)
        self.shards = run_of(self.rank, shares)
        self._held = [self.partial_sums(run_of(rank, shares)) for rank in range(self.world_size)]

    def add(
        self, nodes: dict[Node, Any], node: Node, value: Any, plus: Callable[[Any, Any], Any]
    ) -> None:
        """Insert a node's value into the partial sums, and merge siblings into their parent.

        Args:
            nodes: Partial sums by node, changed in place.
            node: The node to insert.
            value: Value of the node.
            plus: Function that adds two values.
        """
        level, index = node
        while (level, index) != self.root:
            sibling = level, index ^ 1
            if sibling in nodes:
                value = plus(nodes.pop(sibling), value)
            elif (index ^ 1) << level < self.count:  # the sibling exists, and is added later
                break
            level = level + 1
            index = index >> 1
        nodes[level, index] = value

    def partial_sums(self, shards: Iterable[int]) -> list[Node]:
        """Return the nodes that add up to the sum of some shards.

        For shards 0 to 4 of 8, these are (2, 0), the sum of shards 0 to 3, and (0, 4), which is
        shard 4.
        """
        nodes: dict[Node, None] = {}
        for shard in shards:
            self.add(nodes, (0, shard), None, lambda *_: None)
        return sorted(nodes)

    def sum(self, nodes: dict[Node, Tensor]) -> Tensor:
        """Return the sum over the shards of all ranks, (n,). Collective.

        Every partial sum is cut into N chunks, one for each of N ranks. A rank receives its chunk
        of all partial sums, adds them in the tree's order, and sends the result to the other ranks.
        A rank with a single partial sum sends 2 (N - 1) / N of this sum's bytes, as in a ring
        all-reduce. All operations are point-to-point.

        Args:
            nodes: Partial sums of this rank, each (n,).
        """
        if self.world_size == 1:
            return nodes[self.root]
        rank = self.rank
        others = set(range(self.world_size)) - {rank}
        split = [nodes[node].tensor_split(self.world_size) for node in self._held[rank]]
        chunk = split[0][rank]
        sent = {}
        received = {}
        for other in others:
            sent[other] = torch.cat([chunks[other] for chunks in split])
            received[other] = chunk.new_empty(len(self._held[other]), len(chunk))
        exchange(sent, received, self.group)
        received[rank] = torch.stack([chunks[rank] for chunks in split])
        sums: dict[Node, Tensor] = {}
        for sender, held in enumerate(self._held):
            for node, value in zip(held, received[sender], strict=True):
                self.add(sums, node, value, torch.add)
        whole = torch.empty_like(nodes[self._held[rank][0]])
        places = dict(enumerate(whole.tensor_split(self.world_size)))
        summed = places.pop(rank).copy_(sums[self.root])
        exchange(dict.fromkeys(others, summed), places, self.group)
        return whole


def exchange(
    sent: dict[int, Tensor], received: dict[int, Tensor], group: distributed.ProcessGroup | None
) -> None:
    """Send a tensor to some ranks, and receive one from some ranks, in place.

    A GPU's tensors pass through host memory under gloo, because gloo sends and receives only from
    there.

    Args:
        sent: Tensor for each receiving rank, by its rank in the group.
        received: Buffer for each sending rank's tensor, by its rank in the group.
        group: Process group; None for all ranks.
    """
    buffers = received
    if distributed.get_backend(group) == "gloo":
        sent = {rank: tensor.cpu() for rank, tensor in sent.items()}
        buffers = {rank: tensor.cpu() for rank, tensor in received.items()}
    operations = []
    for operation, tensors in ((distributed.isend, sent), (distributed.irecv, buffers)):
        for rank, tensor in tensors.items():
            if tensor.numel():
                peer = distributed.P2POp(operation, tensor, group=group, group_peer=rank)
                operations.append(peer)
    if operations:
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
    for rank, tensor in received.items():
        tensor.copy_(buffers[rank])  # does nothing if they are one

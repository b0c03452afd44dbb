"""Variants of `ddp` that compress gradients, or use an explicit ring all-reduce."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from app.training.ddp import DDP
from app.training.tree import exchange


class FixedHook(DDP):
    """`ddp` with a fixed communication hook.

    Args:
        kwargs: Arguments of `DDP`, except hook and state.
    """

    fixed_hook: Callable

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(ddp_comm_hook=self.fixed_hook, ddp_comm_state=None, **kwargs)


class FP16(FixedHook):
    """`ddp` with float16 gradients: half the bytes, but gradients above 65,504 overflow.

    Sums are rounded, too, so that losses differ from `ddp`'s. Source: torch's `fp16_compress_hook`.
    """

    strategy_name = "ddp_fp16"
    fixed_hook = staticmethod(default_hooks.fp16_compress_hook)


class BF16(FixedHook):
    """`ddp` with bfloat16 gradients: half the bytes, no overflow, but 8 bits of precision.

    Sums are rounded, too, so that losses differ from `ddp`'s. Source: torch's `bf16_compress_hook`.
    """

    strategy_name = "ddp_bf16"
    fixed_hook = staticmethod(default_hooks.bf16_compress_hook)


def ring_all_reduce(buffer: Tensor, group: dist.ProcessGroup | None = None) -> int:
    """Sum a tensor over all ranks, in place, in a ring: each rank has two neighbours.

    First a reduce-scatter: the buffer is cut into N chunks, one per rank. In each of N−1 steps, a
    rank sends one chunk to the next rank, which adds its own values to it. Afterwards, each rank
    has the sum of one chunk. Then an all-gather: in N−1 more steps, the sums pass around the ring.
    Every rank sends 2(N−1)/N of the buffer, the minimum.

    Sources: Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations
    (2009), https://doi.org/10.1016/j.jpdc.2008.09.002; Baidu's ring all-reduce,
    https://github.com/baidu-research/baidu-allreduce.

    Args:
        buffer: Tensor of shape (n,). If n is below the number of ranks, empty chunks are not sent.
        group: Process group; by default all ranks.

    Returns:
        Number of bytes that this rank sent.
    """
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    following = (rank + 1) % world
    previous = (rank - 1) % world
    chunks = buffer.tensor_split(world)
    received = torch.empty_like(chunks[0])  # no chunk is longer than the first
    sent = 0
    for step in range(world - 1):
        out = chunks[(rank - step) % world]
        mine = chunks[(rank - step - 1) % world]
        other = received[: len(mine)]
        exchange({following: out}, {previous: other}, group)
        mine += other
        sent += out.nbytes
    for step in range(world - 1):
        out = chunks[(rank - step + 1) % world]
        exchange({following: out}, {previous: chunks[(rank - step) % world]}, group)
        sent += out.nbytes
    return sent


def ring_hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients by `ring_all_reduce`.

    For learning and measuring only. This hook blocks the backward pass. The all-reduce of torch
    overlaps with the backward pass, and should be faster.
    """
    buffer = bucket.buffer().div_(dist.get_world_size())  # divide before the sum, to avoid overflow
    ring_all_reduce(buffer)
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    future.set_result(buffer)
    return future


class Ring(FixedHook):
    """`ddp` with an explicit ring all-reduce, for learning and measuring: see `ring_all_reduce`."""

    strategy_name = "ddp_ring"
    fixed_hook = staticmethod(ring_hook)

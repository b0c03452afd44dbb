"""What ranks have in common: objects that they exchange, and tensors of which a node holds one copy."""

import mmap
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from app.errors import UserError
from app.launch.agree import gather_objects

Empty = Callable[..., Tensor]  # torch.empty, or one like it: a shape, and the keyword dtype
Read = Callable[[Empty], tuple[Tensor, ...]]  # makes tensors with the function that it is given, and fills them
Once = Callable[[Read], tuple[Tensor, ...]]
CAN_SHARE = hasattr(os, "memfd_create")  # Linux


class NodeMemory:
    """Memory that other processes of this node can map; it is gone with the last of them, however that ends.

    A file without a name in any file system: nothing can stay behind in /dev/shm, whose limit does not hold for it
    either. Source: https://man7.org/linux/man-pages/man2/memfd_create.2.html.

    Raises:
        OSError: When the kernel gives none.
    """

    def __init__(self) -> None:
        self._name = f"data-parallel-lab-{uuid.uuid4().hex}"
        self._file = os.memfd_create(self._name)
        self._offsets: dict[int, int] = {}

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Make a tensor that lies in this memory."""
        offset = os.fstat(self._file).st_size
        size = max(torch.Size(shape).numel() * dtype.itemsize, 1)
        # whole pages, for a mapping begins with one; had at once, for a page that is not there on use is a SIGBUS
        os.posix_fallocate(self._file, offset, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        tensor = _mapped(self._file, offset, shape, dtype)
        self._offsets[tensor.data_ptr()] = offset
        return tensor

    def handle(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """What another process of this node needs to `open_handle` these tensors, which `empty` has made."""
        places = [(self._offsets[t.data_ptr()], t.shape, t.dtype) for t in tensors]
        return f"/proc/{os.getpid()}/fd/{self._file}", self._name, places

    def close(self) -> None:
        """Let no further process in; the tensors stay."""
        os.close(self._file)


def open_handle(handle: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Tensors of another process of this node, to be read only.

    Raises:
        OSError: When it is not within reach, as from a container of its own.
    """
    path, name, places = handle
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{file}") != f"/memfd:{name} (deleted)":
            raise OSError(f"{path} is of another process")  # whose id in its container is the same
        return tuple(_mapped(file, *place) for place in places)
    finally:
        os.close(file)


def _mapped(file: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    pages = mmap.mmap(file, max(count * dtype.itemsize, 1), offset=offset)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape) if count else torch.empty(shape, dtype=dtype)


def alone(read: Read) -> tuple[Tensor, ...]:
    """Tensors that this process reads for itself."""
    return read(torch.empty)


def read_once(trainer: Trainer | None, read: Read) -> tuple[Tensor, ...]:
    """Tensors that the first rank of each node reads, and that the others map: one copy. Collective.

    Where a node has one rank, or its ranks cannot share memory, each reads for itself.

    Args:
        trainer: Says which rank of which node this is; None outside a run.
        read: What to do once.

    Raises:
        UserError: On every rank, when one of those that read has failed.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if trainer is None or not distributed or not CAN_SHARE or trainer.world_size <= trainer.num_nodes:
        return alone(read)
    memory, handle, failure = None, None, None
    if trainer.local_rank == 0:
        with suppress(OSError):
            memory = NodeMemory()
        try:
            tensors = read(memory.empty if memory else torch.empty)
            handle = memory and memory.handle(tensors)
        except Exception as error:
            failure = error
    everyone = gather_objects((trainer.node_rank, handle, failure and _reason(failure)))
    _raise_first(everyone, trainer, failure)
    if trainer.local_rank != 0:
        tensors = ()
        theirs = next((handle for node, handle, _ in everyone if node == trainer.node_rank and handle), None)
        with suppress(OSError):
            tensors = open_handle(theirs) if theirs else ()
    trainer.strategy.barrier("shared")
    if memory:
        memory.close()
    return tensors or alone(read)


def _reason(error: Exception) -> str:
    """What was wrong: a loader's worker hands on its error as the text of a traceback."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + str(error).rsplit("UserError: ", 1)[-1]


def _raise_first(everyone: Sequence[tuple[int, Any, str | None]], trainer: Trainer, own: Exception | None) -> None:
    """Raise what one of the readers has failed with, so that it is said once on each node."""
    node, reason = next(((node, reason) for node, _, reason in everyone if reason), (0, None))
    if own is not None and not isinstance(own, UserError):
        raise own
    if reason is None:
        return
    if node != trainer.node_rank:
        reason = f"node {node}: {reason}"
    raise UserError(reason) from own

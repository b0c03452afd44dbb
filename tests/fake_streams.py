"""Streams of the fake `cuda:0`: which operation waits for which, and who may free a tensor."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

from torch import distributed
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves


def is_on_cuda(value):
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"


class Stream:
    """Queue of a device's operations; also the host's operations.

    Attributes:
        done: For each stream, the number of its operations that end before this stream's next
            operation begins.
    """

    def __init__(self, *_, **__):
        self.done = Counter()

    def wait_stream(self, other):
        self.done |= other.done


@dataclass
class Memory:
    """Memory of a tensor and its views.

    Attributes:
        owner: Stream that allocated the memory. Its next operations may reuse the memory once the
            tensor is freed.
        writes: Number of each stream's last write.
        uses: Number of each stream's last read or write.
        kept_for: Streams that `record_stream` has named.
    """

    owner: Stream
    writes: Counter[Stream] = field(default_factory=Counter)
    uses: Counter[Stream] = field(default_factory=Counter)
    kept_for: set[Stream] = field(default_factory=set)


class Streams:
    """Check of the order of operations on different streams.

    A stream must wait for other streams before it reads what they write, or writes what they use. A
    tensor that another stream still uses may be freed only after `record_stream`.

    Attributes:
        host: The host, which uses pinned memory while a stream copies it.
        current: The current stream.
    """

    def __init__(self):
        self.host = Stream()
        self.current = Stream()
        self._memory = {}

    @contextmanager
    def using(self, stream):
        """Make a stream the current one."""
        before = self.current
        self.current = stream
        yield
        self.current = before

    def memory(self, tensor, owner):
        return self._memory.setdefault(StorageWeakRef(tensor.untyped_storage()), Memory(owner))

    def use(self, stream, read, written):
        """Count an operation of a stream, and check its order."""
        stream.wait_stream(self.host)  # which issues it
        stream.done[stream] += 1
        self._check_freed()
        for tensors, is_write in ((read, False), (written, True)):
            for tensor in tree_leaves(tensors):
                if not (is_on_cuda(tensor) or getattr(tensor, "pinned", False)):
                    continue
                memory = self.memory(tensor, stream)
                before = memory.uses if is_write else memory.writes
                assert before <= stream.done, (
                    "a stream uses a tensor without waiting for another stream"
                )
                memory.uses[stream] = stream.done[stream]
                if is_write:
                    memory.writes[stream] = stream.done[stream]

    def _check_freed(self):
        for storage, memory in list(self._memory.items()):
            if storage.expired():
                del self._memory[storage]
                pending = {
                    stream
                    for stream in memory.uses
                    if memory.uses[stream] > memory.owner.done[stream]
                }
                is_kept = (
                    memory.owner is self.host
                )  # torch keeps pinned memory until its copies have ended
                assert is_kept or pending <= memory.kept_for, (
                    "a tensor is freed while another stream uses it"
                )

    def record(self, tensor, stream):
        """Replacement for `Tensor.record_stream`."""
        self.memory(tensor, self.current).kept_for.add(stream)

    def exchange(self, operations):
        """Replacement for `batch_isend_irecv`.

        NCCL communicates on a stream of its own, gloo only from the host.
        """
        link = Stream()
        link.wait_stream(self.current)
        for operation in operations:
            tensor = operation.tensor
            assert is_on_cuda(tensor) == (distributed.get_backend() == "nccl")
            if operation.op is distributed.isend:
                self.use(link, read=tensor, written=())
            else:
                self.use(link, read=(), written=tensor)
        return [SimpleNamespace(wait=lambda: self.current.wait_stream(link))]


class Event:
    """Event for timing: its time can be read only after the host has waited for the device."""

    def __init__(self, streams, **_):
        self.streams = streams

    def record(self):
        self.done = Counter(self.streams.current.done)

    def elapsed_time(self, later):
        for event in (self, later):
            assert event.done <= self.streams.host.done, "an elapsed time is read too early"
        return 1.0


class Future:
    """Future whose result is on a device.

    The stream that waits for it continues after the stream that set it.
    """

    def __init__(self, streams, devices=None):
        self.streams = streams
        self.ready = Stream()

    def set_result(self, result):
        self.result = result
        self.ready.wait_stream(self.streams.current)

    def set_exception(self, error):
        raise error

    def wait(self):
        self.streams.current.wait_stream(self.ready)
        self.streams.record(self.result, self.streams.current)
        return self.result

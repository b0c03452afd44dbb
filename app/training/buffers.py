"""Snapshot of a module's buffers, so that each shard's forward pass starts from the same values."""

from collections.abc import Sequence

import torch
from lightning import LightningModule
from torch import Tensor

from app.system.patches import expects


@expects("torch:_foreach_copy_", "torch:Tensor._version")
class Buffers:
    """Buffers of a module that a forward pass may change, such as BatchNorm's running statistics.

    Args:
        module: The module. The states of its metrics, which accumulate over shards, are no buffers.

    Attributes:
        names: Names of the buffers, such as `network.bn1.running_mean`.
    """

    def __init__(self, module: LightningModule) -> None:
        self.names: list[str] = []
        self._owners: list[tuple[torch.nn.Module, str]] = []
        for prefix, owner in module.named_modules():
            for name, _ in owner.named_buffers(recurse=False):
                self.names.append(f"{prefix}.{name}".lstrip("."))
                self._owners.append((owner, name))
        self._all = range(len(self.names))
        self._before = [buffer.clone() for buffer in self.values(self._all)]
        self._seen: set[int] | None = None  # indices of buffers that the first shard changed

    def save(self) -> None:
        """Save the values before the step."""
        self._now = self.values(self._all)
        self._versions = [buffer._version for buffer in self._now]
        if self._now:
            torch._foreach_copy_(self._before, self._now)

    def changed(self) -> list[int]:
        """Return the indices of the buffers that a shard has changed or replaced.

        The first call compares values, because torch's batch_norm changes the running statistics
        without incrementing their version counter. Later calls compare version counters, and always
        include the buffers that the first call found.
        """
        values = self.values(self._all)
        if self._seen is None:
            self._seen = set()
            for place in self._all:
                if not torch.equal(values[place], self._before[place]):
                    self._seen.add(place)
        changed = []
        for place, value in enumerate(values):
            is_same = value is self._now[place] and value._version == self._versions[place]
            if place in self._seen or not is_same:
                changed.append(place)
        return changed

    def values(self, places: Sequence[int]) -> list[Tensor]:
        """Return the values of the buffers at some indices."""
        return [getattr(*self._owners[place]) for place in places]

    def restore(self, places: list[int]) -> None:
        """Restore buffers to their values before the step."""
        self.write(places, [self._before[place] for place in places])

    def write(self, places: list[int], values: Sequence[Tensor]) -> None:
        """Set the values of the buffers at some indices."""
        if not places:
            return
        kept = [self._now[place] for place in places]
        shaped = [value.view_as(buffer) for value, buffer in zip(values, kept, strict=True)]
        torch._foreach_copy_(kept, shaped)
        for place, buffer in zip(places, kept, strict=True):
            owner, name = self._owners[place]
            setattr(owner, name, buffer)  # a shard may have replaced the buffer
            self._versions[place] = buffer._version

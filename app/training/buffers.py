"""Snapshot of a module's buffers, so that each shard's forward pass starts from the same values."""

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from app.system.patches import expects


@expects("torch:_foreach_copy_")
class Buffers:
    """Buffers of a module that a forward pass may change, such as BatchNorm's running statistics.

    Args:
        module: The module. The states of its metrics are excluded, because they accumulate over
            shards.
    """

    def __init__(self, module: LightningModule) -> None:
        self._owners = [
            (f"{prefix}.{name}".lstrip("."), owner._buffers, name)
            for prefix, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and not isinstance(owner, Metric)
        ]
        self._before = [buffers[name].clone() for _, buffers, name in self._owners]
        self._seen: set[int] | None = None  # indices of buffers that the first shard changed

    def save(self) -> None:
        """Save the values before the step."""
        self._now = [buffers[name] for _, buffers, name in self._owners]
        self._versions = [buffer._version for buffer in self._now]
        if self._now:
            torch._foreach_copy_(self._before, self._now)

    def changed(self) -> list[int]:
        """Return the indices of the buffers that a shard has changed or replaced.

        The first call compares values, because torch's batch_norm changes the running statistics
        without incrementing their version counter. Later calls compare version counters, and always
        include the buffers that the first call found.
        """
        values = self.values(list(range(len(self._owners))))
        if self._seen is None:
            pairs = enumerate(zip(values, self._before, strict=True))
            self._seen = {place for place, (now, before) in pairs if not torch.equal(now, before)}
        return [
            place
            for place, (value, now) in enumerate(zip(values, self._now, strict=True))
            if place in self._seen or value is not now or value._version != self._versions[place]
        ]

    def name(self, place: int) -> str:
        """Return a buffer's name, such as `network.bn1.running_mean`."""
        return self._owners[place][0]

    def values(self, places: list[int]) -> list[Tensor]:
        """Return the values of the buffers at some indices."""
        return [buffers[name] for _, buffers, name in (self._owners[place] for place in places)]

    def restore(self, places: list[int]) -> None:
        """Restore buffers to their values before the step."""
        self.write(places, [self._before[place] for place in places])

    def write(self, places: list[int], values: Sequence[Tensor]) -> None:
        """Set the values of the buffers at some indices."""
        if not places:
            return
        kept = [self._now[place] for place in places]
        torch._foreach_copy_(
            kept, [value.view_as(buffer) for value, buffer in zip(values, kept, strict=True)]
        )
        for place, buffer in zip(places, kept, strict=True):
            _, buffers, name = self._owners[place]
            buffers[name], self._versions[place] = buffer, buffer._version

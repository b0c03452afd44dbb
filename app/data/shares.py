"""Global order of samples, and each rank's share of a global batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal

import torch

from app.errors import UserError
from app.system.random_streams import seed_of


def stream(*key: int) -> torch.Generator:
    """Return an independent random generator for a key, such as (seed, purpose, epoch, step)."""
    return torch.Generator().manual_seed(seed_of(*key))


class Shards(list[Any]):
    """List of a rank's shards of a global batch, one for each of its virtual devices.

    Args:
        shards: The shards.
        first: Global index of the first shard.
        counts: Number of samples of each shard. A shard of 0 samples may hold a stand-in sample.
        samples: Number of samples of the global batch.
    """

    def __init__(
        self, shards: Iterable[Any], first: int, counts: Sequence[int], samples: int
    ) -> None:
        super().__init__(shards)
        self.first = first
        self.counts = counts
        self.samples = samples


def equal_shares(world_size: int, count: int) -> list[int]:
    """Return each rank's number of `count` shards, divided as equally as possible."""
    return [
        (rank + 1) * count // world_size - rank * count // world_size for rank in range(world_size)
    ]


def run_of(rank: int, shares: Sequence[int]) -> range:
    """Return the indices of a rank's shards.

    Args:
        rank: The rank.
        shares: Number of shards of each rank.
    """
    first = sum(shares[:rank])
    return range(first, first + shares[rank])


def shards_beyond(virtual_devices: int, batch_size: int) -> str:
    """Return the error message for a global batch with fewer samples than shards."""
    return (
        f"--run.virtual_devices {virtual_devices}: a global batch of {batch_size} has fewer "
        f"samples than shards: give {batch_size} or less, or a larger batch"
    )


def unequal_shares(batch_size: int, world_size: int) -> str:
    """Return the error message for a global batch that the world size does not divide."""
    below = batch_size - batch_size % world_size
    nearest = f"{below} or {below + world_size}" if below else f"{world_size}"
    return (
        f"a global batch of {batch_size} cannot be shared equally by {world_size} ranks: "
        f"use --data.batch_size {nearest}, or another --trainer.devices"
    )


def next_step(trainer: Any) -> Callable[[], int]:
    """Return a function, which can be pickled, that returns the epoch's next training step."""
    return partial(attrgetter("epoch_loop.batch_progress.current.ready"), trainer.fit_loop)


@dataclass(eq=False)
class GlobalOrder:
    """Global order of an epoch's samples, and this rank's share of each global batch.

    A global batch is cut into parts of nearly equal size: one for each rank, or one for each
    virtual device. A rank's share is one part, or the consecutive parts of its virtual devices.

    Args:
        count: Number of samples of an epoch.
        batch_size: Size of the global batch.
        drop_last: Whether to drop the last, smaller batch.
        rank: Rank of this process.
        world_size: Number of processes.
        virtual_devices: Number of shards of a global batch, or None for one part per process.
        seed: Seed of the order.
        empty: What a rank without a sample of the last batch gets: an empty batch (`keep`), the
            global batch's first sample (`stand_in`), or no batch (`skip`).
        position: Function that returns the first step to yield: 0, or a later step if a run resumes
            within the epoch.

    Attributes:
        epoch: The epoch, which seeds the order.
        sampler: This object, because Lightning calls `set_epoch` of a batch sampler's `sampler`.
    """

    count: int
    batch_size: int
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    virtual_devices: int | None = None
    seed: int = 0
    empty: Literal["keep", "stand_in", "skip"] = "keep"
    position: Callable[[], int] = int  # int() is 0

    def __post_init__(self) -> None:
        self.epoch = 0
        self.sampler = self
        self.parts = self.virtual_devices or self.world_size
        indices = run_of(self.rank, equal_shares(self.world_size, self.parts))
        self._ends = range(indices.start, indices.stop + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the order; Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        full, rest = divmod(self.count, self.batch_size)
        if rest == 0 or self.drop_last:
            return full
        if self.empty == "skip" and self.share_size(full) == 0:
            return full
        return full + 1

    @property
    def is_uneven(self) -> bool:
        """Whether ranks or batches differ in their number of samples."""
        rest = 0 if self.drop_last else self.count % self.batch_size
        return bool(rest or self.batch_size % self.parts)

    def start(self, step: int) -> int:
        """Return the place of a step's first sample in the epoch's order."""
        return min(step * self.batch_size, self.count)

    def global_count(self, step: int) -> int:
        """Return the number of samples of all ranks at a step."""
        return self.start(step + 1) - self.start(step)

    def loss_weight(self, trainer: Any, step: int, samples: int = 1) -> float:
        """Return the weight of a batch's loss: ranks and batches may differ in number of samples.

        With these weights, an optimizer step's gradients are those of the mean loss over all
        samples of its batches. DDP averages the gradients over the ranks, and Lightning divides
        the loss by the number of accumulated batches. The weight undoes both divisions, and
        divides by the optimizer step's number of samples instead. Gradients of virtual devices
        are summed, so that their weights only divide.

        `ImageClassifier.training_step` weights each sample's loss. The loss of a user's module is
        a mean, which the training loop weights: `StraightLoop`, or `ShardedLoop` for each shard.

        Example: 10 samples in global batches of 4, 3 ranks, accumulation over 2 batches. The
        weight of a single sample's loss, and those of the ranks' mean losses:

        ==== ============= ============= ============= ================= ================
        step rank 0        rank 1        rank 2        sample            ranks
        ==== ============= ============= ============= ================= ================
        0    samples 0, 1  sample 2      sample 3      3 · 2 / 8 = 0.75  1.5, 0.75, 0.75
        1    samples 4, 5  sample 6      sample 7      3 · 2 / 8 = 0.75  1.5, 0.75, 0.75
        2    sample 8      sample 9      no sample     3 · 2 / 2 = 3     3, 3, 0
        ==== ============= ============= ============= ================= ================

        With 3 virtual devices, the weights of the shards are 2/8, 1/8, 1/8 at steps 0 and 1, and
        1/2, 1/2, 0 at step 2.

        Args:
            trainer: The Trainer, which knows the number of accumulated batches.
            step: Index of the batch in the epoch.
            samples: Number of samples whose mean loss is weighted; 1 for a sum of losses.
        """
        batches = trainer.accumulate_grad_batches
        first = step - step % batches
        end = min(first + batches, trainer.fit_loop.max_batches)
        window = self.start(end) - self.start(first)
        divisor = 1 if self.virtual_devices else self.world_size * batches
        return samples * divisor / window

    def bounds(self, step: int) -> list[int]:
        """Return the boundaries of this rank's parts of a step in the epoch's order."""
        size, rest = divmod(self.global_count(step), self.parts)
        first = self.start(step)
        return [first + index * size + min(index, rest) for index in self._ends]

    def span(self, step: int) -> slice:
        """Return this rank's samples of a step, as a slice of the epoch's order."""
        bounds = self.bounds(step)
        return slice(bounds[0], bounds[-1])

    def share_size(self, step: int) -> int:
        """Return the number of this rank's samples at a step."""
        span = self.span(step)
        return span.stop - span.start

    def shards(self, shards: Iterable[Any], step: int) -> "Shards":
        """Return this rank's parts of a step as `Shards`, with their numbers of samples."""
        counts = [end - start for start, end in pairwise(self.bounds(step))]
        return Shards(shards, self._ends.start, counts, self.global_count(step))

    def state_dict(self) -> dict[str, Any]:
        """Return the settings that define the order; the trainer saves the position."""
        return {"seed": self.seed, "batch_size": self.batch_size, "samples": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the checkpoint's order equals this one.

        Raises:
            UserError: When seed, batch size or number of samples differ and the epoch is
                unfinished.
        """
        for key, value in self.state_dict().items():
            if state[key] != value and self.position() > 0:
                raise UserError(
                    f"the checkpoint was made in the middle of an epoch with {key} {state[key]}, "
                    f"but this run has {value}: "
                    "resume with the same, or from a checkpoint made at the end of an epoch"
                )

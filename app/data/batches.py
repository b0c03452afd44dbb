"""Loader of a rank's share: one global permutation per epoch, cut into global batches.

Every strategy draws from the same seeded permutation, so that step k trains on the same samples for any world size; a
rank takes its part of each global batch. The loader uses no global random state, and the trainer holds the position in
an epoch, so that a resumed run continues with the next sample.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from app.data.sources import Split, Workers
from app.data.transforms import DRAW_RANGE
from app.errors import UserError
from app.system.patches import expects

Placement = Literal["disk", "memory", "device"]


def stream(*key: int) -> torch.Generator:
    """Return an independent random generator for a key, such as (seed, purpose, epoch, step)."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


class RawBatch(NamedTuple):
    """One rank's share of a global batch, before its pixels are transformed.

    Attributes:
        images: uint8 (n, C, H, W).
        labels: int64 (n,).
        draws: Random integers below DRAW_RANGE for the augmentation of each sample, int32 (n, k), or None.
    """

    images: Tensor
    labels: Tensor
    draws: Tensor | None

    def to(self, device: torch.device) -> "RawBatch":
        """Copy the batch to a device; the copy of pinned memory is asynchronous."""
        later = device.type == "cuda"
        draws = None if self.draws is None else self.draws.to(device, non_blocking=later)
        return RawBatch(self.images.to(device, non_blocking=later), self.labels.to(device, non_blocking=later), draws)


class Reader:
    """Data set of a worker process: reads images of a split, and augments each from its sample's seed.

    Args:
        split: The images.
        augment: Maps an image, uint8 (C, H, W), to one of the same shape, using torch's global random state.
    """

    def __init__(self, split: Split, augment: nn.Module | None) -> None:
        self.split, self.augment = split, augment

    def __call__(self, item: tuple[int, int]) -> Tensor:
        """Read an image, uint8 (C, H, W), by its row in the split and its seed."""
        row, seed = item
        image = self.split[row]
        if self.augment is None:
            return image
        image = image.clone()  # which an augmentation may change in place; the split may be mapped to be read only
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)  # of the CPU alone, unlike torch.manual_seed
        augmented = self.augment(image)
        torch.set_rng_state(before)
        kept, made = f"{image.dtype} {tuple(image.shape)}", type(augmented).__name__
        if isinstance(augmented, Tensor):
            made = f"{augmented.dtype} {tuple(augmented.shape)}"
        if made != kept:
            name = type(self.augment).__name__
            raise UserError(f"--data.augment {name} makes {made} of an image of {kept}: it must keep shape and type")
        return augmented


def one_ahead(batches: Iterator[RawBatch]) -> Iterator[RawBatch]:
    """Make each batch in a thread, during the use of the one before."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = thread.submit(next, batches, None)
            yield batch


@expects(
    "torch.utils.data:DataLoader._iterator",
    "lightning.pytorch.utilities.combined_loader:_shutdown_workers_and_reset_iterator",
)
class GlobalBatches:
    """Iterates over one rank's share of every global batch.

    The last, smaller batch is divided as evenly as possible. A rank without a sample gets a batch of size 0, so that
    all ranks take the same number of steps.

    Args:
        split: Images and labels.
        rows: Rows of the split that belong to this loader, int64 (n,); sample i is row `rows[i]`.
        batch_size: Size of the global batch.
        rank: This process.
        world_size: Number of processes.
        placement: `disk` reads items through worker processes, `memory` indexes one tensor on the host,
            `device` the same tensor on `device`: all rows when shuffled, else only this rank's share.
        device: Device of the batches.
        num_workers: Worker processes for `disk`.
        seed: Seed of the permutation and the draws.
        shuffle: Whether each epoch has its own permutation.
        drop_last: Whether to drop the last, smaller batch.
        draws: Random numbers per sample.
        augment: Augmentation by the workers, for `disk` only.
        position: Returns the step at which the epoch begins: above zero for a resumed one.
    """

    batch_sampler = None  # Lightning requires it beside a `sampler`

    def __init__(
        self,
        split: Split,
        rows: Tensor,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        placement: Placement = "memory",
        device: torch.device = torch.device("cpu"),  # noqa: B008
        num_workers: int = 0,
        seed: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        draws: int = 0,
        augment: nn.Module | None = None,
        position: Callable[[], int] = lambda: 0,
    ) -> None:
        self.split, self.rows = split, rows
        self.batch_size, self.drop_last = batch_size, drop_last
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle, self.draws = seed, shuffle, draws
        self.position = position
        self.epoch = 0
        self.sampler = self if shuffle else SequentialSampler(range(len(rows)))
        self._pin = device.type == "cuda" and placement != "device"
        self._labels = split.labels[rows]
        self._samples = len(rows)  # read on each step
        self._workers: Workers | None = None
        self._augmented = augment is not None
        if placement == "disk":
            self._shares: list[list[tuple[int, int]]] = []
            self._workers = Workers(Reader(split, augment), self._shares, split.image_shape, num_workers, self._pin)
            return
        self._images, self._where = split.tensor(), rows
        if placement == "device":
            order = torch.arange(len(rows))
            kept = order if shuffle else torch.cat([self._share(order, step) for step in range(len(self))])
            there = torch.empty((len(kept), *self._images.shape[1:]), dtype=torch.uint8, device=device)
            for to, part in zip(there.split(4096), rows[kept].split(4096), strict=True):  # not all on the host again
                to.copy_(self._images[part])
            self._images = there
            self._where = torch.full((len(rows),), -1).index_copy_(0, kept, torch.arange(len(kept))).to(device)
            self._labels = self._labels.to(device)

    def __len__(self) -> int:
        full, rest = divmod(len(self.rows), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    @property
    def _iterator(self) -> Any:
        """The worker processes, under the name by which Lightning ends them after a stage."""
        return self._workers and self._workers._iterator

    @_iterator.setter
    def _iterator(self, iterator: None) -> None:
        if self._workers is not None:
            self._workers._iterator = iterator

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; Lightning calls it before each epoch."""
        self.epoch = epoch

    def global_count(self, step: int) -> int:
        """Return the number of samples of all ranks at a step."""
        return min(self.batch_size, self._samples - step * self.batch_size)

    def window_count(self, step: int, length: int, steps: int) -> int:
        """Return the number of samples, over all ranks, in a step's window of accumulated batches.

        Args:
            step: Number of the batch in its epoch.
            length: Batches whose gradients are accumulated; the last window of an epoch may have fewer.
            steps: Batches of the epoch.
        """
        first = step - step % length
        return min(min(first + length, steps) * self.batch_size, self._samples) - first * self.batch_size

    def samples(self, step: int) -> Tensor:
        """Return the rows of the split that this rank has at a step of the epoch, int64 (n,)."""
        return self.rows[self._share(self._order(self.epoch), step)]

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.rows))
        return torch.randperm(len(self.rows), generator=stream(self.seed, 1, epoch))

    def _share(self, per_sample: Tensor, step: int) -> Tensor:
        batch = per_sample[step * self.batch_size : (step + 1) * self.batch_size]
        return batch.tensor_split(self.world_size)[self.rank] if self.world_size > 1 else batch

    def __iter__(self) -> Iterator[RawBatch]:
        epoch, steps = self.epoch, range(self.position(), len(self))
        order = self._order(epoch)
        drawn = self._draw(epoch)
        if self._workers is not None:
            seeds = torch.randint(2**62, (len(order),), generator=stream(self.seed, 3, epoch))
            self._shares[:] = [self._items(order, seeds, step) for step in steps]
            labels = self._take(self._labels, order)
            for step, images in zip(steps, self._workers, strict=True):
                yield RawBatch(images, self._share(labels, step), None if drawn is None else self._share(drawn, step))
            return
        order = order.to(self._where.device)
        labels, where = self._take(self._labels, order), self._where[order]
        batches = (
            RawBatch(
                self._take(self._images, self._share(where, step)),
                self._share(labels, step),
                None if drawn is None else self._share(drawn, step),
            )
            for step in steps
        )
        yield from one_ahead(batches) if self._pin else batches

    def _take(self, values: Tensor, rows: Tensor) -> Tensor:
        """Copy rows once, into page-locked memory where they go to an accelerator: its copies then overlap with us."""
        if not self._pin:
            return values.index_select(0, rows)
        out = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
        return torch.index_select(values, 0, rows, out=out)

    def _items(self, order: Tensor, seeds: Tensor, step: int) -> list[tuple[int, int]]:
        """Row of each sample of this rank, and the seed of its augmentation."""
        rows = self.rows[self._share(order, step)].tolist()
        if not self._augmented:
            return [(row, 0) for row in rows]
        return list(zip(rows, self._share(seeds, step).tolist(), strict=True))

    def _draw(self, epoch: int) -> Tensor | None:
        """Draw for a whole epoch, so that a sample's draws depend neither on ranks nor on batch size."""
        if not self.draws:
            return None
        shape, generator = (len(self.rows), self.draws), stream(self.seed, 2, epoch)
        return torch.randint(DRAW_RANGE, shape, generator=generator, dtype=torch.int32, pin_memory=self._pin)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a position in an epoch refers to; the trainer holds the position."""
        return {"seed": self.seed, "batch_size": self.batch_size, "samples": len(self.rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the position of the checkpoint means the same here.

        Raises:
            UserError: When seed, global batch or number of samples differ and the epoch is unfinished.
        """
        for key, value in self.state_dict().items():
            if state[key] != value and self.position() > 0:
                raise UserError(
                    f"the checkpoint was made in the middle of an epoch with {key} {state[key]}, but this run "
                    f"has {value}: resume with the same, or from a checkpoint made at the end of an epoch"
                )

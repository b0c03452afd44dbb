"""Loader of each rank's samples: one global permutation per epoch, cut into global batches that the ranks share.

Every strategy draws from the same seeded permutation, so that step k trains on the same samples for any world size; a
rank takes its part of each global batch. The loader uses no global random state. The trainer holds the position in an
epoch, so that a resumed run continues with the next sample.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from app.data.sources import Split, Workers
from app.data.transforms import DRAW_RANGE, Mix, draw_mix
from app.errors import UserError
from app.system.patches import expects
from app.system.random_streams import seed_of

Placement = Literal["disk", "memory", "device"]


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

    def __init__(self, shards: Iterable[Any], first: int, counts: Sequence[int], samples: int) -> None:
        super().__init__(shards)
        self.first, self.counts, self.samples = first, counts, samples


def equal_shares(world_size: int, count: int) -> list[int]:
    """Return each rank's number of shards if the ranks divide `count` shards as equally as possible."""
    return [(rank + 1) * count // world_size - rank * count // world_size for rank in range(world_size)]


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
        f"--run.virtual_devices {virtual_devices}: a global batch of {batch_size} has fewer samples than shards: give "
        f"{batch_size} or less, or a larger batch"
    )


class GlobalOrder:
    """Global order of an epoch's samples, and this rank's share of each global batch.

    A global batch is cut into parts of nearly equal size: one for each rank, or one for each virtual device. A rank's
    share is one part, or the consecutive parts of its virtual devices.

    Args:
        samples: Number of samples of an epoch.
        batch_size: Size of the global batch.
        drop_last: Whether to drop the last, smaller batch.
        rank: Rank of this process.
        world_size: Number of processes.
        virtual_devices: Number of shards of a global batch, or None for one part per process.
        seed: Seed of the order.
        position: Function that returns the first step of the epoch; above zero in a resumed epoch.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        virtual_devices: int | None,
        seed: int,
        position: Callable[[], int],
    ) -> None:
        self.seed, self.position = seed, position
        self._samples = samples  # stored, because each step reads it
        self.batch_size, self.drop_last = batch_size, drop_last
        self.rank, self.world_size, self.virtual_devices = rank, world_size, virtual_devices
        self._parts = virtual_devices or world_size
        self.deal(equal_shares(world_size, self._parts))

    def deal(self, shares: Sequence[int]) -> None:
        """Set the number of parts of each rank, from the next iteration on."""
        own = run_of(self.rank, shares)
        self._ends = range(own.start, own.stop + 1)

    def __len__(self) -> int:
        full, rest = divmod(self._samples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def global_count(self, step: int) -> int:
        """Return the number of samples of all ranks at a step."""
        return min(self.batch_size, self._samples - step * self.batch_size)

    def window_count(self, step: int, length: int, steps: int) -> int:
        """Return the number of samples, over all ranks, in the accumulated batches of an optimizer step.

        Args:
            step: Number of the batch in its epoch.
            length: Number of batches to accumulate; an epoch's last optimizer step may have fewer.
            steps: Number of batches of the epoch.
        """
        first = step - step % length
        return min(min(first + length, steps) * self.batch_size, self._samples) - first * self.batch_size

    def weight(self, step: int, window: tuple[int, int]) -> float:
        """Return a factor for this rank's mean loss.

        With this factor, the mean over ranks and accumulated batches is the mean over all samples of an optimizer step.

        Args:
            step: Number of the batch in its epoch.
            window: A pair: number of batches to accumulate, and number of batches in the epoch.
        """
        return self.share_size(step) * self.world_size * window[0] / self.window_count(step, *window)

    def bounds(self, step: int) -> list[int]:
        """Return the boundaries of this rank's parts of a step, as positions in the epoch's order."""
        size, rest = divmod(self.global_count(step), self._parts)
        first = step * self.batch_size
        return [first + part * size + min(part, rest) for part in self._ends]

    def span(self, step: int) -> slice:
        """Return this rank's samples of a step, as a slice of the epoch's order."""
        bounds = self.bounds(step)
        return slice(bounds[0], bounds[-1])

    def share_size(self, step: int) -> int:
        """Return the number of this rank's samples at a step."""
        span = self.span(step)
        return span.stop - span.start

    def cut(self, items: list[Any], step: int, stand_in: Any) -> "Shards":
        """Cut this rank's parts out of the epoch's items; an empty part gets the stand-in."""
        parts = [items[start:end] or [stand_in] for start, end in pairwise(self.bounds(step))]
        return self.shards(parts, step)

    def shards(self, parts: Iterable[Any], step: int) -> "Shards":
        """Return this rank's parts of a step with their numbers of samples."""
        counts = [end - start for start, end in pairwise(self.bounds(step))]
        return Shards(parts, self._ends.start, counts, self.global_count(step))

    def state_dict(self) -> dict[str, Any]:
        """Return the settings that define the order. The trainer itself saves the position in the epoch."""
        return {"seed": self.seed, "batch_size": self.batch_size, "samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the checkpoint's order equals this one.

        Raises:
            UserError: When seed, batch size or number of samples differ and the epoch is unfinished.
        """
        for key, value in self.state_dict().items():
            if state[key] != value and self.position() > 0:
                raise UserError(
                    f"the checkpoint was made in the middle of an epoch with {key} {state[key]}, but this run "
                    f"has {value}: resume with the same, or from a checkpoint made at the end of an epoch"
                )


class RawBatch(NamedTuple):
    """One rank's share of a global batch, before its pixels are transformed.

    Attributes:
        images: uint8 (n, C, H, W).
        labels: int64 (n,).
        draws: Random integers below DRAW_RANGE for the augmentation of each sample, int32 (n, k), or None.
        mix: Mixing of each sample with the next one, or None. A mixed batch has an extra sample at its
            end, the partner of the last one.
    """

    images: Tensor
    labels: Tensor
    draws: Tensor | None
    mix: Mix | None = None

    def to(self, device: torch.device) -> "RawBatch":
        """Copy the batch to a device; the copy of pinned memory is asynchronous."""
        later = device.type == "cuda"
        draws = None if self.draws is None else self.draws.to(device, non_blocking=later)
        images, labels = (each.to(device, non_blocking=later) for each in (self.images, self.labels))
        return RawBatch(images, labels, draws, self.mix)


class Reader:
    """Image reader of a worker process, with crop and augmentation seeded for each sample.

    Args:
        split: The images.
        crop: Function that crops an image, uint8 (C, h, w), to (C, H, W) with torch's global random state; or None.
        augment: Modules that augment an image, uint8 (C, H, W), with torch's global random state, and keep its shape.
    """

    def __init__(self, split: Split, crop: Callable[[Tensor], Tensor] | None, augment: Sequence[nn.Module]) -> None:
        self.split, self.crop, self.augment = split, crop, augment

    def __call__(self, item: tuple[int, int]) -> Tensor:
        """Read an image, uint8 (C, H, W), by its row in the split and its seed."""
        row, seed = item
        image = self.split[row]
        if self.crop is None and not self.augment:
            return image
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU, too
        if self.crop is not None:
            image = self.crop(image)
        if self.augment:  # an augmentation may work in place, and the split may be mapped read-only
            image = image.clone(memory_format=torch.contiguous_format)
        for augment in self.augment:
            kept, image = f"{image.dtype} {tuple(image.shape)}", augment(image)
            made = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            if made != kept:
                name = f"--data.augment {type(augment).__name__}"
                raise UserError(f"{name} makes {made} of an image of {kept}: it must keep shape and type")
        torch.set_rng_state(before)
        return image


def one_ahead(batches: Iterator[RawBatch]) -> Iterator[RawBatch]:
    """Yield batches, and prepare the next one in a thread."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = thread.submit(next, batches, None)
            yield batch


@expects(
    "torch.utils.data:DataLoader._iterator",
    "lightning.pytorch.utilities.combined_loader:_shutdown_workers_and_reset_iterator",
)
class GlobalBatches(GlobalOrder):
    """Loader that yields this rank's share of each global batch.

    The last, smaller batch is divided as evenly as possible. A rank without a sample gets a batch of size 0, so that
    all ranks take the same number of steps.

    Args:
        split: Images and labels.
        rows: Rows of the split that belong to this loader, int64 (n,); sample i is row `rows[i]`.
        batch_size: Size of the global batch.
        rank: Rank of this process.
        world_size: Number of processes.
        placement: `disk`: worker processes read the images. `memory`: one tensor on the host holds them. `device`: a
            tensor on `device` holds them, all if shuffled, else only this rank's.
        device: Device of the batches.
        num_workers: Number of worker processes for `disk`.
        seed: Seed of the permutation and the draws.
        shuffle: Whether each epoch has its own permutation.
        drop_last: Whether to drop the last, smaller batch.
        virtual_devices: Number of shards of a global batch; batches are then `Shards`.
        one_by_one: Whether each shard is a separate batch, so that an evaluation has the same bits on any number of
            ranks.
        draws: Number of random numbers per sample.
        mixing: Parameters of mixup and cutmix. Each sample is mixed with the next one of the global batch, the last
            with the first.
        weights: Relative probability of each sample, (n,): an epoch then draws samples with replacement.
        crop: Function with which the workers crop images of different sizes; for `disk` only.
        augment: Modules with which the workers augment images; for `disk` only.
        position: Function that returns the first step of the epoch; above zero in a resumed epoch.
    """

    batch_sampler = None  # Lightning reads this attribute of any loader with a `sampler`

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
        virtual_devices: int | None = None,
        one_by_one: bool = False,
        draws: int = 0,
        mixing: tuple[float, float] = (0, 0),
        weights: Tensor | None = None,
        crop: Callable[[Tensor], Tensor] | None = None,
        augment: Sequence[nn.Module] = (),
        position: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(len(rows), batch_size, drop_last, rank, world_size, virtual_devices, seed, position)
        self._turns = math.ceil(self._parts / world_size) if one_by_one else 0
        self.split, self.rows = split, rows
        self.shuffle, self.draws, self.weights = shuffle, draws, weights
        self.mixing = mixing if any(mixing) else None
        self.epoch = 0
        self.sampler = self if shuffle else SequentialSampler(range(len(rows)))
        self._pin = device.type == "cuda" and placement != "device"
        self._labels = split.labels[rows]
        self._workers: Workers | None = None
        self._augmented = bool(crop or augment)
        if placement == "disk":
            self._items_of_steps: list[list[tuple[int, int]]] = []
            self._workers = Workers(
                Reader(split, crop, augment), self._items_of_steps, split.image_shape, num_workers, self._pin
            )
            return
        self._images, self._where = split.tensor(), rows
        if placement == "device":
            order = torch.arange(len(rows))
            kept = order if shuffle else torch.cat([order[self.span(step)] for step in range(super().__len__())])
            there = torch.empty((len(kept), *self._images.shape[1:]), dtype=torch.uint8, device=device)
            for to, part in zip(
                there.split(4096), rows[kept].split(4096), strict=True
            ):  # in blocks, because one copy would double the host memory
                to.copy_(self._images[part])
            self._images = there
            self._where = torch.full((len(rows),), -1).index_copy_(0, kept, torch.arange(len(kept))).to(device)
            self._labels = self._labels.to(device)

    @property
    def _iterator(self) -> Any:
        """The worker processes' iterator; Lightning shuts it down by this name after a stage."""
        return self._workers and self._workers._iterator

    @_iterator.setter
    def _iterator(self, iterator: None) -> None:
        if self._workers is not None:
            self._workers._iterator = iterator

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the permutation; Lightning calls this before each epoch."""
        self.epoch = epoch

    def samples(self, step: int) -> Tensor:
        """Return the rows of this rank's samples at a step of the epoch, int64 (n,)."""
        return self.rows[self._order(self.epoch)[self.span(step)]]

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.rows))
        generator = stream(self.seed, 1, epoch)
        if self.weights is not None:
            return torch.multinomial(self.weights, len(self.rows), replacement=True, generator=generator)
        return torch.randperm(len(self.rows), generator=generator)

    def __iter__(self) -> Iterator[RawBatch | Shards]:
        steps = range(self.position(), super().__len__())
        for step, batch in zip(steps, self._shares_of(steps), strict=True):
            if self.virtual_devices is None:
                yield batch
                continue
            shards = self._cut(batch, step)
            if self._turns:
                yield from shards
                yield from [RawBatch(batch.images[:0], batch.labels[:0], None)] * (self._turns - len(shards))
            else:
                yield shards

    def __len__(self) -> int:
        return super().__len__() * (self._turns or 1)

    def _cut(self, batch: RawBatch, step: int) -> Shards:
        bounds = self.bounds(step)
        more = batch.mix is not None  # a mixed shard includes the first sample of the next shard
        places = [slice(a - bounds[0], b - bounds[0] + (more and b > a)) for a, b in pairwise(bounds)]
        images, labels, draws, mix = batch
        return self.shards(
            (RawBatch(images[at], labels[at], None if draws is None else draws[at], mix) for at in places), step
        )

    def _place(self, step: int) -> tuple[slice, slice | None]:
        """Return the slice of the epoch's order that holds this rank's samples of a step.

        For mixup and cutmix, also return the slice of the one sample after them; otherwise None.
        """
        span = self.span(step)
        if self.mixing is None or span.start == span.stop:
            return span, None
        first = step * self.batch_size
        after = span.stop if span.stop < first + self.global_count(step) else first
        return span, slice(after, after + 1)

    def _share(self, values: Tensor, place: tuple[slice, slice | None]) -> Tensor:
        span, after = place
        if after is None:
            return values[span]
        share = torch.cat((values[span], values[after]))
        return share.pin_memory() if self._pin else share

    def _shares_of(self, steps: range) -> Iterator[RawBatch]:
        epoch = self.epoch
        order = self._order(epoch)
        drawn = self._draw(epoch)

        read: Iterator[Tensor] | None = None
        if self._workers is not None:
            seeds = torch.randint(2**62, (len(order),), generator=stream(self.seed, 3, epoch))
            self._items_of_steps[:] = [self._items(order, seeds, self._place(step)) for step in steps]
            read = iter(self._workers)
        else:
            order = order.to(self._where.device)
            where = self._where[order]
        labels = self._take(self._labels, order)

        def batches() -> Iterator[RawBatch]:
            for step in steps:
                place = self._place(step)
                images = next(read) if read else self._take(self._images, self._share(where, place))
                draws = None if drawn is None else self._share(drawn, place)
                mix = (
                    draw_mix(*self.mixing, seed_of(self.seed, 4, epoch, step)) if self.mixing and len(images) else None
                )
                yield RawBatch(images, self._share(labels, place), draws, mix)

        yield from one_ahead(batches()) if self._pin and read is None else batches()

    def _take(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return a copy of rows, in pinned memory for an accelerator, so that transfers overlap with computation."""
        if not self._pin:
            return values.index_select(0, rows)
        out = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
        return torch.index_select(values, 0, rows, out=out)

    def _items(self, order: Tensor, seeds: Tensor, place: tuple[slice, slice | None]) -> list[tuple[int, int]]:
        """Return the row and the augmentation seed of each sample of this rank."""
        rows = self.rows[self._share(order, place)].tolist()
        if not self._augmented:
            return [(row, 0) for row in rows]
        return list(zip(rows, self._share(seeds, place).tolist(), strict=True))

    def _draw(self, epoch: int) -> Tensor | None:
        """Draw the augmentations' random integers for a whole epoch, independently of ranks and batch size."""
        if not self.draws:
            return None
        shape, generator = (len(self.rows), self.draws), stream(self.seed, 2, epoch)
        return torch.randint(DRAW_RANGE, shape, generator=generator, dtype=torch.int32, pin_memory=self._pin)

"""Loader of each rank's samples: one global permutation per epoch, cut into global batches that the ranks share.

Every strategy draws from the same seeded permutation. A rank takes its part of each global batch.
Therefore, a step trains on the same samples for any world size. The loader uses no global random
state. The trainer holds the position in an epoch, so that a resumed run continues with the next
sample.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from app.data.shares import GlobalOrder, Shards, stream
from app.data.sources import Split, Workers
from app.data.transforms import DRAW_RANGE, FLIP, Mix, draw_mix
from app.errors import UserError
from app.system.patches import expects
from app.system.random_streams import own_streams, seed_of

Placement = Literal["disk", "memory", "device"]


def tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, also from nested containers and dataclasses."""
    match batch:
        case Tensor():
            return [batch]
        case Mapping():
            return tensors(list(batch.values()))
        case Sequence() if not isinstance(batch, str | bytes):
            return [leaf for item in batch for leaf in tensors(item)]
    return tensors(vars(batch)) if is_dataclass(batch) else []


class RawBatch(NamedTuple):
    """One rank's share of a global batch, before its pixels are transformed.

    Attributes:
        images: uint8 (n, C, H, W).
        labels: int64 (n,).
        draws: Random integers below DRAW_RANGE for each sample's augmentation, (n, draws), or None.
        mix: Mixing of each sample with the next one, or None. With a mixing, the batch has an
            additional sample at its end. This sample is only mixed into the one before it.
    """

    images: Tensor
    labels: Tensor
    draws: Tensor | None
    mix: Mix | None = None

    def to(self, device: torch.device) -> "RawBatch":
        """Copy the batch to a device; copies from pinned memory are asynchronous."""
        later = device.type == "cuda"
        draws = None if self.draws is None else self.draws.to(device, non_blocking=later)
        images = self.images.to(device, non_blocking=later)
        labels = self.labels.to(device, non_blocking=later)
        return RawBatch(images, labels, draws, self.mix)


class Reader:
    """Image reader of a worker process, with crop and augmentation seeded for each sample.

    Args:
        split: The images.
        crop: Function that crops an image from uint8 (C, h, w) to (C, H, W), or None. `crop` and
            `augment` may use the global random states, which are seeded for each sample.
        augment: Modules that augment an image, uint8 (C, H, W), and keep its shape.
    """

    def __init__(
        self, split: Split, crop: Callable[[Tensor], Tensor] | None, augment: Sequence[nn.Module]
    ) -> None:
        self.split = split
        self.crop = crop
        self.augment = augment

    def __call__(self, item: tuple[int, int]) -> Tensor:
        """Read the image at a row of the split, uint8 (C, H, W), and augment it with the item's seed."""
        row, seed = item
        image = self.split[row]
        if self.crop is None and not self.augment:
            return image
        with own_streams() as restart:
            restart(seed)
            if self.crop is not None:
                image = self.crop(image)
            if (
                self.augment
            ):  # augmentations may write to the image, but a mapped split is read-only
                image = image.clone(memory_format=torch.contiguous_format)
            for augment in self.augment:
                kept = f"{image.dtype} {tuple(image.shape)}"
                image = augment(image)
                made = (
                    f"{image.dtype} {tuple(image.shape)}"
                    if isinstance(image, Tensor)
                    else type(image).__name__
                )
                if made != kept:
                    raise UserError(
                        f"--data.augment {type(augment).__name__} turns {kept} into {made}: it must keep shape and type"
                    )
        return image


def one_ahead(batches: Iterator[RawBatch]) -> Iterator[RawBatch]:
    """Yield batches, and prepare the next one in a thread."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = thread.submit(next, batches, None)
            yield batch


class Batches(chain[Any]):
    """Iterator over batches that pickles as an empty one, because a generator cannot be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the recipe of an empty iterator."""
        return iter, ((),)


@expects(
    "torch.utils.data:DataLoader._iterator",
    "lightning.pytorch.utilities.combined_loader:_shutdown_workers_and_reset_iterator",
)
class GlobalBatches(GlobalOrder):
    """Loader that yields this rank's share of each global batch.

    The last, smaller batch is divided as evenly as possible. By default, a rank without a sample
    gets an empty batch, so that all ranks take the same number of steps.

    Args:
        split: Images and labels.
        rows: Rows of the split that belong to this loader, int64 (n,); sample i is row `rows[i]`.
        batch_size: Size of the global batch.
        rank: Rank of this process.
        world_size: Number of processes.
        placement: `disk`: worker processes read the images. `memory`: one tensor on the host holds
            all images. `device`: one tensor on `device` holds all images.
        device: Device that trains or evaluates on the batches.
        num_workers: Number of worker processes for `disk`.
        seed: Seed of the permutation and the draws.
        shuffle: Whether each epoch has its own permutation.
        drop_last: Whether to drop the last, smaller batch.
        virtual_devices: Number of shards of a global batch; batches are then `Shards`.
        one_by_one: Whether each shard is a separate batch, so that evaluation results are
            bit-identical on any number of ranks.
        draws: Number of random numbers per sample.
        alternate: Whether a sample is flipped in every other epoch, beginning with the first or the
            second at random.
        mixing: Parameters of mixup and cutmix. Each sample is mixed with the next one of the global
            batch, the last with the first.
        weights: Relative probability of each sample, (n,), for drawing with replacement; None for a
            permutation.
        crop: As for `Reader`, for images of different sizes; for `disk` only.
        augment: As for `Reader`; for `disk` only.
        empty: A rank without a sample of the last batch gets an empty batch (`keep`), the global
            batch's first sample (`stand_in`), or no batch (`skip`).
        position: Function that returns the first step to yield: 0, or a later step if a run resumes
            within the epoch.
    """

    batch_sampler = (
        None  # must exist, because Lightning reads it from every loader that has a `sampler`
    )

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
        alternate: bool = False,
        mixing: tuple[float, float] = (0, 0),
        weights: Tensor | None = None,
        crop: Callable[[Tensor], Tensor] | None = None,
        augment: Sequence[nn.Module] = (),
        empty: Literal["keep", "stand_in", "skip"] = "keep",
        position: Callable[[], int] = int,  # evaluation begins at int(), which is 0
    ) -> None:
        super().__init__(
            len(rows), batch_size, drop_last, rank, world_size, virtual_devices, seed, position
        )
        self._turns = math.ceil(self._parts / world_size) if one_by_one else 0
        self.split = split
        self.rows = rows
        self.shuffle = shuffle
        self.draws = draws
        self.weights = weights
        self.alternate = alternate
        self.empty = empty
        self.mixing = mixing if any(mixing) else None
        self.epoch = 0
        self.sampler = self if shuffle else SequentialSampler(range(len(rows)))
        self._pin = device.type == "cuda" and placement != "device"
        self._labels = split.labels[rows]
        self._workers: Workers | None = None
        self._augmented = bool(crop or augment)
        self._device = device if placement == "device" else None
        if placement == "disk":
            self._items_of_steps: list[list[tuple[int, int]]] = []
            reader = Reader(split, crop, augment)
            self._workers = Workers(
                reader, self._items_of_steps, split.image_shape, num_workers, self._pin
            )
            return
        self.images = split.tensor()
        self._where = rows
        if placement == "device":
            images = torch.empty(
                (len(rows), *self.images.shape[1:]), dtype=torch.uint8, device=device
            )
            # in blocks, because a copy of all images would double the use of host memory
            for block, numbers in zip(images.split(4096), rows.split(4096), strict=True):
                block.copy_(self.images[numbers])
            self.images = images
            self._where = torch.arange(len(rows))

    @property
    def _iterator(self) -> Any:
        """Iterator over the workers' batches. Lightning reads this attribute to end the workers after a stage."""
        return self._workers and self._workers._iterator

    @_iterator.setter
    def _iterator(self, iterator: None) -> None:
        if self._workers is not None:
            self._workers._iterator = iterator

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the permutation; Lightning calls this before each epoch."""
        self.epoch = epoch

    def samples(self, step: int) -> Tensor:
        """Return the split's row numbers of this rank's samples at a step of the epoch, int64 (n,)."""
        return self.rows[self._order(self.epoch)[self.span(step)]]

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.rows))
        generator = stream(self.seed, 1, epoch)
        if self.weights is not None:
            return torch.multinomial(
                self.weights, len(self.rows), replacement=True, generator=generator
            )
        return torch.randperm(len(self.rows), generator=generator)

    def __iter__(self) -> Iterator[RawBatch | Shards]:
        """Return an iterator over the epoch's batches, from `position` on."""
        return Batches(self._batches())

    def _batches(self) -> Iterator[RawBatch | Shards]:
        steps = range(self.position(), len(self) // (self._turns or 1))
        for step, batch in zip(steps, self._shares_of(steps), strict=True):
            if self.virtual_devices is None:
                yield batch
                continue
            shards = self._cut(batch, step)
            if self._turns:
                yield from shards
                yield from [RawBatch(batch.images[:0], batch.labels[:0], None)] * (
                    self._turns - len(shards)
                )
            else:
                yield shards

    def __len__(self) -> int:
        steps = super().__len__()
        skips = self.empty == "skip" and steps > 0 and not self.share_size(steps - 1)
        return (steps - skips) * (self._turns or 1)

    def _cut(self, batch: RawBatch, step: int) -> Shards:
        bounds = self.bounds(step)
        more = batch.mix is not None  # a mixed shard includes the first sample of the next shard
        places = [
            slice(a - bounds[0], b - bounds[0] + (more and b > a)) for a, b in pairwise(bounds)
        ]
        images, labels, draws, mix = batch
        shards = (
            RawBatch(images[at], labels[at], None if draws is None else draws[at], mix)
            for at in places
        )
        return self.shards(shards, step)

    def _place(self, step: int) -> tuple[slice, slice | None]:
        """Return the slice of the epoch's order that holds this rank's samples of a step.

        For mixup and cutmix, also return a slice with one more sample, which is mixed with this
        rank's last sample. Otherwise, return None instead.
        """
        span = self.span(step)
        first = step * self.batch_size
        if self.empty == "stand_in" and span.start == span.stop:
            return slice(first, first + 1), None
        if self.mixing is None or span.start == span.stop:
            return span, None
        after = span.stop if span.stop < first + self.global_count(step) else first
        return span, slice(after, after + 1)

    def _share(self, values: Tensor, place: tuple[slice, slice | None]) -> Tensor:
        span, after = place
        if after is None:
            return values[..., span]
        share = torch.cat((values[..., span], values[..., after]), -1)
        return share.pin_memory() if self._pin else share

    def _shares_of(self, steps: range) -> Iterator[RawBatch]:
        epoch = self.epoch
        order = self._order(epoch)
        drawn = self._draw(epoch, order)
        if self._device is not None:
            table = torch.stack(
                (self._where[order], self._labels[order], *([] if drawn is None else drawn))
            )
            if self._device.type == "cuda":  # a GPU copies pinned memory while the host continues
                table = table.pin_memory()
            table = table.to(self._device, non_blocking=True)
            for step in steps:
                share = self._share(
                    table, self._place(step)
                )  # (2 + draws, n): index in `images`, label, draws
                images = self.images.index_select(0, share[0])
                draws = share[2:].T if self.draws else None
                yield RawBatch(images, share[1], draws, self._mix(epoch, step, images.shape[0]))
            return

        read: Iterator[Tensor] | None = None
        if self._workers is not None:
            seeds = torch.randint(2**62, (len(order),), generator=stream(self.seed, 3, epoch))
            self._items_of_steps[:] = [
                self._items(order, seeds, self._place(step)) for step in steps
            ]
            read = iter(self._workers)
        else:
            where = self._where[order]
        labels = self._take(self._labels, order)

        def batches() -> Iterator[RawBatch]:
            for step in steps:
                place = self._place(step)
                images = next(read) if read else self._take(self.images, self._share(where, place))
                draws = None if drawn is None else self._share(drawn, place).T
                yield RawBatch(
                    images,
                    self._share(labels, place),
                    draws,
                    self._mix(epoch, step, images.shape[0]),
                )

        yield from one_ahead(batches()) if self._pin and read is None else batches()

    def _mix(self, epoch: int, step: int, size: int) -> Mix | None:
        return (
            draw_mix(*self.mixing, seed_of(self.seed, 4, epoch, step))
            if self.mixing and size
            else None
        )

    def _take(self, values: Tensor, rows: Tensor) -> Tensor:
        """Copy some rows. For a GPU, copy into pinned memory, so that the transfer overlaps with computation."""
        if not self._pin:
            return values.index_select(0, rows)
        out = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
        return torch.index_select(values, 0, rows, out=out)

    def _items(
        self, order: Tensor, seeds: Tensor, place: tuple[slice, slice | None]
    ) -> list[tuple[int, int]]:
        """Return the row and the augmentation seed of each of this rank's samples at a step."""
        rows = self.rows[self._share(order, place)].tolist()
        numbers = self._share(seeds, place).tolist() if self._augmented else [0] * len(rows)
        return list(zip(rows, numbers, strict=True))

    def _draw(self, epoch: int, order: Tensor) -> Tensor | None:
        """Draw an epoch's random integers for augmentation, equal for all ranks and batch sizes, int32 (draws, n)."""
        if not self.draws:
            return None
        shape = (len(self.rows), self.draws)
        generator = stream(self.seed, 2, epoch)
        drawn = torch.randint(
            DRAW_RANGE, shape, generator=generator, dtype=torch.int32, pin_memory=self._pin
        ).T
        if self.alternate:
            first = torch.randint(
                2, (len(self.rows),), generator=stream(self.seed, 5), dtype=torch.int32
            )
            drawn[FLIP] = (first[order] + epoch) % 2 * (DRAW_RANGE // 2)
        return drawn

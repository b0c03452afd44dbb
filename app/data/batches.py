"""Loader of each rank's share of global batches, cut from one global permutation per epoch.

Every strategy draws from the same seeded permutation. A rank takes its part of each global batch.
Therefore, a step trains on the same samples for any world size. The loader uses no global random
state. The trainer holds the position in an epoch, so that a resumed run continues with the next
sample.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from app.data.shares import GlobalOrder, Shards, stream
from app.data.sources import Split, Workers
from app.data.transforms import DRAW_RANGE, FLIP, Mix, draw_mix
from app.errors import UserError
from app.system.patches import expects
from app.system.random_streams import seed_host, seed_of


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
        draws = self.draws
        if draws is not None:
            draws = draws.to(device, non_blocking=later)
        images = self.images.to(device, non_blocking=later)
        labels = self.labels.to(device, non_blocking=later)
        return RawBatch(images, labels, draws, self.mix)


class Place(NamedTuple):
    """Positions, in the epoch's order, of a rank's samples of a step.

    Attributes:
        span: The rank's samples.
        mixed: One more sample, into which mixup or cutmix mixes the rank's last sample; else None.
    """

    span: slice
    mixed: slice | None = None

    def of(self, values: Tensor) -> Tensor:
        """Return the last dimension's values at the place."""
        if self.mixed is None:
            return values[..., self.span]
        return torch.cat((values[..., self.span], values[..., self.mixed]), -1)


class ImageOrder(GlobalOrder):
    """Order of the images of an epoch: which rows of a split belong to which step.

    Args:
        rows: Rows of the split that belong to the loader, int64 (n,); sample i is row `rows[i]`.
        shuffle: Whether each epoch has its own permutation.
        weights: Relative probability of each sample, (n,), for drawing with replacement; None for a
            permutation.
        **order: As for `GlobalOrder`.
    """

    def __init__(
        self, rows: Tensor, shuffle: bool = False, weights: Tensor | None = None, **order: Any
    ) -> None:
        super().__init__(len(rows), **order)
        self.rows = rows
        self.shuffle = shuffle
        self.weights = weights

    def permutation(self) -> Tensor:
        """Return the samples in the epoch's order, int64 (n,)."""
        count = len(self.rows)
        if not self.shuffle:
            return torch.arange(count)
        generator = stream(self.seed, 1, self.epoch)
        if self.weights is None:
            return torch.randperm(count, generator=generator)
        return torch.multinomial(self.weights, count, replacement=True, generator=generator)

    def place(self, step: int, is_mixed: bool = False) -> Place:
        """Return the place of this rank's samples; with `is_mixed`, also of the next sample."""
        span = self.span(step)
        first = step * self.batch_size
        if span.start == span.stop:
            return Place(slice(first, first + 1) if self.empty == "stand_in" else span)
        if not is_mixed:
            return Place(span)
        after = span.stop
        if after == first + self.global_count(step):  # the last sample is mixed with the first
            after = first
        return Place(span, slice(after, after + 1))


@dataclass(frozen=True)
class ReadImage:
    """Function of a worker process that reads an image, with seeded crop and augmentation.

    Args:
        split: The images.
        crop: Function that crops an image from uint8 (C, h, w) to (C, H, W), or None. `crop` and
            `augment` may use the global random states, which are seeded for each sample.
        augment: Modules that augment an image, uint8 (C, H, W), and keep its shape.
    """

    split: Split
    crop: Callable[[Tensor], Tensor] | None = None
    augment: Sequence[nn.Module] = ()

    def __call__(self, item: tuple[int, int]) -> Tensor:
        """Read the image at a row, uint8 (C, H, W), and augment it with the item's seed.

        If there is something to draw, this seeds the global random states.
        """
        row, seed = item
        image = self.split[row]
        if self.crop is None and not self.augment:
            return image
        seed_host(seed)
        if self.crop is not None:
            image = self.crop(image)
        if self.augment:
            # augmentations may write to the image, but a mapped split is read-only
            image = image.clone(memory_format=torch.contiguous_format)
        for augment in self.augment:
            before = _described(image)
            image = augment(image)
            after = _described(image)
            if after != before:
                raise UserError(
                    f"--data.augment {type(augment).__name__} turns {before} into {after}: "
                    "it must keep shape and type"
                )
        return image


def _described(image: Any) -> str:
    if isinstance(image, Tensor):
        return f"{image.dtype} {tuple(image.shape)}"
    return type(image).__name__


def one_ahead(batches: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield batches, and prepare the next one in a thread."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, batches, None)
        while True:
            batch = following.result()
            if batch is None:
                return
            following = thread.submit(next, batches, None)
            yield batch


class Batches(chain[Any]):
    """Iterator over batches that pickles as an empty one, because a generator cannot be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the recipe of an empty iterator."""
        return iter, ((),)


@dataclass(eq=False)
class HostReader:
    """Reader of images from one tensor on the host.

    Args:
        split: The images.
        rows: Rows of the split; sample i is row `rows[i]`.
        pins: Whether to read into page-locked memory, from which a GPU copies while the host
            continues.
        workers: `Workers`, if worker processes read the images; else None.
    """

    split: Split
    rows: Tensor
    pins: bool = False
    workers: Any = None

    def stage(self, values: Tensor) -> Tensor:
        """Return an epoch's values, such as labels, where their shares have to be."""
        return values

    def take(self, values: Tensor, rows: Tensor) -> Tensor:
        """Copy some rows of a tensor."""
        if not self.pins:
            return values.index_select(0, rows)
        out = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
        return torch.index_select(values, 0, rows, out=out)

    def read(self, order: Tensor, epoch: int, places: Sequence[Place]) -> Iterator[Tensor]:
        """Return an iterator over the images at each place, uint8 (n, C, H, W).

        Args:
            order: Samples in the epoch's order, int64 (n,).
            epoch: The epoch.
            places: Places in this order, one for each batch.
        """
        images = self.split.tensor()
        rows = self.rows[order]
        batches = (self.take(images, place.of(rows)) for place in places)
        return one_ahead(batches) if self.pins else batches


class DeviceReader(HostReader):
    """Reader of images from one tensor on a device.

    Args:
        split: The images.
        rows: Rows of the split; sample i is row `rows[i]`.
        device: The device.
    """

    def __init__(self, split: Split, rows: Tensor, device: torch.device) -> None:
        super().__init__(split, rows)
        images = split.tensor()
        self.device = device
        self.images = torch.empty((len(rows), *images.shape[1:]), dtype=torch.uint8, device=device)
        # in blocks, because a copy of all images would double the use of host memory
        for block, numbers in zip(self.images.split(4096), rows.split(4096), strict=True):
            block.copy_(images[numbers])

    def stage(self, values: Tensor) -> Tensor:
        """Copy an epoch's values to the device."""
        if self.device.type == "cuda":  # a GPU copies pinned memory while the host continues
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def read(self, order: Tensor, epoch: int, places: Sequence[Place]) -> Iterator[Tensor]:
        """Return an iterator over the images at each place."""
        order = self.stage(order)
        return (self.images.index_select(0, place.of(order)) for place in places)


class DiskReader(HostReader):
    """Reader of images by worker processes.

    Args:
        read: Function that reads an image, with crop and augmentation.
        rows: Rows of the split; sample i is row `rows[i]`.
        pins: As for `HostReader`.
        num_workers: Number of worker processes; with 0, this process reads.
        seed: Seed of crop and augmentation.
    """

    def __init__(
        self, read: ReadImage, rows: Tensor, pins: bool = False, num_workers: int = 0, seed: int = 0
    ) -> None:
        super().__init__(read.split, rows, pins)
        self.seed = seed
        self._items: list[list[tuple[int, int]]] = []  # row and seed of each sample of each batch
        collate = partial(_stacked, read.split.image_shape)
        self.workers = Workers(read, self._items, collate, num_workers, pins)

    def read(self, order: Tensor, epoch: int, places: Sequence[Place]) -> Iterator[Tensor]:
        """Return an iterator over the images at each place."""
        rows = self.rows[order]
        seeds = torch.randint(2**62, (len(rows),), generator=stream(self.seed, 3, epoch))
        self._items.clear()
        for place in places:
            self._items.append(
                list(zip(place.of(rows).tolist(), place.of(seeds).tolist(), strict=True))
            )
        for images in self.workers:
            if isinstance(images, UserError):
                raise images
            yield images


def _stacked(shape: Sequence[int], images: list[Tensor | UserError]) -> Tensor | UserError:
    """Return images as a batch, or the first error."""
    for image in images:
        if isinstance(image, UserError):
            return image
    if not images:
        return torch.empty((0, *shape), dtype=torch.uint8)
    return default_collate(images)  # it stacks in shared memory


@expects("torch.utils.data:DataLoader._iterator")
class GlobalBatches:
    """Loader that yields this rank's share of each global batch.

    The last, smaller batch is divided as evenly as possible. By default, a rank without a sample
    gets an empty batch, so that all ranks take the same number of steps.

    Args:
        order: Order of the images. With virtual devices, batches are `Shards`.
        reader: Reader of the images.
        draws: Number of random numbers per sample.
        alternate: Whether a sample is flipped in every other epoch, beginning with the first or the
            second at random.
        mixing: Parameters of mixup and cutmix. Each sample is mixed with the next one of the global
            batch, the last with the first.
        one_by_one: Whether each shard is a separate batch, so that evaluation results are
            bit-identical on any number of ranks.
    """

    def __init__(
        self,
        order: ImageOrder,
        reader: HostReader,
        draws: int = 0,
        alternate: bool = False,
        mixing: tuple[float, float] = (0, 0),
        one_by_one: bool = False,
    ) -> None:
        self.order = self.batch_sampler = order
        self.reader = reader
        self.sampler = self  # Lightning calls its `set_epoch`
        self.state_dict = order.state_dict  # Lightning calls both
        self.load_state_dict = order.load_state_dict
        self.split = reader.split
        self.shuffle = order.shuffle
        self.draws = draws
        self.alternate = alternate
        self.mixing = mixing
        self._labels = reader.split.labels[order.rows]
        self._turns = 1  # batches of a step
        if one_by_one:
            self._turns = math.ceil(order.parts / order.world_size)
        self.one_by_one = one_by_one

    @property
    def _iterator(self) -> Any:
        """Iterator over the workers' batches, which Lightning ends after a stage."""
        return self.reader.workers and self.reader.workers._iterator

    @_iterator.setter
    def _iterator(self, iterator: None) -> None:
        if self.reader.workers is not None:
            self.reader.workers._iterator = iterator

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the permutation; Lightning calls this before each epoch."""
        self.order.set_epoch(epoch)

    def samples(self, index: int) -> Tensor:
        """Return the split's rows of this rank's samples in a batch, int64 (n,)."""
        step, turn = divmod(index, self._turns)
        bounds = self.order.bounds(step)
        if self.one_by_one:
            # a single bound, and no samples, after the last shard of a rank with fewer shards
            bounds = bounds[turn : turn + 2]
        return self.order.rows[self.order.permutation()[bounds[0] : bounds[-1]]]

    def __len__(self) -> int:
        return len(self.order) * self._turns

    def __iter__(self) -> Iterator[RawBatch | Shards]:
        """Return an iterator over the epoch's batches, from the order's `position` on."""
        return Batches(self._batches())

    def _batches(self) -> Iterator[RawBatch | Shards]:
        for step, batch in self._shares():
            if self.order.virtual_devices is None:
                yield batch
                continue
            shards = self._cut(batch, step)
            if not self.one_by_one:
                yield shards
                continue
            yield from shards
            for _ in range(len(shards), self._turns):
                yield RawBatch(batch.images[:0], batch.labels[:0], None)

    def _shares(self) -> Iterator[tuple[int, RawBatch]]:
        """Yield each step of the epoch with this rank's share of its global batch."""
        order = self.order
        epoch = order.epoch
        is_mixed = any(self.mixing)
        permutation = order.permutation()
        steps = range(order.position(), len(order))
        places = [order.place(step, is_mixed) for step in steps]
        drawn = self._draw(permutation)
        labels = self.reader.stage(self.reader.take(self._labels, permutation))
        batches = self.reader.read(permutation, epoch, places)
        for step, place, images in zip(steps, places, batches, strict=True):
            draws = None
            if drawn is not None:
                draws = self._share(drawn, place).T
            mix = None
            if is_mixed and len(images):
                mix = draw_mix(*self.mixing, seed_of(order.seed, 4, epoch, step))
            yield step, RawBatch(images, self._share(labels, place), draws, mix)

    def _share(self, values: Tensor, place: Place) -> Tensor:
        share = place.of(values)
        if self.reader.pins and place.mixed is not None:
            share = share.pin_memory()
        return share

    def _cut(self, batch: RawBatch, step: int) -> Shards:
        """Cut a rank's share into shards."""
        images, labels, draws, mix = batch
        bounds = self.order.bounds(step)
        shards = []
        for start, end in pairwise(bounds):
            if mix is not None and end > start:
                end += 1  # a mixed shard includes the first sample of the next shard
            at = slice(start - bounds[0], end - bounds[0])
            shard_draws = None if draws is None else draws[at]
            shards.append(RawBatch(images[at], labels[at], shard_draws, mix))
        return self.order.shards(shards, step)

    def _draw(self, permutation: Tensor) -> Tensor | None:
        """Draw the epoch's integers, equal for all ranks and batch sizes, int32 (draws, n)."""
        if not self.draws:
            return None
        seed = self.order.seed
        epoch = self.order.epoch
        shape = (len(permutation), self.draws)
        generator = stream(seed, 2, epoch)
        drawn = torch.randint(
            DRAW_RANGE, shape, generator=generator, dtype=torch.int32, pin_memory=self.reader.pins
        ).T
        if self.alternate:
            generator = stream(seed, 5)
            first = torch.randint(2, shape[:1], generator=generator, dtype=torch.int32)
            drawn[FLIP] = (first[permutation] + epoch) % 2 * (DRAW_RANGE // 2)
        return self.reader.stage(drawn)

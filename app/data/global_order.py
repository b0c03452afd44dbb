"""Global order for a user's DataLoader (`--run.global_order`), the same on any number of processes.

The loader is rebuilt around one seeded order per epoch. Each rank reads its share of each global
batch. Each item has its own random streams, also in worker processes.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset
from torch.utils.data.sampler import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from app.data.shares import GlobalOrder, Shards, next_step, shards_beyond, stream
from app.errors import UserError
from app.system.random_streams import own_streams

SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


class SeededItems(Dataset[Any]):
    """Data set with seeded items, which do not depend on rank or worker.

    Args:
        dataset: The data set.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if (
            name.startswith("__") or name == "dataset"
        ):  # pickle looks these up before `dataset` is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, shards: Shards) -> Shards:
        """Replace each pair of an index and a seed by the data set's item, in place."""
        with own_streams() as seed:
            for place, pairs in enumerate(shards):
                shards[place] = []
                for index, number in pairs:
                    seed(number)
                    shards[place].append(self.dataset[index])
        return shards


def collate_parts(collate: Callable[[list[Any]], Any], sharded: bool, shards: Any) -> Any:
    """Make a batch of each shard. Without shards, make one batch of the rank's share.

    Args:
        collate: The loader's collate function.
        sharded: Whether to return `Shards`; if false, return the only batch.
        shards: List of each shard's items, or of one element: the items of the rank's share.
            Changed in place.
    """
    for place, items in enumerate(shards):
        shards[place] = collate(items)
    return shards if sharded else shards[0]


class GlobalSampler(GlobalOrder):
    """Batch sampler that yields this rank's parts of each global batch, as pairs of index and seed.

    Args:
        sampler: The loader's sampler; it draws from the epoch's random stream.
        **order: As for `GlobalOrder`. If a shard is empty, it gets a stand-in, too.
    """

    def __init__(self, sampler: Any, **order: Any) -> None:
        super().__init__(len(sampler), **order)
        self._sampler = sampler

    def samples(self, step: int) -> list[int]:
        """Return the indices of this rank's samples at a step of the epoch."""
        return self._order()[self.span(step)]

    def _order(self) -> list[int]:
        sampler = copy.copy(self._sampler)
        sampler.generator = stream(self.seed, 1, self.epoch)
        return list(sampler)

    def __iter__(self) -> Iterator[Shards]:
        order = self._order()
        seeds = torch.randint(
            2**62, (len(order),), generator=stream(self.seed, 3, self.epoch)
        ).tolist()
        items = list(zip(order, seeds, strict=True))
        for step in range(self.position(), len(self)):
            stand_in = [items[step * self.batch_size]]
            shards = []
            for start, end in pairwise(self.bounds(step)):
                shards.append(items[start:end] or stand_in)
            yield self.shards(shards, step)


class GlobalLoader(DataLoader[Any]):
    """DataLoader with a global order."""

    batch_sampler: GlobalSampler

    def state_dict(self) -> dict[str, Any]:
        """Return the settings that define the order."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the checkpoint's order equals this loader's."""
        self.batch_sampler.load_state_dict(state)


def order_of(loader: Any) -> GlobalOrder | None:
    """Return the global order of a loader, or None."""
    order = loader if isinstance(loader, GlobalOrder) else getattr(loader, "batch_sampler", None)
    return order if isinstance(order, GlobalOrder) else None


def put_in_order(
    owner: LightningDataModule | LightningModule, virtual_devices: int | None, seed: int
) -> None:
    """Make a data module or module rebuild its loaders in the global order.

    Args:
        owner: The data module or module.
        virtual_devices: Number of shards of a training batch, or None.
        seed: Seed of the order and the items' streams.
    """
    for name in ("train", "val", "test", "predict"):
        if is_overridden(f"{name}_dataloader", owner):
            setattr(
                owner, f"{name}_dataloader", partial(_loaders, owner, name, virtual_devices, seed)
            )


def _loaders(owner: Any, name: str, virtual_devices: int | None, seed: int) -> Any:
    made = getattr(type(owner), f"{name}_dataloader")(owner)
    where = f"{type(owner).__name__}.{name}_dataloader"
    train = name == "train"
    if isinstance(made, list | tuple) and not train:
        return [_rebuilt(loader, where, owner.trainer, False, None, seed) for loader in made]
    return _rebuilt(made, where, owner.trainer, train, virtual_devices if train else None, seed)


def _rebuilt(
    loader: Any, where: str, trainer: Any, train: bool, virtual_devices: int | None, seed: int
) -> Any:
    """Return the loader rebuilt in the global order.

    Raises:
        UserError: When the loader cannot be rebuilt, such as with a custom sampler or an iterable
            data set.
    """
    if isinstance(loader, GlobalLoader):
        return loader
    reason = None
    if not isinstance(loader, DataLoader):
        reason = f"returns {type(loader).__name__}: return one DataLoader"
    elif isinstance(loader.dataset, IterableDataset):
        reason = (
            "reads an iterable data set, which has no order: "
            "use a data set with __getitem__ and __len__"
        )
    elif type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        reason = "has a batch sampler of its own, or no batches: give the DataLoader a batch_size"
    elif type(loader.sampler) not in SAMPLERS:
        names = ", ".join(kind.__name__ for kind in SAMPLERS)
        sampler = type(loader.sampler).__name__
        reason = f"has a {sampler}, whose order cannot be seeded: use one of {names}"
    if reason:
        raise UserError(f"--run.global_order true: {where} {reason}; or leave the flag out")
    if virtual_devices is not None and loader.batch_size < virtual_devices:
        raise UserError(shards_beyond(virtual_devices, loader.batch_size))
    global_sampler = GlobalSampler(
        loader.sampler,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        virtual_devices=virtual_devices,
        seed=seed,
        empty="stand_in" if train else "skip",
        position=next_step(trainer) if train else int,
    )
    kept = (
        "num_workers",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "prefetch_factor",
        "persistent_workers",
    )
    return GlobalLoader(
        SeededItems(loader.dataset),
        batch_sampler=global_sampler,
        collate_fn=partial(collate_parts, loader.collate_fn, virtual_devices is not None),
        multiprocessing_context=loader.multiprocessing_context,
        # otherwise, the loader would draw from the global random state
        generator=torch.Generator(),
        **{name: getattr(loader, name) for name in kept},
    )

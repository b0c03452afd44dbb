"""Exact loader for a user's DataLoader (`--run.loader exact`), on any number of processes.

The loader's samples take one seeded order per epoch. Each rank reads its share of each global
batch, and each sample has random streams of its own, also in worker processes. In evaluation, each
sample comes once.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from app.data.batches import Batches
from app.data.shares import GlobalOrder, Shards, next_step, shards_beyond, stream
from app.data.sources import work_apart
from app.errors import UserError
from app.system.patches import expects
from app.system.random_streams import own_streams, seed_of

SAMPLERS = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
# settings of a user's loader that the exact loader keeps
KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
)


class SeededItems(Dataset[Any]):
    """Data set with seeded items, which do not depend on rank or worker.

    Args:
        dataset: The data set.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

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


class Flat:
    """Samples of a batch sampler, one by one."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.batches)

    def __len__(self) -> int:
        return sum(map(len, self.batches))


class GlobalSampler(GlobalOrder):
    """Batch sampler that yields this rank's parts of each global batch, as pairs of index and seed.

    Args:
        sampler: The loader's sampler; it draws from the epoch's random stream.
        **order: As for `GlobalOrder`. If a shard is empty, it gets a stand-in, too.

    Attributes:
        resumes: Whether the next epoch begins at the position of a checkpoint.
    """

    def __init__(self, sampler: Any, **order: Any) -> None:
        super().__init__(len(sampler), **order)
        self._sampler = sampler
        self.resumes = False

    def samples(self, step: int) -> list[int]:
        """Return the indices of this rank's samples at a step of the epoch."""
        return self._order()[self.span(step)]

    def _order(self) -> list[int]:
        sampler = copy.copy(self._sampler)
        sampler.generator = stream(self.seed, 1, self.epoch)
        with own_streams() as seed:  # a user's sampler may draw from the process's streams
            seed(seed_of(self.seed, 1, self.epoch))
            return list(sampler)

    def __iter__(self) -> Iterator[Shards]:
        order = self._order()
        seeds = torch.randint(2**62, (len(order),), generator=stream(self.seed, 3, self.epoch))

        def items(start: int, end: int) -> list[tuple[int, int]]:
            return list(zip(order[start:end], seeds[start:end].tolist(), strict=True))

        first = 0
        if self.resumes:
            first = self.position()
        self.resumes = False
        for step in range(first, len(self)):
            place = self.start(step)
            shards = []
            for start, end in pairwise(self.bounds(step)):
                shards.append(items(start, end) or items(place, place + 1))
            yield self.shards(shards, step)


class EvaluationSampler(GlobalSampler):
    """Order of an evaluation, in which each sample comes once.

    If the last batch has fewer samples than there are ranks, the last two batches share their
    samples equally. So every rank has as many batches, and a collective call in a step of the
    user's meets one on every rank. With one sample per rank and batch, some ranks have a batch
    less instead.

    Example: 9 samples in global batches of 4 on 2 ranks come as 4, 3 and 2 samples.
    """

    def start(self, step: int) -> int:
        """Return the place of a step's first sample in the epoch's order."""
        full, rest = divmod(self.count, self.batch_size)
        has_enough = self.batch_size >= 2 * self.parts
        if step == full > 0 and 0 < rest < self.parts and has_enough:
            return self.count - (self.batch_size + rest) // 2
        return super().start(step)


@expects("lightning.pytorch.overrides.distributed:_IndexBatchSamplerWrapper.seen_batch_indices")
class IndexedSampler(EvaluationSampler, _IndexBatchSamplerWrapper):
    """Order of a prediction, whose indices Lightning passes to a `BasePredictionWriter`."""

    def __iter__(self) -> Iterator[Shards]:  # type: ignore[override]
        self.seen_batch_indices = []
        for shards in super().__iter__():
            self.seen_batch_indices.append([index for index, _ in shards[0]])
            yield shards


class ExactLoader:
    """A user's DataLoader in the global order.

    It is no DataLoader, so that Lightning keeps its order. Attributes that it lacks, such as
    `dataset` and `batch_size`, are the user's loader's.

    Args:
        loader: The user's loader.
        order: The order.

    Attributes:
        batch_sampler: The order; Lightning calls its `set_epoch`.
    """

    def __init__(self, loader: DataLoader[Any], order: GlobalSampler) -> None:
        self.loader = loader
        self.batch_sampler = order
        self.state_dict = order.state_dict  # Lightning calls it
        self._batches: DataLoader[Any] = DataLoader(
            SeededItems(loader.dataset),
            batch_sampler=order,
            collate_fn=partial(collate_parts, loader.collate_fn, order.virtual_devices is not None),
            # otherwise, the loader would draw the workers' seeds from the global random state
            generator=stream(order.seed, 4, order.rank),
            worker_init_fn=partial(work_apart, then=partial(init_worker, loader.worker_init_fn)),
            **{name: getattr(loader, name) for name in KEPT},
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # pickle asks before `loader` is set
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        """Iterator over the workers' batches, which Lightning ends after a stage."""
        return self._batches._iterator

    @_iterator.setter
    def _iterator(self, iterator: None) -> None:
        self._batches._iterator = iterator

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator that begins when the first batch is requested.

        Lightning calls `iter` before it sets the epoch and the position of a resumed run, and
        workers would read ahead.
        """

        def batches() -> Iterator[Any]:
            yield from self._batches

        return Batches(batches())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the checkpoint's order equals this loader's."""
        self.batch_sampler.load_state_dict(state)
        self.batch_sampler.resumes = True


def init_worker(then: Callable[[int], Any] | None, worker: int) -> None:
    """Call the user's function for a new worker, which finds the user's data set."""
    if then is None:
        return
    info: Any = get_worker_info()
    items = info.dataset
    # torch forbids the assignment
    object.__setattr__(info, "dataset", items.dataset)
    then(worker)
    object.__setattr__(info, "dataset", items)


def order_of(loader: Any) -> GlobalOrder | None:
    """Return the global order of a loader, or None."""
    order = loader if isinstance(loader, GlobalOrder) else getattr(loader, "batch_sampler", None)
    return order if isinstance(order, GlobalOrder) else None


def begins_anew(trainer: Any) -> bool:
    """Return whether a run resumes inside an epoch with a loader that cannot continue there."""
    fit = trainer.fit_loop
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    continues = all(hasattr(loader, "load_state_dict") for loader in loaders)
    is_inside = fit.restarted_mid_epoch and not fit.epoch_loop.batch_progress.is_last_batch
    return is_inside and not continues


@dataclass(eq=False)
class Exactness(Callback):
    """Callback that makes the Trainer's loaders exact where possible, and names the others.

    Args:
        virtual_devices: Number of shards of a training batch, or None.
        global_batch: Samples of a training step, or None for the loader's batch size times the
            number of processes or virtual devices.
        seed: Seed of the order and of the samples' streams.
        replaces_samplers: Whether the Trainer may replace samplers.

    Attributes:
        exceptions: What is not exact and why, by the name of the loader.
    """

    virtual_devices: int | None
    global_batch: int | None
    seed: int
    replaces_samplers: bool = True

    def __post_init__(self) -> None:
        self.exceptions: dict[str, str] = {}

    @expects(
        "lightning.pytorch.loops.fit_loop:_FitLoop._data_source",
        "lightning.pytorch.loops.evaluation_loop:_EvaluationLoop._data_source",
        "lightning.pytorch.loops.prediction_loop:_PredictionLoop._data_source",
    )
    def put_into(self, trainer: Any) -> None:
        """Make the loaders exact that the Trainer requests. The user's code gets its own ones."""
        for loop in (
            trainer.fit_loop,
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            source = loop._data_source
            source.dataloader = partial(self._requested, trainer, source)

    def _requested(self, trainer: Any, source: Any) -> Any:
        loaders = type(source).dataloader(source)
        if isinstance(loaders, list | tuple) and source.name != "train_dataloader":
            return [self._exact(loader, trainer, source) for loader in loaders]
        return self._exact(loaders, trainer, source)

    def _exact(self, loader: Any, trainer: Any, source: Any) -> Any:
        where = f"{type(source.instance).__name__}.{source.name}"
        name = source.name.removesuffix("_dataloader")
        reason = why_not(loader, name, trainer.world_size)
        if not self.replaces_samplers:
            reason = "keeps its sampler (--trainer.use_distributed_sampler false)"
        elif trainer.overfit_batches:
            reason = "repeats a few batches (--trainer.overfit_batches)"
        if reason is not None:
            self._except(where, reason, trainer, name)
            return loader
        return ExactLoader(loader, self._sampler(loader, trainer, name, where))

    def _except(self, where: str, reason: str, trainer: Any, name: str) -> None:
        """Name a loader that is not exact, and the effect."""
        for flag in ("virtual_devices", "global_batch"):
            if getattr(self, flag) is not None and name == "train":
                raise UserError(
                    f"--run.{flag}: {where} {reason}, so its samples have no global order: change "
                    "it, or leave the flag out"
                )
        effect = "a resumed epoch, or another number of processes, has another order"
        if name != "train":
            effect = "ranks may repeat samples to get equally many"
            if trainer.world_size == 1:
                return
        self._say(where, f"{where} {reason}: {effect}")

    def _say(self, where: str, text: str) -> None:
        if where not in self.exceptions:
            self.exceptions[where] = text
            rank_zero_info(f"not exact: {text}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say that a resumed epoch begins anew, or that a step does not weigh uneven batches."""
        reason = getattr(trainer.fit_loop.epoch_loop, "reason", "--run.loop lightning")
        order = order_of(trainer.train_dataloader)
        if order is None and begins_anew(trainer):
            self._say(
                "epoch",
                "this epoch goes on in another order than before the stop: some samples come "
                "twice, others never. Resume from an epoch's end, or with a loader that "
                "--run.loader exact can order",
            )
        if reason is None or not isinstance(order, GlobalSampler):
            return
        if order.is_uneven or len(order) % trainer.accumulate_grad_batches:
            self._say("step", f"with {reason}, the samples of a smaller batch count more")

    def _sampler(
        self, loader: DataLoader[Any], trainer: Any, name: str, where: str
    ) -> GlobalSampler:
        """Return the sampler that takes the place of a loader's batch sampler."""
        is_training = name == "train"
        batches: Any = loader.batch_sampler
        if type(batches) is not BatchSampler:  # a prediction's
            batches = BatchSampler(Flat(batches), len(next(iter(batches))), drop_last=False)
        sampler = batches.sampler
        drop_last = batches.drop_last and is_training
        if isinstance(sampler, DistributedSampler):  # it would deal out a part of the samples
            whole = RandomSampler if sampler.shuffle else SequentialSampler
            sampler = whole(loader.dataset)  # type: ignore[arg-type]
        if batches.drop_last and name in ("val", "test"):  # drop what one process drops
            sampler = Flat(BatchSampler(sampler, batches.batch_size, drop_last=True))
        virtual_devices = self.virtual_devices if is_training else None
        parts = virtual_devices or trainer.world_size
        batch_size = batches.batch_size * parts
        if is_training and self.global_batch is not None:
            batch_size = int(self.global_batch)  # jsonargparse's subclass of int cannot be saved
            if virtual_devices is None and batch_size < parts:
                raise UserError(
                    f"--run.global_batch {batch_size} has fewer samples than the {parts} ranks: "
                    f"give {parts} or more"
                )
        if virtual_devices is not None and batch_size < parts:
            raise UserError(shards_beyond(parts, batch_size))
        if drop_last and len(sampler) < batch_size:
            raise UserError(
                f"{where} has no batch: drop_last drops its {len(sampler)} samples, because a "
                f"global batch has {batch_size}: use a smaller batch, or drop_last=False"
            )
        kinds = {"train": GlobalSampler, "predict": IndexedSampler}
        return kinds.get(name, EvaluationSampler)(
            sampler,
            batch_size=batch_size,
            drop_last=drop_last,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            virtual_devices=virtual_devices,
            seed=self.seed,
            empty="stand_in" if is_training else "skip",
            position=next_step(trainer) if is_training else int,
        )


def why_not(loader: Any, name: str, world_size: int) -> str | None:
    """Return why a loader cannot have a global order, or None.

    Args:
        loader: What a `*_dataloader` method returned.
        name: `train`, `val`, `test` or `predict`.
        world_size: Number of processes.
    """
    if not isinstance(loader, DataLoader):
        return f"returns {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return "reads an iterable data set, which each process reads whole, unless it shards it"
    if getattr(type(loader.dataset), "__getitem__", None) in (None, Dataset.__getitem__):
        return "reads a data set without __getitem__"
    iterates = attrgetter("__iter__", "__len__", "_get_iterator")  # these make the batches
    if iterates(type(loader)) != iterates(DataLoader):
        return f"returns {type(loader).__name__}, which makes its own batches"
    if loader.batch_sampler is None:
        return "makes no batches"
    batches: Any = loader.batch_sampler
    if type(batches) is not BatchSampler:
        if name != "predict":
            return f"has a batch sampler of its own ({type(batches).__name__})"
        sizes = list(map(len, batches))  # a prediction takes the rows of any batch sampler
        if len(set(sizes[:-1])) > 1 or sizes[-1:] > sizes[:1]:
            return "has batches of several sizes"
        count = sum(sizes)
    elif name != "predict" and type(batches.sampler) not in SAMPLERS:
        return f"has a sampler of its own ({type(batches.sampler).__name__})"
    else:
        count = len(batches.sampler)  # type: ignore[arg-type]
    if name != "train" and count < world_size:
        return "has fewer samples than there are ranks"
    return None

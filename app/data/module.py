"""LightningDataModule for image classification."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from zlib import crc32

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt
from lightning import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torchvision.transforms import v2

from app.data.batches import (
    DeviceReader,
    DiskReader,
    GlobalBatches,
    HostReader,
    ImageOrder,
    RawBatch,
    ReadImage,
)
from app.data.cache import ImageCache
from app.data.image_files import counted
from app.data.placement import Placement, place, workers_of
from app.data.shares import next_step, shards_beyond, stream, unequal_shares
from app.data.sources import Source, Split, SplitName
from app.data.transforms import Transform
from app.errors import UserError
from app.system.machine import usable_cores

# splits that a stage reads; `fit` includes the final test, and `predict` reads one of two splits
READS: dict[str, Sequence[SplitName]] = {
    "fit": ("train", "val", "test"),
    "validate": ("train", "val"),
    "test": ("test",),
}


def _digests(split: Split, rows: Tensor) -> Iterator[tuple[str, str]]:
    """Yield the digests of images, each with the image's name; none if the split has no digests."""
    if not split.digests:
        return
    for row in rows.tolist():
        for digest in split.digests[row]:
            yield digest, split.name(row)


class ImageData(LightningDataModule):
    """Data module that yields each rank's share of global batches of images.

    Args:
        source: The source of the images.
        batch_size: Size of the global batch, over all ranks: a count, or a fraction of the training
            set.
        val_size: Training images held out for validation, a count or a fraction, if the source has
            no validation set.
        placement: `disk`: read through worker processes. `memory`: one uint8 tensor on the host.
            `device`: the same tensor on the accelerator. `auto`: `disk` if `augment` or a random
            crop is given, or if the images take more than half of the free host memory; else
            `device` if the images take less than a tenth of a GPU's free memory; else `memory`.
        cache: Folder for decoded images, shared by a node's ranks. `auto`: in the user's cache
            directory. `off`: each rank decodes at every start.
        num_workers: Worker processes of each rank for reading and decoding; `auto`: the rank's
            number of cores.
        crop_padding: Augmentation: width in pixels of a border that is added before a random crop.
        flip: Augmentation: mirror half of the images; `alternate` mirrors each image in every other
            epoch.
        cutout: Augmentation: side in pixels of a random square that is set to the mean.
        augment: Augmentation by the worker processes, image by image, on the CPU: a v2 transform of
            torchvision such as `RandAugment`, the import path of your own module, or a list of
            these. Needs the placement `disk`.
        mixup: Augmentation: blend each image with another. The weight is drawn from a beta
            distribution with this parameter, such as 0.2.
        cutmix: Augmentation: paste a box of another image into each image. The box's area is drawn
            from a beta distribution with this parameter, such as 1.0. If both are given, each batch
            uses one of them at random.
        balance: Whether an epoch draws images with replacement, so that all classes are equally
            frequent.
        drop_last: Whether to drop the last, smaller batch of a training epoch.
        seed: Seed of the split, the order and the augmentation; by default `--seed_everything`.

    Raises:
        UserError: When a size does not fit the data set, or the world size does not divide the
            global batch.
    """

    trainer: Trainer  # set by Lightning
    placement: Placement  # set in setup
    virtual_devices: int | None = None  # set by `fit`
    duplicates = 0  # images of validation and test that are training images, too

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int | float = 64,
        val_size: int | float = 0.1,
        placement: Literal["auto", "disk", "memory", "device"] = "auto",
        cache: str | bool = "auto",
        num_workers: NonNegativeInt | Literal["auto"] = "auto",
        crop_padding: NonNegativeInt = 0,
        flip: bool | Literal["alternate"] = False,
        cutout: NonNegativeInt = 0,
        augment: v2.Transform | nn.Module | list[v2.Transform | nn.Module] | None = None,
        mixup: NonNegativeFloat = 0.0,
        cutmix: NonNegativeFloat = 0.0,
        balance: bool = False,
        drop_last: bool = False,
        seed: NonNegativeInt | None = None,
    ) -> None:
        super().__init__()
        if batch_size <= 0 or (isinstance(batch_size, float) and batch_size > 1):
            raise UserError(
                f"--data.batch_size {batch_size}: "
                "give a count of at least 1 or a fraction up to 1.0"
            )
        if val_size < 0 or (isinstance(val_size, float) and val_size >= 1):
            raise UserError(
                f"--data.val_size {val_size}: give a count from 0 on or a fraction below 1.0"
            )
        self.source = source
        if augment is None:
            augment = []
        if not isinstance(augment, list):
            augment = [augment]
        self.augment = augment
        self._flag_of_workers = ""  # an augmentation that needs worker processes
        if source.ragged("train"):
            self._flag_of_workers = "--data.crop"
        if augment:
            self._flag_of_workers = "--data.augment"
        if self._flag_of_workers and placement not in ("auto", "disk"):
            raise UserError(
                f"{self._flag_of_workers} runs in worker processes: "
                f"give --data.placement disk, not {placement}"
            )
        if batch_size == 1 and (mixup or cutmix):
            raise UserError(
                "--data.mixup and --data.cutmix mix images of a batch: "
                "give a larger --data.batch_size"
            )
        self.mixing = (mixup, cutmix)
        self.balance = balance
        self.batch_size = batch_size
        self.val_size = val_size
        self.requested_placement = placement
        self.num_workers = num_workers
        self.drop_last = drop_last
        if seed is None:
            seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self.seed = seed
        self.transform = Transform(source.mean, source.std, crop_padding, bool(flip), cutout)
        self.alternate = flip == "alternate"
        self.cache: ImageCache | None = None
        if cache not in ("off", False):  # YAML reads an unquoted `off` as false
            self.cache = ImageCache(cache)
        elif source.skips:
            raise UserError(
                "--data.on_bad_image skip needs the cache of decoded images: "
                "remove --data.cache off"
            )
        self.class_names = source.class_names
        self.image_shape = source.image_shape
        self._prepared: set[SplitName] = set()
        self._splits: dict[str, tuple[Split, Tensor]] = {}

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def adopt_classes(self, names: Sequence[str]) -> None:
        """Number the classes as in another list, for evaluation; ignore a list that lacks classes.

        Args:
            names: Name of each class of a trained model.
        """
        if {*self.source.class_names} <= {*names}:
            self.class_names = names

    @property
    def _predicted(self) -> SplitName:
        if "test" in self.source.splits and not self.source.predict_dir:
            return "test"
        return "predict"

    def prepare_data(self, stage: str | None = None) -> None:
        """Download, check and decode a stage's images, in one process per node.

        Args:
            stage: `fit`, `validate`, `test` or `predict`; by default the trainer's.
        """
        stage = stage or (self.trainer and self.trainer.state.fn) or "fit"
        wanted = set(READS.get(stage, [self._predicted]))
        if isinstance(self.batch_size, float):
            wanted.add("train")
        missing = [name for name in self.source.splits if name in wanted - self._prepared]
        if not self._prepared:
            self.source.prepare()
        self._prepared |= wanted
        if missing and self.files_left_out:
            rank_zero_info(
                f"Left out, as no images or in no class folder: {counted(self.files_left_out)}"
            )
        if self.cache is None:
            return
        try:
            for name in missing:
                self.cache.write(self.source, name, usable_cores())
        except OSError as error:
            refused = f"cannot be kept in {self.cache.folder} ({error.strerror or error})"
            if self.source.skips:
                raise UserError(
                    f"--data.on_bad_image skip: decoded images {refused}: give another --data.cache"
                ) from error
            # not a warning, because a warning prints two lines
            rank_zero_info(
                f"Decoded images {refused}, so that each rank decodes them: "
                "give another --data.cache, or off"
            )

    def setup(self, stage: str) -> None:
        """Read the splits that the stage needs."""
        if stage in ("fit", "validate"):
            self._load_training()
            if stage == "validate" and not self.counts["val"]:
                raise UserError(f"--data.val_size {self.val_size} leaves no images to validate on")
        elif stage == "test":
            self._load("test")
        else:
            self._load(self._predicted)
        if not hasattr(self, "placement"):  # choose once: loaded images reduce the free memory
            self.placement = self._place()
        if stage == "fit":
            size = self.global_batch_size
            world = self.trainer.world_size
            if self.virtual_devices is not None and size < self.virtual_devices:
                raise UserError(shards_beyond(self.virtual_devices, size))
            # checked here, not in __init__, because a batch size given as a fraction depends on the
            # number of images
            if size % world and self.virtual_devices is None:
                raise UserError(unequal_shares(size, world))
            images = self.counts["train"]
            if self.drop_last and images < size:
                raise UserError(
                    f"--data.drop_last leaves nothing of {images} training images in batches of "
                    f"{size}: use a smaller --data.batch_size"
                )
            self._find_duplicates()

    @rank_zero_only
    def _find_duplicates(self) -> None:
        """Count, and warn of, validation and test images that are training images, too."""
        files = list(_digests(*self._splits["val"]))
        if self.cache is not None and "test" in self.source.splits:
            test = self.cache.open(self.source, "test")
            if test is not None:
                files += _digests(test, torch.arange(len(test)))
        trained = dict(_digests(*self._splits["train"]))
        twins = {name: trained[digest] for digest, name in files if digest in trained}
        self.duplicates = len(twins)
        for name in list(twins)[:1]:
            rank_zero_info(
                f"warning: validation or test has training images ({len(twins):,}, such as "
                f"{name} = {twins[name]}), which raise its accuracy: delete one of each pair"
            )

    def _load(self, name: SplitName) -> None:
        if name in self._splits:
            return
        if name not in self.source.splits:
            remedy = "add a test split"
            if name == "predict":
                remedy = "give --data.predict_dir, or add a test split"
            raise UserError(f"{type(self).__name__} has no {name} images here: {remedy}")
        split = None
        if self.cache is not None:
            split = self.cache.open(self.source, name)
        if split is None and self.source.skips and self.source.encoded(name):
            raise UserError(
                "--data.on_bad_image skip: decoded images are missing from --data.cache: start "
                "again"
            )
        if split is None:
            split = self.source.load(name)
        if self.class_names is not self.source.class_names:
            numbers = list(map(self.class_names.index, self.source.class_names))
            # the last number is for images without a label, -1
            split.labels = torch.tensor([*numbers, -1])[split.labels]
        self._splits[name] = split, torch.arange(len(split))

    def _load_training(self) -> None:
        """Read the training split, and hold out validation images if the source has none.

        A seeded permutation selects the validation images.
        """
        if "train" in self._splits:
            return
        self._load("train")
        if "val" in self.source.splits:
            self._load("val")
            return
        train, rows = self._splits["train"]
        count = self.val_size
        if isinstance(count, float):
            count = int(count * len(rows))
        if count >= len(rows):
            raise UserError(
                f"--data.val_size {self.val_size} leaves nothing of {len(rows)} training images: "
                "give less"
            )
        rows = torch.randperm(len(rows), generator=stream(self.seed, 0))
        self._splits["val"] = train, rows[:count].sort().values
        self._splits["train"] = train, rows[count:].sort().values

    @property
    def content(self) -> dict[str, tuple[int, int]]:
        """Number of images and checksum of labels of each loaded split."""
        return {
            name: (len(split), crc32(split.labels.numpy().tobytes()))
            for name, (split, _) in self._splits.items()
        }

    @property
    def counts(self) -> dict[str, int]:
        """Number of images of each loaded split; `train` excludes the held-out images."""
        return {name: len(rows) for name, (_, rows) in self._splits.items()}

    @property
    def class_counts(self) -> Tensor:
        """Number of training images of each class, int64 (classes,)."""
        split, rows = self._splits["train"]
        return split.labels[rows].bincount(minlength=self.num_classes)

    def sample(self) -> Tensor:
        """Return evenly spaced training images, transformed as for evaluation.

        Returns:
            At least 1,024 images, or all if there are fewer: float32 (n, C, H, W).
        """
        split, rows = self._splits["train"]
        read = self._read(split, train=False)
        images = [read((row, 0)) for row in rows[:: max(len(rows) // 1024, 1)].tolist()]
        return self.transform(torch.stack(images))

    @property
    def varies(self) -> bool:
        """Whether the training images change from epoch to epoch."""
        crops = self._splits["train"][0].ragged is not None
        return bool(crops or self.augment or self.transform.draws or any(self.mixing))

    def _read(self, split: Split, train: bool) -> ReadImage:
        crop = None
        if split.ragged is not None:
            crop = split.ragged.random_crop() if train else split.ragged.evaluated
        return ReadImage(split, crop, self.augment if train else [])

    @property
    def left_out(self) -> dict[str, int]:
        """Number of unreadable images of each loaded split that has any."""
        counts = {}
        for name, (split, _) in self._splits.items():
            if split.left_out and name in self.source.splits:
                counts[name] = split.left_out
        return counts

    @property
    def files_left_out(self) -> Counter[str]:
        """Number of files in the folders of prepared splits that are left out, by suffix."""
        others = self.source.other_files
        return sum((others[name] for name in self._prepared & others.keys()), Counter())

    @property
    def global_batch_size(self) -> int:
        """Samples per batch, over all ranks."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        self._load_training()
        return math.ceil(self.batch_size * self.counts["train"])

    def _place(self) -> Placement:
        """Return the placement of the images, the same on all ranks."""
        if self.requested_placement != "auto":
            return self.requested_placement
        if self._flag_of_workers:
            return "disk"
        split = max((split for split, _ in self._splits.values()), key=len)
        return place(self.trainer, len(split) * math.prod(self.image_shape), split.mapped)

    def loader(self, name: SplitName, train: bool = False) -> GlobalBatches:
        """Return a loader of a split, for evaluation or for training."""
        trainer = self.trainer
        split, rows = self._splits[name]
        accepts_empty = getattr(trainer.lightning_module, "accepts_empty", False)
        one_by_one = (
            accepts_empty
            and name in ("train", "val")
            and not train
            and bool(self.virtual_devices)
            and trainer.limit_val_batches == 1.0
        )
        empty = "stand_in" if train else "skip"
        weights = None
        if train and self.balance:
            weights = (1 / self.class_counts)[split.labels[rows]]
        order = ImageOrder(
            rows,
            shuffle=train and not trainer.overfit_batches,  # type: ignore[attr-defined]
            weights=weights,
            batch_size=self.global_batch_size,
            drop_last=train and self.drop_last,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            virtual_devices=self.virtual_devices if train or one_by_one else None,
            seed=self.seed,
            empty="keep" if accepts_empty else empty,
            position=next_step(trainer) if train else int,
        )
        reader = self._reader(split, rows, train)
        if not train:
            return GlobalBatches(order, reader, one_by_one=one_by_one)
        return GlobalBatches(order, reader, self.transform.draws, self.alternate, self.mixing)

    def _reader(self, split: Split, rows: Tensor, train: bool) -> HostReader:
        device = self.trainer.strategy.root_device
        pins = device.type == "cuda"
        workers = self.num_workers
        if workers == "auto":
            workers = workers_of(self.trainer)
        if self.placement == "disk":
            return DiskReader(self._read(split, train), rows, pins, workers, self.seed)
        split.tensor(workers)
        if self.placement == "device":
            return DeviceReader(split, rows, device)
        return HostReader(split, rows, pins)

    def train_dataloader(self) -> GlobalBatches:
        """Return the loader of the training split, shuffled."""
        return self.loader("train", train=True)

    def val_dataloader(self) -> GlobalBatches | list[Any]:
        """Return the loader of the validation split, or an empty list without samples."""
        if not self.counts["val"]:
            return []
        return self.loader("val")

    def test_dataloader(self) -> GlobalBatches:
        """Return the loader that yields each sample of the test split once."""
        return self.loader("test")

    def predict_dataloader(self) -> GlobalBatches:
        """Return the loader that yields each image to predict once.

        These images are the source's `predict_dir`, or by default the test split.
        """
        return self.loader(self._predicted)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augment and normalise a batch on the device.

        Returns:
            Images (n, C, H, W), and labels (n,); for a mixed batch, class probabilities (n,
            classes) instead of labels.
        """
        assert isinstance(batch, RawBatch)
        images = batch.images
        if images.ndim == 4:  # otherwise, features of the images
            images = self.transform(images, batch.draws)
        labels = batch.labels
        if batch.mix is not None:
            images, labels = batch.mix(images, labels, self.num_classes)
        return self.trainer.precision_plugin.convert_input(images), labels

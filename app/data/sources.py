"""Image sources: data sets, their files, and decoding into uint8 tensors."""

import ctypes
import gzip
import math
import os
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torchvision
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.utils import check_integrity

from app.data.geometry import Geometry
from app.errors import UserError
from app.record.words import listed
from app.system.files import downloading
from app.system.random_streams import own_streams
from app.system.tracebacks import MADE_BY, blamed

SplitName = Literal["train", "val", "test", "predict"]
# names of splits in lower case: of folders, of a table's rows, and of Hugging Face
SPLIT_NAMES: dict[str, SplitName] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "eval", "evaluation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
EMBEDDED = "or train on the embedded data set: --data Synthetic"

Errors = dict[int, UserError]  # errors of unreadable images, by index


def problems(wrong: Errors) -> str:
    """Format the errors of unreadable images, without their remedy."""
    return listed([str(error).rpartition(": ")[0] for error in wrong.values()])


def work_apart(worker: int, then: Callable[[int], None] | None = None) -> None:
    """Move a loader worker into its own process group, so that signals reach only the rank.

    Args:
        worker: Number of the worker.
        then: The user's `worker_init_fn`, which is called last.
    """
    if sys.platform == "linux":
        # the kernel kills the worker when its rank dies; 1 is PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.setpgrp()
    if then is not None:
        then(worker)


class _Items(Dataset[Any]):
    """Data set that returns UserErrors, because DataLoader would add tracebacks to raised ones."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        # keep MADE_BY in an attribute, so that pickle copies it into spawned workers, where MADE_BY
        # is empty
        self.read = read
        self.made_by = MADE_BY

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.read(item)
        except Exception as error:
            MADE_BY.update(self.made_by)
            wrong = error if isinstance(error, UserError) else blamed(error)
            if wrong is None:
                raise
            wrong.add_note(traceback.format_exc())  # for --verbose
            return wrong

    def __getitems__(self, items: list[Any]) -> list[Any]:
        with own_streams():  # once a batch, because it takes 90 µs
            return [self[item] for item in items]


class Workers(DataLoader[Any]):
    """Loader whose worker processes read images.

    Args:
        read: Function that reads an item's image, uint8 (C, H, W).
        batches: Items of each batch.
        collate: Function that makes a batch of what `read` returns; a `UserError` stands for an
            unreadable image.
        num_workers: Number of worker processes; with 0, this process reads.
        pin_memory: Whether to pin batches for a fast copy to an accelerator.
    """

    def __init__(
        self,
        read: Callable[[Any], Any],
        batches: Iterable[Any],
        collate: Callable[[list[Any]], Any],
        num_workers: int,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            _Items(read),
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            worker_init_fn=work_apart,
            # otherwise, the loader would draw from the global random state
            generator=torch.Generator(),
        )


class Split(Dataset[Tensor]):
    """Labelled images. Item i is image i, uint8 (C, H, W).

    Args:
        images: uint8 (N, C, H, W); or, for images of different sizes, their pixels one after the
            other, uint8 (pixels, C).
        labels: int64 (N,).
        names: File names, if any.
        sizes: Height and width of each image, int64 (N, 2), if they differ.

    Attributes:
        ragged: Geometry of the training crop if items have different sizes (C, h, w); else None.
        image_shape: Shape of an image that the network gets, (C, H, W).
        wrong: Errors of unreadable images, by index.
        left_out: Number of images that could not be read.
        digests: Digests of each image's file and pixels, once it has been decoded; images with a
            common digest are the same.
        mapped: Whether the images are memory-mapped from one file, which a node's ranks share.
    """

    ragged: Geometry | None = None
    left_out = 0
    digests: list[list[str]] = []  # noqa: RUF012
    mapped = False
    wrong: Errors = {}  # noqa: RUF012

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        names: Sequence[str] | None = None,
        sizes: Tensor | None = None,
    ) -> None:
        self._images: Tensor | None = images
        self.labels = labels
        self.image_shape: Sequence[int] = images.shape[1:]
        self.names = names
        self._sizes = sizes
        if sizes is not None:
            self._ends = sizes.prod(1).cumsum(0)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        images = self.tensor()
        if self._sizes is None:
            return images[index]
        height, width = self._sizes[index].tolist()
        end = int(self._ends[index])
        return images[end - height * width : end].view(height, width, -1).permute(2, 0, 1)

    def name(self, index: int) -> str:
        """Return an image's file name, or its number if it has none."""
        return self.names[index] if self.names else str(index)

    def tensor(self, num_workers: int = 0) -> Tensor:
        """Return the images, as passed to the constructor.

        Args:
            num_workers: Number of processes that decode, if the images are encoded.
        """
        assert self._images is not None
        return self._images

    def decoded(self, num_workers: int, skips: bool = False) -> Iterator[Tensor]:
        """Return an iterator over all readable images, in order.

        Args:
            num_workers: Number of processes that decode.
            skips: Whether to skip unreadable images. Otherwise, the end of the iterator raises
                their errors.

        Raises:
            UserError: When images are unreadable and not skipped, or all are unreadable.
        """
        return iter(self.tensor())


def check_memory(count: int, image_shape: Sequence[int], remedy: str) -> None:
    """Raise a UserError if images, uint8 (count, C, H, W), do not fit into the free memory."""
    needed = count * math.prod(image_shape)
    free = psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"{count:,} images of {'×'.join(map(str, image_shape))} take {needed / 2**30:.1f} GiB, "
            f"of {free / 2**30:.1f} GiB of free memory: {remedy}"
        )


def split_of(name: str) -> SplitName | None:
    """Return the split that a name means, or None for a name that means no split."""
    return SPLIT_NAMES.get(name.strip().lower())


def splits_in(place: object, names: Collection[str]) -> dict[SplitName, str]:
    """Return the name of each split: train, val, test; names that mean no split are ignored.

    Args:
        place: Place of the names, for messages.
        names: Names of folders or tables.

    Raises:
        UserError: When two names mean the same split.
    """
    splits = {}
    for split in dict.fromkeys(SPLIT_NAMES.values()):
        matches = [name for name in names if split_of(name) == split]
        if len(matches) > 1:
            raise UserError(
                f"{place} has {' and '.join(matches)}, which mean the same split {split}: keep one"
            )
        if matches:
            splits[split] = matches[0]
    return splits


class Source(ABC):
    """Source of images: classes, image shape, normalisation, and splits.

    Attributes:
        class_names: Name of each class.
        image_shape: Shape of an image, (C, H, W).
        mean: Mean of each channel, for pixels scaled to 0…1.
        std: Standard deviation of each channel, for pixels scaled to 0…1.
        splits: Names of the splits; without `val`, training images are held out for validation.
        root: Path of the data set, if it has one.
        predict_dir: Images and folders of images for `predict`; if empty, the test split's.
        skips: Whether unreadable images are skipped.
        other_files: Number of files in each split's folders that are left out, by suffix: they are
            no images, or in no class folder.
    """

    class_names: Sequence[str]
    image_shape: tuple[int, int, int]
    mean: Sequence[float]
    std: Sequence[float]
    splits: Collection[SplitName] = ("train", "test", "predict")
    root = ""
    predict_dir: Sequence[str] = ()
    skips = False
    other_files: dict[SplitName, Counter[str]] = {}  # noqa: RUF012

    @abstractmethod
    def prepare(self) -> None:
        """Check or download the files, in one process per node, before other processes read them.

        Raises:
            UserError: When files are missing and cannot be downloaded, or are corrupted.
        """

    def ragged(self, split: SplitName) -> Geometry | None:
        """Return the training crop's geometry if the split has images of different sizes."""
        return None

    def settings(self, split: SplitName) -> Sequence[Any]:
        """Return the settings of a split's decoding, which are part of the cache's key."""
        return ()

    @abstractmethod
    def load(self, split: SplitName) -> Split:
        """Read a split."""

    def encoded(self, split: SplitName) -> Sequence[str]:
        """Return a split's encoded files if decoding is slow enough to cache, else nothing."""
        return ()


class TorchvisionSource(Source):
    """Source of a data set that torchvision downloads and reads.

    Args:
        root: Directory of the data set.

    Attributes:
        dataset: Torchvision's class of the data set.
        folder: Path of its files' folder, relative to `root`.
        names: Names of its files.
        archives: Archives that hold the data set, for error messages.
    """

    dataset: Any
    folder: str
    names: Sequence[str]
    archives: str

    def __init__(self, root: str) -> None:
        self.root = root
        self.place = Path(root, self.folder)
        self.files = [self.place / name for name in self.names]

    def prepare(self) -> None:
        """Download missing files."""
        if all(file.exists() for file in self.files):
            return
        name = self.dataset.__name__
        remedy = f"name another directory than {self.root!r} with --data.root"
        problem = f"no {name} in {self.place}, and it could not be downloaded"
        with downloading(
            problem, f"put {self.archives} there, {remedy}, {EMBEDDED} --data.like {name}"
        ):
            self.dataset(self.root, download=True)

    def encoded(self, split: SplitName) -> Sequence[str]:  # noqa: D102
        return list(map(str, self.files))

    def load(self, split: SplitName) -> Split:  # noqa: D102
        channels, height, width = self.image_shape
        try:  # unpickling CIFAR-10 is safe: torchvision verifies its checksums first
            data = self.dataset(self.root, train=split == "train")
            labels = torch.as_tensor(data.targets)
            images = torch.as_tensor(data.data).view(len(labels), height, width, channels)
            if labels.max() >= len(self.class_names):
                raise ValueError("a label without a class")
        except Exception as error:  # torchvision raises many types
            reason = getattr(error, "strerror", None) or "truncated or corrupted files"
            raise UserError(
                f"{self.place} cannot be read ({reason}): move it away to have it downloaded again"
            ) from error
        return Split(images.permute(0, 3, 1, 2), labels)


class CIFAR10Source(TorchvisionSource):
    """Source of CIFAR-10 in its Python format: https://www.cs.toronto.edu/~kriz/cifar.html."""

    dataset = torchvision.datasets.CIFAR10
    folder = dataset.base_folder
    names = tuple(name for name, _ in dataset.train_list + dataset.test_list)
    archives = f"the content of {dataset.filename} from {dataset.url}"
    class_names = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    image_shape = (3, 32, 32)
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)


class FashionMNISTSource(TorchvisionSource):
    """Source of FashionMNIST in IDX format: https://github.com/zalandoresearch/fashion-mnist."""

    dataset = torchvision.datasets.FashionMNIST
    folder = "FashionMNIST/raw"
    names = tuple(name.removesuffix(".gz") for name, _ in dataset.resources)
    archives = ", ".join(name for name, _ in dataset.resources)
    class_names = tuple(dataset.classes)
    image_shape = (1, 28, 28)
    mean = (0.0,)
    std = (256 / 255,)  # pixels / 255 / std = pixels / 256

    def load(self, split: SplitName) -> Split:
        """Read a split; first compare the files with the archives beside them, if any."""
        for file, (name, checksum) in zip(self.files, self.dataset.resources, strict=True):
            archive = file.with_name(name)
            if not archive.is_file():
                continue
            is_whole = check_integrity(archive, checksum)
            if not is_whole or gzip.decompress(archive.read_bytes()) != file.read_bytes():
                raise UserError(
                    f"{file} differs from the archive beside it: delete both to have them "
                    "downloaded again"
                )
        return super().load(split)

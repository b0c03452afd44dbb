"""Where images come from: what a data set is, where its files lie, and how they become uint8 tensors."""

import math
import pickle
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torchvision
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.utils import check_integrity

from app.errors import UserError
from app.launch.sharing import Empty, Once, alone

SplitName = Literal["train", "val", "test", "predict"]
EMBEDDED = "or train on the embedded data set: --data Synthetic"


class Split(Dataset[Tensor]):
    """Labelled images in memory. Item i is image i, uint8 (C, H, W).

    Args:
        images: uint8 (N, C, H, W).
        labels: int64 (N,).
    """

    names: Sequence[str] | None = None  # file names, where there are any

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        return self._images[index]

    def tensor(self, num_workers: int = 0, once: Once = alone) -> Tensor:
        """All images, uint8 (N, C, H, W).

        Args:
            num_workers: Processes that decode them, where they must be decoded.
            once: Which rank does it.
        """
        return self._images


class Source(ABC):
    """A data set: its classes, the shape and normalisation of its images, and its splits.

    Attributes:
        class_names: Name of each class.
        image_shape: (C, H, W).
        mean: Per channel, of pixels scaled to 0…1; subtracted.
        std: Per channel, of pixels scaled to 0…1; divided by.
        splits: The splits that it has; validation is carved out of training where it has none of its own.
    """

    class_names: Sequence[str]
    image_shape: tuple[int, int, int]
    mean: Sequence[float]
    std: Sequence[float]
    splits: Collection[SplitName] = ("train", "test", "predict")
    files: Sequence[Path] = ()  # those that must be there, where they are known

    @abstractmethod
    def prepare(self) -> None:
        """Make the files ready: called in one process per node, before the others read.

        Raises:
            UserError: When files are missing and cannot be had, or are corrupted.
        """

    @abstractmethod
    def load(self, split: SplitName, once: Once = alone) -> Split:
        """Read one of its splits; to predict are the test images, unless others were named.

        Args:
            split: Which one.
            once: Which rank reads what is kept in memory.
        """


@contextmanager
def _download(what: str, root: str, where: Path, files: str) -> Iterator[None]:
    """Report that a download failed, and do not wait for a dead network: torchvision sets no time limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20)
    try:
        yield
    except (OSError, RuntimeError, EOFError) as error:  # URLError is an OSError
        lines = str(error).split("\n")  # torchvision's first line names the file, the last one says what was wrong
        reason = next((line for line in reversed(lines) if line.strip()), type(error).__name__)
        raise UserError(
            f"no {what} in {where}, and it could not be downloaded ({reason}): put {files} there, "
            f"name another directory than {root!r} with --data.root, {EMBEDDED} --data.like {what.replace('-', '')}"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


class CIFAR10Source(Source):
    """CIFAR-10 in its Python format, through torchvision: https://www.cs.toronto.edu/~kriz/cifar.html."""

    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    image_shape = (3, 32, 32)
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)

    def __init__(self, root: str) -> None:
        self.root = root
        dataset = torchvision.datasets.CIFAR10
        lists = [*dataset.train_list, *dataset.test_list, [dataset.meta["filename"], dataset.meta["md5"]]]
        self.checksums = {Path(root, dataset.base_folder, name): md5 for name, md5 in lists}
        self.files = list(self.checksums)

    def prepare(self) -> None:  # noqa: D102
        dataset = torchvision.datasets.CIFAR10
        folder = Path(self.root, dataset.base_folder)
        bad = [file for file, md5 in self.checksums.items() if not check_integrity(str(file), md5)]
        for file in bad:
            if file.exists():
                raise UserError(f"{file} is truncated or corrupted: delete {folder} to have it made anew")
        if bad:
            archive = f"{dataset.filename} from {dataset.url}"
            with _download("CIFAR-10", self.root, folder, f"the content of {archive}"):
                dataset(self.root, download=True)

    def load(self, split: SplitName, once: Once = alone) -> Split:  # noqa: D102
        return Split(*once(partial(self._read, split)))

    def _read(self, split: SplitName, empty: Empty) -> tuple[Tensor, Tensor]:
        dataset = torchvision.datasets.CIFAR10
        batches = []
        for name, _ in dataset.train_list if split == "train" else dataset.test_list:
            file = Path(self.root, dataset.base_folder, name)
            if not check_integrity(str(file), self.checksums[file]):  # a pickle can run anything
                raise UserError(f"{file} is missing, truncated or corrupted: delete {file.parent} to have it made anew")
            with file.open("rb") as stream:
                batches.append(pickle.load(stream, encoding="latin1"))
        count = sum(len(batch["labels"]) for batch in batches)
        images = empty((count, *self.image_shape), dtype=torch.uint8)
        labels = empty((count,), dtype=torch.int64)
        end = count
        while batches:  # from the last one on, which is let go when it is copied
            batch = batches.pop()
            part = slice(end - len(batch["labels"]), end)
            images[part] = torch.from_numpy(batch["data"]).view(-1, *self.image_shape)
            labels[part] = torch.tensor(batch["labels"])
            end = part.start
        return images, labels


class FashionMNISTSource(Source):
    """FashionMNIST in its IDX format, through torchvision: https://github.com/zalandoresearch/fashion-mnist."""

    class_names = tuple(torchvision.datasets.FashionMNIST.classes)
    image_shape = (1, 28, 28)
    mean = (0.0,)
    std = (256 / 255,)  # pixels are divided by 256

    def __init__(self, root: str) -> None:
        self.root = root
        names = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        self.files = [Path(root, "FashionMNIST", "raw", name) for name in names]

    def prepare(self) -> None:
        """Download what is missing, and check the length of every file against its own header.

        torchvision checks the extracted files only for being there.
        """
        folder = Path(self.root, "FashionMNIST", "raw")
        if not all(file.exists() for file in self.files):
            with _download("FashionMNIST", self.root, folder, ", ".join(f"{file.name}.gz" for file in self.files)):
                torchvision.datasets.FashionMNIST(self.root, download=True)
        counts = {file.name: self._count(file) for file in self.files}
        for part in ("train", "t10k"):
            images, labels = (n for name, n in counts.items() if name.startswith(part))
            if images != labels:
                raise UserError(f"{folder}: {part} has {images} images but {labels} labels: replace these files")

    def _count(self, file: Path) -> int:
        """Number of items of an IDX file: magic number, sizes (big-endian), then a byte per value."""
        shape = self.image_shape[1:] if "idx3" in file.name else ()
        with file.open("rb") as stream:
            header = stream.read(8 + 4 * len(shape)).ljust(8 + 4 * len(shape), b"\0")
        magic, count, *sizes = struct.unpack(f">{len(header) // 4}I", header)
        whole = len(header) + count * math.prod(shape)
        if magic != 0x801 + len(shape) or tuple(sizes) != shape or file.stat().st_size != whole:
            raise UserError(f"{file} is truncated or corrupted: delete it to have it downloaded again")
        return count

    def load(self, split: SplitName, once: Once = alone) -> Split:  # noqa: D102
        return Split(*once(partial(self._read, split)))

    def _read(self, split: SplitName, empty: Empty) -> tuple[Tensor, Tensor]:
        part = "train" if split == "train" else "t10k"
        images_file, labels_file = (file for file in self.files if file.name.startswith(part))
        count = self._count(images_file)
        images = empty((count, *self.image_shape), dtype=torch.uint8)
        with images_file.open("rb") as stream:
            stream.seek(16)
            stream.readinto(images.numpy())  # type: ignore[arg-type]
        labels = empty((count,), dtype=torch.int64)
        return images, labels.copy_(torch.from_numpy(np.fromfile(labels_file, np.uint8, offset=8)))

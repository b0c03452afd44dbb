"""The user's own images: files in class folders, decoded when they are read."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from PIL import Image, UnidentifiedImageError
from rich import get_console
from rich.progress import Progress
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.transforms.functional import pil_to_tensor

from app.data.sources import EMBEDDED, Source, Split, SplitName, Workers
from app.errors import UserError


class FileSplit(Split):
    """Labelled image files, decoded and resized when they are read.

    Args:
        samples: Path and label of each image.
        image_shape: (C, H, W) of an item; C is 1 (grey) or 3 (RGB).
    """

    def __init__(self, samples: Sequence[tuple[str, int]], image_shape: tuple[int, int, int]) -> None:
        self.names: Sequence[str] = [path for path, _ in samples]
        self.labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
        self.image_shape, self.mapped, self.left_out = image_shape, False, 0
        self._images = None

    def __getitem__(self, index: int) -> Tensor:
        channels, height, width = self.image_shape
        try:
            with Image.open(self.names[index]) as file:
                deep = file.mode.startswith("I;16")  # convert() would cut 16 bits off at 255
                picture = Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)) if deep else file
                if picture.mode in ("I", "F"):
                    raise ValueError(f"pixels of 32 bits, mode {picture.mode}")
                image = picture.convert("L" if channels == 1 else "RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            reason = "not an image" if isinstance(error, UnidentifiedImageError) else str(error)
            raise UserError(f"{self.names[index]} cannot be read ({reason}): replace or remove this file") from error
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return pil_to_tensor(image)

    def tensor(self, num_workers: int = 0) -> Tensor:  # noqa: D102
        if self._images is None:
            needed, free = len(self) * math.prod(self.image_shape), psutil.virtual_memory().available
            if needed > free:
                raise UserError(
                    f"{len(self):,} images of {'×'.join(map(str, self.image_shape))} take {needed / 2**30:.1f} GiB, "
                    f"of {free / 2**30:.1f} GiB of free memory: give --data.placement disk, or a smaller --data.size"
                )
            images = torch.empty((len(self), *self.image_shape), dtype=torch.uint8)
            for part, block in zip(images.split(self._block), self.blocks(num_workers), strict=True):
                part.copy_(block)
            self._images = images
        return self._images

    def blocks(self, num_workers: int, wrong: dict[int, UserError] | None = None) -> Iterator[Tensor]:  # noqa: D102
        parts = [range(len(self))[start : start + self._block] for start in range(0, len(self), self._block)]
        workers = Workers(self.__getitem__, parts, self.image_shape, min(num_workers, len(parts)))
        console = get_console()
        silent = not console.is_terminal or os.environ.get("LOCAL_RANK", "0") != "0"
        with Progress(console=console, transient=True, disable=silent) as progress:
            task = progress.add_task(f"decoding {len(self):,} images", total=len(parts))
            if wrong is None:
                for images in workers:
                    yield images
                    progress.advance(task)
                return
            for part, (images, errors) in zip(parts, workers.with_errors(), strict=True):
                wrong.update({part[place]: error for place, error in errors.items()})
                yield images
                progress.advance(task)


class FolderSource(Source):
    """The user's own images: `root/train/<class>/*.jpg`, with `val` and `test` alike where there are any."""

    def __init__(
        self,
        root: str,
        size: int | tuple[int, int],
        channels: Literal[1, 3],
        mean: Sequence[float],
        std: Sequence[float],
        predict_dir: str | None,
        skips: bool = False,
    ) -> None:
        self.root = root
        self.predict_dir = predict_dir
        self.skips = skips
        height, width = (size, size) if isinstance(size, int) else size
        self.image_shape = (channels, height, width)
        self.mean, self.std = mean, std
        folders: list[SplitName] = [name for name in ("train", "val", "test") if Path(root, name).is_dir()]
        self.splits = [*folders, "predict"] if predict_dir is not None or "test" in folders else folders
        try:
            folders_of_classes, self._class_to_idx = find_classes(str(Path(root, "train")))
        except FileNotFoundError as error:
            raise UserError(
                f"{Path(root, 'train')} has no class folders: --data.root must hold train/<class>/*.jpg or "
                f"*.png{', so give ' + str(Path(root).parent) if Path(root).name == 'train' else ''}, {EMBEDDED}"
            ) from error
        except OSError as error:
            raise UserError(f"{Path(root, 'train')} cannot be read ({error.strerror})") from error
        # a name that is no UTF-8 can be neither printed nor drawn
        self.class_names = [
            name.encode(errors="surrogateescape").decode(errors="replace") for name in folders_of_classes
        ]

    def prepare(self) -> None:
        """Look through the folders: what cannot be read, or is no image where one should be, is an error."""
        for split in (name for name in self.splits if name != "predict"):
            folder = Path(self.root, split)
            _look_through(folder)
            unknown = {d.name for d in folder.iterdir() if d.is_dir()} - set(self._class_to_idx)
            if unknown:
                raise UserError(f"{folder} has classes that train/ has not: {', '.join(sorted(unknown))}")
            samples = self._samples(folder)
            if not samples:
                raise UserError(f"{folder} holds no images ({', '.join(IMG_EXTENSIONS)}): put them in class folders")
            empty = set(self._class_to_idx.values()) - {label for _, label in samples} if split == "train" else ()
            for label in sorted(empty):
                raise UserError(
                    f"{folder / sorted(self._class_to_idx)[label]} holds no images ({', '.join(IMG_EXTENSIONS)}): put "
                    "some there, or remove the folder"
                )
        if self.predict_dir is not None:
            _look_through(Path(self.predict_dir))

    def _samples(self, folder: Path) -> list[tuple[str, int]]:
        return make_dataset(str(folder), self._class_to_idx, extensions=IMG_EXTENSIONS, allow_empty=True)

    def encoded(self, split: SplitName) -> Sequence[str]:  # noqa: D102
        return [path for path, _ in self._labelled(split)]

    def load(self, split: SplitName) -> Split:  # noqa: D102
        return FileSplit(self._labelled(split), self.image_shape)

    def _labelled(self, split: SplitName) -> list[tuple[str, int]]:
        """Path and label of each image; the label is -1 in `predict_dir`."""
        if split != "predict" or self.predict_dir is None:
            return self._samples(Path(self.root, "test" if split == "predict" else split))
        paths = sorted(p for p in Path(self.predict_dir).rglob("*") if p.suffix.lower() in IMG_EXTENSIONS)
        if not paths:
            raise UserError(f"--data.predict_dir {self.predict_dir} holds no images")
        return [(str(path), -1) for path in paths]


def _look_through(folder: Path) -> None:
    """Refuse what a folder of images must not hold, and what of it cannot be read, by name.

    A pipe would be waited for; a link may lead to any file of this machine.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _look_through(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                kind = "a link" if entry.is_symlink() else "no file, but a pipe, a socket or a device"
                raise UserError(f"{entry.path} is {kind}: remove it, or put a copy there")
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be read ({error.strerror}): give the right to, or remove it"
        ) from error

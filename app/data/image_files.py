"""Source of a user's images: files in class folders."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from PIL import Image, UnidentifiedImageError
from rich import get_console
from rich.progress import Progress
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.functional import pil_to_tensor

from app.data.sources import EMBEDDED, Source, Split, SplitName, Workers
from app.errors import UserError

SPLITS: Sequence[SplitName] = ("train", "val", "test")


def pixels(picture: Image.Image, image_shape: Sequence[int]) -> Tensor:
    """Return a picture's pixels in a shape, uint8 (C, H, W); C is 1 (grey) or 3 (RGB)."""
    channels, height, width = image_shape
    if picture.mode.startswith("I;16"):  # convert() would clip 16 bits at 255
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits, mode {picture.mode}")
    image = picture.convert("L" if channels == 1 else "RGB")
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return pil_to_tensor(image)


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
        try:
            with Image.open(self.names[index]) as file:
                return pixels(file, self.image_shape)
        except Exception as error:  # PIL's decoders raise any type on a damaged file
            reason = "not an image" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
            reason = reason or type(error).__name__
            raise UserError(
                f"{self.names[index]} cannot be read ({reason}): replace it, or --data.on_bad_image skip"
            ) from error

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
    """Source of a user's images: `root/train/<class>/*.jpg`, optional `val` and `test`; or `root/<class>/*.jpg`."""

    def __init__(
        self,
        root: str,
        size: int | tuple[int, int],
        channels: Literal[1, 3],
        mean: Sequence[float],
        std: Sequence[float],
        predict_dir: str | Sequence[str] | None,
        skips: bool = False,
    ) -> None:
        self.root = root
        self.predict_dir = predict_dir
        self.skips = skips
        height, width = (size, size) if isinstance(size, int) else size
        self.image_shape = (channels, height, width)
        self.mean, self.std = mean, std
        place = Path(root)
        names = _folders(place) if place.exists() else []
        self._places: dict[SplitName, Path] = {name: place / name for name in SPLITS if name in names}
        if not self._places and place.name != "train":
            self._places["train"] = place
        folders = [*self._places]
        self.splits = [*folders, "predict"] if predict_dir is not None or "test" in folders else folders
        train = self._places.get("train", place / "train")
        self._classes = _folders(train) if train.exists() else []
        if not self._classes:
            hint = f", so give {place.parent}" if place.name == "train" else ""
            raise UserError(
                f"{train} has no class folders: --data.root must hold train/<class>/*.jpg or *.png, or "
                f"<class>/*.jpg{hint}, {EMBEDDED}"
            )
        # replace bytes that are not UTF-8, because they cannot be printed
        self.class_names = [name.encode(errors="surrogateescape").decode(errors="replace") for name in self._classes]

    def prepare(self) -> None:
        """Check that folders are readable, classes of all splits match, and classes have images."""
        for split, place in self._places.items():
            unknown = set(_folders(place)) - set(self._classes)
            if unknown:
                raise UserError(f"{place} has classes that train/ lacks: {', '.join(sorted(unknown))}")
            labels = {label for _, label in self._samples(split)}
            empty = [name for label, name in enumerate(self._classes) if label not in labels]
            if empty and (split == "train" or not labels):
                where, kinds = place / empty[0], ", ".join(IMG_EXTENSIONS)
                raise UserError(f"{where} holds no images ({kinds}): put some there, or hide it as .{where.name}")
        if self.predict_dir is not None:
            self._samples("predict")

    def encoded(self, split: SplitName) -> Sequence[str]:  # noqa: D102
        return [file for file, _ in self._samples(split)]

    def load(self, split: SplitName) -> Split:  # noqa: D102
        return FileSplit(self._samples(split), self.image_shape)

    def _samples(self, split: SplitName) -> list[tuple[str, int]]:
        """Return the path and label of each image; the label is -1 in `predict_dir`."""
        if split == "predict" and self.predict_dir is not None:
            places = [self.predict_dir] if isinstance(self.predict_dir, str) else self.predict_dir
            return [(file, -1) for file in files_in(places)]
        place = self._places["test" if split == "predict" else split]
        classes = [(label, place / name) for label, name in enumerate(self._classes)]
        return [(file, label) for label, each in classes if each.is_dir() for file in _images(str(each), {})]


def files_in(places: Iterable[str]) -> list[str]:
    """Return the image files among files and folders, in order.

    Raises:
        UserError: When a folder is missing or holds no images.
    """
    files: list[str] = []
    for place in places:
        found = [place] if os.path.isfile(place) else _images(place, {})
        if not found:
            raise UserError(f"{place} holds no images ({', '.join(IMG_EXTENSIONS)})")
        files += found
    return files


def _images(folder: str, above: dict[tuple[int, int], str]) -> list[str]:
    """Return the image files below a folder, folder by folder.

    Args:
        folder: Folder to search.
        above: Parent folders by device and inode, to detect a link that leads back to one.
    """
    entries, state = _entries(folder), os.stat(folder)
    files, folders, here = [], [], (state.st_dev, state.st_ino)
    if here in above:
        raise UserError(f"{folder} links back to its parent folder {above[here]}: correct this link")
    for entry in entries:
        if entry.is_dir():
            folders += _images(entry.path, {**above, here: folder})
        elif entry.name.lower().endswith(IMG_EXTENSIONS):
            files.append(entry.path)
    return files + sorted(folders, key=os.path.split)


def _folders(place: Path) -> list[str]:
    """Return the sorted names of a folder's subfolders."""
    return [entry.name for entry in _entries(str(place)) if entry.is_dir()]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the sorted, visible entries of a folder.

    Raises:
        UserError: When the folder is unreadable, or contains a broken link or a pipe, because a pipe blocks.
    """
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror})") from error
    for entry in entries:
        with suppress(OSError):  # a link to itself raises
            if entry.is_dir() or entry.is_file():
                continue
        if entry.is_symlink():
            raise UserError(f"{entry.path} is a link to {os.readlink(entry.path)}, which is missing: correct this link")
        raise UserError(f"{entry.path} is a pipe, a socket or a device, not a file: move it elsewhere")
    return sorted(entries, key=lambda entry: entry.name)

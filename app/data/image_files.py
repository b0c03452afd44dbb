"""Sources of a user's image files, and class folders."""

import os
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from rich import get_console
from rich.progress import Progress
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.functional import pil_to_tensor

from app.data.geometry import Geometry
from app.data.sources import (
    EMBEDDED,
    Errors,
    Images,
    Source,
    Split,
    SplitName,
    Workers,
    check_memory,
    problems,
    split_of,
    splits_in,
)
from app.errors import UserError, nearest, one_line
from app.record.words import listed

REPLACE = "replace unreadable images, or --data.on_bad_image skip"
# the only formats to open: PIL has riskier ones, such as EPS, for which it starts Ghostscript
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "AVIF", "JPEG2000")
SUFFIXES = (
    *IMG_EXTENSIONS,
    ".avif",
    ".gif",
    ".jfif",
)  # other files are opened to see if they are images
# dimensions of (C, h, w) to flip for each EXIF orientation; from 5 on, height and width are
# exchanged first
FLIPS = {2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}


def open_image(file: str | BinaryIO) -> Image.Image:
    """Open an image with PIL, in one of `FORMATS` whatever its name is."""
    return Image.open(file, formats=FORMATS)


def orientation(picture: Image.Image) -> int:
    """Return a picture's EXIF orientation, 1 to 8. For formats other than JPEG, load the picture first."""
    try:
        stored = picture.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # PIL raises exceptions of any type for broken EXIF data
        stored = None
    return stored if stored in FLIPS else 1


def pixels(picture: Image.Image, channels: int) -> Tensor:
    """Return a picture's pixels, turned upright as by PIL's `exif_transpose`: uint8 (C, h, w).

    Args:
        picture: The picture.
        channels: 1 (grey) or 3 (RGB).
    """
    image = _stored(picture, channels)
    turn = orientation(picture)
    if turn == 1:
        return image
    if turn >= 5:
        image = image.transpose(1, 2)
    return image.flip(FLIPS[turn])


def reduce(picture: JpegImageFile, channels: int, geometry: Geometry) -> None:
    """Let PIL decode a JPEG picture at a smaller size, which is at least the size that a training image keeps."""
    is_exchanged = orientation(picture) >= 5
    height, width = picture.size if is_exchanged else reversed(picture.size)
    height, width = geometry.kept_size(height, width)
    picture.draft(
        "L" if channels == 1 else None, (height, width) if is_exchanged else (width, height)
    )


def _stored(picture: Image.Image, channels: int) -> Tensor:
    """Return a picture's pixels as they are stored, without its EXIF orientation: uint8 (C, h, w)."""
    match picture:
        case JpegImageFile(format="JPEG", mode="RGB", decoderconfig=() | (1, 0), fp=file) if (
            file and channels == 3
        ):
            # at full size, torchvision decodes the same pixels as PIL, but faster; if it fails, PIL
            # reports the error
            with suppress(RuntimeError):
                file.seek(0)
                return decode_jpeg(
                    torch.frombuffer(bytearray(file.read()), dtype=torch.uint8), ImageReadMode.RGB
                )
    if picture.mode.startswith("I;16"):  # convert() would clip 16 bits at 255
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits, mode {picture.mode}")
    return pil_to_tensor(picture.convert("L" if channels == 1 else "RGB"))


class FileSplit(Split):
    """Labelled image files, decoded and resized when they are read.

    Args:
        names: Path of each image.
        labels: Label of each image.
        image_shape: Shape of an image, (C, H, W); C is 1 (grey) or 3 (RGB).
        geometry: Resizing and cropping of the images.
        ragged: Geometry of the training crop if the images keep different sizes; None if all are
            resized to one size.
    """

    def __init__(
        self,
        names: Sequence[str] | None,
        labels: Sequence[int],
        image_shape: Sequence[int],
        geometry: Geometry,
        ragged: Geometry | None = None,
    ) -> None:
        self.names = names
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.image_shape = image_shape
        self.geometry = geometry
        self.ragged = ragged
        self.mapped = False
        self._images = None

    def _open(self, index: int) -> Image.Image:
        return open_image(self._name(index))

    def _name(self, index: int) -> str:
        assert self.names is not None
        return self.names[index]

    def __getitem__(self, index: int) -> Tensor:
        channels = self.image_shape[0]
        try:
            with self._open(index) as file:
                if self.ragged is not None and isinstance(file, JpegImageFile):
                    reduce(file, channels, self.ragged)
                image = pixels(file, channels)
        except Exception as error:  # PIL's decoders raise exceptions of any type for a damaged file
            reason = one_line(str(error)) or type(error).__name__
            reason = "not an image" if isinstance(error, UnidentifiedImageError) else reason
            name = self._name(index)
            raise UserError(f"{name} cannot be read ({reason}): {REPLACE}") from error
        return self.ragged.keep(image) if self.ragged else self.geometry.evaluated(image)

    def tensor(self, num_workers: int = 0) -> Tensor:  # noqa: D102
        if self._images is None:
            check_memory(
                len(self), self.image_shape, "give --data.placement disk, or a smaller --data.size"
            )
            images = torch.empty((len(self), *self.image_shape), dtype=torch.uint8)
            for view, block in zip(
                images.split(self._block), self.blocks(num_workers), strict=True
            ):
                view.copy_(block)
            self._images = images
        return self._images

    def blocks(  # noqa: D102
        self, num_workers: int, wrong: Errors | None = None, file: str = ""
    ) -> Iterator[Images]:
        batches = [
            range(len(self))[start : start + self._block]
            for start in range(0, len(self), self._block)
        ]
        target = file if self.ragged else self.image_shape
        workers = Workers(self.__getitem__, batches, target, min(num_workers, len(batches)))
        console = get_console()
        found = {} if wrong is None else wrong
        silent = not console.is_terminal or os.environ.get("LOCAL_RANK", "0") != "0"
        with Progress(console=console, transient=True, disable=silent) as progress:
            task = progress.add_task(f"decoding {len(self):,} images", total=len(batches))
            for batch, (images, errors) in zip(batches, workers.with_errors(), strict=True):
                found.update({batch[place]: error for place, error in errors.items()})
                if wrong is not None or not found:
                    yield images
                progress.advance(task)
        if wrong is None and found:
            # a new error, because this frame refers to the others: a cycle would keep the frame and
            # its workers alive
            raise UserError(f"{listed(problems(found))}: {REPLACE}")


class EncodedSource(Source):
    """Source of encoded images, such as JPEG files.

    Attributes:
        geometry: Resizing and cropping of the images.
        predict_dir: Images and folders of images for `predict`; None to predict on the test split.
    """

    geometry: Geometry  # set by EncodedImages, like image_shape, mean, std, skips and other_files
    predict_dir: str | Sequence[str] | None = None

    def ragged(self, split: SplitName) -> Geometry | None:  # noqa: D102
        return self.geometry if split == "train" and self.geometry.crop != "none" else None

    def settings(self, split: SplitName) -> Sequence[Any]:  # noqa: D102
        sizes = self.geometry
        if self.ragged(split):
            return [self.skips, self.image_shape[0], sizes.crop, sizes.interpolation, *sizes.kept]
        return [*super().settings(split), sizes.interpolation, sizes.resize]

    def prepare(self) -> None:
        """Check that `predict_dir` holds images."""
        if self.predict_dir is not None:
            self._samples("predict")

    def encoded(self, split: SplitName) -> Sequence[str]:  # noqa: D102
        return [file for file, _ in self._samples(split)]

    def load(self, split: SplitName) -> Split:  # noqa: D102
        files, labels = zip(*self._samples(split), strict=True)
        return FileSplit(files, labels, self.image_shape, self.geometry, self.ragged(split))

    def _samples(self, split: SplitName) -> list[tuple[str, int]]:
        """Return the path and label of each image. Images in `predict_dir` have the label -1."""
        if split != "predict" or self.predict_dir is None:
            return self._files("test" if split == "predict" else split)
        places = [self.predict_dir] if isinstance(self.predict_dir, str) else self.predict_dir
        others = self.other_files[split] = Counter()
        return [(file, -1) for file in files_in(places, others)]

    @abstractmethod
    def _files(self, split: SplitName) -> list[tuple[str, int]]:
        """Return the path and label of each file of a split."""


class FolderSource(EncodedSource):
    """Source of a user's images in class folders.

    Two layouts are possible: `root/train/<class>/*.jpg`, with optional validation and test folders
    beside `train`, named as in `SPLIT_NAMES`; or `root/<class>/*.jpg`. If a folder holds only one
    folder, which holds folders, as in `root/data/train`, the inner folder is read. A test folder
    without class folders is for `predict`.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        given = _existing(root)
        place = _inner(given)
        names = _folders(place)
        splits = splits_in(place, names)
        beside = listed([name for name in names if name not in splits.values()])
        if "train" in splits and _folders(place / splits["train"]):
            if beside:
                rank_zero_info(f"{place}: {beside} not read, because no split has such a name")
        elif beside:  # class folders, of which one may be named train
            words = re.split(r"[\W\d_]", " ".join(names))
            if {"val", "test"} & {split_of(word) for word in words}:
                raise UserError(
                    f"{place} has {listed(names)}, which look like classes and splits: move class folders into "
                    f"{place}/train, and name other splits val and test"
                )
            splits = {}
        self._places = {split: _inner(place / name) for split, name in splits.items()}
        if not splits and given.name != "train":
            self._places["train"] = place
        train = self._places.get("train")
        self._classes = _folders(train) if train else []
        if not self._classes:
            hint = f", so give {given.parent}" if given.name == "train" else ""
            raise UserError(
                f"{train or place} has no class folders: --data.root must hold train/<class>/*.jpg or "
                f"*.png, or <class>/*.jpg{hint}, {EMBEDDED}"
            )
        for split, folder in [*self._places.items()]:
            labelled = {*_folders(folder)}
            if len(labelled) < 2 and not labelled & {*self._classes}:
                rank_zero_info(
                    f"{folder} has no class folders, so that only `predict` reads its images"
                )
                self.predict_dir = [*(self.predict_dir or []), str(self._places.pop(split))]
        self.splits = [*self._places]
        # replace bytes that are not UTF-8, because they cannot be printed
        self.class_names = [
            name.encode(errors="surrogateescape").decode(errors="replace") for name in self._classes
        ]

    def prepare(self) -> None:
        """Check that each training class has images, and that other splits have images of these classes only."""
        for split, place in self._places.items():
            unknown = set(_folders(place)) - set(self._classes)
            if unknown:
                raise UserError(f"{place} has classes that train/ lacks: {listed(sorted(unknown))}")
            labels = {label for _, label in self._files(split)}
            empty = [name for label, name in enumerate(self._classes) if label not in labels]
            if empty and (split == "train" or not labels):
                where = place / empty[0]
                raise UserError(
                    f"{where} holds no images: put some there, or hide it as .{where.name}"
                )
        super().prepare()

    def _files(self, split: SplitName) -> list[tuple[str, int]]:
        place = self._places[split]
        strays = [entry.name for entry in _entries(place) if entry.is_file()]
        others = self.other_files[split] = Counter(map(_suffix, strays))
        classes = [(label, place / name) for label, name in enumerate(self._classes)]
        return [
            (file, label)
            for label, folder in classes
            if folder.is_dir()
            for file in _images(folder, others)
        ]


def files_in(places: Iterable[str], others: Counter[str]) -> list[str]:
    """Return each given file, and the image files below each given folder, in order.

    Args:
        places: Paths of files and folders.
        others: Counter of the folders' other files by suffix, which is updated.

    Raises:
        UserError: When a folder is missing or holds no images.
    """
    files: list[str] = []
    for place in places:
        images = [place] if os.path.isfile(place) else _images(place, others)
        if not images:
            raise UserError(f"{place} holds no images{': ' * bool(others)}{counted(others)}")
        files += images
    return files


def _images(
    folder: str | Path, others: Counter[str], above: Mapping[tuple[int, int], str] = {}
) -> list[str]:
    """Return the image files below a folder, folder by folder.

    Args:
        folder: Folder to search.
        others: Counter of other files by suffix, which is updated.
        above: Parent folders by device and inode, to detect a link that leads back to a parent.
    """
    entries = _entries(folder)
    state = os.stat(folder)
    files = []
    folders = []
    here = (state.st_dev, state.st_ino)
    if here in above:
        raise UserError(
            f"{folder} links back to its parent folder {above[here]}: correct this link"
        )
    for entry in entries:
        if entry.is_dir():
            folders += _images(entry.path, others, {**above, here: str(folder)})
        elif entry.name.lower().endswith(SUFFIXES) or _is_image(
            entry.path, entry.stat().st_mtime_ns
        ):
            files.append(entry.path)
        else:
            others[_suffix(entry.name)] += 1
    return files + sorted(folders, key=os.path.split)


@cache
def _is_image(file: str, modified: int) -> bool:
    """Return whether PIL can open a file as an image.

    Args:
        file: Path of the file.
        modified: Time of the file's last modification, for the cache of results.
    """
    try:
        with open_image(file):
            return True
    except Exception:  # PIL raises exceptions of any type
        return False


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower() or "without suffix"


def counted(others: Counter[str]) -> str:
    """Format numbers of files by suffix, such as `3 .txt, 1 without suffix`."""
    return listed([f"{count:,} {suffix}" for suffix, count in others.most_common()])


def _existing(root: str) -> Path:
    """Return a folder's path.

    Raises:
        UserError: When the folder is missing; the message has the nearest existing name.
    """
    place = Path(root)
    if place.is_dir():
        return place
    missing = place.absolute()
    while not missing.parent.is_dir():
        missing = missing.parent
    near = (
        nearest(missing.name, os.listdir(missing.parent))
        or f": give the folder of your images, {EMBEDDED}"
    )
    raise UserError(f"--data.root {root}: {missing.parent} has no folder {missing.name}{near}")


def _inner(place: Path) -> Path:
    """Return the innermost folder that is alone in its parent folder, and holds folders itself."""
    names = _folders(place)
    if len(names) == 1 and _folders(place / names[0]):
        return _inner(place / names[0])
    return place


def _folders(place: Path) -> list[str]:
    """Return the sorted names of a folder's subfolders."""
    return [entry.name for entry in _entries(place) if entry.is_dir()]


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the sorted, visible entries of a folder.

    Raises:
        UserError: When the folder is unreadable, or contains a broken link or a special file, such
            as a pipe.
    """
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise UserError(f"{folder} cannot be read ({getattr(error, 'strerror', error)})") from error
    for entry in entries:
        with suppress(OSError):  # raised for a link to itself
            if entry.is_dir() or entry.is_file():
                continue
        if entry.is_symlink():
            raise UserError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, which is missing: correct this link"
            )
        raise UserError(
            f"{entry.path} is a pipe, a socket or a device, not a file: move it elsewhere"
        )
    return sorted(entries, key=lambda entry: entry.name)

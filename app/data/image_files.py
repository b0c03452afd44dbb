"""Sources of a user's image files, and class folders."""

import math
import os
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from rich import get_console
from rich.progress import track
from torch import Tensor
from torch.utils.data import BatchSampler
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.functional import pil_to_tensor

from app.data.geometry import Geometry
from app.data.sources import (
    EMBEDDED,
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
from app.system.files import open_file

REPLACE = "replace unreadable images, or --data.on_bad_image skip"
# the only formats to open: PIL has riskier ones, such as EPS, for which it starts Ghostscript
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "AVIF", "JPEG2000")
# files with other suffixes are opened to see if they are images
SUFFIXES = (*IMG_EXTENSIONS, ".avif", ".gif", ".jfif")
MODES = {1: "L", 3: "RGB"}  # of PIL, by number of channels
BLOCK = 2**20  # bytes of the images that a worker decodes at a time

LabelledFile = tuple[str, int]  # path, and number of the class or -1


def open_image(file: str | BinaryIO) -> Image.Image:
    """Open an image with PIL, in one of `FORMATS` whatever its name is."""
    return Image.open(file, formats=FORMATS)


def pixels(picture: Image.Image, channels: int) -> Tensor:
    """Return a picture's pixels, turned upright by its EXIF orientation: uint8 (C, h, w).

    Args:
        picture: The picture.
        channels: 1 (grey) or 3 (RGB).
    """
    if (
        isinstance(picture, JpegImageFile)
        and picture.format == "JPEG"
        and picture.mode == "RGB"
        and channels == 3
        and picture.decoderconfig in ((), (1, 0))
        and picture.fp is not None
    ):
        # at full size, torchvision decodes the same pixels as PIL, but faster; if it fails, PIL
        # reports the error
        with suppress(RuntimeError):
            picture.fp.seek(0)
            content = torch.frombuffer(bytearray(picture.fp.read()), dtype=torch.uint8)
            return decode_jpeg(content, ImageReadMode.RGB, apply_exif_orientation=True)
    picture.load()
    with suppress(Exception):  # PIL raises exceptions of any type for broken EXIF data
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16"):  # convert() would clip 16 bits at 255
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits, mode {picture.mode}")
    return pil_to_tensor(picture.convert(MODES[channels]))


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
        self._images = None

    def _open(self, index: int) -> BinaryIO:
        return open_file(self.name(index))

    def __getitem__(self, index: int) -> Tensor:
        return self._resize(self._pixels(index))

    def _resize(self, image: Tensor) -> Tensor:
        if self.ragged is not None:
            return self.ragged.keep(image)
        return self.geometry.evaluated(image)

    def _pixels(self, index: int) -> Tensor:
        """Decode an image: uint8 (C, h, w)."""
        channels = self.image_shape[0]
        try:
            with self._open(index) as file, open_image(file) as picture:
                if self.ragged is not None:  # PIL decodes JPEG files smaller, but above this size
                    side = max(self.ragged.kept)
                    picture.draft(MODES[channels], (side, side))
                return pixels(picture, channels)
        except Exception as error:  # PIL's decoders raise exceptions of any type for a damaged file
            reason = one_line(str(error)) or type(error).__name__
            if isinstance(error, UnidentifiedImageError):
                reason = "not an image"
            raise UserError(f"{self.name(index)} cannot be read ({reason}): {REPLACE}") from error

    def _decode(self, index: int) -> tuple[Any, list[str]]:
        """Return an image, and digests of its file, which is still in memory, and of its pixels.

        The image is an array, because each tensor from a worker would keep a file open.
        """
        image = self._pixels(index)
        with self._open(index) as file:
            contents = (file.read(), image.contiguous().numpy().data)
        digests = [blake2b(content, digest_size=8).hexdigest() for content in contents]
        return self._resize(image).numpy(), digests

    def tensor(self, num_workers: int = 0) -> Tensor:  # noqa: D102
        if self._images is None:
            remedy = "give --data.placement disk, or a smaller --data.size"
            check_memory(len(self), self.image_shape, remedy)
            images = torch.empty((len(self), *self.image_shape), dtype=torch.uint8)
            for place, image in zip(images, self.decoded(num_workers), strict=True):
                place.copy_(image)
            self._images = images
        return self._images

    def decoded(self, num_workers: int, skips: bool = False) -> Iterator[Tensor]:  # noqa: D102
        self.wrong = {}
        self.digests = []
        size = self.image_shape[1:] if self.ragged is None else self.ragged.kept
        count = max(BLOCK // (3 * math.prod(size)), 1)
        batches = list(BatchSampler(range(len(self)), count, drop_last=False))
        workers = Workers(self._decode, batches, list, min(num_workers, len(batches)))
        console = get_console()
        silent = not console.is_terminal or os.environ.get("LOCAL_RANK", "0") != "0"
        images = track(
            chain.from_iterable(workers),
            f"decoding {len(self):,} images",
            len(self),
            console=console,
            transient=True,
            disable=silent,
        )
        for index, item in enumerate(images):
            if isinstance(item, UserError):
                self.wrong[index] = item
            else:
                image, digests = item
                self.digests.append(digests)
                yield torch.from_numpy(image)
        del images, workers  # ends the processes, although an error keeps this frame
        if self.wrong and not skips:
            raise UserError(f"{problems(self.wrong)}: {REPLACE}")
        if len(self.wrong) == len(self):
            raise UserError(f"none of {len(self):,} images can be read: {problems(self.wrong)}")


class EncodedSource(Source):
    """Source of encoded images, such as JPEG files.

    Attributes:
        geometry: Resizing and cropping of the images.
        columns: Names of the columns with images and labels, if the source is a table.
    """

    geometry: Geometry  # set by EncodedImages, like image_shape, mean, std, skips and other_files
    columns: Sequence[str] = ()

    def ragged(self, split: SplitName) -> Geometry | None:  # noqa: D102
        if split == "train" and self.geometry.crop != "none":
            return self.geometry
        return None

    def settings(self, split: SplitName) -> Sequence[Any]:  # noqa: D102
        sizes = self.geometry
        common = [*self.columns, self.skips, self.image_shape[0], sizes.interpolation]
        if self.ragged(split):
            return [*common, sizes.crop, *sizes.kept]
        return [*common, *sizes.size, sizes.resize]

    def prepare(self) -> None:
        """Check that `predict_dir` holds images."""
        if self.predict_dir:
            self._samples("predict")

    def encoded(self, split: SplitName) -> Sequence[str]:  # noqa: D102
        return [file for file, _ in self._samples(split)]

    def load(self, split: SplitName) -> Split:  # noqa: D102
        files, labels = zip(*self._samples(split), strict=True)
        return FileSplit(files, labels, self.image_shape, self.geometry, self.ragged(split))

    def _samples(self, split: SplitName) -> list[LabelledFile]:
        """Return the path and label of each image. Images in `predict_dir` have the label -1."""
        if split != "predict" or not self.predict_dir:
            return self._files(split)
        self.other_files[split] = Counter()
        return [(file, -1) for file in files_in(self.predict_dir, self.other_files[split])]

    @abstractmethod
    def _files(self, split: SplitName) -> list[LabelledFile]:
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
        others = [name for name in names if name not in splits.values()]
        if others and "train" in splits and _folders(place / splits["train"]):
            rank_zero_info(f"{place}: {listed(others)} not read, because no split has such a name")
        elif others:  # class folders, of which one may be named train
            words = re.split(r"[\W\d_]", " ".join(names))
            if {"val", "test"} & set(map(split_of, words)):
                raise UserError(
                    f"{place} has {listed(names)}, which look like classes and splits: "
                    f"move class folders into {place}/train, and name other splits val and test"
                )
            splits = {}
        self._places: dict[SplitName, Path] = {}
        for split, name in splits.items():
            self._places[split] = _inner(place / name)
        if not splits and given.name != "train":
            self._places["train"] = place
        self._classes = []
        if "train" in self._places:
            self._classes = _folders(self._places["train"])
        if not self._classes:
            hint = ""
            if given.name == "train":
                hint = f", so give {given.parent}"
            raise UserError(
                f"{self._places.get('train', place)} has no class folders: --data.root must hold "
                f"train/<class>/*.jpg or *.png, or <class>/*.jpg{hint}, {EMBEDDED}"
            )
        for split, folder in list(self._places.items()):
            labelled = set(_folders(folder))
            if len(labelled) < 2 and labelled.isdisjoint(self._classes):
                rank_zero_info(
                    f"{folder} has no class folders, so that only `predict` reads its images"
                )
                del self._places[split]
                self.predict_dir = [*self.predict_dir, str(folder)]
        self.splits = list(self._places)
        # replace bytes that are not UTF-8, because they cannot be printed
        self.class_names = [os.fsencode(name).decode(errors="replace") for name in self._classes]

    def prepare(self) -> None:
        """Check that training classes have images, and that other splits have no other classes."""
        for split, place in self._places.items():
            unknown = set(_folders(place)) - set(self._classes)
            if unknown:
                raise UserError(f"{place} has classes that train/ lacks: {listed(sorted(unknown))}")
            counts = Counter(label for _, label in self._files(split))
            if split != "train" and counts:
                continue
            for label, name in enumerate(self._classes):
                if not counts[label]:
                    raise UserError(
                        f"{place / name} holds no images: put some there, or hide it as .{name}"
                    )
        super().prepare()

    def _files(self, split: SplitName) -> list[LabelledFile]:
        place = self._places[split]
        strays = [entry.name for entry in _entries(place) if entry.is_file()]
        self.other_files[split] = Counter(map(_suffix, strays))
        files = []
        for label, name in enumerate(self._classes):
            if (place / name).is_dir():
                for file in _images(place / name, self.other_files[split]):
                    files.append((file, label))
        return files


class NewSource(EncodedSource):
    """Source of images to predict, prepared as a checkpoint's training images were.

    Args:
        checkpoint: Content of the checkpoint.
        file: Path of the checkpoint, for messages.

    Raises:
        UserError: When the checkpoint does not describe its training images.
    """

    def __init__(self, checkpoint: Mapping[str, Any], file: str | Path) -> None:
        images = checkpoint.get("images")
        if images is None:
            raise UserError(
                f"{file} has no class names: it is not of an ImageClassifier trained on an "
                "ImageData"
            )
        self.splits = ["predict"]
        self.class_names = tuple(images["class_names"])
        self.image_shape = tuple(images["image_shape"])
        self.mean = images["mean"]
        self.std = images["std"]
        sizes = {name: images[name] for name in ("resize", "interpolation") if name in images}
        self.geometry = Geometry(self.image_shape[1:], **sizes)

    def _files(self, split: SplitName) -> list[LabelledFile]:
        return []


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
        if os.path.isfile(place):
            files.append(place)
            continue
        images = _images(place, others)
        if not images:
            raise UserError(f"{place} holds no images: {counted(others) or 'it is empty'}")
        files += images
    return files


def _images(folder: str | Path, others: Counter[str]) -> list[str]:
    """Return the image files below a folder, folder by folder.

    Args:
        folder: Folder to search.
        others: Counter of other files by suffix, which is updated.
    """
    files = []
    for entry in _entries(folder):
        if entry.is_dir():
            files += _images(entry.path, others)
        elif entry.name.lower().endswith(SUFFIXES) or _is_image(entry.path):
            files.append(entry.path)
        else:
            others[_suffix(entry.name)] += 1
    return sorted(files, key=os.path.split)


@cache
def _is_image(name: str) -> bool:
    """Return whether PIL can open a file as an image."""
    # PIL raises exceptions of any type
    with suppress(Exception), open_file(name) as file, open_image(file):
        return True
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
    near = nearest(missing.name, os.listdir(missing.parent))
    remedy = near or f": give the folder of your images, {EMBEDDED}"
    raise UserError(f"--data.root {root}: {missing.parent} has no folder {missing.name}{remedy}")


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
        UserError: When the folder is unreadable, or contains a broken link.
    """
    try:
        entries = sorted(os.scandir(folder), key=attrgetter("name"))
    except (OSError, ValueError) as error:  # a NUL character is a ValueError
        reason = getattr(error, "strerror", error)
        raise UserError(f"{folder} cannot be read ({reason})") from error
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in visible:
        if entry.is_symlink() and not os.path.exists(entry.path):
            target = os.readlink(entry.path)
            raise UserError(
                f"{entry.path} is a link to {target}, which is missing: correct this link"
            )
    return visible

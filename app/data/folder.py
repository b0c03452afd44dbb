"""The user's own images, in a folder for each class."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.transforms.functional import pil_to_tensor

from app.data.sources import EMBEDDED, Source, Split, SplitName
from app.errors import UserError
from app.launch.sharing import Empty, Once, alone


def work_apart(worker: int) -> None:
    """Leave the process group, which Ctrl-C and SIGTERM are sent to: the loader ends its workers when it is done."""
    os.setpgrp()


class FileSplit(Split):
    """Labelled image files, decoded and resized when they are read.

    Args:
        samples: Path and label of each image.
        image_shape: (C, H, W) of an item; C is 1 (grey) or 3 (RGB).
    """

    def __init__(self, samples: Sequence[tuple[str, int]], image_shape: tuple[int, int, int]) -> None:
        self.names = [path for path, _ in samples]
        self.labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
        self.image_shape = image_shape
        self._images: Tensor | None = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Tensor:
        assert self.names is not None
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

    def tensor(self, num_workers: int = 0, once: Once = alone) -> Tensor:  # noqa: D102
        if self._images is None:
            (self._images,) = once(partial(self._decode, num_workers))
        return self._images

    def _decode(self, num_workers: int, empty: Empty) -> tuple[Tensor]:
        images = empty((len(self), *self.image_shape), dtype=torch.uint8)
        parts = images.split(256)
        loader = DataLoader(
            self,
            batch_size=256,
            num_workers=min(num_workers, len(parts)),
            worker_init_fn=work_apart,
            generator=torch.Generator(),  # it would draw from global random state, on this rank alone
        )
        for part, decoded in zip(parts, loader, strict=True):
            part.copy_(decoded)
        return (images,)


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
    ) -> None:
        self.root = root
        self.predict_dir = predict_dir
        height, width = (size, size) if isinstance(size, int) else size
        self.image_shape = (channels, height, width)
        self.mean, self.std = mean, std
        folders: list[SplitName] = [name for name in ("train", "val", "test") if Path(root, name).is_dir()]
        self.splits = [*folders, "predict"] if predict_dir is not None or "test" in folders else folders
        try:
            self.class_names, self._class_to_idx = find_classes(str(Path(root, "train")))
        except FileNotFoundError as error:
            raise UserError(
                f"{Path(root, 'train')} has no class folders: --data.root must hold train/<class>/*.jpg or "
                f"*.png{', so give ' + str(Path(root).parent) if Path(root).name == 'train' else ''}, {EMBEDDED}"
            ) from error

    def prepare(self) -> None:  # noqa: D102
        for split in {"train", "val", "test"} & set(self.splits):
            folder = Path(self.root, split)
            unknown = {d.name for d in folder.iterdir() if d.is_dir()} - set(self.class_names)
            if unknown:
                raise UserError(f"{folder} has classes that train/ has not: {', '.join(sorted(unknown))}")
            if not self._samples(folder):
                raise UserError(f"{folder} holds no images ({', '.join(IMG_EXTENSIONS)}): put them in class folders")

    def _samples(self, folder: Path) -> list[tuple[str, int]]:
        return make_dataset(str(folder), self._class_to_idx, extensions=IMG_EXTENSIONS, allow_empty=True)

    def load(self, split: SplitName, once: Once = alone) -> Split:  # noqa: D102
        if split == "predict" and self.predict_dir is not None:
            paths = sorted(p for p in Path(self.predict_dir).rglob("*") if p.suffix.lower() in IMG_EXTENSIONS)
            if not paths:
                raise UserError(f"--data.predict_dir {self.predict_dir} holds no images")
            return FileSplit([(str(path), -1) for path in paths], self.image_shape)
        folder = Path(self.root, "test" if split == "predict" else split)
        return FileSplit(self._samples(folder), self.image_shape)

"""Data modules for `--data`: data sets by name, and the user's own images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jsonargparse.typing import NonNegativeInt, PositiveInt

from app.data.geometry import Geometry
from app.data.hugging_face import HuggingFaceSource
from app.data.image_files import EncodedSource, FolderSource, NewSource
from app.data.module import ImageData
from app.data.sources import CIFAR10Source, FashionMNISTSource
from app.data.synthetic import SyntheticSource
from app.data.tables import TableSource
from app.errors import UserError
from app.system.torch_files import load


class CIFAR10(ImageData):
    """CIFAR-10 data module: 50,000 training and 10,000 test images of 32×32 in ten classes.

    Args:
        root: Directory that contains `cifar-10-batches-py`; a missing data set is downloaded there.
        **kwargs: As for `ImageData`.
    """

    def __init__(self, root: str = "data", **kwargs: Any) -> None:
        super().__init__(CIFAR10Source(root), **kwargs)


class FashionMNIST(ImageData):
    """FashionMNIST data module: 60,000 training and 10,000 test images of 28×28 in ten classes.

    Args:
        root: Directory that contains `FashionMNIST/raw`; a missing data set is downloaded into it.
        **kwargs: As for `ImageData`.
    """

    def __init__(self, root: str = "data", **kwargs: Any) -> None:
        super().__init__(FashionMNISTSource(root), **kwargs)


class EncodedImages(ImageData):
    """Data module for encoded images of any size, such as JPEG files.

    Args:
        source: The source of the images.
        size: Height and width of the images that the network gets.
        channels: 3 for colour, 1 for grey.
        mean: Mean of each channel, for pixels scaled to 0…1; by default 0.5.
        std: Standard deviation of each channel, for pixels scaled to 0…1; by default 0.5.
        resize: Shorter side of an image before the centre crop to `size`, by default `size`;
            `squash` resizes to `size` without a crop, which changes the ratio of width to height.
        interpolation: Interpolation of all resizing, with antialiasing.
        crop: Crop of training images, by the worker processes. `random`: resize to `resize`, then
            crop to `size` at a random place. `random_resized`: crop a random area, then resize it
            to `size`. `none`: crop the centre, as in evaluation.
        scale: Range of the area of a `random_resized` crop, relative to the image's area.
        predict_dir: Images and folders of images for `predict`, which needs no labels; by default
            the test split.
        on_bad_image: Reaction to an unreadable image. `error`: stop. `skip`: skip it on all ranks,
            and count it in the run's record.
        **kwargs: As for `ImageData`.
    """

    def __init__(
        self,
        source: EncodedSource,
        size: int | tuple[int, int] = 32,
        channels: Literal[1, 3] = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        resize: int | Literal["squash"] | None = None,
        interpolation: Literal["bilinear", "bicubic"] = "bilinear",
        crop: Literal["none", "random", "random_resized"] = "none",
        scale: tuple[float, float] = Geometry.scale,
        predict_dir: str | list[str] | None = None,
        on_bad_image: Literal["error", "skip"] = "error",
        **kwargs: Any,
    ) -> None:
        height, width = np.broadcast_to(size, 2).tolist()
        sides = (height, width)
        source.geometry = Geometry(sides, resize, interpolation, crop, scale)
        source.image_shape = (channels, height, width)
        source.other_files = {}
        source.mean = mean or [0.5] * channels
        source.std = std or [0.5] * channels
        for flag in ("mean", "std"):
            values = getattr(source, flag)
            if len(values) != channels:
                raise UserError(
                    f"--data.{flag} {values}: give one value for each of {channels} channels"
                )
        if isinstance(predict_dir, str):
            predict_dir = [predict_dir]
        source.predict_dir = predict_dir or source.predict_dir
        source.skips = on_bad_image == "skip"
        if source.predict_dir or "test" in source.splits:
            source.splits = list(dict.fromkeys([*source.splits, "predict"]))
        super().__init__(source, **kwargs)


class ImageFolder(EncodedImages):
    """Data module for your own images: `root/train/<class>/*.jpg`, optional `val/` and `test/`.

    Args:
        root: Directory that contains `train`, or the class folders.
        **kwargs: As for `EncodedImages`.
    """

    def __init__(self, root: str = "data", **kwargs: Any) -> None:
        super().__init__(FolderSource(root), **kwargs)


class ImageTable(EncodedImages):
    """Data module for images that a CSV file lists, one in each row.

    Args:
        csv: Path of the CSV file, separated by commas, semicolons, bars or tabs.
        file_column: Column of the images' paths, relative to the CSV file's folder.
        label_column: Column of the labels.
        split_column: Column of the splits: `train`, `val` or `test`. Without this column, all
            images are for training.
        **kwargs: As for `EncodedImages`.
    """

    def __init__(
        self,
        csv: str = "train.csv",
        file_column: str = "file",
        label_column: str = "label",
        split_column: str = "split",
        **kwargs: Any,
    ) -> None:
        super().__init__(TableSource(csv, file_column, label_column, split_column), **kwargs)


class HuggingFace(EncodedImages):
    """Data module for a data set of Hugging Face, read by `datasets`.

    Args:
        path: Folder with a saved data set, or with Parquet or Arrow files; a Parquet file; the URL
            of a saved data set or of a Parquet file, such as `s3://…`; or a name on the Hub.
        image_column: Column of the images; by default the only column of type Image.
        label_column: Column of the labels; by default the only column of type ClassLabel.
        **kwargs: As for `EncodedImages`.
    """

    def __init__(
        self,
        path: str = "data",
        image_column: str | None = None,
        label_column: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(HuggingFaceSource(path, image_column, label_column), **kwargs)


class NewImages(ImageData):
    """Data module for `predict`: new images, prepared as the images of a training were.

    `predict` chooses it for `--data.predict_dir`, so that it needs no training images.

    Args:
        checkpoint: Path of the training's checkpoint.
        predict_dir: Images and folders of images.
        on_bad_image: As for `EncodedImages`.
        batch_size: Images per forward pass, over all ranks.
        placement: As for `ImageData`.
        cache: As for `ImageData`.
        num_workers: As for `ImageData`.
    """

    def __init__(
        self,
        checkpoint: str,
        predict_dir: str | list[str],
        on_bad_image: Literal["error", "skip"] = "error",
        batch_size: PositiveInt = 64,
        placement: Literal["auto", "disk", "memory", "device"] = "auto",
        cache: str | bool = "auto",
        num_workers: NonNegativeInt | Literal["auto"] = "auto",
    ) -> None:
        source = NewSource(load(Path(checkpoint), "--ckpt_path"), checkpoint)
        source.predict_dir = [predict_dir] if isinstance(predict_dir, str) else predict_dir
        source.skips = on_bad_image == "skip"
        settings: Any = {"placement": placement, "cache": cache, "num_workers": num_workers}
        super().__init__(source, batch_size=batch_size, **settings)


class Synthetic(ImageData):
    """Data module of the embedded data set: seeded drawings of ten shapes.

    Args:
        like: Data set that defines the image shape and the normalisation.
        images: Number of training images; FashionMNIST has 60,000. The test split has a fifth as
            many.
        data_seed: Seed of the images, independent of the seed of split and order.
        **kwargs: As for `ImageData`.
    """

    def __init__(
        self,
        like: Literal["CIFAR10", "FashionMNIST"] = "CIFAR10",
        images: PositiveInt = 10_000,
        data_seed: NonNegativeInt = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(SyntheticSource(like, images, data_seed), **kwargs)

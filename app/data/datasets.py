"""The data sets that `--data` names."""

from collections.abc import Sequence
from typing import Any, Literal

from app.data.folder import FolderSource
from app.data.module import ImageData
from app.data.sources import CIFAR10Source, FashionMNISTSource
from app.data.synthetic import SyntheticSource
from app.errors import UserError


class CIFAR10(ImageData):
    """CIFAR-10: 50,000 training and 10,000 test images of 32×32 in ten classes.

    Args:
        root: Directory that holds `cifar-10-batches-py`; downloaded there when it is missing.
        **kwargs: As for `ImageData`.
    """

    def __init__(self, root: str = "data", **kwargs: Any) -> None:
        super().__init__(CIFAR10Source(root), **kwargs)


class FashionMNIST(ImageData):
    """FashionMNIST: 60,000 training and 10,000 test images of 28×28 in ten classes.

    Args:
        root: Directory that holds `FashionMNIST/raw`; downloaded there when it is missing.
        **kwargs: As for `ImageData`.
    """

    def __init__(self, root: str = "data", **kwargs: Any) -> None:
        super().__init__(FashionMNISTSource(root), **kwargs)


class ImageFolder(ImageData):
    """Your own images: `root/train/<class>/*.jpg` or `*.png`, and `val/` and `test/` alike where you have them.

    Args:
        root: Directory that holds `train`.
        size: Height and width that every image is resized to.
        channels: 3 for colour, 1 for grey.
        mean: Per channel, of pixels scaled to 0…1; by default 0.5.
        std: Per channel, of pixels scaled to 0…1; by default 0.5.
        predict_dir: Folder of images, labelled or not, for `predict`; by default the test split.
        **kwargs: As for `ImageData`.
    """

    def __init__(
        self,
        root: str = "data",
        size: int | tuple[int, int] = 32,
        channels: Literal[1, 3] = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        predict_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        for flag, values in (("mean", mean), ("std", std)):
            if values is not None and len(values) != channels:
                raise UserError(f"--data.{flag} {values}: give one value for each of {channels} channels")
        half = [0.5] * channels
        super().__init__(FolderSource(root, size, channels, mean or half, std or half, predict_dir), **kwargs)


class Synthetic(ImageData):
    """The embedded data set: patterns made from a seed, in the exact shape of CIFAR-10 or FashionMNIST.

    Args:
        like: Data set whose shape and normalisation to take.
        size: Number of training images, 60,000 for FashionMNIST's size; a fifth as many for test.
        data_seed: Of the images, apart from the seed of split and order.
        **kwargs: As for `ImageData`.
    """

    def __init__(
        self,
        like: Literal["CIFAR10", "FashionMNIST"] = "CIFAR10",
        size: int = 10_000,
        data_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        if size < 1:
            raise UserError(f"--data.size {size}: give a count of at least 1")
        super().__init__(SyntheticSource(like, size, data_seed), **kwargs)

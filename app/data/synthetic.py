"""The embedded data set: images made from a seed."""

from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from app.data.sources import CIFAR10Source, FashionMNISTSource, Source, Split, SplitName
from app.launch.sharing import Empty, Once, alone


class SyntheticSource(Source):
    """Images made from a seed, in the exact shape of CIFAR-10 or FashionMNIST: no files, no download.

    Each class has four smooth patterns. An image is one of them, shifted at random, mixed with a weaker
    pattern of another class, at random contrast, under noise: learnable, but not at once, and some images
    are ambiguous.

    Args:
        like: The data set whose shape, normalisation and class count to take.
        size: Number of training images; a fifth as many are made for test.
        seed: Of the images.
    """

    def __init__(self, like: Literal["CIFAR10", "FashionMNIST"], size: int, seed: int) -> None:
        self.like, self.size, self.seed = like, size, seed
        model = CIFAR10Source if like == "CIFAR10" else FashionMNISTSource
        self.image_shape, self.mean, self.std = model.image_shape, model.mean, model.std
        self.class_names = [f"pattern {i}" for i in range(10)]

    def prepare(self) -> None:
        """Nothing to do: images are made where they are needed."""

    def load(self, split: SplitName, once: Once = alone) -> Split:  # noqa: D102
        return Split(*once(partial(self._make, split)))

    def _make(self, split: SplitName, empty: Empty) -> tuple[Tensor, Tensor]:
        channels, height, width = self.image_shape
        shift, kinds, classes = 4, 4, len(self.class_names)
        rng = np.random.default_rng((self.seed, 0))
        coarse = torch.from_numpy(rng.standard_normal((classes * kinds, channels, 5, 5), dtype=np.float32))
        patterns = torch.nn.functional.interpolate(
            coarse, (height + 2 * shift, width + 2 * shift), mode="bicubic", align_corners=False
        )
        windows = patterns.unfold(2, height, 1).unfold(3, width, 1)  # (40, C, 9, 9, H, W), a view

        rng = np.random.default_rng((self.seed, 1 if split == "train" else 2))
        count = self.size if split == "train" else max(self.size // 5, 1)
        labels = rng.integers(classes, size=count)
        other = (labels + rng.integers(1, classes, size=count)) % classes
        images = empty((count, channels, height, width), dtype=torch.uint8)
        for start in range(0, count, 2048):
            part = slice(start, min(start + 2048, count))
            n = part.stop - part.start

            def pick(label: np.ndarray, n: int = n) -> Tensor:
                dy, dx = rng.integers(2 * shift + 1, size=(2, n))
                return windows[label * kinds + rng.integers(kinds, size=n), :, dy, dx]

            strength = torch.from_numpy(rng.uniform((25, 0), (60, 30), size=(n, 2)).astype(np.float32))
            strength = strength[:, :, None, None, None]
            image = strength[:, 0] * pick(labels[part]) + strength[:, 1] * pick(other[part])
            noise = rng.integers(256, size=image.shape, dtype=np.uint8)
            image += torch.from_numpy(noise).float().mul_(0.6).add_(128 - 0.6 * 127.5)
            images[part] = image.clamp_(0, 255)
        return images, empty((count,), dtype=torch.int64).copy_(torch.from_numpy(labels))

"""Resizing and cropping of images, from the file to the network."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

from app.errors import UserError


@dataclass(frozen=True)
class Geometry:
    """Resizing and cropping of images, from the file to the network.

    Args:
        size: Height and width of the images that the network gets.
        resize: Shorter side before the centre crop. None: the smallest side that covers `size`.
            `squash`: resize to `size` without a crop.
        interpolation: Interpolation of all resizing.
        crop: Training crop.
        scale: Range of the area of `random_resized`, relative to the image's area.

    Raises:
        UserError: When a setting is out of range, or settings contradict each other.
    """

    size: tuple[int, int]
    resize: int | Literal["squash"] | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    crop: Literal["none", "random", "random_resized"] = "none"
    scale: tuple[float, float] = (0.08, 1.0)  # torchvision's default

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise UserError(f"--data.size {self.size}: give at least 1 pixel")
        if isinstance(self.resize, int) and self.resize < max(self.size):
            raise UserError(
                f"--data.resize {self.resize} is smaller than --data.size {max(self.size)}"
            )
        if self.crop != "random_resized" and self.scale != Geometry.scale:
            raise UserError("--data.scale works with --data.crop random_resized only")

    @property
    def _cover(self) -> tuple[int, int]:
        if isinstance(self.resize, int):
            return self.resize, self.resize
        return self.size

    @property
    def kept(self) -> tuple[int, int]:
        """Height and width that a resized training image covers before its random crop."""
        if self.crop != "random_resized":
            return self._cover
        side = round(1.15 * max(self._cover))
        return side, side

    def keep(self, image: Tensor) -> Tensor:
        """Resize a training image, uint8 (C, h, w), before its random crop.

        Before a `random_resized` crop, images are reduced but never enlarged.
        """
        size = _covering(image, self.kept)
        if self.crop == "random_resized":
            size = min(size, tuple(image.shape[1:]))
        return self._resize(image, size)

    def evaluated(self, images: Tensor) -> Tensor:
        """Resize and crop images for evaluation. `export` puts this into the graph, for any size.

        Args:
            images: One or more images of one size, uint8 (…, C, h, w).

        Returns:
            uint8 (…, C, H, W).
        """
        if self.resize == "squash":
            return self._resize(images, self.size)
        whole = self._resize(images, _covering(images, self._cover))
        # not slices, because torch.export would fix whether they are whole images
        for dim, size in zip((-2, -1), self.size, strict=True):
            margins = whole.shape[dim] - size
            start = (margins + margins // 2 % 2) // 2  # half of the margins, rounded half to even
            whole = whole.index_select(dim, torch.arange(size) + start)
        return whole

    def random_crop(self) -> nn.Module:
        """Return a module that crops a resized training image, uint8 (C, h, w) to (C, H, W)."""
        if self.crop == "random":
            return v2.RandomCrop(self.size)
        interpolation = v2.InterpolationMode(self.interpolation)
        return v2.RandomResizedCrop(self.size, self.scale, interpolation=interpolation)

    def _resize(self, images: Tensor, size: tuple[int, ...]) -> Tensor:
        # not torchvision's resize, because torch.export would fix the images' size in it
        resized = functional.interpolate(
            images.view(-1, *images.shape[-3:]), size, mode=self.interpolation, antialias=True
        )
        return resized.view(*images.shape[:-2], *size)


def _covering(images: Tensor, cover: tuple[int, int]) -> tuple[Any, ...]:
    """Return the smallest size that covers a rectangle and keeps the images' aspect ratio."""
    height, width = images.shape[-2:]
    # sym_max, because torch.export takes sizes as symbols
    return (
        torch.sym_max(cover[0], height * cover[1] // width),
        torch.sym_max(cover[1], width * cover[0] // height),
    )

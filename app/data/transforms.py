"""What happens to pixels, per batch, on the device: augmentation and normalisation."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

DRAWS = 5  # random numbers per sample: crop y and x, flip, cutout y and x


class Transform:
    """Turns uint8 images into normalised float images, after augmenting them where draws are given.

    Every random choice comes from the sample's own draws, never from global random state.

    Args:
        mean: Per channel, of pixels scaled to 0…1.
        std: Per channel, of pixels scaled to 0…1.
        crop_padding: Pixels of black border from which a crop of the original size is taken; 0: no crop.
        flip: Whether to mirror half of the images.
        cutout: Side in pixels of the square that is set to the mean; 0: none. Source: DeVries and Taylor,
            https://arxiv.org/abs/1708.04552.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        crop_padding: int = 0,
        flip: bool = False,
        cutout: int = 0,
    ) -> None:
        self.mean = torch.tensor([255 * m for m in mean]).view(-1, 1, 1)
        self.std = torch.tensor([255 * s for s in std]).view(-1, 1, 1)
        self.crop_padding, self.flip, self.cutout = crop_padding, flip, cutout

    @property
    def draws(self) -> int:
        """Random numbers that a training sample needs."""
        return DRAWS if self.crop_padding or self.flip or self.cutout else 0

    def __call__(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """Transform a batch.

        Args:
            images: uint8 (B, C, H, W).
            draws: Uniform in 0…1, (B, 5), or None for no augmentation.

        Returns:
            float32 (B, C, H, W).
        """
        if draws is not None and (self.crop_padding or self.flip):
            images = self._crop_and_flip(images, draws)
        if self.mean.device != images.device:
            self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        normalised = images.float().sub_(self.mean).div_(self.std)
        if draws is not None and self.cutout:
            normalised.masked_fill_(self._hole(images.shape, draws), 0.0)
        return normalised

    def _crop_and_flip(self, images: Tensor, draws: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        padding = self.crop_padding
        top, left = (draws[:, :2] * (2 * padding + 1)).long().unbind(1)  # (B,), (B,)
        y = top[:, None] + torch.arange(height, device=images.device)  # (B, H)
        x = torch.arange(width, device=images.device).expand(batch, width)
        if self.flip:
            x = torch.where(draws[:, 2:3] < 0.5, width - 1 - x, x)
        x = left[:, None] + x  # (B, W)
        sample = torch.arange(batch, device=images.device)[:, None, None, None]
        channel = torch.arange(channels, device=images.device)[:, None, None]
        return F.pad(images, (padding,) * 4)[sample, channel, y[:, None, :, None], x[:, None, None, :]]

    def _hole(self, shape: torch.Size, draws: Tensor) -> Tensor:
        """Mask of the square, (B, 1, H, W); its centre lies anywhere, so it may be cut off by the edge."""
        inside = []
        for size, draw in zip(shape[2:], draws[:, 3:5].unbind(1), strict=True):
            start = (draw * size).long() - self.cutout // 2  # (B,)
            distance = torch.arange(size, device=draws.device) - start[:, None]  # (B, size)
            inside.append((distance >= 0) & (distance < self.cutout))
        rows, columns = inside
        return (rows[:, :, None] & columns[:, None, :])[:, None]

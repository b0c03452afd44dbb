"""Augmentation and normalisation, per batch, on the device."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

DRAWS = 5  # random numbers per sample: crop y and x, flip, cutout y and x
FLIP = 2
# Draws are integers, because Lightning converts floats to the run's precision, which may round
# 0.999 to 1.
DRAW_BITS = 16
DRAW_RANGE = 2**DRAW_BITS


class Choices(NamedTuple):
    """Lookup tables from random choices to crops, flips and cutouts, for one image size and device.

    Attributes:
        counts: Number of choices for each draw, int32 (5,).
        rows: Flat index at which an output row's source row starts in the padded image, (crops, H).
            The first dimension is the vertical position of the crop.
        columns: Column of the padded image from which an output column comes, (2, crops, W). The
            first dimension is the flip (mirrored, plain), the second is the horizontal position of
            the crop.
        hole_rows: Mask of the rows that cutout covers, for each centre, bool (H, H).
        hole_columns: Mask of the columns that cutout covers, for each centre, bool (W, W).
    """

    counts: Tensor
    rows: Tensor
    columns: Tensor
    hole_rows: Tensor
    hole_columns: Tensor


@cache
def choices_for(
    height: int, width: int, crop_padding: int, flip: bool, cutout: int, device: torch.device
) -> Choices:
    """Return the lookup tables of a transform; see `Transform` for its settings."""
    x = torch.arange(width)
    mirrored = x
    if flip:
        mirrored = x.flip(0)
    crops = torch.arange(2 * crop_padding + 1)
    counts = torch.tensor([len(crops), len(crops), 2, height, width], dtype=torch.int32)
    rows = (crops[:, None] + torch.arange(height)) * (width + 2 * crop_padding)
    columns = torch.stack((mirrored, x))[:, None] + crops[:, None]
    tables = (counts, rows, columns, _hole(height, cutout), _hole(width, cutout))
    return Choices(*[table.to(device) for table in tables])


def _hole(size: int, cutout: int) -> Tensor:
    """Return the rows, or columns, that a square covers, by its centre: bool (centres, size)."""
    start = torch.arange(size) - cutout // 2
    distance = torch.arange(size) - start[:, None]
    return (distance >= 0) & (distance < cutout)


class Mix(NamedTuple):
    """Mixing of each sample of a batch with the next one.

    Attributes:
        weight: Weight of the sample itself in mixup; the next one's weight is 1 - weight.
        box: Cutmix's box as (centre y, centre x, side), relative to the image's height and width;
            None for mixup.
    """

    weight: float
    box: tuple[float, float, float] | None

    def __call__(self, images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Mix each of n samples with the next one.

        Args:
            images: float (n + 1, C, H, W); the last one is only mixed into the one before.
            labels: int64 (n + 1,).
            classes: Number of classes.

        Returns:
            Images (n, C, H, W), and probabilities of the classes (n, classes).
        """
        weight = self.weight
        if self.box is None:
            mixed = images[1:].lerp(images[:-1], weight)
        else:
            height, width = images.shape[2:]
            y, x, side = self.box
            rows = _part(height, y, side)
            columns = _part(width, x, side)
            mixed = images[:-1].clone()
            mixed[:, :, rows, columns] = images[1:, :, rows, columns]
            weight = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (
                height * width
            )
        # not F.one_hot, because on a CPU it would also check the labels' values
        targets = (labels[:, None] == torch.arange(classes, device=labels.device)).float()
        return mixed, targets[1:].lerp(targets[:-1], weight)


def _part(size: int, centre: float, side: float) -> slice:
    """Return a box's pixels along one side of an image. Centre and side are relative to `size`."""
    start = int(size * (centre - side / 2))
    stop = int(size * (centre + side / 2))
    return slice(max(start, 0), min(stop, size))


def draw_mix(mixup: float, cutmix: float, seed: int) -> Mix:
    """Draw the mixing of a global batch; if both parameters are above 0, each is equally likely.

    Args:
        mixup: Parameter of mixup's beta distribution, or 0. Source:
            https://arxiv.org/abs/1710.09412.
        cutmix: Parameter of cutmix's beta distribution, or 0. Source:
            https://arxiv.org/abs/1905.04899.
        seed: Seed of the draws.
    """
    rng = np.random.default_rng(seed)
    kind, y, x = rng.random(3)
    if not cutmix or (mixup and kind < 0.5):
        return Mix(rng.beta(mixup, mixup), None)
    weight = rng.beta(cutmix, cutmix)
    return Mix(weight, (y, x, math.sqrt(1 - weight)))


class Transform:
    """Transform from uint8 images to normalised float images, with optional augmentation.

    Every random choice comes from the sample's own draws, never from global random state.

    Args:
        mean: Mean of each channel, for pixels scaled to 0…1.
        std: Standard deviation of each channel, for pixels scaled to 0…1.
        crop_padding: Width in pixels of a black border added before a random crop to the original
            size; 0: no crop.
        flip: Whether to mirror half of the images.
        cutout: Side in pixels of a square set to the mean; 0: no square. Source: DeVries and
            Taylor, https://arxiv.org/abs/1708.04552.
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
        self.crop_padding = crop_padding
        self.flip = flip
        self.cutout = cutout

    @property
    def draws(self) -> int:
        """Number of random draws per training sample."""
        if self.crop_padding or self.flip or self.cutout:
            return DRAWS
        return 0

    def __call__(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """Transform a batch.

        Args:
            images: uint8 (B, C, H, W).
            draws: Integers below `DRAW_RANGE`, (B, 5), or None for no augmentation.

        Returns:
            float32 (B, C, H, W).
        """
        if self.mean.device != images.device:
            self.mean = self.mean.to(images.device)
            self.std = self.std.to(images.device)
        if draws is None:
            return self._normalised(images)
        choices = choices_for(
            *images.shape[2:], self.crop_padding, self.flip, self.cutout, images.device
        )
        # five tensors (B,)
        chosen = (draws * choices.counts).bitwise_right_shift_(DRAW_BITS).unbind(1)
        if self.crop_padding or self.flip:
            images = self._crop_and_flip(images, choices, *chosen[:3])
        normalised = self._normalised(images)
        if self.cutout:
            rows = choices.hole_rows[chosen[3]]  # (B, H)
            columns = choices.hole_columns[chosen[4]]  # (B, W)
            normalised.masked_fill_((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)
        return normalised

    def _normalised(self, images: Tensor) -> Tensor:
        return images.float().sub_(self.mean).div_(self.std)

    def undo(self, images: Tensor) -> Tensor:
        """Return the pixels of normalised images (B, C, H, W), uint8 (B, C, H, W)."""
        pixels = images.float() * self.std + self.mean
        return pixels.round().clamp(0, 255).byte()

    def _crop_and_flip(
        self, images: Tensor, choices: Choices, top: Tensor, left: Tensor, side: Tensor
    ) -> Tensor:
        batch, channels = images.shape[:2]
        if not self.crop_padding:  # whole images are faster to gather than pixels
            rows = torch.arange(batch, device=side.device)
            return torch.cat((images.flip(3), images)).index_select(0, side * batch + rows)
        padded = F.pad(images, (self.crop_padding,) * 4).flatten(2)
        # (B, H, W)
        places = choices.rows[top][:, :, None] + choices.columns[side, left][:, None, :]
        wanted = places.view(batch, 1, -1).expand(-1, channels, -1)
        return padded.gather(2, wanted).view(images.shape)

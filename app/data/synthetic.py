"""Embedded data set: seeded drawings of ten shapes, without files or download."""

import math
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from app.data.sources import (
    CIFAR10Source,
    FashionMNISTSource,
    Source,
    Split,
    SplitName,
    check_memory,
)

Floats = NDArray[Any]  # float32
# images per block, so that a block fits into a core's cache; each block has its own random stream
BLOCK = 256

# Two strokes (from x, y to x, y) of the right half of each letter. These letters are symmetric, so
# that flipping does not change the class.
LETTERS = np.loadtxt(
    """
    0.00 -1 0.7 1.0  0.00  0.35 0.45 0.35  # A
    0.60 -1 0.6 1.0  0.00  0.00 0.60 0.00  # H
    0.75 -1 0.75 1.0 0.75 -1.00 0.00 0.20  # M
    0.00 -1 0.0 1.0  0.00 -1.00 0.75 -1.0  # T
    0.60 -1 0.6 0.9  0.60  0.90 0.00 0.90  # U
    0.70 -1 0.0 1.0  0.70 -1.00 0.00 1.00  # V
    0.90 -1 0.5 1.0  0.50  1.00 0.00 -0.4  # W
    0.70 -1 0.0 0.0  0.00  0.00 0.00 1.00  # Y
    """.splitlines(),
    np.float32,
).reshape(-1, 2, 4)


def _length(x: Floats, y: Floats) -> Floats:
    return np.sqrt(x * x + y * y)


def _box(x: Floats, y: Floats, width: Floats | float, height: Floats | float) -> Floats:
    return np.maximum(abs(x) - width, abs(y) - height)


def _bands(x: Floats, width: Floats | float) -> Floats:
    """Return the signed distance from the edges of equally wide bands; one band is centred on 0."""
    return abs((x + width) % (2 * width) - width) - width / 2


# Each shape function returns the signed distance of points (x, y) in [-1, 1] from the shape's edge,
# negative inside. `kind`, from 0 to 1, varies the shape from image to image.
# https://iquilezles.org/articles/distfunctions2d/


def circle(x: Floats, y: Floats, kind: Floats) -> Floats:
    """Return the distance from a disc."""
    return _length(x, y) - 0.9


def square(x: Floats, y: Floats, kind: Floats) -> Floats:
    """Return the distance from a square."""
    return _box(x, y, 0.78, 0.78)


def triangle(x: Floats, y: Floats, kind: Floats) -> Floats:
    """Return the distance from an upright equilateral triangle."""
    return np.maximum(0.866 * abs(x) - 0.5 * y, y) - 0.5


def star(x: Floats, y: Floats, kind: Floats) -> Floats:
    """Return the distance from a five-pointed star; `kind` sets its depth."""
    fifth = 2 * math.pi / 5
    inner = 0.4 + 0.1 * kind
    angle = abs((np.arctan2(x, -y) + fifth / 2) % fifth - fifth / 2)
    # vector of the edge from a tip at (1, 0) to the next inner corner, which lies at radius `inner`
    ey = inner * math.sin(fifth / 2)
    ex = inner * math.cos(fifth / 2) - 1
    norm = _length(ex, ey)
    radius = _length(x, y)
    return (radius * np.cos(angle) - 1) * (ey / norm) - radius * np.sin(angle) * (ex / norm)


def cross(x: Floats, y: Floats, kind: Floats) -> Floats:
    """Return the distance from a cross; `kind` sets the width of its arms."""
    width = 0.2 + 0.15 * kind
    return np.minimum(_box(x, y, 0.95, width), _box(x, y, width, 0.95))


def ring(x: Floats, y: Floats, kind: Floats) -> Floats:
    """Return the distance from a ring; `kind` sets its width."""
    width = 0.12 + 0.13 * kind
    return abs(_length(x, y) - 0.95 + width) - width


def stripes(x: Floats, y: Floats, kind: Floats) -> Floats:
    """Return the distance from three horizontal stripes."""
    return np.maximum(_box(x, y, 0.85, 0.85), _bands(y, 0.34))


def checker(x: Floats, y: Floats, kind: Floats) -> Floats:
    """Return the distance from a checkerboard.

    A point is in a square if both or neither of x and y are in a band.
    """
    across = _bands(x, 0.567)
    down = _bands(y, 0.567)
    edge = np.minimum(abs(across), abs(down))
    return np.maximum(_box(x, y, 0.85, 0.85), np.copysign(edge, -across * down))


def letter(x: Floats, y: Floats, kind: Floats) -> Floats:
    """Return the distance from a symmetric letter; `kind` chooses the letter."""
    letters = LETTERS[(kind.ravel() * len(LETTERS)).astype(int)]
    strokes = letters[..., None, None, None] * np.float32(0.85)  # (n, 2, 4, 1, 1, 1)
    ax, ay, bx, by = strokes.swapaxes(0, 2)
    x = abs(x)
    dx = bx - ax
    dy = by - ay
    along = np.clip(((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy), 0, 1)
    return _length(x - ax - along * dx, y - ay - along * dy).min(0) - 0.16


def wave(x: Floats, y: Floats, kind: Floats) -> Floats:
    """Return the distance from a wave; `kind` sets its wavelength."""
    pitch = 4.5 + 3 * kind
    steepness = np.sqrt(1 + (0.4 * pitch * np.cos(pitch * x)) ** 2)
    return np.maximum(abs(y - 0.4 * np.sin(pitch * x)) / steepness - 0.16, abs(x) - 1)


SHAPES = (circle, square, triangle, star, cross, ring, stripes, checker, letter, wave)


class SyntheticSource(Source):
    """Source of seeded drawings of ten shapes, in the image size of CIFAR-10 or FashionMNIST.

    Place, size, angle, colours, shading and noise differ from image to image. An image does not
    depend on the number of images of its split.

    Args:
        like: Data set that defines the image shape and the normalisation.
        count: Number of training images; the test split has a fifth as many.
        seed: Seed of the images.
    """

    def __init__(self, like: Literal["CIFAR10", "FashionMNIST"], count: int, seed: int) -> None:
        self.like = like
        self.count = count
        self.seed = seed
        model = {"CIFAR10": CIFAR10Source, "FashionMNIST": FashionMNISTSource}[like]
        self.image_shape = model.image_shape
        self.mean = model.mean
        self.std = model.std
        self.class_names = [shape.__name__ for shape in SHAPES]

    def prepare(self) -> None:
        """Check that the images fit into memory."""
        check_memory(self.count, self.image_shape, f"give less than --data.images {self.count}")

    def load(self, split: SplitName) -> Split:  # noqa: D102
        count = self.count
        if split != "train":
            count = max(count // 5, 1)
        images = np.empty((count, *self.image_shape), np.uint8)
        labels = np.empty(count, np.int64)
        for block, start in enumerate(range(0, count, BLOCK)):
            rng = np.random.default_rng((self.seed, split != "train", block))
            span = slice(start, start + BLOCK)
            self._draw(rng, images[span], labels[span])
        return Split(torch.from_numpy(images), torch.from_numpy(labels))

    def _draw(
        self, rng: np.random.Generator, images: NDArray[np.uint8], labels: NDArray[np.int64]
    ) -> None:
        n, channels, height, width = images.shape
        labels[:] = rng.integers(len(SHAPES), size=BLOCK)[:n]
        draws = rng.random((14, BLOCK), np.float32)[:, :n, None, None, None]
        kind, size, cx, cy, turn, slope, heading, grain, paper, contrast, *tints = draws
        x = np.arange(width, dtype=np.float32) - (width - 1) / 2
        y = x[:, None]  # images are square
        radius = (0.24 + 0.18 * size) * height
        room = height - 1.7 * radius
        left = x - (cx - 0.5) * room
        top = y - (cy - 0.5) * room
        angle = 1.2 * (turn - 0.5)
        cos = np.cos(angle) / radius
        sin = np.sin(angle) / radius
        cover = np.empty((n, 1, height, width), np.float32)
        for label, shape in enumerate(SHAPES):
            members = (labels == label).nonzero()[0]
            across = cos[members] * left[members] + sin[members] * top[members]
            down = cos[members] * top[members] - sin[members] * left[members]
            cover[members] = (0.5 - shape(across, down, kind[members]) * radius[members]).clip(0, 1)

        contrast = 50 + 90 * contrast
        paper = {1: 70, 3: 215}[channels] * paper
        ink = paper + np.where(paper > 128, -contrast, contrast)
        if channels == 3:
            rainbow = np.linspace(0, 2 * np.pi, 3, endpoint=False, dtype=np.float32)[:, None, None]
            ink = ink + (30 + 60 * tints[0]) * np.cos(rainbow + 2 * np.pi * tints[1])
            paper = paper + 50 * tints[2] * np.cos(rainbow + 2 * np.pi * tints[3])
        heading = 2 * np.pi * heading
        shade = slope * 2 * (np.cos(heading) * x + np.sin(heading) * y)
        noise = rng.integers(2**64, size=images.size // 8, dtype=np.uint64).view(np.uint8)
        grain = 0.05 + 0.35 * grain
        image = cover * (ink - paper) + (paper - 127.5 * grain)
        image += shade
        image += noise.reshape(images.shape) * grain
        images[:] = image.clip(0, 255, out=image)

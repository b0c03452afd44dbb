"""Pictures of images with captions, such as `train_batch.png`.

PIL draws them, because importing matplotlib would delay the first step.
"""

import math
from collections.abc import Sequence
from importlib.metadata import distribution
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor
from torchvision.io import encode_png
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

from app.data.module import ImageData
from app.data.shares import Shards

SIDE = 170  # pixels of a drawn image's longer side
CELL = (SIDE, SIDE + 34)  # width and height of an image with a caption of two lines


def draw_images(rows: Sequence[tuple[Tensor, str]]) -> bytes:
    """Draw a square grid of images (C, H, W) with captions, as a PNG file.

    A caption has at most two lines; a long one is cut.
    """
    fonts = distribution("matplotlib").locate_file("matplotlib/mpl-data/fonts/ttf")
    font = ImageFont.truetype(f"{fonts}/DejaVuSans.ttf", 12)
    tiles = []
    for image, caption in rows:
        # grey to RGB; normalised pixels are rescaled to 0…1
        image = make_grid(image[:3].nan_to_num(0, 0, 0), normalize=image.is_floating_point())
        tile = Image.new("RGB", CELL, "white")
        # without smoothing, so that the pixels of a small image are visible
        tile.paste(ImageOps.contain(to_pil_image(image), (SIDE, SIDE), Image.Resampling.BOX))
        ImageDraw.Draw(tile).text((0, SIDE), caption, "black", font)
        tiles.append(pil_to_tensor(tile))
    grid = make_grid(tiles, math.ceil(len(tiles) ** 0.5), padding=16, pad_value=255)
    return encode_png(grid).numpy().tobytes()


def first_images(batch: Any, data: ImageData) -> list[tuple[Tensor, str]]:
    """Return the pixels (C, H, W) of a batch's first 16 images, and the names of their classes.

    Args:
        batch: What the network gets: images (B, C, H, W), and labels (B,) or probabilities (B,
            classes); or shards of these. A batch that a user's hook has changed has no images.
        data: The data module.
    """
    rows = []
    shards = batch if isinstance(batch, Shards) else [batch]
    for shard in shards:
        match shard:
            case (Tensor(ndim=4) as images, labels):
                pixels = data.transform.undo(images[:16]).cpu()
                for image, label in zip(pixels, labels, strict=False):
                    # several labels for a mixed image
                    places = label.nonzero() if label.ndim else [label]
                    rows.append((image, "\n".join(data.class_names[place] for place in places)))
    return rows[:16]

"""Pictures of images, such as `train_batch.png`."""

import io
from types import SimpleNamespace

import torch
from PIL import Image

from app.data.shares import Shards
from app.data.transforms import Transform
from app.monitor.image_grid import draw_images, first_images


def test_images_are_drawn_with_their_captions():
    """Five images make a grid of three columns: cells of 170 × 204 pixels, 16 pixels apart."""
    rows = [(torch.full((1, 2, 1), 200, dtype=torch.uint8), "кот\nцвет")] * 5
    with Image.open(io.BytesIO(draw_images(rows))) as picture:
        assert picture.size == (3 * 186 + 16, 2 * 220 + 16)
        assert picture.crop((16, 16, 101, 186)).getcolors() == [(170 * 85, (200, 200, 200))]
        assert picture.crop((16, 186, 186, 220)).getextrema()[0][0] == 0, "a caption"


def test_first_images_are_what_the_network_gets():
    """Each shard has its images; an image that is mixed of two has two labels.

    Drawing uses no random stream.
    """
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    transform = Transform((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
    plain, mixed = transform(images).split(1)
    batch = Shards([(plain, torch.tensor([1])), (mixed, torch.tensor([[0.7, 0.3]]))], 0, [1, 1], 2)
    data = SimpleNamespace(transform=transform, class_names=["cat", "dog"])
    before = torch.get_rng_state()
    rows = first_images(batch, data)
    draw_images(rows)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.stack([pixels for pixels, _ in rows]), images)
    assert [caption for _, caption in rows] == ["dog", "cat\ndog"]
    assert first_images({"a user's": "batch"}, data) == []

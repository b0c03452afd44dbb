"""Images of the benchmarks, and the contenders of `speed.py` that only read images."""

import contextlib
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor


def synthetic(like: str, size: int) -> tuple[Tensor, Tensor]:
    """Return the synthetic data set: images uint8 (n, C, H, W) and labels (n,)."""
    from app.data.synthetic import SyntheticSource

    split = SyntheticSource(like, size, 0).load("train")
    return split.tensor(0), split.labels


def shuffled(
    images: Tensor, labels: Tensor, batch: int
) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    """Return a function that yields batches of resident images, in a new order at each call."""

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(labels)).split(batch):
            yield images[rows], labels[rows]

    return batches


def _fed(make: Callable[[], Any]) -> dict[str, float]:
    make()
    turns = []
    for _ in range(20):
        began = time.perf_counter()
        make()
        turns.append(time.perf_counter() - began)
    return {"ms_per_batch": 1e3 * statistics.median(turns)}


def feed_torchvision() -> dict[str, float]:
    """Crop, flip and cutout of 512 images, one after the other, by torchvision's transforms."""
    from torchvision.transforms import v2

    images, _ = synthetic("CIFAR10", 512)
    transform = v2.Compose(
        [
            v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.5,) * 3, (0.5,) * 3), v2.RandomErasing(1.0, (0.0625, 0.0625), (1, 1)),
        ]
    )  # fmt: skip
    return _fed(lambda: torch.stack([transform(image) for image in images]))


def feed_ours() -> dict[str, float]:
    """Crop, flip and cutout of 512 images, as one batch."""
    from app.data.transforms import DRAW_RANGE, Transform

    images, _ = synthetic("CIFAR10", 512)
    transform = Transform((0.5,) * 3, (0.5,) * 3, crop_padding=4, flip=True, cutout=8)
    shape = (512, transform.draws)
    return _fed(lambda: transform(images, torch.randint(DRAW_RANGE, shape, dtype=torch.int32)))


PHOTOS = int(os.environ.get("PHOTOS", 2000))
WORKERS = 2
CROPPED = 64  # images of a batch


def _photos(folder: str) -> None:
    """Write JPEG files of 500 × 375 pixels and 55 kB, like photographs."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(PHOTOS):
        place = Path(folder, "train", f"class{number % 10}")
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(256, size=(24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        pixels = (smooth + rng.integers(-8, 9, size=smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.jpg", quality=90)


def _read(begin: Callable[[], Callable[[], Iterator[Any]]], epochs: int = 10) -> dict[str, float]:
    """Measure images/s and memory growth.

    The images/s are those of the first epoch, including set-up, and the median of the later epochs.
    The memory growth is the growth since the end of the second epoch.

    Before each reading of memory, `malloc_trim` returns free memory, because the amount that the
    allocator keeps varies by hundreds of MiB.
    """
    import psutil

    def memory() -> float:
        ctypes.CDLL(None).malloc_trim(0)
        total = 0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            total += sum(mapping.private_dirty for mapping in process.memory_maps())
        return total / 2**20

    walls = []
    used = []
    began = time.perf_counter()
    batches = begin()
    for _ in range(epochs):
        seen = sum(len(images) for images, *_ in batches())
        walls.append(time.perf_counter() - began)
        used.append(memory())
        assert seen == PHOTOS
        began = time.perf_counter()
    return {
        "first_epoch_images_per_s": PHOTOS / walls[0],
        "images_per_s": PHOTOS / statistics.median(walls[1:]),
        "mib_more": used[-1] - used[1],
    }


def crops_torchvision() -> dict[str, float]:
    """ImageFolder, transforms and DataLoader of torchvision's reference training, two workers."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    with tempfile.TemporaryDirectory() as folder:
        _photos(folder)
        transform = v2.Compose(
            [
                v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor(),
                v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5,) * 3, (0.5,) * 3),
            ]
        )  # fmt: skip

        def begin() -> Callable[[], Iterator[Any]]:
            images = ImageFolder(f"{folder}/train", transform)
            loader = torch.utils.data.DataLoader(
                images, CROPPED, num_workers=WORKERS, shuffle=True, persistent_workers=True
            )
            return loader.__iter__

        return _read(begin)


def crops_ours() -> dict[str, float]:
    """`--data ImageFolder --data.crop random_resized --data.flip true`: crops of mapped pixels."""
    from app.data import ImageFolder

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        _photos(folder)
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False
        )

        def begin() -> Callable[[], Iterator[Any]]:
            data = ImageFolder(
                folder,
                size=224,
                resize=256,
                crop="random_resized",
                flip=True,
                val_size=0,
                batch_size=CROPPED,
                num_workers=WORKERS,
                cache=f"{folder}/cache",
            )
            data.trainer = trainer
            data.prepare_data("fit")
            data.setup("fit")
            loader = data.train_dataloader()
            return lambda: (data.on_after_batch_transfer(batch, 0) for batch in loader)

        return _read(begin)

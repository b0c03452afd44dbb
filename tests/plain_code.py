"""Model and data as users of plain Lightning write them."""

import random
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchvision import transforms


class PlainModel(LightningModule):
    """A usual network: convolutions, BatchNorm, dropout."""

    def __init__(self, normalized: bool = True):
        super().__init__()
        convolution = nn.Conv2d(3, 8, 3, bias=False)
        pool = nn.AdaptiveAvgPool2d(2)
        self.net = nn.Sequential(
            convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), pool, nn.Flatten()
        )
        if not normalized:
            self.net[1] = self.net[3] = nn.Identity()
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class WithBuffers(PlainModel):
    """`PlainModel` with InstanceNorm's statistics, a moving mean, and a count of passes."""

    def __init__(self):
        super().__init__()
        self.net[1] = nn.InstanceNorm2d(8, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean()
            self.steps += 1
        return super().forward(x)


class PlainPictures(Dataset[tuple[Tensor, int]]):
    """Pictures with random augmentation that uses the generators of torch, NumPy and Python."""

    def __init__(self, size: int):
        self.images = torch.rand(size, 3, 12, 12, generator=torch.Generator().manual_seed(0))
        crop = transforms.RandomResizedCrop(10, antialias=True)
        self.transform = transforms.Compose([crop, transforms.ColorJitter(0.3, 0.3, 0.3)])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        noise = float(np.random.rand()) + random.random()
        return self.transform(self.images[index]) + 0.1 * noise, index % 3


class PlainData(LightningDataModule):
    """Usual data module; `weighted` replaces its training loader's shuffled order."""

    def __init__(
        self, size: int = 50, batch_size: int = 16, num_workers: int = 0, weighted: bool = False
    ):
        super().__init__()
        self.weighted = weighted
        self.train = PlainPictures(size)
        self.val = PlainPictures(11)
        self.options: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers}

    def train_dataloader(self):
        if self.weighted:
            count = len(self.train)
            sampler = WeightedRandomSampler(range(1, count + 1), count)
            return DataLoader(self.train, sampler=sampler, **self.options)
        return DataLoader(self.train, shuffle=True, **self.options)

    def val_dataloader(self):
        return DataLoader(self.val, **self.options)

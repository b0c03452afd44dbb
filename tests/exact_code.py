"""Data modules of ordinary Lightning users, for tests of the exact loader."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)


def samples(count: int, seed: int) -> TensorDataset:
    """Return vectors of four numbers, and labels of three classes."""
    vectors = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(vectors, (3 * vectors.sigmoid()[:, 0]).long())


class Noisy(Dataset[Any]):
    """Data set with random noise, whose file each worker opens."""

    file: Any = None

    def __init__(self, data: Dataset[Any]):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        vector, label = self.file[index]
        return vector + 0.1 * torch.randn(4) + random.random() + np.random.rand(4).astype(
            "f"
        ), label


def opens(worker: int):
    """Open a data set's file in a worker, as for HDF5."""
    info = get_worker_info()
    info.dataset.file = info.dataset.data


class Linear(LightningModule):
    """Linear classifier that begins with zeros."""

    def __init__(self, lr: float = 0.5):
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(4, 3)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, vectors):
        return self.layer(vectors)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        scores = self(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(scores, batch[1]), sync_dist=True)
        self.log("val_acc", (scores.argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0][:, 0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class Ordinary(LightningDataModule):
    """Loaders as most people write them."""

    def __init__(
        self,
        count: int = 36,
        validated: int = 23,
        batch_size: int = 8,
        drop_last: bool = False,
        train: str = "",
    ):
        super().__init__()
        self.data: Dataset[Any] = samples(count, 0)
        self.validation = samples(validated, 1)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.train = train

    def train_dataloader(self):
        if self.train == "own_batches":
            return DataLoader(self.data, batch_sampler=[[0, 1], [2, 3]])
        if self.train == "workers":
            return DataLoader(
                Noisy(self.data),
                self.batch_size,
                shuffle=True,
                num_workers=2,
                persistent_workers=True,
                worker_init_fn=opens,
            )
        return DataLoader(self.data, self.batch_size, drop_last=self.drop_last)

    def val_dataloader(self):
        return DataLoader(self.validation, self.batch_size)

    predict_dataloader = val_dataloader


class DividesItself(Ordinary):
    """Data module that divides its batch size by the number of processes."""

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size // self.trainer.world_size)


class Distributed(Ordinary):
    """Data module with torch's sampler for several processes, as for plain DDP."""

    def train_dataloader(self):
        sampler = DistributedSampler(self.data, shuffle=False)
        return DataLoader(self.data, self.batch_size, sampler=sampler)


class Delegates(Ordinary):
    """Data module whose methods call each other, and which validates batches of one sample."""

    def val_dataloader(self):
        assert len(self.train_dataloader()) == -(-36 // self.batch_size)  # the user's own loader
        return self.test_dataloader()

    def test_dataloader(self):
        return DataLoader(self.validation, 1)

    def predict_dataloader(self):
        return self.test_dataloader()


class DropsLast(Ordinary):
    """Data module that drops the last validation batch, which a prediction keeps."""

    def val_dataloader(self):
        return DataLoader(self.validation, self.batch_size, drop_last=True)

    predict_dataloader = val_dataloader


class OwnBatches(Ordinary):
    """Prediction by a batch sampler."""

    def predict_dataloader(self):
        batches = BatchSampler(SequentialSampler(self.validation), 5, False)
        return DataLoader(self.validation, batch_sampler=batches)


class TwoSets(Ordinary):
    """Prediction of two sets."""

    def predict_dataloader(self):
        return [DataLoader(self.validation, 4), DataLoader(samples(7, 2), 3)]


class Combined(Ordinary):
    """Training with Lightning's combination of loaders."""

    def train_dataloader(self):
        return CombinedLoader(super().train_dataloader())


class OwnLoaders(Linear):
    """Module with loaders of its own."""

    def train_dataloader(self):
        return DataLoader(samples(36, 0), 8)

    def val_dataloader(self):
        return DataLoader(samples(23, 1), 8)


class Writer(BasePredictionWriter):
    """Writes each rank's predictions with the indices that Lightning passes."""

    def __init__(self, folder: str):
        super().__init__("epoch")
        self.folder = folder

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        path = Path(self.folder, f"{trainer.global_rank}.pt")
        torch.save((predictions, batch_indices), path)

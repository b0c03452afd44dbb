"""Models and data for tests of `verify`: correct base classes, and subclasses with a mistake."""

import os
from typing import Any

import torch
from lightning import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    random_split,
)
from torchmetrics.classification import MulticlassAccuracy

from app.modules import CIFARCNN

# the last training batch and the last validation batch have 5 samples, which two ranks cannot share
# equally
BATCH = 8
COUNT = 61
VALIDATED = 21


class Model(LightningModule):
    """Small network without a mistake. A rank's share of a batch may have any size."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 2))
        self.accuracy = MulticlassAccuracy(2, average="micro")

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        total = self.trainer.strategy.reduce(torch.tensor(float(len(y))), reduce_op="sum")
        return cross_entropy(self(x), y, reduction="sum") * self.trainer.world_size / total

    def validation_step(self, batch, batch_idx):
        self.accuracy.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log("val_acc", self.accuracy.compute())
        self.accuracy.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Shares(Sampler[list[int]]):
    """Batch sampler that yields this rank's share of each global batch."""

    def __init__(self, data: "Data", count: int, shuffle: bool):
        self.data = data
        self.count = count
        self.shuffle = shuffle

    def __len__(self):
        return -(-self.count // self.data.batch_size)

    def __iter__(self):
        trainer = self.data.trainer
        order = torch.arange(self.count)
        first = 0
        if self.shuffle:
            order = torch.randperm(self.count, generator=seeded(self.data.seed()))
            first = trainer.fit_loop.batch_idx + 1  # of a resumed epoch
        for batch in order.split(self.data.batch_size)[first:]:
            yield batch.tensor_split(trainer.world_size)[trainer.global_rank].tolist()


class Data(LightningDataModule):
    """Correctly shared images of shape 3×2×2, with `--trainer.use_distributed_sampler false`."""

    def __init__(self, batch_size: int = BATCH):
        super().__init__()
        self.batch_size = batch_size
        images = torch.randn((COUNT, 3, 2, 2), generator=seeded(0))
        self.train: Any = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
        self.val = Subset(self.train, range(VALIDATED))

    def train_dataloader(self):
        return DataLoader(self.train, batch_sampler=Shares(self, len(self.train), True))

    def val_dataloader(self):
        return DataLoader(self.val, batch_sampler=Shares(self, VALIDATED, False))

    def seed(self):
        """Return the seed of an epoch's order."""
        return self.trainer.current_epoch


# -- samples


class Stock(Data):
    """Data with ordinary loaders, to which Lightning adds its sampler."""

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=4)


class OwnBatches(Stock):
    """Data whose batch size is set in a batch sampler. Under ddp, Lightning ignores this size."""

    def train_dataloader(self):
        return DataLoader(
            self.train, batch_sampler=BatchSampler(RandomSampler(self.train), BATCH, False)
        )


class Halved(Stock):
    """`Stock` with the batch size divided by the world size."""

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=BATCH // self.trainer.world_size, shuffle=True)


class Packed:
    """Batch of a user's class, in which nobody finds the tensors."""

    def __init__(self, batch: Any):
        self.batch = batch

    def __getitem__(self, place):
        return self.batch[place]


class Hidden(Stock):
    """`Stock` with batches of a user's class in training."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return Packed(batch) if self.trainer.training else batch


class PaddingSampler(DistributedSampler[Any]):
    """Sampler class of a user, which repeats samples to give all ranks equally many."""


class Padded(Stock):
    def val_dataloader(self):
        trainer = self.trainer
        shares = PaddingSampler(self.val, trainer.world_size, trainer.global_rank, shuffle=False)
        return DataLoader(self.val, batch_size=4, sampler=shares)


class Repeated(Halved):
    """`Halved` with a data set that repeats eight samples."""

    def __init__(self):
        super().__init__()
        self.train = Subset(self.train, [index % 8 for index in range(COUNT)])


class Everything(IterableDataset[Any]):
    """Iterable data set that yields all samples on every rank."""

    def __iter__(self):
        return iter(Data().train)


class Unshared(Data):
    def train_dataloader(self):
        return DataLoader(Everything(), batch_size=BATCH)


class SeedOfTheRank(Data):
    def seed(self):
        return 100 * self.trainer.global_rank + self.trainer.current_epoch


class NoSetEpoch(Data):
    def seed(self):
        return self.trainer.current_epoch if self.trainer.world_size == 1 else 5


class SplitByChance(Data):
    """Data whose validation split differs between processes, like a random split without a seed."""

    def setup(self, stage):
        counts = [COUNT - VALIDATED, VALIDATED]
        self.train, self.val = random_split(self.train, counts, seeded(os.getpid()))


class Noisy(Data):
    """Data that adds noise from torch's global random state to training images."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        if self.trainer.training:
            x = x + 0.1 * torch.randn(x.shape)
        return x, y


# -- evaluation


class DropsLast(Data):
    def val_dataloader(self):
        count = VALIDATED // self.trainer.world_size
        first = self.trainer.global_rank * count
        return DataLoader(Subset(self.val, range(first, first + count)), batch_size=4)


class LogsItsOwn(Model):
    on_validation_epoch_end = LightningModule.on_validation_epoch_end

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))


class MeanOfMeans(LogsItsOwn):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]), batch_size=1, sync_dist=True)


# -- learning rate


class ScaledRate(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)


class ByEpoch(Model):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


class ByEstimate(Model):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = OneCycleLR(
            optimizer, 0.2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ByBatch(Model):
    """Advances its scheduler itself on each batch."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.schedule = LambdaLR(optimizer, lambda step: 0.99**step)
        return [optimizer], [{"scheduler": self.schedule, "interval": "epoch", "frequency": 10**6}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.schedule.step()


class LosesItsSchedule(Model):
    """Computes its learning rate from a counter that no checkpoint contains."""

    def on_train_batch_start(self, batch, batch_idx):
        self.mine = getattr(self, "mine", 0) + 1
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 * 0.9**self.mine


# -- network


class Normalised(Model):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


class Dropping(Model):
    def __init__(self):
        super().__init__()
        # drop twice, because dp's threads would draw the whole batch's numbers if one drew after
        # the other
        dropout = nn.Dropout(0.5)
        self.net = nn.Sequential(nn.Flatten(), dropout, nn.Linear(12, 8), dropout, nn.Linear(8, 2))


class Remembers(Model):
    """Model whose loss depends on a mean that `forward` stores in an ordinary attribute."""

    mean: Any = 0.0

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return self.net(x) + torch.tensor([1.0, 0.0]) * self.mean


class PartlyUsed(Model):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


class DriftsOnOneRank(Model):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_rank == 1:
            self.net[1].bias.data += 0.01


class CountsItsOwn(Model):
    """Model with a buffer that sums the means of its own rank's inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += batch[0].mean()


class ClipsTooEarly(Model):
    """Clips each rank's gradient, instead of the mean gradient of all ranks."""

    def on_fit_start(self):
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


class PlainMean(Model):
    """Model whose loss is the mean of a rank's share, although the shares have unequal sizes."""

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])


class Weighted(PlainMean):
    """Weights the samples of a batch by their first pixel."""

    def training_step(self, batch, batch_idx):
        weights = batch[0][:, 0, 0, 0].exp()
        losses = cross_entropy(self(batch[0]), batch[1], reduction="none")
        return (losses * weights).sum() / weights.sum()


class Average(Callback):
    """Evaluates with a moving average of the weights. No checkpoint contains the average."""

    average: Any = None

    def on_train_batch_end(self, trainer, pl_module, *args):
        weight = pl_module.net[1].weight.detach()
        if self.average is None:
            self.average = weight.clone()
        self.average = 0.9 * self.average + 0.1 * weight

    def on_validation_start(self, trainer, pl_module):
        self.kept = pl_module.net[1].weight.detach().clone()
        if self.average is not None:
            pl_module.net[1].weight.data.copy_(self.average)

    def on_validation_end(self, trainer, pl_module):
        pl_module.net[1].weight.data.copy_(self.kept)


class Sum(Model):
    """Model whose loss is a sum over samples instead of a mean."""

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1], reduction="sum")


class NoisyStock(Stock, Noisy):
    """Data with ordinary loaders, and with noise from torch's global random state."""


class Noise(nn.Module):
    """Changes the last bits of its input, on all ranks except rank 0."""

    def forward(self, x):
        return x * (1 + 1e-6 * int(os.environ.get("RANK", 0)))


class Jitters(CIFARCNN):
    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes=num_classes)
        self.network.noise = Noise()
        self.network.register_forward_hook(lambda module, args, logits: module.noise(logits))


class ScaledAndNormalised(ScaledRate, Normalised):
    """Two mistakes in one model."""

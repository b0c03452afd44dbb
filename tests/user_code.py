"""A user's models, data and callbacks: plain Lightning's classes, and subclasses of the app's."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from cluster.hosts import awaited
from lightning import Callback, LightningDataModule, LightningModule
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.utils.data import DataLoader, TensorDataset

from app.data import ImageFolder, Synthetic
from app.modules import CIFARCNN


class TheirModel(LightningModule):
    """A plain LightningModule, with attribute names of its own."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        *_, x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("their_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        *_, x, y = batch
        self.log("their_val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Poisoned(CIFARCNN):
    """CIFARCNN whose loss is NaN for the first epoch's seventh batch, on the last rank only."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_last_rank = self.global_rank == self.trainer.world_size - 1
        if is_last_rank and self.trainer.current_epoch == 0 and batch_idx == 6:
            return loss * float("nan")
        return loss


class Unrepeatable(CIFARCNN):
    """CIFARCNN that calls an operation without a deterministic version in torch."""

    def training_step(self, batch, batch_idx):
        torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
        return super().training_step(batch, batch_idx)


class PoisonedUpdate(CIFARCNN):
    """CIFARCNN whose losses are finite, but whose updates make some weights infinite."""

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        next(self.parameters()).data[0] = float("inf")


class BuildsLate(TheirModel):
    """CIFAR-10 model that creates one layer in `__init__`, the others in `configure_model`."""

    def __init__(self):
        LightningModule.__init__(self)
        self.first = nn.Linear(3 * 32 * 32, 4)

    def configure_model(self):
        self.net = nn.Sequential(nn.Flatten(), self.first, nn.Linear(4, 10))


class Lazy(TheirModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


class SkipsForward(TheirModel):
    """Model that calls its network instead of itself, so that dp has no call to split."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class TheirData(LightningDataModule):
    """Data module with random images of 3×2×2 pixels in ordinary DataLoaders."""

    def __init__(self, count: int = 40):
        super().__init__()
        images = torch.randn((count, 3, 2, 2), generator=torch.Generator().manual_seed(0))
        self.dataset = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.dataset, batch_size=8)


class NamedData(TheirData):
    """TheirData whose batches begin with the names of the images."""

    def train_dataloader(self):
        samples = [(f"{row}.png", *pair) for row, pair in enumerate(self.dataset)]
        return DataLoader(samples, batch_size=8)


class HiddenData(NamedData):
    """NamedData whose training batches hide their tensors."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return iter(batch) if self.trainer.training else batch


class TheirTestedData(TheirData):
    """TheirData with test images."""

    test_dataloader = TheirData.val_dataloader


class TwoLoaders(TheirData):
    """TheirData with two validation loaders."""

    def val_dataloader(self):
        return [super().val_dataloader(), super().val_dataloader()]


class NoValidation(TheirData):
    """TheirData with training images only."""

    val_dataloader = LightningDataModule.val_dataloader


class OddModel(TheirModel):
    """Model whose defaults are nulls, or numbers that this application's own flags reject."""

    def __init__(
        self,
        hidden: int = None,  # noqa: RUF013
        names: list[str] = None,  # noqa: RUF013
        biased: bool = None,  # noqa: RUF013
        clip: float = float("inf"),
        bits: int = 2**70,
        width: int = 8,
    ):
        super().__init__(width)


class OddData(TheirData):
    """Data module whose arguments have the names of `ImageData`'s, but other meanings."""

    def __init__(self, seed: str = None, data_seed: int = -1):  # noqa: RUF013
        super().__init__()


class Float16(MixedPrecision):
    """Plugin for float16 with a gradient scaler on the CPU; Lightning's plugin needs a GPU."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


class OneCycle(CIFARCNN):
    """CIFARCNN that reads the step count before Lightning restores the loop (issue 20550)."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class StopsItself(CIFARCNN):
    """CIFARCNN that sends SIGINT, as Ctrl-C does, to its process in the fourth step."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 3 and not getattr(self, "told", False):
            self.told = True
            os.kill(os.getpid(), signal.SIGINT)


class CannotBePickled(CIFARCNN):
    """CIFARCNN with a lambda as an attribute, which pickle rejects."""

    def __init__(self):
        super().__init__()
        self.scale = lambda x: 2 * x


class SaysItsProcess(CIFARCNN):
    """CIFARCNN that writes each rank's process id into a file."""

    def __init__(self, directory: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.directory = directory

    def on_train_start(self):
        Path(self.directory, f"rank{self.global_rank}").write_text(str(os.getpid()))


class NotesPrecision(TheirModel):
    """Model that prints the precision of its forward pass."""

    def forward(self, x):
        scores = self.net(x)
        # one write, because replicas are threads
        print(f"computed in {scores.dtype} from {x.dtype}\n", end="", flush=True)
        return scores


class Normalises(TheirModel):
    """Model that has BatchNorm, and counts its forward passes in an attribute."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.BatchNorm2d(3, momentum=1.0), self.net
        )  # statistics of the last batch only
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        return self.net(x)


class LogsNothing(TheirModel):
    """Model that logs nothing."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])

    def accuracy(self, batch):
        return (self(batch[0]).argmax(1) == batch[1]).float().mean()


class LogsAccuracy(LogsNothing):
    """Model that logs `val_acc`, one per validation loader, and `test_acc`."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_acc", self.accuracy(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_acc", self.accuracy(batch), sync_dist=True)


class AccuracyFalls(TheirModel):
    """Model that logs an accuracy which gets worse with each epoch."""

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", -float(self.current_epoch))


class LossRises(TheirModel):
    """Model that logs a loss which gets worse with each epoch, and no accuracy."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.current_epoch))


class LogsOtherNames(LogsNothing):
    """Model that logs names with a slash and a space, a NaN, and a loss without an accuracy."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val/their acc", torch.tensor(float("nan")), prog_bar=True, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test/their acc", self.accuracy(batch), sync_dist=True)
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))


class TwoOptimizers(TheirModel):
    """Model with two optimizers and manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[layer].parameters(), lr=0.1) for layer in (1, 3)]


class Fails(TheirModel):
    """Model that fails on the last rank, in the second step of an epoch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1:
            raise RuntimeError("only here")
        return super().training_step(batch, batch_idx)


def speaking_hook(state, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients, and print a line."""
    print("averaged a bucket\n", end="", flush=True)  # one write, because other ranks also print
    return allreduce_hook(None, bucket)


class SaysWhereImagesLie(Callback):
    """Callback that writes a note per rank: the path of the training images' file, checksums."""

    def __init__(self, directory: str):
        self.directory = directory

    def on_train_start(self, trainer, pl_module):
        split = trainer.train_dataloader.split
        images = split.tensor()
        for mapping in psutil.Process().memory_maps(grouped=False):
            start, end = (int(address, 16) for address in mapping.addr.split("-"))
            if start <= images.data_ptr() < end:
                break
        sums = [int(images.sum(dtype=torch.int64)), int(split.labels @ torch.arange(len(split)))]
        note = {"path": mapping.path, "sums": sums}
        Path(self.directory, f"rank{trainer.global_rank}").write_text(json.dumps(note))


class FillsUpOnRank1(Synthetic):
    """Synthetic data that finds no free memory on rank 1."""

    def setup(self, stage):
        assert self.trainer is not None
        if self.trainer.global_rank == 1:
            psutil.virtual_memory = lambda: SimpleNamespace(available=0, total=2**30)
        super().setup(stage)


class TheirImages(ImageFolder):
    """Image folder that might prepare its images in another way."""


class ReadsWhenTold(Synthetic):
    """Synthetic data that rank zero reads only when the test allows it."""

    def setup(self, stage):
        assert self.trainer is not None
        if self.trainer.global_rank == 0:
            place = Path(os.environ["TEST_PLACE"])
            (place / "reads").touch()
            awaited((place / "go").exists, 60)
        super().setup(stage)


class OwnLauncher(LightningEnvironment):
    """A user's launcher that started the processes, and describes them in its own variables."""

    creates_processes_externally = True
    main_address = "127.0.0.1"

    @property
    def main_port(self) -> int:
        return int(os.environ["OWN_PORT"])

    def global_rank(self):
        return int(os.environ["OWN_RANK"])

    def local_rank(self):
        return self.global_rank()

    def set_global_rank(self, rank):
        rank_zero_only.rank = self.global_rank()


class Talks(CIFARCNN):
    """CIFARCNN whose ranks print whether they write to a terminal.

    `stops` enters the debugger in the first step.
    """

    def __init__(self, stops: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.stops = stops

    def on_train_start(self):
        print(f"rank {self.global_rank} writes to a terminal: {sys.stdout.isatty()}", flush=True)

    def training_step(self, batch, batch_idx):
        answer = 6 * 7  # noqa: F841  (for the debugger)
        if self.stops and self.global_step == 0:
            breakpoint()
        return super().training_step(batch, batch_idx)


class FailsOnce(Callback):
    """Callback that fails on rank 1 until an agent has restarted the ranks."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("only once")


class ActsAfter(Callback):
    """Exits, fails, stops or saves after some batches, counted over epochs and resumed runs."""

    def __init__(self, action: str, batches: int):
        self.action, self.batches = action, batches

    def on_train_batch_end(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 != self.batches:
            return
        if self.action == "exit":
            os._exit(9)
        if self.action == "fail":
            raise RuntimeError("as asked")
        if self.action == "save":
            trainer.save_checkpoint("theirs.ckpt")
        trainer.should_stop = True


class CountsLabels(CIFARCNN):
    """CIFARCNN that sums labels in an integer buffer; its mean over shards would need rounding."""

    def __init__(self, num_classes: int = 10):
        super().__init__(num_classes=num_classes)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def training_step(self, batch, batch_idx):
        self.seen += batch[1].sum()
        return super().training_step(batch, batch_idx)


class LogsInAnyOrder(CIFARCNN):
    """CIFARCNN that logs two values on each shard, in alternating order."""

    order = 1

    def training_step(self, batch, batch_idx):
        self.order = -self.order
        for name in ("first", "second")[:: self.order]:
            self.log(name, float(len(name)))
        return super().training_step(batch, batch_idx)


class Inverted(nn.Module):
    """A user's own augmentation."""

    def forward(self, image):
        return 255 - image


class Tiny(nn.Module):
    """Small network with BatchNorm, and dropout before its last layer."""

    def __init__(self, num_classes: int):
        super().__init__()
        convolution = nn.Conv2d(3, 8, 3, stride=2)
        self.features = nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU())
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images):
        features = self.features(images).mean((2, 3))  # (B, 8)
        return self.head(self.dropout(features))

"""What a user of the application may bring along: a model and data that know nothing of it."""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torchvision
from cluster.hosts import awaited
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.utils.data import DataLoader, TensorDataset

from app.data import ImageData, Synthetic
from app.data.sources import CIFAR10Source, Split, SplitName
from app.modules import CIFARCNN, ImageClassifier


class TheirModel(LightningModule):
    """A plain module, with names of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("their_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("their_val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Poisoned(CIFARCNN):
    """Its loss is NaN in one batch of the first epoch, on the last rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        bad = (self.trainer.current_epoch, batch_idx, self.trainer.global_rank) == (0, 6, self.trainer.world_size - 1)
        return loss * float("nan") if bad else loss


class Unrepeatable(CIFARCNN):
    """Calls an operation that torch has in no deterministic version."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))
        return super().training_step(batch, batch_idx)


class SlowRank(CIFARCNN):
    """Its last rank is slow."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank and self.global_rank == self.trainer.world_size - 1:
            time.sleep(0.03)
        return super().training_step(batch, batch_idx)


class PoisonedUpdate(CIFARCNN):
    """Its loss is finite, and its weights are not any more."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        next(self.parameters()).data[0] = float("inf")


class SkipsForward(TheirModel):
    """Calls its network, not itself: dp has nothing to split."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class TheirData(LightningDataModule):
    """Images of 3×2×2 in an ordinary DataLoader."""

    def __init__(self, count: int = 40) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        images = torch.randn((count, 3, 2, 2), generator=generator)
        self.dataset = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=8)


class TheirTestedData(TheirData):
    """Their data, with test images."""

    test_dataloader = TheirData.val_dataloader


class TwoLoaders(TheirData):
    """Their data, with two validation loaders."""

    def val_dataloader(self) -> Any:
        return [super(TwoLoaders, self).val_dataloader() for _ in range(2)]


class NoValidation(TheirData):
    """Their data, with training images only."""

    val_dataloader = LightningDataModule.val_dataloader


class OddModel(TheirModel):
    """Model whose defaults are nulls, and numbers that this application's flags refuse."""

    def __init__(
        self,
        hidden: int = None,  # noqa: RUF013
        names: list[str] = None,  # noqa: RUF013
        biased: bool = None,  # noqa: RUF013
        clip: float = float("inf"),
        bits: int = 2**70,
        width: int = 8,
    ) -> None:
        super().__init__(width)


class OddData(TheirData):
    """Data whose arguments share the names of `ImageData`'s, with other meanings."""

    def __init__(self, seed: str = None, data_seed: int = -1) -> None:  # noqa: RUF013
        super().__init__()


class OfTorchvision(ImageClassifier):
    """Classifier around a torchvision network, which has no `image_shape`."""

    def __init__(self, num_classes: int = 10) -> None:
        network = torchvision.models.squeezenet1_1(num_classes=num_classes)
        super().__init__(network, num_classes, optimizer=partial(torch.optim.SGD, lr=0.01))


class Float16(MixedPrecision):
    """Float16 with a scaler, which Lightning has on a GPU only."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


class OneCycle(CIFARCNN):
    """Reads the number of steps before the checkpoint's loop state is there: Lightning's issue 20550."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StopsItself(CIFARCNN):
    """Gets a Ctrl-C in its fourth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 3 and not getattr(self, "told", False):
            self.told = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)


class StopsOneRank(CIFARCNN):
    """Has rank 1 told to end in its fourth step, the first time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 3 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


class CannotBePickled(CIFARCNN):
    """Keeps a function that has no name to find it by."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = lambda x: 2 * x


class SaysItsProcess(CIFARCNN):
    """Leaves the id of its process in a file for each rank."""

    def __init__(self, directory: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.directory = directory

    def on_train_start(self) -> None:
        Path(self.directory, f"rank{self.global_rank}").write_text(str(os.getpid()))


class FailsWhileRankZeroIsStuck(CIFARCNN):
    """Breaks in one process; the other one waits, and not for the first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            raise RuntimeError("only here")
        threading.Event().wait(100)
        return super().training_step(batch, batch_idx)


class SlowOnRank1(CIFARCNN):
    """Keeps the others waiting."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            threading.Event().wait(0.2)
        return super().training_step(batch, batch_idx)


class NotesPrecision(TheirModel):
    """Says in which precision its forward computes."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.net(x)
        print(f"computed in {scores.dtype} from {x.dtype}\n", end="", flush=True)  # in one write: replicas are threads
        return scores


class Normalises(TheirModel):
    """Keeps running statistics, and counts its forwards on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm2d(3, momentum=1.0), self.net)  # momentum 1: those of the last batch
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.net(x)


class LogsLossOnly(TheirModel):
    """Tests, but logs no accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))


class LogsNothing(TheirModel):
    """Model that logs nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self(batch[0])


class LogsAccuracy(LogsNothing):
    """Model that logs `val_acc`, one per validation loader, and `test_acc`."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)


class LogsOtherNames(LogsNothing):
    """Model that logs names with a slash and a space, and a NaN."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/their acc", torch.tensor(float("nan")), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/their acc", (self(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)


class TwoOptimizers(TheirModel):
    """Model with two optimizers and manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[layer].parameters(), lr=0.1) for layer in (1, 3)]


class FailsOnRank1(TheirModel):
    """Breaks in one process of several."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx == 1:
            raise RuntimeError("only here")
        return super().training_step(batch, batch_idx)


class Fails(TheirModel):
    """Breaks in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise RuntimeError("the third step is broken")
        return super().training_step(batch, batch_idx)


class FailingModel(CIFARCNN):
    """Breaks in its first step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise RuntimeError("this model fails")


class NeverReady(CIFARCNN):
    """Model whose set-up outlasts the time limit."""

    def setup(self, stage: str) -> None:
        threading.Event().wait(300)


class HangingModel(CIFARCNN):
    """Never comes to the end of its first step, nor to that of the process when it is told to."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait(300)
        return super().training_step(batch, batch_idx)


def speaking_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Says each bucket of gradients that it averages."""
    print("averaged a bucket\n", end="", flush=True)  # in one write: other ranks print, too
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]


class TakesItsTime(Callback):
    """Five seconds more for each step."""

    def on_train_batch_start(self, *_: Any) -> None:
        threading.Event().wait(5)


class SaysWhereImagesLie(Callback):
    """Notes for each rank which mapping of its memory holds the training images, and what they come to."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        split = trainer.train_dataloader.split
        images = split.tensor()
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, _, _, inode, *path = line.split(maxsplit=5)
            start, end = (int(address, 16) for address in span.split("-"))
            if start <= images.data_ptr() < end:
                break
        sums = [int(images.sum(dtype=torch.int64)), int(split.labels @ torch.arange(len(split)))]
        note = {"inode": int(inode), "path": "".join(path), "sums": sums, "process": os.getpid()}
        Path(self.directory, f"rank{trainer.global_rank}").write_text(json.dumps(note))


class NotingSource(CIFAR10Source):
    """Says in which process it reads, and takes the files for right that are there."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.checksums = {file: hashlib.md5(file.read_bytes()).hexdigest() for file in self.files}

    def load(self, split: SplitName) -> Split:
        print(f"{split} is read by process {os.getpid()}\n", end="", flush=True)
        return super().load(split)


class TinyCIFAR10(ImageData):
    """CIFAR-10's files, of another content than the published one."""

    def __init__(self, root: str, **kwargs: Any) -> None:
        super().__init__(NotingSource(root), **kwargs)


class FillsUpOnRank1(Synthetic):
    """Finds no memory left on one rank."""

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        if self.trainer.global_rank == 1:
            psutil.virtual_memory = lambda: SimpleNamespace(available=0, total=2**30)  # type: ignore[assignment]
        super().setup(stage)


class ReadsWhenTold(Synthetic):
    """Rank zero is long in reading."""

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        if self.trainer.global_rank == 0:
            place = Path(os.environ["TEST_PLACE"])
            (place / "reads").touch()
            awaited((place / "go").exists, 60)
        super().setup(stage)


class OwnLauncher(LightningEnvironment):
    """Somebody's own: it has started the processes, and tells them what they are by variables of its own."""

    creates_processes_externally = True
    main_address = "127.0.0.1"

    @property
    def main_port(self) -> int:
        return int(os.environ["OWN_PORT"])

    def global_rank(self) -> int:
        return int(os.environ["OWN_RANK"])

    def local_rank(self) -> int:
        return self.global_rank()

    def set_global_rank(self, rank: int) -> None:
        rank_zero_only.rank = self.global_rank()


class Talks(CIFARCNN):
    """Says where it runs and what it writes to, on every rank, and stops in the debugger on its first step."""

    def __init__(self, stops: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stops = stops

    def on_train_start(self) -> None:
        print(f"rank {self.global_rank} writes to a terminal: {sys.stdout.isatty()}", flush=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        answer = 6 * 7  # noqa: F841  (for the debugger)
        if self.stops and self.global_step == 0:
            breakpoint()
        return super().training_step(batch, batch_idx)


class FailsOnce(Callback):
    """Fails on rank 1, until an agent has started the ranks again."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("only once")


class CountsLabels(CIFARCNN):
    """Counts in an integer buffer, whose mean over shards would be rounded."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes=num_classes)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[1].sum()
        return super().training_step(batch, batch_idx)


class LogsInAnyOrder(CIFARCNN):
    """Logs the lengths of two names on each shard, in an order that changes."""

    order = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.order = -self.order
        for name in ("first", "second")[:: self.order]:
            self.log(name, float(len(name)))
        return super().training_step(batch, batch_idx)


class Inverted(nn.Module):
    """An augmentation of the user's own."""

    def forward(self, image: Tensor) -> Tensor:
        return 255 - image

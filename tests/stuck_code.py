"""Models, data and callbacks that slow or hang a rank."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
from lightning import Callback, Trainer
from torch import distributed, nn

from app.data import Synthetic
from app.modules import CIFARCNN

HANGS = 12  # number of steps before the hang


def must_hang(trainer: Trainer) -> bool:
    return (
        trainer.training
        and trainer.global_rank == trainer.world_size - 1
        and trainer.global_step >= HANGS
    )


class SleepsInData(Synthetic):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer is not None and self.trainer.global_rank == self.trainer.world_size - 1:
            time.sleep(0.02)
        return super().on_after_batch_transfer(batch, dataloader_idx)


def never_ends():
    parent = os.getppid()
    while os.getppid() == parent:
        pass


class LoopsInData(Synthetic):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer is not None and must_hang(self.trainer):
            while True:
                pass
        return super().on_after_batch_transfer(batch, dataloader_idx)


class LoopsInAWorker(nn.Module):
    """Augmentation that stops returning after some images, in the worker processes of rank 1."""

    def __init__(self):
        super().__init__()
        self.images = 0

    def forward(self, image):
        self.images += 1
        while os.environ.get("LOCAL_RANK") == "1" and self.images > 20 * HANGS:
            pass
        return image


class LoopsInSetup(Synthetic):
    def setup(self, stage):
        while self.trainer is not None and self.trainer.global_rank == 1:
            pass
        super().setup(stage)


class LeavesTheEpochEarly(CIFARCNN):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if must_hang(self.trainer) else None


class ReducesAlone(CIFARCNN):
    def training_step(self, batch, batch_idx):
        if must_hang(self.trainer):
            distributed.all_reduce(torch.zeros(1))
        return super().training_step(batch, batch_idx)


class WaitsElsewhere(CIFARCNN):
    """Model whose two ranks wait for each other in collective calls of different groups."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step >= HANGS:
            groups = [distributed.new_group() for _ in range(2)]
            Path(str(self.trainer.log_dir), f"stuck_{self.global_rank}").touch()
            distributed.barrier(groups[self.global_rank])
        return super().training_step(batch, batch_idx)


class FailsWhileRankZeroIsStuck(CIFARCNN):
    """Fails on rank 1, while rank 0 hangs outside of any collective call."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            raise RuntimeError("only here")
        threading.Event().wait(100)
        return super().training_step(batch, batch_idx)


class NeverReady(CIFARCNN):
    """Model whose set-up outlasts the time limit."""

    def setup(self, stage):
        threading.Event().wait(300)


class HangingModel(CIFARCNN):
    """Never finishes the first step, and ignores SIGTERM."""

    def training_step(self, batch, batch_idx):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait(300)
        return super().training_step(batch, batch_idx)


class TakesItsTime(Callback):
    """Lengthens each step by five seconds."""

    def on_train_batch_start(self, *_):
        threading.Event().wait(5)

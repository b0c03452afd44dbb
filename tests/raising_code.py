"""User classes that raise an exception; each traceback has two frames of user code."""

import time

import torch
from lightning import Callback

from app.launch.signals import Signals
from app.modules import CIFARCNN


class Augment(torch.nn.Module):
    def forward(self, image):
        return self.fail(image)

    def fail(self, image):
        raise RuntimeError("of mine")


class Model(CIFARCNN):
    def training_step(self, batch, batch_idx):
        return self.fail(batch)

    def fail(self, batch):
        return torch.nn.functional.linear(batch[0], torch.zeros(3, 5))


class Late(Model):
    """Rank 0 fails after rank 1, when the agent stops it."""

    def training_step(self, batch, batch_idx):
        while self.global_rank == 0 and not Signals.of(self.trainer).noted:
            time.sleep(0.01)
        return self.fail(batch)


class Built(CIFARCNN):
    def __init__(self):
        self.fail()

    def fail(self):
        torch.nn.Linear("x", 1)


class Calls(Callback):
    def on_train_start(self, trainer, pl_module):
        self.fail(pl_module)

    def fail(self, module):
        module.backbone()

"""Models of users, with what their checkpoints must hold or cannot hold."""

import enum

import torch
from torch import nn
from user_code import TheirModel


class StepsItself(TheirModel):
    """Model that steps an optimizer which Lightning does not wrap, as SAM's code does."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizer.step()

    def configure_optimizers(self):
        self.optimizer = super().configure_optimizers()
        return self.optimizer


class FineTuned(TheirModel):
    """Model with a backbone, which a callback trains later than the head."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(12)
        self.backbone = nn.Sequential(nn.Flatten(), norm, nn.Linear(12, 12), nn.BatchNorm1d(12))
        self.net = nn.Sequential(self.backbone, nn.ReLU(), nn.Linear(12, 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


class Mode(enum.Enum):
    FAST = "fast"


class SavesMode(TheirModel):
    """Model that saves an enumeration in its checkpoints, and may allow torch to load it."""

    def __init__(self, allows: bool = False):
        super().__init__()
        if allows:
            torch.serialization.add_safe_globals([Mode])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["settings"] = {"width": 8, "modes": [Mode.FAST]}


class KeepsObjects(TheirModel):
    """Model with a module and a class as hyperparameters, and random steps and saves."""

    def __init__(self, scale: float = 2.0):
        super().__init__()
        self.save_hyperparameters({"act": nn.ReLU(), "scale": scale, "optimizer": torch.optim.SGD})

    def forward(self, x):
        return super().forward(x + torch.rand_like(x))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["drawn"] = torch.rand(1)

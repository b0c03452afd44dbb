"""Sums over a logging window and an epoch of training: losses, correct predictions, samples."""

import operator

import torch
from lightning import Trainer
from torch import Tensor


def log_window(trainer: Trainer) -> int:
    """Return the length of a logging window: the number of steps between two logged losses."""
    return max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]  # a connector sets it


class Sums:
    """Sums of losses and correct predictions on the device, read once per logging window.

    The sums are float64 (float32 on MPS), so that the order of additions does not change the logged
    values.

    Args:
        device: Device of the losses.

    Attributes:
        epoch: Sums of losses, correct predictions and samples in the epoch's completed windows,
            over all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        precise = torch.float32 if device.type == "mps" else torch.float64
        self.window = torch.zeros(3, dtype=precise, device=device)
        self.losses, self.correct, self.samples = self.window.unbind()
        self.count = 0
        self.epoch = [0.0] * 3

    def add(self, losses: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add losses (B,), logits (B, classes), and labels (B,) or probabilities (B, classes)."""
        self.losses.add_(losses.sum(dtype=self.window.dtype))
        labels = labels if labels.ndim == 1 else labels.argmax(1)
        self.correct.add_(torch.eq(logits.argmax(1), labels).sum())
        self.count += labels.shape[0]

    def _of_window(self, trainer: Trainer) -> list[float]:
        """Return all ranks' losses, correct predictions and samples in the window. Collective."""
        self.samples.fill_(self.count)
        return trainer.strategy.reduce(self.window.clone(), reduce_op="sum").tolist()

    def state_dict(self, trainer: Trainer) -> dict[str, list[float]]:
        """Return all ranks' sums in the window, and in the epoch's completed ones. Collective."""
        return {"window": self._of_window(trainer), "epoch": self.epoch}

    def load_state_dict(self, trainer: Trainer, state: dict[str, list[float]]) -> None:
        """Continue window and epoch of a state; rank zero continues the sums of all ranks."""
        self.epoch = state["epoch"]
        if trainer.is_global_zero:
            self.window.copy_(torch.tensor(state["window"], dtype=self.window.dtype))
            self.count = int(state["window"][2])

    def end_window(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the window's mean loss by metric name, and reset the window. Collective.

        If the window has no samples, return an empty dict.
        """
        window = self._of_window(trainer)
        self.epoch = list(map(operator.add, self.epoch, window))
        self.window.zero_()
        self.count = 0
        return _means(window, "train_loss_step")

    def end_epoch(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the epoch's mean loss and accuracy by metric name, and reset. Collective.

        If the epoch has no samples, return an empty dict.
        """
        self.end_window(trainer)
        epoch = self.epoch
        self.epoch = [0.0] * 3
        return _means(epoch, "train_loss", "train_acc")


def _means(sums: list[float], *names: str) -> dict[str, Tensor]:
    """Return means by metric name; none without samples: a user's `training_step` may add none."""
    *totals, samples = sums
    if not samples:
        return {}
    return {name: torch.tensor(total / samples) for name, total in zip(names, totals, strict=False)}

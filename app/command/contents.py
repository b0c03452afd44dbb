"""Callback for a checkpoint's contents: tried before the first epoch, and frozen layers."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning

FROZEN = "frozen"  # key in a checkpoint


class Contents(Callback):
    """Callback that saves and restores the layers that a fine-tuning callback has frozen.

    Lightning freezes a resumed run's layers as at the start of training.
    """

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the names of frozen parameters, and of norms that keep their statistics."""
        if finetunes(trainer):
            frozen = [name for name, p in pl_module.named_parameters() if not p.requires_grad]
            for name, module in pl_module.named_modules():
                if not getattr(module, "track_running_stats", True):
                    frozen.append(name)
            checkpoint[FROZEN] = frozen

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Freeze the layers that were frozen, and no others, before DDP wraps the model."""
        if trainer.state.fn != "fit" or not finetunes(trainer) or FROZEN not in checkpoint:
            return
        frozen = set(checkpoint[FROZEN])
        for name, parameter in pl_module.named_parameters():
            parameter.requires_grad = name not in frozen
        for name, module in pl_module.named_modules():
            if hasattr(module, "track_running_stats"):
                module.track_running_stats = name not in frozen


def finetunes(trainer: Any) -> bool:
    """Return whether a callback freezes and unfreezes layers."""
    return any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)

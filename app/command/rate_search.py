"""Search for a learning rate before a training: `--run.find_lr true`.

Lightning's finder takes 100 steps with a growing rate, on a model, data and Trainer that are built
anew afterwards. So the training has the same bits as with the found rate given by hand.
"""

from typing import Any

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import lr_finder

from app.launch.signals import Signals
from app.modules import ImageClassifier
from app.record import RateSearch
from app.system.lightning_patches import do_nothing
from app.system.patches import expects

# settings that may hold the learning rate
RATES = (
    "model.init_args.optimizer.init_args.lr",
    "model.init_args.lr",
    "model.init_args.learning_rate",
)
MOMENTUM = 0.98  # of the finder's moving average of the losses
LOWEST = 1e-6  # first rate of the search
FALL = 0.02  # fraction of the loss by which a descent must fall, to be more than noise


@expects("lightning.pytorch.tuner.lr_finder:_LRCallback.on_train_batch_end")
class GlobalLoss(lr_finder._LRCallback):
    """Finder's callback: the mean loss of all ranks, from the head's first weights on, no bar."""

    def __init__(self, num_training: int, early_stop_threshold: float | None, **_: Any) -> None:
        super().__init__(num_training, early_stop_threshold)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the head, as the training will: the finder drops the model's callbacks."""
        if isinstance(pl_module, ImageClassifier):
            for callback in pl_module.configure_callbacks():
                callback.on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Average the loss over the ranks."""
        if outputs:
            loss = trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="mean")
            outputs = {"loss": loss}
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class RateFinder(LearningRateFinder):
    """Finder that skips the training, and leaves its curve in the Trainer's metrics.

    Spawned processes return these metrics to their parent.
    """

    def lr_find(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search, and end."""
        lr_finder._LRCallback = GlobalLoss  # type: ignore[misc, assignment]
        trainer.fit_loop.max_epochs = -1  # the search may take more epochs than the training
        super().lr_find(trainer, pl_module)
        trainer.fit_loop.max_epochs = 0
        assert self.optimal_lr is not None
        for name, values in self.optimal_lr.results.items():
            trainer.callback_metrics[name] = torch.tensor(values, dtype=torch.float64)


def search(trainer: Trainer, model: LightningModule, data: Any) -> RateSearch:
    """Search on a Trainer that trains nothing else; the suggestion may be None. Collective."""
    trainer.callbacks = [RateFinder(LOWEST, update_attr=False)]  # type: ignore[attr-defined]
    trainer.num_sanity_val_steps = 0
    Signals.of(trainer).register_signal_handlers = do_nothing  # a signal ends the search at once
    trainer.fit(model, datamodule=data)
    rates = trainer.callback_metrics["lr"].numpy()
    losses = trainer.callback_metrics["loss"].numpy()
    # Lightning divides the average of n losses by 1 - MOMENTUM^(n + 1), not by 1 - MOMENTUM^n
    powers = MOMENTUM ** np.arange(1, len(losses) + 1)
    losses = losses * (1 - MOMENTUM * powers) / (1 - powers)
    return RateSearch(valley(rates, losses), rates.tolist(), losses.tolist())


def valley(rates: np.ndarray, losses: np.ndarray) -> float | None:
    """Return the rate in the middle of the longest descent, or None if there is only noise.

    A descent is a sequence of falling losses with others between them. Lightning's own suggestion,
    the steepest point against the rate, follows the noise of the smallest rates.
    Source: fastai, `callback/schedule.py`, `valley`.
    """
    lengths: list[int] = []
    for loss in losses:
        before = [length for length, other in zip(lengths, losses, strict=False) if other > loss]
        lengths.append(max(before, default=0) + 1)
    end = int(np.argmax(lengths))
    if not losses[end] < (1 - FALL) * np.nanmax(losses[:end], initial=0.0):
        return None
    rate = rates[end - lengths[end] // 2]
    return float(f"{rate:.2g}")  # rounded, so that it can be typed

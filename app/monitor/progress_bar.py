"""The progress bar: drawn a few times a second, whatever the number of steps."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from app.monitor.run_record import RunRecord, learning_rate

PER_SECOND = 4


class ProgressBar(RichProgressBar):
    """Lightning's bar, brought up to date 4 times a second: on every step it costs time, and redraws a notebook."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=PER_SECOND)
        self._due = 0.0

    def _is_due(self, last: bool) -> bool:
        now = time.perf_counter()
        if now < self._due and not last:
            return False
        self._due = now + 1 / PER_SECOND
        return True

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """What was logged for the bar, the rate of the last logging window, and the learning rate."""
        shown = super().get_metrics(trainer, pl_module)
        rate = next((c.rate for c in trainer.callbacks if isinstance(c, RunRecord)), None)  # type: ignore[attr-defined]
        if trainer.training and rate is not None:
            shown["samples/s"] = f"{rate:,.0f}"
        if trainer.training and (lr := learning_rate(trainer)) is not None:
            shown["lr"] = f"{lr:.3g}"
        return shown

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Show a step, unless one was shown just now; the last one of an epoch in any case."""
        if self._is_due(trainer.is_last_batch):
            super().on_train_batch_end(trainer, *args)

    def on_validation_batch_end(self, *args: Any) -> None:
        """Show a batch, unless one was shown just now; the last one in any case."""
        if self.is_enabled and self._is_due(args[4] + 1 == self.total_val_batches_current_dataloader):
            super().on_validation_batch_end(*args)

    def on_test_batch_end(self, *args: Any) -> None:
        """Show a batch, unless one was shown just now; the last one in any case."""
        if self.is_enabled and self._is_due(args[4] + 1 == self.total_test_batches_current_dataloader):
            super().on_test_batch_end(*args)

    def on_predict_batch_end(self, *args: Any) -> None:
        """Show a batch, unless one was shown just now; the last one in any case."""
        if self.is_enabled and self._is_due(args[4] + 1 == self.total_predict_batches_current_dataloader):
            super().on_predict_batch_end(*args)

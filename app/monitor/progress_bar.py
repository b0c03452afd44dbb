"""The progress bar: drawn a few times a second, whatever the number of steps."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

PER_SECOND = 4


class SeldomProgressBar(RichProgressBar):
    """Lightning's bar, brought up to date 4 times a second: on every step it costs time, and redraws a notebook."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=PER_SECOND)
        self._shown = 0.0

    def _is_due(self, last: bool) -> bool:
        now = time.perf_counter()
        if not last and now - self._shown < 1 / PER_SECOND:
            return False
        self._shown = now
        return True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show a step, unless one was shown just now; the last one of an epoch in any case."""
        if self._is_due(trainer.is_last_batch):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show a batch, unless one was shown just now; the last one in any case."""
        if self._is_due(batch_idx + 1 == self.total_val_batches_current_dataloader):
            super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show a batch, unless one was shown just now; the last one in any case."""
        if self._is_due(batch_idx + 1 == self.total_test_batches_current_dataloader):
            super().on_test_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show a batch, unless one was shown just now; the last one in any case."""
        if self._is_due(batch_idx + 1 == self.total_predict_batches_current_dataloader):
            super().on_predict_batch_end(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)

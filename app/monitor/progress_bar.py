"""Progress bar with samples/s and the remaining time of the whole training."""

import time
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn

from app.monitor.run_record import RunRecord
from app.record.words import duration

PER_SECOND = 4


class ProgressBar(RichProgressBar):
    """Progress bar that updates at most 4 times a second, because each update costs time.

    The bar is drawn only in a terminal or a notebook.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=PER_SECOND)
        self._due = 0.0

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is drawn."""
        console = get_console()
        return super().is_enabled and (console.is_terminal or console.is_jupyter)

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return the columns to the left of the metrics."""
        return [TextColumn("{task.description}"), BarColumn(bar_width=10), MofNCompleteColumn()]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the epoch, counted from 1."""
        super().on_train_epoch_start(trainer, pl_module)
        if self.progress is not None and self.train_progress_bar_id is not None:
            epoch = f"epoch {trainer.current_epoch + 1}"
            if trainer.max_epochs is not None and trainer.max_epochs > 0:
                epoch += f"/{trainer.max_epochs}"
            self.progress.update(self.train_progress_bar_id, description=epoch)
            # remove the bar at the end; the epochs' printed lines remain
            self.progress.live.transient = True

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Update the bar when it is due, and after the last step of an epoch."""
        now = time.perf_counter()
        if now >= self._due or trainer.is_last_batch:
            self._due = now + 1 / PER_SECOND
            super().on_train_batch_end(trainer, *args, **kwargs)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the logged metrics, samples/s, and the remaining time."""
        logged = super().get_metrics(trainer, pl_module)
        logged.pop("v_num", None)
        shown = {}
        for name, value in logged.items():
            shown[name.removesuffix("_step")] = value
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunRecord):
                left = callback.windows.time_left(trainer)
                if callback.windows.rate is not None:
                    shown["samples/s"] = f"{callback.windows.rate:,.0f}"
                if left is not None:
                    shown["left"] = duration(left)
        return shown

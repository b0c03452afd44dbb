"""The progress bar: one line, drawn a few times a second, whatever the number of steps."""

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from app.monitor.run_record import RunRecord
from app.record.words import duration

PER_SECOND = 4


class ProgressBar(LightningBar):
    """Shows the epoch, its steps, the logged metrics, samples/s, and the time left of the whole training.

    It refreshes 4 times a second, because a refresh on every step costs time and redraws a notebook. Without a terminal
    or a notebook there is no bar; the lines of the epochs remain.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_enabled, self._due = True, 0.0
        self._progress: Progress | None = None
        self._record: RunRecord | None = None
        self._epoch: tuple[str, float] = "", 0.0  # description and number of steps, between evaluations

    def disable(self) -> None:
        """Show nothing: another rank does."""
        self._is_enabled = False

    def enable(self) -> None:
        """Show it again."""
        self._is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        get_console().print(*args)

    def _begin(self, description: str, total: float, completed: int = 0) -> None:
        """Show the first of some steps."""
        console = get_console()
        if not self._is_enabled or not (console.is_terminal or console.is_jupyter):
            return
        if self._progress is None:
            one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}", table_column=one_line),
                console=console,
                refresh_per_second=PER_SECOND,
                transient=True,
                expand=True,
            )
            self._progress.add_task(description, total=None, figures="")
            self._progress.start()
        (task,) = self._progress.task_ids
        known = total if total != float("inf") else None
        self._progress.reset(task, description=description, total=known, completed=completed, figures="")

    def _show(self, completed: int, figures: str = "") -> None:
        assert self._progress is not None
        (task,) = self._progress.task_ids
        self._progress.update(task, completed=completed, figures=figures)

    def _is_due(self, last: bool) -> bool:
        if self._progress is None:
            return False
        now = time.perf_counter()
        if now < self._due and not last:
            return False
        self._due = now + 1 / PER_SECOND
        return True

    def _end(self, *_: Any, **__: Any) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    on_train_end = on_test_end = on_predict_end = on_exception = teardown = _end

    # -- training -------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find who knows how fast it is."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._record = next((each for each in callbacks if isinstance(each, RunRecord)), None)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin or resume an epoch."""
        limit = trainer.max_epochs
        of = f"/{limit}" if limit is not None and limit > 0 else ""
        self._epoch = f"epoch {trainer.current_epoch + 1}{of}", self.total_train_batches
        self._begin(*self._epoch, trainer.fit_loop.batch_idx + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show a step, unless one was shown just now; the last one of an epoch in any case."""
        if self._is_due(trainer.is_last_batch):
            logged = self.get_metrics(trainer, pl_module)
            figures = [f"{name.removesuffix('_step')} {_text(value)}" for name, value in logged.items()]
            if self._record is not None:
                figures += [f"{self._record.rate:,.0f}/s"] if self._record.rate is not None else []
                left = self._record.time_left(trainer)
                figures += [f"{duration(left)} left"] if left is not None else []
            self._show(batch_idx + 1, "  ".join(figures))

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the metrics that were logged for the bar."""
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        return shown

    # -- evaluation -----------------------------------------------------------------------------------------

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin with the first batch of a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_val_batches_current_dataloader
            self._begin(f"{self._epoch[0]}, validation".removeprefix(", "), total)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume the epoch."""
        self.reset_dataloader_idx_tracker()
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._begin(*self._epoch, trainer.fit_loop.batch_idx + 1)
        else:
            self._end()

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin with the first batch of a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            self._begin("test", self.total_test_batches_current_dataloader)

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin with the first batch of a loader."""
        if self.has_dataloader_changed(dataloader_idx):
            self._begin("predict", self.total_predict_batches_current_dataloader)

    def _evaluated(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int, _: int = 0
    ) -> None:
        if self._is_due(last=False):
            self._show(index + 1)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _evaluated  # type: ignore[assignment]

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the loaders anew."""
        self.reset_dataloader_idx_tracker()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the loaders anew."""
        self.reset_dataloader_idx_tracker()

    on_predict_start = on_test_start


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

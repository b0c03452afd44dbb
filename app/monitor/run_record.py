"""Callback that writes the run record to `run.json`."""

import os
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from app.data.batches import tensors
from app.data.exact_loader import order_of
from app.data.module import ImageData
from app.errors import SMALLER, ExitStatus, RankError, UserError, out_of_memory
from app.launch.agree import gather_objects
from app.launch.failures import explained
from app.launch.process import BEGAN
from app.launch.signals import cause
from app.modules.probe import Probe
from app.monitor.fill import (
    devices_of,
    fill_configuration,
    fill_measurements,
    fill_model,
    memory_of,
    metrics_of,
)
from app.monitor.header import fill_recipe
from app.monitor.image_grid import draw_images, first_images
from app.monitor.loggers import MetricsFile, trackers, write_rows
from app.monitor.summary import epoch_line
from app.monitor.windows import Windows
from app.record import Checkpoints, Epoch, Metrics, Record
from app.system.files import whole

# metrics that an epoch's row has under another name, or not at all
IN_ROW = re.compile(r".*_step|lr-.*|train_loss|val_loss|val_acc")


class RunRecord(Callback):
    """Callback that writes `run.json`, even if the run fails or is interrupted.

    `Windows` measures throughput, `app.monitor.fill` fills the record, and this callback decides
    when.

    Args:
        command: The command line.
        warmup_epochs: Number of first epochs to exclude from throughput.
        checkpoints: Callbacks of the best and the last checkpoint; by default the trainer's.

    Attributes:
        record: The run record.
        started: Monotonic time when the command, or a change of a live run's ranks, began.
        windows: The throughput so far.
    """

    def __init__(
        self, command: str, warmup_epochs: int = 0, checkpoints: Sequence[ModelCheckpoint] = ()
    ) -> None:
        self.record = Record(command=command)
        self.windows = Windows(warmup_epochs)
        self.path: Path | None = None  # None on ranks that write no record
        self._checkpoints = checkpoints
        self.started = float(os.environ.get(BEGAN, time.monotonic()))
        self._open_epoch: Epoch | None = None
        self._validated = False
        self._learning_rate: float | None = None

    # -- the run as a whole
    # ---------------------------------------------------------------------------------

    def continue_record(self, folder: Path, earlier: Record) -> None:
        """Continue the record of a training that resumes in the same directory.

        Args:
            folder: Directory of the run.
            earlier: Record of the run up to now.
        """
        self.record = replace(
            earlier,
            command=self.record.command,
            resumed_from=self.record.resumed_from,
            launchers=self.record.launchers,
            status="running",
            error=None,
            validation=None,
            test=None,
            tested=None,
            run_dir=str(folder),
            parts=[*earlier.parts, earlier.last_part()],
        )
        with suppress(OSError):  # if this fails, the next write reports the error
            self.record.save(folder / "run.json")  # spawned ranks continue this record

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fill in the configuration; a test after fit continues the same record."""
        directory = trainer.log_dir
        if not trainer.is_global_zero or directory is None:
            return
        self._find(directory)
        fill_configuration(self.record, trainer)
        self.record.status = "running"
        self.record.tracker = next((tracker.id for tracker in trackers(trainer.loggers)), None)
        self._write()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Complete the record, and log it to the tracker."""
        if self.path is None:
            return
        # a training that reached its end is complete, also if a signal then ends the command
        signal = None if self.record.finished else cause(trainer)
        self.record.status = "interrupted" if signal else "completed"
        self.record.error = f"by {signal}" if signal else None
        self._write()
        for tracker in trackers(trainer.loggers):
            tracker.log_record(self.record)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Record why the run ends. This hook is not collective, because other ranks may be gone."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.training and isinstance(data, ImageData) and out_of_memory(exception):
            size = data.global_batch_size
            if size >= 2 * trainer.world_size:
                batches = 2 * trainer.accumulate_grad_batches
                exception.add_note(
                    f"{SMALLER} {size // 2} with --trainer.accumulate_grad_batches {batches}"
                )
        directory = getattr(trainer.logger, "log_dir", None)
        if directory is None or not trainer.is_global_zero:
            return
        self._find(directory)
        end = ExitStatus.of(explained(exception))
        rank_failed = isinstance(exception, RankError)
        better = end.status == "interrupted" or rank_failed
        if self.record.status == "interrupted" or (self.record.status == "failed" and not better):
            return  # a spawned process has recorded the reason
        self.record.status = end.status
        self.record.error = end.reason
        has_trained = self.windows.first_step is not None and trainer.state.fn == "fit"
        if has_trained and not rank_failed:
            self._close_epoch(trainer)
            self._measure(trainer)
        self._write()

    def _find(self, directory: str) -> None:
        """Continue the directory's record: that of a spawned rank's parent, or of the run before.

        An exception may come before `setup`, or from a spawned process.
        """
        path = Path(directory, "run.json")
        if self.path is None and path.exists():
            with suppress(ValueError):
                self.record = Record.load(path)
        self.path = path
        self.record.run_dir = directory

    def _write(self) -> None:
        assert self.path is not None
        config = self.path.with_name("config.yaml")
        # absent in a notebook
        self.record.config = str(config) if config.exists() else None
        try:
            self.record.save(self.path)
            if self.record.epochs:
                rows = []
                for row in self.record.epochs:
                    cells = asdict(row) | row.metrics
                    cells["epoch"] += 1  # as on the screen
                    del cells["metrics"]
                    rows.append(cells)
                write_rows(self.path.with_name("epochs.csv"), rows)
        except OSError as error:
            rank_zero_warn(f"{self.path} cannot be written ({error.strerror}): training continues")

    def _draw(self, batch: Any, data: Any) -> None:
        """Draw the first images as the network gets them."""
        if self.path is None or not isinstance(data, ImageData):
            return
        rows = first_images(batch, data)
        if rows:
            picture = self.path.with_name("train_batch.png")
            with suppress(OSError), whole(picture) as file:  # `_write` reports a full disk
                file.write(draw_images(rows))

    # -- training
    # -------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the model, and reset the accelerator's peak memory.

        If unreadable images are skipped, also check that all nodes read the same images; the check
        is collective.
        """
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, ImageData) and data.source.skips:
            contents = gather_objects((trainer.node_rank, data.content))
            first = contents[0][1]
            for node, content in contents:
                if content != first:
                    raise UserError(
                        f"--data.on_bad_image skip: node {node} reads other images than node 0 "
                        f"({content}, {first}): give all nodes the same files"
                    )
        fill_model(self.record, trainer, pl_module)
        fill_recipe(self.record, trainer)
        for device in devices_of(trainer):
            if device.type == "cuda":  # a run on the CPU must not start CUDA
                torch.cuda.reset_peak_memory_stats(device)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the previous epoch's row, and start the clocks."""
        order = order_of(trainer.train_dataloader)
        if self.record.global_batch_size is None and order is not None:
            self.record.global_batch_size = order.batch_size
        self._close_epoch(trainer)
        self.windows.begin_epoch(trainer)
        if trainer.optimizers:
            self._learning_rate = float(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """At the first step, record the set-up time, and start the clocks."""
        if self.windows.first_step is None:
            self._draw(batch, trainer.datamodule)  # type: ignore[attr-defined]
            self.record.setup_s = round(time.monotonic() - self.started, 3)
            if self.path is not None:
                self._write()
            self.windows.begin_training(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step and its samples."""
        order = order_of(trainer.train_dataloader)
        if order is not None:
            samples = order.global_count(batch_idx)
        else:
            sizes = (len(leaf) for leaf in tensors(batch) if leaf.ndim)
            samples = next(sizes, 0) * trainer.world_size
        self.windows.add_step(trainer, samples)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the window that validation interrupted."""
        self._validated = not trainer.sanity_checking
        self.windows.begin_window(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            is_first = trainer.global_step == 0 and self.record.probe is None
            if isinstance(callback, Probe) and callback.seconds is not None and is_first:
                self.record.probe = Epoch(-1, seconds=round(callback.seconds, 3))
                self._complete(trainer, self.record.probe)
        if trainer.state.fn == "validate":
            self.record.validation = metrics_of(trainer, "val")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the epoch's row; `_close_epoch` adds the metrics, which are logged later."""
        row = Epoch(trainer.current_epoch, trainer.is_last_batch, lr=self._learning_rate)
        row.seconds = round(self.windows.end_epoch(trainer), 3)
        if self.windows.epoch_rates:
            row.samples_per_s = round(statistics.median(self.windows.epoch_rates), 1)
        self._open_epoch = row

    def _close_epoch(self, trainer: Trainer) -> None:
        row = self._open_epoch
        if row is None:
            return
        self._open_epoch = None
        row.train_loss = metrics_of(trainer, "train").loss
        self.record.epochs.append(row)
        self._complete(trainer, row)

    def _complete(self, trainer: Trainer, row: Epoch) -> None:
        """Add the validation to an epoch's row, print the epoch's line, and write the record."""
        validated = self._validated
        self._validated = False
        if validated:
            validation = metrics_of(trainer, "val")
            row.val_loss = validation.loss
            row.val_acc = validation.acc
            row.val_samples = validation.samples
        for name, value in trainer.callback_metrics.items():
            is_older = name.startswith("val") and not validated
            if not (is_older or IN_ROW.fullmatch(name)):
                row.metrics[name] = float(value)
        if self.path is None:
            return
        if trainer.progress_bar_callback is not None:  # print a line, which stays above the bar
            devices = memory_of(trainer)
            line = epoch_line(
                row,
                trainer.max_epochs,
                is_best=row is self.record.best_epoch,
                memory=max(device.allocated_gib or device.host_rss_gib for device in devices),
                left=self.windows.time_left(trainer),
            )
            print(line, flush=True)
        self._measure(trainer)
        self._write()

    def _measure(self, trainer: Trainer) -> None:
        fill_measurements(self.record, trainer, self.windows)
        callbacks = self._checkpoints or trainer.checkpoint_callbacks
        paths = [getattr(callback, "best_model_path", None) or None for callback in callbacks]
        self.record.checkpoint = Checkpoints(*paths[:2])

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the last epoch, and gather the ranks' peak memory. Collective."""
        memory = gather_objects(memory_of(trainer))
        self.record.peak_memory = list(chain(*memory))
        self._close_epoch(trainer)
        self._measure(trainer)  # a resumed run with no steps left never ends an epoch

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the epochs so far, so that a resumed run's record is complete."""
        if "train_loss" in trainer.callback_metrics:
            self._close_epoch(trainer)
        checkpoint["epochs"] = list(map(asdict, self.record.epochs))
        checkpoint["epoch_lr"] = self._learning_rate

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the epochs of the resumed run."""
        if trainer.state.fn != "fit":
            return
        self.record.epochs = [Epoch(**row) for row in checkpoint.get("epochs", [])]
        self._learning_rate = checkpoint.get("epoch_lr")
        if trainer.is_global_zero and self.record.parts:
            for logger in trainer.loggers:
                if isinstance(logger, MetricsFile):
                    self.record.repeated += logger.go_back(checkpoint["global_step"])

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the test metrics, and the tested checkpoint if one was loaded."""
        metrics = metrics_of(trainer, "test")
        self.record.test = None if metrics == Metrics() else metrics
        self.record.tested = str(trainer.ckpt_path) if trainer.ckpt_path else None

"""Callback that fills the run record and writes it to `run.json`."""

import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from app import record as records
from app.data.batches import tensors
from app.data.global_order import order_of
from app.data.module import ImageData
from app.errors import SMALLER, ExitStatus, RankError, UserError, out_of_memory
from app.launch.agree import gather_objects
from app.launch.failures import explained
from app.launch.process import BEGAN
from app.launch.signals import cause
from app.modules import ImageClassifier
from app.modules.networks import count_parameters, title
from app.modules.sums import log_window
from app.monitor.course import Course
from app.monitor.loggers import MetricsFile, trackers
from app.monitor.nonfinite import NonFinite
from app.monitor.step_clock import StepClock, phases_of_windows
from app.monitor.summary import epoch_line
from app.record import Record
from app.system.machine import hardware, peak_memory, time_when_done, versions
from app.training import SplitForward
from app.training.step import StraightLoop
from app.training.virtual_devices import ShardedLoop


def devices_of(trainer: Trainer) -> list[torch.device]:
    """Return the devices of this process; several only under dp and ddp_dp."""
    strategy = trainer.strategy
    return (
        strategy.parallel_devices if isinstance(strategy, SplitForward) else [strategy.root_device]
    )


def resolved_configuration(trainer: Trainer) -> dict[str, Any]:
    """Return the run record's fields that a trainer determines, such as strategy, precision and batch size, by name."""
    data = getattr(trainer, "datamodule", None)
    data = data if isinstance(data, ImageData) else None
    loop = trainer.fit_loop.epoch_loop
    shards = (
        loop.virtual_devices
        if isinstance(loop, ShardedLoop) and trainer.state.fn == "fit"
        else None
    )
    world = trainer.world_size
    return {
        "strategy": getattr(trainer.strategy, "strategy_name", type(trainer.strategy).__name__),
        "devices": len(getattr(trainer.strategy, "parallel_devices", None) or [0]),
        "num_nodes": trainer.num_nodes,
        "world_size": world,
        "replicas": world * len(devices_of(trainer)),
        "precision": trainer.precision,
        "placement": data and data.placement,
        "images_left_out": data and data.left_out,
        "files_left_out": data and {**data.files_left_out},
        "data": data
        and records.DataSet(
            type(data).__name__, data.num_classes, {**data.counts}, [*map(str, data.class_names)]
        ),
        "threads": torch.get_num_threads(),
        "global_batch_size": data and data.global_batch_size,
        "virtual_devices": shards,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "seed": int(os.environ["PL_GLOBAL_SEED"]) if "PL_GLOBAL_SEED" in os.environ else None,
        "hardware": records.Hardware(**hardware()),
        "versions": versions(),
    }


class RunRecord(Callback):
    """Callback that fills the run record and writes `run.json`, even if the run fails or is interrupted.

    Throughput is global samples per second over windows of `log_every_n_steps` steps (or an epoch,
    if shorter). The device is synchronised only at the end of a window. Throughput excludes
    validation, the run's first window, and the first `warmup_epochs` epochs. On a GPU, it also
    excludes windows with steps that `StepClock` profiles, unless no other windows remain.

    Args:
        command: The command line.
        warmup_epochs: Number of first epochs to exclude from throughput.
        checkpoints: Callbacks of the best and the last checkpoint; by default the trainer's.

    Attributes:
        record: The run record.
        rate: Samples/s of the last window; None before the first window's end.
    """

    rate: float | None = None

    def __init__(
        self, command: str, warmup_epochs: int = 0, checkpoints: Sequence[ModelCheckpoint] = ()
    ) -> None:
        self._checkpoints = checkpoints
        self._started = float(os.environ.get(BEGAN, time.monotonic()))
        self.path: Path | None = None
        self.record = Record(command=command)
        self._unwritten = False
        self._clock: StepClock | None = None
        self._warmup_epochs = warmup_epochs
        self._first_step: float | None = None
        self._first_batch = 0
        self._last_step = self._epoch_start = 0.0
        self._open_epoch: records.Epoch | None = None
        self._validated = self._epoch_validated = False
        self._course = Course()
        self._before = records.Course()  # time series of the training before it was resumed
        self._rates: list[
            tuple[float, float, bool]
        ] = []  # samples/s, samples per step, has profiled steps
        self._epoch_rates: list[float] = []
        self._learning_rate: float | None = None
        self._begin_window(0.0)

    # -- the run as a whole
    # ---------------------------------------------------------------------------------

    def continue_record(self, folder: Path, earlier: Record) -> None:
        """Continue the record of a training that resumes in the same directory.

        Args:
            folder: Directory of the run.
            earlier: Record of the run up to now.
        """
        part = records.Part(
            **{field.name: getattr(earlier, field.name) for field in fields(records.Part)}
        )
        if part.status == "running":
            part.status = "failed"
            part.error = "the run was killed, or the machine went down"
        part.train_s = (earlier.train_s or 0.0) - sum(
            previous.train_s or 0.0 for previous in earlier.parts
        )
        now = self.record
        self.record = earlier
        for name in ("command", "resumed_from", "launchers", "status", "error", "test", "tested"):
            setattr(earlier, name, getattr(now, name))
        earlier.run_dir = str(folder)
        earlier.parts = [*earlier.parts, part]
        with suppress(OSError):  # if this fails, the next write reports the error
            earlier.save(
                folder / "run.json"
            )  # spawned ranks load this file, and continue the record

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fill in the configuration; a test after fit continues the same record."""
        directory = trainer.log_dir
        if not trainer.is_global_zero or directory is None:
            return
        path = Path(directory, "run.json")
        if self.path is None and path.exists():  # spawned ranks continue the parent's record
            with suppress(ValueError):
                self.record = Record.load(path)
            if self.record.parts:
                self._before = self.record.course
        self.path = path
        for name, value in resolved_configuration(trainer).items():
            setattr(self.record, name, value)
        self.record.status = "running"
        self.record.run_dir = directory
        self.record.tracker = next((tracker.id for tracker in trackers(trainer.loggers)), None)
        self._write()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Complete the record, and log it to the tracker."""
        if self.path is None:
            return
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
        data = getattr(trainer, "datamodule", None)
        directory = getattr(trainer.logger, "log_dir", None)
        if trainer.training and isinstance(data, ImageData) and out_of_memory(exception):
            size = data.global_batch_size
            if size >= 2 * trainer.world_size:
                batches = 2 * trainer.accumulate_grad_batches
                exception.add_note(
                    f"{SMALLER} {size // 2} with --trainer.accumulate_grad_batches {batches}"
                )
        if directory is None or not trainer.is_global_zero:
            return
        if self.path is None:  # the run failed before its setup, or in a spawned process
            self.path = Path(directory, "run.json")
            with suppress(ValueError):
                self.record = Record.load(self.path)
            self.record.run_dir = directory
        end = ExitStatus.of(explained(exception))
        rank_failed = isinstance(exception, RankError)
        better = end.status == "interrupted" or rank_failed
        if self.record.status == "interrupted" or (self.record.status == "failed" and not better):
            return  # a spawned process has recorded the reason
        self.record.status = end.status
        self.record.error = end.reason
        if self._first_step is not None and trainer.state.fn == "fit" and not rank_failed:
            self._close_epoch(trainer)
            self._measure(trainer)
        self._write()

    def _write(self) -> None:
        assert self.path is not None
        config = self.path.with_name("config.yaml")  # absent in a notebook
        self.record.config = str(config) if config.exists() else None
        try:
            self.record.save(self.path)
        except OSError as error:
            if not self._unwritten:
                print(
                    f"{self.path} cannot be written ({error.strerror}): training continues",
                    file=sys.stderr,
                )
            self._unwritten = True

    # -- training
    # -------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the model and its execution settings, and reset the accelerator's peak memory.

        If unreadable images are skipped, also check that all nodes read the same images; the check
        is collective.
        """
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, ImageData) and data.source.skips:
            (_, first), *others = gather_objects((trainer.node_rank, data.content))
            wrong = next(((node, content) for node, content in others if content != first), None)
            if wrong:
                raise UserError(
                    f"--data.on_bad_image skip: node {wrong[0]} reads other images than node 0 ({wrong[1]}, "
                    f"{first}): give all nodes the same files"
                )
        self._clock = next((c for c in trainer.callbacks if isinstance(c, StepClock)), None)  # type: ignore[attr-defined]
        model = records.Model(type(pl_module).__name__, count_parameters(pl_module))
        if isinstance(pl_module, ImageClassifier):
            for name, value in pl_module.executed.items():
                setattr(self.record, name, value)
            model.name += f", {title(pl_module.network_name)}"
        self.record.model = model
        self.record.fused = any(
            group.get("fused") for optim in trainer.optimizers for group in optim.param_groups
        )
        for device in devices_of(trainer):
            if device.type == "cuda":  # a run on the CPU must not start CUDA
                torch.cuda.reset_peak_memory_stats(device)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the previous epoch's row, and start the clocks."""
        if (
            self.record.global_batch_size is None
            and (order := order_of(trainer.train_dataloader)) is not None
        ):
            self.record.global_batch_size = order.batch_size
        self._close_epoch(trainer)
        self._begin_epoch()
        rate = trainer.optimizers[0].param_groups[0].get("lr") if trainer.optimizers else None
        self._learning_rate = None if rate is None else float(rate)

    def _begin_epoch(self) -> None:
        self._epoch_start = time.perf_counter()
        self._begin_window(self._epoch_start)
        self._epoch_rates = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """At the first step, record the set-up time, and start the clocks."""
        if self._first_step is None:
            self._first_batch = _batches(trainer)
            self.record.setup_s = round(time.monotonic() - self._started, 3)
            if self.path is not None:
                self._write()
            self._first_step = time.perf_counter()
            if (
                self._epoch_start == 0.0
            ):  # on_train_epoch_start is not called after a resume within an epoch
                self._begin_epoch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count samples, and close the window if it is full."""
        order = order_of(trainer.train_dataloader)
        if order is not None:
            self._window_samples += order.global_count(batch_idx)
        else:
            self._window_samples += (
                next((len(leaf) for leaf in tensors(batch) if leaf.ndim), 0) * trainer.world_size
            )
        self._window_steps += 1
        self._window_profiled |= self._clock is not None and self._clock.timing
        self._last_step = time.perf_counter()
        if self._window_steps < min(log_window(trainer), trainer.num_training_batches):
            return
        now = time_when_done(trainer.strategy.root_device)
        first = self.rate is None and not self._warmup_epochs
        assert self._first_step is not None
        if self._window_samples:  # 0 if the batches are objects whose tensors are unknown
            self.rate = self._window_samples / (now - self._window_start)
            self._epoch_rates.append(self.rate)
            self._course.add(now - self._first_step, self.rate)
        if self.rate and not first and trainer.current_epoch >= self._warmup_epochs:
            self._rates.append(
                (self.rate, self._window_samples / self._window_steps, self._window_profiled)
            )
        self._last_step = now
        self._begin_window(now)

    def _begin_window(self, now: float) -> None:
        self._window_start = now
        self._window_profiled = False
        self._window_samples = self._window_steps = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restart the window that validation interrupted."""
        self._validated = not trainer.sanity_checking
        self._begin_window(time_when_done(trainer.strategy.root_device))
        if trainer.state.fn == "validate":
            self.record.validation = _metrics(trainer, "val")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the epoch's row. `_close_epoch` adds the metrics later, because Lightning logs them after this hook."""
        self._last_step = time_when_done(trainer.strategy.root_device)
        seconds = round(self._last_step - self._epoch_start, 3)
        rate = round(statistics.median(self._epoch_rates), 1) if self._epoch_rates else None
        epoch = trainer.current_epoch
        whole = trainer.is_last_batch
        self._open_epoch = records.Epoch(epoch, whole, seconds, rate, self._learning_rate)
        self._epoch_validated = self._validated
        self._validated = False

    def _close_epoch(self, trainer: Trainer) -> None:
        row = self._open_epoch
        self._open_epoch = None
        if row is None:
            return
        validated = self._epoch_validated
        row.train_loss = _metrics(trainer, "train").loss
        if validated:
            figures = _metrics(trainer, "val")
            row.val_loss = figures.loss
            row.val_acc = figures.acc
        best = max((earlier.val_acc or 0.0 for earlier in self.record.epochs), default=0.0)
        self.record.epochs.append(row)
        if self.path is None:
            return
        if (
            trainer.progress_bar_callback is not None
        ):  # print one line per epoch, which stays above the bar
            is_best = (row.val_acc or 0.0) > best
            left = self.time_left(trainer)
            memory = max(
                device.allocated_gib or device.host_rss_gib or 0.0 for device in _memory(trainer)
            )
            logged = trainer.callback_metrics.items()
            metrics = {
                name: value for name, value in logged if validated or not name.startswith("val")
            }
            print(epoch_line(row, trainer.max_epochs, metrics, is_best, memory, left), flush=True)
        self._measure(trainer)
        self._write()

    def time_left(self, trainer: Trainer) -> float | None:
        """Estimate the seconds to the end of training, including validation; return None if the end is unknown."""
        done = _batches(trainer)
        since = self._first_step
        by_epochs = (trainer.max_epochs or -1) * trainer.num_training_batches
        by_steps = trainer.max_steps * trainer.accumulate_grad_batches
        end = min((limit for limit in (by_epochs, by_steps) if limit > 0), default=math.inf)
        if since is None or end == math.inf or done <= self._first_batch:
            return None
        return (end - done) * (time.perf_counter() - since) / (done - self._first_batch)

    def _measure(self, trainer: Trainer) -> None:
        """Update the record's loop, times, throughput, losses and checkpoints."""
        record = self.record
        loop = trainer.fit_loop.epoch_loop
        record.loop_reason = (
            loop.reason if isinstance(loop, StraightLoop) else "--run.loop lightning"
        )
        record.loop = "straight" if record.loop_reason is None else "lightning"
        if isinstance(loop, ShardedLoop) and loop.sums is not None:
            record.shards = loop.sums.tree.shares
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, NonFinite):
                record.not_finite_since = callback.since
                record.skipped_steps = callback.skipped
                record.not_finite_step = callback.step
        memory: list[list[float]] = []
        if self._clock is not None:
            ranks = self._clock.ranks
            record.ranks = ranks.ranks
            record.others_cores = ranks.others_cores
            memory = ranks.memory.points
        earlier = sum(part.train_s or 0.0 for part in record.parts)
        rates_over_time = _continued(self._before.samples_per_s, self._course.points, earlier)
        record.course = records.Course(
            rates_over_time, _continued(self._before.memory_gib, memory, earlier)
        )
        record.steps = trainer.global_step
        record.threads = torch.get_num_threads()
        record.steps_per_epoch = (
            batches if (batches := trainer.num_training_batches) < math.inf else None
        )
        if self._first_step is not None:
            record.train_s = round(earlier + max(self._last_step - self._first_step, 0.0), 3)
        windows = [window for window in self._rates if not window[2]] or self._rates
        profiled = record.time_per_step = self._clock.time_per_step if self._clock else None
        if windows:
            rates, samples, _ = zip(*windows, strict=True)
            median = statistics.median(rates)
            low = round(min(rates), 1)
            middle = round(median, 1)
            high = round(max(rates), 1)
            record.throughput = records.Throughput(middle, low, high, len(rates))
            if profiled:
                rank = record.ranks[0] if record.ranks and trainer.world_size > 1 else None
                record.time_per_step = phases_of_windows(
                    profiled, 1000 * statistics.median(samples) / median, rank
                )
        losses = [row.train_loss for row in record.epochs]
        if losses:
            record.train_loss = records.FirstToLast(
                losses[0], losses[(len(losses) - 1) // 2], losses[-1]
            )
        callbacks = self._checkpoints or [
            c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)
        ]
        record.checkpoint = records.Checkpoints(
            *(callback.best_model_path or None for callback in callbacks[:2])
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the last epoch, and gather the ranks' peak memory. Collective."""
        memory = [row for rows in gather_objects(_memory(trainer)) for row in rows]
        self._close_epoch(trainer)
        self.record.peak_memory = memory

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the record, because a resumed run with no steps left never ends an epoch."""
        self._measure(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the epochs so far, so that a resumed run's record is complete."""
        if "train_loss" in trainer.callback_metrics:
            self._close_epoch(trainer)
        checkpoint["epochs"] = [vars(row) for row in self.record.epochs]
        checkpoint["epoch_lr"] = self._learning_rate

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the epochs of the resumed run."""
        if trainer.state.fn == "fit":
            self.record.epochs = [records.Epoch(**row) for row in checkpoint.get("epochs", [])]
            self._learning_rate = checkpoint.get("epoch_lr")
            for logger in trainer.loggers if trainer.is_global_zero and self.record.parts else []:
                if isinstance(logger, MetricsFile):
                    logger.go_back(checkpoint["global_step"])

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the test metrics, and the tested checkpoint if one was loaded."""
        figures = _metrics(trainer, "test")
        self.record.test = None if figures == records.Metrics() else figures
        self.record.tested = str(trainer.ckpt_path) if trainer.ckpt_path else None


def _metrics(trainer: Trainer, split: str) -> records.Metrics:
    metrics = trainer.callback_metrics
    loss, acc = (
        metrics[name].item() if name in metrics else None
        for name in (f"{split}_loss", f"{split}_acc")
    )
    return records.Metrics(loss, acc)


def _memory(trainer: Trainer) -> list[records.DeviceMemory]:
    return [
        records.DeviceMemory(**row) for row in peak_memory(trainer.global_rank, devices_of(trainer))
    ]


def _continued(
    before: list[list[float]], points: list[list[float]], earlier: float
) -> list[list[float]]:
    """Append the points since the resume to the earlier points; drop the earlier ones if the number of ranks changed.

    Args:
        before: Points before the resume, each as seconds and values.
        points: Points since the resume.
        earlier: Seconds of training before the resume.
    """
    later = [[round(seconds + earlier, 4), *figures] for seconds, *figures in points]
    return (
        [*before, *later] if not before or not later or len(before[0]) == len(later[0]) else later
    )


def _batches(trainer: Trainer) -> int:
    """Return the number of training batches of all epochs so far."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)

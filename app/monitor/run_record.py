"""Writes the run record, `run.json`: what a run was, how it went and on what."""

import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich import get_console

from app.data.batches import GlobalBatches
from app.data.module import ImageData
from app.errors import PARTS, ExitStatus, RankError, UserError, out_of_memory
from app.launch.agree import gather_objects
from app.launch.failures import explained
from app.launch.process import BEGAN
from app.launch.signals import cause
from app.modules import ImageClassifier, log_window
from app.monitor.course import Course
from app.monitor.loggers import MetricsFile, Tracker
from app.monitor.nonfinite import NonFinite
from app.monitor.rank_times import RankTimes
from app.monitor.record_file import load_record
from app.monitor.step_profiler import StepProfile, phases_of_windows
from app.monitor.step_trace import StepTrace, limit
from app.monitor.summary import epoch_line, finished
from app.parallel import SplitForward
from app.system.files import write_json
from app.system.lightning_patches import strategy_name
from app.system.lightning_step_patches import EpochLoop
from app.system.machine import hardware, peak_memory, versions

# of a fit with a model of ours
EXECUTED = ("channels_last", "compile", "cuda_graph", "matmul_precision", "benchmark", "fused")


PART = (  # of the earlier parts of a training that was resumed
    *("status", "error", "command", "resumed_from", "launchers", "strategy", "devices", "world_size", "steps"),
    *("setup_s", "train_s"),
)


def devices_of(trainer: Trainer) -> list[torch.device]:
    """List the devices of this process: several only under dp and ddp_dp."""
    strategy = trainer.strategy
    return strategy.parallel_devices if isinstance(strategy, SplitForward) else [strategy.root_device]


def resolved_configuration(trainer: Trainer) -> dict[str, Any]:
    """Collect strategy, devices, sizes, precision and placement as they were resolved, by their names in the record."""
    data = getattr(trainer, "datamodule", None)
    own = data if isinstance(data, ImageData) else None
    return {
        "strategy": strategy_name(trainer),
        "devices": len(getattr(trainer.strategy, "parallel_devices", None) or [0]),
        "num_nodes": trainer.num_nodes,
        "world_size": trainer.world_size,
        "replicas": trainer.world_size * len(devices_of(trainer)),
        "precision": trainer.precision,
        "placement": own and own.placement,
        "images_left_out": own and own.left_out,
        "data": own and {"name": type(own).__name__, "classes": own.num_classes, "images": own.counts},
        "threads": torch.get_num_threads(),
        "global_batch_size": own and own.global_batch_size,
        "micro_batch": own.micro_batch if own and trainer.state.fn == "fit" else None,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "seed": int(os.environ["PL_GLOBAL_SEED"]) if "PL_GLOBAL_SEED" in os.environ else None,
    }


class RunRecord(Callback):
    """Writes `run.json` into the run's directory, also when the run fails or is interrupted.

    Throughput is measured over windows of `log_every_n_steps` steps (of an epoch, where that is shorter):
    global samples over seconds, from the end of one window to the end of the next, with the device
    synchronised; the first window of the run is left out, and all those of the first `warmup_epochs`.
    Nothing else on a step waits for it. Validation does not count, nor do windows in which the phases of a step were
    timed, where there are others.

    Args:
        command: What was typed.
        warmup_epochs: Epochs left out of the throughput.
        checkpoints: What keeps the best and the last checkpoint; by default the trainer's checkpoint callbacks.

    Attributes:
        rate: Samples/s of the last window, or None before it.
    """

    rate: float | None = None

    def __init__(self, command: str, warmup_epochs: int = 0, checkpoints: Sequence[ModelCheckpoint] = ()) -> None:
        self._checkpoints = checkpoints
        self._started = float(os.environ.get(BEGAN, time.time()))
        self.path: Path | None = None
        self.record: dict[str, Any] = {
            "status": "running",
            "error": None,
            "command": command,
            "resumed_from": None,
            "launchers": [],
            "tracker": None,
            "epochs": [],
            "peak_memory": [],
            "ranks": [],
            "course": None,
            "model": None,
            "steps": 0,
            **dict.fromkeys(("run_dir", "config", "checkpoint", "test", "tested", "setup_s", "train_s", "throughput")),
            "time_per_step": None,
            "not_finite_since": None,
            "skipped_steps": 0,
            "profile": None,
            **dict.fromkeys(EXECUTED),
            "loop": None,
            "loop_reason": None,
            "parts": [],
        }
        self._unwritten = False
        self._profile: StepProfile | None = None
        self._trace: StepTrace | None = None
        self._warmup_epochs = warmup_epochs
        self._first_step: float | None = None
        self._first_batch = 0
        self._last_step = 0.0
        self._epoch_start = 0.0
        self._open_epoch: dict[str, Any] | None = None
        self._validated = False
        self._course = Course()
        self._before: dict[str, list[list[float]]] = {}  # courses of earlier parts
        self._rates: list[tuple[float, float]] = []  # per window: samples/s, and samples per step
        self._profiled_rates: list[tuple[float, float]] = []
        self._epoch_rates: list[float] = []
        self._learning_rate: float | None = None
        self._windows, self._window_profiled = 0, False
        self._window_start = 0.0
        self._window_samples = self._window_steps = 0

    # -- the run as a whole ---------------------------------------------------------------------------------

    def go_on(self, folder: Path, earlier: dict[str, Any]) -> None:
        """Continue the record of a training that was interrupted, or ended, and goes on in its folder.

        Args:
            folder: Directory of the run.
            earlier: Its record.
        """
        part = {key: earlier.get(key) for key in PART}
        if part["status"] == "running":
            part |= {"status": "failed", "error": "it ended without a word: killed, or the machine went down"}
        part["train_s"] = (part["train_s"] or 0.0) - sum(each["train_s"] for each in earlier.get("parts", []))
        parts = [*earlier.get("parts", []), part]
        own = {key: self.record[key] for key in ("command", "resumed_from", "launchers")}
        anew = {"status": "running", "error": None, "test": None, "tested": None, "run_dir": str(folder)}
        self.record |= earlier | own | anew | {"parts": parts}
        with suppress(OSError):  # which is said when it is written next
            write_json(folder / "run.json", self.record)  # which spawned ranks go on with

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin the record, or continue it: the test after fit belongs to the same run."""
        directory = trainer.log_dir
        if not trainer.is_global_zero or directory is None:
            return
        path = Path(directory, "run.json")
        if self.path is None and path.exists():  # spawned ranks go on with what those before them have written
            with suppress(ValueError):
                self.record = load_record(path)
            self._before = (self.record["parts"] and self.record["course"]) or {}
        self.path = path
        self.record["status"] = "running"
        self.record.update(resolved_configuration(trainer), versions=versions(), hardware=hardware())
        self.record["run_dir"] = directory
        self.record["tracker"] = next((logger.id for logger in trainer.loggers if isinstance(logger, Tracker)), None)
        self._write()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Complete the record and give its figures to the tracker."""
        if self.path is None:
            return
        stopped = None if finished(self.record) else cause(trainer)
        self.record["status"] = "interrupted" if stopped else "completed"
        self.record["error"] = f"by {stopped}" if stopped else None
        self._write()
        for logger in trainer.loggers:
            if isinstance(logger, Tracker):
                logger.log_record(self.record)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say why the run ended. No collective call: the other ranks may be gone."""
        data, directory = getattr(trainer, "datamodule", None), getattr(trainer.logger, "log_dir", None)
        if trainer.state.fn == "fit" and isinstance(data, ImageData) and out_of_memory(exception):
            share = math.ceil(data.global_batch_size / trainer.world_size)
            at_once = data.micro_batch if isinstance(data.micro_batch, int) else share
            if trainer.training and at_once > 1:
                exception.add_note(f"{PARTS} {at_once // 2}")
        if directory is None or not trainer.is_global_zero:
            return
        if self.path is None:  # spawned processes had it, or nothing had begun yet
            self.path = Path(directory, "run.json")
            self.record["run_dir"] = directory
            with suppress(ValueError):
                self.record = load_record(self.path)
        end = ExitStatus.of(explained(exception))
        better = end.status == "interrupted" or isinstance(exception, RankError)
        if self.record["status"] == "interrupted" or (self.record["status"] == "failed" and not better):
            return  # a spawned process has said why
        self.record["status"], self.record["error"] = end.status, end.reason
        if self._first_step is not None and trainer.state.fn == "fit" and not isinstance(exception, RankError):
            self._close_epoch(trainer)
            self._measured(trainer)
        self._write()

    def _write(self) -> None:
        assert self.path is not None
        config = self.path.with_name("config.yaml")  # a notebook has none
        self.record["config"] = str(config) if config.exists() else None
        try:
            write_json(self.path, self.record)
        except OSError as error:
            if not self._unwritten:
                print(
                    f"{self.path} cannot be written ({error.strerror}): training goes on", file=sys.stderr, flush=True
                )
            self._unwritten = True

    # -- training -------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note how the model is executed, and count the accelerator's peak memory from here."""
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, ImageData) and data.source.skips:
            found = gather_objects((trainer.node_rank, data.content))
            for node, content in found:
                if content != found[0][1]:
                    raise UserError(
                        f"--data.on_bad_image skip: node {node} reads other images than node 0 ({content}, "
                        f"{found[0][1]}): give all nodes the same files"
                    )
        profiles = (callback for callback in trainer.callbacks if isinstance(callback, StepProfile))  # type: ignore[attr-defined]
        self._profile = next(profiles, None)
        self._trace = next((c for c in trainer.callbacks if isinstance(c, StepTrace)), None)  # type: ignore[attr-defined]
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        self.record["model"] = {"name": type(pl_module).__name__, "parameters": parameters}
        if isinstance(pl_module, ImageClassifier):
            self.record.update(pl_module.executed)
            self.record["model"]["name"] += f", {type(pl_module.network).__name__}"
        self.record["fused"] = any(group.get("fused") for each in trainer.optimizers for group in each.param_groups)
        for device in devices_of(trainer):
            if device.type == "cuda":  # not where a GPU is there, and the run is on the CPU
                torch.cuda.reset_peak_memory_stats(device)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the last epoch's row and start the clocks."""
        self._close_epoch(trainer)
        self._epoch_start = self._window_start = time.perf_counter()
        self._window_samples = self._window_steps = 0
        self._epoch_rates, self._learning_rate = [], learning_rate(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note when the first step begins."""
        if self._first_step is None:
            self._first_step, self._first_batch = time.perf_counter(), _batches(trainer)
            self.record["setup_s"] = round(time.time() - self._started, 3)
            if self.path is not None:
                self._write()
                self._first_step = time.perf_counter()
            if self._epoch_start == 0.0:  # resumed in the middle of an epoch
                self._epoch_start = self._window_start = self._first_step
                self._learning_rate = learning_rate(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the window if it is full."""
        loader = trainer.train_dataloader
        if isinstance(loader, GlobalBatches):
            self._window_samples += loader.global_count(batch_idx)
        else:
            self._window_samples += _count(batch) * trainer.world_size
        self._window_steps += 1
        self._window_profiled |= self._profile is not None and self._profile.timing
        self._window_profiled |= self._trace is not None and self._trace.timing
        self._last_step = time.perf_counter()
        if self._window_steps < min(log_window(trainer), trainer.num_training_batches):
            return
        now = _time_when_done(trainer)
        first = not self._windows and not self._warmup_epochs
        self._windows += 1
        self.rate = self._window_samples / (now - self._window_start)
        self._epoch_rates.append(self.rate)
        assert self._first_step is not None
        self._course.add(now - self._first_step, self.rate)
        if not first and trainer.current_epoch >= self._warmup_epochs:
            batch = self._window_samples / self._window_steps
            (self._profiled_rates if self._window_profiled else self._rates).append((self.rate, batch))
        self._window_profiled = False
        self._window_start = self._last_step = now
        self._window_samples = self._window_steps = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep validation out of the window that it interrupts."""
        self._validated = not trainer.sanity_checking
        self._window_start = _time_when_done(trainer)
        self._window_samples = self._window_steps = 0

        if trainer.state.fn == "validate":
            names = {"loss": "val_loss", "acc": "val_acc"}
            metrics = trainer.callback_metrics
            self.record["validation"] = {key: metrics[name].item() for key, name in names.items() if name in metrics}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the epoch's row: its metrics are logged after this."""
        self._last_step = _time_when_done(trainer)
        self._open_epoch = {
            "epoch": trainer.current_epoch,
            "seconds": round(self._last_step - self._epoch_start, 3),
            "whole": trainer.is_last_batch,
            "samples_per_s": round(statistics.median(self._epoch_rates), 1) if self._epoch_rates else None,
            "lr": self._learning_rate,
            "validated": self._validated,
        }
        self._validated = False

    def _close_epoch(self, trainer: Trainer) -> None:
        if self._open_epoch is None:
            return
        metrics, row = trainer.callback_metrics, self._open_epoch
        self._open_epoch = None

        def value(name: str) -> float | None:
            return metrics[name].item() if name in metrics else None

        validated = row.pop("validated")
        row["train_loss"] = value("train_loss")
        row["val_loss"], row["val_acc"] = (value("val_loss"), value("val_acc")) if validated else (None, None)
        self.record["epochs"].append(row)
        if self.path is not None:
            if trainer.progress_bar_callback is not None:  # a line that stays, also where there is no terminal
                best = max((each["val_acc"] or 0.0 for each in self.record["epochs"][:-1]), default=0.0)
                is_best = validated and row["val_acc"] is not None and row["val_acc"] > best
                memory = max(device["allocated_gib"] or device["host_rss_gib"] for device in self._memory(trainer))
                left = self.time_left(trainer)
                width = get_console().width if sys.stdout.isatty() else 100
                print(epoch_line(row, trainer.max_epochs, metrics, validated, is_best, memory, left, width), flush=True)
            self._measured(trainer)
            self._write()

    def _memory(self, trainer: Trainer) -> list[dict[str, Any]]:
        return peak_memory(trainer.global_rank, devices_of(trainer))

    def time_left(self, trainer: Trainer) -> float | None:
        """Seconds to the end of the training, validations included, if it goes on as it did; None if that is open."""
        done, epochs, steps = _batches(trainer), trainer.max_epochs, trainer.max_steps
        ends = [epochs * trainer.num_training_batches] if epochs is not None and epochs > 0 else []
        ends += [steps * trainer.accumulate_grad_batches] if steps > 0 else []
        if self._first_step is None or not ends or min(ends) == math.inf or done <= self._first_batch:
            return None
        return (min(ends) - done) * (time.perf_counter() - self._first_step) / (done - self._first_batch)

    def _measured(self, trainer: Trainer) -> None:
        """Bring loop, times, throughput, losses and checkpoints up to date."""
        loop = trainer.fit_loop.epoch_loop
        self.record["loop_reason"] = loop.reason if isinstance(loop, EpochLoop) else "not asked for"
        self.record["loop"] = "straight" if self.record["loop_reason"] is None else "lightning"
        memory: list[list[float]] = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, NonFinite):
                self.record["not_finite_since"], self.record["skipped_steps"] = callback.since, callback.skipped
            if isinstance(callback, RankTimes):
                self.record["ranks"], self.record["others_cores"] = callback.ranks, callback.others_cores
                memory = callback.memory.points
        self.record["course"] = self._whole_course({"samples_per_s": self._course.points, "memory_gib": memory})
        self.record["steps"], self.record["threads"] = trainer.global_step, torch.get_num_threads()
        self.record["steps_per_epoch"] = trainer.num_training_batches
        if self._first_step is not None:
            earlier = sum(part["train_s"] for part in self.record["parts"])
            self.record["train_s"] = round(earlier + max(self._last_step - self._first_step, 0.0), 3)
        windows = self._rates or self._profiled_rates
        rates = [rate for rate, _ in windows]
        if rates or self.record["throughput"] is None:
            self.record["throughput"] = {
                "median": round(statistics.median(rates), 1) if rates else None,
                "min": round(min(rates), 1) if rates else None,
                "max": round(max(rates), 1) if rates else None,
                "n": len(rates),
                "unit": "samples/s",
            }
        self.record["time_per_step"] = profiled = self._profile and self._profile.time_per_step
        if windows and profiled:
            step = 1000 * statistics.median(batch for _, batch in windows) / statistics.median(rates)
            rank = next(iter(self.record["ranks"]), None) if trainer.world_size > 1 else None
            self.record["time_per_step"] = phases_of_windows(profiled, step, rank)
        losses = [row["train_loss"] for row in self.record.get("epochs", [])]
        if losses:
            first, middle, last = losses[0], losses[(len(losses) - 1) // 2], losses[-1]
            self.record["train_loss"] = {"first": first, "middle": middle, "last": last}
        kept = self._checkpoints or [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        paths = [callback.best_model_path or None for callback in kept]
        self.record["checkpoint"] = dict(zip(("best", "last"), [*paths, None, None], strict=False))

    def _whole_course(self, points: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
        """What was measured in this part of the training behind what was measured in those before it."""
        earlier = sum(part["train_s"] for part in self.record["parts"])
        whole = {}
        for name, own in points.items():
            before = self._before.get(name, [])
            same = not before or not own or len(before[0]) == len(own[0])  # as many ranks
            later = [[round(seconds + earlier, 4), *figures] for seconds, *figures in own]
            whole[name] = [*before, *later] if same else later
        return whole

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the last epoch and collect every rank's memory."""
        memory = [row for rows in gather_objects(self._memory(trainer)) for row in rows]
        self._close_epoch(trainer)
        self.record["peak_memory"] = memory
        if self._trace is not None:
            cuda = trainer.strategy.root_device.type == "cuda"
            self.record["profile"] = {"limit": limit(self._trace.rows, cuda), "ranks": self._trace.rows}
        self._measured(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the checkpoints of a run that was resumed at its end, and had no step to take."""
        if self._first_step is None:
            self._measured(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the epochs so far, so that a resumed run's record holds them all."""
        if "train_loss" in trainer.callback_metrics:
            self._close_epoch(trainer)
        checkpoint["epochs"] = self.record.get("epochs", [])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue the epochs of the run that is resumed."""
        if trainer.state.fn == "fit":
            self.record["epochs"] = list(checkpoint.get("epochs", []))
            for logger in trainer.loggers if trainer.is_global_zero and self.record["parts"] else []:
                if isinstance(logger, MetricsFile):
                    logger.go_back(checkpoint["global_step"])

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the test figures, and the checkpoint that has them, unless it is the last weights."""
        metrics = trainer.callback_metrics
        names = {"loss": "test_loss", "acc": "test_acc"}
        self.record["test"] = {key: metrics[name].item() for key, name in names.items() if name in metrics} or None
        self.record["tested"] = trainer.ckpt_path and str(trainer.ckpt_path)


def learning_rate(trainer: Trainer) -> float | None:
    """The learning rate of the first group of parameters."""
    return float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else None


def _batches(trainer: Trainer) -> int:
    """Number of batches that have been trained on, in all epochs."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)


def _time_when_done(trainer: Trainer) -> float:
    """The time when the device has done what it was given so far."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize(trainer.strategy.root_device)
    return time.perf_counter()


def _count(batch: Any) -> int:
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch)

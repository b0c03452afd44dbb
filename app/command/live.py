"""State of a live run: kept in memory after each step, and sent to the ranks that lack it."""

import copy
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import distributed
from torchmetrics import Metric

from app.command.checkpoint_file import LAST, SNAPSHOT, CheckpointFiles
from app.command.checkpoints import read_earlier
from app.command.configuration import Flags
from app.errors import RankLostError, UserError, one_line
from app.launch.agree import gather_objects
from app.launch.live import ENDED, LIVE, Member
from app.launch.signals import Signals
from app.monitor.header import Header
from app.monitor.loggers import MetricsFile, Tracker, read_rows, trackers
from app.monitor.run_record import RunRecord
from app.system.lightning_patches import in_window
from app.system.patches import expects


@dataclass
class State:
    """State of a training after a step; equal on all ranks.

    Attributes:
        count: Number of states until this one.
        checkpoint: Lightning's checkpoint, on the device; None before the first step.
        decided: Rank zero's decision; see `app.command.decision.decide`. Empty before.
        rows: All rows of metrics.csv, and possibly later ones.
        written: Number of rows until this state.
        metrics: Values of `trainer.callback_metrics`.
        means: Epoch's means so far, of values that the module logs.
        sums: States of the module's torchmetrics over all ranks, and their numbers of updates.
    """

    count: int = 0
    checkpoint: dict[str, Any] | None = None
    decided: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    written: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)
    sums: dict[str, Any] = field(default_factory=dict)


@expects(
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._results",
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric",
    "lightning.pytorch.trainer.trainer:Trainer._checkpoint_connector",
    "lightning.pytorch.trainer.trainer:Trainer._logger_connector",
    "torchmetrics:Metric._update_count",
)
class Live(Checkpoint):
    """Callback of a live run's rank: keeps the newest state, and lets ranks come and go.

    It takes a state between two steps, also before a validation that is due, and after an epoch. A
    validation that a change of the ranks interrupts is repeated.

    Args:
        cli: The command's flags.
    """

    def __init__(self, cli: Flags) -> None:
        self.member = Member(os.environ[LIVE], cli.config.cluster.timeout)
        self._root = cli.config.run.root
        self._limit = int(cli.config.run.virtual_devices)
        self.state = State()
        self.began: float | None = None  # when the ranks changed last
        self._trackers: list[Tracker] = []
        self._loops: Any = None  # the loops' state at an epoch's end

    def meet(self, backend: str) -> bool:
        """Meet all living ranks, and take the newest state of all.

        Args:
            backend: Communication library.

        Returns:
            Whether the run goes on.
        """
        before = self.member.members
        while True:
            try:
                self.member.meet(self.state.count, backend)
            except (RuntimeError, TimeoutError) as error:
                raise UserError(
                    f"the live run cannot go on ({one_line(str(error))[:100]}): {self.save()}"
                ) from error
            if self.member.store.check([ENDED]):
                return False
            ranks = len(self.member.members)
            if ranks > self._limit:
                if int(os.environ["RANK"]) < self._limit:
                    continue
                raise UserError(
                    f"the live run has {self._limit} ranks, as many as --run.virtual_devices: "
                    "wait until one leaves"
                )
            try:
                self._share()
                break
            except Exception as error:
                if not self.member.has_changed(error):
                    raise
        self.changes = self.member.changes(before)
        if before and os.environ["RANK"] == "0":
            print(f"{self.changes} at step {self.steps:,}; {ranks} go on", flush=True)
        return True

    def save(self) -> str:
        """Write the newest state to `last.ckpt`, and return how to go on."""
        folder = self.state.decided.get("folder")
        if folder is None or self.state.checkpoint is None:
            return "start again"
        path = Path(self._root, folder, "checkpoints", LAST)
        CheckpointFiles().save_checkpoint(self.state.checkpoint, path)
        return f"start again with --ckpt_path {path}"

    @property
    def steps(self) -> int:
        """Number of steps until the newest state."""
        return self.state.checkpoint["global_step"] if self.state.checkpoint else 0

    def _share(self) -> None:
        ages = gather_objects((self.state.count, bool(self.state.decided)))
        newest = max(ages)
        if min(ages) < newest:
            states = [self.state]
            distributed.broadcast_object_list(states, ages.index(newest))
            self.state = states[0]

    def decided(self) -> dict[str, Any]:
        """Return rank zero's decision, for the next part of the training."""
        decided = dict(self.state.decided)
        if self.state.checkpoint is not None:
            decided["checkpoint"] = SNAPSHOT
        folder = decided["folder"]
        if folder is not None:
            decided["earlier"] = read_earlier(Path(self._root, folder, "run.json"))
            earlier = decided["earlier"]
            earlier.steps = self.steps
            earlier.status = "continued"
            earlier.error = self.changes
        return decided

    def attach(self, trainer: Any, decided: dict[str, Any]) -> None:
        """Observe a new Trainer, which continues from the newest state."""
        self.state.decided = self.state.decided or decided
        Signals.of(trainer).member = self.member
        for callback in [*trainer.callbacks]:
            if isinstance(callback, RunRecord):
                callback.started = self.began or callback.started
            elif isinstance(callback, Header) and self.began is not None:
                trainer.callbacks.remove(callback)
        if self._trackers:  # rank zero as before: their runs are open
            others = [logger for logger in trainer.loggers if not isinstance(logger, Tracker)]
            trainer.loggers = [*others, *self._trackers]
        if trainer.is_global_zero:
            self._trackers = trackers(trainer.loggers)
        trainer.callbacks.append(self)
        first: Any = Callback()  # before a callback changes the state for the next epoch
        first.on_train_epoch_start = first.on_train_end = self.after_epoch
        trainer.callbacks.insert(0, first)
        trainer.fit_loop.epoch_loop.live = self
        trainer.strategy.checkpoint_io.snapshot = self.state.checkpoint
        self._loops = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore what Lightning's checkpoint lacks."""
        state = self.state
        trainer.strategy.checkpoint_io.snapshot = None  # type: ignore[attr-defined]
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                if state.checkpoint is None:
                    state.rows = read_rows(Path(logger.log_dir, "metrics.csv"))
                    state.written = len(state.rows)
                state.rows = state.rows[: state.written]
                logger.rows = state.rows
                logger.rewrite(state.rows)
        trainer.callback_metrics.update(copy.deepcopy(state.metrics))
        for name, (meta, values) in state.means.items():
            sync = replace(meta.sync, fn=trainer.strategy.reduce)
            result = _ResultMetric(replace(meta, _sync=sync), is_tensor=bool(values))
            result._update_count = 1
            if not values:
                values = {"value": pl_module.get_submodule(meta.metric_attribute)}
            vars(result).update(values)
            trainer.fit_loop.epoch_loop._results[name] = result
            trainer._logger_connector._first_loop_iter = False  # the next step adds to the means
        for name, (values, updates) in state.sums.items():
            metric: Any = pl_module.get_submodule(name)
            metric._update_count = updates
            if trainer.is_global_zero:  # it continues the sums of all ranks
                for key, value in copy.deepcopy(values).items():
                    if isinstance(getattr(metric, key), list) and not isinstance(value, list):
                        value = [value]  # the ranks' lists, concatenated
                    setattr(metric, key, value)

    def between_steps(self, trainer: Any, validates: bool) -> None:
        """Take a state after a step.

        Args:
            trainer: The Trainer.
            validates: Whether the step's validation is due.

        Raises:
            RankLostError: When the ranks have agreed to meet.
        """
        if in_window(trainer):
            return
        state: Any = self._take(trainer)
        if validates:  # make Lightning validate first, from the first batch on
            progress = state.checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
            progress["current"] = dict.fromkeys(progress["current"], 0)
            progress["total"] = {**progress["current"], "ready": 1, "started": 1}
        self._keep(state)
        signals = Signals.of(trainer)
        if signals.regroups and not signals.stopped_by:
            raise RankLostError("ranks join or leave")

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note the loops' state, from which Lightning begins the next epoch."""
        if trainer.is_last_batch:
            self._loops = trainer._checkpoint_connector.dump_checkpoint(False)["loops"]

    def after_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take a state once an epoch's metrics are logged, and schedulers have used them."""
        if self._loops is not None:
            state: Any = self._take(trainer)
            state.checkpoint["loops"] = self._loops
            self._keep(state)

    def _take(self, trainer: Any) -> State:
        """Copy the Trainer's state. Collective."""
        module = trainer.lightning_module
        sums = {}
        for name, metric in module.named_modules():
            if isinstance(metric, Metric) and metric.update_called:
                with metric.sync_context(should_sync=trainer.world_size > 1):
                    sums[name] = copy.deepcopy(metric.metric_state), metric.update_count
        means = {}
        for name, result in trainer.fit_loop.epoch_loop._results.items():
            meta = replace(result.meta, _sync=replace(result.meta.sync, fn=None))
            means[name] = meta, dict(result.metric_state)
        return replace(
            self.state,
            checkpoint=copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint(False)),
            metrics=copy.deepcopy(trainer.callback_metrics),
            means=means,
            sums=sums,
        )

    def _keep(self, state: State) -> None:
        count = self.state.count + 1
        self.state = replace(state, count=count, written=len(self.state.rows))
        self._loops = None

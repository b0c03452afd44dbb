"""Parts of the training loops that use Lightning's private names.

When you upgrade Lightning, compare

* `LoggingLoop` with the methods of the same names, and `update_train_step_metrics`, in
  trainer/connectors/logger_connector/logger_connector.py;
* `in_hook` and `Hook` with trainer/call.py.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import rank_zero_info
from torch.optim.optimizer import register_optimizer_step_post_hook

from app.errors import UserError
from app.system.lightning_patches import in_window
from app.system.patches import EXPECTED, expects
from app.training.ddp import DDP

EPOCH_LOOP = "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
_CONNECTORS = "lightning.pytorch.trainer.connectors"
_LOGGERS = f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector"

# Attributes that decide what a step calls. A step compares them with their earlier values right
# before each of its parts, because any hook may replace them. Private attributes stand in for
# properties, because `attrgetter` then makes no Python call.
identities = attrgetter(
    "trainer.profiler",
    "module._automatic_optimization",
    "module.on_before_batch_transfer",
    "module.transfer_batch_to_device",
    "module.on_after_batch_transfer",
    "module.training_step",
    "module.backward",
    "module.optimizer_step",
    "module.optimizer_zero_grad",
    "module.configure_gradient_clipping",
    "module.clip_gradients",
    "data.on_before_batch_transfer",
    "data.transfer_batch_to_device",
    "data.on_after_batch_transfer",
    "strategy._model",
    "strategy._lightning_optimizers",
    "strategy.batch_to_device",
    "strategy.training_step",
    "strategy.pre_backward",
    "strategy.backward",
    "strategy.post_backward",
    "strategy.optimizer_step",
    "strategy._precision_plugin.convert_input",
    "strategy._precision_plugin.train_step_context",
    "strategy._precision_plugin.forward_context",
    "strategy._precision_plugin.pre_backward",
    "strategy._precision_plugin.backward",
    "strategy._precision_plugin.post_backward",
    "strategy._precision_plugin.optimizer_step",
    "strategy._precision_plugin.clip_gradients",
)
EXPECTED[f"{__name__}.identities"] = (
    "lightning.pytorch.core.module:LightningModule._automatic_optimization",
    "lightning.pytorch.strategies:Strategy._model",
    "lightning.pytorch.strategies:Strategy._lightning_optimizers",
    "lightning.pytorch.strategies:Strategy._precision_plugin",
)


@expects("lightning.pytorch.core.module:LightningModule._current_fx_name")
def in_hook(trainer: Any, name: str, call: Callable) -> Callable:
    """Wrap a call of a hook, so that `self.log` and the profiler find the hook's name."""
    # a write to this dictionary avoids nn.Module's slow __setattr__
    attributes = vars(trainer.lightning_module)
    profiler = trainer.profiler
    is_profiled = type(profiler) is not PassThroughProfiler

    def called(*args: Any, **kwargs: Any) -> Any:
        before = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = name
        if is_profiled:
            with profiler.profile(f"[StraightLoop].{name}"):
                result = call(*args, **kwargs)
        else:
            result = call(*args, **kwargs)
        attributes["_current_fx_name"] = before
        return result

    return called


class Hook:
    """Hook of all callbacks and of the module.

    Every call reads the Trainer's callbacks and the methods anew, because any hook may replace
    them.

    Args:
        trainer: The Trainer.
        name: Name of the hook.
    """

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._name = name
        self._method = attrgetter(name)  # unlike getattr, not a call for Python's profiler
        self._idle = {None, MethodType(getattr(LightningModule, name), self._module)}
        for callback in trainer.callbacks:
            self._idle.add(MethodType(getattr(Callback, name), callback))

    def __call__(self, *args: Any) -> Any:
        """Call the overridden methods, and return the module's result."""
        trainer = self._trainer
        module = self._module
        method = self._method
        idle = self._idle
        attributes = module.__dict__
        before = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = self._name
        for callback in trainer.callbacks:  # the list itself, because a hook may change it
            if method(callback) not in idle:
                method(callback)(trainer, module, *args)
        result = None
        if method(module) not in idle:
            result = method(module)(*args)
        attributes["_current_fx_name"] = before
        return result


@expects("lightning.pytorch.loops.optimization.manual:_ManualOptimization.optim_step_progress")
class CountedOptimization(_ManualOptimization):
    """Manual optimization in which batches count as steps if Lightning wraps no optimizer in use.

    Lightning would count no step, and so save no checkpoint.
    """

    _is_counted = False  # whether Lightning has counted a step
    _is_reported = False

    def run(self, kwargs: Any) -> Any:
        """Train on a batch. Count a step if only optimizers that Lightning does not wrap step."""
        progress = self.optim_step_progress
        before = progress.total.completed
        stepped = []
        handle = register_optimizer_step_post_hook(lambda each, *_: stepped.append(each))
        try:
            outputs = super().run(kwargs)
        finally:
            handle.remove()
        if progress.total.completed > before:
            self._is_counted = True
        elif stepped and not self._is_counted:
            progress.increment_ready()
            progress.increment_completed()
            self._report(type(stepped[0]).__name__)
        return outputs

    def _report(self, optimizer: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            rank_zero_info(
                f"{type(self.trainer.lightning_module).__name__} steps {optimizer} itself, and "
                "Lightning counts no such step: each batch counts as a step. Use "
                "`self.optimizers()`, whose steps Lightning counts"
            )


def finetunes(trainer: Any) -> bool:
    """Return whether a callback freezes and unfreezes layers."""
    return any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)


class WindowLoop(_TrainingEpochLoop):
    """Lightning's loop over batches, which stops and saves only between accumulation windows.

    A window is the batches of one optimizer step. See `in_window`.
    """

    @classmethod
    def put_into(cls, trainer: Trainer) -> None:
        """Replace a Trainer's epoch loop by an instance of this class."""
        before = trainer.fit_loop.epoch_loop
        loop = cls(trainer, before.min_steps, before.max_steps)
        loop.manual_optimization = CountedOptimization(trainer)
        trainer.fit_loop.epoch_loop = loop

    def on_run_start(self, data_fetcher: Any) -> None:
        """Let DDP follow unfrozen layers, and all checkpoint callbacks wait for a window's end.

        Raises:
            UserError: When checkpoints would be due inside a window, because a validation is.
        """
        super().on_run_start(data_fetcher)
        trainer = self.trainer
        if finetunes(trainer) and isinstance(trainer.strategy, DDP):
            trainer.strategy.follow_frozen()  # after the callbacks' on_train_epoch_start
        batches = trainer.accumulate_grad_batches
        if batches == 1 or not trainer.checkpoint_callbacks:
            return
        every = trainer.val_check_batch
        epoch = trainer.num_training_batches
        # without check_val_every_n_epoch, batches are counted over all epochs; an interval of time
        # ends anywhere
        counted = 0 if trainer.check_val_every_n_epoch else epoch
        fits = every in (epoch, float("inf")) or (
            every is not None and every % batches == counted % batches == 0
        )
        if trainer.enable_validation and not fits:
            raise UserError(
                f"--trainer.val_check_interval {trainer.val_check_interval} validates and saves "
                f"inside the {batches} batches of an optimizer step: give a whole number, a "
                f"multiple of {batches}"
            )
        for callback in trainer.checkpoint_callbacks:
            for name in ("on_train_batch_end", "on_exception"):
                hook = getattr(callback, name)
                if not isinstance(hook, partial):
                    setattr(callback, name, partial(_call_between_windows, hook))

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate if it is due, but because of a stop only at the end of a window."""
        trainer = self.trainer
        is_stopped = trainer.should_stop
        trainer.should_stop = is_stopped and not in_window(trainer)
        super().on_advance_end(data_fetcher)
        trainer.should_stop = is_stopped or trainer.should_stop

    @property
    def done(self) -> bool:
        """Whether the epoch has ended. A stop waits for the end of a window."""
        return super().done and not (self.trainer.should_stop and in_window(self.trainer))


def _call_between_windows(
    hook: Callable, trainer: Trainer, module: LightningModule, *args: Any
) -> None:
    """Call a checkpoint callback's hook, except inside an accumulation window."""
    if not in_window(trainer):
        hook(trainer, module, *args)
    elif isinstance(args[0], BaseException) and getattr(hook.__self__, "save_on_exception", True):  # type: ignore[attr-defined]
        rank_zero_info(
            f"no checkpoint is saved on the {type(args[0]).__name__}, because it would lose the "
            "gradients of an optimizer step's first batches"
        )


@expects(
    "lightning.pytorch.trainer.trainer:Trainer._logger_connector",
    f"{_LOGGERS}._first_loop_iter",
    f"{_LOGGERS}._current_fx",
    f"{EPOCH_LOOP}._results",
    f"{EPOCH_LOOP}._batches_that_stepped",
    "lightning.pytorch.loops.loop:_Loop._restarting",
)
class LoggingLoop(WindowLoop):
    """Lightning's loop over batches, with its logging in separate methods."""

    def end_resumption(self) -> None:
        """Mark epoch and validation as not resumed.

        Lightning would skip ReduceLROnPlateau after a resumed epoch, and the batches of a resumed
        validation. Do not set `fit_loop.restarting`: with `max_steps`, it becomes True. Sources:
        fit_loop.py, `restarting` and `on_advance_end`; training_epoch_loop.py, `advance`.
        """
        self.trainer.fit_loop._restarting = False
        self.val_loop.restarting = False

    def on_batch_start(self, batch: Any, size: int | None = None) -> None:
        """Tell `self.log` the batch, its size if known, and whether it is the epoch's first."""
        connector = self.trainer._logger_connector
        results = self._results
        connector._first_loop_iter = connector._first_loop_iter is None
        connector._current_fx = None  # set by the first call of `self.log`
        results.batch = batch
        results.batch_size = size
        results.dataloader_idx = None

    def on_batch_end(self) -> None:
        """Store this step's metrics; pass them to the loggers at the end of a window or training.

        Unlike Lightning, do not read metrics for the progress bar on every step.
        """
        trainer: Any = self.trainer
        connector = trainer._logger_connector
        every = trainer.log_every_n_steps
        if connector._current_fx is not None:
            connector.on_batch_end()
        self._results.batch = None
        self._results.batch_size = None
        self.batch_progress.increment_completed()
        if every and ((self._batches_that_stepped + 1) % every == 0 or trainer.should_stop):
            connector.update_train_step_metrics()

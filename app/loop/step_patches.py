"""Parts of the straight step that use Lightning's private names. The rest is in `straight_step.py`.

That module overrides public methods of Lightning's loop.

When you upgrade Lightning, compare

* `LoggingLoop` with the methods of the same names, and `update_train_step_metrics`, in
  trainer/connectors/logger_connector/logger_connector.py;
* `in_hook` with trainer/call.py.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import Strategy

from app.system.patches import expects

_TRAINER = "lightning.pytorch.trainer.trainer:Trainer"
_CONNECTORS = "lightning.pytorch.trainer.connectors"
_LOGGERS = f"{_CONNECTORS}.logger_connector.logger_connector:_LoggerConnector"
EPOCH_LOOP = "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
AUTOMATIC = "lightning.pytorch.loops.optimization.automatic"


@expects("lightning.pytorch.core.module:LightningModule._current_fx_name")
def in_hook(module: LightningModule, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call of a hook, so that `self.log` finds the hook's name in the module."""
    attributes = vars(module)  # a write to this dictionary avoids nn.Module's slow __setattr__

    def called(*args: Any, **kwargs: Any) -> Any:
        before = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = name
        result = call(*args, **kwargs)
        attributes["_current_fx_name"] = before
        return result

    return called


@expects(
    f"{_TRAINER}._data_connector",
    f"{_CONNECTORS}.data_connector:_DataConnector._datahook_selector",
    f"{_CONNECTORS}.data_connector:_DataHookSelector.get_instance",
)
def hook_owner(trainer: Trainer, name: str) -> Any:
    """Return the module or data module whose batch hook Lightning calls."""
    owners = trainer._data_connector._datahook_selector
    assert owners is not None  # set before training
    return owners.get_instance(name)


@expects("lightning.pytorch.strategies.ddp:DDPStrategy._model_averager")
def averages_models(strategy: Strategy) -> bool:
    """Return whether the strategy averages the ranks' weights after an optimizer step."""
    return getattr(strategy, "_model_averager", None) is not None


@expects(
    *(f"{_TRAINER}._logger_connector", "lightning.pytorch.loops.loop:_Loop._restarting"),
    *(f"{_LOGGERS}.{name}" for name in ("_first_loop_iter", "_current_fx")),
    *(f"{_LOGGERS}.{name}" for name in ("on_batch_end", "update_train_step_metrics")),
    *(f"{EPOCH_LOOP}.{name}" for name in ("_results", "_batches_that_stepped")),
    f"{AUTOMATIC}:_AutomaticOptimization._skip_backward",
)
class LoggingLoop(_TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch. Separate methods do its logging before and after a batch."""

    @property
    def skips_backward(self) -> bool:
        """Whether a callback, such as StochasticWeightAveraging, makes Lightning skip the backward pass."""
        return self.automatic_optimization._skip_backward

    def end_resumption(self) -> None:
        """Mark the epoch as not resumed, because Lightning skips ReduceLROnPlateau at the end of a resumed epoch.

        Source: fit_loop.py, `on_advance_end`.
        """
        self.val_loop.restarting = self.trainer.fit_loop._restarting = False

    def on_batch_start(self, batch: Any, size: int | None = None) -> None:
        """Tell `self.log` the batch, its size if known, and whether the batch is the epoch's first."""
        connector, results = self.trainer._logger_connector, self._results
        connector._first_loop_iter = connector._first_loop_iter is None
        connector._current_fx = None  # set by the first call of `self.log`
        results.batch, results.batch_size, results.dataloader_idx = batch, size, None

    def on_batch_end(self, accumulating: bool) -> None:
        """Store this step's metrics; pass them to the loggers every `log_every_n_steps` steps and when training stops.

        Unlike Lightning, do not read metrics for the progress bar on every step.
        """
        trainer: Any = self.trainer
        connector, every = trainer._logger_connector, trainer.log_every_n_steps
        if connector._current_fx is not None:
            connector.on_batch_end()
        self._results.batch = self._results.batch_size = None
        self.batch_progress.increment_completed()
        window_ends = every and ((self._batches_that_stepped + 1) % every == 0 or trainer.should_stop)
        if window_ends and not accumulating:
            connector.update_train_step_metrics()

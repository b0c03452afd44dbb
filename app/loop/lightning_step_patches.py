"""Private names of Lightning that the straight step needs."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from app.system.patches import expects

_TRAINER = "lightning.pytorch.trainer.trainer:Trainer"
_EPOCH_LOOP = "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
_DDP = "lightning.pytorch.strategies.ddp:DDPStrategy"
_MODULE = "lightning.pytorch.core.module:LightningModule"
_LOGGER_CONNECTOR = "lightning.pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector"


@expects(
    f"{_TRAINER}._logger_connector",
    f"{_LOGGER_CONNECTOR}._first_loop_iter",
    f"{_LOGGER_CONNECTOR}._current_fx",
    f"{_LOGGER_CONNECTOR}.on_batch_end",
    f"{_LOGGER_CONNECTOR}.update_train_step_metrics",
    f"{_EPOCH_LOOP}._results",
    f"{_EPOCH_LOOP}._batches_that_stepped",
    f"{_EPOCH_LOOP}.on_run_start",
    f"{_EPOCH_LOOP}.advance",
    f"{_EPOCH_LOOP}.on_advance_end",
    f"{_EPOCH_LOOP}.done",
    f"{_EPOCH_LOOP}._should_check_val_fx",
    "lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization._skip_backward",
    "lightning.pytorch.loops.fetchers:_DataLoaderIterDataFetcher",
)
class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch, with its private methods public for another step.

    At an upgrade: compare `app.loop.straight_step` with `advance` and `on_advance_end` in loops/training_epoch_loop.py,
    with `run` in loops/optimization/automatic.py, and the methods here with those of the same names, or
    `update_train_step_metrics`, in logger_connector.py.

    Attributes:
        reason: Reason to use Lightning's step; None for the straight step.
    """

    reason: str | None = None

    @classmethod
    def put_into(cls, trainer: Trainer) -> None:
        """Replace a Trainer's epoch loop by an instance of this class."""
        before = trainer.fit_loop.epoch_loop
        trainer.fit_loop.epoch_loop = cls(trainer, before.min_steps, before.max_steps)

    @property
    def skips_backward(self) -> bool:
        """Whether to skip the backward pass, as StochasticWeightAveraging does in its last epoch."""
        return self.automatic_optimization._skip_backward

    def validates_first(self, data_fetcher: Any) -> bool:
        """Return whether a resumed run validates before its first step."""
        return self.restarting and self._should_check_val_fx(data_fetcher)

    @staticmethod
    def hands_over(data_fetcher: Any) -> bool:
        """Return whether `training_step` takes the data iterator instead of a batch."""
        return isinstance(data_fetcher, _DataLoaderIterDataFetcher)

    def count_step(self) -> None:
        """Increment the loggers' count of optimizer steps."""
        self._batches_that_stepped += 1

    def on_batch_start(self, batch: Any) -> None:
        """Set the batch for `self.log`, and whether it is the epoch's first."""
        connector, results = self.trainer._logger_connector, self._results
        connector._first_loop_iter = connector._first_loop_iter is None
        connector._current_fx = None  # set by the first call of `self.log`
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None

    def on_batch_end(self, accumulating: bool) -> None:
        """Store the metrics of this step, and pass them to the loggers at the end of a window.

        Lightning itself reads metrics for the progress bar on every step.
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


@expects(f"{_MODULE}._current_fx_name")
def in_hook(module: LightningModule, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call so that `self.log` finds the hook's name. Source: trainer/call.py."""
    attributes = vars(module)  # bypasses torch's slow __setattr__

    def called(*args: Any, **kwargs: Any) -> Any:
        before = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = name
        result = call(*args, **kwargs)
        attributes["_current_fx_name"] = before
        return result

    return called


@expects(
    f"{_TRAINER}._data_connector",
    "lightning.pytorch.trainer.connectors.data_connector:_DataConnector._datahook_selector",
    "lightning.pytorch.trainer.connectors.data_connector:_DataHookSelector.get_instance",
)
def owner_of_batch_hook(trainer: Trainer, name: str) -> LightningModule | LightningDataModule:
    """Return the object whose batch hook Lightning calls: the module or the data module."""
    selector = trainer._data_connector._datahook_selector
    assert selector is not None
    return selector.get_instance(name)


@expects(
    f"{_EPOCH_LOOP}.automatic_optimization",
    "lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization.output_result_cls",
    "lightning.pytorch.loops.optimization.automatic:ClosureResult.closure_loss",
)
def unpack_outputs(loop: EpochLoop, outputs: Any, micro_batches: int) -> tuple[Tensor | None, dict[str, Any]]:
    """Return loss and other outputs of a training step that returned no tensor.

    Raises:
        MisconfigurationException: When the step returned neither a dictionary with a loss nor None.
    """
    result = loop.automatic_optimization.output_result_cls.from_training_step_output(outputs, micro_batches)
    return result.closure_loss, {} if result.loss is None else result.asdict()


@expects(f"{_DDP}._model_averager")
def averages_weights(strategy: Strategy) -> bool:
    """Return whether the strategy periodically averages the ranks' weights."""
    return getattr(strategy, "_model_averager", None) is not None

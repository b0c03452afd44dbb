"""Patches that use Lightning's private names, one function or class per patch.

When you upgrade Lightning, run `tests/test_patches.py`, which lists missing names, and make the
checks that docstrings list.
"""

import inspect
import logging
import os
import re
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import distributed
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from app.errors import UserError, one_line
from app.system.patches import expects

_CONNECTOR = "lightning.pytorch.trainer.connectors.accelerator_connector:_AcceleratorConnector"
_TRAINER = "lightning.pytorch.trainer.trainer:Trainer"
_FIT_LOOP = "lightning.pytorch.loops.fit_loop:_FitLoop"
_EPOCH_LOOP = "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
_DDP = "lightning.pytorch.strategies.ddp:DDPStrategy"

# -- output
# ----------------------------------------------------------------------------------------------------

SPEAKERS = (
    *(f"lightning.{package}.utilities.rank_zero" for package in ("pytorch", "fabric")),
    *(f"lightning.fabric.utilities.{module}" for module in ("distributed", "seed")),
    "lightning.pytorch.accelerators.cuda",
)
HIDDEN = (  # first words of hidden lines
    *("💡", "TPU available", "GPU available", "Initializing distributed", "-" * 100, "Seed set to"),
    *(
        "`Trainer.fit` stopped",
        "Restoring states from",
        "Loaded model weights from",
        "Restored all states from",
    ),
    *(
        "Loading `train_dataloader`",
        "Found current_model_state",
        "You are using a CUDA device",
        "LOCAL_RANK: ",
    ),
    "Your model can run with static graph",  # ignored, because a static graph gains nothing here
)


def hide_lines() -> None:
    """Hide Lightning's advertisements, and messages that repeat this application's output, unless --verbose is set."""
    for name in SPEAKERS:
        logging.getLogger(name).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    message = re.sub(r"^\[rank: \d+\] ", "", record.getMessage())
    return "APP_DEBUG" in os.environ or not message.startswith(HIDDEN)


# -- the Trainer
# ---------------------------------------------------------------------------------------------


@expects(f"{_TRAINER}._accelerator_connector", f"{_CONNECTOR}._strategy_flag")
def strategy_name(trainer: Trainer) -> str:
    """Return the strategy's name, as typed on the command line; for `auto`, the name of Lightning's choice."""
    flag = trainer._accelerator_connector._strategy_flag
    return flag if isinstance(flag, str) else getattr(flag, "strategy_name", type(flag).__name__)


@expects(f"{_TRAINER}._signal_connector")
def signal_connector(trainer: Trainer) -> Any:
    """Return the run's signal handler, a `Signals`."""
    return trainer._signal_connector


@expects(f"{_TRAINER}._signal_connector")
def replace_signal_connector(trainer: Trainer, connector: Any) -> None:
    """Replace Lightning's signal connector, whose SIGTERM handler makes a collective call that other ranks do not join.

    Source: signal_connector.py, `_sigterm_notifier_fn`. At an upgrade: does `Trainer.__init__`
    still create the connector? Does Lightning call only the connector's `register_signal_handlers`
    and `teardown`?
    """
    trainer._signal_connector = connector


def _no() -> bool:
    """Return false. Patches put this function in place of methods; a lambda could not be pickled with the trainer."""
    return False


@expects(f"{_FIT_LOOP}._iteration_based_training")
def count_epochs(trainer: Trainer) -> None:
    """Prevent a side effect of max_steps: Lightning would resume a completed epoch as an interrupted one.

    Source: https://github.com/Lightning-AI/pytorch-lightning/issues/19617. At an upgrade: does
    test_resume pass without this patch?
    """
    trainer.fit_loop._iteration_based_training = _no  # type: ignore[method-assign]


@expects(f"{_FIT_LOOP}._can_stop_early")
def is_stopped(trainer: Trainer) -> bool:
    """Return whether training ends before its limits, such as by early stopping."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


def in_window(trainer: Trainer) -> bool:
    """Return whether trained batches wait for an optimizer step that they share with later batches.

    A checkpoint has no gradients, so that a run resumed from one saved now would lose those of
    these batches.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    trained = progress.current.processed
    ends = trained >= trainer.num_training_batches or (
        progress.is_last_batch and trained == progress.current.ready
    )
    return trained % trainer.accumulate_grad_batches != 0 and not ends


_RESTORING = "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector"


@expects(
    f"{_TRAINER}._checkpoint_connector",
    f"{_RESTORING}._restore_modules_and_callbacks",
    *(f"{_RESTORING}.restore_training_state", f"{_RESTORING}.dump_checkpoint"),
)
class Restoring(_CheckpointConnector):
    """Checkpoint connector that raises a UserError for a damaged checkpoint, and calls the callbacks' `before_saving`.

    At an upgrade: do `Trainer._run` and `save_checkpoint` still call these methods?
    """

    @classmethod
    def put_into(cls, trainer: Trainer) -> None:
        """Replace a Trainer's checkpoint connector by an instance of this class."""
        trainer._checkpoint_connector = cls(trainer)

    def _restore_modules_and_callbacks(self, *args: Any, **kwargs: Any) -> None:
        with self._naming_checkpoint():
            super()._restore_modules_and_callbacks(*args, **kwargs)

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the checkpoint to save; first pass it to the callbacks' `before_saving`.

        Raises:
            UserError: When the user's code saves inside an accumulation window. Weights alone may
                be saved there.
        """
        trainer: Any = self.trainer
        if trainer.state.fn == "fit" and not weights_only and in_window(trainer):
            every = trainer.accumulate_grad_batches
            raise UserError(
                f"Trainer.save_checkpoint inside the {every} batches of an optimizer step would lose "
                f"gradients: call it where (batch_idx + 1) % {every} is 0, or with weights_only=True"
            )
        checkpoint = super().dump_checkpoint(weights_only)
        for callback in trainer.callbacks:
            if hasattr(callback, "before_saving"):
                callback.before_saving(trainer, checkpoint)
        return checkpoint

    def restore_training_state(self) -> None:
        """Restore optimizers, schedulers, loops and precision."""
        with self._naming_checkpoint():
            super().restore_training_state()

    @contextmanager
    def _naming_checkpoint(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if not self.trainer.ckpt_path:
                raise
            raise UserError(
                f"--ckpt_path {self.trainer.ckpt_path} cannot be restored ({type(error).__name__}: "
                f"{one_line(str(error))[:200]}): give another one"
            ) from error


@expects(f"{_EPOCH_LOOP}._broadcast_sigterm_tensor")
def leave_out_sigterm_broadcast(trainer: Trainer) -> None:
    """Disable Lightning's broadcast of SIGTERM on every step, because it ends training without saving a checkpoint.

    Source: training_epoch_loop.py, `on_advance_end`. At an upgrade: does `advance` still call this
    method?
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _no  # type: ignore[method-assign, assignment]


# -- error messages
# ------------------------------------------------------------------------------------------


def complaint(error: Exception) -> str | None:
    """Return Lightning's error message about a wrong setting, with the flag if it is known; None for other errors."""
    if isinstance(error, MisconfigurationException):
        return one_line(str(error))
    file = traceback.extract_tb(error.__traceback__)[-1].filename if error.__traceback__ else ""
    names = re.findall(r"`(\w+)`", str(error)) if "/lightning/pytorch/" in file else []
    name = next((name for name in names if name in inspect.signature(Trainer).parameters), None)
    return f"--trainer.{name}: {one_line(str(error))}" if name else None


# -- modules
# -------------------------------------------------------------------------------------------------


@expects("lightning.fabric.utilities.device_dtype_mixin:_DeviceDtypeModuleMixin._device")
def set_device(module: LightningModule, device: torch.device) -> None:
    """Set a replica's `self.device`, because torch's `replicate` copies the value of the main device."""
    module._device = device


# -- strategies and launchers
# --------------------------------------------------------------------------------


@expects(
    *(f"{_DDP}.{name}" for name in ("_setup_model", "_ddp_kwargs", "_register_ddp_hooks")),
    *(f"{_DDP}._ddp_comm_{name}" for name in ("state", "hook", "wrapper")),
    "lightning.pytorch.overrides.distributed:_register_ddp_comm_hook",
)
class DDPWithHooks(DDPStrategy):
    """Lightning's DDP strategy, with four corrections.

    Communication hooks work on every device. Lightning registers them only on CUDA, and drops them
    silently elsewhere. Source: strategies/ddp.py, `_register_ddp_hooks`.

    The model is wrapped on the current stream. Lightning wraps it on a new stream, where autograd's
    accumulation nodes stay, so that each backward pass waits for that stream. Source:
    https://github.com/Lightning-AI/pytorch-lightning/pull/21746.

    With gloo, DDP has a process group of its own. Lightning uses the default group, which the
    user's code shares.

    `self.log(…, sync_dist=True)` averages over the samples of all ranks. Lightning divides by the
    mean number of samples per rank, rounded down. Source: result.py, `_ResultMetric.compute`.

    At an upgrade: does `setup_optimizers` still read the period of model averaging, and does
    `_setup_model` still enter a new stream?
    """

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        group = None
        # a separate group, because in a shared group, gloo may pair DDP's collective call on one
        # rank with the user's collective call on another rank, and abort
        if distributed.is_initialized() and distributed.get_backend() == "gloo":
            level = distributed.get_debug_level()
            # at level DETAIL, torch would wrap the new group, and its DDP logger would crash on the
            # wrapper
            distributed.set_debug_level(distributed.DebugLevel.OFF)
            group = distributed.new_group(backend="gloo", timeout=self._timeout)
            distributed.set_debug_level(level)
        devices = self.determine_ddp_device_ids()
        return DistributedDataParallel(
            model, device_ids=devices, process_group=group, **self._ddp_kwargs
        )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over ranks; compute the mean of integers in floating point."""
        rounds = (
            isinstance(tensor, torch.Tensor)
            and not tensor.is_floating_point()
            and reduce_op == "mean"
        )
        return super().reduce(tensor.float() if rounds else tensor, group, reduce_op)

    def keep_buffers(self) -> None:
        """Disable the broadcast of buffers, because virtual devices keep them equal."""
        names = inspect.signature(DistributedDataParallel).parameters
        # torch 2.14 renamed the argument, and warns about the earlier name
        self._ddp_kwargs[
            "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        ] = False

    def comm_state(self) -> object | None:
        """Return the communication hook's state, its first argument. Called once, after the processes are connected."""
        return self._ddp_comm_state

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self._ddp_comm_state = self.comm_state()
        _register_ddp_comm_hook(
            self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper
        )


_LAUNCHER = "lightning.pytorch.strategies.launchers.multiprocessing:_MultiProcessingLauncher"


@expects(f"{_DDP}._timeout")
def set_timeout(strategy: Strategy, seconds: float) -> None:
    """Set the timeout of DDP's collective calls. A flag cannot set it, because it is a timedelta."""
    if hasattr(strategy, "_timeout"):
        strategy._timeout = timedelta(seconds=seconds)


@expects(f"{_LAUNCHER}._start_method")
def start_method(strategy: Strategy) -> Any:
    """Return the start method of the strategy's launcher, such as `spawn`; None for a launcher without one."""
    return getattr(strategy.launcher, "_start_method", None)


@expects("lightning.pytorch.strategies.strategy:Strategy._launcher")
def replace_launcher(strategy: Strategy, launcher: Any) -> None:
    """Replace the launcher of a strategy's processes."""
    strategy._launcher = launcher


# -- loggers
# -------------------------------------------------------------------------------------------------


@expects("lightning.pytorch.loggers.wandb:WandbLogger._wandb_init")
def tracker_settings(logger: WandbLogger) -> MutableMapping[str, Any]:
    """Return the logger's mutable arguments for `wandb.init`."""
    return logger._wandb_init


@expects(
    *(
        f"lightning.pytorch.loggers.{name}._experiment"
        for name in ("wandb:WandbLogger", "csv_logs:CSVLogger")
    )
)
def open_experiment(logger: WandbLogger | CSVLogger) -> Any:
    """Return the logger's experiment if it is open, else None; the public `experiment` would open it."""
    return logger._experiment

"""Patches of Lightning, one function per patch, and its messages.

When you upgrade Lightning, run `tests/test_patches.py`, which lists missing names, and make the
checks that docstrings list.
"""

import inspect
import logging
import os
import re
import traceback
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from app.errors import UserError, one_line
from app.system.patches import expects

_FIT_LOOP = "lightning.pytorch.loops.fit_loop:_FitLoop"
_TIMEOUT = "lightning.pytorch.strategies.ddp:DDPStrategy._timeout"

# -- output
# ------------------------------------------------------------------------------------------

SPEAKERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.accelerators.cuda",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "lightning.pytorch.tuner.lr_finder",
)
HIDDEN = (  # first words of hidden lines
    "💡",
    "TPU available",
    "GPU available",
    "Initializing distributed",
    "-" * 100,
    "Seed set to",
    "`Trainer.fit` stopped",
    "Restoring states from",
    "Loaded model weights from",
    "Restored all states from",
    "Loading `train_dataloader`",
    "Found current_model_state",
    "`weights_only` was not set",
    "LR finder stopped early",
    "You are using a CUDA device",
    "LOCAL_RANK: ",
    "Your model can run with static graph",  # ignored, because a static graph gains nothing here
)


def hide_lines() -> None:
    """Hide Lightning's advertisements and lines that repeat ours, without --verbose."""
    for name in SPEAKERS:
        logging.getLogger(name).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    message = re.sub(r"^\[rank: \d+\] ", "", record.getMessage())
    return "APP_DEBUG" in os.environ or not message.startswith(HIDDEN)


# -- the Trainer
# ------------------------------------------------------------------------------------------


def do_nothing(*_: Any) -> bool:
    """Return false. Patches put this function in place of methods; a lambda cannot be pickled."""
    return False


@expects(f"{_FIT_LOOP}._iteration_based_training")
def count_epochs(trainer: Trainer) -> None:
    """Prevent a side effect of max_steps: resuming a completed epoch as an interrupted one.

    Source: https://github.com/Lightning-AI/pytorch-lightning/issues/19617. At an upgrade: does
    test_resume pass without this patch?
    """
    trainer.fit_loop._iteration_based_training = do_nothing  # type: ignore[method-assign]


@expects(f"{_FIT_LOOP}._can_stop_early")
def is_stopped(trainer: Trainer) -> bool:
    """Return whether training ends before its limits, such as by early stopping."""
    return trainer.should_stop and trainer.fit_loop._can_stop_early


@expects("lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor")
def leave_out_sigterm_broadcast(trainer: Trainer) -> None:
    """Disable Lightning's broadcast of SIGTERM, which ends training without a checkpoint.

    Source: training_epoch_loop.py, `on_advance_end`. At an upgrade: does `advance` still call this
    method?
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = do_nothing


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


def check_saving(trainer: Trainer) -> None:
    """Make `Trainer.save_checkpoint` call the callbacks' `before_saving` first, and wait for steps.

    Inside an accumulation window, it refuses to save: see `_save`.

    A callback's hook `on_save_checkpoint` is no alternative, because Lightning does not call it for
    a checkpoint that holds only weights.
    """
    trainer.save_checkpoint = partial(_save, trainer)  # type: ignore[method-assign]


def _save(trainer: Any, filepath: Any, weights_only: bool | None = None, **options: Any) -> None:
    """Save a checkpoint.

    Raises:
        UserError: When the user's code saves inside an accumulation window. Weights alone may be
            saved there.
    """
    if trainer.state.fn == "fit" and not weights_only and in_window(trainer):
        every = trainer.accumulate_grad_batches
        raise UserError(
            f"Trainer.save_checkpoint inside the {every} batches of an optimizer step would lose "
            f"gradients: call it where (batch_idx + 1) % {every} is 0, or with weights_only=True"
        )
    for callback in trainer.callbacks:
        if hasattr(callback, "before_saving"):
            callback.before_saving(trainer, {"state_dict": trainer.lightning_module.state_dict()})
    type(trainer).save_checkpoint(trainer, filepath, weights_only, **options)


# -- error messages
# ------------------------------------------------------------------------------------------


def complaint(error: Exception) -> str | None:
    """Return the one-line message for an error that Lightning raises, with the flag if it is known.

    Returns None for other errors than wrong settings and checkpoints that cannot be restored.
    """
    message = one_line(str(error))
    if isinstance(error, MisconfigurationException):
        return message
    frames = traceback.extract_tb(error.__traceback__)
    for frame in frames:
        if frame.filename.endswith("checkpoint_connector.py") and "restore" in frame.name:
            reason = f"{type(error).__name__}: {message[:200]}"
            return f"--ckpt_path: the checkpoint cannot be restored ({reason}): give another one"
    if frames and "/lightning/pytorch/" in frames[-1].filename:
        for name in re.findall(r"`(\w+)`", message):
            if name in inspect.signature(Trainer).parameters:
                return f"--trainer.{name}: {message}"
    if "'fused' optimizer" in message:
        return (
            "a fused optimizer cannot clip gradients under mixed precision: leave out "
            "--model.optimizer.fused or --trainer.gradient_clip_val"
        )
    return None


# -- modules
# ------------------------------------------------------------------------------------------


@expects("lightning.fabric.utilities.device_dtype_mixin:_DeviceDtypeModuleMixin._device")
def set_device(module: LightningModule, device: torch.device) -> None:
    """Set a replica's `self.device`, because torch's `replicate` copies the main device's value."""
    module._device = device


# -- strategies and launchers
# ------------------------------------------------------------------------------------------


@expects(_TIMEOUT)
def set_timeout(strategy: Strategy, seconds: float) -> None:
    """Set the timeout of collective calls. A flag cannot set it, because it is a timedelta."""
    if hasattr(strategy, "_timeout"):
        strategy._timeout = timedelta(seconds=seconds)

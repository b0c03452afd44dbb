"""Callback for a checkpoint's contents: tried before the first epoch, and frozen layers."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from app.command.checkpoint_file import CheckpointFiles, drop_unreadable
from app.errors import UserError
from app.launch.agree import gather_objects
from app.record.words import listed
from app.system.patches import expects
from app.system.torch_files import unreadable
from app.system.trust import chosen_modules, is_within, local_modules
from app.training.step_patches import finetunes

FROZEN = "frozen"  # key in a checkpoint


class Contents(Callback):
    """Callback that tries the first checkpoint, and saves and restores frozen layers.

    Without it, a run would train to its end before an unreadable checkpoint is noticed, and
    Lightning would freeze a resumed run's layers as at the start of training.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Try in memory whether a checkpoint could be read again. Collective.

        Raises:
            UserError: When it could not; the message names the object in it.
        """
        io = trainer.strategy.checkpoint_io
        if not trainer.checkpoint_callbacks or not isinstance(io, CheckpointFiles):
            return
        with isolate_rng():
            message = complaint(trainer)
        message = gather_objects(message)[0]
        if message is not None:
            raise UserError(message)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the names of frozen parameters, and of norms that keep their statistics."""
        if finetunes(trainer):
            frozen = [name for name, p in pl_module.named_parameters() if not p.requires_grad]
            for name, module in pl_module.named_modules():
                if not getattr(module, "track_running_stats", True):
                    frozen.append(name)
            checkpoint[FROZEN] = frozen

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Freeze the layers that were frozen, and no others, before DDP wraps the model."""
        if trainer.state.fn != "fit" or not finetunes(trainer) or FROZEN not in checkpoint:
            return
        frozen = set(checkpoint[FROZEN])
        for name, parameter in pl_module.named_parameters():
            parameter.requires_grad = name not in frozen
        for name, module in pl_module.named_modules():
            if hasattr(module, "track_running_stats"):
                module.track_running_stats = name not in frozen


def attempt(hook: Callable[..., None], *args: Any) -> None:
    """Call a hook, and ignore its exception, because the hook may need what training makes.

    The first real checkpoint raises it again.
    """
    with suppress(Exception):
        hook(*args)


@expects("lightning.pytorch.trainer.trainer:Trainer._checkpoint_connector")
def complaint(trainer: Any) -> str | None:
    """Return why a checkpoint could not be read again, or None.

    Print the names of hyperparameters that are left out.
    """
    weights_alone = all(
        getattr(callback, "save_weights_only", False) for callback in trainer.checkpoint_callbacks
    )
    with ExitStack() as stack:
        for owner in (*trainer.callbacks, trainer.lightning_module):
            hook = partial(attempt, owner.on_save_checkpoint)
            stack.enter_context(patch.object(owner, "on_save_checkpoint", hook))
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_alone)
    dropped = drop_unreadable(checkpoint)
    if dropped:
        rank_zero_info(
            f"checkpoints are saved without the hyperparameters {listed(dropped)}, because only "
            "plain values can be loaded: pass these to load_from_checkpoint"
        )
    found = unreadable(checkpoint, "checkpoint")
    if found is None:
        return None
    place, value = found
    cls = value if hasattr(value, "__qualname__") else type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    text = (
        f"{place} is of type {name}, so that no checkpoint could be loaded: save a plain value or "
        "a tensor"
    )
    if is_within(cls.__module__, [*local_modules(), *chosen_modules()]):
        text += f", or call torch.serialization.add_safe_globals([{name}]) in the module's file"
    return text

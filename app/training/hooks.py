"""What a training step calls: hooks and methods that are overridden."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from lightning import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from app.data.exact_loader import order_of
from app.training.ddp import DDP
from app.training.step_patches import Hook, identities, in_hook

FORWARD = ("train_step_context", "forward_context")
BACKWARD = ("pre_backward", "backward", "post_backward")


def overrides(owner: Any, base: type, *names: str) -> bool:
    """Return whether a subclass or an attribute of the object overrides any of the hooks."""
    return any(
        getattr(getattr(owner, name), "__func__", None) is not getattr(base, name) for name in names
    )


def why_not(trainer: Any) -> str | None:
    """Return the requested feature that needs Lightning's step, or None."""
    module = trainer.lightning_module
    strategy = trainer.strategy
    # the step clock's profiler is a PassThroughProfiler, too
    if not isinstance(trainer.profiler, PassThroughProfiler):
        return "a profiler"
    if not module.automatic_optimization:
        return "manual optimization"
    # in its last epoch, it trains without a backward pass
    if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
        return "StochasticWeightAveraging"
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return "a training_step that takes the data iterator"
    if strategy.handles_gradient_accumulation:
        return f"the training step of {type(strategy).__name__}"
    return None


class Hooks:
    """What a step calls. The loop makes this object anew when one of its `identities` has changed.

    Args:
        trainer: The Trainer.

    Attributes:
        identities: Profiler, methods and objects that decide what a step calls.
        reason: Reason to use Lightning's step after all, or None.
        order: Global order of the training loader, or None.
        weighs_loss: Whether the step multiplies the loss by its weight.
        shares_loss: Whether the logged loss may share the memory of the loss that is
            differentiated. Lightning copies it, because user code may keep it or change it in
            place.
        optimizer_step: Overridden `optimizer_step`, or None if `optimizer.step` does the same.
        clips: Whether gradients are clipped even without the Trainer's clip value.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.module = module = trainer.lightning_module
        self.strategy = strategy = trainer.strategy
        self.data = trainer.datamodule or module
        self.identities = identities(self)
        self.reason = why_not(trainer)
        self.order: Any = order_of(trainer.train_dataloader)
        # an `ImageClassifier` weights its loss itself; only its loaders have `empty="keep"`
        self.weighs_loss = self.order is not None and self.order.empty != "keep"
        self.block_sync: Any = nullcontext
        if isinstance(strategy, ParallelStrategy):
            self.block_sync = strategy.block_backward_sync
        self.on_train_batch_start = Hook(trainer, "on_train_batch_start")
        self.on_before_zero_grad = Hook(trainer, "on_before_zero_grad")
        self.on_before_backward = Hook(trainer, "on_before_backward")
        self.on_after_backward = Hook(trainer, "on_after_backward")
        self.on_train_batch_end = Hook(trainer, "on_train_batch_end")
        self.on_before_optimizer_step: Any = Hook(trainer, "on_before_optimizer_step")
        if type(trainer.profiler) is not PassThroughProfiler:  # it times the update from here on
            self.on_before_optimizer_step = in_hook(
                trainer, "on_before_optimizer_step", self.on_before_optimizer_step
            )
        self._find_batch_hooks()
        self._find_training_step()
        self._find_backward()
        self._find_optimizer_hooks()

    def _find_batch_hooks(self) -> None:
        strategy = self.strategy
        precision = strategy.precision_plugin
        self.convert_input: Callable | None = None
        if overrides(precision, Precision, "convert_input"):
            self.convert_input = precision.convert_input
        self._device = strategy.root_device
        self.on_before_batch_transfer = self._batch_hook("on_before_batch_transfer")
        self._transfer_batch_to_device = self._batch_hook("transfer_batch_to_device")
        self._on_after_batch_transfer = self._batch_hook("on_after_batch_transfer")
        move: Callable = self._move
        if overrides(strategy, Strategy, "batch_to_device"):
            move = partial(strategy.batch_to_device, dataloader_idx=0)
        self.batch_to_device = in_hook(self.trainer, "batch_to_device", move)

    def _batch_hook(self, name: str) -> Any:
        """Return the data module's or module's batch hook; None if it does nothing."""
        if self.data is not self.module and is_overridden(name, self.data):
            return getattr(self.data, name)
        if name == "transfer_batch_to_device" or overrides(self.module, LightningModule, name):
            return in_hook(self.trainer, name, getattr(self.module, name))
        return None

    def _move(self, batch: Any) -> Any:
        batch = self._transfer_batch_to_device(batch, self._device, 0)
        if self._on_after_batch_transfer is not None:
            batch = self._on_after_batch_transfer(batch, 0)
        return batch

    def _find_training_step(self) -> None:
        """Find the training step; skip strategy and precision plugin if they add nothing."""
        module = self.module
        strategy = self.strategy
        step = strategy.training_step
        if (
            strategy.model is module
            and not overrides(strategy, Strategy, "training_step")
            and not overrides(strategy.precision_plugin, Precision, *FORWARD)
        ):
            step = module.training_step
        if not is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            step = partial(_without_index, step)
        self.training_step = in_hook(self.trainer, "training_step", step)
        package = getattr(module.training_step, "__module__", "").partition(".")[0]
        self.shares_loss = package == "app" and not overrides(
            module, LightningModule, "on_before_backward", "backward"
        )
        for callback in self.trainer.callbacks:
            if overrides(callback, Callback, "on_before_backward"):
                self.shares_loss = False

    def _find_backward(self) -> None:
        backward = self.strategy.backward
        if self._adds_nothing(*BACKWARD):
            backward = self._backward
        self.backward = in_hook(self.trainer, "backward", backward)

    def _backward(self, loss: Tensor, optimizer: Any) -> None:
        self.on_before_backward(loss)
        self.module.backward(loss)
        self.on_after_backward()

    def _find_optimizer_hooks(self) -> None:
        trainer = self.trainer
        module = self.module
        precision = self.strategy.precision_plugin
        wrapped = module.optimizers()
        if isinstance(wrapped, list):  # manual optimization, which leaves this loop's step
            wrapped = wrapped[0]
        self.wrapped_optimizer = wrapped
        self.optimizer = wrapped.optimizer
        self.optimizer_step: Callable | None = None
        if overrides(module, LightningModule, "optimizer_step") or not self._adds_nothing(
            "optimizer_step"
        ):
            self.optimizer_step = in_hook(trainer, "optimizer_step", module.optimizer_step)
        self.optimizer_zero_grad: Callable | None = None
        if overrides(module, LightningModule, "optimizer_zero_grad"):
            self.optimizer_zero_grad = in_hook(
                trainer, "optimizer_zero_grad", module.optimizer_zero_grad
            )
        base = MixedPrecision if isinstance(precision, MixedPrecision) else Precision
        self.clips = overrides(
            module, LightningModule, "configure_gradient_clipping", "clip_gradients"
        ) or overrides(precision, base, "clip_gradients")
        self.clip = in_hook(
            trainer, "configure_gradient_clipping", module.configure_gradient_clipping
        )

    def _adds_nothing(self, *names: str) -> bool:
        """Return whether the step may skip these methods of strategy and precision plugin."""
        strategy = self.strategy
        precision = strategy.precision_plugin
        # in automatic optimization, DDP's overrides do nothing; without a scaler, MixedPrecision's
        # do nothing
        strategy_base = DDP if isinstance(strategy, DDP) else Strategy
        is_unscaled = isinstance(precision, MixedPrecision) and precision.scaler is None
        precision_base = MixedPrecision if is_unscaled else Precision
        return not overrides(strategy, strategy_base, *names) and not overrides(
            precision, precision_base, *names
        )


def _without_index(step: Callable[[Any], Any], batch: Any, index: int) -> Any:
    return step(batch)

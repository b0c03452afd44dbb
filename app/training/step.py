"""Fast copy of Lightning's training step, which calls only overridden hooks.

Lightning's step calls ten hooks of every callback, the module, the strategy and the precision
plugin. It wraps each call in a profiler and in checks. The copy calls only the overridden hooks, in
the same order, with the same arguments, and leaves the same counters and results. A hook, a method
or an optimizer that is replaced in mid-epoch takes effect at once, as in Lightning's step.

* Gain: 650 Python calls a step instead of 4,169 (a width-4 MLP with the default callbacks;
  `tests/test_cost.py`).
* Mirrors Lightning 2.6: `StraightLoop` and `Step` are `advance` and `on_advance_end` in
  `loops/training_epoch_loop.py`, and `run` in `loops/optimization/automatic.py`. Compare them when
  you upgrade Lightning.
* Falls back to Lightning's step for features it lacks: `StraightLoop.why_not` lists them.
* Off switch: `--run.loop lightning`.
* Comparison: `tests/test_straight_step.py` runs both, and compares calls, losses and checkpoints.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from app.data.global_order import order_of
from app.errors import UserError
from app.system.patches import expects
from app.training.step_patches import (
    AUTOMATIC,
    EPOCH_LOOP,
    Hook,
    LoggingLoop,
    averages_models,
    hook_owner,
    in_hook,
    watch,
)

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
FORWARD = ("train_step_context", "forward_context")
BACKWARD = ("pre_backward", "backward", "post_backward")
CLIPPING = ("configure_gradient_clipping", "clip_gradients")

# Attributes that the step and its parts depend on. Right before each part, the step compares them
# with their values at the part's look-up, because any hook may replace them.
step_state = watch(module=["_automatic_optimization"], strategy=["post_training_step"])
batch_state = watch(
    module=BATCH_HOOKS, data=BATCH_HOOKS, strategy=["batch_to_device"], precision=["convert_input"]
)
training_state = watch(
    module=["training_step", "backward"], strategy=["_model", "training_step"], precision=FORWARD
)
backward_state = watch(strategy=BACKWARD, precision=BACKWARD)
optimizer_state = watch(
    module=["optimizer_step"],
    strategy=["_lightning_optimizers", "optimizer_step"],
    precision=["optimizer_step"],
)
clipping_state = watch(module=CLIPPING, precision=["clip_gradients"])
interval_of = attrgetter("interval")


def overrides(owner: Any, base: type, *names: str) -> bool:
    """Return whether any of the hooks is overridden, by a subclass or by an attribute of the object."""
    return any(
        getattr(getattr(owner, name), "__func__", None) is not getattr(base, name) for name in names
    )


@expects(
    *(f"{EPOCH_LOOP}.{name}" for name in ("_batches_that_stepped", "_should_check_val_fx")),
    *(f"{EPOCH_LOOP}.{name}" for name in ("on_run_start", "advance", "on_advance_end", "done")),
    "lightning.pytorch.loops.fetchers:_DataLoaderIterDataFetcher",
)
class StraightLoop(LoggingLoop):
    """Lightning's loop over the batches of an epoch, with `Step` in place of Lightning's training step.

    Attributes:
        reason: Reason to use Lightning's step after all, or None.
    """

    reason: str | None = None
    _step: "Step | None" = None

    def on_run_start(self, data_fetcher: Any) -> None:
        """Look up the step."""
        super().on_run_start(data_fetcher)
        self._look_up(data_fetcher)
        if not self.restarting:
            self.val_loop.restarting = False

    def _look_up(self, data_fetcher: Any) -> None:
        self.reason = self.why_not(data_fetcher)
        self._step = self.make_step()

    def make_step(self) -> "Step | None":
        """Return the step, or None to use Lightning's step."""
        order = order_of(self.trainer.train_dataloader)
        if self.reason and order is not None and order is not self.trainer.train_dataloader:
            raise UserError(
                f"--run.global_order true does not work with {self.reason}: leave one of them out"
            )
        return None if self.reason else Step(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the step, which is looked up anew: a spawned worker may unpickle the Trainer."""
        return {**vars(self), "_step": None}

    def teardown(self) -> None:
        """Drop the step at the end of training."""
        self._step = None
        super().teardown()

    def why_not(self, data_fetcher: Any) -> str | None:
        """Return the requested feature that needs Lightning's step, or None."""
        trainer: Any = (
            self.trainer
        )  # typed Any, because Lightning does not declare these attributes
        module = trainer.lightning_module
        strategy = trainer.strategy
        if not isinstance(trainer.profiler, PassThroughProfiler):
            return "a profiler"
        if not module.automatic_optimization:
            return "manual optimization"
        if self.skips_backward:  # as StochasticWeightAveraging does in its last epoch
            return "a callback that trains without a backward pass"
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            return "a training_step that takes the data iterator"
        if strategy.handles_gradient_accumulation or overrides(
            strategy, Strategy, "post_training_step"
        ):
            return f"the training step of {type(strategy).__name__}"
        return None

    def advance(self, data_fetcher: Any) -> None:
        """Take one step; call Lightning's method if there is no `Step`, or if a resumed run must validate first."""
        if self._step is None or step_state(self._step) != self._step.state:
            self._look_up(data_fetcher)
        if self._step is None or (self.restarting and self._should_check_val_fx(data_fetcher)):
            super().advance(data_fetcher)
            return
        if self.restarting:
            self.end_resumption()
        self._step(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Count the step. Call Lightning's method if more is due: validation, schedulers, or the end of the epoch."""
        trainer = self.trainer
        progress = self.batch_progress
        every = self.trainer.val_check_batch
        batches = (
            progress.current if trainer.check_val_every_n_epoch is not None else progress.total
        )
        if (
            self._step is None
            or "step" in map(interval_of, self._step.strategy.lr_scheduler_configs)
            or progress.is_last_batch
            or trainer.should_stop
            or every is None  # `val_check_interval` is a time
            or every == float("inf")
            or batches.ready % every == 0
        ):
            super().on_advance_end(data_fetcher)
        elif progress.current.ready % trainer.accumulate_grad_batches == 0:
            self._batches_that_stepped += 1

    @property
    def done(self) -> bool:
        """Whether the epoch has ended."""
        step = self._step
        progress = self.batch_progress
        if (
            step is None
            or self.trainer.should_stop
            or progress.is_last_batch
            or progress.current.ready == self.trainer.fit_loop.max_batches
            or (self.max_steps != -1 and step.steps.total.completed >= self.max_steps)
        ):
            return super().done
        return False


@expects(
    f"{EPOCH_LOOP}.automatic_optimization",
    f"{AUTOMATIC}:_AutomaticOptimization.output_result_cls",
    f"{AUTOMATIC}:ClosureResult.closure_loss",
)
class Step:
    """Training step that calls the overridden hooks of callbacks, module, data module, strategy and precision plugin.

    Args:
        loop: The loop.

    Attributes:
        state: Values of `step_state` when this object was created.
        steps: Lightning's progress counter of optimizer steps.
    """

    def __init__(self, loop: StraightLoop) -> None:
        trainer: Any = loop.trainer
        module = trainer.lightning_module
        strategy = trainer.strategy
        self.loop = loop
        self.trainer = trainer
        self.module = module
        self.strategy = strategy
        self.data = getattr(trainer, "datamodule", None) or module
        self.state = step_state(self)
        progress = loop.automatic_optimization.optim_progress.optimizer
        self.steps = progress.step
        self.zero_grads = progress.zero_grad
        order = order_of(trainer.train_dataloader)
        # the order weights the loss. An `ImageClassifier` weights its loss itself; only its loaders
        # have `empty="keep"`
        self.order = None if getattr(order, "empty", None) == "keep" else order
        self.without_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
        if isinstance(strategy, ParallelStrategy):
            self.without_sync = strategy.block_backward_sync
        self.batch = None
        self.index = 0
        self.outputs: dict[str, Any] | None = None  # set by the training step

        self._plain_zero_grad = MethodType(LightningModule.optimizer_zero_grad, module)
        self.on_train_batch_start = Hook(trainer, "on_train_batch_start")
        self.on_before_zero_grad = Hook(trainer, "on_before_zero_grad")
        self.on_before_backward = Hook(trainer, "on_before_backward")
        self.on_after_backward = Hook(trainer, "on_after_backward")
        self.on_train_batch_end = Hook(trainer, "on_train_batch_end")

        self._look_up_batch()
        self._look_up_training()
        self._look_up_backward()
        self._look_up_optimizer()
        self._look_up_clipping()

    # -- lookup
    # ---------------------------------------------------------------------------------------------------

    def _part(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that `self.log` and the profiler see the call's name."""
        call = in_hook(self.module, name, call)
        profiler = self.trainer.profiler
        if type(profiler) is PassThroughProfiler:
            return call

        def profiled(*args: Any, **kwargs: Any) -> Any:
            with profiler.profile(f"[StraightLoop].{name}"):
                return call(*args, **kwargs)

        return profiled

    def _look_up_batch(self) -> None:
        """Look up the batch hooks of module and data module."""
        self._batch_state = batch_state(self)
        strategy = self.strategy
        device = self.strategy.root_device
        trainer = self.trainer

        def hook(name: str) -> Callable[..., Any] | None:
            owner = hook_owner(trainer, name)
            if name != "transfer_batch_to_device" and not overrides(owner, LightningModule, name):
                return None
            return (
                self._part(name, getattr(owner, name))
                if owner is self.module
                else getattr(owner, name)
            )

        before, transfer, after = map(hook, BATCH_HOOKS)
        assert transfer is not None

        def move(batch: Any) -> Any:
            batch = transfer(batch, device, 0)
            return batch if after is None else after(batch, 0)

        if overrides(strategy, Strategy, "batch_to_device"):
            move = partial(strategy.batch_to_device, dataloader_idx=0)
        self.preparation: list[Callable[[Any], Any]] = [self._part("batch_to_device", move)]
        if before is not None:
            self.preparation.insert(0, lambda batch: before(batch, 0))
        if overrides(strategy.precision_plugin, Precision, "convert_input"):
            self.preparation.insert(0, strategy.precision_plugin.convert_input)

    def _look_up_training(self) -> None:
        """Look up the training step; skip strategy and precision plugin if they add nothing."""
        self._training_state = training_state(self)
        module = self.module
        strategy = self.strategy
        precision = self.strategy.precision_plugin
        alone = strategy.model is module and not overrides(strategy, Strategy, "training_step")
        alone = alone and not overrides(precision, Precision, *FORWARD)
        step = module.training_step if alone else strategy.training_step
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.training_step = self._part(
            "training_step", step if takes_index else lambda batch, index: step(batch)
        )
        # Lightning copies the loss, because user code may keep it or change it in place
        package = getattr(module.training_step, "__module__", "").partition(".")[0]
        changes = [
            overrides(callback, Callback, "on_before_backward")
            for callback in self.trainer.callbacks
        ]
        changes.append(overrides(module, LightningModule, "on_before_backward", "backward"))
        self.shares_loss = package == "app" and not any(changes)

    def _look_up_backward(self) -> None:
        """Look up the backward pass; skip strategy and precision plugin if they add nothing."""
        self._backward_state = backward_state(self)
        module = self.module
        strategy = self.strategy

        def backward(loss: Tensor) -> None:
            self.on_before_backward(loss)
            module.backward(loss)
            self.on_after_backward()

        if self._can_bypass(*BACKWARD):
            self.backward = self._part("backward", backward)
        else:
            self.backward = self._part(
                "backward", lambda loss: strategy.backward(loss, self.zeroed)
            )

    def _look_up_optimizer(self) -> None:
        """Look up the optimizer and its step."""
        self._optimizer_state = optimizer_state(self)
        trainer = self.trainer
        module = self.module
        strategy = self.strategy
        wrapped = module.optimizers()
        self.optimizer = optimizer = wrapped.optimizer
        if overrides(module, LightningModule, "optimizer_step"):
            own_step = self._part("optimizer_step", module.optimizer_step)
            self.update = lambda: own_step(trainer.current_epoch, self.index, wrapped, self.compute)
        elif self._can_bypass("optimizer_step") and not averages_models(strategy):
            self.update = lambda: optimizer.step(closure=self.compute_and_clip)
        else:
            self.update = self._part(
                "optimizer_step", lambda: strategy.optimizer_step(optimizer, self.compute)
            )
        hook = Hook(trainer, "on_before_optimizer_step")
        self.on_before_optimizer_step = self._part("on_before_optimizer_step", hook)

    def _look_up_clipping(self) -> None:
        """Look up the clipping of gradients."""
        self._clipping_state = clipping_state(self)
        module = self.module
        precision = self.strategy.precision_plugin
        base = MixedPrecision if isinstance(precision, MixedPrecision) else Precision
        self.clips = overrides(module, LightningModule, *CLIPPING) or overrides(
            precision, base, "clip_gradients"
        )
        self.clip = self._part("configure_gradient_clipping", module.configure_gradient_clipping)

    def _can_bypass(self, *names: str) -> bool:
        """Return whether the step may skip these methods of strategy and precision plugin, because they do nothing."""
        strategy = self.strategy
        precision = self.strategy.precision_plugin
        # in automatic optimization, DDPStrategy's overrides do nothing; without a scaler,
        # MixedPrecision's do nothing
        ddp = isinstance(strategy, DDPStrategy)
        unscaled = isinstance(precision, MixedPrecision) and precision.scaler is None
        return not overrides(strategy, DDPStrategy if ddp else Strategy, *names) and not overrides(
            precision, MixedPrecision if unscaled else Precision, *names
        )

    # -- step
    # ----------------------------------------------------------------------------------------------------

    def __call__(self, data_fetcher: Any) -> None:
        """Take one training step.

        Raises:
            StopIteration: When `on_train_batch_start` of the module ends the epoch.
        """
        loop = self.loop
        trainer = self.trainer
        progress = self.loop.batch_progress
        batch, _, _ = next(data_fetcher)
        index = progress.current.ready
        progress.is_last_batch = data_fetcher.done
        if batch_state(self) != self._batch_state:
            self._look_up_batch()
        for prepare in self.preparation:
            batch = prepare(batch)
        progress.increment_ready()
        loop.on_batch_start(batch)
        ends = False
        outputs = None
        if batch is None:
            rank_zero_warn(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
        else:
            ends = self.on_train_batch_start(batch, index) == -1
            self.strategy.on_train_batch_start(batch, index)
            if ends:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                last = (
                    progress.is_last_batch or progress.current.ready == trainer.fit_loop.max_batches
                )
                accumulating = (
                    not last and progress.current.ready % trainer.accumulate_grad_batches != 0
                )
                outputs = self._train(batch, index, accumulating)
        progress.increment_processed()
        if "step" in map(interval_of, self.strategy.lr_scheduler_configs):
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if progress.is_last_batch or progress.current.ready == trainer.fit_loop.max_batches:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends:
            raise StopIteration
        self.on_train_batch_end(outputs, batch, index)
        loop.on_batch_end()

    def _train(self, batch: Any, index: int, accumulating: bool) -> dict[str, Any]:
        self.batch = batch
        self.index = index
        self.outputs = None
        self.zeroed = self.strategy.optimizers[0]
        self.begins_window = index % self.trainer.accumulate_grad_batches == 0
        if optimizer_state(self) != self._optimizer_state:
            self._look_up_optimizer()
        if accumulating:
            with self.without_sync():
                self.compute()
        else:
            self.steps.increment_ready()
            self.update()
            self.steps.increment_completed()
        if self.outputs is None:
            raise UserError(
                f"{type(self.module).__name__}.optimizer_step or its optimizer never calls the closure"
            )
        outputs = self.outputs
        self.outputs = None
        self.batch = None
        return outputs

    def compute(self) -> Tensor | None:
        """Compute loss and gradients, as the optimizer's closure."""
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.compute()
        if training_state(self) != self._training_state:
            self._look_up_training()
        output = self.training_step(self.batch, self.index)
        micro_batches = self.trainer.accumulate_grad_batches
        loss: Tensor | None
        if self.shares_loss and isinstance(output, Tensor):
            loss = output if micro_batches == 1 else output / micro_batches
            self.outputs = {"loss": loss.detach()}
        else:
            loss, self.outputs = self._unpack(output, micro_batches)
        if self.begins_window:
            self._zero()
        if backward_state(self) != self._backward_state:
            self._look_up_backward()
        if loss is not None:
            self.backward(
                loss if self.order is None else loss * self.order.weight(self.index, self._window)
            )
        return self.outputs.get("loss")

    @property
    def _window(self) -> tuple[int, int]:
        """Batches per accumulation window and per epoch."""
        return self.trainer.accumulate_grad_batches, int(
            min(self.trainer.num_training_batches, sys.maxsize)
        )

    def _zero(self) -> None:
        self.zero_grads.increment_ready()
        module = self.module
        optimizer = self.zeroed
        self.on_before_zero_grad(optimizer)
        self.zero_grads.increment_started()
        if module.optimizer_zero_grad == self._plain_zero_grad:
            optimizer.zero_grad()
        else:
            zero_grad = self._part("optimizer_zero_grad", module.optimizer_zero_grad)
            zero_grad(self.trainer.current_epoch, self.index, optimizer)
        self.zero_grads.increment_completed()

    def compute_and_clip(self) -> Any:
        """Compute loss and gradients, and clip the gradients. The optimizer calls this method as its closure."""
        loss = self.compute()
        self.on_before_optimizer_step(self.optimizer)
        self.clip_gradients()
        return loss

    def clip_gradients(self) -> None:
        """Clip the gradients, if the Trainer has a clip value or the module overrides a clipping hook."""
        if clipping_state(self) != self._clipping_state:
            self._look_up_clipping()
        value = self.trainer.gradient_clip_val
        algorithm = self.trainer.gradient_clip_algorithm
        if self.clips or value is not None:
            self.clip(self.optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)

    def _unpack(self, output: Any, micro_batches: int) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the loss and the outputs for a `training_step` result that is not a tensor.

        Raises:
            UserError: When the step returned None in a run of several processes.
            MisconfigurationException: When the step returned neither a dictionary with a loss nor
                None.
        """
        if output is None:
            if self.trainer.world_size > 1:
                raise UserError(
                    "training_step returned None to skip a step, which works only in a single process"
                )
            rank_zero_warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
        outputs = self.loop.automatic_optimization.output_result_cls
        result = outputs.from_training_step_output(output, micro_batches)
        return result.closure_loss, {} if result.loss is None else result.asdict()

"""Loop that calls only overridden hooks, and its training step; `app.loop` explains their purpose.

When you upgrade Lightning, compare

* `StraightLoop` and `Step` with `advance` and `on_advance_end` in loops/training_epoch_loop.py, and with `run` in
  loops/optimization/automatic.py.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
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
from app.loop.step_patches import AUTOMATIC, EPOCH_LOOP, LoggingLoop, averages_models, hook_owner, in_hook
from app.system.patches import expects

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def overrides(owner: Any, base: type, *names: str) -> bool:
    """Return whether any of the hooks is overridden, by a subclass or by an attribute of the object."""
    return any(getattr(getattr(owner, name), "__func__", None) is not getattr(base, name) for name in names)


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
        """Look up the hooks, once per epoch."""
        super().on_run_start(data_fetcher)
        self.reason = self.why_not(data_fetcher)
        self._step = self.make_step()
        if not self.restarting:
            self.val_loop.restarting = False

    def make_step(self) -> "Step | None":
        """Look up the hooks, and return the step; or return None, to use Lightning's step."""
        order = order_of(self.trainer.train_dataloader)
        if self.reason and order is not None and order is not self.trainer.train_dataloader:
            raise UserError(f"--run.global_order true does not work with {self.reason}: leave one of them out")
        return None if self.reason else Step(self)

    def teardown(self) -> None:
        """Drop the step at the end of training."""
        self._step = None
        super().teardown()

    def why_not(self, data_fetcher: Any) -> str | None:
        """Return the requested feature that needs Lightning's step, or None."""
        trainer: Any = self.trainer  # typed Any, because Lightning does not declare these attributes
        module, strategy = trainer.lightning_module, trainer.strategy
        if not isinstance(trainer.profiler, PassThroughProfiler):
            return "a profiler"
        if not module.automatic_optimization:
            return "manual optimization"
        if self.skips_backward:  # as StochasticWeightAveraging does in its last epoch
            return "a callback that trains without a backward pass"
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            return "a training_step that takes the data iterator"
        if strategy.handles_gradient_accumulation or overrides(strategy, Strategy, "post_training_step"):
            return f"the training step of {type(strategy).__name__}"
        return None

    def advance(self, data_fetcher: Any) -> None:
        """Take one step; call Lightning's method if there is no `Step`, or if a resumed run must validate first."""
        step = self._step
        trainer: Any = self.trainer
        if step is None or (self.restarting and self._should_check_val_fx(data_fetcher)):
            super().advance(data_fetcher)
            return
        if self.restarting:
            self.end_resumption()
        if trainer.profiler is not step.profiler or trainer.callbacks != step.callbacks:
            step = self._step = self.make_step()
            assert step is not None
        step(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Count the step. Call Lightning's method if more is due: validation, schedulers, or the end of the epoch."""
        trainer, progress, every = self.trainer, self.batch_progress, self.trainer.val_check_batch
        batches = progress.current if trainer.check_val_every_n_epoch is not None else progress.total
        if (
            self._step is None
            or self._step.schedules
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
        step, progress = self._step, self.batch_progress
        if (
            step is None
            or self.trainer.should_stop
            or progress.is_last_batch
            or progress.current.ready == step.batches
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
        callbacks: The Trainer's callbacks when this object was created.
        profiler: The Trainer's profiler when this object was created.
        batches: Number of batches per epoch.
        steps: Lightning's progress counter of optimizer steps.
        schedules: Whether a scheduler advances with each step.
    """

    def __init__(self, loop: StraightLoop) -> None:
        trainer: Any = loop.trainer
        module, strategy = trainer.lightning_module, trainer.strategy
        self.loop, self.trainer, self.module, self.strategy = loop, trainer, module, strategy
        self.callbacks, self.profiler = list(trainer.callbacks), trainer.profiler
        self.batches = trainer.num_training_batches
        progress = loop.automatic_optimization.optim_progress.optimizer
        self.steps, self.zero_grads = progress.step, progress.zero_grad
        self.schedules = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
        order = order_of(trainer.train_dataloader)
        # the order weights the loss. An `ImageClassifier` weights its loss itself; only its loaders have `empty="keep"`
        self.order = None if getattr(order, "empty", None) == "keep" else order
        self._window = trainer.accumulate_grad_batches, int(min(self.batches, sys.maxsize))
        self.batch, self.index = None, 0
        self.outputs: dict[str, Any] | None = None  # set by the training step

        self.on_train_batch_start = self._hook("on_train_batch_start")
        self.on_before_zero_grad = self._hook("on_before_zero_grad")
        self.on_before_backward = self._hook("on_before_backward")
        self.on_after_backward = self._hook("on_after_backward")
        self.on_before_optimizer_step = self._hook("on_before_optimizer_step")
        self.on_train_batch_end = self._hook("on_train_batch_end")

        self._look_up_batch()
        self._look_up_training()
        self._look_up_optimizer()

    # -- lookup ---------------------------------------------------------------------------------------------------

    def _part(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that `self.log` and the profiler see the call's name."""
        call = in_hook(self.module, name, call)
        if type(self.profiler) is PassThroughProfiler:
            return call

        def profiled(*args: Any, **kwargs: Any) -> Any:
            with self.profiler.profile(f"[StraightLoop].{name}"):
                return call(*args, **kwargs)

        return profiled

    def _hook(self, name: str) -> Callable[..., Any]:
        """Return a function that calls a hook of all callbacks and the module, and returns the module's result."""
        trainer, module = self.trainer, self.module
        overridden = (getattr(callback, name) for callback in self.callbacks if overrides(callback, Callback, name))
        hooks = list(filter(callable, overridden))
        module_hook = getattr(module, name) if overrides(module, LightningModule, name) else None
        if not hooks and module_hook is None and type(self.profiler) is PassThroughProfiler:
            return lambda *_: None

        def call(*args: Any) -> Any:
            for hook in hooks:
                hook(trainer, module, *args)
            return module_hook(*args) if module_hook is not None else None

        return self._part(name, call)

    def _look_up_batch(self) -> None:
        """Look up the batch hooks of module and data module."""
        strategy, device = self.strategy, self.strategy.root_device
        trainer = self.trainer

        def hook(name: str) -> Callable[..., Any] | None:
            owner = hook_owner(trainer, name)
            if name != "transfer_batch_to_device" and not overrides(owner, LightningModule, name):
                return None
            return self._part(name, getattr(owner, name)) if owner is self.module else getattr(owner, name)

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
        """Look up the training step and the backward pass; skip strategy and precision plugin if they add nothing."""
        module, strategy, precision = self.module, self.strategy, self.strategy.precision_plugin
        alone = strategy.model is module and not overrides(strategy, Strategy, "training_step")
        alone = alone and not overrides(precision, Precision, "train_step_context", "forward_context")
        step = module.training_step if alone else strategy.training_step
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self.training_step = self._part("training_step", step if takes_index else lambda batch, index: step(batch))

        def backward(loss: Tensor) -> None:
            self.on_before_backward(loss)
            module.backward(loss)
            self.on_after_backward()

        if self._can_bypass("pre_backward", "backward", "post_backward"):
            self.backward = self._part("backward", backward)
        else:
            self.backward = self._part("backward", lambda loss: strategy.backward(loss, self.optimizer))

    def _look_up_optimizer(self) -> None:
        """Look up the optimizer's hooks: zeroing, clipping and the update."""
        trainer, module, strategy = self.trainer, self.module, self.strategy
        self.optimizer = optimizer = strategy.optimizers[0]
        self.zero_grad: Callable[[], Any] = optimizer.zero_grad
        if overrides(module, LightningModule, "optimizer_zero_grad"):
            own_zero_grad = self._part("optimizer_zero_grad", module.optimizer_zero_grad)
            self.zero_grad = lambda: own_zero_grad(trainer.current_epoch, self.index, optimizer)
        self.clips = overrides(module, LightningModule, "configure_gradient_clipping", "clip_gradients")
        self.clip = self._part("configure_gradient_clipping", module.configure_gradient_clipping)
        if overrides(module, LightningModule, "optimizer_step"):
            wrapped, own_step = module.optimizers(), self._part("optimizer_step", module.optimizer_step)
            self.update = lambda: own_step(trainer.current_epoch, self.index, wrapped, self.compute)
        elif self._can_bypass("optimizer_step") and not averages_models(strategy):
            self.update = lambda: optimizer.step(closure=self.compute_and_clip)
        else:
            self.update = self._part("optimizer_step", lambda: strategy.optimizer_step(optimizer, self.compute))

    def _can_bypass(self, *names: str) -> bool:
        """Return whether the step may skip these methods of strategy and precision plugin, because they do nothing."""
        strategy, precision = self.strategy, self.strategy.precision_plugin
        # in automatic optimization, DDPStrategy's overrides do nothing; without a scaler, MixedPrecision's do nothing
        ddp = isinstance(strategy, DDPStrategy)
        unscaled = isinstance(precision, MixedPrecision) and precision.scaler is None
        return not overrides(strategy, DDPStrategy if ddp else Strategy, *names) and not overrides(
            precision, MixedPrecision if unscaled else Precision, *names
        )

    # -- step ----------------------------------------------------------------------------------------------------

    def __call__(self, data_fetcher: Any) -> None:
        """Take one training step.

        Raises:
            StopIteration: When `on_train_batch_start` of the module ends the epoch.
        """
        loop, progress = self.loop, self.loop.batch_progress
        batch, _, _ = next(data_fetcher)
        index = progress.current.ready
        progress.is_last_batch = data_fetcher.done
        for prepare in self.preparation:
            batch = prepare(batch)
        progress.increment_ready()
        loop.on_batch_start(batch)
        last = progress.is_last_batch or progress.current.ready == self.batches
        accumulating = not last and progress.current.ready % self.trainer.accumulate_grad_batches != 0
        ends, outputs = False, None
        if batch is None:
            rank_zero_warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        else:
            ends = self.on_train_batch_start(batch, index) == -1
            self.strategy.on_train_batch_start(batch, index)
            if ends:
                progress.increment_by(0, is_last_batch=True)
                last = True
            else:
                progress.increment_started()
                outputs = self._train(batch, index, accumulating)
        progress.increment_processed()
        if self.schedules:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if last:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends:
            raise StopIteration
        self.on_train_batch_end(outputs, batch, index)
        loop.on_batch_end(accumulating)

    def _train(self, batch: Any, index: int, accumulating: bool) -> dict[str, Any]:
        self.batch, self.index, self.outputs = batch, index, None
        if accumulating:
            strategy = self.strategy
            with strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext():
                self.compute()
        else:
            self.steps.increment_ready()
            self.update()
            self.steps.increment_completed()
        if self.outputs is None:
            raise UserError(f"{type(self.module).__name__}.optimizer_step or its optimizer never calls the closure")
        outputs, self.outputs, self.batch = self.outputs, None, None
        return outputs

    def compute(self) -> Tensor | None:
        """Compute loss and gradients, as the optimizer's closure."""
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.compute()
        micro_batches = self.trainer.accumulate_grad_batches
        output = self.training_step(self.batch, self.index)
        if isinstance(output, Tensor):
            loss: Tensor | None = (output := output if micro_batches == 1 else output / micro_batches)
            self.outputs = {"loss": output.detach()}
        else:
            loss, self.outputs = self._unpack(output, micro_batches)
        if self.index % micro_batches == 0:
            self._zero()
        if loss is not None:
            self.backward(loss if self.order is None else loss * self.order.weight(self.index, self._window))
        return self.outputs.get("loss")

    def _zero(self) -> None:
        self.zero_grads.increment_ready()
        self.on_before_zero_grad(self.optimizer)
        self.zero_grads.increment_started()
        self.zero_grad()
        self.zero_grads.increment_completed()

    def compute_and_clip(self) -> Any:
        """Compute loss and gradients, and clip the gradients. The optimizer calls this method as its closure."""
        loss = self.compute()
        self.on_before_optimizer_step(self.optimizer)
        self.clip_gradients()
        return loss

    def clip_gradients(self) -> None:
        """Clip the gradients, if the Trainer has a clip value or the module overrides a clipping hook."""
        value, algorithm = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        if self.clips or value is not None:
            self.clip(self.optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)

    def _unpack(self, output: Any, micro_batches: int) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the loss and the outputs for a `training_step` result that is not a tensor.

        Raises:
            UserError: When the step returned None in a run of several processes.
            MisconfigurationException: When the step returned neither a dictionary with a loss nor None.
        """
        if output is None:
            if self.trainer.world_size > 1:
                raise UserError("training_step returned None to skip a step, which works only in a single process")
            rank_zero_warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
        outputs = self.loop.automatic_optimization.output_result_cls
        result = outputs.from_training_step_output(output, micro_batches)
        return result.closure_loss, {} if result.loss is None else result.asdict()

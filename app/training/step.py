"""Fast copy of Lightning's training step, which calls only overridden hooks.

Lightning's step calls ten hooks of every callback, the module, the strategy and the precision
plugin. It wraps each call in a profiler and in checks. The copy calls only the overridden hooks, in
the same order, with the same arguments, and leaves the same counters and results:

    batch = next(data_fetcher)                               # StraightLoop.advance
    batch = convert_input(batch)                             # StraightLoop.prepare
    batch = on_before_batch_transfer(batch)
    batch = transfer_batch_to_device(batch)
    batch = on_after_batch_transfer(batch)
    on_train_batch_start(batch, index)
    if later batches share the optimizer step:
        loss_and_gradients()
    else:
        optimizer_step(compute_and_clip)                     # the optimizer calls this closure
    lr_scheduler_step()
    on_train_batch_end(outputs, batch, index)

    loss_and_gradients():                                    # StraightLoop.compute
        loss = training_step(batch, index) / accumulate_grad_batches
        if the batch is the first of its optimizer step:
            on_before_zero_grad(optimizer)
            optimizer_zero_grad(optimizer)
        loss = loss * loss_weight
        on_before_backward(loss)
        backward(loss)
        on_after_backward()

    compute_and_clip():
        loss_and_gradients()
        on_before_optimizer_step(optimizer)
        configure_gradient_clipping(optimizer)

A hook, a method or an optimizer that is replaced in mid-epoch takes effect at once, as in
Lightning's step.

* Gain: 537 Python calls a step instead of 4,169 (a width-4 MLP with the default callbacks;
  `tests/test_cost.py`).
* Mirrors Lightning 2.6: `advance` and `on_advance_end` in `loops/training_epoch_loop.py`, and `run`
  in `loops/optimization/automatic.py`. Compare them when you upgrade Lightning.
* Falls back to Lightning's step for features it lacks: `hooks.why_not` lists them.
* Off switch: `--run.loop lightning`.
* Comparison: `tests/test_conformance.py` runs both, and compares calls, metrics and checkpoints.
"""

from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from app.errors import UserError
from app.system.patches import expects
from app.training.hooks import Hooks
from app.training.step_patches import EPOCH_LOOP, LoggingLoop, identities

interval_of = attrgetter("interval")


@expects(
    f"{EPOCH_LOOP}._batches_that_stepped",
    f"{EPOCH_LOOP}._num_ready_batches_reached",
    f"{EPOCH_LOOP}._should_check_val_fx",
)
class StraightLoop(LoggingLoop):
    """Lightning's loop over the batches of an epoch, with a step that calls only overridden hooks.

    Attributes:
        reason: Reason to use Lightning's step after all, or None.
        batch: Batch of the current step, on the device.
        index: Index of the batch in the epoch.
        optimizer: Optimizer of the current step.
        outputs: Loss and other outputs of the current step, once computed.
    """

    reason: str | None = None
    batch: Any = None
    index = 0
    optimizer: Any = None
    outputs: dict[str, Any] | None = None
    _hooks: Any = None

    @property
    def hooks(self) -> Hooks:
        """What a step calls now."""
        if self._hooks is None or identities(self._hooks) != self._hooks.identities:
            self._hooks = Hooks(self.trainer)
            self.reason = self._hooks.reason
            self.check(self._hooks)
        return self._hooks

    def check(self, hooks: Hooks) -> None:
        """Raise a UserError if this loop cannot call the hooks; a subclass overrides this."""

    def run(self, data_fetcher: Any) -> None:
        """Take an epoch's steps. Ask only once for an accelerator.

        Each optimizer step asks again, which takes 0.1 ms by the check that Lightning chooses.
        """
        is_available = torch.accelerator.is_available
        answer = is_available()
        torch.accelerator.is_available = lambda: answer
        try:
            super().run(data_fetcher)
        finally:
            torch.accelerator.is_available = is_available

    def on_run_start(self, data_fetcher: Any) -> None:
        """Find the hooks anew."""
        super().on_run_start(data_fetcher)
        self._hooks = None
        assert self.hooks is not None  # finds them
        if not self.restarting:
            self.val_loop.restarting = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the hooks: a spawned worker may unpickle the Trainer."""
        return {**vars(self), "_hooks": None}

    def teardown(self) -> None:
        """Drop the hooks at the end of training."""
        self._hooks = None
        super().teardown()

    def advance(self, data_fetcher: Any) -> None:
        """Take one step, or Lightning's, which also validates first in a resumed run.

        Raises:
            StopIteration: When `on_train_batch_start` of the module ends the epoch.
        """
        hooks = self.hooks
        if self.reason is not None:
            super().advance(data_fetcher)
            return
        if self.trainer.fit_loop.restarting:
            if self.restarting and self._should_check_val_fx(data_fetcher):
                super().advance(data_fetcher)
                return
            self.end_resumption()
        progress = self.batch_progress
        batch, _, _ = next(data_fetcher)
        index = progress.current.ready
        progress.is_last_batch = data_fetcher.done
        batch = self.prepare(batch)
        progress.increment_ready()
        self.on_batch_start(batch)
        outputs = None
        is_ended = False
        if batch is None:
            rank_zero_warn(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
        else:
            is_ended = hooks.on_train_batch_start(batch, index) == -1
            hooks.strategy.on_train_batch_start(batch, index)
            if is_ended:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                outputs = self._train(batch, index)
        progress.increment_processed()
        if "step" in map(interval_of, hooks.strategy.lr_scheduler_configs):
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if is_ended:
            raise StopIteration
        hooks.on_train_batch_end(outputs, batch, index)
        self.on_batch_end()

    def prepare(self, batch: Any) -> Any:
        """Move a batch to the device, and call the batch hooks."""
        hooks = self._hooks
        if hooks.convert_input is not None:
            batch = hooks.convert_input(batch)
        if hooks.on_before_batch_transfer is not None:
            batch = hooks.on_before_batch_transfer(batch, 0)
        return hooks.batch_to_device(batch)

    def _train(self, batch: Any, index: int) -> dict[str, Any]:
        """Compute gradients, update the weights if they are complete, and return the outputs."""
        trainer = self.trainer
        hooks = self.hooks
        ready = self.batch_progress.current.ready
        self.batch = batch
        self.index = index
        self.outputs = None
        self.optimizer = hooks.strategy.optimizers[0]
        is_complete = ready % trainer.accumulate_grad_batches == 0
        if not is_complete and not self._num_ready_batches_reached():
            self.accumulate()
        else:
            steps = self.automatic_optimization.optim_progress.optimizer.step
            steps.increment_ready()
            if hooks.optimizer_step is None:
                hooks.optimizer.step(closure=self.compute_and_clip)
            else:
                # the precision plugin adds `compute_and_clip`'s hook and clipping to its closure
                epoch = trainer.current_epoch
                hooks.optimizer_step(epoch, index, hooks.wrapped_optimizer, self.compute)
            steps.increment_completed()
        outputs = self.outputs
        if outputs is None:
            raise UserError(
                f"{type(hooks.module).__name__}.optimizer_step or its optimizer never calls "
                "the closure"
            )
        self.outputs = None
        self.batch = None
        return outputs

    def accumulate(self) -> None:
        """Compute gradients without averaging them over the ranks."""
        with self.hooks.block_sync():
            self.compute()

    def compute(self) -> Tensor | None:
        """Compute loss and gradients, as the optimizer's closure."""
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.compute()
        hooks = self.hooks
        output = hooks.training_step(self.batch, self.index)
        batches = self.trainer.accumulate_grad_batches
        loss: Tensor | None
        if hooks.shares_loss and isinstance(output, Tensor):
            loss = output if batches == 1 else output / batches
            self.outputs = {"loss": loss.detach()}
        else:
            loss, self.outputs = self.unpack(output, batches)
        if self.index % batches == 0:
            self.zero_gradients()
        if loss is not None:
            if hooks.weighs_loss:
                samples = hooks.order.share_size(self.index)
                weight = hooks.order.loss_weight(self.trainer, self.index, samples)
                if weight != 1.0:
                    loss = loss * weight
            self.hooks.backward(loss, self.optimizer)
        return self.outputs.get("loss")

    def unpack(self, output: Any, batches: int) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the loss, divided by the number of accumulated batches, and all outputs.

        Raises:
            UserError: When the step returned None in a run of several processes.
            MisconfigurationException: When the step returned neither a tensor, nor a dictionary
                with a loss, nor None.
        """
        if output is None:
            if self.trainer.world_size > 1:
                raise UserError(
                    "training_step returned None to skip a step, which works only in a single "
                    "process"
                )
            rank_zero_warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
            return None, {}
        result = ClosureResult.from_training_step_output(output, batches)
        return result.closure_loss, result.asdict()

    def zero_gradients(self) -> None:
        """Set the gradients to None before an optimizer step's first batch."""
        progress = self.automatic_optimization.optim_progress.optimizer.zero_grad
        progress.increment_ready()
        self._hooks.on_before_zero_grad(self.optimizer)
        progress.increment_started()
        zero_grad = self.hooks.optimizer_zero_grad
        if zero_grad is None:
            self.optimizer.zero_grad()
        else:
            zero_grad(self.trainer.current_epoch, self.index, self.optimizer)
        progress.increment_completed()

    def compute_and_clip(self) -> Tensor | None:
        """Compute loss and gradients, and clip the gradients, as the optimizer's closure."""
        loss = self.compute()
        self._hooks.on_before_optimizer_step(self._hooks.optimizer)
        hooks = self.hooks
        value = self.trainer.gradient_clip_val
        if hooks.clips or value is not None:
            algorithm = self.trainer.gradient_clip_algorithm
            hooks.clip(hooks.optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
        return loss

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Count the step. Call Lightning's method if validation or schedulers are due."""
        trainer = self.trainer
        progress = self.batch_progress
        every = trainer.val_check_batch
        batches = progress.total
        if trainer.check_val_every_n_epoch is not None:
            batches = progress.current
        if (
            self.reason is not None
            or "step" in map(interval_of, self._hooks.strategy.lr_scheduler_configs)
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
        if (
            self.reason is not None
            or self.trainer.should_stop
            or self._num_ready_batches_reached()
            or (self.max_steps != -1 and self.global_step >= self.max_steps)
        ):
            return super().done
        return False

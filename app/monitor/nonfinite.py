"""Detection of an infinite or NaN loss with one device read per logging window."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from app.errors import UserError
from app.modules.sums import log_window

# value that means "all losses are finite". Any other value is the place of a non-finite loss: batch
# index × number of ranks + rank. NONE is larger than every place, because the ranks take the
# minimum
NONE = 2**62


class NonFinite(Callback):
    """Callback that detects non-finite losses and weights, and stops or warns.

    Each rank keeps the losses on the device. It reads them at the end of a logging window or an
    epoch, and before a checkpoint is written. The action `stop` also checks the weights before they
    are saved.

    Args:
        action: `stop` ends the run with an error; `warn` warns once.

    Attributes:
        since: First epoch with a non-finite loss, counted from 0; set only by the action `warn`.
        step: First step with a non-finite loss, counted from 1.
    """

    def __init__(self, action: Literal["stop", "warn"]) -> None:
        self.action = action
        self.since: int | None = None
        self.step: int | None = None
        self._losses: list[tuple[int, Tensor]] = []  # batch index and loss
        self._last_batch = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the window."""
        self._losses = []
        self._window = log_window(trainer)
        self._checked_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Store the loss; at the end of a logging window, check the window's losses."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._losses.append((batch_idx, loss))
        step = trainer.global_step
        # check at this step, because `app.modules` reads the device at this step anyway
        if step % self._window == 0 and step != self._checked_step:
            self._checked_step = step
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the losses since the last window."""
        self._check(trainer)

    def before_saving(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Check the losses before a checkpoint is written; for `stop`, also the weights.

        `Trainer.save_checkpoint` calls this method: see `lightning_patches.check_saving`.
        """
        if trainer.state.fn == "fit":
            weights = []
            if self.action == "stop":
                for value in checkpoint["state_dict"].values():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        weights.append(value)
            self._check(trainer, weights)

    def _check(self, trainer: Trainer, weights: Sequence[Tensor] = ()) -> None:
        """Check the losses since the last check, and the weights to save. Collective.

        Raises:
            UserError: On every rank, when a value on any rank is not finite and the action is
                `stop`.
        """
        losses = self._losses
        self._losses = []
        first = NONE
        if losses:
            self._last_batch = losses[-1][0]
            finite = torch.stack([loss for _, loss in losses]).isfinite().flatten().tolist()
            if not all(finite):
                first = losses[finite.index(False)][0] * trainer.world_size + trainer.global_rank
        flags = [weight.isfinite().all() for weight in weights]
        whole = int(not flags or torch.stack(flags).all())
        if trainer.world_size > 1:
            checks = torch.tensor([first, whole], device=trainer.strategy.root_device)
            first, whole = trainer.strategy.reduce(checks, reduce_op="min").tolist()
        if first == NONE and whole:
            return
        batch, rank = divmod(first, trainer.world_size)
        step = trainer.global_step
        every = trainer.accumulate_grad_batches
        problem = f"the weights are not finite after step {step}"
        if first != NONE:
            step -= self._last_batch // every - batch // every
            place = f"batch {batch + 1} of epoch {trainer.current_epoch + 1}, rank {rank}"
            problem = f"the training loss is not finite since step {step} ({place})"
            self.step = self.step or step
        problem += (
            ": lower the learning rate, give --trainer.gradient_clip_val or another "
            "--trainer.precision"
        )
        if self.action == "stop":
            raise UserError(f"{problem}; --run.on_nonfinite warn continues anyway")
        if self.since is None:
            self.since = trainer.current_epoch
            rank_zero_info(problem)

"""Checks with one device read and one reduction per logging window.

They find an infinite or NaN loss, and ranks that have drifted apart.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from app.errors import RanksDifferError, UserError
from app.modules.sums import log_window
from app.monitor.fingerprint import Fingerprint, alike

# value that means "all losses are finite". Any other value is the place of a non-finite loss: batch
# index × number of ranks + rank. NONE is larger than every place, because the ranks take the
# minimum
NONE = 2**62


class NonFinite(Callback):
    """Callback that detects non-finite losses and weights, and ranks that differ.

    Each rank keeps the losses on the device. It reads them at the end of a logging window or an
    epoch, and before a checkpoint is written. The action `stop` also checks the weights before they
    are saved.

    Args:
        action: `stop` ends the run with an error; `warn` warns once.
        on_divergence: The same, when ranks differ in learning rates or weights.

    Attributes:
        since: First epoch with a non-finite loss, counted from 0; set only by the action `warn`.
        step: First step with a non-finite loss, counted from 1.
    """

    def __init__(
        self, action: Literal["stop", "warn"], on_divergence: Literal["stop", "warn"] = "stop"
    ) -> None:
        self.action = action
        self.on_divergence = on_divergence
        self.since: int | None = None
        self.step: int | None = None
        self._losses: list[tuple[int, Tensor]] = []  # batch index and loss
        self._last_batch = 0
        self._fingerprint: Fingerprint | None = None  # None in a run of one process
        self._has_warned = False  # about ranks that differ

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the window."""
        self._losses = []
        self._window = log_window(trainer)
        self._checked_step = trainer.global_step
        if trainer.world_size > 1:
            self._fingerprint = Fingerprint(trainer)

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
            RanksDifferError: When the ranks' learning rates or weights differ.
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
        if self._fingerprint is not None:
            first, whole = self._reduce(trainer, self._fingerprint, first, whole)
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

    def _reduce(
        self, trainer: Trainer, fingerprint: Fingerprint, first: int, whole: int
    ) -> tuple[int, int]:
        """Return all ranks' minimum of two numbers, and compare the ranks' fingerprints."""
        mine = fingerprint.values()
        numbers = torch.tensor([first, whole], dtype=mine.dtype, device=mine.device)
        reduced = trainer.strategy.reduce(torch.cat([numbers, mine, -mine]), reduce_op="min")
        lowest: list[float] = reduced.tolist()
        highest = [-value for value in lowest[2 + len(mine) :]]
        differ = not alike(lowest[2 : 2 + len(mine)], highest)
        if differ and not self._has_warned:
            problem = f"ranks differ in step {trainer.global_step}: {fingerprint.difference(mine)}"
            if self.on_divergence == "stop":
                raise RanksDifferError(f"{problem}; --run.on_divergence warn continues anyway")
            rank_zero_info(problem)
            self._has_warned = True
        return int(lowest[0]), int(lowest[1])

"""An infinite or NaN loss: the run names the step, batch and rank.

The run then stops without saving bad weights, continues with a warning, or skips the update.
"""

import math
from unittest.mock import Mock

import pytest
import torch
from forked import fork_app
from harness import SLOW, on_cpu, record, tiny, weights

from app.errors import UserError
from app.monitor.nonfinite import NonFinite

DATA = tiny(400, 24, max_epochs=2)
# an epoch has 15 batches; the loss of the first epoch's seventh batch is NaN
POISONED = ["--model=user_code.Poisoned", *DATA]


SAVED = ["--last_checkpoint.every_n_train_steps=1"]


@pytest.mark.parametrize(
    ("flags", "step"),
    [
        ([], 7),
        (SAVED, 7),
        (["--trainer.log_every_n_steps=4"], 7),
        (["--trainer.accumulate_grad_batches=2"], 4),
    ],
)
def test_stop_names_step_and_batch(flags, step, app, tmp_path):
    """A NaN loss stops the run at the end of the window or epoch, or before a checkpoint."""
    message = app.error("fit", *POISONED, *flags)
    since = f"step {step} (batch 7 of epoch 1, rank 0)"
    assert message.startswith(f"error: the training loss is not finite since {since}: lower the")
    assert "--run.on_nonfinite warn continues anyway" in message
    written = record(tmp_path / "runs")
    assert (written["status"], written["error"]) == ("failed", message.removeprefix("error: "))
    last = tmp_path / "runs/Poisoned-Synthetic/version_0/checkpoints/last.ckpt"
    assert last.exists() == (flags == SAVED)
    if last.exists():
        assert torch.load(last, weights_only=True)["global_step"] == 6
        assert all(weight.isfinite().all() for weight in weights(last).values())


@SLOW
def test_stop_names_the_rank(tmp_path):
    flags = [
        *on_cpu("ddp_fork", log_every_n_steps=7, root=tmp_path),
        "--last_checkpoint.every_n_train_steps=3",
    ]
    assert "not finite since step 7 (batch 7 of epoch 1, rank 1)" in fork_app.error(
        "fit", *POISONED, *flags
    )
    assert record(tmp_path)["status"] == "failed"


@pytest.mark.parametrize("alone", ["false", "true"])
def test_non_finite_weights_are_not_saved(alone, app, tmp_path):
    """Weights are checked before each checkpoint, because no loss follows the last step.

    Weights-only checkpoints are included, for which Lightning does not call `on_save_checkpoint`.
    """
    flags = ["--trainer.max_steps=1", f"--best_checkpoint.save_weights_only={alone}"]
    flags += [f"--last_checkpoint.save_weights_only={alone}"]
    message = app.error("fit", "--model=user_code.PoisonedUpdate", *DATA, *flags)
    assert "the weights are not finite after step 1" in message
    assert not list((tmp_path / "runs").rglob("*.ckpt"))


def test_warn_continues(app, tmp_path):
    out = app("fit", *POISONED, "--run.on_nonfinite=warn")
    assert (
        out.count("the training loss is not finite since step 7 (batch 7 of epoch 1, rank 0)") == 1
    )
    assert "not finite since epoch 1: the run has diverged" in out
    written = record(tmp_path / "runs")
    assert (written["status"], written["not_finite_since"]) == ("completed", 0)
    assert written["not_finite_step"] == 7


def test_first_batch_by_hand():
    """The second of two accumulated batches, on the second of two ranks."""
    trainer = Mock(world_size=2, global_rank=1, global_step=6, current_epoch=1)
    trainer.accumulate_grad_batches = 2
    callback = NonFinite("stop")
    callback.on_train_start(Mock(world_size=1, log_every_n_steps=3), Mock())
    for batch, loss in enumerate((1.0, 1.0, 1.0, math.nan, 1.0)):
        callback.on_train_batch_end(Mock(global_step=1), Mock(), torch.tensor(loss), None, batch)
    with pytest.raises(UserError, match=r"since step 5 \(batch 4 of epoch 2, rank 1\)"):
        callback.on_train_epoch_end(trainer, Mock())
    assert callback.step == 5

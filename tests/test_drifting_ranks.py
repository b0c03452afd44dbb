"""Ranks that drift apart end the run within one logging window, with what differs and why."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from exact_code import Linear
from forked import fork_app
from harness import QUIET, on_cpu, options, record_of, slow
from torch import nn
from torch.nn.functional import cross_entropy


class ChangesItsBias(Linear):
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_rank == 0 and self.global_step == 3:
            self.layer.bias.data += 0.1


class DrawsItsWeights(Linear):
    def on_train_epoch_start(self):
        generator = torch.Generator().manual_seed(self.global_rank)
        nn.init.orthogonal_(self.layer.weight, generator=generator)


class SchedulesItsRate(Linear):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        decay = 1 - 0.5 * self.global_rank
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class FollowsItsLoss(Linear):
    """Module with a scheduler that follows a value which differs between ranks."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(float(self.current_epoch * (1 - 2 * self.global_rank))))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "val_loss"}]


class Normalises(Linear):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))


HOOK = "a hook changes or draws it on each rank for itself"
DRIFTING = {
    "ChangesItsBias": (
        f"ranks differ in step 4: layer.bias differs between rank 0 and rank 1: {HOOK}",
    ),
    "DrawsItsWeights": (
        f"ranks differ in step 2: layer.weight differs between rank 0 and rank 1: {HOOK}",
    ),
    "SchedulesItsRate": (
        "ranks differ in step 2: learning rates 0.5 on rank 0, 0.125 on rank 1: set the same",
    ),
    "FollowsItsLoss": (
        "learning rates 0.05 on rank 0, 0.5 on rank 1: ReduceLROnPlateau follows val_loss, which "
        "is logged without sync_dist=True",
    ),
    "Normalises": (
        "ranks differ in step 2: layer.0.running_mean differs between rank 0 and rank 1: ",
        "leave broadcast_buffers on",
    ),
}


def flags_of(model, root):
    flags = [f"--model=test_drifting_ranks.{model}", "--data=exact_code.Ordinary"]
    flags += [*QUIET, *options(name="x", test=False, threads=1, log_every_n_steps=2, max_epochs=4)]
    return [*flags, *on_cpu("ddp_fork", root=root)]


LONG = ("ChangesItsBias", "Normalises")
NAMES = [slow(name) if name in LONG else name for name in DRIFTING]


@pytest.mark.parametrize("model", NAMES)
def test_what_differs_is_named(model, tmp_path):
    flags = flags_of(model, tmp_path)
    if model == "Normalises":
        flags[flags.index("ddp_fork")] = "lightning.pytorch.strategies.DDPStrategy"
        flags += ["--trainer.strategy.dict_kwargs.broadcast_buffers=false"]
    code, out = fork_app.run("fit", *flags)
    for text in DRIFTING[model]:
        assert text in out
    assert out.count("error: ") == 1
    assert code == 1
    run = tmp_path / "x/version_0"
    assert record_of(run)["status"] == "failed"
    assert "ranks differ" in record_of(run)["error"]
    last_equal = {"ChangesItsBias": 3, "FollowsItsLoss": 6}  # step of the epoch's end before
    for path in run.rglob("last.ckpt"):
        assert torch.load(path, weights_only=True)["global_step"] == last_equal[model]


def test_run_may_continue(tmp_path):
    flags = [*flags_of("ChangesItsBias", tmp_path), "--run.on_divergence=warn"]
    out = fork_app("fit", *flags)
    assert out.count("ranks differ in step 4: layer.bias differs") == 1


class LogsClasses(Linear):
    """Module that logs the loss of the classes that a rank has seen, in their order."""

    classes: tuple[int, ...] = (0, 1, 2)

    def validation_step(self, batch, batch_idx):
        losses = cross_entropy(self(batch[0]), batch[1], reduction="none")
        order = self.classes if self.global_rank == 0 else self.classes[::-1]
        for label in order:
            self.log(f"val_{label}", (losses * (batch[1] == label)).mean(), sync_dist=True)


class LogsItsClass(LogsClasses):
    def validation_step(self, batch, batch_idx):
        self.log(f"val_{self.global_rank}", self(batch[0]).mean(), sync_dist=True)


class LogsItsClassAtTheEnd(LogsClasses):
    def on_train_epoch_end(self):
        self.last = self(torch.ones(1, 4)).mean()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log(f"seen_{self.global_rank}", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


def test_names_in_another_order_are_reduced_by_name(tmp_path):
    alone = flags_of("LogsClasses", tmp_path / "alone")
    alone[-4:] = [*options(strategy="auto", devices=1), *alone[-2:]]
    rows = []
    for flags in (flags_of("LogsClasses", tmp_path / "two"), alone):
        fork_app("fit", *flags, "--run.global_batch=8")
        file = Path(flags[flags.index("--run.root") + 1], "x", "version_0", "metrics.csv")
        rows.append(pd.read_csv(file)[["val_0", "val_1", "val_2"]].dropna())
    pd.testing.assert_frame_equal(*rows, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "name"), [("LogsItsClass", "val"), ("LogsItsClassAtTheEnd", "seen")]
)
def test_missing_names_are_refused(model, name, tmp_path):
    message = fork_app.error("fit", *flags_of(model, tmp_path))
    assert message.startswith(
        f"error: {name}_0, {name}_1: only rank 0 of 2 logs {name}_0 with sync_dist=True"
    )

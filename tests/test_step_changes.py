"""A hook, method or optimizer replaced in mid-epoch acts at once, as in Lightning's step."""

from operator import attrgetter
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.types import LRSchedulerConfig
from test_conformance import CALLS, HOOKS, ByStep, ClipsEach, assert_alike, recording
from torch import nn


def wrap(owner, name):
    """Replace a method by one that records its call, then calls the method."""
    method = getattr(owner, name)

    def wrapped(*args, **kwargs):
        CALLS.append(("wrapped", name))
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)


def adam(trainer):
    return torch.optim.Adam(trainer.lightning_module.parameters(), lr=0.05)


def second_step(self, batch, batch_idx):
    return nn.functional.mse_loss(self.net(batch[0]), nn.functional.one_hot(batch[1], 2).float())


class Halved(nn.Module):
    """Wrapper like DDP's, around the module."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args) * 0.5


def set_up_adam(trainer):
    trainer.lightning_module.configure_optimizers = lambda: adam(trainer)
    trainer.strategy.setup_optimizers(trainer)


def halve(trainer):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizers[0], 0.5)
    trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(scheduler, interval="step")]


def train_manually(trainer):
    module = trainer.lightning_module
    optimizer = module.optimizers()

    def step(batch, batch_idx):
        optimizer.zero_grad()
        module.manual_backward(second_step(module, batch, batch_idx))
        optimizer.step()

    module.automatic_optimization = False
    module.training_step = step


def sets(owner, **values):
    """Return a change of attributes of an object that belongs to the module's Trainer."""

    def change(trainer):
        for name, value in values.items():
            setattr(attrgetter(owner)(trainer), name, value)

    return change


def late():
    hooks = [name for name in HOOKS["callback"] if "batch" in name or "backward" in name]
    return recording(Callback, "late", hooks)()


CHANGES = {
    "optimizers": lambda trainer: setattr(trainer.strategy, "optimizers", [adam(trainer)]),
    "an optimizer": lambda trainer: trainer.optimizers.__setitem__(0, adam(trainer)),
    "optimizers set up again": set_up_adam,
    "an optimizer's step": lambda trainer: wrap(trainer.optimizers[0], "step"),
    "an optimizer's zero_grad": lambda trainer: wrap(trainer.optimizers[0], "zero_grad"),
    "schedulers": halve,
    "a scheduler's interval": lambda trainer: setattr(
        trainer.lr_scheduler_configs[0], "interval", "epoch"
    ),
    "the training step": lambda trainer: setattr(
        trainer.lightning_module,
        "training_step",
        lambda batch: second_step(trainer.lightning_module, batch, 0),
    ),
    "the class's training step": lambda trainer: setattr(
        type(trainer.lightning_module), "training_step", second_step
    ),
    "manual optimization": train_manually,
    "a callback before": lambda trainer: trainer.callbacks.insert(0, late()),
    "other callbacks": lambda trainer: setattr(trainer, "callbacks", [late(), *trainer.callbacks]),
    "a callback less": lambda trainer: trainer.callbacks.pop(0),
    "a callback's class": lambda trainer: wrap(type(trainer.callbacks[0]), "on_train_batch_end"),
    "clipping": sets("lightning_module.trainer", gradient_clip_val=0.01),
    "accumulation": sets("lightning_module.trainer", accumulate_grad_batches=2),
    "logging": sets("lightning_module.trainer", log_every_n_steps=1),
    "a profiler": lambda trainer: vars(trainer).update(profiler=SimpleProfiler()),
    "validation": sets("lightning_module.trainer", val_check_batch=2),
    "an end": sets("lightning_module.trainer", should_stop=True),
    "the epoch's length": sets("fit_loop", max_batches=4),
    "max_steps": sets("fit_loop.epoch_loop", max_steps=4),
    "precision": sets("strategy", precision_plugin=ClipsEach()),
    "16 bits": sets("strategy", precision_plugin=MixedPrecision("bf16-mixed", "cpu")),
    "the model": lambda trainer: setattr(
        trainer.strategy, "model", Halved(trainer.lightning_module)
    ),
}
BATCH_HOOKS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
BACKWARD = ["pre_backward", "backward", "post_backward"]
METHODS = {
    "lightning_module": [
        "on_before_backward",
        "training_step",
        "backward",
        "optimizer_step",
        "optimizer_zero_grad",
        "configure_gradient_clipping",
        "clip_gradients",
        *BATCH_HOOKS,
    ],
    "datamodule": BATCH_HOOKS,
    "strategy": [
        *BACKWARD,
        "training_step",
        "batch_to_device",
        "optimizer_step",
        "on_train_batch_start",
    ],
    "precision_plugin": [
        *BACKWARD,
        "forward_context",
        "convert_input",
        "optimizer_step",
        "clip_gradients",
    ],
}
for owner, names in METHODS.items():
    for name in names:
        CHANGES[f"{owner}.{name}"] = lambda trainer, owner=owner, name=name: wrap(
            getattr(trainer, owner), name
        )


@pytest.mark.parametrize("change", CHANGES)
def test_change_in_mid_epoch(change, tmp_path):
    """Whatever is replaced in mid-epoch takes effect at the same call as in Lightning's loop."""
    hook = "on_train_batch_end" if change == "manual optimization" else "on_train_batch_start"
    reason = change if change in ("a profiler", "manual optimization") else None

    def changes():
        def call(self, trainer, *_):
            if trainer.global_step == 2 and not vars(self).setdefault("changed", False):
                self.changed = True
                CHANGES[change](trainer)

        return type("Changes", (Callback,), {hook: call})()

    settings = {"max_epochs": 1, "limit_val_batches": 0}
    assert_alike(tmp_path, reason, model=ByStep, callbacks=[changes], **settings)

"""Lightning's loop and the straight loop call the same hooks, and train the same model.

The hooks come from Lightning's classes, so that a new version's hooks are compared, too.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import isfunction
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import user_code
from harness import difference
from lightning import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LambdaCallback,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from user_code import TheirData, TheirModel

from app.training.step import StraightLoop

# methods for users to call; both loops may call `optimizers` as often as they like
NO_HOOKS = {
    "all_gather",
    "freeze",
    "log",
    "log_dict",
    "lr_schedulers",
    "manual_backward",
    "optimizers",
    "print",
    "remove_ignored_hparams",
    "save_hyperparameters",
    "to_onnx",
    "to_tensorrt",
    "to_torchscript",
    "toggle_optimizer",
    "toggled_optimizer",
    "unfreeze",
    "untoggle_optimizer",
    "configure_sharded_model",  # Lightning rejects it beside `configure_model`
}
BASES = {"callback": Callback, "module": LightningModule, "data": LightningDataModule}


def hooks_of(base):
    """Return the hooks of one of Lightning's classes that training may call."""
    names = []
    for cls in base.__mro__:
        if cls.__module__.startswith("lightning.pytorch"):
            names += [name for name, value in vars(cls).items() if isfunction(value)]
    other = ("_", "test_", "on_test_", "predict_", "on_predict_")
    return [name for name in names if name not in NO_HOOKS and not name.startswith(other)]


HOOKS = {owner: hooks_of(base) for owner, base in BASES.items()}
EVERY = [(owner, hook) for owner in HOOKS for hook in HOOKS[owner]]
CALLBACKS = {"callback": HOOKS["callback"]}  # the module is then the user's own

# recorded calls: owner, hook, hook name that `self.log` sees, global step, and arguments
CALLS = []


def described(value):
    """Return a form of an argument that two runs can compare."""
    if isinstance(value, Tensor):
        return value.dtype, value.tolist() if value.numel() < 100 else float(value.double().sum())
    if isinstance(value, Mapping):
        return {key: described(content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return [described(content) for content in value]
    if isinstance(value, int | float | str | torch.device | None):
        return value
    return "callable" if callable(value) else type(value).__name__


def recording(base, owner, hooks):
    """Return a new subclass that overrides these hooks, and records their calls."""

    def overriding(name):
        def hook(self, *args, **kwargs):
            place = ()
            for value in (*args, getattr(self, "trainer", None)):
                if isinstance(value, pl.Trainer):
                    place = (value.lightning_module._current_fx_name, value.global_step)
            CALLS.append((owner, name, *place, *map(described, args), described(kwargs)))
            return getattr(super(made, self), name)(*args, **kwargs)

        if name == "training_step":  # its signature decides which arguments Lightning passes
            vars(hook)["__wrapped__"] = getattr(base, name)
        return hook

    made = type(f"Recording{base.__name__}", (base,), {name: overriding(name) for name in hooks})
    return made


class Plain(TheirModel):
    """LightningModule that logs in its steps, as most modules do."""

    scheduler: Callable[[Any], Any] | None = None
    interval = "step"
    monitor: str | None = None
    optimizer: Any = staticmethod(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    )

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(width=4)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if batch_idx % 3 == 0:
            self.log("now_and_then", loss)
        return loss

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        settings = {"interval": self.interval, "monitor": self.monitor}
        scheduler = {"scheduler": self.scheduler(optimizer), **settings}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Stateful(Callback):
    def state_dict(self):
        return {"count": 1}


class StatefulData(TheirData):
    state_dict = Stateful.state_dict


class NoBatch(StatefulData):
    def train_dataloader(self):
        return DataLoader([None, *super().train_dataloader()], batch_size=None)


class OwnLoaders(Plain):
    """Module that needs no data module."""

    def train_dataloader(self):
        return TheirData().train_dataloader()

    def val_dataloader(self):
        return TheirData().val_dataloader()


class Dict(Plain):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "index": batch_idx}


class Skips(Plain):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class EndsEpoch(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


class TakesNoIndex(Plain):
    def training_step(self, batch):
        return super().training_step(batch, 1)


class TakesIterator(Plain):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class KeepsLoss(Plain):
    """Module that keeps its loss, while hooks change the other losses in place."""

    def training_step(self, batch, batch_idx):
        self.loss = super().training_step(batch, batch_idx)
        return self.loss

    def on_before_backward(self, loss):
        loss.mul_(0.5)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        CALLS.append(("kept", described(outputs["loss"]), described(self.loss)))
        outputs["loss"].zero_()
        CALLS.append(("kept", described(self.loss)))


class LBFGS(Plain):
    optimizer = staticmethod(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))


class ByStep(Plain):
    scheduler = staticmethod(lambda optimizer: StepLR(optimizer, 2, 0.9))


class ByEpoch(ByStep):
    interval = "epoch"


class Plateau(Plain):
    scheduler = staticmethod(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0))
    monitor = "loss"


class PlateauByEpoch(Plateau):
    interval = "epoch"
    monitor = "their_val_loss"


class Stops(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == 7


def saving(hook):
    """Return a callback whose hook saves a checkpoint once, after seven steps."""

    def save(self, trainer, *_):
        path = Path(trainer.loggers[0].save_dir, "middle.ckpt")
        if trainer.global_step >= 7 and not path.exists():
            trainer.save_checkpoint(path)

    return type("Saves", (Callback,), {hook: save})()


class FailsLater(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 7:
            raise ZeroDivisionError


class Stream(IterableDataset[Any]):
    """A data set without a length."""

    def __iter__(self):
        return iter(TensorDataset(*TheirData().dataset.tensors))


class StreamedData(TheirData):
    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=8)


class ClipsEach(Precision):
    def clip_gradients(self, optimizer, *_, **__):
        for parameter in optimizer.param_groups[0]["params"]:
            nn.utils.clip_grad_norm_(parameter, 0.01)


def scaled():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**60))


def trained(
    straight, folder, model=Plain, data=StatefulData, hooks=CALLBACKS, ckpt_path=None, **flags
):
    """Train, by default two epochs of five batches; return calls, checkpoint and the loop's reason.

    The reason says why the straight loop used Lightning's step. Otherwise, it is None.
    """
    CALLS.clear()
    shutil.rmtree(folder, ignore_errors=True)
    callbacks = [recording(Stateful, "callback", hooks.get("callback", ()))]
    flags["callbacks"] = [make() for make in [*callbacks, *flags.get("callbacks", [])]]
    flags["plugins"] = [make() for make in flags.get("plugins", [])]
    flags = {"max_epochs": 2, "log_every_n_steps": 2, "num_sanity_val_steps": 0} | flags
    torch.manual_seed(1)
    trainer = pl.Trainer(
        **flags,
        accelerator="cpu",
        logger=pl.loggers.CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if straight:
        StraightLoop.put_into(trainer)
    module = recording(model, "module", hooks.get("module", ()))()
    datamodule = None
    if data is not None:
        datamodule = recording(data, "data", hooks.get("data", ()))()
    with suppress(ZeroDivisionError):
        trainer.fit(module, datamodule, ckpt_path=ckpt_path, weights_only=False)
    trainer.save_checkpoint(folder / "end.ckpt")
    calls = list(CALLS)
    calls.append(("metrics", described(dict(trainer.logged_metrics))))
    calls.append(("csv", Path(trainer.log_dir, "metrics.csv").read_text()))
    reason = getattr(trainer.fit_loop.epoch_loop, "reason", None)
    return calls, torch.load(folder / "end.ckpt", weights_only=False), reason


def same_checkpoint(saved, other):
    """Check that two checkpoints resume the same training."""
    assert other.keys() == saved.keys()
    for key in ("global_step", "epoch", "loops", "lr_schedulers"):
        assert other[key] == saved[key], key
    assert difference(other["state_dict"], saved["state_dict"]) == 0
    assert repr(other["optimizer_states"]) == repr(saved["optimizer_states"])


def assert_alike(tmp_path, reason=None, saves=None, **settings):
    """Train in Lightning's loop and in the straight loop; check that both do the same.

    Args:
        tmp_path: Folder for checkpoints and logged metrics.
        reason: Reason why the straight loop needs Lightning's step, if it does.
        saves: Hook that saves a checkpoint in an earlier run, from which both resume.
        settings: Arguments of `trained`.
    """
    if saves:
        trained(False, tmp_path / "first", **settings, callbacks=[lambda: saving(saves)])
        settings["ckpt_path"] = tmp_path / "first/middle.ckpt"
    calls, saved, _ = trained(False, tmp_path / "run", **settings)
    straight_calls, straight_saved, straight_reason = trained(True, tmp_path / "run", **settings)
    assert straight_reason == reason
    for call, expected in zip(straight_calls, calls, strict=False):
        assert call == expected
    assert len(straight_calls) == len(calls)
    same_checkpoint(saved, straight_saved)


CASES = {
    "plain": {"num_sanity_val_steps": 2},
    "accumulation": {"accumulate_grad_batches": 3},  # of five batches
    "accumulation that changes": {
        "callbacks": [lambda: GradientAccumulationScheduler({0: 1, 1: 2})]
    },
    "clipping by norm": {"gradient_clip_val": 0.01},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clipping by a plugin": {"plugins": [ClipsEach]},
    "bf16-mixed": {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "float16 with a scaler": {
        "plugins": [scaled],
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
    },
    "a scheduler by step": {"model": ByStep, "accumulate_grad_batches": 2},
    "a scheduler by epoch": {"model": ByEpoch},
    "a scheduler by step that looks at a metric": {"model": Plateau},
    "a scheduler by epoch that looks at a metric": {"model": PlateauByEpoch},
    "outputs in a dictionary": {"model": Dict, "accumulate_grad_batches": 2},
    "a step that is skipped": {"model": Skips},
    "an epoch that is ended": {"model": EndsEpoch},
    "a batch that is None": {"data": NoBatch},
    "a loss that changes": {"model": KeepsLoss},
    "no batch_idx": {"model": TakesNoIndex},
    "LBFGS": {"model": LBFGS},
    "validation within an epoch": {"val_check_interval": 2},
    "validation by steps": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "validation every other epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "no validation": {"limit_val_batches": 0},
    "some batches": {"limit_train_batches": 3, "limit_val_batches": 0.4},
    "some steps": {"max_steps": 7, "max_epochs": -1},
    "stopped": {"callbacks": [Stops], "max_epochs": 5},
    "an exception": {"callbacks": [FailsLater]},
    "resumed in mid-epoch": {"saves": "on_train_batch_end", "model": ByStep},
    "resumed before a validation": {"saves": "on_train_batch_end", "val_check_interval": 2},
    "resumed after a validation": {"saves": "on_validation_end", "val_check_interval": 2},
    "resumed after an epoch's validation": {"saves": "on_validation_end", "max_epochs": 3},
    "resumed, until a step": {"saves": "on_train_batch_end", "max_steps": 14, "max_epochs": -1},
    "resumed after an epoch": {
        "saves": "on_train_epoch_end",
        "model": PlateauByEpoch,
        "max_epochs": 3,
    },
    "loaders of the module": {"model": OwnLoaders, "data": None},
    "a stream": {"data": StreamedData},
    "no window": {"log_every_n_steps": 0},
    "StochasticWeightAveraging": {
        "callbacks": [lambda: StochasticWeightAveraging(0.01, 1)],
        "reason": "StochasticWeightAveraging",
    },
    "a profiler": {"profiler": "simple", "reason": "a profiler"},
    "manual optimization": {"model": user_code.TwoOptimizers, "reason": "manual optimization"},
    "the data iterator": {
        "model": TakesIterator,
        "reason": "a training_step that takes the data iterator",
    },
}


@pytest.mark.parametrize("hooks", [CALLBACKS, HOOKS], ids=["callback", "all"])
@pytest.mark.parametrize("case", CASES)
def test_case(case, hooks, tmp_path):
    assert_alike(tmp_path, hooks=hooks, **CASES[case])


@pytest.mark.parametrize(("owner", "hook"), EVERY)
def test_hook(owner, hook, tmp_path):
    """A hook that is the only one overridden."""
    settings = {"model": ByStep, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    assert_alike(tmp_path, hooks={owner: [hook]}, max_epochs=1, **settings)


def test_every_hook_is_called(tmp_path):
    """The cases call every hook, so that each is compared."""
    middle = tmp_path / "first/middle.ckpt"
    trained(False, middle.parent, hooks=HOOKS, callbacks=[lambda: saving("on_train_batch_end")])
    called = set()
    for settings in (
        {"num_sanity_val_steps": 2, "model": ByStep, "gradient_clip_val": 0.1},
        {"ckpt_path": middle},
        CASES["an exception"],
        CASES["loaders of the module"],
    ):
        calls, _, _ = trained(False, tmp_path / "run", hooks=HOOKS, **settings)
        called |= {call[:2] for call in calls[:-2]}
    assert set(EVERY) - called == set()


def test_plateau_after_a_resumption(tmp_path):
    """Lightning skips ReduceLROnPlateau after a resumed epoch; the straight loop is exact."""
    settings = {"model": PlateauByEpoch, "max_epochs": 3}
    middle = tmp_path / "first/middle.ckpt"
    trained(False, middle.parent, callbacks=[lambda: saving("on_train_batch_end")], **settings)
    steps = []
    for straight in (False, True):
        hooks = {"module": ["lr_scheduler_step"]}
        calls, _, _ = trained(straight, tmp_path / "run", hooks=hooks, ckpt_path=middle, **settings)
        steps.append(len(calls[:-2]))
    assert steps == [1, 2]


def test_hook_set_on_an_object(tmp_path):
    calls = [lambda: LambdaCallback(on_after_backward=lambda *_: CALLS.append(("lambda",)))]
    assert_alike(tmp_path, hooks={}, callbacks=calls)
    assert len(trained(True, tmp_path, hooks={}, callbacks=calls)[0]) == 10 + 2

"""The straight step makes Lightning's calls in order, with the same losses and checkpoints."""

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from harness import (
    RECIPE,
    ROOT,
    Fit,
    difference,
    fork_fit,
    last_of,
    losses,
    on_cpu,
    options,
    record_of,
    tiny,
)
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from user_code import TheirData, TheirModel, TwoOptimizers

from app.training.step import StraightLoop

CALLBACK_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
BATCH_HOOKS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
STEP_METHODS = [
    "training_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "clip_gradients",
    *BATCH_HOOKS,
]
MODULE_HOOKS = [
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "lr_scheduler_step",
    "on_validation_model_zero_grad",
    "on_train_epoch_start",
    "on_train_epoch_end",
    *STEP_METHODS,
]


# recorded calls: hook, hook name that `self.log` sees, global step, and arguments
CALLS: list[tuple[Any, ...]] = []


def note(hook: str, module: Any, *args: Any) -> None:
    step = module.trainer.global_step
    CALLS.append((hook, module._current_fx_name, step, *map(_described, args)))


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.tolist() if value.numel() < 100 else float(value.double().sum())
    if isinstance(value, dict):
        return {key: _described(content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return [_described(content) for content in value]
    if isinstance(value, int | float | str | None):
        return value
    return "callable" if callable(value) else type(value).__name__


def recorder(hooks: list[str]) -> Callback:
    """Return a callback that overrides these hooks, and records their calls."""

    def overriding(name: str) -> Callable[..., None]:
        return lambda self, trainer, module, *args, **kwargs: note(
            f"callback.{name}", module, *args, kwargs
        )

    return type("Recorder", (Callback,), {name: overriding(name) for name in hooks})()


def recording(base: type, hooks: list[str], whose: str) -> type:
    """Return a subclass of a module or data module that records the calls of these hooks."""

    def overriding(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            module = self if isinstance(self, pl.LightningModule) else self.trainer.lightning_module
            note(f"{whose}.{name}", module, *args, kwargs)
            return getattr(super(made, self), name)(*args, **kwargs)

        return hook

    made = type(f"Recording{base.__name__}", (base,), {name: overriding(name) for name in hooks})
    return made


class Plain(TheirModel):
    """LightningModule that logs in its steps, as most modules do."""

    scheduler: Callable[[Any], Any] | None = None
    monitor: str | None = None
    optimizer: Any = staticmethod(
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    )

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(width=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if batch_idx % 3 == 0:
            self.log("now_and_then", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        scheduler = self.scheduler(optimizer)
        settings = {"scheduler": scheduler, "interval": "step", "monitor": self.monitor}
        return {"optimizer": optimizer, "lr_scheduler": settings}


class Dict(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "index": batch_idx}


class Skips(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class EndsEpoch(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


class TakesNoIndex(Plain):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 1)


class KeepsLoss(Plain):
    """Module that keeps its loss, while hooks change the other losses in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss = super().training_step(batch, batch_idx)
        return self.loss

    def on_before_backward(self, loss: Tensor) -> None:
        loss.mul_(0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        note("kept", self, outputs["loss"], self.loss)
        outputs["loss"].zero_()
        note("kept", self, self.loss)


class LBFGS(Plain):
    optimizer = staticmethod(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))


class ByStep(Plain):
    scheduler = staticmethod(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9))


class Plateau(Plain):
    scheduler = staticmethod(
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    )
    monitor = "loss"


class Stops(Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 7


class Stream(IterableDataset[Any]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(*TheirData().dataset.tensors))


class StreamedData(TheirData):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=8)


class ClipsEach(Precision):
    def clip_gradients(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            nn.utils.clip_grad_norm_(parameter, 0.01)


def trained(
    straight: bool,
    folder: Path,
    model: type = Plain,
    data: type = TheirData,
    hooks: Any = CALLBACK_HOOKS,
    **flags: Any,
) -> tuple[list[Any], dict[str, Any], str | None]:
    """Train, by default two epochs of five batches; return calls, checkpoint and the loop's reason.

    The reason says why the straight loop used Lightning's step. Otherwise, it is None.
    """
    CALLS.clear()
    shutil.rmtree(folder, ignore_errors=True)
    made = {name: [make() for make in flags.pop(name, [])] for name in ("callbacks", "plugins")}
    made["callbacks"].insert(0, recorder(hooks))
    flags = {"max_epochs": 2, "log_every_n_steps": 2, "accelerator": "cpu"} | flags
    torch.manual_seed(1)
    trainer = pl.Trainer(
        **flags,
        **made,
        logger=pl.loggers.CSVLogger(folder),
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    if straight:
        StraightLoop.put_into(trainer)
    trainer.fit(model(), data())
    trainer.save_checkpoint(folder / "end.ckpt")
    calls = list(CALLS)
    calls.append(("metrics", _described(dict(trainer.logged_metrics))))
    calls.append(("csv", Path(trainer.log_dir, "metrics.csv").read_text()))
    reason = getattr(trainer.fit_loop.epoch_loop, "reason", None)
    return calls, torch.load(folder / "end.ckpt", weights_only=False), reason


def same_checkpoint(saved: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two checkpoints resume the same training."""
    for key in ("global_step", "epoch", "loops", "lr_schedulers"):
        assert other[key] == saved[key], key
    assert difference(other["state_dict"], saved["state_dict"]) == 0
    assert repr(other["optimizer_states"]) == repr(saved["optimizer_states"])


def assert_alike(tmp_path: Path, reason: str | None = None, **settings: Any) -> None:
    calls, saved, _ = trained(False, tmp_path / "run", **settings)
    straight_calls, straight_saved, straight_reason = trained(True, tmp_path / "run", **settings)
    assert straight_reason == reason
    for call, expected in zip(straight_calls, calls, strict=False):
        assert call == expected
    assert len(straight_calls) == len(calls)
    same_checkpoint(saved, straight_saved)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "accumulation that changes": {
        "callbacks": [lambda: GradientAccumulationScheduler({0: 1, 1: 2})]
    },
    "clipping by norm": {"gradient_clip_val": 0.01},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clipping by a plugin": {"plugins": [lambda: ClipsEach()]},
    "bf16-mixed": {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true"},
    "float16 with a scaler": {
        "plugins": [
            lambda: MixedPrecision(
                "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**60)
            )
        ],
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
    },
    "a scheduler by step": {"model": ByStep, "accumulate_grad_batches": 2},
    "a scheduler by step that looks at a metric": {"model": Plateau},
    "outputs in a dictionary": {"model": Dict, "accumulate_grad_batches": 2},
    "a step that is skipped": {"model": Skips},
    "an epoch that is ended": {"model": EndsEpoch},
    "a loss that changes": {"model": KeepsLoss},
    "no batch_idx": {"model": TakesNoIndex},
    "LBFGS": {"model": LBFGS},
    "validation within an epoch": {"val_check_interval": 2},
    "validation by steps": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "no validation": {"limit_val_batches": 0},
    "some steps": {"max_steps": 7, "max_epochs": -1},
    "stopped": {"callbacks": [Stops], "max_epochs": 5},
    "a stream": {"data": StreamedData},
    "no window": {"log_every_n_steps": 0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, tmp_path: Path) -> None:
    assert_alike(tmp_path, **SETTINGS[name])


@pytest.mark.parametrize(
    "hooks", [*([hook] for hook in MODULE_HOOKS), MODULE_HOOKS], ids=lambda hooks: hooks[-1]
)
def test_module_hooks(hooks: list[str], tmp_path: Path) -> None:
    model = recording(ByStep, hooks, "module")
    others = CALLBACK_HOOKS if len(hooks) > 1 else []
    assert_alike(
        tmp_path, model=model, hooks=others, accumulate_grad_batches=2, gradient_clip_val=0.1
    )


@pytest.mark.parametrize("hook", BATCH_HOOKS)
def test_data_module_hook(hook: str, tmp_path: Path) -> None:
    """If module and data module override a hook, the straight step makes Lightning's choice."""
    model = recording(Plain, [hook], "module")
    assert_alike(tmp_path, model=model, data=recording(TheirData, [hook], "data"), hooks=[])


@pytest.mark.parametrize("hook", CALLBACK_HOOKS)
def test_callback_hook(hook: str, tmp_path: Path) -> None:
    assert_alike(tmp_path, hooks=[hook], accumulate_grad_batches=2)


def test_hook_set_on_an_object(tmp_path: Path) -> None:
    calls = [
        lambda: pl.callbacks.LambdaCallback(on_after_backward=lambda *_: CALLS.append(("lambda",)))
    ]
    assert_alike(tmp_path, hooks=[], callbacks=calls)
    assert len(trained(True, tmp_path, hooks=[], callbacks=calls)[0]) == 10 + 2


class TakesIterator(Plain):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


FALLBACKS: dict[str, dict[str, Any]] = {
    "StochasticWeightAveraging": {"callbacks": [lambda: StochasticWeightAveraging(0.01, 1)]},
    "a profiler": {"profiler": "simple"},
    "manual optimization": {"model": TwoOptimizers},
    "a training_step that takes the data iterator": {"model": TakesIterator},
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_features_that_need_lightnings_step(reason: str, tmp_path: Path) -> None:
    assert_alike(tmp_path, reason, **FALLBACKS[reason])


# -- through the command
# ----------------------------------------------------------------------------------------

# without on_save_checkpoint, because a checkpoint contains measured times, which differ between
# runs
RecordsAll = type(recorder([name for name in CALLBACK_HOOKS if name != "on_save_checkpoint"]))
RECORDED = ["--trainer.callbacks+=test_straight_step.RecordsAll", "--run.test=false"]


LARGE = ("cifar_resnet18", "imagenet", "finetune", "cifar10_94")
CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if path.stem != "sweep"]
CONFIGS += sorted((ROOT / "configs" / "speed").glob("*.yaml"))
CONFIGS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in LARGE))
    for path in CONFIGS
]
PHOTOS = ["--model.network=resnet18", *options(size=32, resize=36)]
SMALLER = {
    "fashion_mlp": ["--model.repeats=1"],
    "imagenet": PHOTOS,
    "finetune": [*PHOTOS, "--model.weights=null"],  # which would be downloaded
    "cifar10_94": ["--model.warmup=1ep"],
    "cifar10_cpu": ["--model.warmup=1ep"],
}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config(
    config: Path, fit: Fit, cifar_root: Path, fashion_root: Path, image_root: Path
) -> None:
    roots = {"CIFAR10": cifar_root, "FashionMNIST": fashion_root, "ImageFolder": image_root}
    data = yaml.safe_load(config.read_text()).get("data", {}).get("class_path")
    flags = ["--data.root", str(roots[data])] if data in roots else tiny(80)
    flags += options(
        max_epochs=2, log_every_n_steps=2, limit_train_batches=4, limit_val_batches=1, batch_size=8
    )
    flags += ["--run.virtual_devices=null"]  # because Lightning's step has no virtual devices
    assert_alike_by_command(fit, "--config", config, *flags, *SMALLER.get(config.stem, []))


def assert_alike_by_command(fit: Fit, *flags: str | Path) -> None:
    """Check that straight loop and Lightning's agree; the second run uses the first's config."""
    CALLS.clear()
    straight = fit(*flags, *RECORDED)
    calls = list(CALLS)
    CALLS.clear()
    stock = fit("--config", straight / "config.yaml", "--run.loop=lightning")
    for call, expected in zip(calls, CALLS, strict=True):
        assert call == expected
    assert record_of(straight)["loop_reason"] is None
    assert record_of(stock)["loop_reason"] == "--run.loop lightning"
    assert_same_run(straight, stock)


def assert_same_run(straight: Path, stock: Path) -> None:
    """Check that two runs are the same training in the straight loop and in Lightning's."""
    same_checkpoint(*(torch.load(last_of(run), weights_only=True) for run in (straight, stock)))
    records = [record_of(run) for run in (straight, stock)]
    assert [record["loop"] for record in records] == ["straight", "lightning"]
    assert records[0]["train_loss"] == records[1]["train_loss"]
    assert losses(straight).tolist() == losses(stock).tolist()


VARIANTS = {
    "dp": options(strategy="dp", devices=2),
    "accumulation, clipping and bf16": options(
        accumulate_grad_batches=3, gradient_clip_val=0.1, precision="bf16-mixed"
    ),
    "a scheduler by step": ["--model=user_code.OneCycle"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, fit: Fit) -> None:
    flags = tiny(103, 16, accelerator="cpu", max_epochs=2, log_every_n_steps=3)
    assert_alike_by_command(fit, *flags, *VARIANTS[name])


class Pickles(Callback):
    """Callback that pickles the Trainer.

    So does a loader that spawns workers with a data module's `collate_fn`.
    """

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1:
            copy = pickle.loads(pickle.dumps(trainer))
            assert copy.current_epoch == 1


SMALL = tiny(64, 16)
PICKLED = {
    "all callbacks": [*SMALL, *RECIPE, "--run.wandb", "offline"],
    "Lightning's loop": [*SMALL, *options(loop="lightning")],
    "virtual devices": [*SMALL, *options(virtual_devices=2)],
    "dp": [*SMALL, *options(strategy="dp", devices=2)],
    "a user's loaders": ["--model=user_code.TheirModel", "--data=user_code.TheirData"],
}


@pytest.mark.parametrize("name", PICKLED)
def test_trainer_can_be_pickled(name: str, fit: Fit) -> None:
    flags = ["--trainer.callbacks+=test_straight_step.Pickles", "--trainer.accelerator=cpu"]
    fit(*PICKLED[name], *flags, *options(max_epochs=2, limit_train_batches=3, test=False))


@pytest.mark.slow
def test_two_processes_accumulate(tmp_path: Path) -> None:
    flags = tiny(203, 16, log_every_n_steps=3, accumulate_grad_batches=2, max_epochs=2, test=False)
    flags += on_cpu("ddp_fork")
    straight = fork_fit(tmp_path, *flags)
    assert_same_run(straight, fork_fit(tmp_path, *flags, "--trainer.profiler=simple"))

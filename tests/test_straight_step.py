"""The command trains the same model in the straight loop and in Lightning's."""

import pickle
from types import SimpleNamespace

import pytest
import torch
import yaml
from forked import fork_fit
from harness import QUIET, RECIPE, ROOT, SLOW, last_of, on_cpu, options, record_of, tiny
from lightning import Callback
from test_conformance import CALLS, HOOKS, recording, same_checkpoint

from app.errors import UserError
from app.training.step import StraightLoop

# without on_save_checkpoint, because a checkpoint contains measured times, which differ between
# runs
RecordsAll = recording(Callback, "callback", [*set(HOOKS["callback"]) - {"on_save_checkpoint"}])
RECORDED = ["--trainer.callbacks+=test_straight_step.RecordsAll", "--run.test=false"]


SMALL = ("quickstart", "wandb")
CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if path.stem != "sweep"]
CONFIGS += sorted((ROOT / "configs/speed").glob("*.yaml"))
CONFIGS = [
    pytest.param(path, id=path.stem, marks=[SLOW] * (path.stem not in SMALL)) for path in CONFIGS
]
PHOTOS = ["--model.network=resnet18", *options(size=32, resize=36)]
SMALLER = {
    "fashion_mlp": ["--model.repeats=1"],
    "imagenet": PHOTOS,
    "finetune": [*PHOTOS, "--model.weights=null"],  # which would be downloaded
    "cifar10_94": ["--model.warmup=1ep"],
    "cifar10_cpu": ["--model.warmup=1ep"],
}


@pytest.mark.parametrize("steps", [1, 2])
def test_max_steps_within_an_epoch(steps, fit):
    is_available = torch.accelerator.is_available
    assert record_of(fit(*tiny(40, 8, max_steps=steps, test=False)))["steps"] == steps
    assert torch.accelerator.is_available is is_available


def test_only_a_single_process_skips_a_step():
    loop = SimpleNamespace(trainer=SimpleNamespace(world_size=1))
    with pytest.warns(UserWarning, match="returned `None`"):
        assert StraightLoop.unpack(loop, None, 1) == (None, {})
    loop.trainer.world_size = 2
    with pytest.raises(UserError, match="only in a single process"):
        StraightLoop.unpack(loop, None, 1)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config(config, fit, cifar_root, fashion_root, image_root):
    roots = {"CIFAR10": cifar_root, "FashionMNIST": fashion_root, "ImageFolder": image_root}
    data = yaml.safe_load(config.read_text()).get("data", {}).get("class_path")
    flags = [f"--data.root={roots[data]}"] if data in roots else tiny(80)
    flags += options(
        max_epochs=2, log_every_n_steps=2, limit_train_batches=4, limit_val_batches=1, batch_size=8
    )
    flags += ["--run.virtual_devices=null"]  # because Lightning's step has no virtual devices
    assert_alike_by_command(fit, f"--config={config}", *flags, *SMALLER.get(config.stem, []))


def assert_alike_by_command(fit, *flags):
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


def assert_same_run(straight, stock):
    """Check that two runs are the same training in the straight loop and in Lightning's."""
    same_checkpoint(*(torch.load(last_of(run), weights_only=True) for run in (straight, stock)))
    records = [record_of(run) for run in (straight, stock)]
    assert [record["loop"] for record in records] == ["straight", "lightning"]
    assert records[0]["train_loss"] == records[1]["train_loss"]
    logged = [(run / "metrics.csv").read_text() for run in (straight, stock)]
    assert logged[0] == logged[1]


VARIANTS = {
    "dp": options(strategy="dp", devices=2),
    "accumulation, clipping and bf16": options(
        accumulate_grad_batches=3, gradient_clip_val=0.1, precision="bf16-mixed"
    ),
    "a scheduler by step": ["--model=user_code.OneCycle"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, fit):
    flags = tiny(103, accelerator="cpu", max_epochs=2, log_every_n_steps=3)
    assert_alike_by_command(fit, *flags, *VARIANTS[name])


USERS = {
    "user_code.TheirModel": "user_code.TheirData",
    "user_code.Lazy": "user_code.NamedData",
    "user_code.OddModel": "user_code.OddData",
    "user_code.SkipsForward": "user_code.NoValidation",
    "user_code.Normalises": "user_code.TheirData",
    "user_code.LogsNothing": "user_code.TwoLoaders",
    "user_code.LogsAccuracy": "user_code.TwoLoaders",
    "user_code.LogsOtherNames": "user_code.TheirTestedData",
    "user_code.LossRises": "user_code.HiddenData",
    "plain_code.WithBuffers": "plain_code.PlainData",
    "exact_code.Linear": "exact_code.Ordinary",
}


@pytest.mark.parametrize("model", USERS)
def test_code_of_users(model, fit):
    flags = [f"--model={model}", "--data", USERS[model], "--trainer.accelerator=cpu", *QUIET]
    assert_alike_by_command(fit, *flags, *options(max_epochs=2, log_every_n_steps=2))


class Pickles(Callback):
    """Callback that pickles the Trainer.

    So does a loader that spawns workers with a data module's `collate_fn`.
    """

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1:
            copy = pickle.loads(pickle.dumps(trainer))
            assert copy.current_epoch == 1


SMALL = tiny()
PICKLED = {
    "all callbacks": [*SMALL, *RECIPE, "--run.wandb=offline"],
    "Lightning's loop": [*SMALL, *options(loop="lightning")],
    "virtual devices": [*SMALL, *options(virtual_devices=2)],
    "dp": [*SMALL, *options(strategy="dp", devices=2)],
    "a user's loaders": ["--model=user_code.TheirModel", "--data=user_code.TheirData"],
}


@pytest.mark.parametrize("name", PICKLED)
def test_trainer_can_be_pickled(name, fit):
    flags = ["--trainer.callbacks+=test_straight_step.Pickles", "--trainer.accelerator=cpu"]
    fit(*PICKLED[name], *flags, *options(max_epochs=2, limit_train_batches=3, test=False))


@SLOW
def test_two_processes_accumulate(tmp_path):
    flags = tiny(203, log_every_n_steps=3, accumulate_grad_batches=2, max_epochs=2, test=False)
    flags += on_cpu("ddp_fork")
    straight = fork_fit(tmp_path, *flags)
    assert_same_run(straight, fork_fit(tmp_path, *flags, "--trainer.profiler=simple"))

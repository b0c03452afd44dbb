"""Recipes: networks, frozen blocks, schedules, losses, mixing, balancing.

test_parity.py and test_resume.py train a recipe in every way of running, and resume it.
"""

import math
from collections import Counter
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
import yaml
from harness import last_of, options, record_of, refusals, tiny, weights
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from app.data.batches import GlobalBatches, HostReader, ImageOrder
from app.data.sources import Split
from app.data.transforms import Mix, Transform, _hole, draw_mix
from app.errors import UserError
from app.modules import CIFARCNN, ImageClassifier
from app.modules.networks import make_network
from app.modules.recipe import Recipe, rate
from app.modules.recipe import freeze as freeze_blocks
from app.modules.sums import Sums, log_window

NETWORK = "--model ImageClassifier --model.network"
QUICK = tiny(40, max_epochs=1, test=False, accelerator="cpu")


class Net(nn.Sequential):
    """A user's network."""

    def __init__(self, num_classes: int):
        super().__init__(
            nn.Conv2d(3, 4, 5, 4),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(196, num_classes),
        )


# -- networks
# --------------------------------------------------------------------------------------------------


NETWORKS = {
    "--model squeezenet1_1": "squeezenet1_1",
    f"{NETWORK} timm/test_resnet": "test_resnet",
    f"{NETWORK} test_recipe.Net": "Net",
}


@pytest.mark.parametrize(("flags", "name"), NETWORKS.items())
def test_network_by_name_or_import_path(flags, name, app, tmp_path):
    summary = options(enable_model_summary=True)
    out = app("fit", *QUICK, *flags.split(), *summary)
    run = tmp_path / f"runs/{name}-Synthetic/version_0"
    assert f"network    {name}, " in out
    config = run / "config.yaml"
    assert yaml.safe_load(config.read_text())["model"]["init_args"]["network"] == flags.split()[-1]
    model = ImageClassifier.load_from_checkpoint(last_of(run)).eval()
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    saved = ["--ckpt_path", last_of(run), *options(accelerator="cpu")]
    app("test", f"--config={config}", *saved)


def test_a_network_with_a_second_head():
    assert make_network("googlenet", 3)(torch.rand(2, 3, 64, 64)).shape == (2, 3)


WRONG = {
    "--model resnet5": "--model resnet5: there is no such class: did you mean resnet50?",
    "--model.network resnet5": "there is no such network: did you mean resnet50?",
    "--model.network timm/test_resne": "timm has no such network: did you mean test_resnet?",
    "--model.network test_recipe.Nett": "module 'test_recipe' has no attribute 'Nett'",
    "--model.network test_recipe.make_text": "returns str: return a torch.nn.Module",
    "--model.network lenet --model.weights DEFAULT": (
        "DEFAULT is for networks of torchvision and timm"
    ),
    "--model.freeze 99": "--model.freeze 99: ResNet has 11 blocks: give less",
    "--model.ema 1.5": "--model.ema 1.5: give more than 0, less than 1",
    "--model.no_decay norms": (
        "--model.no_decay norms: expected one of norm, bias, norm,bias: did you mean norm?"
    ),
    "--model.warmup 3e": "--model.warmup 3e: give steps, such as 500, or epochs, such as 5ep",
    "--model.schedule cosine --model.warmup 5ep": (
        "--model.warmup is 15 steps, but the run has only 3: give less"
    ),
    "--model.schedule linear --trainer.max_epochs -1": (
        "needs the run's length: give --trainer.max_epochs"
    ),
    "--model.schedule step --model.scheduler StepLR --model.scheduler.step_size 1": "leave one out",
    "--data.mixup 0.2 --data.batch_size 1": (
        "mix images of a batch: give a larger --data.batch_size"
    ),
}


def make_text(num_classes):
    return "not a network"


test_wrong_recipes_are_rejected = refusals(WRONG, *QUICK, "--model=ImageClassifier")


def test_whitened_patches_are_uncorrelated():
    """A patch's 12 whitened values are uncorrelated, of variance 1; their negatives follow."""
    images = torch.einsum(
        "ij,njhw->nihw", torch.rand(3, 3) + torch.eye(3), torch.randn(64, 3, 9, 9)
    )
    network = make_network("whitened", 10)
    network.whiten(images)
    expected = torch.kron(torch.tensor([[1.0, -1], [-1, 1]]), torch.eye(12))
    whitened = network.whitening(images).transpose(0, 1).flatten(1)  # (24, patches)
    assert_close(whitened @ whitened.T / whitened.shape[1], expected, rtol=0, atol=0.01)


@pytest.mark.parametrize(("views", "moves"), [("mirror", [0]), ("shift", [0, 1, -1])])
def test_views_are_averaged(views, moves):
    model = ImageClassifier("whitened", 10, views=views).eval()
    images = functional.pad(torch.randn(4, 3, 30, 30), (1, 1, 1, 1))
    seen = [
        model.network(images.roll((by, by), (2, 3)).flip(side))
        for by in moves
        for side in ([], [3])
    ]
    assert_close(model(images), torch.stack(seen).mean(0))
    assert model(images[:0]).shape == (0, 10)


@pytest.mark.parametrize(("freeze", "trained"), [(2, 59), (5, 38), ("backbone", 2)])
def test_frozen_blocks_do_not_train(freeze, trained):
    model = ImageClassifier("resnet18", 10, freeze=freeze).train()
    assert sum(p.requires_grad for p in model.parameters()) == trained
    assert not model.network.bn1.training
    assert model.network.training
    with pytest.raises(UserError, match="Sequential has 2 blocks"):
        freeze_blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)), 2)


# -- optimizer and schedule
# --------------------------------------------------------------------------------------------


def test_parameter_groups():
    network = make_network("resnet18", 10)
    recipe = Recipe(
        no_decay="norm,bias",
        head_lr=10,
        optimizer=lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1),
    )
    groups = recipe.make_optimizer(network, [*network.parameters()]).param_groups
    counts = {(round(g["lr"], 6), g["weight_decay"]): len(g["params"]) for g in groups}
    assert counts == {(0.001, 0.1): 20, (0.001, 0.0): 40, (0.01, 0.1): 1, (0.01, 0.0): 1}
    groups = Recipe(norm_bias_lr=64).make_optimizer(network, [*network.parameters()]).param_groups
    assert {(round(g["lr"], 6), len(g["params"])) for g in groups} == {(0.001, 42), (0.064, 20)}


def test_a_resumed_run_of_another_length_follows_its_own_schedule(fit):
    flags = [*QUICK, "--model.schedule=linear", "--model.optimizer.lr=1e-3"]
    flags += options(log_every_n_steps=1)
    fit(*flags)
    run = fit(*flags, *options(max_epochs=3), "--ckpt_path=last")
    rates = pd.read_csv(run / "metrics.csv").groupby("step")["lr-SGD"].first().dropna()
    falling = [1 - step / 3 for step in range(3)] + [1 - step / 9 for step in range(3, 9)]
    assert rates.tolist() == pytest.approx([1e-3 * rate for rate in falling])
    assert record_of(fit(*flags, "--trainer.limit_train_batches=0"))["steps"] == 0


def test_schedules_by_hand():
    by_hand = {
        "constant": [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1],
        "linear": [1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
        "step": [1 / 3, 2 / 3, 1, 1, 0.1, 0.1, 0.01, 0.01],
        "cosine": [1 / 3, 2 / 3, 1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873],
        "onecycle": [0.04, 0.52, 1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873],
    }
    for name, expected in by_hand.items():
        assert [rate(name, 2, 8, step) for step in range(8)] == pytest.approx(expected), name
    assert Recipe(warmup="0.5ep").warmup == 0.5
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    scheduler = Recipe(schedule="onecycle").make_scheduler(optimizer, 10, 5)
    rates = []
    for _ in range(10):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates.index(1.0) == max(rates) * 3, "after 0.3 of the steps"
    assert Recipe(schedule="cosine").make_scheduler(optimizer, 0, 1).get_last_lr() == [1]
    with pytest.raises(UserError, match="10 steps, but the run has only 10"):
        Recipe(schedule="cosine", warmup=10).make_scheduler(optimizer, 10, 5)


def test_a_scheduler_of_epochs(fit):
    scheduler = ["--model.scheduler=StepLR", "--model.scheduler.step_size=1"]
    run = fit(*QUICK, *scheduler, "--model.optimizer.lr=0.1", "--trainer.max_epochs=3")
    rates = [epoch["lr"] for epoch in record_of(run)["epochs"]]
    assert rates == pytest.approx([0.1, 0.01, 0.001])


def test_the_rate_is_logged_in_each_window(app, tmp_path):
    flags = tiny(40, 8, "CIFARCNN", val_size=0, max_epochs=2, test=False, log_every_n_steps=1)
    flags += ["--model.schedule=cosine", "--model.warmup=1ep", "--model.freeze=1"]
    flags += ["--model.ema=0.9"]
    flags += options(flip=True, mixup=0.2, accumulate_grad_batches=2, name="x")
    out = app("fit", *flags, *options(enable_model_summary=True))
    assert "recipe     freeze 1, ema 0.9, flip True, mixup 0.2\n" in out
    assert "SGD, lr 0.001, momentum 0.9; cosine over 6 steps, 3 of them warm-up" in out
    rates = pd.read_csv(tmp_path / "runs/x/version_0/metrics.csv")["lr-SGD"].dropna()
    steps = [0.00025, 0.0005, 0.00075, 0.001, 0.00025]  # 0.00075 again is a duplicate
    assert rates.drop_duplicates().tolist() == pytest.approx(steps)


def test_the_average_begins_with_the_weights_that_training_begins_with(fit):
    flags = tiny(40, 8, "CIFARCNN", max_steps=2, precision="64-true", test=False)
    flags += ["--model.network=whitened", "--model.class_weights=balanced"]
    runs = [fit(*flags, f"--model.ema={decay}") for decay in (0.001, 0.999)]
    assert torch.equal(*(weights(run)["network.whitening.weight"] for run in runs))


# -- loss, mixed images, balanced classes
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_by_hand(smoothing):
    """Labels and probabilities have the losses of plain formulas."""
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    soft, factor = functional.one_hot(labels, 4).float(), torch.tensor([1.0, 2, 3, 4])
    smooth = soft * (1 - smoothing) + smoothing / 4
    entropies = -smooth * logits.log_softmax(1)
    squares = (logits.softmax(1) - smooth).square().mean(1) / 2  # for errors below 1
    for loss, plain, weighted in (
        ("cross_entropy", entropies.sum(1), entropies @ factor),
        ("smooth_l1", squares, squares * factor[labels]),
    ):
        criterion = Recipe(loss=loss, label_smoothing=smoothing).criterion
        for targets in (labels, soft):
            assert_close(criterion(logits, targets), plain)
            assert_close(criterion(logits, targets, factor), weighted)


def test_mixing_by_hand():
    images, labels = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 4, 4), torch.tensor([0, 1, 2])
    mixed, targets = Mix(0.75, None)(images, labels, 3)
    assert_close(mixed[:, 0, 0, 0], torch.tensor([0.25, 1.25]))
    assert_close(targets, torch.tensor([[0.75, 0.25, 0], [0, 0.75, 0.25]]))
    # the left half of the box is outside
    mixed, targets = Mix(0.75, (0.5, 0.0, 0.5))(images, labels, 3)
    assert mixed[0, 0].tolist() == [[0] * 4, [1, 0, 0, 0], [1, 0, 0, 0], [0] * 4]
    assert_close(targets[0], torch.tensor([14 / 16, 2 / 16, 0]))
    mixed, targets = Mix(0.75, (0.5, 0.5, 0.5))(images, labels, 3)
    assert_close(targets[0], torch.tensor([12 / 16, 4 / 16, 0]))
    assert mixed[0, 0].tolist() == [[0] * 4, [0, 1, 1, 0], [0, 1, 1, 0], [0] * 4]
    for setting in ({"crop_padding": 4}, {"flip": True}, {"cutout": 4}, {}):
        assert Transform([0], [1], **setting).draws == 5 * bool(setting)
    assert _hole(5, 4)[2].tolist() == [True] * 4 + [False]
    mix = draw_mix(0, 1.0, 3)
    assert mix.box[2] == math.sqrt(1 - mix.weight)
    assert 150 < Counter(draw_mix(0.2, 1.0, seed).box is None for seed in range(400))[True] < 250


def test_balanced_classes_are_drawn_equally():
    labels = torch.tensor([0] * 90 + [1] * 10)
    rows = torch.arange(100)
    weights = (1 / labels.bincount())[labels]
    split = Split(torch.zeros(100, 1, 2, 2, dtype=torch.uint8), labels)
    order = ImageOrder(rows, shuffle=True, weights=weights, batch_size=50)
    loader = GlobalBatches(order, HostReader(split, rows))
    drawn = Counter()
    for epoch in range(20):
        loader.set_epoch(epoch)
        drawn.update(torch.cat([batch.labels for batch in loader]).tolist())
    assert 900 < drawn[0] < 1100


def test_metrics_of_many_classes():
    names = ["val_loss", "val_acc", "val_f1"]
    assert sorted(CIFARCNN(num_classes=10).val_metrics) == sorted(names)
    assert sorted(CIFARCNN(num_classes=12).val_metrics) == sorted([*names, "val_top5"])


def test_the_average_by_hand(fit):
    """The average begins with the first step's weights; counts are the model's."""
    flags = tiny(40, 8, "ImageClassifier", max_epochs=1, val_size=0, test=False)
    flags += ["--model.ema=0.5", "--model.network=test_recipe.Net"]
    flags += [f"--last_checkpoint.{name}" for name in ("save_top_k=-1", "filename={step}")]
    run = fit(*flags, "--last_checkpoint.every_n_train_steps=1")
    average = {}
    for step in range(1, 6):
        path = run / f"checkpoints/step={step}.ckpt"
        saved = torch.load(path, weights_only=True)
        for name, value in saved["current_model_state"].items():
            before = average.get(name, value)
            average[name] = (before + value) / 2 if value.is_floating_point() else value
        assert_close(saved["state_dict"], average)
    model = ImageClassifier.load_from_checkpoint(path)
    assert_close(dict(model.state_dict()), average)


def test_sums_by_hand():
    """Two ranks add the same three losses; two of three predictions are correct."""
    trainer = Mock(is_global_zero=True)
    trainer.strategy.reduce = lambda values, reduce_op: 2 * values
    sums = Sums(torch.device("cpu"))
    logits = torch.eye(2)
    small = 2.0**-30  # float32 would lose it
    sums.add(torch.tensor([3.0, 1.0]), logits, torch.tensor([0, 0]))
    sums.add(torch.tensor([small]), logits[:1], logits[:1])
    state = sums.state_dict(trainer)
    assert state == {"window": [8 + 2 * small, 4.0, 6.0], "epoch": [0.0, 0.0, 0.0]}
    assert sums.end_window(trainer) == {"train_loss_step": torch.tensor((4 + small) / 3)}
    assert sums.end_window(trainer) == {}
    means = {"train_loss": torch.tensor((4 + small) / 3), "train_acc": torch.tensor(2 / 3)}
    assert sums.end_epoch(trainer) == means
    assert sums.end_epoch(trainer) == {}
    for is_global_zero, kept in ((True, 1), (False, 0)):  # rank zero continues for both
        trainer = Mock(is_global_zero=is_global_zero)
        trainer.strategy.reduce = lambda values, reduce_op: values
        resumed = Sums(torch.device("cpu"))
        resumed.load_state_dict(trainer, {**state, "epoch": [1.0, 2.0, 3.0]})
        expected = [kept * value for value in state["window"]]
        assert resumed.state_dict(trainer) == {"window": expected, "epoch": [1.0, 2.0, 3.0]}
        loss = (1 + expected[0]) / (3 + expected[2])
        assert resumed.end_epoch(trainer)["train_loss"] == torch.tensor(loss)
    assert log_window(Mock(log_every_n_steps=1)) == 1

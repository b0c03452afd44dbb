"""First weights of the head by logistic regression, and training on a frozen network's features."""

import math
from unittest.mock import Mock

import pytest
import torch
from forked import fork_fit
from harness import SLOW, difference, on_cpu, options, record_of, slow, tiny, weights
from torch import nn
from torch.testing import assert_close
from user_code import Tiny

from app.data import ImageData, Synthetic
from app.data.synthetic import SyntheticSource
from app.modules import ImageClassifier, probe
from app.modules.probe import PENALTIES, Probe, _score, fit_head

NETWORK = "--model=ImageClassifier", "--model.network=user_code.Tiny"
FLAGS = [*tiny(90, 20, threads=1, max_epochs=2, test=False, log_every_n_steps=1), *NETWORK]
FROZEN = ["--model.freeze=backbone", "--model.optimizer.lr=0.1"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return the flag of weights for 1,000 classes."""
    file = tmp_path_factory.mktemp("weights") / "x.pth"
    torch.manual_seed(0)
    torch.save(Tiny(1000).state_dict(), file)
    return f"--model.weights={file}"


def test_regression_on_two_points():
    """Two opposite samples have opposite weights, a: 1 / (1 + exp 2a) = 2 · penalty · a."""
    assert sorted(PENALTIES, reverse=True) == [*PENALTIES], "from flat to steep"
    penalty = PENALTIES[2]
    low, high = 0.0, 100.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if 1 / (1 + math.exp(2 * middle)) > 2 * penalty * middle:
            low = middle
        else:
            high = middle
    features = torch.tensor([[5.0], [9.0]])  # their mean is 7, their standard deviation is 2
    weight, bias = fit_head({"train": (features, torch.tensor([0, 1]))}, 2, None)
    assert_close(weight[:, 0], torch.tensor([-low / 2, low / 2]).double(), rtol=1e-5, atol=0)
    assert_close(bias, -7 * weight[:, 0], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("follows", "expected"), [(0, 1), (1, 0)])
def test_validation_selects_the_penalty(follows, expected):
    """A steep solution uses the small second feature, which is always right; a flat one cannot."""
    train = torch.tensor([[1, 0.1], [1, 0.1], [-1, 0.1], [-1, -0.1], [-1, -0.1], [1, -0.1]])
    labels = torch.tensor([1, 1, 1, 0, 0, 0])
    val = torch.tensor([[1, -0.1], [-1, 0.1]])
    val_labels = (val[:, follows] > 0).long()
    weight, bias = fit_head({"train": (train, labels), "val": (val, val_labels)}, 2, None)
    assert (weight @ val[0].double() + bias).argmax() == expected


def test_the_regression_has_one_thread(monkeypatch):
    """The order of its sums does not depend on the number of threads, which is restored."""
    threads = []
    monkeypatch.setattr(probe, "_regress", lambda *args: threads.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    fit_head({"train": (torch.eye(2), torch.tensor([0, 1]))}, 2, None)
    assert set(threads) == {1}
    assert torch.get_num_threads() == 2


def test_runs_that_need_the_callback():
    needed = [Probe(head, False).is_needed(True) for head in ("auto", "probe", "none")]
    assert needed == [True, True, False]
    assert not Probe("auto", False).is_needed(False)
    assert Probe("none", True).is_needed(False)


def test_a_trial_changes_no_statistics():
    module = ImageClassifier(network="user_code.Tiny", num_classes=10)
    mean = module.network.features[1].running_mean
    assert Probe._problem(module, Synthetic()) is None
    assert not mean.any()
    assert module.training
    assert not module.network.head._forward_hooks


def test_score_by_hand():
    """Ties of accuracy are broken by the cross-entropy, here of margins 0.5 and 1."""
    solution = torch.tensor([[1.0], [-1.0]]).double(), torch.tensor([0.5, -0.5]).double()
    score = _score(torch.tensor([[-0.25], [-1.0]]), torch.tensor([0, 1]), solution)
    losses = [math.log(1 + math.exp(-margin)) for margin in (0.5, 1)]
    assert score == pytest.approx((1.0, -sum(losses) / 2))


def test_head_solves_the_regression(fit, pretrained):
    """At the head's first weights, the objective over plainly computed features has no slope."""
    run = fit(*FLAGS, pretrained, "--model.optimizer.lr=0", *options(val_size=0))
    state = {name.removeprefix("network."): value for name, value in weights(run).items()}
    network = Tiny(10).eval()
    network.load_state_dict({name: state[name] for name in network.state_dict()})
    split = SyntheticSource("CIFAR10", 90, 0).load("train")
    with torch.no_grad():
        features = network.features(split.tensor() / 127.5 - 1).mean((2, 3))
        logits = network.head(features).double()
    features = features.double()
    mean = features.mean(0)
    scale = (features - mean).square().sum(1).mean().sqrt()
    errors = logits.softmax(1) - nn.functional.one_hot(split.labels, 10)
    weight = network.head.weight.double() * scale
    slope = errors.T @ (features - mean) / scale / 90 + 2 * PENALTIES[2] * weight
    assert slope.abs().max() < 1e-5
    assert errors.mean(0).abs().max() < 1e-5
    assert weight.abs().max() > 0.1


@SLOW
@pytest.mark.parametrize("flags", [[], FROZEN], ids=["whole", "frozen"])
def test_ways_of_running_agree(flags, pretrained, tmp_path):
    shards = options(virtual_devices=3)
    flags = [*FLAGS, pretrained, *flags]
    alone = fork_fit(tmp_path, *flags, *shards)
    ranks = fork_fit(tmp_path, *flags, *shards, *on_cpu("ddp_fork", 2))
    assert difference(alone, ranks) == 0
    expected = record_of(fork_fit(tmp_path, *flags))["probe"]
    for strategy in ("dp", "ddp_fork"):
        probe = record_of(fork_fit(tmp_path, *flags, *on_cpu(strategy)))["probe"]
        assert probe["val_acc"] == expected["val_acc"]
        assert probe["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-4)


def test_frozen_network_computes_features_once(fit, pretrained, monkeypatch):
    """81 training and 9 validation images are 5 and 1 batches. Two calls try shape and head."""
    forward = Mock(side_effect=Tiny.forward)
    monkeypatch.setattr(Tiny, "forward", lambda *args: forward(*args))
    flags = [*FLAGS, pretrained, *FROZEN, "--trainer.num_sanity_val_steps=0"]
    flags += ["--trainer.check_val_every_n_epoch=2"]
    run = fit(*flags)
    assert forward.call_count == 8
    monkeypatch.setattr(ImageData, "varies", True)
    assert difference(run, fit(*flags)) < 1e-4
    assert forward.call_count == 8 + 8 + 1 + 2 * 5 + 1


@pytest.mark.parametrize(
    "flags", [slow(options(virtual_devices=1)), FROZEN], ids=["whole", "frozen"]
)
def test_resumed_run_keeps_its_head(flags, fit, pretrained):
    saving = ["--last_checkpoint.every_n_train_steps=3", "--last_checkpoint.save_top_k=-1"]
    flags = [*FLAGS, pretrained, *flags, *saving, "--last_checkpoint.filename={step}"]
    run = fit(*flags)
    resumed = fit(*flags, "--ckpt_path", run / "checkpoints" / "step=3.ckpt", "--run.name=resumed")
    assert difference(run / "checkpoints/step=9.ckpt", resumed / "checkpoints/step=9.ckpt") == 0


def test_best_checkpoint_may_be_the_probe(app, pretrained, tmp_path):
    flags = [*FLAGS, pretrained, "--model.optimizer.lr=0"]
    out = app("fit", *flags, "--trainer.enable_progress_bar=true", "--run.name=x")
    run = tmp_path / "runs" / "x" / "version_0"
    probe = record_of(run)["probe"]
    assert f"acc {100 * probe['val_acc']:5.1f} % *" in out.partition("epoch 0/2  probe ")[2]
    assert "(epoch 0)" in out
    assert torch.load(run / "checkpoints" / "best.ckpt")["global_step"] == 0
    assert 0 < probe["seconds"] < 300


def test_a_head_with_weights_is_not_replaced(fit, tmp_path):
    torch.save(Tiny(10).state_dict(), tmp_path / "x.pth")
    for flags in ([f"--model.weights={tmp_path}/x.pth"], FROZEN):
        assert record_of(fit(*FLAGS, *flags))["probe"] is None


def test_kept_statistics(fit, pretrained):
    """Training keeps BatchNorm's statistics by default, as those of the pretrained weights."""
    before = torch.load(pretrained.partition("=")[2])
    for flag, is_kept in (("auto", True), ("false", False)):
        run = fit(*FLAGS, pretrained, f"--model.keep_statistics={flag}")
        mean = weights(run)["network.features.1.running_mean"]
        assert torch.equal(mean, before["features.1.running_mean"]) == is_kept


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--model squeezenet1_1", "the last layer of SqueezeNet is not linear with a bias"),
        ("--model whitened", "the last layer of WhitenedCNN is not linear with a bias"),
    ],
)
def test_impossible_probe(app, flags, reason):
    message = app.error("fit", *FLAGS, *flags.split(), "--model.head=probe")
    assert message == f"error: --model.head probe: {reason}: leave the flag out"

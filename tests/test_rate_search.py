"""`--run.find_lr`: the training after the search is the one with the found rate given by hand."""

import math
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from forked import fork_fit
from harness import SLOW, difference, last_of, on_cpu, options, record_of, slow, tiny
from user_code import Tiny

from app.command.rate_search import GlobalLoss, valley
from app.modules import ImageClassifier

FIND = ["--run.find_lr=true"]
SMALL = options(max_epochs=1, test=False)
LINEAR = ["--model=exact_code.Linear", "--data=exact_code.Ordinary", "--data.count=160"]
LINEAR += [*SMALL, *options(global_batch=16)]


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ([5, 4, 6, 3, 2, 9], 0.03),  # 5, 4, 3, 2 is the longest descent
        ([float("nan"), 4, 3, float("nan")], 0.02),
        ([1.0, 0.99, 0.98, 3.0], None),  # 2 % are noise
        ([0.5, 1.0, 2.0], None),
    ],
)
def test_suggestion(losses, rate):
    rates = np.arange(1, len(losses) + 1) / 100
    assert valley(rates, np.array(losses)) == rate


@pytest.mark.parametrize(
    "way",
    [
        on_cpu("dp"),
        slow(on_cpu("ddp_fork")),
        slow(on_cpu("ddp")),
        slow(on_cpu("ddp_spawn")),
        slow(on_cpu("ddp", virtual_devices=3)),
        slow(on_cpu("auto", loop="lightning")),
    ],
    ids=" ".join,
)
def test_a_found_rate_is_like_one_given_by_hand(way, tmp_path):
    """The loss falls from the first rate, 1e-6, to the last one, 1."""
    found = fork_fit(tmp_path / "found", *LINEAR, *way, *FIND)
    record = record_of(found)
    assert record["found_lr"]["suggestion"] == record["lr"] == 0.001
    assert record["found_lr"]["loss"][0] == pytest.approx(math.log(3))  # of three classes
    assert "    lr: 0.5\n" in (found / "config.yaml").read_text(), "as typed"
    by_hand = fork_fit(tmp_path / "hand", *LINEAR, *way, "--model.lr=0.001")
    assert difference(found, by_hand) == 0


def test_a_search_that_finds_nothing_changes_no_bit(tmp_path):
    words = tiny(96, flip=True, crop_padding=2, mixup=0.3, accelerator="cpu")
    words += [*SMALL, "--model.schedule=cosine", "--model.ema=0.9"]
    searched = fork_fit(tmp_path / "a", *words, *FIND)
    assert record_of(searched)["found_lr"]["suggestion"] is None
    assert difference(searched, fork_fit(tmp_path / "b", *words)) == 0


@pytest.mark.parametrize("spec", [ImageClassifier, None])
def test_losses_of_a_search(spec, monkeypatch):
    """The mean over the ranks, from the head's first weights on; a skipped step has none."""
    seen = Mock()
    monkeypatch.setattr("app.command.rate_search.lr_finder._LRCallback.on_train_batch_end", seen)
    callback = GlobalLoss(9, None)
    module = Mock(spec=spec)
    if spec:
        module.configure_callbacks.return_value = [Mock()]
    callback.on_train_start(1, module)
    if spec:
        assert module.configure_callbacks()[0].on_train_start.mock_calls == [call(1, module)]
    trainer = Mock()
    trainer.strategy.reduce.return_value = 7
    for outputs in ({"loss": torch.ones(())}, None):
        callback.on_train_batch_end(trainer, module, outputs, None, 0)
    trainer.strategy.reduce.assert_called_once_with(torch.ones(()), reduce_op="mean")
    assert [args.args[2] for args in seen.mock_calls] == [{"loss": 7}, None]


@SLOW
def test_a_search_begins_with_the_fitted_head(tmp_path):
    """A fitted head has a lower loss than a random one from the first step on."""
    torch.manual_seed(0)
    torch.save(Tiny(1000).state_dict(), tmp_path / "x.pth")
    words = [*tiny(60, 30), "--model=ImageClassifier", "--model.network=user_code.Tiny", *SMALL]
    words += [f"--model.weights={tmp_path}/x.pth", "--model.freeze=backbone", *FIND]
    first = {}
    for head in ("probe", "random"):
        run = fork_fit(tmp_path, *words, f"--model.head={head}")
        first[head] = record_of(run)["found_lr"]["loss"][0]
    assert first["probe"] < 2.2
    assert first["random"] > 2.25


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model=user_code.TwoOptimizers"], "TwoOptimizers optimizes manually"),
        (["--model=user_code.TheirModel"], "there is no --model.optimizer.lr, --model.lr or"),
        ([*LINEAR, "--trainer.fast_dev_run=true"], "--trainer.fast_dev_run takes too few steps"),
    ],
)
def test_a_skipped_search_is_explained(words, reason, app):
    out = app("fit", "--data=user_code.TheirData", *words, *SMALL, *FIND)
    assert f"no search for a learning rate, because {reason}" in out


def test_a_resumed_run_keeps_its_rate(app, tmp_path):
    words = [*LINEAR, *FIND, "--run.name=a"]
    assert "--model.lr: 0.001 found, instead of 0.5\n" in app("fit", *words)
    run = tmp_path / "runs/a/version_0"
    words += [f"--ckpt_path={last_of(run)}", "--trainer.max_epochs"]
    app("fit", *words, "2")
    record = record_of(run)
    assert record["lr"] == record["epochs"][-1]["lr"] == 0.001
    out = app("fit", *words, "3", "--run.name=b")
    assert f"no search for a learning rate, because {last_of(run)} has one" in out

"""The exact loader (`--run.loader exact`), beside plain loops over the same samples."""

import random
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy as np
import pandas as pd
import pytest
import torch
from exact_code import Linear, samples
from forked import fork_app
from harness import QUIET, difference, last_of, on_cpu, options, record_of, refusals, slow
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, ChainDataset, DataLoader, Sampler, SequentialSampler

from app.data.exact_loader import (
    EvaluationSampler,
    Exactness,
    GlobalSampler,
    SeededItems,
    init_worker,
    why_not,
)
from app.errors import UserError

THEIRS = ["--model=exact_code.Linear", "--run.name=x", *QUIET]
THEIRS += options(enable_model_summary=True, accelerator="cpu", test=False, threads=1, max_epochs=2)


def fit(root, data, *flags, devices=1):
    """Train a module of `exact_code`; return the run's folder and the output.

    `data` is its data module, or the module if this has loaders of its own.
    """
    chosen = [f"--data=exact_code.{data}"]
    if data == "OwnLoaders":
        chosen = [f"--model=exact_code.{data}"]
    words = [*THEIRS, *chosen, f"--run.root={root}", *flags]
    if devices > 1:
        words += on_cpu("ddp_fork", devices)
    out = fork_app("fit", *words)
    return root / "x/version_0", out


def by_hand(batch, accumulate=1):
    """Train by a plain loop; return the weights, and validation loss and accuracy."""
    model = Linear()
    optimizer = model.configure_optimizers()
    vectors, labels = samples(36, 0).tensors
    for _ in range(2):
        for first in range(0, 36, batch * accumulate):
            window = slice(first, first + batch * accumulate)
            optimizer.zero_grad()
            cross_entropy(model(vectors[window]), labels[window]).backward()
            optimizer.step()
    vectors, labels = samples(23, 1).tensors
    scores = model(vectors)
    right = (scores.argmax(1) == labels).double().mean()
    return model.state_dict(), cross_entropy(scores, labels).item(), right.item()


CASES = {
    "one process": ("Ordinary", [], 1, (8, 1)),
    "batch per process": ("Ordinary", [], 2, (16, 1)),
    "batch over all": ("Ordinary", ["--run.global_batch=8"], 2, (8, 1)),
    "loaders of the module": ("OwnLoaders", [], 2, (16, 1)),
    "larger batch": ("Ordinary", ["--run.global_batch=16"], 1, (16, 1)),
    "unequal shares": ("Ordinary", ["--run.global_batch=9"], 2, (9, 1)),
    "divided by the module": ("DividesItself", [], 2, (8, 1)),
    "torch's DistributedSampler": ("Distributed", [], 2, (16, 1)),
    # 5 batches of 8, the last of 4: two steps, of 32 and of 4 samples
    "accumulated": ("Ordinary", ["--trainer.accumulate_grad_batches=4"], 1, (8, 4)),
    "accumulated on two": (
        "Ordinary",
        ["--trainer.accumulate_grad_batches=2", "--run.global_batch=8"],
        2,
        (8, 2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_trains_and_validates_like_a_plain_loop(case, tmp_path):
    data, flags, devices, plain = CASES[case]
    run, out = fit(tmp_path, data, *flags, devices=devices)
    expected, loss, accuracy = by_hand(*plain)
    assert difference(run, expected) <= 1e-6
    row = pd.read_csv(run / "metrics.csv").iloc[-1]
    assert row["val_loss"] == pytest.approx(loss, abs=1e-6)
    assert row["val_acc"] == pytest.approx(accuracy, abs=1e-7)
    record = record_of(run)
    assert record["global_batch_size"] == plain[0]
    assert f"batch      {plain[0]}{f' = 2 × {plain[0] / 2:g}' if devices > 1 else ''}\n" in out
    assert record["not_exact"] == []
    assert "not exact" not in out


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("data", ["Ordinary", "OwnBatches", "Delegates", "DropsLast", "TwoSets"])
def test_predicts_each_row_once(data, devices, tmp_path):
    expected = [samples(23, 1)]
    if data == "TwoSets":
        expected.append(samples(7, 2))
    run, _ = fit(tmp_path, "Ordinary", "--trainer.max_epochs=1")
    flags = [*THEIRS, f"--data=exact_code.{data}", f"--ckpt_path={last_of(run)}"]
    flags += ["--trainer.callbacks+=exact_code.Writer", f"--trainer.callbacks.folder={tmp_path}"]
    if devices > 1:
        flags += on_cpu("ddp_fork", devices)
    fork_app("predict", *flags, "--run.root", tmp_path)
    found = [{} for _ in expected]
    for rank in range(devices):
        predictions, indices = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        if len(expected) == 1:
            predictions = [predictions]
        for place, (outputs, batches) in enumerate(zip(predictions, indices, strict=True)):
            for output, rows in zip(outputs, batches, strict=True):
                assert not found[place].keys() & set(rows)
                found[place] |= dict(zip(rows, output.tolist(), strict=True))
    for rows, dataset in zip(found, expected, strict=True):
        assert [rows[index] for index in range(len(rows))] == dataset.tensors[0][:, 0].tolist()


@pytest.mark.parametrize("devices", [2, slow(3)])
@pytest.mark.parametrize(
    ("data", "count"), [("Delegates", 23), ("Delegates", 4), ("Delegates", 1), ("DropsLast", 23)]
)
def test_evaluates_each_sample_once(data, count, devices, tmp_path):
    """Also in batches of one sample. `drop_last` drops what it drops on one device.

    A single sample on several ranks is left to Lightning, which repeats it.
    """
    flags = [f"--data.validated={count}", "--run.global_batch=8"]
    rows = []
    for processes in (1, devices):
        run, _ = fit(tmp_path / str(processes), data, *flags, devices=processes)
        rows.append(pd.read_csv(run / "metrics.csv")[["val_loss", "val_acc"]].dropna())
    pd.testing.assert_frame_equal(*rows, rtol=1e-6)


@pytest.mark.parametrize("steps", [slow(3), slow(5), 7, slow(10)])
@pytest.mark.parametrize("devices", [1, slow(2)])
def test_resumes_with_workers(steps, devices, tmp_path):
    """Stopped in either epoch of 5 steps, or at an epoch's end: persistent workers read ahead."""
    flags = ["--data.train=workers", "--run.global_batch=8", "--trainer.max_epochs=3"]
    whole, _ = fit(tmp_path / "whole", "Ordinary", *flags)
    fit(tmp_path, "Ordinary", *flags, f"--trainer.max_steps={steps}", devices=devices)
    cut, _ = fit(tmp_path, "Ordinary", *flags, "--ckpt_path=last", devices=devices)
    assert record_of(cut)["steps"] == 15
    assert difference(cut, whole) <= 1e-6


class Endless(Sampler[int]):
    """Sampler of a user, without a length."""


class OwnSampler(SequentialSampler):
    """Sampler class of a user."""


SIX = samples(6, 0)
STREAM = "reads an iterable data set, which each process reads whole, unless it shards it"
LEFT = [  # loaders that stay with Lightning: the stage, its loader, and the reason
    ("train", DataLoader(SIX, sampler=Endless()), "has a sampler of its own (Endless)"),
    (
        "train",
        DataLoader(SIX, batch_sampler=BatchSampler(OwnSampler(SIX), 5, False)),
        "has a sampler of its own (OwnSampler)",
    ),
    ("train", DataLoader(ChainDataset([])), STREAM),
    ("val", DataLoader(SIX, sampler=Endless()), "has a sampler of its own (Endless)"),
    ("test", DataLoader(SIX, sampler=[0, 1]), "has a sampler of its own (list)"),
    ("predict", DataLoader(SIX, batch_sampler=[[0, 1], [2]] * 2), "has batches of several sizes"),
    ("predict", DataLoader(SIX, batch_sampler=[[0, 1], [2, 3], [4]]), None),
    ("predict", DataLoader(SIX, batch_sampler=[[0, 1]]), None),
    ("val", DataLoader(samples(1, 0)), "has fewer samples than there are ranks"),
    ("train", DataLoader(samples(1, 0)), None),
    ("predict", DataLoader(SIX, batch_sampler=[[0, 1], [2], [3]]), "has batches of several sizes"),
]


@pytest.mark.parametrize(("stage", "loader", "reason"), LEFT)
def test_loader_that_stays_with_lightning(stage, loader, reason):
    assert why_not(loader, stage, 2) == reason


ORDERS = [  # kind of loader, drop_last, settings; samples, global batch, and its parts
    ("train", False, {}, (5, 4, 2)),
    ("train", False, {"virtual_devices": 4}, (5, 8, 4)),
    ("train", True, {"global_batch": 5}, (5, 5, 2)),
    ("train", True, {"global_batch": 4, "virtual_devices": 4}, (5, 4, 4)),
    ("val", True, {"virtual_devices": 4}, (4, 4, 2)),  # drops what one process drops
    ("predict", True, {"virtual_devices": 4}, (5, 4, 2)),
]


@pytest.mark.parametrize(("name", "drop_last", "settings", "expected"), ORDERS)
def test_orders_by_hand(name, drop_last, settings, expected):
    """Five samples in batches of two, on two ranks."""
    exactness = Exactness(**{"virtual_devices": None, "global_batch": None, "seed": 0, **settings})
    trainer = Mock(world_size=2, global_rank=0, overfit_batches=0)
    source = SimpleNamespace(instance=exactness, name=f"{name}_dataloader")
    loader = DataLoader(samples(5, 0), batch_size=2, drop_last=drop_last)
    exact = exactness._exact(loader, trainer, source)
    exactness.global_batch = 1
    if name == "train":
        with pytest.raises(UserError, match="fewer samples than"):
            exactness._exact(loader, trainer, source)
    order = exact.batch_sampler
    assert (order.count, order.batch_size, order.parts) == expected
    assert exact.dataset is loader.dataset
    order.position = lambda: 1
    exact.load_state_dict(order.state_dict())
    with pytest.raises(
        UserError, match="in the middle of an epoch with seed 7, but this run has 0"
    ):
        exact.load_state_dict({**order.state_dict(), "seed": 7})


def test_an_order_begins_where_it_was_resumed(monkeypatch):
    """Only once. A rank without a sample reads the batch's first one."""
    settings = {"batch_size": 3, "rank": 2, "world_size": 3, "empty": "stand_in"}
    sampler = GlobalSampler(SequentialSampler(range(5)), **settings)
    monkeypatch.setattr(sampler, "position", lambda: 1)
    for resumes, steps in ((False, [[2], [3]]), (True, [[3]]), (False, [[2], [3]])):
        sampler.resumes = sampler.resumes or resumes
        found = [[index for index, _ in shards[0]] for shards in sampler]
        assert found == steps


def test_a_new_worker_has_the_users_data(monkeypatch):
    items = SimpleNamespace(dataset="theirs")
    info = SimpleNamespace(dataset=items)
    monkeypatch.setattr("app.data.exact_loader.get_worker_info", lambda: info)
    seen = []
    init_worker(lambda worker: seen.append((worker, info.dataset)), 3)
    init_worker(None, 4)
    assert seen == [(3, "theirs")]
    assert info.dataset is items


@pytest.mark.parametrize(
    ("is_uneven", "batches", "accumulated", "said"),
    [(False, 4, 2, 0), (False, 5, 2, 1), (True, 4, 2, 1)],
)
def test_smaller_batches_that_count_more(is_uneven, batches, accumulated, said, monkeypatch):
    order = MagicMock(spec=GlobalSampler, is_uneven=is_uneven)
    order.__len__.return_value = batches
    monkeypatch.setattr("app.data.exact_loader.order_of", lambda loader: order)
    exactness = Exactness(None, None, 0)
    exactness.on_train_start(Mock(accumulate_grad_batches=accumulated), Mock())
    assert len(exactness.exceptions) == said


def test_only_ranks_make_an_evaluation_inexact():
    source = SimpleNamespace(instance=SIX, name="val_dataloader")
    for world_size in (1, 2):
        exactness = Exactness(None, None, 0)
        trainer = Mock(world_size=world_size, overfit_batches=0)
        exactness._exact(DataLoader(SIX, sampler=Endless()), trainer, source)
        assert len(exactness.exceptions) == world_size - 1


class Draws:
    """Data set that draws from all random streams."""

    def __getitem__(self, index):
        return random.random(), np.random.rand(), float(torch.rand(()))


def test_each_sample_has_its_streams():
    """Draws depend on the sample's seed alone; the process's own streams go on."""
    (shards,) = GlobalSampler(SequentialSampler(range(99)), batch_size=99)
    assert len({seed for _, seed in shards[0]}) == 99
    before = torch.random.get_rng_state()
    ((first, same), (other,)) = SeededItems(Draws()).__getitems__([[(0, 5), (1, 5)], [(2, 6)]])
    assert first == same
    assert all(one != another for one, another in zip(first, other, strict=True))
    assert torch.equal(torch.random.get_rng_state(), before)


SHARES = [  # number of samples, global batch, and the samples of two ranks
    (9, 4, [[[0, 1], [4, 5], [7]], [[2, 3], [6], [8]]]),  # the last two batches share 5 samples
    (7, 3, [[[0, 1], [3, 4], [6]], [[2], [5]]]),
    (8, 4, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (5, 4, [[[0, 1], [3]], [[2], [4]]]),
]


@pytest.mark.parametrize(("count", "batch_size", "shares"), SHARES)
def test_shares_of_an_evaluation(count, batch_size, shares):
    for rank, expected in enumerate(shares):
        order = {"batch_size": batch_size, "rank": rank, "world_size": 2, "empty": "skip"}
        sampler = EvaluationSampler(SequentialSampler(range(count)), **order)
        assert [[index for index, _ in shards[0]] for shards in sampler] == expected


def test_what_is_not_exact_is_said(tmp_path):
    run, out = fit(tmp_path, "Combined", devices=2)
    line = (
        "not exact: Combined.train_dataloader returns CombinedLoader: a resumed epoch, or another "
        "number of processes, has another order"
    )
    assert out.count(line) == 1
    assert record_of(run)["not_exact"] == [line.removeprefix("not exact: ")]


@pytest.mark.parametrize("loader", ["exact", slow("lightning")])
def test_an_epoch_resumed_in_another_order_is_said(loader, tmp_path):
    """A loader that cannot continue within an epoch begins anew; an epoch's end is exact."""
    data = {"exact": "Combined", "lightning": "Ordinary"}[loader]
    line = "this epoch goes on in another order than before the stop: some samples come twice"
    for step, count in ((5, 0), (7, 0), (9, 1)):
        flags = [f"--run.loader={loader}", "--ckpt_path=auto", f"--trainer.max_steps={step}"]
        run, out = fit(tmp_path, data, *flags)
        assert out.count(f"not exact: {line}") == count
    assert record_of(run)["not_exact"][-1].startswith(line)
    assert "You're resuming" not in out
    _, out = fit(tmp_path / "e", "Ordinary", "--trainer.max_steps=7")
    assert line not in fit(tmp_path / "e", "Ordinary", "--ckpt_path=auto")[1]


REFUSED = {
    "--run.global_batch 1 --trainer.strategy ddp_fork --trainer.devices 2": (
        "--run.global_batch 1 has fewer samples than the 2 ranks: give 2 or more"
    ),
    "--data.drop_last true --data.batch_size 64": (
        "Ordinary.train_dataloader has no batch: drop_last drops its 36 samples, because a global "
        "batch has 64: use a smaller batch, or drop_last=False"
    ),
    "--run.global_batch 8 --data.train own_batches": (
        "--run.global_batch: Ordinary.train_dataloader has a batch sampler of its own (list), so "
        "its samples have no global order"
    ),
    "--run.loader lightning --run.global_batch 8": "--run.global_batch 8 needs --run.loader exact",
    "--run.global_order true": "did you mean --run.loader?",
}


test_is_refused = refusals(REFUSED, *THEIRS, "--data=exact_code.Ordinary")

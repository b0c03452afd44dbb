"""`--run.virtual_devices`: the same bits on any number of processes."""

import copy
import random
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torchmetrics
from exact_code import Linear, samples
from forked import fork_app, fork_fit
from harness import (
    QUIET,
    SLOW,
    difference,
    digest,
    free_port,
    last_of,
    on_cpu,
    options,
    refusals,
    slow,
    started,
    tiny,
    weights,
)
from lightning import LightningModule
from pandas import read_csv
from pandas.testing import assert_frame_equal
from plain_code import PlainModel
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from app.errors import UserError
from app.record import Record
from app.training.buffers import Buffers
from app.training.tree import Tree
from app.training.virtual_devices import Logged

SHARDED = tiny(90, 20, "CIFARCNN", virtual_devices=5, threads=1, flip=True)
SHARDED += options(max_epochs=3, test=False, log_every_n_steps=1)


def train(folder, flags, ranks, *more):
    """Run `fit` on `ranks` processes, and return the run's directory."""
    processes = options(strategy="ddp_fork" if ranks > 1 else "auto", devices=ranks)
    return fork_fit(folder, *flags, *processes, *more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Directory of a run on one process."""
    return train(tmp_path_factory.mktemp("alone"), SHARDED, 1)


WAYS = [("ddp", 1), ("ddp_fork", 3), slow("ddp", 2), slow("ddp_spawn", 2)]


@pytest.mark.parametrize(("strategy", "ranks"), WAYS)
def test_same_bits(alone, strategy, ranks, tmp_path):
    run = train(tmp_path, SHARDED, ranks, f"--trainer.strategy={strategy}")
    assert digest(run) == digest(alone)
    assert (run / "metrics.csv").read_text() == (alone / "metrics.csv").read_text()
    record = Record.load(run / "run.json")
    assert (record.virtual_devices, record.shards) == (5, {1: [5], 2: [2, 3], 3: [1, 2, 2]}[ranks])


@SLOW
def test_the_fast_recipe(tmp_path):
    """A run that stops on one process and resumes on two has an uninterrupted run's bits."""
    flags = ["--config=configs/speed/cifar10_cpu.yaml", "--model.warmup=1ep"]
    flags += tiny(90, 20, val_size=10, virtual_devices=4, threads=1, max_epochs=3, test=False)
    whole = train(tmp_path / "whole", flags, 1)
    first = train(tmp_path / "parts", flags, 1, "--trainer.max_steps=5")
    rest = train(tmp_path / "parts", flags, 2, "--ckpt_path", last_of(first))
    assert digest(rest) == digest(whole)


@SLOW
def test_elastic(alone, tmp_path):
    """A run has the same bits if it stops on three processes, resumes on two, and ends on one."""
    run = train(tmp_path, SHARDED, 3, "--trainer.max_steps=3")
    run = train(tmp_path, SHARDED, 2, "--trainer.max_steps=8", "--ckpt_path", last_of(run))
    run = train(tmp_path, SHARDED, 1, "--ckpt_path", last_of(run))
    assert digest(run) == digest(alone)


@SLOW
def test_a_restart_with_fewer_workers(tmp_path):
    """After torchrun loses one of two nodes, the other ends with an uninterrupted run's bits."""
    flags = [*SHARDED, "--trainer.max_epochs=20", "--last_checkpoint.every_n_train_steps=3"]
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-id=x",
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
        "--local-addr=127.0.0.1",
        "--rdzv-conf",
    ]
    agents = [[*torchrun, f"last_call_timeout=2,is_host={host}"] for host in (1, 0)]
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (
        started(tmp_path, *flags, launcher=agents[0], env=env) as kept,
        started(tmp_path, *flags, launcher=agents[1], env=env) as lost,
    ):
        kept.trained(random.randint(1, 5))
        lost.get("SIGKILL", "main")
        out = kept.end(180, code=0)
    assert (kept.record["shards"], len(kept.record["parts"])) == ([5], 1), out
    whole = train(tmp_path / "whole", flags, 1)
    assert digest(kept.directory) == digest(whole)


@pytest.mark.parametrize(("flag", "before"), [("virtual_devices", 5), ("threads", 1)])
def test_a_checkpoint_of_other_shards_or_threads(flag, before, alone, app):
    flags = [f"--run.{flag}=4", "--trainer.max_epochs=4", "--ckpt_path", last_of(alone)]
    assert f"give --run.{flag} {before}" in app.error("fit", *SHARDED, *flags)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_one_order_of_additions(count):
    """In any order of addition, the shards' sum has the same bits and includes every shard."""
    tree, values = Tree(count), torch.randn(count, generator=torch.Generator().manual_seed(1))
    sums = set()
    for _ in range(100):
        nodes = {}
        for shard in torch.randperm(count).tolist():
            tree.add(nodes, (0, shard), values[shard], torch.add)
        sums.add(nodes.pop(tree.root).item())
        assert not nodes
    (total,) = sums
    assert total == pytest.approx(values.sum().item(), abs=1e-5)


@pytest.mark.parametrize(("count", "ranks"), [(5, 2), (5, 3), (8, 3), (6, 5), (3, 3)])
def test_ranks_sum_like_one(count, ranks, monkeypatch):
    """Every rank has the bits of one process."""
    box = {}
    barrier = threading.Barrier(ranks, timeout=60)

    def exchange(sent, received, rank):
        for other, tensor in sent.items():
            box[rank, other] = tensor.clone()
        barrier.wait()
        for other, tensor in received.items():
            tensor.view(-1).copy_(box[other, rank])
        barrier.wait()

    def summed(rank, size):
        tree = Tree(count, rank, size, group=rank)
        nodes = {}
        for shard in tree.shards:
            tree.add(nodes, (0, shard), values[shard], torch.add)
        return tree.sum(nodes).tolist()

    monkeypatch.setattr("app.training.tree.exchange", exchange)
    values = torch.randn(count, 7, generator=torch.Generator().manual_seed(1))
    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(summed, range(ranks), [ranks] * ranks))
    assert results == [summed(0, 1)] * ranks


PLAIN = ["--model=plain_code.PlainModel", "--data=plain_code.PlainData", "--run.name=plain", *QUIET]
PLAIN += options(global_batch=16, test=False, threads=1, max_epochs=2, log_every_n_steps=1)


@pytest.fixture(scope="module", params=[slow("false"), "true"])
def plain(request, tmp_path_factory):
    """Flags for plain Lightning's module and loader, and the directory of a run on one process."""
    flags = [*PLAIN, "--run.virtual_devices=4", f"--data.weighted={request.param}"]
    return flags, train(tmp_path_factory.mktemp("plain"), flags, 1)


def test_anybodys_loader(plain, tmp_path):
    """A plain Lightning module has the same weights and logged losses on three processes as on one.

    The module has BatchNorm and dropout, and its data has random crops and colours.
    """
    flags, alone = plain
    run = train(tmp_path, flags, 3, "--data.num_workers=1")
    assert digest(run) == digest(alone)
    names = ["loss_step", "loss_epoch"]
    logged = read_csv(run / "metrics.csv")[names]
    assert_frame_equal(logged, read_csv(alone / "metrics.csv")[names], check_exact=True)


def test_anybodys_buffers(tmp_path):
    """InstanceNorm's statistics and a user's buffers have the same bits on one and three processes.

    Buffers that differ between shards are averaged.
    """
    flags = [*PLAIN, "--run.virtual_devices=4", "--model=plain_code.WithBuffers"]
    alone = train(tmp_path, flags, 1)
    assert digest(train(tmp_path, flags, 3)) == digest(alone)
    buffers = weights(alone)
    assert buffers["steps"] == 8, "two epochs of four steps"
    assert 0 < buffers["mean"] < 1


def test_anybodys_loader_resumed(plain, tmp_path):
    """A run that stops mid-epoch on two processes and ends on one has one process's weights."""
    flags, alone = plain
    part = train(tmp_path, flags, 2, "--trainer.max_steps=4")
    run = train(tmp_path, flags, 1, "--ckpt_path", last_of(part))
    assert digest(run) == digest(alone)


@pytest.mark.parametrize("accumulated", [slow(1), 2])
def test_shares_without_virtual_devices(accumulated, tmp_path):
    """Without virtual devices, two ranks have the weights of one, also with a smaller last batch.

    Each rank's mean loss is weighted by its share, and a rank without a sample takes part.
    """
    flags = [*PLAIN, "--data.size=10", "--run.global_batch=9", "--model.normalized=false"]
    flags += options(enable_model_summary=True, accumulate_grad_batches=accumulated)
    assert difference(train(tmp_path, flags, 1), train(tmp_path, flags, 2)) <= 1e-6


THEIRS = "--model plain_code.PlainModel --data plain_code.PlainData"
REFUSED = {
    "--trainer.strategy dp --trainer.devices 2": "use --trainer.strategy ddp",
    "--trainer.strategy ddp --trainer.devices 6": "each process needs a shard: give 6 or more",
    "--data.batch_size 4": "a global batch of 4 has fewer samples than shards: give 4 or less",
    "--data.batch_size 0.03": "a global batch of 3 has fewer samples than shards: give 3 or less",
    "--model user_code.Unrepeatable --trainer.deterministic true": (
        "put_ does not have a deterministic implementation"
    ),
    "--trainer.benchmark true": (
        "with --trainer.benchmark: cuDNN would ignore determinism: leave it out"
    ),
    "--trainer.deterministic warn": "with --trainer.deterministic warn: give true, or leave it out",
    "--trainer.deterministic false": (
        "with --trainer.deterministic false: give true, or leave it out"
    ),
    "--run.loop lightning": "only the straight loop has shards",
    "--trainer.profiler simple": "does not work with a profiler",
    "--run.loader lightning": "has no effect on app.data.Synthetic, which is exact",
    "--run.global_batch 20": "the global batch of app.data.Synthetic is --data.batch_size",
}
# beside a user's module and loaders
REFUSED_OF_USERS = {
    "--model user_code.TwoOptimizers --data user_code.TheirData": (
        "does not work with manual optimization"
    ),
    f"{THEIRS} --run.loader lightning": "needs --run.loader exact",
    f"{THEIRS} --run.global_batch 3": "give 3 or less",
    "--model exact_code.Linear --data exact_code.Ordinary --data.train own_batches": (
        "--run.virtual_devices: Ordinary.train_dataloader has a batch sampler of its own (list), so"
    ),
}


test_what_cannot_be_sharded = refusals(REFUSED, *SHARDED)
test_code_of_a_user_that_cannot_be_sharded = refusals(REFUSED_OF_USERS, "--run.virtual_devices=5")


class Normalized(Linear):
    """Linear classifier of normalized vectors, with their moving mean.

    It logs the loss that callbacks get, and the largest number of a batch.
    """

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, vectors):
        self.mean = 0.9 * self.mean + 0.1 * vectors.mean(0)
        twice = self.norm(torch.cat((vectors, vectors)))  # one sample has no variance
        return self.layer(twice[: len(vectors)])

    def training_step(self, batch, batch_idx):
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True)
        return {"loss": super().training_step(batch, batch_idx)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("loss", outputs["loss"], on_step=False, on_epoch=True)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_shards_by_hand(accumulated, fit):
    """Each shard starts from the same buffers; its values are weighed by its samples."""
    flags = [*QUIET, "--model=test_virtual_devices.Normalized", "--data=exact_code.Ordinary"]
    flags += options(count=28, global_batch=9, test=False, max_epochs=2, virtual_devices=2)
    flags += options(accumulate_grad_batches=accumulated, limit_val_batches=0)
    run = fit(*flags)
    model = Normalized()
    optimizer = model.configure_optimizers()
    batches = list(DataLoader(samples(28, 0), 9))
    for epoch in range(2):
        means = {"loss": 0.0, "largest": 0.0}
        for first in range(0, 4, accumulated):
            window = batches[first : first + accumulated]
            total = sum(len(labels) for _, labels in window)
            optimizer.zero_grad()
            for vectors, labels in window:
                before = copy.deepcopy(dict(model.named_buffers()))
                after = dict.fromkeys(before, 0.0)
                for x, y in zip(vectors.tensor_split(2), labels.tensor_split(2), strict=True):
                    if not len(y):  # the last batch is a single sample
                        continue
                    model.load_state_dict(before, strict=False)
                    loss = cross_entropy(model(x), y, reduction="sum")
                    loss.div(total).backward()
                    for name, buffer in model.named_buffers():
                        after[name] += buffer.double() * len(y) / len(labels)
                    means["loss"] += loss.item() / accumulated / 28
                    means["largest"] += x.max().item() * len(y) / 28
                model.load_state_dict(after, strict=False)
            optimizer.step()
        logged = read_csv(run / "metrics.csv")[[*means]].dropna()
        assert dict(logged.iloc[epoch]) == pytest.approx(means)
    torch.testing.assert_close(weights(run), dict(model.state_dict()), rtol=0, atol=1e-6)


DRAWN = []


class DrawsTwice(Linear):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        DRAWN.append(torch.rand(()).item())
        return batch

    def training_step(self, batch, batch_idx):
        DRAWN.append(torch.rand(()).item())
        return super().training_step(batch, batch_idx)


def test_logged_values(monkeypatch):
    """Means are kept, in float64 and without sync_dist; a metric is logged at once."""
    monkeypatch.setattr(LightningModule, "log", Mock())
    logged = Logged(Mock())
    logged.log("loss", 2.0, True, sync_dist=True)
    assert logged.values == {"loss": 2.0}
    assert logged.options == {"loss": {"prog_bar": True, "sync_dist": False}}
    assert not LightningModule.log.called
    logged.log("acc", torchmetrics.MeanMetric(), on_epoch=True)
    assert LightningModule.log.call_args.kwargs == {"on_epoch": True}
    with pytest.raises(UserError, match="training_step logs only means"):
        logged.log("most", 2.0, reduce_fx="max")


def test_each_shard_has_its_streams(fit):
    """One for its batch's hooks, and one for its step."""
    flags = [*QUIET, "--model=test_virtual_devices.DrawsTwice", "--data=exact_code.Ordinary"]
    settings = options(count=28, global_batch=9, test=False, max_epochs=2, limit_val_batches=0)
    fit(*flags, *settings, *options(virtual_devices=2))
    assert len(set(DRAWN)) == len(DRAWN) == 32, "two in 2 shards of 4 steps of 2 epochs"


def test_buffers_of_a_step():
    """States of metrics accumulate over shards; each shard starts from the same other buffers."""
    module = Normalized()
    module.accuracy = torchmetrics.classification.BinaryAccuracy()
    buffers = Buffers(module)
    assert buffers.names[:2] == ["mean", "norm.running_mean"]
    assert len(buffers.names) == 4
    buffers.save()
    module.norm(torch.rand(2, 4))
    assert buffers.changed() == [1, 2, 3]
    module.mean.add_(1)
    assert buffers.changed() == [0, 1, 2, 3]
    buffers.restore([0, 1])
    assert buffers.changed() == [1, 2, 3]
    assert module.mean.sum() == module.norm.running_mean.sum() == 0


class LogsItsOwn(PlainModel):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch[0]).sum())


def test_a_value_of_a_rank(tmp_path):
    """Lightning advises sync_dist for validation_step's logged value, not for training_step's."""
    flags = [*THEIRS.split(), "--model=test_virtual_devices.LogsItsOwn", *QUIET]
    flags += on_cpu("ddp_fork", root=tmp_path, max_epochs=1, virtual_devices=2, test=False)
    assert set(re.findall(r"self.log\('(\w+)'", fork_app("fit", *flags))) == {"val_loss"}


def test_an_integer_that_differs_between_shards(app):
    flags = tiny(40, 8, "user_code.CountsLabels", max_steps=1, virtual_devices=2)
    message = (
        "training_step sets the buffer seen, of torch.int64, to different values on the shards"
    )
    assert message in app.error("fit", *flags)


def test_shards_that_log_in_another_order(fit):
    settings = options(max_epochs=1, test=False, virtual_devices=2, log_every_n_steps=1)
    run = fit(*tiny(40, 8, "user_code.LogsInAnyOrder"), *settings)
    logged = read_csv(run / "metrics.csv")[["first", "second"]].dropna()
    assert logged.to_numpy().tolist() == [[5, 6]] * 5

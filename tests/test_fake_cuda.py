"""CUDA code without a GPU: whole runs on fake tensors, and single ranks of large worlds."""

import gc
import random
import sys
import weakref
from collections import Counter
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from harness import RECIPE, last_of, options, record_of, slow, tiny
from test_cost import Counting
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from app.command.checkpoint_file import CheckpointFiles
from app.data.batches import GlobalBatches, HostReader, ImageOrder
from app.data.sources import Split
from app.training import tree, virtual_devices
from app.training.comm_hooks import ring_all_reduce, ring_hook

__all__ = ["fake_cuda"]


# per epoch: 4 batches, of which the last is smaller, and two logging windows
ON_FAKE = tiny(
    60, 16, val_size=4, max_epochs=2, log_every_n_steps=2, accelerator="cuda", devices=1, test=False
)
AUGMENTED = options(flip=True, crop_padding=4, cutout=8)
MIXED = options(mixup=0.4, cutmix=1.0)
CLIPPED = options(gradient_clip_val=1)
ADAMW = ["--model.optimizer=AdamW", "--model.optimizer.lr=0.1"]
SGD = ["--model.optimizer=SGD", "--model.optimizer.lr=0.1"]
UNFUSED = ["--model.optimizer.fused=false"]
CASES = {
    "32-true SGD device": AUGMENTED,
    "32-true AdamW memory": [*ADAMW, *CLIPPED, *MIXED],
    "16-mixed SGD memory": AUGMENTED,
    "16-mixed AdamW device": [*ADAMW, *CLIPPED, *MIXED],
    "bf16-mixed AdamW memory": ADAMW,
    "bf16-true SGD memory": [*SGD, *UNFUSED, *CLIPPED, *AUGMENTED],
    "bf16-true AdamW device": [*ADAMW, *UNFUSED, *MIXED],
    "32-true AdamW device": [*ADAMW, *options(virtual_devices=4), *AUGMENTED],
    "bf16-mixed AdamW device": [*RECIPE, *AUGMENTED],
}


FIRST = [slow(case) if "true" in case else case for case in CASES]


@pytest.mark.parametrize("case", FIRST)
def test_a_step_never_waits_for_the_gpu(case, fake_cuda, fit):
    """Only the last step of a logging window makes the host wait, at most five times.

    Lightning's LearningRateMonitor then also copies each of up to four rates to the GPU. In other
    steps, the host waits only if float16's loss scaler is used with clipping, and then
    once per step.
    """
    precision, _, placement = case.split()
    flags = [*CASES[case], *options(precision=precision, placement=placement)]
    record = record_of(fit(*ON_FAKE, *flags))
    assert (record["peak_memory"][0]["device"], record["placement"]) == ("cuda:0", placement)
    reads_of_scaler = fake_cuda.counts["step"] * (precision == "16-mixed" and CLIPPED[0] in flags)
    assert sum(fake_cuda.at("step").values()) == reads_of_scaler, fake_cuda.at("step")
    waits = fake_cuda.at("window")
    copies = 0
    for (_, kind), count in waits.items():
        if kind == "blocking copy to the device":
            copies += count
    windows = fake_cuda.counts["window"]
    assert sum(waits.values()) - copies <= 5 * windows, waits
    assert copies <= 4 * windows, waits


def test_evaluation_on_a_gpu(fake_cuda, app, tmp_path):
    """The test's confusion matrix and predictions are written; Lightning prints no advice.

    Checkpoints are saved while the next batch is copied.
    """
    flags = [*options(test=True, placement="memory"), "--last_checkpoint.every_n_train_steps=1"]
    out = app("fit", *ON_FAKE, *flags, "--run.name=x")
    assert "Tensor Cores" not in out
    assert "LOCAL_RANK" not in out
    run = tmp_path / "runs/x/version_0"
    assert record_of(run)["test"] is not None
    assert (run / "confusion_matrix.png").exists()
    flags = ["--config", run / "config.yaml", "--ckpt_path", last_of(run), "--run.name=y"]
    app("predict", *flags)
    (predictions,) = (tmp_path / "runs/y").glob("*/predictions.csv")
    assert len(predictions.read_text().splitlines()) > 1


@contextmanager
def rank_of(size, rank):
    """Be one rank of a process group whose other ranks do not exist."""
    distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def bucket_of(layer):
    """Return a layer's gradients as a bucket of DDP."""
    parameters = list(layer.parameters())
    buffer = torch.cat([torch.zeros_like(parameter).flatten() for parameter in parameters])
    return SimpleNamespace(
        buffer=lambda: buffer, parameters=lambda: parameters, is_last=lambda: False
    )


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(("count", "size"), [(8, 3), (8, 5), (6, 2), (6, 4), (7, 6), (None, 3)])
def test_streams_wait_for_each_other(count, size, backend, fake_cuda, monkeypatch):
    """Gradient averages over `count` virtual devices, or in a ring, race on no rank.

    gloo gets host memory only.
    """
    monkeypatch.setattr(distributed, "get_backend", lambda *_: backend)
    monkeypatch.setattr(virtual_devices, "DistributedDataParallel", SimpleNamespace)
    for rank in range(size):
        with rank_of(size, rank), FakeTensorMode():
            network = nn.Sequential(nn.Linear(4, 3, device=CUDA), nn.Linear(3, 2, device=CUDA))
            model = SimpleNamespace(process_group=None, register_comm_hook=lambda *_: None)
            strategy = SimpleNamespace(
                model=model, root_device=CUDA, global_rank=rank, world_size=size
            )
            hook = partial(ring_hook, Counter())
            if count is not None:
                sums = virtual_devices.ShardSums(network, strategy, count)
                hook = partial(sums._add_bucket, None)
                for shard in sums.tree.shards[:-1]:
                    network(torch.ones(2, 4, device=CUDA)).sum().backward()
                    sums.add_shard(shard)
            buckets = [bucket_of(layer) for layer in reversed(network)]
            averages = [hook(bucket) for bucket in buckets]
            for average in averages:
                average.wait().mul_(2)


def test_a_model_is_freed():
    """A live run wraps its model in DDP after each change of the ranks; no earlier one stays."""
    with rank_of(1, 0):
        network = nn.Linear(3, 2)
        model = nn.parallel.DistributedDataParallel(network)
        strategy = SimpleNamespace(
            model=model, root_device=torch.device("cpu"), global_rank=0, world_size=1
        )
        virtual_devices.ShardSums(network, strategy, 2)
        kept = weakref.ref(model)
        del model, strategy
        gc.collect()
        assert kept() is None


def read_too_early(side):
    values = torch.zeros(2, device=CUDA)
    with torch.cuda.stream(side):
        values + 1


def freed_too_early(side):
    values = torch.zeros(2, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values + 1
    del values
    torch.zeros(2, device=CUDA)


def timed_too_early(_):
    began = torch.cuda.Event(enable_timing=True)
    began.record()
    torch.zeros(2, device=CUDA)
    ended = torch.cuda.Event(enable_timing=True)
    ended.record()
    began.elapsed_time(ended)


def saved_too_early(_):
    pinned = torch.zeros(2).pin_memory()
    pinned.copy_(torch.zeros(2, device=CUDA), non_blocking=True)
    CheckpointFiles().save_checkpoint({"state": pinned}, "never.ckpt")


def overwritten_too_early(side):
    pinned = torch.zeros(2).pin_memory()
    pinned.to(CUDA, non_blocking=True)
    pinned.zero_()


RACES = [read_too_early, freed_too_early, overwritten_too_early, timed_too_early, saved_too_early]


@pytest.mark.parametrize("race", RACES)
def test_races_are_found(race, fake_cuda):
    with FakeTensorMode(), pytest.raises(AssertionError, match=r"another stream|too early"):
        race(torch.cuda.Stream())


def calls_of(size, run, monkeypatch):
    """Return each rank's groups of point-to-point calls."""
    ranks = []

    def batch(operations):
        group = []
        for each in operations:
            group.append((each.op is distributed.isend, each.peer, each.tensor.numel()))
        ranks[-1].append(group)
        return []

    monkeypatch.setattr(distributed, "batch_isend_irecv", batch)
    for rank in range(size):
        with rank_of(size, rank):
            ranks.append([])
            run(rank)
    return ranks


def ends(ranks):
    """Return whether all calls end under NCCL.

    A rank's groups run one after the other. A group's calls run at once, and end together. A pair's
    sends and receives match in order.
    """
    while any(ranks):
        now = [groups[0] if groups else [] for groups in ranks]
        matches = 0
        for rank, group in enumerate(now):
            for sends, peer, length in [*group]:
                other = [call for call in now[peer] if call[:2] == (not sends, rank)]
                if other:
                    assert other[0][2] == length
                    group.remove((sends, peer, length))
                    now[peer].remove(other[0])
                    matches += 1
        if not matches:
            return False
        ranks = [[group for group in groups if group] for groups in ranks]
    return True


@pytest.mark.parametrize("size", range(2, 9))
def test_point_to_point_calls_end(size, monkeypatch):
    """The tree, for any share of the shards, and the ring neither block nor mix up their calls."""
    draw = random.Random(size)
    for length in (1, size, 3 * size + 1):
        vector = torch.zeros(length)
        assert ends(calls_of(size, lambda _, vector=vector: ring_all_reduce(vector), monkeypatch))
        for _ in range(20):
            shares = [draw.randint(1, 4) for _ in range(size)]
            monkeypatch.setattr(tree, "equal_shares", lambda *_, shares=shares: shares)

            def add(rank, shares=shares, vector=vector):
                ours = tree.Tree(sum(shares), rank, size)
                ours.sum(dict.fromkeys(ours.partial_sums(ours.shards), vector))

            assert ends(calls_of(size, add, monkeypatch))


def test_blocked_calls_are_found():
    send = (True, 1, 4)
    receive = (False, 1, 4)
    other_send = (True, 0, 4)
    other_receive = (False, 0, 4)
    assert not ends([[[send], [receive]], [[other_send], [other_receive]]])
    assert ends([[[send, receive]], [[other_send, other_receive]]])
    with pytest.raises(AssertionError):
        ends([[[(True, 1, 3)]], [[other_receive]]])


def cost_of_a_rank(size):
    """Return the Python calls and operations with which the last rank reads its first batch."""
    calls = 0

    def profile(*_):
        nonlocal calls
        calls += 1

    rows = torch.arange(4200)
    split = Split(torch.zeros(4200, 3, 32, 32, dtype=torch.uint8), rows % 10)
    try:
        with Counting() as counting:
            sys.setprofile(profile)
            order = ImageOrder(rows, shuffle=True, batch_size=2048, rank=size - 1, world_size=size)
            next(iter(GlobalBatches(order, HostReader(split, rows))))
    finally:
        sys.setprofile(None)
    return calls, counting.counts


def test_a_rank_of_many_costs_the_same():
    cost_of_a_rank(64)  # the first call also imports modules
    assert cost_of_a_rank(64) == cost_of_a_rank(1024)

"""Shares of global batches, and the work of loader workers."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cluster.hosts import awaited
from forked import fork_fit
from harness import SLOW, on_cpu, options, tiny
from torch import nn

from app.data.batches import (
    DeviceReader,
    DiskReader,
    GlobalBatches,
    HostReader,
    ImageOrder,
    RawBatch,
    ReadImage,
    _stacked,
)
from app.data.shares import GlobalOrder, stream
from app.data.sources import Split
from app.data.transforms import DRAW_RANGE, FLIP
from app.errors import UserError

TWO_STEPS = options(max_steps=2, max_epochs=1)


def split(count):
    """A split whose images differ in the first pixel."""
    labels = torch.arange(count)
    return Split(labels.byte().view(-1, 1, 1, 1).repeat(1, 1, 4, 4), labels)


READERS = {
    "disk": lambda split, rows: DiskReader(ReadImage(split), rows),
    "memory": HostReader,
    "device": lambda split, rows: DeviceReader(split, rows, torch.device("cpu")),
}


def loader(rows, placement="memory", draws=0, alternate=False, **order):
    """Return a loader of some rows of a split of 50."""
    rows = torch.arange(rows) if isinstance(rows, int) else rows
    reader = READERS[placement](split(50), rows)
    return GlobalBatches(ImageOrder(rows, **order), reader, draws, alternate)


@pytest.mark.parametrize("placement", READERS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_every_global_batch(placement, world_size, shuffle):
    rows = torch.arange(3, 40)  # 37 samples: batches of 8, the last one of 5
    order = {"batch_size": 8, "shuffle": shuffle, "seed": 5}
    reference = loader(rows, draws=2, **order)
    loaders = []
    for rank in range(world_size):
        loaders.append(loader(rows, placement, 2, rank=rank, world_size=world_size, **order))
    for epoch in (0, 1):
        for one in (*loaders, reference):
            one.set_epoch(epoch)
        steps = list(zip(*loaders, strict=True))
        assert len(steps) == len(reference) == 5
        for step, (shares, whole) in enumerate(zip(steps, reference, strict=True)):
            for field in ("images", "labels", "draws"):
                joined = torch.cat([getattr(share, field) for share in shares])
                assert torch.equal(joined, getattr(whole, field))
            sizes = [len(share.labels) for share in shares]
            assert max(sizes) - min(sizes) <= 1
            assert sum(sizes) == reference.order.global_count(step)
            assert torch.equal(whole.images[:, 0, 0, 0].long(), whole.labels)
        assert sorted(torch.cat([batch.labels for batch in reference]).tolist()) == rows.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("accumulated", [1, 2, 3])
@pytest.mark.parametrize("virtual_devices", [None, 4])
def test_weighted_losses_are_means_over_optimizer_steps(world_size, accumulated, virtual_devices):
    """Weighted losses of ranks and batches sum to a plain loop's mean, even in a short batch."""
    count = 22
    losses = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = SimpleNamespace(
        accumulate_grad_batches=accumulated, fit_loop=SimpleNamespace(max_batches=5)
    )
    sums = {}
    for rank in range(world_size):
        order = GlobalOrder(
            count, 5, rank=rank, world_size=world_size, virtual_devices=virtual_devices
        )
        for step in range(len(order)):
            window = step // accumulated
            if virtual_devices is None:
                share = losses[order.span(step)]
                mean = share.sum() / max(len(share), 1)
                weighted = mean * order.loss_weight(trainer, step, len(share))
                summed = share.sum() * order.loss_weight(trainer, step)  # as ImageClassifier does
                assert summed == pytest.approx(weighted)
                weighted = weighted / world_size / accumulated  # by DDP and Lightning
            else:
                weighted = torch.zeros(())
                for start, end in itertools.pairwise(order.bounds(step)):
                    mean = losses[start:end].sum() / max(end - start, 1)
                    weighted = weighted + mean * order.loss_weight(trainer, step, end - start)
            sums[window] = sums.get(window, 0.0) + float(weighted)
    means = [window.mean().item() for window in losses.split(5 * accumulated)]
    assert list(sums.values()) == pytest.approx(means)


def test_even_shares():
    assert not GlobalOrder(8, 4, world_size=2).is_uneven
    assert GlobalOrder(8, 4, world_size=3).is_uneven
    assert GlobalOrder(9, 4, world_size=2).is_uneven
    assert not GlobalOrder(9, 4, drop_last=True, world_size=2).is_uneven
    assert GlobalOrder(7, 7, virtual_devices=3).shards([], 0).counts == [3, 2, 2]


def test_places_by_hand():
    """The last sample is mixed with the first; a rank without a sample reads the first."""
    settings = {"batch_size": 4, "world_size": 2, "empty": "stand_in"}
    first = ImageOrder(torch.arange(5), rank=0, **settings)
    second = ImageOrder(torch.arange(5), rank=1, **settings)
    assert first.place(0) == (slice(0, 2), None)
    assert first.place(0, is_mixed=True) == (slice(0, 2), slice(2, 3))
    assert second.place(0, is_mixed=True) == (slice(2, 4), slice(0, 1))
    assert second.place(1) == (slice(4, 5), None)
    assert GlobalOrder(8, 8, virtual_devices=4, rank=1, world_size=2).span(0) == slice(4, 8)


def test_shards_of_a_mixed_batch():
    """Each has the next shard's first sample, too, but an empty shard has none."""
    order = SimpleNamespace(bounds=lambda step: [4, 6, 6, 7], shards=lambda shards, step: shards)
    batch = RawBatch(torch.arange(4, 8), torch.arange(4, 8), None, object())
    shards = GlobalBatches._cut(SimpleNamespace(order=order), batch, 0)
    assert [shard.images.tolist() for shard in shards] == [[4, 5, 6], [], [6, 7]]


def test_no_images_are_an_empty_batch():
    assert _stacked((3, 2, 2), []).shape == (0, 3, 2, 2)


def test_an_augmentation_may_write():
    images = split(2)
    before = images[1].clone()
    assert not ReadImage(images, augment=[nn.Dropout(1.0, inplace=True).double()])((1, 0)).any()
    assert torch.equal(images[1], before)
    with pytest.raises(UserError, match=r"Flatten turns torch.uint8 \(1, 4, 4\) into .* \(1, 16\)"):
        ReadImage(images, augment=[nn.Flatten()])((1, 0))


def test_workers_end_after_a_stage():
    workers = SimpleNamespace(_iterator=object())
    for given in (workers, None):
        batches = SimpleNamespace(reader=SimpleNamespace(workers=given))
        GlobalBatches._iterator.fset(batches, None)
    assert workers._iterator is None


@pytest.mark.parametrize(
    ("one_by_one", "ranks", "batches"),
    [
        (False, 1, [[0, 1, 2, 3, 4]]),
        (True, 1, [[0, 1], [2, 3], [4]]),
        (True, 2, [[0, 1], []]),  # the other rank has two shards
    ],
)
def test_shards_of_an_evaluation(one_by_one, ranks, batches):
    rows = torch.arange(5)
    split = Split(torch.zeros(5, 1, 2, 2, dtype=torch.uint8), rows)
    order = ImageOrder(rows, batch_size=5, virtual_devices=3, world_size=ranks)
    loader = GlobalBatches(order, HostReader(split, rows), one_by_one=one_by_one)
    assert [loader.samples(index).tolist() for index in range(len(loader))] == batches


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_flips_alternate_on_any_number_of_ranks(world_size):
    loaders = []
    for rank in range(world_size):
        order = {"batch_size": 6, "shuffle": True, "rank": rank, "world_size": world_size}
        loaders.append(loader(40, draws=5, alternate=True, **order))
    first = torch.randint(2, (40,), generator=stream(0, 5))
    for epoch in range(3):
        batches = []
        for one in loaders:
            one.set_epoch(epoch)
            batches += one
        order_of_labels = torch.cat([batch.labels for batch in batches]).argsort()
        draws = torch.cat([batch.draws for batch in batches])[order_of_labels, FLIP]
        assert torch.equal(draws >= DRAW_RANGE // 2, (first + epoch) % 2 == 1)


def test_each_epoch_has_its_permutation():
    order = ImageOrder(torch.arange(50), batch_size=50, shuffle=True)
    seen = []
    for epoch in (0, 1, 0):
        order.set_epoch(epoch)
        seen.append(order.permutation().tolist())
    assert seen[1] != seen[0] == seen[2]


@pytest.mark.parametrize("placement", READERS)
def test_loader_resumes_at_the_position(placement):
    order = {"batch_size": 8, "shuffle": True}
    expected = [batch.labels.tolist() for batch in loader(50, placement, **order)]
    rest = loader(50, placement, position=lambda: 4, **order)
    assert [batch.labels.tolist() for batch in rest] == expected[4:]


class Scramble(nn.Module):
    """Adds random numbers of torch and NumPy to an image."""

    def forward(self, image):
        return image + torch.randint(50, (1,), dtype=torch.uint8) + np.random.randint(50)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_augment_alike_whatever_the_world_size(num_workers):
    def epochs(rank, world_size):
        rows = torch.arange(20)
        order = ImageOrder(rows, batch_size=8, rank=rank, world_size=world_size)
        read = ReadImage(split(20), augment=[Scramble()])
        reader = DiskReader(read, rows, num_workers=num_workers)
        batches = GlobalBatches(order, reader)
        made = []
        for epoch in range(2):
            batches.set_epoch(epoch)
            made += [batch.images[:, 0, 0, 0] for batch in batches]
        return made

    state = torch.get_rng_state()
    alone = epochs(0, 1)
    assert len({int(value) for batch in alone for value in batch}) > 20, "it does augment"
    assert not torch.equal(alone[0], alone[3]), "each epoch differently"
    for whole, *shares in zip(alone, epochs(0, 2), epochs(1, 2), strict=True):
        assert torch.equal(torch.cat(shares), whole)
    assert torch.equal(torch.get_rng_state(), state), "global random state is left alone"


@SLOW
def test_augmentation_that_cannot_be(app):
    flags = [*tiny(80), *TWO_STEPS, "--data.augment"]
    elastic = "torchvision.transforms.v2.ElasticTransform"
    assert "--data.placement disk, not memory" in app.error(
        "fit", *flags, elastic, "--data.placement=memory"
    )
    flags += ["torchvision.transforms.v2.Resize", "--data.augment.size=7", "--data.num_workers"]
    line = app.error("fit", *flags, "2")
    assert "--data.augment Resize turns torch.uint8 (3, 32, 32) into torch.uint8 (3, 7, 7)" in line


@SLOW
def test_spawned_processes_have_workers(tmp_path):
    flags = tiny(80, placement="disk", num_workers=1, test=False)
    fork_fit(tmp_path, *flags, *TWO_STEPS, *on_cpu("ddp_spawn"))


def test_drop_last():
    batches = loader(20, batch_size=8, drop_last=True)
    assert [len(batch.labels) for batch in batches] == [8, 8]


def test_batches_for_an_accelerator_are_pinned_and_one_ahead(monkeypatch):
    """Images, labels and draws are copied once, into page-locked memory.

    They are copied while the previous batch is in use.
    """
    pinned = []

    def without(make):
        def made(*args, pin_memory=False, **kwargs):
            out = make(*args, **kwargs)
            if pin_memory:
                pinned.append(out.shape)
            return out

        return made

    for name in ("empty", "randint"):  # only record `pin_memory`: page-locking needs a driver
        monkeypatch.setattr(torch, name, without(getattr(torch, name)))
    rows = torch.arange(3, 40)
    order = ImageOrder(rows, batch_size=8, shuffle=True)
    reference = GlobalBatches(order, HostReader(split(50), rows), draws=2)
    batches = iter(GlobalBatches(order, HostReader(split(50), rows, pins=True), draws=2))
    for ready, expected in zip((2, 3, 4, 5, 5), reference, strict=True):
        batch = next(batches)
        for field in ("images", "labels", "draws"):
            assert torch.equal(getattr(batch, field), getattr(expected, field))
        awaited(lambda ready=ready: len(pinned) >= 2 + ready, 20)
    assert next(batches, None) is None
    assert pinned == [(37, 2), (37,), *((n, 1, 4, 4) for n in (8, 8, 8, 8, 5))]

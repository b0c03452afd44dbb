"""Shares of global batches, and the work of loader workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster.hosts import awaited
from harness import App, error_of, fork_app, on_cpu, options, output_of, tiny
from torch import Tensor, nn

from app.data.batches import GlobalBatches
from app.data.shares import stream
from app.data.sources import Split
from app.data.transforms import DRAW_RANGE, FLIP

TWO_STEPS = options(max_steps=2, max_epochs=1)


def split(count: int) -> Split:
    """A split whose images differ in the first pixel."""
    images = (
        torch.arange(count, dtype=torch.uint8)[:, None, None, None]
        .expand(count, 1, 4, 4)
        .contiguous()
    )
    return Split(images, torch.arange(count))


@pytest.mark.parametrize("placement", ["disk", "memory", "device"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_every_global_batch(placement: str, world_size: int, shuffle: bool) -> None:
    rows = torch.arange(3, 40)  # 37 samples: batches of 8, the last one of 5
    kwargs: dict[str, Any] = {"batch_size": 8, "shuffle": shuffle, "seed": 5, "draws": 2}
    shared = kwargs | {"world_size": world_size, "placement": placement}
    loaders = [GlobalBatches(split(50), rows, rank=rank, **shared) for rank in range(world_size)]
    reference = GlobalBatches(split(50), rows, **kwargs)
    for epoch in (0, 1):
        for loader in (*loaders, reference):
            loader.set_epoch(epoch)
        steps = list(zip(*loaders, strict=True))
        assert len(steps) == len(reference) == 5
        for step, (shares, whole) in enumerate(zip(steps, reference, strict=True)):
            for ours, expected in zip(
                zip(*(share[:3] for share in shares), strict=True), whole[:3], strict=True
            ):
                assert torch.equal(torch.cat(list(ours)).to(expected.dtype), expected)
            sizes = [len(share.labels) for share in shares]
            assert max(sizes) - min(sizes) <= 1
            assert sum(sizes) == reference.global_count(step)
            assert torch.equal(whole.images[:, 0, 0, 0].long(), whole.labels)
        assert sorted(torch.cat([batch.labels for batch in reference]).tolist()) == rows.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_flips_alternate_on_any_number_of_ranks(world_size: int) -> None:
    kwargs: dict[str, Any] = {
        "batch_size": 6,
        "shuffle": True,
        "draws": 5,
        "alternate": True,
        "world_size": world_size,
    }
    loaders = [
        GlobalBatches(split(40), torch.arange(40), rank=rank, **kwargs)
        for rank in range(world_size)
    ]
    first = torch.randint(2, (40,), generator=stream(0, 5))
    for epoch in range(3):
        for loader in loaders:
            loader.set_epoch(epoch)
        batches = [batch for loader in loaders for batch in loader]
        order = torch.cat([batch.labels for batch in batches]).argsort()
        draws = torch.cat([batch.draws for batch in batches if batch.draws is not None])[
            order, FLIP
        ]
        assert torch.equal(draws >= DRAW_RANGE // 2, (first + epoch) % 2 == 1)


def test_epochs_have_permutations_of_their_own() -> None:
    loader, seen = GlobalBatches(split(50), torch.arange(50), batch_size=50, shuffle=True), []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        seen.append(next(iter(loader)).labels.tolist())
    assert seen[1] != seen[0] == seen[2]


@pytest.mark.parametrize("placement", ["disk", "memory"])
def test_reading_goes_on_at_the_trainers_position(placement: str) -> None:
    kwargs: dict[str, Any] = {"batch_size": 8, "shuffle": True, "placement": placement}
    whole = GlobalBatches(split(50), torch.arange(50), **kwargs)
    rest = GlobalBatches(split(50), torch.arange(50), position=lambda: 4, **kwargs)
    expected = [batch.labels.tolist() for batch in whole][4:]
    assert [batch.labels.tolist() for batch in rest] == expected


class Scramble(nn.Module):
    """Adds random numbers of torch and NumPy to an image."""

    def forward(self, image: Tensor) -> Tensor:
        return image + torch.randint(50, (1,), dtype=torch.uint8) + np.random.randint(50)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_augment_alike_whatever_the_world_size(num_workers: int) -> None:
    def epochs(rank: int, world_size: int) -> list[Tensor]:
        share: dict[str, Any] = {
            "batch_size": 8,
            "rank": rank,
            "world_size": world_size,
            "placement": "disk",
        }
        loader = GlobalBatches(
            split(20), torch.arange(20), num_workers=num_workers, augment=[Scramble()], **share
        )
        made = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            made += [batch.images[:, 0, 0, 0] for batch in loader]
        return made

    state = torch.get_rng_state()
    alone = epochs(0, 1)
    assert len({int(value) for batch in alone for value in batch}) > 20, "it does augment"
    assert not torch.equal(alone[0], alone[3]), "each epoch differently"
    for whole, *shares in zip(alone, epochs(0, 2), epochs(1, 2), strict=True):
        assert torch.equal(torch.cat(shares), whole)
    assert torch.equal(torch.get_rng_state(), state), "global random state is left alone"


def test_augmentation_that_cannot_be(app: App) -> None:
    flags = [*tiny(80), *TWO_STEPS, "--data.augment"]
    elastic = "torchvision.transforms.v2.ElasticTransform"
    assert "--data.placement disk, not memory" in error_of(
        *app("fit", *flags, elastic, "--data.placement", "memory")
    )
    flags += ["torchvision.transforms.v2.Resize", "--data.augment.size", "7", "--data.num_workers"]
    for workers in ("0", "2"):
        line = error_of(*app("fit", *flags, workers))
        assert line.startswith(
            "error: --data.augment Resize turns torch.uint8 (3, 32, 32) into torch.uint8 (3, 7, 7)"
        )


@pytest.mark.slow
def test_spawned_processes_have_workers(tmp_path: Path) -> None:
    flags = tiny(80, placement="disk", num_workers=1, test=False, root=tmp_path)
    output_of(*fork_app("fit", *flags, *TWO_STEPS, *on_cpu("ddp_spawn")))


def test_drop_last() -> None:
    assert [
        len(b.labels)
        for b in GlobalBatches(split(20), torch.arange(20), batch_size=8, drop_last=True)
    ] == [8, 8]


def test_batches_for_an_accelerator_are_pinned_and_one_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images, labels and draws are copied once, into page-locked memory, while the previous batch is in use."""
    pinned: list[torch.Size] = []

    def without(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: object, pin_memory: bool = False, **kwargs: object) -> Tensor:
            out = make(*args, **kwargs)
            if pin_memory:
                pinned.append(out.shape)
            return out

        return made

    for name in (
        "empty",
        "randint",
    ):  # record `pin_memory` only, because page-locking needs a driver
        monkeypatch.setattr(torch, name, without(getattr(torch, name)))
    loader, reference = (
        GlobalBatches(
            split(50),
            torch.arange(3, 40),
            batch_size=8,
            shuffle=True,
            draws=2,
            device=torch.device(device),
        )
        for device in ("cuda", "cpu")
    )
    batches = iter(loader)
    for ready, expected in zip((2, 3, 4, 5, 5), reference, strict=True):
        batch = next(batches)
        assert all(
            torch.equal(ours, wanted) for ours, wanted in zip(batch[:3], expected[:3], strict=True)
        )
        awaited(lambda ready=ready: len(pinned) >= 2 + ready, 20)
    assert next(batches, None) is None
    assert pinned == [(37, 2), (37,), *((n, 1, 4, 4) for n in (8, 8, 8, 8, 5))]

"""`--run.virtual_devices`: the same bits on any number of processes."""

import hashlib
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest
import torch
from harness import App, start_app, tiny
from torch import Tensor

from app.parallel.tree import Tree
from app.record import Record

SHARDED = tiny(
    90, 20, "CIFARCNN", virtual_devices=5, max_epochs=3, test=False, threads=1, flip=True, log_every_n_steps=1
)


def digest(checkpoint: Path) -> str:
    """SHA-256 of the weights and buffers in a checkpoint."""
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()


def train(folder: Path, flags: Sequence[str], ranks: int, *more: str | Path) -> Path:
    """Run fit on some processes; return its directory."""
    devices = ("--trainer.strategy", "ddp", "--trainer.devices", ranks) if ranks > 1 else ()
    code, out = start_app("fit", "--run.root", folder, *flags, *map(str, devices), *more)
    assert code == 0, out
    return max(folder.glob("*/version_*"), key=lambda each: each.stat().st_mtime)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    return train(tmp_path_factory.mktemp("alone"), SHARDED, 1)


@pytest.mark.parametrize("strategy, ranks", [("ddp", 2), ("ddp", 3), ("ddp_spawn", 2)])
def test_same_bits(alone: Path, strategy: str, ranks: int, tmp_path: Path) -> None:
    run = train(tmp_path, SHARDED, ranks, "--trainer.strategy", strategy)
    assert digest(run / "checkpoints/last.ckpt") == digest(alone / "checkpoints/last.ckpt")
    assert (run / "metrics.csv").read_text() == (alone / "metrics.csv").read_text()
    record = Record.load(run / "run.json")
    assert (record.virtual_devices, record.shards) == (5, {2: [2, 3], 3: [1, 2, 2]}[ranks])


def test_elastic(alone: Path, tmp_path: Path) -> None:
    """Stopped in mid-epoch on three processes, resumed on two, and ended on one."""
    for ranks, steps in ((3, 3), (2, 8), (1, -1)):
        more = ["--ckpt_path", tmp_path / "CIFARCNN/version_0/checkpoints/last.ckpt"] if ranks < 3 else []
        run = train(tmp_path, [*SHARDED, "--run.name", "CIFARCNN"], ranks, "--trainer.max_steps", str(steps), *more)
    assert digest(run / "checkpoints/last.ckpt") == digest(alone / "checkpoints/last.ckpt")


@pytest.mark.parametrize("flag", ["virtual_devices", "threads"])
def test_a_checkpoint_of_other_shards_or_threads(flag: str, alone: Path, app: App) -> None:
    code, out = app("fit", *SHARDED, "--ckpt_path", alone / "checkpoints/last.ckpt", f"--run.{flag}", "4")
    assert code == 2
    assert f"give --run.{flag} {({'virtual_devices': 5, 'threads': 1})[flag]}" in out


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_one_order_of_additions(count: int) -> None:
    """Whichever shard is added first, each sum is the same bits, and no addition is left out."""
    tree, values = Tree(count), torch.randn(count, generator=torch.Generator().manual_seed(1))
    found = set()
    for order in list(permutations(range(count)))[:: 1 if count < 8 else 997]:
        nodes: dict[tuple[int, int], Tensor] = {}
        for shard in order:
            tree.add(nodes, (0, shard), values[shard], torch.add)
        found.add(nodes.pop(tree.root).item())
        assert not nodes
    (total,) = found
    assert total == pytest.approx(values.sum().item(), abs=1e-5)


REFUSED = {
    "--trainer.strategy dp --trainer.devices 2": "use --trainer.strategy ddp",
    "--trainer.strategy ddp --trainer.devices 6": "6 processes need a shard each: give at least 6",
    "--data.batch_size 4": "a global batch of 4 has fewer samples than shards: give 4 or less",
    "--data.batch_size 0.03": "a global batch of 3 has fewer samples than shards: give 3 or less",
    "--data.micro_batch 2": "a shard is one already",
    "--run.loop lightning": "only the straight loop has shards",
    "--trainer.profiler simple": "does not work with a profiler",
    "--model user_code.TwoOptimizers --data user_code.TheirData": "does not work with manual optimization",
    "--model user_code.TheirModel --data user_code.TheirData": "add --run.global_order true",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_sharded(flags: str, app: App) -> None:
    own = [] if "user_code" in flags else SHARDED
    code, out = app("fit", *own, *flags.split(), "--run.virtual_devices", "5")
    assert code == 2, out
    assert REFUSED[flags] in out.splitlines()[-1]

"""How much of a batch is taken at once: what fits into memory, found out before training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import QUIET, App, error_of, fork_app, largest_difference, losses, start_app, weights

from app.errors import UserError
from app.fit import memory
from app.fit.memory import largest, settle_micro_batch
from app.record import Record
from app.system import machine
from app.system.machine import free_memory, usable_cores

# an image takes 0.2 MiB in the network: 1,200 of them 240 MiB, beside what the process takes
WIDE = ["--model", "FashionMLP", "--model.repeats", "64", "--model.hidden", "[8]", "--data", "Synthetic"]
WIDE += ["--data.like", "FashionMNIST", "--data.size", "2700", "--data.batch_size", "1216"]
WIDE += ["--trainer.accelerator", "cpu"]
WIDE += ["--trainer.max_steps", "3", "--trainer.log_every_n_steps", "1", "--run.test", "false", *QUIET]


@pytest.mark.parametrize(
    ("base", "each", "share", "most", "found"),
    [
        (0.7, 0.0002, 15000, 2.5, 7500),  # 9,000 would fit, and parts are of one size
        (0.7, 0.0002, 1000, 2.5, 1000),
        (0.7, 0.1, 64, 2.5, 16),
        (0.7, 1.7, 64, 2.5, 1),
        (0.7, 0.1, 1000, 2.5, 17),  # less than the first that is tried
        (0.7, 2, 64, 2.5, 0),
        (0.7, 0.001, 1, 2, 1),
    ],
)
def test_largest(base: float, each: float, share: int, most: float, found: int) -> None:
    tried = []

    def takes(count: int) -> float:
        tried.append(count)
        return base + each * count

    assert largest(takes, share, most) == found
    assert len(tried) <= 6
    assert found == 0 or found in tried, "what is taken has been tried"


def test_largest_where_a_try_fails() -> None:
    found = largest(lambda count: 1 + 0.0001 * count if count < 5000 else float("inf"), 16000, 8)
    assert 2000 < found < 5000


def test_what_fails_for_another_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "run_fit", lambda *_: Record(status="failed", error="--model.scheduler: no"))
    with pytest.raises(UserError, match=r"auto: --model\.scheduler: no, or give a count"):
        settle_micro_batch("", 64, 784, memory.torch.device("cpu"), 2.0)


def record(root: Path, name: str) -> dict[str, Any]:
    return json.loads((root / name / "version_0" / "run.json").read_text())


@pytest.mark.slow
def test_auto(tmp_path: Path) -> None:
    """Under a limit that the whole batch would not keep, two ranks train to the same losses."""
    for name, more in (
        ("whole", []),
        ("auto", ["--data.micro_batch", "auto", "--data.memory_limit", "LIMIT"]),
        ("ddp", ["--data.micro_batch", "auto", "--trainer.strategy", "ddp_fork", "--trainer.devices", "2"]),
    ):
        if name == "auto":
            limit = record(tmp_path, "whole")["peak_memory"][0]["host_rss_gib"] - 0.1
            more[-1] = str(limit)
        run_app = fork_app if name == "ddp" else start_app  # a fork has not all memory for itself
        code, out = run_app("fit", *WIDE, *more, "--run.root", tmp_path, "--run.name", name)
        assert code == 0, out
    whole, auto, ddp = (record(tmp_path, name) for name in ("whole", "auto", "ddp"))
    assert whole["micro_batch"] is None
    assert 20 < auto["micro_batch"] <= 608
    assert auto["peak_memory"][0]["host_rss_gib"] < limit
    assert ddp["micro_batch"] == 608, "all of its share, where there is room"
    runs = [tmp_path / name / "version_0" for name in ("whole", "auto", "ddp")]
    for run in runs[1:]:
        np.testing.assert_allclose(losses(run), losses(runs[0]), rtol=0, atol=1e-5)
        last = [weights(each / "checkpoints" / "last.ckpt") for each in (run, runs[0])]
        assert largest_difference(*last) < 1e-5


def test_a_resumed_run_keeps_it(app: App, tmp_path: Path) -> None:
    """Another one would round otherwise."""
    code, out = app("fit", *WIDE, "--data.micro_batch", "100")
    assert code == 0, out
    more = ["--trainer.max_steps", "4", "--ckpt_path", "last", "--data.micro_batch", "auto"]
    code, out = app("fit", *WIDE, *more)
    assert code == 0, out
    (last,) = tmp_path.rglob("run.json")
    assert json.loads(last.read_text())["micro_batch"] == 100


@pytest.mark.parametrize(("ranks", "world_size", "copies"), [(1, 1, 0), (1, 2, 1), (2, 2, 1)])
def test_room_for_the_gradients_copy(ranks: int, world_size: int, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP keeps a copy of the gradients on two nodes with one device each, too."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 10 * 2**30)
    module: Any = torch.nn.Linear(2**14, 2**14, bias=False, device="meta")  # 1 GiB
    left = memory.room(torch.device("cpu"), ranks, world_size, module)
    assert left == pytest.approx(9 / ranks - copies)


def test_control_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tightest of a group and those around it counts; pages of files that nobody uses are free."""
    own = machine._control_groups
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(64)))
    assert own() == []
    assert usable_cores() == 64
    gib, inner = 2**30, tmp_path / "job"
    for folder, cpu, limit in ((tmp_path, "400000 100000", "max"), (inner, "max 100000", str(gib))):
        folder.mkdir(exist_ok=True)
        (folder / "cpu.max").write_text(cpu + "\n")
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(f"{3 * gib // 4}\n")
        (folder / "memory.stat").write_text(f"anon {gib // 4}\ninactive_file {gib // 2}\n")
    monkeypatch.setattr(machine, "_control_groups", lambda: [inner, tmp_path])
    assert usable_cores() == 4
    assert free_memory(torch.device("cpu")) == 3 * gib // 4


@pytest.mark.slow
def test_too_little_memory(app: App, tmp_path: Path) -> None:
    code, out = app("fit", *WIDE, "--data.micro_batch", "auto", "--data.memory_limit", "0.1")
    said = error_of(code, out)
    assert said.startswith("error: --data.micro_batch auto: one image at a time takes ")
    assert " GiB of the 0.10 that there are: give more memory" in said
    assert not list((tmp_path / "runs").rglob("run.json"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data.micro_batch", "0"], "--data.micro_batch 0: give a count of at least 1, or auto"),
        (["--data.memory_limit", "2"], "--data.memory_limit 2 is for --data.micro_batch auto: give both"),
        (["--data.micro_batch", "auto", "--data.memory_limit", "-1"], "--data.memory_limit -1: give GiB above 0"),
    ],
)
def test_limits(flags: list[str], said: str, app: App) -> None:
    assert said in error_of(*app("fit", *WIDE, *flags))

"""`--profile`: traces of some steps, and what limits the run."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import QUIET, App, error_of, fork_app

from app.monitor.step_trace import _covered, limit
from app.record import ProfiledRank

SMALL = ["--data", "Synthetic", "--data.size", "640", "--data.batch_size", "16", "--run.test", "false", *QUIET]


def marks(path: str) -> Counter[str]:
    """Names of the marked parts of steps in a trace."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return Counter(name.removeprefix("step: ") for name in names if name.startswith("step: "))


def record(root: Path) -> dict[str, Any]:
    return json.loads((root / "LeNet-Synthetic" / "version_0" / "run.json").read_text())


def check(found: dict[str, Any], out: str, ranks: int) -> None:
    rows = found["profile"]["ranks"]
    assert [row["rank"] for row in rows] == list(range(ranks))
    for row in rows:
        assert row["forward"] > 0
        assert row["backward"] > 0
        assert 0 <= row["host"] < 1
        parts = marks(row["trace"])
        assert parts["training_step"] == parts["backward"] == 8
        assert row["trace"] in out
    assert f"limited by      {found['profile']['limit']}" in out
    assert "; try " in found["profile"]["limit"]
    config = Path(found["config"]).read_text()
    assert "profile: false" in config, "the next run of this config is not profiled"


def test_one_process(app: App, tmp_path: Path) -> None:
    code, out = app("fit", *SMALL, "--trainer.max_epochs", "1", "--profile")
    assert code == 0, out
    check(found := record(tmp_path / "runs"), out, 1)
    assert all(found["time_per_step"][part] > 0 for part in ("forward", "backward", "forward_backward"))
    assert found["loop"] == "straight"


def test_throughput_is_that_of_other_windows(app: App, tmp_path: Path) -> None:
    flags = ["--trainer.max_epochs", "1", "--trainer.log_every_n_steps", "3", "--trainer.limit_val_batches", "0"]
    counts = []
    for more in ([], ["--profile"]):
        code, out = app("fit", *SMALL, *flags, *more, "--run.name", f"x{len(more)}")
        assert code == 0, out
        found = json.loads((tmp_path / "runs" / f"x{len(more)}" / "version_0" / "run.json").read_text())
        counts.append(found["throughput"]["n"])
    assert counts[1] == counts[0] - 4, "steps 26 to 34 lie in four windows of three"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_fork", "dp"])
def test_several(strategy: str, tmp_path: Path) -> None:
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "2"]
    code, out = fork_app("fit", *SMALL, *way, "--trainer.max_epochs", "2", "--profile", "--run.root", tmp_path)
    assert code == 0, out
    check(found := record(tmp_path), out, 1 if strategy == "dp" else 2)
    assert all(row["communication"] > 0 for row in found["profile"]["ranks"])


def test_too_short(app: App, tmp_path: Path) -> None:
    code, out = app("fit", *SMALL, "--trainer.max_steps", "4", "--profile")
    assert code == 0, out
    assert "training was too short for --profile" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trainer.profiler", "simple"], "--profile and --trainer.profiler: one of them can look at a step"),
        (["--trainer.fast_dev_run", "true"], "leave --trainer.fast_dev_run and --trainer.barebones out"),
    ],
)
def test_what_cannot_be(flags: list[str], said: str, app: App) -> None:
    assert said in error_of(*app("fit", *SMALL, "--profile", *flags))


def test_only_training_is_profiled(app: App) -> None:
    assert "--profile" in error_of(*app("test", *SMALL, "--profile"))


def test_what_is_covered_counts_once() -> None:
    assert _covered([(1, 3), (2, 4), (6, 20)], 0, 10) == 7
    assert _covered([], 0, 10) == 0


def rank(number: int, **phases: float) -> ProfiledRank:
    return ProfiledRank(
        rank=number, n=8, **{"data": 0.1, "forward_backward": 2.0, "optimizer": 0.1, "rest": 0.1, "host": 0.1, **phases}
    )


def test_what_limits_a_run() -> None:
    assert limit([rank(0)], cuda=False).startswith("the device limits the run")
    assert limit([rank(0, data=3.0)], cuda=True).endswith("try --data.placement device")
    assert limit([rank(0, host=0.71)], cuda=True).startswith("71% of a step is Python")
    assert "--model.cuda_graph true" in limit([rank(0, host=0.71)], cuda=True)
    said = limit([rank(0, communication=4.0), rank(1, communication=3.9, data=0.2)], cuda=True)
    assert said.startswith("62% of a step of rank 1 is waiting for the other ranks")

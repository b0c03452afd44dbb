"""Ctrl-C and SIGTERM: every process ends, the record says why, and the run goes on from there to the bit."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import QUIET, ROOT, largest_difference, weights

App = Callable[..., tuple[int, str]]
SMALL = ["--data", "Synthetic", "--data.size", "203", "--data.batch_size", "20", "--data.flip", "true", *QUIET]
SLOW = pytest.mark.slow


def family(mark: str) -> set[int]:
    """The living processes whose environment holds the mark, whoever is their parent."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            if mark.encode() in (place / "environ").read_bytes() and state != "Z":
                found.add(int(place.name))
        except OSError:  # it has ended
            continue
    return found


def awaited(condition: Callable[[], object], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


class Running:
    """A run that was started, in a session of its own."""

    def __init__(self, root: Path, *flags: str) -> None:
        self.mark = uuid.uuid4().hex
        self.directory = root / "cifar_cnn" / "version_0"
        command = [sys.executable, "-m", "app", "fit", *SMALL, "--run.root", str(root), *flags]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "APP_TEST_MARK": self.mark},
        )  # fmt: skip

    @property
    def record(self) -> dict[str, Any]:
        path = self.directory / "run.json"
        return json.loads(path.read_text()) if path.exists() else {"epochs": []}

    def get(self, name: str, whom: str) -> None:
        send = os.killpg if whom == "group" else os.kill
        send(self.process.pid, getattr(signal, name))

    def end(self) -> str:
        """What it printed; none of its processes is left a little later."""
        out, _ = self.process.communicate(timeout=60)
        awaited(lambda: not family(self.mark), 10)
        return out


@contextmanager
def started(root: Path, *flags: str) -> Iterator[Running]:
    run = Running(root, *flags)
    try:
        yield run
    finally:
        for pid in family(run.mark):
            os.kill(pid, signal.SIGKILL)
        run.process.communicate()


@pytest.mark.parametrize(
    ("strategy", "name", "whom"),
    [
        ("disk", "SIGTERM", "group"),  # with worker processes, which the signal reaches, too
        ("auto", "SIGTERM", "main"),
        ("dp", "SIGINT", "group"),
        ("ddp", "SIGINT", "group"),
        pytest.param("ddp", "SIGTERM", "main", marks=SLOW),
        pytest.param("ddp", "SIGTERM", "group", marks=SLOW),
        pytest.param("ddp_spawn", "SIGINT", "group", marks=SLOW),
        pytest.param("ddp_spawn", "SIGTERM", "main", marks=SLOW),
        pytest.param("ddp_spawn", "SIGTERM", "group", marks=SLOW),
        pytest.param("ddp_fork", "SIGINT", "main", marks=SLOW),
    ],
)
def test_while_training(strategy: str, name: str, whom: str, tmp_path: Path) -> None:
    devices = "1" if strategy == "auto" else "2"
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", devices]
    if strategy == "disk":
        way = ["--data.placement", "disk", "--data.num_workers", "2"]
    with started(tmp_path, *way, "--trainer.max_epochs", "100000") as run:
        awaited(lambda: len(run.record["epochs"]) > 2 or run.process.poll() is not None, 120)
        run.get(name, whom)
        out = run.end()
    assert run.process.returncode == {"SIGINT": 130, "SIGTERM": 143}[name], out
    assert "Traceback" not in out
    found = run.record
    assert (found["status"], found["error"]) == ("interrupted", {"SIGINT": "by Ctrl-C", "SIGTERM": "by SIGTERM"}[name])
    assert found["throughput"]["n"] > 0
    assert found["test"] is None
    assert Path(found["checkpoint"]["last"]).exists()
    assert f"--ckpt_path {found['checkpoint']['last']}" in out


def test_it_goes_on_to_the_bit(app: App, tmp_path: Path) -> None:
    """Wherever it was hit: the step, and with it the place in the epoch, are not of the test's choosing."""
    flags = ["--trainer.max_epochs", "40", "--run.test", "false"]
    with started(tmp_path / "stopped", *flags, "--trainer.log_every_n_steps", "1") as run:
        awaited(lambda: len(run.record["epochs"]) > 2, 120)
        run.get("SIGINT", "main")
        out = run.end()
    assert run.process.returncode == 130, out
    last = run.record["checkpoint"]["last"]
    config = run.directory / "config.yaml"
    for more in (["--config", config, "--ckpt_path", "last", "--run.name", "resumed"], ["--run.name", "whole"]):
        code, out = app("fit", *SMALL, *flags, *more, "--run.root", tmp_path)
        assert code == 0, out
    assert json.loads((tmp_path / "resumed" / "version_0" / "run.json").read_text())["resumed_from"] == last
    whole, resumed = (tmp_path / name / "version_0" / "checkpoints" / "last.ckpt" for name in ("whole", "resumed"))
    assert largest_difference(weights(whole), weights(resumed)) == 0


EARLY = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_acc"]


@pytest.mark.parametrize(
    ("flags", "validations"),
    [(EARLY, 0), (["--trainer.val_check_interval", "4"], 1), (["--trainer.accumulate_grad_batches", "2"], 0)],
    ids=["early-stopping", "validation-due", "accumulating"],
)
def test_in_the_first_epoch(flags: list[str], validations: int, app: App, tmp_path: Path) -> None:
    """After the fourth optimizer step, whatever else looks at the end of a step or of an epoch."""
    flags = [*SMALL, "--model", "user_code.StopsItself", *flags, "--trainer.max_epochs", "2", "--run.test", "false"]
    code, out = app("fit", *flags)
    assert code == 130, out
    run = tmp_path / "runs" / "cifar_cnn" / "version_0"
    found = json.loads((run / "run.json").read_text())
    assert (found["status"], found["steps"]) == ("interrupted", 4)
    assert [row["whole"] for row in found["epochs"]] == [False]
    assert sum(row["val_acc"] is not None for row in found["epochs"]) == validations
    code, out = app("fit", *flags, "--config", run / "config.yaml", "--ckpt_path", "last")
    assert code == 0, out
    found = json.loads((run.with_name("version_1") / "run.json").read_text())
    assert found["status"] == "completed"
    assert [row["epoch"] for row in found["epochs"]] == [0, 1]


@SLOW
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_while_starting(strategy: str, name: str, tmp_path: Path) -> None:
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "2"]
    with started(tmp_path, *way) as run:
        awaited(lambda: len(family(run.mark)) > 1, 60)
        run.get(name, "group")
        out = run.end()
    assert run.process.returncode == {"SIGINT": 130, "SIGTERM": 143}[name], out
    assert "Traceback" not in out
    assert run.record["status"] == "interrupted"


@SLOW
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_rank_that_is_killed_is_named(strategy: str, tmp_path: Path) -> None:
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "2"]
    flags = ["--model", "user_code.SaysItsProcess", "--model.directory", str(tmp_path)]
    with started(tmp_path, *flags, *way, "--trainer.max_epochs", "100000") as run:
        awaited(lambda: len(run.record["epochs"]) > 1, 120)
        victim = int((tmp_path / "rank1").read_text())
        os.kill(victim, signal.SIGKILL)
        out = run.end()
    assert run.process.returncode == 1, out
    assert f"error: rank 1 (process {victim}) was ended by SIGKILL" in out
    assert "Traceback" not in out
    assert run.record["status"] == "failed"
    assert "rank 1" in run.record["error"]


@SLOW
def test_a_rank_that_fails_while_rank_zero_is_stuck(tmp_path: Path) -> None:
    """As in a collective call of NCCL, which does not notice; the reason is the other rank's."""
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", "ddp", "--trainer.devices", "2"]
    with started(tmp_path, "--model", "user_code.FailsWhileRankZeroIsStuck", *way) as run:
        out = run.end()
    assert run.process.returncode == 1, out
    assert "failed with exit code 1" in out
    assert (run.record["status"], run.record["error"]) == ("failed", "rank 1: RuntimeError: only here")


@SLOW
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_no_process_outlives_the_main_one(strategy: str, tmp_path: Path) -> None:
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "2"]
    with started(tmp_path, *way, "--trainer.max_epochs", "100000") as run:
        awaited(lambda: len(run.record["epochs"]) > 2, 120)
        run.get("SIGKILL", "main")
        run.end()

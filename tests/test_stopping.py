"""Ctrl-C and SIGTERM: every process ends, the record says why, and the run continues from there to the bit."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from cluster.hosts import awaited
from harness import App, family, largest_difference, output_of, start_app, started, tiny, weights

from app.launch.process import TASK

SMALL = tiny(203, 20, flip=True)
DDP = ["--trainer.accelerator", "cpu", "--trainer.strategy", "ddp", "--trainer.devices", "2"]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "name", "whom"),
    [
        ("disk", "SIGTERM", "group"),  # with worker processes, which the signal reaches, too
        ("auto", "SIGTERM", "main"),
        ("dp", "SIGINT", "group"),
        ("ddp", "SIGINT", "group"),
        pytest.param("ddp", "SIGTERM", "all", marks=SLOW),
        pytest.param("ddp_spawn", "SIGINT", "group", marks=SLOW),
        pytest.param("ddp_spawn", "SIGTERM", "main", marks=SLOW),
        pytest.param("ddp_fork", "SIGINT", "main", marks=SLOW),
    ],
)
def test_while_training(strategy: str, name: str, whom: str, tmp_path: Path) -> None:
    devices = "1" if strategy == "auto" else "2"
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", devices]
    if strategy == "disk":
        way = ["--data.placement", "disk", "--data.num_workers", "2"]
    with started(tmp_path, *SMALL, *way, "--trainer.max_epochs", "100000") as run:
        run.trained(3)
        run.get(name, whom)
        out = run.end(20)
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
    with started(tmp_path / "stopped", *SMALL, *flags, "--trainer.log_every_n_steps", "1") as run:
        run.trained(3)
        run.get("SIGINT", "main")
        out = run.end()
    assert run.process.returncode == 130, out
    last = run.record["checkpoint"]["last"]
    config = run.directory / "config.yaml"
    for more in (["--config", config, "--ckpt_path", "last", "--run.name", "resumed"], ["--run.name", "whole"]):
        output_of(*app("fit", *SMALL, *flags, *more, "--run.root", tmp_path))
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
    run = tmp_path / "runs" / "StopsItself-Synthetic" / "version_0"
    found = json.loads((run / "run.json").read_text())
    assert (found["status"], found["steps"]) == ("interrupted", 4)
    assert [row["whole"] for row in found["epochs"]] == [False]
    assert sum(row["val_acc"] is not None for row in found["epochs"]) == validations
    output_of(*app("fit", "--config", run / "config.yaml", "--ckpt_path", "last"))
    found = json.loads((run / "run.json").read_text())
    assert found["status"] == "completed"
    assert [(part["status"], part["error"], part["steps"]) for part in found["parts"]] == [
        ("interrupted", "by Ctrl-C", 4)
    ]
    assert [row["epoch"] for row in found["epochs"]] == [0, 1]
    times = [seconds for seconds, _ in found["course"]["samples_per_s"]]
    assert times == sorted(times), "that of the whole training"
    assert (run / "report.html").is_file()


@SLOW
def test_several_ranks_end_one_step_later(tmp_path: Path) -> None:
    """One is told in the fourth step, after which they ask each other; after the fifth all know."""
    flags = [*SMALL, *DDP, "--trainer.max_epochs", "2", "--run.test", "false", "--run.root", tmp_path]
    code, out = start_app("fit", *flags, "--run.name", "x", "--model", "user_code.StopsOneRank")
    assert code == 143, out
    run = tmp_path / "x" / "version_0"
    found = json.loads((run / "run.json").read_text())
    assert (found["status"], found["error"], found["steps"]) == ("interrupted", "by SIGTERM", 5)
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 5


ASKS = """\
import os, signal
from app.launch.process import begin
begin()
if os.fork() == 0:  # as a loader's worker, which SLURM signals, too
    os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(0)
os.wait()
print("then", flush=True)
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_one_process_of_a_job_asks_for_its_requeue(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" >> "$0.said"\n')
    (tmp_path / "scontrol").chmod(0o755)
    task = {**dict.fromkeys([*TASK, "SLURM_STEP_TASKS_PER_NODE"], "0"), "SLURM_JOB_ID": "7"}
    task["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", ASKS], env={**os.environ, **task}, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["then", "SLURM starts job 7 again, which resumes from its last checkpoint"]
    assert (tmp_path / "scontrol.said").read_text() == "requeue 7\n"


@SLOW
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_while_starting(strategy: str, name: str, tmp_path: Path) -> None:
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "2"]
    with started(tmp_path, *SMALL, *way) as run:
        awaited(lambda: any(map(is_started_rank, family(run.mark))), 60)
        run.get(name, "group")
        out = run.end()
    assert run.process.returncode == {"SIGINT": 130, "SIGTERM": 143}[name], out
    assert "Traceback" not in out
    assert run.record.get("status") in (None, "interrupted")  # none where it had no directory yet


def is_started_rank(process: int) -> bool:
    """Whether the main process has started it as a rank, and not as one of its helpers."""
    try:
        found = psutil.Process(process)
        return "LOCAL_RANK" in found.environ() or "spawn_main" in " ".join(found.cmdline())
    except psutil.Error:  # it has ended
        return False


@SLOW
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_a_rank_that_is_killed_is_named(strategy: str, tmp_path: Path) -> None:
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "2"]
    flags = ["--model", "user_code.SaysItsProcess", "--model.directory", str(tmp_path)]
    with started(tmp_path, *SMALL, *flags, *way, "--trainer.max_epochs", "100000") as run:
        run.trained(2)
        victim = int((tmp_path / "rank1").read_text())
        os.kill(victim, signal.SIGKILL)
        out = run.end(30)
    assert run.process.returncode == 1, out
    assert f"error: rank 1 (process {victim}) was ended by SIGKILL" in out
    assert "Traceback" not in out
    assert run.record["status"] == "failed"
    assert "rank 1" in run.record["error"]


FOR_EVER = ["--trainer.max_epochs", "100000"]


@SLOW
def test_rank_zero_that_is_killed_is_named(tmp_path: Path) -> None:
    flags = ["--model", "user_code.SaysItsProcess", "--model.directory", str(tmp_path)]
    with started(tmp_path, *SMALL, *flags, *DDP, *FOR_EVER) as run:
        run.trained(2)
        victim = int((tmp_path / "rank0").read_text())
        os.kill(victim, signal.SIGKILL)
        out = run.end(30)
    assert run.process.returncode == 1
    assert f"error: rank 0 (process {victim}) was ended by SIGKILL" in out
    assert "Traceback" not in out
    assert (run.record["status"], run.record["error"][:6]) == ("failed", "rank 0")


@SLOW
@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("ddp_fork", 1)])
def test_a_rank_that_hangs(strategy: str, rank: int, tmp_path: Path) -> None:
    """Longer than the timeout: the other one says so, and no process is left, not even the stopped one."""
    flags = [*SMALL, "--model", "user_code.SaysItsProcess", "--model.directory", tmp_path, *DDP, *FOR_EVER]
    with started(tmp_path, *flags, "--trainer.strategy", strategy, "--cluster.timeout", "15") as run:
        run.trained(2)
        os.kill(int((tmp_path / f"rank{rank}").read_text()), signal.SIGSTOP)
        out = run.end(seconds=15 + 20)
    assert run.process.returncode == 1, out
    assert "error: no answer from another rank within --cluster.timeout" in out
    assert "Traceback" not in out


@SLOW
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_a_stopped_command_does_not_stay_for_ever(strategy: str, tmp_path: Path) -> None:
    """The process in which it was typed is ended like a rank, and with it all others."""
    with started(tmp_path, *SMALL, *DDP, *FOR_EVER, "--trainer.strategy", strategy, "--cluster.timeout", "15") as run:
        run.trained(2)
        run.get("SIGSTOP", "main")
        out = run.end(seconds=15 + 20)
    assert run.process.returncode == -signal.SIGKILL, out
    assert f"error: process {run.process.pid} was stopped for longer than --cluster.timeout (15 s): it was ended" in out


@SLOW
def test_a_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    """That is no failure, after which they would be started again."""
    flags = [*SMALL, "--model", "user_code.SaysItsProcess", "--model.directory", tmp_path, *DDP, *FOR_EVER]
    flags += ["--cluster.max_restarts", "2"]
    with started(tmp_path, *flags) as run:
        run.trained(2)
        os.kill(int((tmp_path / "rank1").read_text()), signal.SIGTERM)
        out = run.end(seconds=20)
    assert run.process.returncode == 143, out
    assert run.record["status"] == "interrupted"
    assert Path(run.record["checkpoint"]["last"]).exists()


@SLOW
def test_a_rank_that_is_slow(tmp_path: Path) -> None:
    with started(tmp_path, *SMALL, "--model", "user_code.SlowOnRank1", *DDP, "--trainer.max_epochs", "1") as run:
        out = run.end(seconds=120)
    assert run.process.returncode == 0, out


@SLOW
def test_a_rank_that_fails_while_rank_zero_is_stuck(tmp_path: Path) -> None:
    """As in a collective call of NCCL, which does not notice; the reason is the other rank's."""
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", "ddp", "--trainer.devices", "2"]
    with started(tmp_path, *SMALL, "--model", "user_code.FailsWhileRankZeroIsStuck", *way) as run:
        out = run.end()
    assert run.process.returncode == 1, out
    said = out.splitlines()[-1]
    assert re.fullmatch(r"error: rank 1 \(process \d+\) failed with exit code 1: RuntimeError: only here", said)
    assert re.search(r"^\[rank 1\] .*RuntimeError: only here$", out, flags=re.MULTILINE), "the end of its output"
    assert (run.record["status"], f"error: {run.record['error']}") == ("failed", said)


@SLOW
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_no_process_outlives_the_main_one(strategy: str, tmp_path: Path) -> None:
    way = ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", "2"]
    with started(tmp_path, *SMALL, *way, "--trainer.max_epochs", "100000") as run:
        run.trained(3)
        run.get("SIGKILL", "main")
        run.end(30)

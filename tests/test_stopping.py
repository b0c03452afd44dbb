"""Ctrl-C and SIGTERM: all processes end, and the resumed run has the same bits."""

import itertools
import multiprocessing
import os
import pty
import re
import signal
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
import torch
from cluster.hosts import awaited
from forked import fork_app
from harness import (
    SLOW,
    difference,
    family,
    last_of,
    on_cpu,
    options,
    record,
    record_of,
    slow,
    started,
    tiny,
)
from lightning import Trainer

from app.launch import signals
from app.launch.process import TASK
from app.launch.watchdog import watched
from app.record import Record

SMALL = tiny(203, 20, flip=True)
DDP = on_cpu("ddp")


SIGNALS = [
    slow("disk", "SIGTERM", "group"),  # the signal also reaches worker processes
    ("auto", "SIGHUP", "main"),
]
MORE = [
    ("ddp", "SIGTERM", "all"),
    ("ddp_spawn", "SIGINT", "group"),
    ("ddp", "SIGINT", "group"),
    ("ddp_spawn", "SIGHUP", "group"),
    ("ddp_spawn", "SIGTERM", "main"),
    ("ddp_fork", "SIGINT", "main"),
]
SIGNALS += [slow(*case) for case in MORE]


@pytest.mark.parametrize(("strategy", "name", "whom"), SIGNALS)
def test_signal_during_training_saves_checkpoint(strategy, name, whom, tmp_path):
    flags = on_cpu(strategy)
    if strategy == "disk":
        flags = options(placement="disk", num_workers=2)
    with started(tmp_path, *SMALL, *flags, "--trainer.max_epochs=100000") as run:
        out = run.trained(3).get(name, whom).end(60, code=128 + getattr(signal, name))
    assert "Traceback" not in out
    saved = run.record
    assert (saved["status"], saved["error"]) == (
        "interrupted",
        "by Ctrl-C" if name == "SIGINT" else f"by {name}",
    )
    assert saved["throughput"]["n"] > 0
    assert saved["test"] is None
    assert Path(saved["checkpoint"]["last"]).exists()
    assert f"--ckpt_path {saved['checkpoint']['last']}" in out
    accuracy = r"[\d.]+ % \(.*\) on \d+ validation images after \d+ epochs"
    title = rf"<title>{accuracy}, interrupted {saved['error']} .*</title>"
    assert re.search(title, (run.directory / "report.html").read_text())


EARLY = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_acc"]


ENDS = [
    slow(EARLY, 0),
    slow(["--trainer.val_check_interval=4"], 1),
    (["--trainer.accumulate_grad_batches=2"], 0),
]


@pytest.mark.parametrize(("flags", "validations"), ENDS)
def test_ctrl_c_in_first_epoch_can_resume(flags, validations, app, fit, tmp_path):
    """A run that gets Ctrl-C in the fourth step ends after it, whatever its callbacks do.

    The resumed run has the bits of an undisturbed one.
    """
    flags = [*SMALL, *flags, *options(max_epochs=2, test=False)]
    undisturbed = fit(*flags)
    app("fit", *flags, "--model=user_code.StopsItself", code=130)
    run = tmp_path / "runs/StopsItself-Synthetic/version_0"
    record = record_of(run)
    assert (record["status"], record["steps"]) == ("interrupted", 4)
    assert [row["whole"] for row in record["epochs"]] == [False]
    assert sum(row["val_acc"] is not None for row in record["epochs"]) == validations
    app("fit", "--config", run / "config.yaml", "--ckpt_path=last")
    record = record_of(run)
    assert record["status"] == "completed"
    (part,) = record["parts"]
    assert (part["status"], part["error"], part["steps"]) == ("interrupted", "by Ctrl-C", 4)
    assert [row["epoch"] for row in record["epochs"]] == [0, 1]
    assert record["resumed_from"] == str(last_of(run))
    assert difference(run, undisturbed) == 0
    assert (run / "report.html").is_file()


@SLOW
def test_ranks_stop_one_step_later(tmp_path):
    """One rank gets the signal in the third step; all ranks stop after the fourth.

    The agent does not restart the ranks, because the stop is no failure.
    """
    flags = [*SMALL, *DDP, *options(max_epochs=2, test=False), "--cluster.max_restarts=2"]
    flags += ["--trainer.callbacks+=dying_code.Ends", "--trainer.callbacks.stage=step"]
    with started(tmp_path, *flags, "--trainer.callbacks.way=SIGTERM") as run:
        run.end(code=143)
    record = run.record
    assert (record["status"], record["error"], record["steps"]) == ("interrupted", "by SIGTERM", 4)
    assert torch.load(last_of(run.directory), weights_only=True)["global_step"] == 4


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


def test_task_zero_requeues_slurm_job(tmp_path):
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" >> "$0.said"\n')
    (tmp_path / "scontrol").chmod(0o755)
    task = {**dict.fromkeys(TASK, "0"), "SLURM_JOB_ID": "7"}
    task["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", ASKS],
        env={**os.environ, **task},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "then",
        "SLURM requeues job 7, which then resumes from its last checkpoint",
    ]
    assert (tmp_path / "scontrol.said").read_text() == "requeue 7\n"


@SLOW
@pytest.mark.parametrize(("strategy", "name"), [("ddp", "SIGINT"), ("ddp_spawn", "SIGTERM")])
def test_signal_during_start_ends_run(strategy, name, tmp_path):
    with started(tmp_path, *SMALL, *on_cpu(strategy)) as run:
        awaited(lambda: len(family(run.mark)) > 2, 60)  # a rank, beside the multiprocessing tracker
        out = run.get(name, "group").end(code={"SIGINT": 130, "SIGTERM": 143}[name])
    assert "Traceback" not in out
    assert run.record.get("status") in (
        None,
        "interrupted",
    )  # no record if the run had no directory yet


FOR_EVER = ["--trainer.max_epochs=100000"]


@SLOW
def test_failed_rank_is_reported_while_rank_zero_hangs(tmp_path):
    """The run reports rank 1's exception, although rank zero hangs as in NCCL."""
    with started(tmp_path, *SMALL, "--model=stuck_code.FailsWhileRankZeroIsStuck", *DDP) as run:
        out = run.end(code=1)
    line = out.splitlines()[-1]
    assert re.fullmatch(
        r"error: rank 1 \(process \d+\) failed with exit code 1: RuntimeError: only here", line
    )
    assert re.search(r"^\[rank 1\] .*RuntimeError: only here$", out, flags=re.MULTILINE), (
        "the end of its output"
    )
    assert (run.record["status"], f"error: {run.record['error']}") == ("failed", line)


@SLOW
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_no_process_outlives_the_main_one(strategy, tmp_path):
    with started(tmp_path, *SMALL, *on_cpu(strategy), *FOR_EVER) as run:
        run.trained(3).get("SIGKILL", "main").end(30)


@SLOW
@pytest.mark.parametrize(("strategy", "command"), [("auto", []), ("ddp", []), ("ddp", ["nohup"])])
def test_closed_terminal_saves_checkpoint(strategy, command, tmp_path):
    """The run saves a checkpoint, as after SIGTERM. Under nohup, it completes."""
    flags = [*SMALL, *on_cpu(strategy), "--trainer.max_epochs=30", "--run.root", tmp_path]
    process, terminal = pty.fork()
    if process == 0:
        os.execvp("env", ["env", *command, sys.executable, "-m", "app", "fit", *map(str, flags)])
    awaited(lambda: len(record(tmp_path)["epochs"]) > 2, 100)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    saved = record(tmp_path)
    expected = (129, "interrupted", "by SIGHUP")
    if command:
        expected = (0, "completed", None)
    assert (code, saved["status"], saved["error"]) == expected
    assert Path(saved["checkpoint"]["last"]).exists()


def block_while_saving(root):
    """Wait in C code, as in a collective call, after a SIGTERM."""
    signals.GRACE = signals.START_GRACE = 1
    library = CDLL(None)

    def wait(*_, **__):
        library.system(b"kill -TERM %d; sleep 5" % os.getpid())

    signal.signal(signal.SIGTERM, lambda *_: None)
    Record(status="running").save(root / "run.json")
    with watched(60.0, root / "stacks", 0), signals.ended_in_time():
        trainer = MagicMock(strategy=Mock(save_checkpoint=wait))
        Trainer.save_checkpoint(trainer, "last.ckpt")


def test_a_rank_that_saves_goes_on_after_a_signal(tmp_path):
    """A rank that blocks in C code without saving ends: see the next test."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=block_while_saving, args=[tmp_path])
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert record_of(tmp_path)["status"] == "running"


@SLOW
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_one_signal_ends_ranks_that_wait_for_each_other(strategy, tmp_path):
    with started(
        tmp_path, *SMALL, *on_cpu(strategy), "--model=stuck_code.WaitsElsewhere", *FOR_EVER
    ) as run:
        awaited(lambda: len(list(tmp_path.rglob("stuck_*"))) == 2, 60)
        out = run.get("SIGTERM", "main").end(signals.GRACE + 30, code=143)
    assert "by SIGTERM: no progress for 21 s, so this rank ends without saving" in out
    assert (run.record["status"], run.record["error"]) == ("interrupted", "by SIGTERM")


STAGES = itertools.product(("auto", "ddp"), ("setup", "step", "test end"))


@pytest.mark.parametrize(
    ("strategy", "stage"), [("auto", "test"), *(slow(*case) for case in STAGES)]
)
def test_first_of_many_signals_ends_run(strategy, stage, tmp_path):
    """The first of 300 SIGTERMs ends the run in order; the others do not disturb the end."""
    flags = [*tiny(max_epochs=2), *on_cpu(strategy), "--run.root", tmp_path]
    flags += ["--trainer.callbacks+=dying_code.Ends", f"--trainer.callbacks.stage={stage}"]
    code, out = fork_app.run(
        "fit", *flags, "--trainer.callbacks.way=many SIGTERM", "--trainer.callbacks.rank=0"
    )
    assert code == 143, out
    assert "Traceback" not in out
    saved = record(tmp_path)
    assert (saved["status"], saved["error"]) == ("interrupted", "by SIGTERM")

"""Torch elastic's agent, in the command's process and in torchrun's: ranks, output, restarts.

test_hosts.py tests parity under torchrun.
"""

import os
import pty
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.hosts import awaited
from forked import fork_fit
from harness import ROOT, SLOW, difference, family, on_cpu, options, record_of, started, tiny

pytestmark = SLOW
IMAGES = tiny(203, 20, flip=True)
SMALL = [*IMAGES, *on_cpu("ddp")]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
STEPS = [*IMAGES, *options(accelerator="cpu", log_every_n_steps=1, test=False)]
SHORT = options(max_epochs=1, test=False)


def test_rank_zero_has_terminal_and_debugger(tmp_path):
    """Rank 0 reads from and writes to the terminal; rank 1 skips the breakpoint."""
    controller, tty = pty.openpty()
    flags = [*SMALL, *SHORT, "--model=user_code.Talks", "--model.stops=true"]
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "fit", *flags, "--run.root", tmp_path],
        cwd=ROOT, stdin=tty, stdout=tty, stderr=tty,
        env={**os.environ, "APP_TEST_MARK": str(tmp_path)},
    )  # fmt: skip
    os.close(tty)
    received = b""
    try:
        while b"(Pdb)" not in received:
            received += os.read(controller, 4096)
        os.write(controller, b"answer\ncontinue\n")
        while True:
            try:
                received += os.read(controller, 4096)
            except OSError:  # EIO: the other end is closed
                break
        assert process.wait(60) == 0, received
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    out = received.decode()
    assert "rank 0 writes to a terminal: True" in out
    assert "rank 1 writes" not in out
    assert "42" in out.split("(Pdb)", 1)[1]
    awaited(lambda: not family(str(tmp_path)), 10)


@pytest.mark.parametrize("verbose", [True, False])
def test_agent_logs_only_with_debug(verbose, tmp_path):
    """The agent logs a signal only with APP_DEBUG, and always deletes its temporary folders."""
    env = {"TMPDIR": str(tmp_path), "APP_DEBUG": "1" if verbose else None}
    with started(tmp_path / "runs", *SMALL, "--trainer.max_epochs=100000", env=env) as run:
        out = run.trained(1).get("SIGTERM", "main").end(60, code=143)
    assert ("closing signal SIGTERM" in out) == verbose
    assert not list(tmp_path.glob("*data-parallel-lab*"))
    assert not list(tmp_path.glob("*torchelastic*"))


def test_restart_names_its_cause(tmp_path):
    """The run names the failed rank; `--cluster.log_dir` has each rank's output."""
    flags = [*SMALL, *SHORT, "--model=user_code.Talks", "--cluster.log_dir", tmp_path / "logs"]
    flags += ["--trainer.callbacks+=user_code.FailsOnce", "--cluster.max_restarts=1"]
    with started(tmp_path, *flags) as run:
        out = run.end(120, code=0)
    assert "rank 0 writes" in out
    assert "rank 1 writes" not in out
    for rank in (0, 1):
        (log,) = (tmp_path / "logs").glob(f"*/attempt_1/{rank}/stdout.log")
        assert f"rank {rank} writes to a terminal: False" in log.read_text()
    reason = r"rank 1 \(process \d+\) failed with exit code 1: RuntimeError: only once"
    assert re.search(f"^{reason}: restarting all ranks$", out, re.MULTILINE)
    first = record_of(run.directory.with_name("version_0"))
    assert re.fullmatch(f"{reason}, and all ranks were restarted", first["error"])


def test_restart_after_kill_ends_with_same_weights(tmp_path):
    """After a kill, our agent and torchrun restart all ranks from the run's checkpoint.

    The final weights equal those of an undisturbed run.
    """
    flags = [*SMALL, "--model=user_code.SaysItsProcess", f"--model.directory={tmp_path}"]
    flags += ["--last_checkpoint.every_n_train_steps=11", "--model.optimizer.lr=0.01"]
    flags += options(max_epochs=30, test=False)
    whole = fork_fit(tmp_path / "whole", *flags, "--trainer.strategy=ddp_fork")
    for name, more, launcher in (
        ("agent", ["--cluster.max_restarts=2"], []),
        ("torchrun", [], [*TORCHRUN, "--max-restarts=2"]),
    ):
        with started(tmp_path / name, *flags, *more, launcher=launcher) as killed:
            killed.trained(random.randint(2, 8))
            first = killed.directory
            os.kill(int((tmp_path / f"rank{random.randint(0, 1)}").read_text()), signal.SIGKILL)
            killed.end(180, code=0)
        assert killed.directory == first, "one training is one run"
        (earlier,) = killed.record["parts"]
        assert earlier["status"] == "failed"
        assert earlier["error"].endswith("all ranks were restarted") == (name == "agent")
        assert killed.record["resumed_from"].startswith(str(first))
        assert killed.record["status"] == "completed"
        assert [row["epoch"] for row in killed.record["epochs"]] == list(range(30))
        assert difference(whole, killed.directory) == 0


# -- torchrun

# each rank checks this rule; tests/test_rules.py has the other rules
STARTED = "torchrun started 1 node(s) of 2 process(es), but the run is --trainer.num_nodes 1 of 3"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--trainer.devices=3", STARTED),
        # rank zero checks it for all ranks
        ("--ckpt_path=nowhere.ckpt", "--ckpt_path nowhere.ckpt: there is no such file"),
    ],
)
def test_error_of_rank_is_printed_at_once(flags, text, tmp_path):
    with started(tmp_path, *STEPS, flags, launcher=TORCHRUN) as run:
        out = run.end(120, code=1)  # torchrun's exit code
    assert f"error: {text}" in out
    assert not list(tmp_path.glob("*/version_*"))


def test_torchrun_resumes_only_with_auto(tmp_path):
    """A new torchrun continues an earlier run only with `--ckpt_path auto`."""
    flags = [*STEPS, "--trainer.max_epochs"]
    auto = ["--ckpt_path=auto"]
    for epochs, more, parts in (("1", auto, 0), ("2", [], 0), ("3", auto, 1)):
        with started(tmp_path, *flags, epochs, *more, launcher=TORCHRUN) as run:
            run.end(120, code=0)
        assert len(run.record["parts"]) == parts
        assert bool(run.record["resumed_from"]) == bool(parts)
    assert "version_1" in run.record["resumed_from"]


def test_workers_end_with_torchrun(tmp_path):
    with started(tmp_path, *STEPS, "--trainer.max_epochs=100000", launcher=TORCHRUN) as run:
        run.trained(2).get("SIGKILL", "main").end()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_to_torchrun_saves_checkpoint(name, tmp_path):
    with started(tmp_path, *STEPS, "--trainer.max_epochs=100000", launcher=TORCHRUN) as run:
        out = run.trained(2).get(name, "group").end(29)  # before 30 s, when torchrun kills ranks
    assert run.process.returncode != 0, out
    error = {"SIGTERM": "by SIGTERM", "SIGINT": "by Ctrl-C"}[name]
    assert (run.record["status"], run.record["error"]) == ("interrupted", error)
    assert Path(run.record["checkpoint"]["last"]).exists()

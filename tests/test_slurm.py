"""The shipped batch script on a real SLURM with four simulated nodes."""

import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from cluster.hosts import awaited
from harness import ROOT, difference, last_of, listening, losses, record, tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
SCRIPT = ROOT / "configs/cluster/slurm.sbatch"
SHAPE = ["--gres=none", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
TWO = [*SHAPE, "--ntasks-per-node=1"]
STEPS = tiny(203, 20, flip=True, accelerator="cpu", log_every_n_steps=1, test=False)
EXACT = ["--trainer.precision=64-true"]


@pytest.fixture
def clean(slurm):
    """Check that a test leaves no segment of shared memory."""
    yield
    living = [node for node in slurm.nodes.values() if node.outer.poll() is None]
    assert [name for node in living for name in node.shared_memory()] == []


def last(root):
    return last_of(root / "LeNet-Synthetic/version_0")


def submit(slurm, root, *flags, shape=TWO, epochs=24, **env):
    return slurm.submit(
        *shape,
        SCRIPT,
        *STEPS,
        "--run.root",
        root,
        f"--trainer.max_epochs={epochs}",
        *flags,
        env=env,
    )


def trained(slurm, job, root, epochs):
    def ready():
        ended = slurm.job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED")
        return ended or len(record(root)["epochs"]) >= epochs

    awaited(ready, 280, lambda: slurm.output(job))


def ends(slurm, job, state):
    """Wait for a job's end, and check its state."""
    reached = slurm.reaches(job, "COMPLETED", "FAILED", seconds=280)
    assert reached == state, slurm.output(job)


@pytest.mark.usefixtures("clean")
def test_requeued_job_equals_one_device(slurm, fit, tmp_path):
    """A job of 2 nodes × 2 tasks that is requeued twice ends as a run on one device.

    The requeued job needs no further flags. The runs use float64, because the four ranks add
    gradients in another order after a restart: DDP rearranges its buckets after the first step.
    """
    stopped = tmp_path / "stopped"
    job = submit(slurm, stopped, *EXACT, shape=SHAPE, WANDB_MODE="offline")
    trained(slurm, job, stopped, 3)
    # send the signal that `--signal=SIGUSR1@90` sends before the time limit; it makes the run
    # requeue the job
    slurm.run("scancel", "--signal=USR1", f"{job}.0")
    slurm.start_again(job)
    trained(slurm, job, stopped, 6)
    slurm.run("scontrol", "requeue", job)
    slurm.start_again(job)
    ends(slurm, job, "COMPLETED")

    final = record(stopped)
    runs = [*final["parts"], final]
    assert [run["status"] for run in runs] == ["interrupted", "interrupted", "completed"], (
        slurm.output(job)
    )
    assert [run["resumed_from"] for run in runs] == [None, *[str(last(stopped))] * 2]
    assert len(list(stopped.glob("*/version_0/wandb/offline-run-*"))) == 3
    assert len(list(stopped.glob(f"*/version_0/wandb/offline-run-*-{final['tracker']}"))) == 3
    assert (final["world_size"], final["num_nodes"]) == (4, 2)
    assert len(final["epochs"]) == 24
    fit(*STEPS, *EXACT, "--trainer.max_epochs=24")
    whole = tmp_path / "runs"
    assert difference(last(whole), last(stopped)) < 1e-7
    both = [losses(root / "LeNet-Synthetic/version_0") for root in (stopped, whole)]
    np.testing.assert_allclose(*both, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("clean")
def test_scancel_saves_checkpoint(slurm, tmp_path):
    job = submit(slurm, tmp_path, epochs=100000)
    trained(slurm, job, tmp_path, 2)
    ranks = [
        pid
        for pid, variables in slurm.processes(job).items()
        if "SLURM_STEP_TASKS_PER_NODE" in variables
    ]
    addresses = listening(ranks)
    assert addresses
    assert not addresses & {"0.0.0.0", "::"}
    slurm.run("scancel", job)
    slurm.reaches(job, "CANCELLED")
    assert slurm.processes(job) == {}
    assert record(tmp_path)["error"] == "by SIGTERM"
    assert last(tmp_path).exists()


def test_failed_node_requeues_job(slurm, tmp_path):
    """The requeued job continues from the newest checkpoint on other nodes."""
    job = submit(slurm, tmp_path, epochs=40)
    trained(slurm, job, tmp_path, 3)
    slurm.nodes["h2"].end()
    slurm.start_again(job, seconds=120)
    ends(slurm, job, "COMPLETED")
    # best.ckpt is the newest if the node failed after writing it and before writing last.ckpt
    newest = last(tmp_path), last(tmp_path).with_name("best.ckpt")
    assert Path(record(tmp_path)["resumed_from"]) in newest
    assert [row["epoch"] for row in record(tmp_path)["epochs"]] == list(range(40))


def test_mismatched_tasks_fail_at_once(slurm, tmp_path):
    """A job whose tasks do not match the command fails at once, and leaves no run.

    Two simultaneous steps of `srun` are two runs with separate directories.
    """
    fit = ["python", "-m", "app", "fit", *STEPS, f"--run.root={tmp_path}"]
    alone = (
        "error: this SLURM job has 4 tasks, but the command was started once: put srun before it"
    )
    unequal = "srun started 2 node(s) of 2 process(es), but the run is --trainer.num_nodes 2 of 4"
    command = shlex.join(["srun", *fit, "--trainer.devices=4"])
    job = slurm.submit(*SHAPE, "--wrap", command)
    ends(slurm, job, "FAILED")
    assert unequal in slurm.output(job)
    session = ["salloc", "--nodes=2", "--ntasks-per-node=2"]
    out = slurm.run(*session, "sh", "-c", f"{shlex.join(fit)}; test $? = 2", timeout=200)
    assert alone in out
    assert not list(tmp_path.glob("LeNet-Synthetic/version_*"))
    once = shlex.join([*fit, "--trainer.max_epochs=1"])
    # two srun steps at once, on separate ports; then one process that starts its ranks itself
    srun = "srun --overlap --ntasks=2 --ntasks-per-node=1"
    steps = f"{srun} {once} & {srun} {once}; other=$?; wait $! && test $other = 0"
    shell = f"srun --overlap --nodes=1 --ntasks=1 {once} --trainer.devices 2 --trainer.strategy ddp"
    # imitate sites where salloc opens its shell on a compute node
    on_node = f"srun --interactive --preserve-env {shlex.join(fit)}; test $? = 2"
    out = slurm.run(*session, "sh", "-c", f"{steps} && {shell}", timeout=280)
    assert alone in slurm.run(*session, "sh", "-c", on_node, timeout=200)
    assert [record(tmp_path, version)["world_size"] for version in range(3)] == [2, 2, 2], out
    assert len(list(tmp_path.glob("LeNet-Synthetic/version_*"))) == 3


@pytest.mark.usefixtures("clean")
def test_job_without_requeue_fails(slurm, tmp_path):
    job = submit(slurm, tmp_path, shape=[*TWO, "--no-requeue"], epochs=100000)
    trained(slurm, job, tmp_path, 1)
    slurm.run("scancel", "--signal=USR1", f"{job}.0")
    slurm.reaches(job, "FAILED")
    assert slurm.job(job)["ExitCode"] == "143:0", slurm.output(job)
    assert f"SLURM does not requeue job {job} (" in slurm.output(job)
    assert "submit it anew with --ckpt_path auto" in slurm.output(job)
    assert last(tmp_path).exists()


@pytest.mark.parametrize("preempted", [True, False])
def test_preempted_job_is_requeued(preempted, slurm, tmp_path):
    """The script requeues a preempted job, because SLURM does not do so if the ranks end early.

    A job that `scancel` ends is not requeued.
    """
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\ntrap 'exit 143' TERM\necho up\nwhile :; do sleep 0.1; done\n")
    python.chmod(0o755)
    path = {"PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}
    job = slurm.submit(*SHAPE, "--nodelist=h1,h2", SCRIPT, env=path)
    awaited(lambda: slurm.output(job).count("up") == 4, 60, lambda: slurm.output(job))
    if preempted:
        slurm.submit(
            "--partition=high", "--nodelist=h1,h2", "--exclusive", "--nodes=2", "--wrap=true"
        )
        slurm.start_again(job)
        assert slurm.job(job)["Restarts"] == "1"
        awaited(lambda: slurm.output(job).count("up") == 8, 60, lambda: slurm.output(job))
    slurm.run("scancel", job)
    slurm.reaches(job, "CANCELLED")
    assert slurm.processes(job) == {}

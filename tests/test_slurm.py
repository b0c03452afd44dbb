"""The shipped batch script on a real SLURM of four nodes."""

import json
import os
import sys
from pathlib import Path

import pytest
from cluster.hosts import awaited
from cluster.slurm import Slurm
from conftest import QUIET, ROOT

pytestmark = pytest.mark.cluster
SCRIPT = ROOT / "configs" / "cluster" / "slurm.sbatch"
SHAPE = ["--gres=none", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
PATH = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


@pytest.mark.timeout(600)  # four processes import torch
def test_two_nodes_of_two_tasks(slurm: Slurm, tmp_path: Path) -> None:
    flags = ["--config", "configs/quickstart.yaml", "--data.size", "240", "--run.root", tmp_path, *QUIET]
    flags += [
        "--run.test",
        "false",
        "--trainer.max_epochs",
        "1",
        "--trainer.accelerator",
        "cpu",
        "--trainer.strategy",
        "ddp",
    ]
    flags += ["--trainer.num_nodes", "2", "--trainer.devices", "2"]
    job = slurm.submit(*SHAPE, SCRIPT, *flags, env=PATH)
    assert slurm.reaches(job, "COMPLETED", "FAILED", seconds=560) == "COMPLETED", slurm.output(job)
    record = json.loads((tmp_path / "quickstart" / "version_0" / "run.json").read_text())
    assert (record["status"], record["world_size"], record["num_nodes"]) == ("completed", 4, 2)
    assert slurm.processes(job) == {}
    assert [name for node in slurm.nodes.values() for name in node.shared_memory()] == []


@pytest.mark.parametrize("preempted", [True, False])
def test_requeued_if_preempted(preempted: bool, slurm: Slurm, tmp_path: Path) -> None:
    """While there is time left SLURM does not requeue by itself a job whose ranks end; here they end as they should."""
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\ntrap 'exit 143' TERM\necho up\nwhile :; do sleep 0.1; done\n")
    python.chmod(0o755)
    path = {"PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}
    job = slurm.submit(*SHAPE, "--nodelist=h1,h2", SCRIPT, env=path)
    awaited(lambda: slurm.output(job).count("up") == 4, 60, lambda: slurm.output(job))
    if preempted:
        slurm.submit("--partition=high", "--nodelist=h1,h2", "--exclusive", "--nodes=2", "--wrap=true")
        slurm.start_again(job)
        assert slurm.job(job)["Restarts"] == "1"
        awaited(lambda: slurm.output(job).count("up") == 8, 60, lambda: slurm.output(job))
    slurm.run("scancel", job)
    slurm.reaches(job, "CANCELLED")
    assert slurm.processes(job) == {}

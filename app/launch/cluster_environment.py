"""Launcher of this process, such as torchrun or srun, and the address of rank zero."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lightning.fabric.plugins import environments

from app.launch.process import AGENT, is_task_of_srun, is_worker

OWN_AGENT = "the application"  # name of our agent as a launcher


class Launched(NamedTuple):
    """Launcher of a run, with the run's number of nodes and processes."""

    by: str
    nodes: int
    per_node: int | None  # processes per node, or None if nodes differ
    world_size: int


def launched() -> Launched | None:
    """Return the launcher that started this process as a rank, or None."""
    if is_worker():
        world = int(os.environ["WORLD_SIZE"])
        nodes = int(os.environ["GROUP_WORLD_SIZE"])
        per_node: int | None = int(os.environ["LOCAL_WORLD_SIZE"])
        if per_node != world / nodes:
            per_node = None
        by = OWN_AGENT if AGENT in os.environ else "torchrun"
        return Launched(by, nodes, per_node, world)
    if is_task_of_srun():
        world = int(os.environ["SLURM_STEP_NUM_TASKS"])
        nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
        # SLURM_NTASKS_PER_NODE describes the job, not the step
        per_node = world // nodes
        if "," in os.environ["SLURM_STEP_TASKS_PER_NODE"]:  # `3,1` is unequal, `2(x2)` is not
            per_node = None
        if world == 1 and os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
            return None  # an interactive shell, started by `srun --pty bash`
        return Launched("srun", nodes, per_node, world)
    return None


def launch_id() -> str | None:
    """Return an id of the SLURM job or the elastic agent, equal after a restart, or None."""
    launcher = launched()
    if launcher is None:
        return None
    if launcher.by == "srun":
        return f"slurm {os.environ['SLURM_JOB_ID']}"
    agent = os.getppid()
    began = ""
    with suppress(OSError):  # raised where there is no /proc
        status = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2]
        began = status.split()[19]  # start in ticks since boot, independent of the clock
    return f"{launcher.by} {socket.gethostname()} {agent} {began}"


def may_resume() -> bool:
    """Return whether a launcher may have restarted this run."""
    launcher = launched()
    if launcher is None:
        return False
    if launcher.by == "torchrun":
        return True  # it miscounts restarts
    count = "SLURM_RESTART_COUNT" if launcher.by == "srun" else "TORCHELASTIC_RESTART_COUNT"
    return os.environ.get(count, "0") != "0"


class Slurm(environments.SLURMEnvironment):
    """Cluster environment of srun's tasks.

    By default, address and port come from the SLURM step, in variables that Lightning reads. It
    would derive them from the job.

    Lightning's requeueing is disabled, because it saves the checkpoint in a signal handler. This
    handler runs at different steps on different ranks. This application requeues jobs itself.
    """

    def __init__(self) -> None:
        # not Lightning's __init__, which validates the job's variables
        self.auto_requeue = False
        self.requeue_signal = signal.SIGUSR1
        task_0 = self.resolve_root_node_address(os.environ["SLURM_STEP_NODELIST"])
        os.environ.setdefault("MASTER_ADDR", task_0)
        job = int(os.environ["SLURM_JOB_ID"])
        step = int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_PORT", str(15000 + (job + 100 * step) % 10000))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing, because the rules of `fit` check the sizes."""


def environment_of(num_nodes: int) -> environments.ClusterEnvironment:
    """Return the ClusterEnvironment; Lightning's detection would also accept mpirun and LSF."""
    launcher = launched()
    if launcher is not None:
        if launcher.by == "srun":
            return Slurm()
        return environments.TorchElasticEnvironment()
    address = os.environ.get("MASTER_ADDR")
    if num_nodes == 1 and address is not None:
        del os.environ["MASTER_ADDR"]
        print(f"MASTER_ADDR={address} is not used: this run is on one node", flush=True)
    return environments.LightningEnvironment()

"""What started this process: torchrun, srun, another process of the run, or a person; and where it meets the others."""

import os
import re
import signal
import socket
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch import Trainer

from app.errors import UserError
from app.launch.process import AGENT, RANKS, is_task_of_srun
from app.launch.rendezvous import Cluster
from app.system.lightning_patches import cluster_environment

OWN_AGENT = "the application"  # as a launcher of ranks
TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"}  # what it tells each of its workers


class Launched(NamedTuple):
    """A launcher, and what it has started.

    Attributes:
        by: Its name.
        nodes: Number of nodes.
        per_node: Processes of each node, or None where they differ.
        world_size: Processes of all nodes.
    """

    by: str
    nodes: int
    per_node: int | None
    world_size: int


def launched() -> Launched | None:
    """The launcher that started this process as one of its own; None for a process that stands alone."""
    if TorchElasticEnvironment.detect() and os.environ.keys() >= TORCHRUN:
        world, here, nodes = (int(os.environ[key]) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
        by = OWN_AGENT if AGENT in os.environ else "torchrun"
        return Launched(by, nodes, here if here * nodes == world else None, world)
    if is_task_of_srun():
        world, nodes = (int(os.environ[f"SLURM_STEP_NUM_{what}"]) for what in ("TASKS", "NODES"))
        # `2(x2)` or `3,1`; SLURM_NTASKS_PER_NODE is the job's, not the step's
        even = re.fullmatch(r"(\d+)(\(x\d+\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])
        if world == 1 and _interactive():
            return None  # `srun --pty bash`: a person on a node, who starts processes there
        return Launched("srun", nodes, int(even[1]) if even else None, world)
    return None


def other_launcher() -> bool:
    """Whether mpirun or LSF has started this process, with which Lightning deals."""
    return LSFEnvironment.detect() or MPIEnvironment.detect()


def _interactive() -> bool:
    """Whether this is a session rather than a job; by Lightning's convention, which SLURM's own names follow."""
    return os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def in_slurm_job() -> bool:
    """Whether SLURM runs this process as a task of a job that it could requeue."""
    return is_task_of_srun() and not _interactive()


def launch_id() -> str | None:
    """What stays the same when a launcher starts its processes anew: torchrun's agent on this node, or SLURM's job."""
    launcher = launched()
    if launcher is None:
        return None
    if launcher.by == "srun":
        return f"slurm {os.environ['SLURM_JOB_ID']}"
    agent = os.getppid()
    began = Path(f"/proc/{agent}/stat")  # in ticks since boot: psutil's moves when the clock is set
    when = began.read_text().rpartition(")")[2].split()[19] if began.exists() else psutil.Process(agent).create_time()
    return f"{launcher.by} {socket.gethostname()} {agent} {when}"


def may_resume() -> bool:
    """Whether a launcher may have started this run before: torchrun does not say so when nodes come and go."""
    launcher = launched()
    if launcher is None:
        return False
    count = {"srun": "SLURM_RESTART_COUNT", OWN_AGENT: "TORCHELASTIC_RESTART_COUNT"}.get(launcher.by)
    return count is None or os.environ.get(count, "0") != "0"


class Slurm(SLURMEnvironment):
    """Tasks of srun, by what SLURM says of the step; Lightning's goes by the job, and by the job's name.

    Requeueing is this application's: Lightning's saves from a signal handler, out of step with the other ranks.
    """

    def __init__(self) -> None:
        ClusterEnvironment.__init__(self)
        self.auto_requeue, self.requeue_signal = False, signal.SIGUSR1

    @property
    def main_address(self) -> str:
        """Host of task 0, unless MASTER_ADDR names another."""
        os.environ.setdefault("MASTER_ADDR", self.resolve_root_node_address(os.environ["SLURM_STEP_NODELIST"]))
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """Alike in the tasks of a step, and another one in the next job or step, unless MASTER_PORT names one."""
        job, step = (int(os.environ[f"SLURM_{what}_ID"]) for what in ("JOB", "STEP"))
        return int(os.environ.setdefault("MASTER_PORT", str(15000 + (job + 100 * step) % 10000)))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Leave this to `check_settings`, which says what to do."""


def plan_processes(strategy: Any, devices: Any, num_nodes: int, cluster: Cluster) -> dict[str, Any]:
    """Settle how many processes there are and how they meet, before a Trainer is made.

    Args:
        strategy: As for Trainer.
        devices: As for Trainer.
        num_nodes: As for Trainer.
        cluster: How nodes meet without a launcher.

    Returns:
        Arguments for Trainer in place of these: the launcher's numbers where none were given, one device where
        nothing asks for more; and `environment`, the ClusterEnvironment to use, unless it is for Lightning to find.

    Raises:
        UserError: When what the environment says of launchers contradicts itself or the flags.
    """
    if cluster.timeout <= 0:
        raise UserError(f"--cluster.timeout {cluster.timeout:g}: give a number of seconds above 0")
    launcher, name = launched(), getattr(strategy, "strategy_name", strategy)
    plan: dict[str, Any] = {}
    if launcher is not None:
        if cluster.init_method is not None and launcher.by != OWN_AGENT:
            raise UserError(f"--cluster.init_method: {launcher.by} has seen to how the nodes meet: leave it out")
        if devices == "auto" and name != "ddp_dp":  # whose tasks have several
            plan["devices"] = launcher.per_node or launcher.world_size
        if num_nodes == 1:
            plan["num_nodes"] = launcher.nodes
        return plan | ({"environment": Slurm()} if launcher.by == "srun" else {})
    _refuse_leftovers(num_nodes, elsewhere=cluster.init_method is not None or "NODE_RANK" in os.environ)
    externally = cluster.init_method is None and other_launcher()
    if num_nodes > 1:  # NodeRendezvous has found them, or dp says that it has one node
        return {"environment": LightningEnvironment()} if not externally else {}
    for flag, value in (("init_method", cluster.init_method), ("node_rank", cluster.node_rank)):
        if value is not None and num_nodes == 1:
            raise UserError(f"--cluster.{flag} {value}: there is one node: give --trainer.num_nodes, or leave it out")
    if (strategy, devices) == ("auto", "auto"):
        plan["devices"] = 1  # several only when they are asked for
    if externally:
        return plan
    if (address := os.environ.pop("MASTER_ADDR", None)) is not None:
        print(f"MASTER_ADDR={address} in the environment is not used: this run is on one node", flush=True)
    return plan | {"environment": LightningEnvironment()}


def _refuse_leftovers(num_nodes: int, elsewhere: bool) -> None:
    """Explain variables of a launcher that did not start this process, and a SLURM job whose tasks it would not be."""
    expected = {"NODE_RANK"} if num_nodes > 1 else set()
    left = [name for name in RANKS if name in os.environ and name not in expected]
    if left:
        raise UserError(
            f"{', '.join(left)} in the environment would make this process one of several, but neither torchrun nor "
            f"srun has started it: unset {' '.join(left)}"
        )
    if "SLURM_JOB_ID" not in os.environ or is_task_of_srun() or elsewhere:
        return
    for variable, what in (("SLURM_NTASKS", "tasks"), ("SLURM_JOB_NUM_NODES", "nodes")):
        if os.environ.get(variable, "1") != "1":
            raise UserError(
                f"this SLURM job has {os.environ[variable]} {what}, but the command was started once, without srun: "
                "put srun before it"
            )


def _refuse_taken_port() -> None:
    """A port that was asked for; otherwise a free one is found."""
    if port := os.environ.get("MASTER_PORT"):
        try:
            socket.create_server(("", int(port))).close()
        except (ValueError, OverflowError, OSError) as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "no port"
            raise UserError(
                f"MASTER_PORT={port} in the environment: {reason}: unset it, or name a free port"
            ) from error


def check_settings(trainer: Trainer) -> None:
    """Compare what a launcher has started, or the port that was asked for, with what the run needs.

    Raises:
        UserError: When the numbers differ, or the port is taken.
    """
    launcher = launched()
    if launcher is None:
        environment = cluster_environment(trainer)
        if type(environment) is LightningEnvironment and trainer.world_size > 1 and trainer.num_nodes == 1:
            _refuse_taken_port()
        return
    if trainer.world_size == 1 == launcher.world_size:
        return
    per_node = getattr(trainer.strategy, "num_processes", 1)
    if (launcher.nodes, launcher.per_node) == (trainer.num_nodes, per_node):
        return
    if launcher.per_node is None:
        raise UserError(
            f"{launcher.by} started {launcher.world_size} processes on {launcher.nodes} nodes, not the same number on "
            "each: " + ("give --ntasks-per-node" if launcher.by == "srun" else "give the same --nproc-per-node")
        )
    raise UserError(
        f"{launcher.by} started {launcher.nodes} node(s) of {launcher.per_node} process(es), but the run is "
        f"--trainer.num_nodes {trainer.num_nodes} of {per_node}: leave --trainer.num_nodes and --trainer.devices out, "
        f"and they follow {launcher.by}"
    )

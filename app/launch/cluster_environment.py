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

from app.launch.process import PARENT, is_task_of_srun
from app.launch.rendezvous import Cluster, Rendezvous

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
        return Launched("torchrun", nodes, here if here * nodes == world else None, world)
    if is_task_of_srun():
        world, nodes = (int(os.environ[f"SLURM_STEP_NUM_{what}"]) for what in ("TASKS", "NODES"))
        # `2(x2)` or `3,1`; SLURM_NTASKS_PER_NODE is the job's, not the step's
        even = re.fullmatch(r"(\d+)(\(x\d+\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])
        if world == 1 and _interactive():
            return None  # `srun --pty bash`: a person on a node, who starts processes there
        return Launched("srun", nodes, int(even[1]) if even else None, world)
    return None


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
    return f"torchrun {socket.gethostname()} {agent} {when}"


def started_anew() -> bool:
    """Whether a launcher may have started this run before: torchrun does not say so when nodes come and go."""
    launcher = launched()
    return launcher is not None and (launcher.by == "torchrun" or os.environ.get("SLURM_RESTART_COUNT", "0") != "0")


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
        """Leave this to `app.fit.rules`, which say what to do."""


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
        UserError: When the nodes' address, or the number of this one, is missing or wrong.
    """
    launcher, name = launched(), getattr(strategy, "strategy_name", strategy)
    plan: dict[str, Any] = {}
    if launcher is not None:
        if devices == "auto" and name != "ddp_dp":  # whose tasks have several
            plan["devices"] = launcher.per_node or launcher.world_size
        if num_nodes == 1:
            plan["num_nodes"] = launcher.nodes
        return plan | ({"environment": Slurm()} if launcher.by == "srun" else {})
    other_launcher = cluster.init_method is None and (LSFEnvironment.detect() or MPIEnvironment.detect())
    if num_nodes > 1 and not other_launcher:
        return {"environment": Rendezvous(cluster, num_nodes)}
    if (strategy, devices) == ("auto", "auto"):
        plan["devices"] = 1  # several only when they are asked for
    if other_launcher:
        return plan
    if PARENT not in os.environ and (address := os.environ.pop("MASTER_ADDR", None)) is not None:
        print(f"MASTER_ADDR={address} in the environment is not used: this run is on one node", flush=True)
    return plan | {"environment": LightningEnvironment()}


def use_interface_to(address: str) -> None:
    """Have gloo and NCCL use the network interface over which the main node is reached, unless one was chosen.

    gloo takes the one that the host's name resolves to, which is often the loopback.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
            if own == "127.0.0.1" and not address.startswith(("127.", "localhost")):
                # this host, whose own name is often on the loopback: by which way it reaches any other
                probe.connect(("192.0.2.1", 9))  # an address that nobody has: https://www.rfc-editor.org/rfc/rfc5737
                own = probe.getsockname()[0]
    except OSError:
        return
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in entries) and name != "lo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # the very one, not those that begin alike

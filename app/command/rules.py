"""Rules that compare flags with this machine and this process's launcher, before anything is built.

The rules of `flag_rules` compare flags with each other.
"""

import os
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from app.command.flag_rules import flag_problems
from app.command.resolved import Resolved
from app.data.shares import unequal_shares
from app.errors import UserError, nearest, one_line
from app.launch.cluster_environment import OWN_AGENT, launched
from app.launch.live import LIVE
from app.launch.process import ADDRESSES, RANKS, is_task_of_srun

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # variables of mpirun


def check(command: str, config: Namespace) -> Resolved:
    """Check all rules before anything is built, and return the `Resolved` configuration.

    Args:
        command: The command: `fit`, `validate`, `test` or `predict`.
        config: The command's configuration with all defaults.

    Raises:
        UserError: When the flags break a rule.
    """
    resolved = Resolved(config, command, launched())
    for problem in problems(resolved):
        raise UserError(problem)
    return resolved


def problems(s: Resolved) -> Iterator[str]:
    """Yield messages about flags that cannot work, here or anywhere, each with a remedy."""
    yield from flag_problems(s)
    for rule in (_devices, _needs_cuda, _compiler, _starter, _rendezvous, _strategy, _sizes):
        yield from rule(s)
    size = s.given("data.batch_size")
    divides = s.command == "fit" and s.virtual_devices is None and isinstance(size, int)
    if divides and size > 0 and size % s.world_size:
        yield unequal_shares(size, s.world_size)


def _sizes(s: Resolved) -> Iterator[str]:
    """Check that the launcher started as many processes as the flags request."""
    launcher = s.launcher
    if launcher is None:
        return
    if launcher.per_node is None:
        flag = "the same --nproc-per-node"
        if launcher.by == "srun":
            flag = "--ntasks-per-node"
        yield (
            f"{launcher.by} started {launcher.world_size} processes, not the same number on each "
            f"node: give {flag}"
        )
    started = (launcher.nodes, launcher.per_node)
    if started != (s.nodes, s.processes) and (s.world_size, launcher.world_size) != (1, 1):
        yield (
            f"{launcher.by} started {launcher.nodes} node(s) of {launcher.per_node} process(es), "
            f"but the run is --trainer.num_nodes {s.nodes} of {s.processes}: leave "
            f"--trainer.num_nodes and --trainer.devices out to follow {launcher.by}"
        )


def _devices(s: Resolved) -> Iterator[str]:
    cls = s.accelerator_class
    name = s.trainer.accelerator
    devices = s.trainer.devices
    if cls is None or not cls.is_available():
        near = ""
        if cls is None:
            near = nearest(name, AcceleratorRegistry)
        yield (
            f"--trainer.accelerator {name}: there is none on this machine{near}: leave it out, or "
            "use cpu"
        )
    elif devices != "auto":
        try:
            cls.parse_devices(devices)
        except (MisconfigurationException, TypeError, ValueError) as error:
            yield f"--trainer.devices {devices!r}: {one_line(str(error))}: give a count"


def _needs_cuda(s: Resolved) -> Iterator[str]:
    """Check flags that have an effect on CUDA only."""
    if s.accelerator == "cuda":
        return
    is_rounded = s.given("model.matmul_precision") not in (None, "highest")
    for flag, is_set in (
        ("trainer.benchmark", s.trainer.benchmark),
        ("model.compile reduce-overhead", s.reduces_overhead),
        ("model.matmul_precision", is_rounded),
    ):
        if is_set:
            yield f"--{flag} has no effect on the {s.accelerator} accelerator: leave it out"


def _compiler(s: Resolved) -> Iterator[str]:
    """Check for the compiler of torch.compile: C++ for a CPU, C for a GPU (Triton)."""
    known = os.environ.get("CXX", "g++ clang++ c++")
    if s.accelerator == "cuda":
        known = os.environ.get("CC", "gcc clang cc")
    if s.compiled and not any(map(shutil.which, known.split())):
        yield (
            f"--model.compile: torch needs a compiler ({known}): install it, or leave the flag out"
        )


def _starter(s: Resolved) -> Iterator[str]:
    """Reject variables and flags that contradict this process's launcher."""
    cluster = s.config.cluster
    by = s.launcher.by if s.launcher else None
    if by not in (None, OWN_AGENT) and cluster.init_method is not None:
        yield f"--cluster.init_method: {by} decides how the nodes meet: leave it out"
    if s.live and by not in (None, OWN_AGENT) and LIVE not in os.environ:
        yield (
            f"--cluster.live true: {by} would restart all ranks: start one task without {by}, and "
            "let others run python -m app join"
        )
    if s.stands_alone:
        if any(os.environ.get(name, "1") != "1" for name in MPI_SIZES):
            yield "mpirun cannot start runs: use torchrun or srun"
        left = [name for name in RANKS if name in os.environ]
        if s.nodes > 1 and "NODE_RANK" in left:
            left.remove("NODE_RANK")
        if left:
            yield (
                f"{', '.join(left)} in the environment, but no launcher started this process: "
                f"unset {' '.join(left)}"
            )
        meets = cluster.init_method is not None or "NODE_RANK" in os.environ
        if "SLURM_JOB_ID" in os.environ and not is_task_of_srun() and not meets:
            for variable, unit in (("SLURM_NTASKS", "tasks"), ("SLURM_JOB_NUM_NODES", "nodes")):
                count = os.environ.get(variable, "1")
                if count != "1":
                    yield (
                        f"this SLURM job has {count} {unit}, but the command was started once: put "
                        "srun before it"
                    )
    for flag in ("init_method", "node_rank"):
        if cluster[flag] is not None and s.stands_alone and s.nodes == 1 and not s.live:
            yield (
                f"--cluster.{flag} {cluster[flag]}: there is one node: give --trainer.num_nodes, "
                "or leave it out"
            )
    for flag in ("max_restarts", "log_dir"):
        if cluster[flag] and by != OWN_AGENT and (by or not s.agent_processes):
            yield (
                f"--cluster.{flag} {cluster[flag]} has no effect: {by or 'no agent'} starts the "
                "processes of this run: leave it out"
            )


def _rendezvous(s: Resolved) -> Iterator[str]:
    """Check the rendezvous address and this node's rank."""
    if s.nodes > 1 and (s.single_process or s.spawns):
        yield (f"--trainer.strategy {s.name} works inside one node, not on {s.nodes}: use ddp")
    if not s.stands_alone or s.nodes == 1 or s.single_process:
        return
    method = s.config.cluster.init_method or "env://"
    if not _is_address(method):
        yield f"--cluster.init_method {method}: give tcp://HOST:PORT, file:///PATH or env://"
    if method == "env://":
        missing = [name for name in ADDRESSES if not os.environ.get(name)]
        if missing:
            yield (
                f"--trainer.num_nodes {s.nodes}: where do the nodes meet? give "
                f"--cluster.init_method tcp://HOST:PORT, or set {' and '.join(missing)}, or use "
                "torchrun or srun"
            )
        elif not 0 < int(os.environ["MASTER_PORT"]) < 2**16:
            port = os.environ["MASTER_PORT"]
            yield f"MASTER_PORT={port} in the environment: give a port, 1 to 65535"
    rank = s.config.cluster.node_rank
    if rank is None:
        rank = os.environ.get("NODE_RANK")
    if rank is None:
        yield (
            f"--trainer.num_nodes {s.nodes}: which of them is this? give --cluster.node_rank, or "
            "set NODE_RANK"
        )
    elif int(rank) >= s.nodes:
        yield (
            f"--cluster.node_rank or NODE_RANK {rank}: the nodes are 0 to {s.nodes - 1}, for "
            f"--trainer.num_nodes {s.nodes}"
        )


def _is_address(method: str) -> bool:
    url = urlsplit(method)
    if url.scheme == "file":
        return bool(url.path) and not url.netloc
    try:
        return method == "env://" or bool(url.scheme == "tcp" and url.hostname and url.port)
    except ValueError:  # the port is out of range
        return False


def _strategy(s: Resolved) -> Iterator[str]:
    """Reject strategies and options that do not fit the launcher, the devices or the processes."""
    flag = f"--trainer.strategy {s.name}"
    backend = s.options.get("process_group_backend")
    if s.launcher and (s.spawns or (s.launcher.world_size > 1 and s.single_process)):
        yield (
            f"{flag} does not work with {s.launcher.by}, which has started the processes: use "
            "--trainer.strategy ddp"
        )
    usable = ["gloo"]
    if s.accelerator == "cuda":
        usable = ["nccl", "gloo"]
    if backend is not None and backend not in usable:
        yield (
            f"--trainer.strategy.process_group_backend {backend}: on {s.accelerator} use "
            f"{' or '.join(usable)}"
        )
    if s.hook is not None and s.world_size == 1:
        yield (
            f"{flag}: {s.hook.__qualname__} has no effect, because this run is one process: use "
            "--trainer.strategy ddp without a hook, or give more --trainer.devices"
        )
    bf16 = (default_hooks.bf16_compress_hook, default_hooks.bf16_compress_wrapper)
    # torch's bf16 hooks require NCCL, even on a CPU
    has_nccl = dist.is_nccl_available() or dist.is_xccl_available()
    if not has_nccl and (s.hook in bf16 or s.options.get("ddp_comm_wrapper") in bf16):
        yield (
            f"{flag}: torch sends bfloat16 only where it was built with NCCL: use "
            "--trainer.strategy ddp_fp16"
        )
    if s.trainer.sync_batchnorm:
        if s.world_size == 1:
            yield (
                f"--trainer.sync_batchnorm has no effect under {s.name} in one process: use "
                "--trainer.strategy ddp, or leave it out"
            )
        if s.accelerator == "cpu":
            yield "--trainer.sync_batchnorm works on GPUs only: leave it out on CPU"

"""Rules about this machine, and about this process's launcher."""

import errno
import importlib.util
import os
import shutil
import socket
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from app.data import ImageData
from app.errors import nearest
from app.fit.resolved import Resolved, class_of
from app.fit.rule import Found, Rule
from app.launch.cluster_environment import OWN_AGENT
from app.launch.process import RANKS, is_task_of_srun


def _no_accelerator(s: Resolved) -> Found:
    cls = s.accelerator_class
    return cls is not None and not cls.is_available()


def _cannot_give(s: Resolved) -> Found:
    """Devices that Lightning would not find on the accelerator that is here; of a CPU it wants a number."""
    cls = s.accelerator_class
    if cls is None or s.trainer.devices == "auto":
        return False
    try:
        cls.parse_devices(s.trainer.devices)
    except (MisconfigurationException, TypeError, ValueError):
        return {"there": "" if s.accelerator == "cpu" else f"; this machine has {cls.auto_device_count()}"}
    return False


def _left_over(s: Resolved) -> Found:
    """Variables of a launcher that did not start this process, which would make it one of several."""
    expected = {"NODE_RANK"} if s.nodes > 1 else set()
    left = [name for name in RANKS if name in s.environ and name not in expected] if s.stands_alone else []
    return bool(left) and {"left": ", ".join(left), "unset": " ".join(left)}


def _without_srun(s: Resolved) -> Found:
    """Find a SLURM job of several tasks whose command was started without srun."""
    elsewhere = s.config.cluster.init_method is not None or "NODE_RANK" in s.environ
    if not s.stands_alone or "SLURM_JOB_ID" not in s.environ or is_task_of_srun() or elsewhere:
        return False
    sizes = ((s.environ.get(variable, "1"), what) for variable, what in SLURM_SIZES.items())
    return next(({"count": count, "what": what} for count, what in sizes if count != "1"), None)


POWER_SGD = (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook)
SLURM_SIZES = {"SLURM_NTASKS": "tasks", "SLURM_JOB_NUM_NODES": "nodes"}


def _one_node(s: Resolved) -> Found:
    given = ((flag, getattr(s.config.cluster, flag)) for flag in ("init_method", "node_rank"))
    used = not s.stands_alone or s.nodes > 1
    return next(({"flag": flag, "value": value} for flag, value in given if value is not None and not used), None)


def _no_agent(s: Resolved) -> Found:
    """Settings of our agent in a run that another one starts, or that is one process."""
    cluster = s.config.cluster
    given = [("max_restarts", cluster.max_restarts)] * bool(cluster.max_restarts)
    given += [("log_dir", cluster.log_dir)] * (cluster.log_dir is not None)
    if not given or (s.launcher.by == OWN_AGENT if s.launcher else s.agent_processes):
        return False
    remedy = "leave it out" if s.launcher else "use --trainer.strategy ddp on several devices, or leave it out"
    (flag, value), by = given[0], s.launcher.by if s.launcher else "no agent"
    return {"flag": flag, "value": value, "by": by, "remedy": remedy}


def _no_place(s: Resolved) -> Found:
    """Find an address that has none of the three forms; the default is `env://`."""
    method = s.config.cluster.init_method or "env://"
    url = urlsplit(method)
    try:
        there = os.path.exists(url.path) and not os.path.isfile(url.path)
        is_file = url.path and not (url.netloc or there)
        known = {"file": is_file, "tcp": url.hostname and url.port, "env": method == "env://"}
    except ValueError:  # of a port out of range
        known = {}
    return s.nodes_meet and not known.get(url.scheme) and {"method": method}


def _no_address(s: Resolved) -> Found:
    if not s.nodes_meet or (s.config.cluster.init_method or "env://") != "env://":
        return False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not s.environ.get(name)]
    return bool(missing) and {"missing": " and ".join(missing)}


def _no_port(s: Resolved) -> Found:
    port = s.environ.get("MASTER_PORT", "")
    used = s.nodes_meet and (s.config.cluster.init_method or "env://") == "env://"
    if not used or (port.isdecimal() and 0 < int(port) < 2**16):
        return False
    return {"port": port, "remedy": "give a port, 1 to 65535" if port.isdecimal() else "give a number"}


def _no_node_rank(s: Resolved) -> Found:
    return s.nodes_meet and s.config.cluster.node_rank is None and "NODE_RANK" not in s.environ


def _wrong_node_rank(s: Resolved) -> Found:
    given = s.config.cluster.node_rank
    where, rank = ("NODE_RANK", s.environ.get("NODE_RANK", "")) if given is None else ("--cluster.node_rank", given)
    right = str(rank).isdecimal() and int(rank) < s.nodes
    return s.nodes_meet and not right and {"where": where, "rank": rank, "last": s.nodes - 1}


def _unusable_backend(s: Resolved) -> Found:
    backend = s.options.get("process_group_backend")
    serves = {name: devices for name, devices in dist.Backend.backend_capability.items() if name != "fake"}
    if backend is None:
        return False
    if backend not in serves:
        return {"backend": backend, "why": f"unknown{nearest(backend, serves)}"}
    usable = [name for name in serves if s.accelerator in serves[name] and dist.is_backend_available(name)]
    why = (
        f"does not serve {s.accelerator}" if s.accelerator not in serves[backend] else "this torch was built without it"
    )
    return backend not in usable and {"backend": backend, "why": f"{why}: use {' or '.join(usable)}"}


def _sends_bf16(s: Resolved) -> Found:
    wrapper = s.options.get("ddp_comm_wrapper") is default_hooks.bf16_compress_wrapper
    without_nccl = not (dist.is_nccl_available() or dist.is_xccl_available())  # torch's condition, on CPU, too
    return (s.hook is default_hooks.bf16_compress_hook or wrapper) and without_nccl


def _uneven(s: Any) -> Found:
    if not s.launcher or s.launcher.per_node is not None:
        return False
    return {"remedy": "give --ntasks-per-node" if s.launcher.by == "srun" else "give the same --nproc-per-node"}


def _other_numbers(s: Any) -> Found:
    if not s.launcher or s.world_size == 1 == s.launcher.world_size:
        return False
    return (s.launcher.nodes, s.launcher.per_node) != (s.nodes, s.processes)


def _taken_port(s: Resolved) -> Found:
    """Find a requested port that is taken; without a request, any free port is used."""
    port = s.environ.get("MASTER_PORT")
    if port is None or not s.stands_alone or s.other_launcher or s.nodes > 1 or s.world_size == 1:
        return False
    try:
        socket.create_server(("", int(port))).close()
    except OSError as error:
        return {"port": port, "why": os.strerror(error.errno or errno.EADDRNOTAVAIL)}
    except (ValueError, OverflowError):
        return {"port": port, "why": "no port"}
    return False


def _unshared_batch(s: Resolved) -> Found:
    data = class_of(s.config.data)
    size = s.config.data.get("init_args.batch_size") if data is not None and issubclass(data, ImageData) else None
    if s.command != "fit" or not isinstance(size, int) or size < 1 or size % s.world_size == 0:
        return False
    if s.virtual_devices is not None:
        return False
    return {"size": size, "near": ImageData.nearest_shares(size, s.world_size)}


ON_GPUS = (
    ("trainer.benchmark", lambda s: s.trainer.benchmark),
    ("model.cuda_graph", lambda s: s.given("cuda_graph")),
    ("model.compile reduce-overhead", lambda s: s.given("compile") == "reduce-overhead"),
    ("model.matmul_precision", lambda s: s.given("matmul_precision") not in (None, "highest")),
)


def _not_on_this_device(s: Resolved) -> Found:
    given = (flag for flag, is_given in ON_GPUS if is_given(s))
    return s.accelerator != "cuda" and next(({"flag": flag} for flag in given), None)


def _no_compiler(s: Resolved) -> Found:
    """Find a missing compiler: torch.compile writes C++ for a CPU, and Triton needs C for a GPU."""
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    if s.accelerator == "cuda":
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
        if s.compiled and importlib.util.find_spec("triton") is None:
            return {"missing": "the package triton"}
    found = any(map(shutil.which, compilers))
    return s.compiled and not found and {"missing": f"a compiler ({' or '.join(compilers)})"}


LAUNCHER = (
    Rule(
        _uneven,
        "{s.launcher.by} started {s.launcher.world_size} processes on {s.launcher.nodes} nodes, not the same "
        "number on each: {remedy}",
    ),
    Rule(
        _other_numbers,
        "{s.launcher.by} started {s.launcher.nodes} node(s) of {s.launcher.per_node} process(es), but the run is "
        "--trainer.num_nodes {s.nodes} of {s.processes}: leave --trainer.num_nodes and --trainer.devices out, and"
        " they follow {s.launcher.by}",
    ),
)
HERE = (
    Rule(
        lambda s: s.accelerator_class is None and {"near": nearest(str(s.trainer.accelerator), AcceleratorRegistry)},
        "--trainer.accelerator {s.trainer.accelerator}: unknown{near}: leave it out, or use cpu",
    ),
    Rule(
        _no_accelerator,
        "--trainer.accelerator {s.trainer.accelerator}: there is none on this machine: leave it out, or use cpu",
    ),
    Rule(
        _cannot_give,
        "--trainer.devices {s.trainer.devices!r}: the {s.accelerator} accelerator cannot give that{there}: give a"
        " count from 1 on",
    ),
    Rule(_not_on_this_device, "--{flag} has no effect on the {s.accelerator} accelerator: leave it out"),
    Rule(_no_compiler, "--model.compile: torch needs {missing} for it: install it, or leave the flag out"),
    Rule(
        lambda s: s.launcher and s.launcher.by != OWN_AGENT and s.config.cluster.init_method is not None,
        "--cluster.init_method: {s.launcher.by} decides how the nodes meet: leave it out",
    ),
    Rule(
        _left_over,
        "{left} in the environment would make this process one of several, but neither torchrun nor srun has "
        "started it: unset {unset}",
    ),
    Rule(
        _without_srun,
        "this SLURM job has {count} {what}, but the command was started once, without srun: put srun before it",
    ),
    Rule(_one_node, "--cluster.{flag} {value}: there is one node: give --trainer.num_nodes, or leave it out"),
    Rule(_no_agent, "--cluster.{flag} {value} has no effect: {by} starts the processes of this run: {remedy}"),
    Rule(
        lambda s: s.traits.single_process and s.nodes > 1,
        "--trainer.strategy {s.name} works inside one node, not on {s.nodes}: use --trainer.strategy ddp or ddp_dp",
    ),
    Rule(_no_place, "--cluster.init_method {method}: give tcp://HOST:PORT, file:///PATH or env://"),
    Rule(
        _no_address,
        "--trainer.num_nodes {s.nodes}: where do the nodes meet? give --cluster.init_method tcp://HOST:PORT, or "
        "set {missing}, or start them with torchrun or srun",
    ),
    Rule(_no_port, "MASTER_PORT={port} in the environment: {remedy}"),
    Rule(
        _no_node_rank,
        "--trainer.num_nodes {s.nodes}: which of them is this? give --cluster.node_rank 0, 1, …, or set NODE_RANK",
    ),
    Rule(_wrong_node_rank, "{where} {rank}: the nodes are 0 to {last}, for --trainer.num_nodes {s.nodes}"),
    Rule(
        lambda s: s.sync_batchnorm and not s.traits.replicas_communicate,
        "--trainer.sync_batchnorm has no effect under dp, whose replicas do not communicate: use "
        "--trainer.strategy ddp",
    ),
    Rule(
        lambda s: s.launcher and s.launcher.world_size > 1 and s.traits.single_process,
        "--trainer.strategy {s.name} is one process, but {s.launcher.by} started several, which would train as "
        "many models: start it without, or use --trainer.strategy ddp",
    ),
    Rule(
        lambda s: s.launcher and s.options.get("start_method", "popen") != "popen",
        "ddp_spawn, ddp_fork and ddp_notebook start their own processes, which {s.launcher.by} has done already: "
        "use --trainer.strategy ddp, or start without {s.launcher.by}",
    ),
    Rule(_unusable_backend, "--trainer.strategy.process_group_backend {backend}: {why}"),
    Rule(
        lambda s: (
            s.traits.sends_between_devices
            and (s.options.get("process_group_backend"), s.accelerator) == ("gloo", "cuda")
        ),
        "--trainer.strategy.process_group_backend gloo: it cannot send from one GPU to another, as {s.name} does:"
        " leave it out",
    ),
    Rule(
        lambda s: s.hook is not None and s.world_size == 1,
        "--trainer.strategy {s.name}: {s.hook.__qualname__} changes how processes communicate, but this run is "
        "one process: use --trainer.strategy ddp without a hook, or give more --trainer.devices",
    ),
    Rule(
        lambda s: s.hook in POWER_SGD and s.accelerator == "cpu" and torch.cuda.is_available(),
        "--trainer.strategy {s.name} on the CPU of a machine that has a GPU: torch's hook synchronises that one, "
        "and fails: put CUDA_VISIBLE_DEVICES= before the command",
    ),
    Rule(
        _sends_bf16,
        "--trainer.strategy {s.name}: torch refuses to send bfloat16 where it was built without NCCL: use "
        "--trainer.strategy ddp_fp16",
    ),
    Rule(
        lambda s: s.nodes == 1 and s.traits.needs_several_nodes,
        "--trainer.strategy {s.name} {s.traits.needs_several_nodes}: use --trainer.strategy "
        "{s.traits.on_one_node}, or give more --trainer.num_nodes",
    ),
    Rule(
        lambda s: s.sync_batchnorm and s.world_size == 1,
        "--trainer.sync_batchnorm has no effect in one process: use --trainer.strategy ddp, or leave it",
    ),
    Rule(
        lambda s: s.sync_batchnorm and s.accelerator == "cpu",
        "--trainer.sync_batchnorm works on GPUs only: leave it out on CPU",
    ),
    *LAUNCHER,
    Rule(_taken_port, "MASTER_PORT={port} in the environment: {why}: unset it, or name a free port"),
    Rule(
        _unshared_batch,
        "a global batch of {size} cannot be shared equally by {s.world_size} ranks: use --data.batch_size {near},"
        " or another --trainer.devices",
    ),
)

"""Whether what was asked for can work: one table of rules, each with what it says and what to do instead.

`FLAGS` hold on any machine, and `resolve` checks them; `HERE` are about this machine and what started this process;
`BUILT` need the Trainer. `check` does the first two, before anything is built.
"""

import errno
import importlib.util
import inspect
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from app.data import ImageData
from app.errors import UserError, nearest
from app.fit.asked import Asked
from app.fit.devices import (
    accelerator_class,
    agent_processes,
    class_of,
    devices_per_node,
)
from app.launch.cluster_environment import OWN_AGENT, Launched, launched
from app.launch.process import RANKS, is_task_of_srun
from app.parallel import SplitForward

Found = Mapping[str, Any] | bool | None


class Rule(NamedTuple):
    """One way in which a run cannot work.

    Attributes:
        broken: Whether it is so: true, or fields of the texts beside `s`, which is what the rule was asked about.
        message: What is wrong, with the flag and its value.
        remedy: What to do instead.
    """

    broken: Callable[[Any], Found]
    message: str
    remedy: str


COMPILES = (SingleDeviceStrategy, DDPStrategy)


def _unknown_strategy(s: Asked) -> Found:
    name, known = s.config.trainer.strategy, ["auto", *StrategyRegistry.available_strategies()]
    return isinstance(name, str) and name not in known and {"near": nearest(name, known)}


def _no_devices(s: Asked) -> Found:
    try:
        return devices_per_node(s.config.trainer) < 1
    except UserError:
        return True


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """All numbers of a section, each with its flag."""
    if isinstance(value, Namespace | dict):
        for key, inner in (vars(value) if isinstance(value, Namespace) else value).items():
            yield from _numbers(inner, path if key == "init_args" else f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, path)
    elif isinstance(value, float):
        yield path, value


def _not_finite(s: Asked) -> Found:
    sections = (_numbers(s.config.get(name), name) for name in ("trainer", "model", "data", "cluster"))
    found = ((flag, value) for numbers in sections for flag, value in numbers if not math.isfinite(value))
    return next(({"flag": flag, "value": value} for flag, value in found), None)


def _no_folder(s: Asked) -> Found:
    """A name that no folder below the root can have. Source of the limit: NAME_MAX of linux/limits.h."""
    name, path = s.config.run.name, PurePath(s.config.run.name)
    if "\0" in name:
        return {"why": "it holds a NUL character"}
    if path.is_absolute() or ".." in path.parts:
        return {"why": "it leads out of --run.root"}
    return any(len(os.fsencode(part)) > 255 for part in path.parts) and {"why": "it is longer than 255 bytes"}


def _too_low(s: Asked) -> Found:
    minima = s.strategy.minima(s.options) if hasattr(s.strategy, "minima") else {}
    given = ((name, s.options.get(name), least) for name, least in minima.items())
    low = ({"name": name, "value": v, "least": least} for name, v, least in given if v is not None and v < least)
    return next(low, None)


def _without_hook(s: Asked) -> Found:
    names = ("ddp_comm_state", "ddp_comm_wrapper") if s.hook is None else ()
    return next(({"name": name} for name in names if s.options.get(name) is not None), None)


def _not_in_a_graph(s: Asked) -> Found:
    """What happens between the parts of a step, or to another step than the captured one."""
    by_step = s.given("scheduler") and s.given("scheduler_interval") == "step"
    conflicts = (
        ("trainer.gradient_clip_val", s.trainer.gradient_clip_val, "the gradients are not seen before the update"),
        ("trainer.accumulate_grad_batches", s.trainer.accumulate_grad_batches > 1, "each batch is an update"),
        ("trainer.precision 16-mixed", s.trainer.precision in ("16-mixed", "16", 16), "the scale of the loss changes"),
        ("model.scheduler_interval step", by_step, "the captured step has its learning rate"),
        ("model.compile reduce-overhead", s.given("compile") == "reduce-overhead", "that has graphs of its own"),
        ("trainer.detect_anomaly", s.trainer.detect_anomaly, "it reads each gradient"),
    )
    found = ({"flag": flag, "why": why} for flag, is_so, why in conflicts if is_so)
    return bool(s.given("cuda_graph")) and next(found, None)


FLAGS = (
    Rule(_unknown_strategy, "--trainer.strategy {s.config.trainer.strategy}: unknown{near}", ""),
    Rule(
        _no_devices,
        "--trainer.devices {s.config.trainer.devices!r}: the {s.device} accelerator cannot give that",
        "give a count from 1 on",
    ),
    Rule(lambda s: s.nodes < 1, "--trainer.num_nodes {s.nodes}", "give 1 or more"),
    Rule(
        lambda s: s.trainer.accumulate_grad_batches < 1,
        "--trainer.accumulate_grad_batches {s.trainer.accumulate_grad_batches}",
        "give 1 or more",
    ),
    Rule(
        lambda s: not isinstance(s.config.seed_everything, bool) and not 0 <= s.config.seed_everything < 2**32,
        "--seed_everything {s.config.seed_everything}",
        "give a number from 0 to 4294967295",
    ),
    Rule(_not_finite, "--{flag} {value}", "give a finite number"),
    Rule(_no_folder, "--run.name {s.config.run.name!r}: {why}", "give another name"),
    Rule(
        lambda s: s.config.cluster.timeout <= 0,
        "--cluster.timeout {s.config.cluster.timeout:g}",
        "give a number of seconds above 0",
    ),
    Rule(
        lambda s: s.config.cluster.max_restarts < 0,
        "--cluster.max_restarts {s.config.cluster.max_restarts}",
        "give 0 or more",
    ),
    Rule(
        lambda s: s.config.run.profile and s.command != "fit",
        "--profile: {s.command} takes no step of training",
        "give it to fit, or leave it out",
    ),
    Rule(
        lambda s: s.config.run.profile and s.config.trainer.profiler is not None,
        "--profile and --trainer.profiler: one of them can look at a step",
        "leave the other out",
    ),
    Rule(
        lambda s: s.config.run.profile and (s.config.trainer.fast_dev_run or s.config.trainer.barebones),
        "--profile: a run that leaves no traces has no directory for its own",
        "leave --trainer.fast_dev_run and --trainer.barebones out",
    ),
    Rule(_too_low, "--trainer.strategy.{name} {value}", "give {least} or more"),
    Rule(_without_hook, "--trainer.strategy.{name} has no effect without a hook", "give ddp_comm_hook, too"),
    Rule(
        lambda s: s.hook is not None and "bucket" not in inspect.signature(s.hook).parameters,
        "--trainer.strategy.ddp_comm_hook {s.hook.__qualname__}: not a hook",
        "give a function of state and bucket",
    ),
    Rule(
        lambda s: s.options.get("static_graph") and s.trainer.accumulate_grad_batches > 1,
        "--trainer.strategy.static_graph true: torch fails where gradients are accumulated",
        "leave it out, or --trainer.accumulate_grad_batches {s.trainer.accumulate_grad_batches}",
    ),
    Rule(
        lambda s: s.given("cuda_graph") and (s.world_size > 1 or s.strategy is not SingleDeviceStrategy),
        "--model.cuda_graph true is for one GPU, not for --trainer.strategy {s.name}",
        "leave it out",
    ),
    Rule(_not_in_a_graph, "--model.cuda_graph true with --{flag}: {why}", "leave one of them out"),
    Rule(
        lambda s: s.given("channels_last") is True and not s.model.convolutional,
        "--model.channels_last true: {s.model.__name__} has no convolutions, to which alone it matters",
        "leave it out",
    ),
    Rule(
        lambda s: s.compiled and (issubclass(s.strategy, SplitForward) or not issubclass(s.strategy, COMPILES)),
        "--model.compile does not work with --trainer.strategy {s.name}, which takes the network apart",
        "leave it out, or use --trainer.strategy ddp",
    ),
    Rule(
        lambda s: s.given("compile") == "reduce-overhead" and s.trainer.accumulate_grad_batches > 1,
        "--model.compile reduce-overhead: the next batch overwrites the gradients that are accumulated",
        "use default, or leave --trainer.accumulate_grad_batches out",
    ),
    Rule(
        lambda s: (
            s.given("optimizer.init_args.fused") and s.trainer.precision == "16-mixed" and s.trainer.gradient_clip_val
        ),
        "--model.optimizer.fused true with --trainer.gradient_clip_val: under 16-mixed there is no moment between "
        "unscaling and update in which to clip",
        "leave one of them out, or use --trainer.precision bf16-mixed",
    ),
)


def _no_accelerator(s: Asked) -> Found:
    cls = accelerator_class(s.trainer)
    return cls is not None and not cls.is_available()


def _cannot_give(s: Asked) -> Found:
    """Devices that Lightning would not find on the accelerator that is here; of a CPU it wants a number."""
    cls = accelerator_class(s.trainer)
    if cls is None or s.trainer.devices == "auto":
        return False
    try:
        cls.parse_devices(s.trainer.devices)
    except (MisconfigurationException, TypeError, ValueError):
        return {"there": "" if s.device == "cpu" else f", of which there are {cls.auto_device_count()}"}
    return False


def _left_over(s: Asked) -> Found:
    """Variables of a launcher that did not start this process, which would make it one of several."""
    expected = {"NODE_RANK"} if s.nodes > 1 else set()
    left = [name for name in RANKS if name in s.environ and name not in expected] if s.stands_alone else []
    return bool(left) and {"left": ", ".join(left), "unset": " ".join(left)}


def _without_srun(s: Asked) -> Found:
    """A SLURM job of several tasks whose command was started once."""
    elsewhere = s.config.cluster.init_method is not None or "NODE_RANK" in s.environ
    if not s.stands_alone or "SLURM_JOB_ID" not in s.environ or is_task_of_srun() or elsewhere:
        return False
    sizes = ((s.environ.get(variable, "1"), what) for variable, what in SLURM_SIZES.items())
    return next(({"count": count, "what": what} for count, what in sizes if count != "1"), None)


POWER_SGD = (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook)
SLURM_SIZES = {"SLURM_NTASKS": "tasks", "SLURM_JOB_NUM_NODES": "nodes"}


def _one_node(s: Asked) -> Found:
    given = ((flag, getattr(s.config.cluster, flag)) for flag in ("init_method", "node_rank"))
    used = not s.stands_alone or s.nodes > 1
    return next(({"flag": flag, "value": value} for flag, value in given if value is not None and not used), None)


def _no_agent(s: Asked) -> Found:
    """Settings of our agent in a run that another one starts, or that is one process."""
    cluster = s.config.cluster
    given = [("max_restarts", cluster.max_restarts)] * bool(cluster.max_restarts)
    given += [("log_dir", cluster.log_dir)] * (cluster.log_dir is not None)
    if not given or (s.launcher.by == OWN_AGENT if s.launcher else agent_processes(s.config)):
        return False
    remedy = "leave it out" if s.launcher else "use --trainer.strategy ddp on several devices, or leave it out"
    (flag, value), by = given[0], s.launcher.by if s.launcher else "no agent"
    return {"flag": flag, "value": value, "by": by, "remedy": remedy}


def _no_place(s: Asked) -> Found:
    """An address that is none of the three forms; `env://` is asked for by default."""
    method = s.config.cluster.init_method or "env://"
    url = urlsplit(method)
    try:
        known = {"file": url.path and not url.netloc, "tcp": url.hostname and url.port, "env": method == "env://"}
    except ValueError:  # of a port out of range
        known = {}
    return s.nodes_meet and not known.get(url.scheme) and {"method": method}


def _no_address(s: Asked) -> Found:
    if not s.nodes_meet or (s.config.cluster.init_method or "env://") != "env://":
        return False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not s.environ.get(name)]
    return bool(missing) and {"missing": " and ".join(missing)}


def _no_port(s: Asked) -> Found:
    port = s.environ.get("MASTER_PORT", "")
    used = s.nodes_meet and (s.config.cluster.init_method or "env://") == "env://"
    if not used or (port.isdecimal() and 0 < int(port) < 2**16):
        return False
    return {"port": port, "remedy": "give a port, 1 to 65535" if port.isdecimal() else "give a number"}


def _no_node_rank(s: Asked) -> Found:
    return s.nodes_meet and s.config.cluster.node_rank is None and "NODE_RANK" not in s.environ


def _wrong_node_rank(s: Asked) -> Found:
    given = s.config.cluster.node_rank
    where, rank = ("NODE_RANK", s.environ.get("NODE_RANK", "")) if given is None else ("--cluster.node_rank", given)
    right = str(rank).isdecimal() and int(rank) < s.nodes
    return s.nodes_meet and not right and {"where": where, "rank": rank, "last": s.nodes - 1}


def _unusable_backend(s: Asked) -> Found:
    backend = s.options.get("process_group_backend")
    serves = {name: devices for name, devices in dist.Backend.backend_capability.items() if name != "fake"}
    if backend is None:
        return False
    if backend not in serves:
        return {"backend": backend, "why": f"unknown{nearest(backend, serves)}"}
    usable = [name for name in serves if s.device in serves[name] and dist.is_backend_available(name)]
    why = f"does not serve {s.device}" if s.device not in serves[backend] else "this torch was built without it"
    return backend not in usable and {"backend": backend, "why": f"{why}: use {' or '.join(usable)}"}


def _sends_bf16(s: Asked) -> Found:
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


def _taken_port(s: Asked) -> Found:
    """A port that was asked for; otherwise a free one is found."""
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


def _unshared_batch(s: Asked) -> Found:
    data = class_of(s.config.data)
    size = s.config.data.get("init_args.batch_size") if data is not None and issubclass(data, ImageData) else None
    if s.command != "fit" or not isinstance(size, int) or size < 1 or size % s.world_size == 0:
        return False
    return {"size": size, "near": ImageData.nearest_shares(size, s.world_size)}


ON_GPUS = (
    ("trainer.benchmark", lambda s: s.trainer.benchmark),
    ("model.cuda_graph", lambda s: s.given("cuda_graph")),
    ("model.compile reduce-overhead", lambda s: s.given("compile") == "reduce-overhead"),
    ("model.matmul_precision", lambda s: s.given("matmul_precision") not in (None, "highest")),
)


def _not_on_this_device(s: Asked) -> Found:
    given = (flag for flag, is_given in ON_GPUS if is_given(s))
    return s.device != "cuda" and next(({"flag": flag} for flag in given), None)


def _no_compiler(s: Asked) -> Found:
    """torch.compile writes C++ for a CPU; for a GPU Triton, whose kernels are started from C."""
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    if s.device == "cuda":
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
        if s.compiled and importlib.util.find_spec("triton") is None:
            return {"missing": "the package triton"}
    found = any(map(shutil.which, compilers))
    return s.compiled and not found and {"missing": f"a compiler ({' or '.join(compilers)})"}


LAUNCHER = (
    Rule(
        _uneven,
        "{s.launcher.by} started {s.launcher.world_size} processes on {s.launcher.nodes} nodes, not the same number on "
        "each",
        "{remedy}",
    ),
    Rule(
        _other_numbers,
        "{s.launcher.by} started {s.launcher.nodes} node(s) of {s.launcher.per_node} process(es), but the run is "
        "--trainer.num_nodes {s.nodes} of {s.processes}",
        "leave --trainer.num_nodes and --trainer.devices out, and they follow {s.launcher.by}",
    ),
)
HERE = (
    Rule(
        lambda s: (
            accelerator_class(s.trainer) is None and {"near": nearest(str(s.trainer.accelerator), AcceleratorRegistry)}
        ),
        "--trainer.accelerator {s.trainer.accelerator}: unknown{near}",
        "leave it out, or use cpu",
    ),
    Rule(
        _no_accelerator,
        "--trainer.accelerator {s.trainer.accelerator}: there is none on this machine",
        "leave it out, or use cpu",
    ),
    Rule(
        _cannot_give,
        "--trainer.devices {s.trainer.devices!r}: the {s.device} accelerator cannot give that{there}",
        "give a count from 1 on",
    ),
    Rule(_not_on_this_device, "--{flag} has no effect on the {s.device} accelerator", "leave it out"),
    Rule(_no_compiler, "--model.compile: torch needs {missing} for it", "install it, or leave the flag out"),
    Rule(
        lambda s: s.launcher and s.launcher.by != OWN_AGENT and s.config.cluster.init_method is not None,
        "--cluster.init_method: {s.launcher.by} has seen to how the nodes meet",
        "leave it out",
    ),
    Rule(
        _left_over,
        "{left} in the environment would make this process one of several, but neither torchrun nor srun has started "
        "it",
        "unset {unset}",
    ),
    Rule(
        _without_srun,
        "this SLURM job has {count} {what}, but the command was started once, without srun",
        "put srun before it",
    ),
    Rule(
        _one_node,
        "--cluster.{flag} {value}: there is one node",
        "give --trainer.num_nodes, or leave it out",
    ),
    Rule(
        _no_agent,
        "--cluster.{flag} {value} has no effect: {by} starts the processes of this run",
        "{remedy}",
    ),
    Rule(
        lambda s: not s.processes_meet and s.nodes > 1,
        "--trainer.strategy {s.name} works inside one node, not on {s.nodes}",
        "use --trainer.strategy ddp or ddp_dp",
    ),
    Rule(_no_place, "--cluster.init_method {method}", "give tcp://HOST:PORT, file:///PATH or env://"),
    Rule(
        _no_address,
        "--trainer.num_nodes {s.nodes}: where do the nodes meet?",
        "give --cluster.init_method tcp://HOST:PORT, or set {missing}, or start them with torchrun or srun",
    ),
    Rule(_no_port, "MASTER_PORT={port} in the environment", "{remedy}"),
    Rule(
        _no_node_rank,
        "--trainer.num_nodes {s.nodes}: which of them is this?",
        "give --cluster.node_rank 0, 1, …, or set NODE_RANK",
    ),
    Rule(_wrong_node_rank, "{where} {rank}", "the nodes are 0 to {last}, for --trainer.num_nodes {s.nodes}"),
    Rule(
        lambda s: s.sync_batchnorm and not getattr(s.strategy, "replicas_communicate", True),
        "--trainer.sync_batchnorm has no effect under dp, whose replicas do not communicate",
        "use --trainer.strategy ddp",
    ),
    Rule(
        lambda s: s.launcher and s.launcher.world_size > 1 and not s.processes_meet,
        "--trainer.strategy {s.name} is one process, but {s.launcher.by} started several, which would train as many "
        "models",
        "start it without, or use --trainer.strategy ddp",
    ),
    Rule(
        lambda s: s.launcher and s.options.get("start_method", "popen") != "popen",
        "ddp_spawn, ddp_fork and ddp_notebook start their own processes, which {s.launcher.by} has done already",
        "use --trainer.strategy ddp, or start without {s.launcher.by}",
    ),
    Rule(_unusable_backend, "--trainer.strategy.process_group_backend {backend}: {why}", ""),
    Rule(
        lambda s: (
            getattr(s.strategy, "sends_between_devices", False)
            and (s.options.get("process_group_backend"), s.device) == ("gloo", "cuda")
        ),
        "--trainer.strategy.process_group_backend gloo: it cannot send from one GPU to another, as {s.name} does",
        "leave it out",
    ),
    Rule(
        lambda s: s.hook is not None and s.world_size == 1,
        "--trainer.strategy {s.name}: {s.hook.__qualname__} changes how processes communicate, but this run is one "
        "process",
        "use --trainer.strategy ddp without a hook, or give more --trainer.devices",
    ),
    Rule(
        lambda s: s.hook in POWER_SGD and s.device == "cpu" and torch.cuda.is_available(),
        "--trainer.strategy {s.name} on the CPU of a machine that has a GPU: torch's hook synchronises that "
        "one, and fails",
        "put CUDA_VISIBLE_DEVICES= before the command",
    ),
    Rule(
        _sends_bf16,
        "--trainer.strategy {s.name}: torch refuses to send bfloat16 where it was built without NCCL",
        "use --trainer.strategy ddp_fp16",
    ),
    Rule(
        lambda s: s.nodes == 1 and getattr(s.strategy, "needs_several_nodes", None),
        "--trainer.strategy {s.name} {s.strategy.needs_several_nodes}",
        "use --trainer.strategy {s.strategy.on_one_node}, or give more --trainer.num_nodes",
    ),
    Rule(
        lambda s: s.sync_batchnorm and s.world_size == 1,
        "--trainer.sync_batchnorm has no effect in one process",
        "use --trainer.strategy ddp, or leave it",
    ),
    Rule(
        lambda s: s.sync_batchnorm and s.device == "cpu",
        "--trainer.sync_batchnorm works on GPUs only, says torch",
        "leave it out on CPU",
    ),
    *LAUNCHER,
    Rule(_taken_port, "MASTER_PORT={port} in the environment: {why}", "unset it, or name a free port"),
    Rule(
        _unshared_batch,
        "a global batch of {size} cannot be shared equally by {s.world_size} ranks",
        "use --data.batch_size {near}, or another --trainer.devices",
    ),
)


class Built(NamedTuple):
    """What a Trainer is, in the end: a strategy of the user's own may have processes of its own."""

    launcher: Launched | None
    nodes: int
    processes: int
    world_size: int


BUILT = LAUNCHER


def _check(rules: Sequence[Rule], asked: Any) -> None:
    for rule in rules:
        if found := rule.broken(asked):
            fields = found if isinstance(found, Mapping) else {}
            colon = "" if rule.message.endswith("?") else ":"
            text = f"{rule.message}{colon} {rule.remedy}" if rule.remedy else rule.message
            raise UserError(text.format(s=asked, **fields))


def check_flags(config: Namespace) -> None:
    """Check what holds on any machine, however the run is started.

    Args:
        config: Resolved configuration.

    Raises:
        UserError: With what is wrong and the remedy.
    """
    _check(FLAGS, Asked("", config, None, {}))


def check(command: str, config: Namespace) -> None:
    """Check whether a run can work here; nothing is built for it.

    Args:
        command: The command: `fit`, `validate`, `test` or `predict`.
        config: Its resolved configuration.

    Raises:
        UserError: With what is wrong and the remedy.
    """
    _check((*FLAGS, *HERE), Asked(command, config, launched(), os.environ))


def check_trainer(trainer: Trainer) -> None:
    """Check what only the built Trainer shows.

    Raises:
        UserError: With what is wrong and the remedy.
    """
    processes = getattr(trainer.strategy, "num_processes", 1)
    _check(BUILT, Built(launched(), trainer.num_nodes, processes, trainer.world_size))

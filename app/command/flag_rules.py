"""Rules about flags and their values, and which of them work together."""

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import PurePath
from types import NoneType
from typing import Any, get_args

from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from app.command.arguments import leaves
from app.command.parser import parameters
from app.command.resolved import Resolved, class_of
from app.command.run_options import LimitedTrainer, Run, is_recorded
from app.data.shares import shards_beyond
from app.errors import nearest
from app.launch.rendezvous import Cluster
from app.training import DDP, DataParallelStrategy

# class that each section's flags configure; the user chooses the classes of --model and --data
MADE = {
    "trainer": LimitedTrainer,
    "run": Run,
    "cluster": Cluster,
    "best_checkpoint": ModelCheckpoint,
    "last_checkpoint": ModelCheckpoint,
    "lr_monitor": LearningRateMonitor,
}

COMPILES = (SingleDeviceStrategy, DDPStrategy)  # strategies that work with torch.compile


def flag_problems(s: Resolved) -> Iterator[str]:
    """Yield messages about flags that cannot work, each with a remedy."""
    yield from _nulls(s)
    name = s.config.trainer.strategy
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(name, str) and name not in known:
        yield f"--trainer.strategy {name}: unknown{nearest(name, known)}"
    for rule in (_values, _strategy, _order, _live):
        yield from rule(s)


def parameter_of(flag: str, classes: Mapping[str, type | None]) -> Any:
    """Return jsonargparse's parameter of a flag without dashes, or None.

    Args:
        flag: The flag, such as `data.flip`.
        classes: The chosen classes of model and data, by section.
    """
    section, _, name = flag.partition(".")
    return parameters(MADE.get(section, classes.get(section))).get(name)


def _nulls(s: Resolved) -> Iterator[str]:
    """Reject null for a flag whose type does not allow it, because jsonargparse accepts it."""
    classes = {"model": class_of(s.config.get("model")), "data": class_of(s.config.get("data"))}
    for flag, value in leaves(s.config):
        parameter = parameter_of(flag, classes)
        if value is None and parameter is not None and parameter.default is not None:
            hint = parameter.annotation
            is_open = hint in (Any, NoneType, inspect.Parameter.empty)
            if not is_open and NoneType not in get_args(hint):
                yield f"--{flag} null: give a value, or leave it out"


def _values(s: Resolved) -> Iterator[str]:
    for flag, value in leaves(s.checked):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"--{flag} {value}: give a finite number"
        # they change what a terminal or a log shows; a tab may separate the columns of a table
        if isinstance(value, str) and re.search(r"[\0-\x08\x0a-\x1f\x7f-\x9f]", value):
            yield f"--{flag} {value}: contains a control character: leave it out"
    seed = s.config.get("seed_everything")
    if seed is not None and not 0 <= seed < 2**32:
        yield f"--seed_everything {seed}: give 0 to {2**32 - 1}, as numpy requires"
    path = PurePath(s.config.run.name or "")
    if path.is_absolute() or ".." in path.parts:
        yield (
            f"--run.name {path}: give a relative path without .., because runs stay below "
            "--run.root"
        )


def _strategy(s: Resolved) -> Iterator[str]:
    """Reject options of the strategy, and a compilation, that do not work with it."""
    for name in ("ddp_comm_state", "ddp_comm_wrapper"):
        if s.hook is None and s.options.get(name) is not None:
            yield f"--trainer.strategy.{name} has no effect without a hook: give ddp_comm_hook, too"
    if s.hook is not None and "bucket" not in inspect.signature(s.hook).parameters:
        yield (
            f"--trainer.strategy.ddp_comm_hook {s.hook.__qualname__}: not a hook: give a function "
            "of state and bucket"
        )
    if s.options.get("static_graph") and s.trainer.accumulate_grad_batches > 1:
        yield (
            "--trainer.strategy.static_graph true: torch fails where gradients are accumulated: "
            "leave it out"
        )
    splits = issubclass(s.strategy, DataParallelStrategy) or not issubclass(s.strategy, COMPILES)
    if s.compiled and splits:
        yield (
            f"--model.compile does not work with --trainer.strategy {s.name}, which copies or "
            "splits models: use ddp, or leave it out"
        )
    if s.reduces_overhead and s.trainer.accumulate_grad_batches > 1:
        yield (
            "--model.compile reduce-overhead: the next batch overwrites accumulated gradients: use "
            "default"
        )


def _live(s: Resolved) -> Iterator[str]:
    """Reject settings with which ranks cannot come and go."""
    cluster = s.config.cluster
    if not s.live:
        if cluster.min_ranks > 1:
            yield f"--cluster.min_ranks {cluster.min_ranks}: add --cluster.live true"
        return
    is_tcp = (cluster.init_method or "tcp://").startswith("tcp://")
    for is_wrong, reason in (
        (find_spec("torchft") is None, "needs torchft: pip install 'data-parallel-lab[live]'"),
        (s.virtual_devices is None, "needs --run.virtual_devices, so that results stay the same"),
        (s.strategy is not DDP, f"needs --trainer.strategy ddp, not {s.name}"),
        (s.config.trainer.num_nodes > 1, "starts one machine: leave --trainer.num_nodes out"),
        (not is_tcp, f"needs tcp://HOST:PORT, not --cluster.init_method {cluster.init_method}"),
        (not is_recorded(s.config.trainer), "records: leave fast_dev_run and barebones out"),
        (not str(s.config.trainer.devices).isalnum(), "needs --trainer.devices as a count"),
        (s.config.run.find_lr, "does not work with --run.find_lr: search in a run before"),
    ):
        if is_wrong:
            yield f"--cluster.live true {reason}"


def _order(s: Resolved) -> Iterator[str]:
    """Reject settings that contradict virtual devices or the global order."""
    run = s.config.run
    count = s.virtual_devices
    exact = str(s.trainer.deterministic).lower()
    if count is not None:
        cannot_shard = s.strategy not in (SingleDeviceStrategy, DDP) or s.hook is not None
        is_inexact = exact in ("false", "warn")
        cudnn = "cuDNN would ignore determinism: leave it out"
        straight = "only the straight loop has shards: leave it out"
        for flag, is_set in (
            (f"trainer.strategy {s.name}: use --trainer.strategy ddp", cannot_shard),
            ("trainer.sync_batchnorm: leave it out", s.trainer.sync_batchnorm),
            ("model.compile reduce-overhead: use default", s.reduces_overhead),
            (f"trainer.benchmark: {cudnn}", s.trainer.benchmark),
            (f"trainer.deterministic {exact}: give true, or leave it out", is_inexact),
            (f"run.loop lightning: {straight}", run.loop == "lightning"),
        ):
            if is_set:
                yield f"--run.virtual_devices {count} does not work with --{flag}"
        size = s.given("data.batch_size")
        if isinstance(size, int) and 0 < size < count:
            yield shards_beyond(count, size)
        if count < s.world_size:
            yield (
                f"--run.virtual_devices {count}: each process needs a shard: give {s.world_size} "
                "or more"
            )
    if s.given("data.batch_size") is not None:
        data = s.config.data.class_path
        if run.loader == "lightning":
            yield f"--run.loader lightning has no effect on {data}, which is exact: leave it out"
        if run.global_batch is not None:
            yield (
                f"--run.global_batch {run.global_batch}: the global batch of {data} is "
                "--data.batch_size: give that"
            )
    elif run.loader == "lightning":
        for flag, value in (("virtual_devices", count), ("global_batch", run.global_batch)):
            if value is not None:
                yield f"--run.{flag} {value} needs --run.loader exact: leave one of them out"

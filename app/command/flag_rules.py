"""Machine-independent rules about flags."""

import inspect
import math
import re
from collections.abc import Iterator
from pathlib import PurePath
from types import NoneType
from typing import Any, get_args

from jsonargparse import Namespace
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from app.command.parser import parameters
from app.command.resolved import Resolved, class_of
from app.command.run_options import LimitedTrainer, Run
from app.data import ImageData
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
SHARDED = (SingleDeviceStrategy, DDP)  # strategies that work with virtual devices
# characters that change what a terminal or a log shows; a tab may separate the columns of a table
CONTROL = re.compile(r"[\0-\x08\x0a-\x1f\x7f-\x9f]")


def flag_problems(s: Resolved) -> Iterator[str]:
    """Yield messages about flags that cannot work, each with a remedy."""
    yield from _nulls(s)
    name = s.config.trainer.strategy
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(name, str) and name not in known:
        yield f"--trainer.strategy {name}: unknown{nearest(name, known)}"
    for rule in (_values, _strategy_options, _execution, _order):
        yield from rule(s)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each flag of a configuration with its value, such as `trainer.devices` and 2."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            inner_path = path if key == "init_args" else f"{path}.{key}".lstrip(".")
            yield from leaves(inner, inner_path)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner, path)
    else:
        yield path, value


def _nulls(s: Resolved) -> Iterator[str]:
    """Reject null for a flag whose type does not allow it, because jsonargparse accepts it."""
    sections: dict[str, Any] = {section: s.config.get(section) for section in MADE}
    classes: dict[str, Any] = dict(MADE)
    for section in ("model", "data"):
        if s.config.get(section):
            sections[section] = s.config[section].get("init_args")
            classes[section] = class_of(s.config[section])
    for section, values in sections.items():
        for name, parameter in parameters(classes[section]).items():
            hint = parameter.annotation
            allows = parameter.default is None or hint in (Any, NoneType, parameter.empty)
            if allows or NoneType in get_args(hint) or not values or name not in values:
                continue
            if values[name] is None:
                yield f"--{section}.{name} null: give a value, or leave it out"


def _values(s: Resolved) -> Iterator[str]:
    for flag, value in leaves(s.checked):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"--{flag} {value}: give a finite number"
        if isinstance(value, str) and CONTROL.search(value):
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


def _strategy_options(s: Resolved) -> Iterator[str]:
    for name in ("ddp_comm_state", "ddp_comm_wrapper"):
        if s.hook is None and s.options.get(name) is not None:
            yield f"--trainer.strategy.{name} has no effect without a hook: give ddp_comm_hook, too"
    if s.hook is not None and "bucket" not in inspect.signature(s.hook).parameters:
        hook = s.hook.__qualname__
        yield (
            f"--trainer.strategy.ddp_comm_hook {hook}: not a hook: give a function of state and "
            "bucket"
        )
    if s.options.get("static_graph") and s.accumulates:
        yield (
            "--trainer.strategy.static_graph true: torch fails where gradients are accumulated: "
            "leave it out"
        )


def _execution(s: Resolved) -> Iterator[str]:
    """Reject compilation that does not work with the strategy or with other flags."""
    splits = issubclass(s.strategy, DataParallelStrategy) or not issubclass(s.strategy, COMPILES)
    if s.compiled and splits:
        yield (
            f"--model.compile does not work with --trainer.strategy {s.name}, which copies or "
            "splits models: use ddp, or leave it out"
        )
    if s.reduces_overhead and s.accumulates:
        yield (
            "--model.compile reduce-overhead: the next batch overwrites accumulated gradients: use "
            "default"
        )


def _order(s: Resolved) -> Iterator[str]:
    """Reject settings that contradict virtual devices or the global order."""
    run = s.config.run
    count = s.virtual_devices
    exact = s.trainer.deterministic
    if count is not None:
        cannot_shard = s.strategy not in SHARDED or s.hook is not None
        ddp = "use --trainer.strategy ddp"
        norm = "each shard is normalised by itself: leave it out"
        cudnn = "cuDNN would ignore determinism: leave it out"
        straight = "only the straight loop has shards: leave it out"
        for flag, is_set, remedy in (
            (f"trainer.strategy {s.name}", cannot_shard, ddp),
            ("trainer.sync_batchnorm", s.sync_batchnorm, norm),
            ("model.compile reduce-overhead", s.reduces_overhead, "use default"),
            ("trainer.benchmark", s.trainer.benchmark, cudnn),
            ("trainer.deterministic false", exact is False, "give true, or leave it out"),
            ("trainer.deterministic warn", exact == "warn", "give true, or leave it out"),
            ("run.loop lightning", run.loop == "lightning", straight),
        ):
            if is_set:
                yield f"--run.virtual_devices {count} does not work with --{flag}: {remedy}"
        size = s.given("data.batch_size")
        if isinstance(size, int) and 0 < size < count:
            yield shards_beyond(count, size)
        if count < s.world_size:
            yield (
                f"--run.virtual_devices {count}: each process needs a shard: give {s.world_size} "
                "or more"
            )
    elif run.balance:
        yield "--run.balance true distributes shards: add --run.virtual_devices 8"
    if issubclass(class_of(s.config.get("data")) or object, ImageData):
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

"""Machine-independent rules about flags."""

import inspect
import math
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import PurePath
from types import NoneType
from typing import Any, get_args

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

from app.command.parser import parameters
from app.command.resolved import Resolved, class_of, classes_of
from app.command.run_options import Run
from app.data import ImageData
from app.data.shares import shards_beyond
from app.errors import nearest
from app.launch.rendezvous import Cluster
from app.modules.networks import refusal
from app.training import DDP, SplitForward

# smallest allowed values of flags; Lightning checks other flags itself
MINIMA = {
    **dict.fromkeys(
        ("trainer.max_epochs", "trainer.max_steps", "trainer.num_sanity_val_steps"), -1
    ),
    **dict.fromkeys(("trainer.min_epochs", "trainer.min_steps", "trainer.log_every_n_steps"), 0),
    **dict.fromkeys(("trainer.gradient_clip_val", "seed_everything"), 0),
    **dict.fromkeys(
        ("trainer.check_val_every_n_epoch", "trainer.accumulate_grad_batches", "trainer.num_nodes"),
        1,
    ),
    "trainer.strategy.start_powersgd_iter": 2,
}
MAXIMA = {"seed_everything": 2**32 - 1}  # numpy's largest seed
LARGEST = 2**63 - 1  # torch's largest integer

# class that each section's flags configure; the user chooses the classes of the other sections,
# --model and --data
MADE = {
    "trainer": Trainer,
    "run": Run,
    "cluster": Cluster,
    "best_checkpoint": ModelCheckpoint,
    "last_checkpoint": ModelCheckpoint,
    "lr_monitor": LearningRateMonitor,
}

COMPILES = (SingleDeviceStrategy, DDPStrategy)  # strategies that work with torch.compile
SHARDED = (SingleDeviceStrategy, DDP)  # strategies that work with virtual devices


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
    if isinstance(value, Namespace | dict):
        for key, inner in (vars(value) if isinstance(value, Namespace) else value).items():
            yield from leaves(inner, path if key == "init_args" else f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner, path)
    else:
        yield path, value


def _nulls(s: Resolved) -> Iterator[str]:
    """Reject null for a flag whose type does not allow it, because jsonargparse accepts it."""
    chosen = {
        section: class_of(s.config[section])
        for section in ("model", "data")
        if s.config.get(section)
    }
    for section, cls in {**MADE, **chosen}.items():
        values = s.config.get(section) if section in MADE else s.config[section].get("init_args")
        for name, parameter in parameters(cls).items() if values else ():
            hint = parameter.annotation
            allows = (
                parameter.default is None
                or hint in (Any, parameter.empty)
                or NoneType in (hint, *get_args(hint))
            )
            if name in values and values[name] is None and not allows:
                yield f"--{section}.{name} null: give a value, or leave it out"


def _values(s: Resolved) -> Iterator[str]:
    for flag, value in leaves(s.config):
        control = (
            r"[\0-\x08\x0b-\x1f\x7f-\x9f]"
            if flag.startswith(("model.", "data."))
            else r"[\0-\x1f\x7f-\x9f]"
        )
        if isinstance(value, str) and re.search(control, value):
            yield f"--{flag} {value}: contains a control character: leave it out"
    for flag, value in leaves(s.checked):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"--{flag} {value}: give a finite number"
        if type(value) is int and value > MAXIMA.get(flag, LARGEST):
            yield f"--{flag} {value}: give {MAXIMA.get(flag, LARGEST)} or less"
        if flag in MINIMA and value not in (None, "auto") and value < MINIMA[flag]:
            yield f"--{flag} {value}: give {MINIMA[flag]} or more"
    every = s.config.trainer.val_check_interval
    if isinstance(every, int | float) and every <= 0:
        yield f"--trainer.val_check_interval {every}: give more than 0"
    if (
        TensorBoardLogger in classes_of(s.config.trainer.logger)
        and find_spec("tensorboard") is None
    ):
        yield "--trainer.logger TensorBoardLogger needs a package: pip install tensorboard"
    for flag in ("run.name", "best_checkpoint.filename", "last_checkpoint.filename"):
        path = PurePath(s.config.get(flag) or "")
        if path.is_absolute() or ".." in path.parts:
            yield f"--{flag} {path}: give a relative path without .., because runs stay below --run.root"


def _strategy_options(s: Resolved) -> Iterator[str]:
    for name in ("ddp_comm_state", "ddp_comm_wrapper"):
        if s.hook is None and s.options.get(name) is not None:
            yield f"--trainer.strategy.{name} has no effect without a hook: give ddp_comm_hook, too"
    if s.hook is not None and "bucket" not in inspect.signature(s.hook).parameters:
        hook = s.hook.__qualname__
        yield f"--trainer.strategy.ddp_comm_hook {hook}: not a hook: give a function of state and bucket"
    if s.options.get("static_graph") and s.accumulates:
        yield "--trainer.strategy.static_graph true: torch fails where gradients are accumulated: leave it out"


def _execution(s: Resolved) -> Iterator[str]:
    """Reject execution settings that do not work with the strategy, the model, or each other."""
    network = s.given("model.network")
    if isinstance(network, str) and (reason := refusal(network)):
        yield f"--model.network {network}: {reason}"
    remedy = f"does not work with --trainer.strategy {s.name}, which copies or splits models: use ddp, or leave it out"
    if s.model is not None and s.given("model.channels_last") is True and not s.model.convolutional:
        yield f"--model.channels_last true: {s.model.__name__} has no convolutions: leave it out"
    if s.compiled and (
        issubclass(s.strategy, SplitForward) or not issubclass(s.strategy, COMPILES)
    ):
        yield f"--model.compile {remedy}"
    if s.reduces_overhead and s.accumulates:
        yield "--model.compile reduce-overhead: the next batch overwrites accumulated gradients: use default"
    if s.trainer.benchmark and s.trainer.deterministic:
        yield "--trainer.benchmark true: cuDNN would ignore --trainer.deterministic: leave one of them out"
    fused = s.given("model.optimizer.init_args.fused")
    if fused and s.trainer.precision == "16-mixed" and s.trainer.gradient_clip_val:
        yield "--model.optimizer.fused true with --trainer.gradient_clip_val does not work in 16-mixed: use bf16-mixed"


def _order(s: Resolved) -> Iterator[str]:
    """Reject settings that contradict virtual devices or the global order."""
    run = s.config.run
    count = s.virtual_devices
    exact = s.trainer.deterministic
    if count is not None:
        for flag, is_set, remedy in (
            (
                f"trainer.strategy {s.name}",
                s.strategy not in SHARDED or s.hook,
                "use --trainer.strategy ddp",
            ),
            (
                "trainer.sync_batchnorm",
                s.sync_batchnorm,
                "each shard is normalised by itself: leave it out",
            ),
            ("model.compile reduce-overhead", s.reduces_overhead, "use default"),
            (
                "trainer.benchmark",
                s.trainer.benchmark,
                "cuDNN would ignore determinism: leave it out",
            ),
            (
                f"trainer.deterministic {exact}".lower(),
                exact in (False, "warn"),
                "give true, or leave it out",
            ),
            (
                "run.loop lightning",
                run.loop == "lightning",
                "only the straight loop has shards: leave it out",
            ),
        ):
            if is_set:
                yield f"--run.virtual_devices {count} does not work with --{flag}: {remedy}"
        size = s.given("data.batch_size")
        if isinstance(size, int) and 0 < size < count:
            yield shards_beyond(count, size)
        if count < s.world_size:
            yield f"--run.virtual_devices {count}: each process needs a shard: give {s.world_size} or more"
    elif run.balance:
        yield "--run.balance true distributes shards: add --run.virtual_devices 8"
    if run.global_order and issubclass(class_of(s.config.get("data")) or object, ImageData):
        data = s.config.data.class_path
        yield f"--run.global_order true has no effect on {data}, which has a global order already: leave it out"
    if run.global_order and run.loop == "lightning":
        yield "--run.global_order true does not work with --run.loop lightning: leave one of them out"

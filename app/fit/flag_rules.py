"""Rules about flags that hold on any machine, however the run starts."""

import importlib.util
import inspect
import math
import os
import re
from collections.abc import Iterator
from pathlib import PurePath
from string import Formatter
from types import NoneType
from typing import Any, get_args

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

from app.data import ImageData
from app.data.batches import shards_beyond
from app.errors import UserError, nearest
from app.fit.parser import parameters
from app.fit.resolved import Resolved, class_of
from app.fit.rule import Found, Rule
from app.fit.run_options import Run
from app.launch.rendezvous import Cluster
from app.parallel import DDP, SplitForward

# flag: the least that it can be
MINIMA = {
    **dict.fromkeys(("trainer.max_epochs", "trainer.max_steps", "trainer.num_sanity_val_steps"), -1),
    **dict.fromkeys(("trainer.min_epochs", "trainer.min_steps", "trainer.log_every_n_steps"), 0),
    **dict.fromkeys((f"trainer.limit_{part}_batches" for part in ("train", "val", "test", "predict")), 0),
    **dict.fromkeys(("trainer.overfit_batches", "trainer.reload_dataloaders_every_n_epochs"), 0),
    **dict.fromkeys(("trainer.gradient_clip_val",), 0),
    **dict.fromkeys(("trainer.check_val_every_n_epoch", "trainer.accumulate_grad_batches", "trainer.num_nodes"), 1),
    **{f"{name}_checkpoint.save_top_k": -1 for name in ("best", "last")},
    **{f"{name}_checkpoint.every_n_{what}": 0 for name in ("best", "last") for what in ("epochs", "train_steps")},
}
MOST = 2**63 - 1  # torch's largest integer

# sections of the configuration that are not chosen by class
MADE = {
    "trainer": Trainer,
    "run": Run,
    "cluster": Cluster,
    "best_checkpoint": ModelCheckpoint,
    "last_checkpoint": ModelCheckpoint,
    "lr_monitor": LearningRateMonitor,
}

COMPILES = (SingleDeviceStrategy, DDPStrategy)
SHARDED = (SingleDeviceStrategy, DDP)


def _unknown_strategy(s: Resolved) -> Found:
    name, known = s.config.trainer.strategy, ["auto", *StrategyRegistry.available_strategies()]
    return isinstance(name, str) and name not in known and {"near": nearest(name, known)}


def _no_devices(s: Resolved) -> Found:
    try:
        return s.devices < 1
    except UserError:
        return True


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a configuration with its flag."""
    if isinstance(value, Namespace | dict):
        for key, inner in (vars(value) if isinstance(value, Namespace) else value).items():
            yield from leaves(inner, path if key == "init_args" else f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner, path)
    else:
        yield path, value


def _out_of_range(s: Resolved) -> Found:
    for flag, value in leaves(s.checked):
        if isinstance(value, float) and not math.isfinite(value):
            return {"flag": flag, "value": value, "remedy": "give a finite number"}
        if type(value) is int and value > MOST:
            return {"flag": flag, "value": value, "remedy": "give a smaller number"}
        if flag in MINIMA and value not in (None, "auto") and value < MINIMA[flag]:
            return {"flag": flag, "value": value, "remedy": f"give {MINIMA[flag]} or more"}
    return None


def _null(s: Resolved) -> Found:
    """Find a null that is neither the default nor allowed by the type, because jsonargparse accepts it."""
    chosen = {section: class_of(s.config[section]) for section in ("model", "data") if s.config.get(section)}
    for section, cls in {**MADE, **chosen}.items():
        values = s.config.get(section) if section in MADE else s.config[section].get("init_args")
        for name, parameter in parameters(cls).items() if values else ():
            hint = parameter.annotation
            allows = parameter.default is None or hint in (Any, parameter.empty) or NoneType in (hint, *get_args(hint))
            if name in values and values[name] is None and not allows:
                return {"flag": f"{section}.{name}"}
    return None


def _no_interval(s: Resolved) -> Found:
    every = s.config.trainer.val_check_interval
    return isinstance(every, int | float) and every <= 0


def _no_duration(s: Resolved) -> Found:
    longest = s.config.trainer.max_time
    return isinstance(longest, str) and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", longest.strip())


def _no_file_name(s: Resolved) -> Found:
    """Find a checkpoint name that leads out of the run's folder, that no file can have, or that is no format string."""
    for flag in ("best_checkpoint.filename", "last_checkpoint.filename"):
        name = s.config.get(flag)
        if name is None:
            continue
        try:
            fields = [part for _, part, _, _ in Formatter().parse(name) if part is not None]
        except ValueError:
            fields = [""]
        path = PurePath(name)
        why = (
            (path.is_absolute() or ".." in path.parts, "it leads out of the run's folder"),
            (not all(re.fullmatch(r"[\w/.-]*\w", field) for field in fields), "only metrics go in braces, as {epoch}"),
            (not name.strip() or "\0" in name or len(os.fsencode(name)) > 150, "no file can have this name"),
        )
        for is_so, reason in why:
            if is_so:
                return {"flag": flag, "name": name[:50], "why": reason}
    return None


def _lacks_package(s: Resolved) -> Found:
    needs = (("precision", "transformer-engine", "transformer_engine"), ("profiler", "xla", "torch_xla"))
    lacking = ((flag, package) for flag, name, package in needs if str(s.trainer[flag]).startswith(name))
    missing = ((flag, package) for flag, package in lacking if importlib.util.find_spec(package) is None)
    return next(({"flag": flag, "value": s.trainer[flag], "package": package} for flag, package in missing), None)


def _no_folder(s: Resolved) -> Found:
    """Find a name that no folder below the root can have. Source of the limit: NAME_MAX of linux/limits.h."""
    name = s.config.run.name or ""
    path = PurePath(name)
    if "\0" in name:
        return {"why": "it holds a NUL character"}
    if path.is_absolute() or ".." in path.parts:
        return {"why": "it leads out of --run.root"}
    return any(len(os.fsencode(part)) > 255 for part in path.parts) and {"why": "it is longer than 255 bytes"}


def _without_hook(s: Resolved) -> Found:
    names = ("ddp_comm_state", "ddp_comm_wrapper") if s.hook is None else ()
    return next(({"name": name} for name in names if s.options.get(name) is not None), None)


def _not_in_a_graph(s: Resolved) -> Found:
    """Find a setting that acts between the parts of a step, or changes the captured step."""
    by_step = s.given("scheduler") and s.given("scheduler_interval") == "step"
    conflicts = (
        ("trainer.gradient_clip_val", s.trainer.gradient_clip_val, "the gradients are not seen before the update"),
        ("trainer.accumulate_grad_batches", s.trainer.accumulate_grad_batches > 1, "each batch is an update"),
        ("data.micro_batch", s.micro_batch, "a graph is of one pass"),
        ("trainer.precision 16-mixed", s.trainer.precision in ("16-mixed", "16", 16), "the scale of the loss changes"),
        ("model.scheduler_interval step", by_step, "the captured step has its learning rate"),
        ("model.compile reduce-overhead", s.given("compile") == "reduce-overhead", "that has graphs of its own"),
        ("run.on_nonfinite skip", s.config.run.on_nonfinite == "skip", "the update is part of it"),
        ("trainer.detect_anomaly", s.trainer.detect_anomaly, "it reads each gradient"),
    )
    found = ({"flag": flag, "why": why} for flag, is_so, why in conflicts if is_so)
    return bool(s.given("cuda_graph")) and next(found, None)


def _not_sharded(s: Resolved) -> Found:
    """Find a setting that works on a whole batch, or adds gradients in an order of its own."""
    conflicts = (
        (f"trainer.strategy {s.name}", s.strategy not in SHARDED or s.hook, "use --trainer.strategy ddp"),
        ("trainer.sync_batchnorm", s.sync_batchnorm, "each shard is normalised by itself: leave it out"),
        ("data.micro_batch", s.micro_batch, "a shard is one already: leave it out"),
        ("model.cuda_graph", s.given("cuda_graph"), "a graph holds one batch: leave it out"),
        ("model.compile reduce-overhead", s.given("compile") == "reduce-overhead", "use default"),
        ("run.loop lightning", s.config.run.loop == "lightning", "only the straight loop has shards: leave it out"),
    )
    found = ({"flag": flag, "remedy": remedy} for flag, is_so, remedy in conflicts if is_so)
    return s.virtual_devices is not None and next(found, None)


def _more_shards_than_samples(s: Resolved) -> Found:
    data = class_of(s.config.get("data"))
    size = s.config.data.get("init_args.batch_size") if data is not None and issubclass(data, ImageData) else None
    if not isinstance(size, int) or s.virtual_devices is None or not 0 < size < s.virtual_devices:
        return False
    return {"said": shards_beyond(s.virtual_devices, size)}


FLAGS = (
    Rule(_null, "--{flag} null: give a value, or leave it out"),
    Rule(_unknown_strategy, "--trainer.strategy {s.config.trainer.strategy}: unknown{near}"),
    Rule(
        _no_devices,
        "--trainer.devices {s.config.trainer.devices!r}: the {s.accelerator} accelerator cannot give that: give a"
        " count from 1 on",
    ),
    Rule(_out_of_range, "--{flag} {value}: {remedy}"),
    Rule(_no_interval, "--trainer.val_check_interval {s.config.trainer.val_check_interval}: give more than 0"),
    Rule(_no_duration, "--trainer.max_time {s.config.trainer.max_time}: give DAYS:HOURS:MINUTES:SECONDS, 00:12:00:00"),
    Rule(
        _lacks_package,
        "--trainer.{flag} {value}: the package {package} is not installed: install it, or leave the flag out",
    ),
    Rule(_no_file_name, "--{flag} {name!r}: {why}: give a name, and the folder as dirpath"),
    Rule(
        lambda s: type(s.config.seed_everything) is int and not 0 <= s.config.seed_everything < 2**32,
        "--seed_everything {s.config.seed_everything}: give a number from 0 to 4294967295",
    ),
    Rule(_no_folder, "--run.name {s.config.run.name!r}: {why}: give another name"),
    Rule(
        lambda s: s.hook is powerSGD_hook and s.options.get("start_powersgd_iter", 2) < 2,
        "--trainer.strategy.start_powersgd_iter {s.options[start_powersgd_iter]}: give 2 or more",
    ),
    Rule(_without_hook, "--trainer.strategy.{name} has no effect without a hook: give ddp_comm_hook, too"),
    Rule(
        lambda s: s.hook is not None and "bucket" not in inspect.signature(s.hook).parameters,
        "--trainer.strategy.ddp_comm_hook {s.hook.__qualname__}: not a hook: give a function of state and bucket",
    ),
    Rule(
        lambda s: s.options.get("static_graph") and (s.trainer.accumulate_grad_batches > 1 or s.micro_batch),
        "--trainer.strategy.static_graph true: torch fails where gradients are accumulated: leave it out, or "
        "--trainer.accumulate_grad_batches and --data.micro_batch",
    ),
    Rule(
        lambda s: s.given("cuda_graph") and (s.world_size > 1 or s.strategy is not SingleDeviceStrategy),
        "--model.cuda_graph true is for one GPU, not for --trainer.strategy {s.name}: leave it out",
    ),
    Rule(_not_in_a_graph, "--model.cuda_graph true with --{flag}: {why}: leave one of them out"),
    Rule(
        lambda s: s.micro_batch is not None and s.model is None,
        "--data.micro_batch {s.micro_batch} is for the models of this application: leave it out, or use "
        "--trainer.accumulate_grad_batches",
    ),
    Rule(
        lambda s: s.micro_batch is not None and not issubclass(s.strategy, (*COMPILES, SplitForward)),
        "--data.micro_batch {s.micro_batch} does not work with --trainer.strategy {s.name}, which takes the "
        "network apart: leave it out, or use --trainer.strategy ddp",
    ),
    Rule(
        lambda s: s.given("channels_last") is True and not s.model.convolutional,
        "--model.channels_last true: {s.model.__name__} has no convolutions: leave it out",
    ),
    Rule(
        lambda s: s.compiled and (issubclass(s.strategy, SplitForward) or not issubclass(s.strategy, COMPILES)),
        "--model.compile does not work with --trainer.strategy {s.name}, which takes the network apart: leave it "
        "out, or use --trainer.strategy ddp",
    ),
    Rule(
        lambda s: s.given("compile") == "reduce-overhead" and (s.trainer.accumulate_grad_batches > 1 or s.micro_batch),
        "--model.compile reduce-overhead: the next batch overwrites the gradients that are accumulated: use "
        "default, or leave --trainer.accumulate_grad_batches and --data.micro_batch out",
    ),
    Rule(
        lambda s: (
            s.given("optimizer.init_args.fused") and s.trainer.precision == "16-mixed" and s.trainer.gradient_clip_val
        ),
        "--model.optimizer.fused true with --trainer.gradient_clip_val: under 16-mixed there is no moment between"
        " unscaling and update in which to clip: leave one of them out, or use --trainer.precision bf16-mixed",
    ),
    Rule(_not_sharded, "--run.virtual_devices {s.virtual_devices} does not work with --{flag}: {remedy}"),
    Rule(_more_shards_than_samples, "{said}"),
    Rule(
        lambda s: s.config.run.balance and s.virtual_devices is None,
        "--run.balance true deals shards: add --run.virtual_devices 8",
    ),
    Rule(
        lambda s: s.virtual_devices is not None and s.virtual_devices < s.world_size,
        "--run.virtual_devices {s.virtual_devices}: {s.world_size} processes need a shard each: give at least "
        "{s.world_size}, or fewer --trainer.devices",
    ),
    Rule(
        lambda s: s.config.run.global_order and issubclass(class_of(s.config.get("data")) or object, ImageData),
        "--run.global_order true has no effect: the images of {s.config.data.class_path} always have a global order: "
        "leave it out",
    ),
    Rule(
        lambda s: s.config.run.global_order and s.config.run.loop == "lightning",
        "--run.global_order true does not work with --run.loop lightning, which takes ranks for equal: leave one of "
        "them out",
    ),
)

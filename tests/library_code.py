"""Prints the libraries' classes and functions that a flag accepts despite their wrong type."""

import importlib
import pkgutil
import typing
import warnings
from collections.abc import Iterable, Iterator
from types import ModuleType, NoneType, UnionType
from typing import Any

import lightning
import torch
import torchmetrics
import torchvision
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import app
from app.command.parser import parameters, refuse_code
from app.data import ImageData
from app.modules import ImageClassifier
from app.modules.recipe import Recipe
from app.training import DDP

NO_CLASS = (nn.Module, Optimizer, LRScheduler)  # for a type that names no class
FLAGS: dict[
    tuple[Any, str], Any
] = {  # class and parameter of a flag, and the classes that it may take
    (Trainer, "strategy"): Strategy,
    (Trainer, "callbacks"): Callback,
    (Trainer, "logger"): Logger,
    (Trainer, "plugins"): (CheckpointIO, ClusterEnvironment, LayerSync, Precision),
    (Trainer, "profiler"): Profiler,
    (Trainer, "accelerator"): Accelerator,
    (Recipe, "optimizer"): Optimizer,
    (Recipe, "scheduler"): LRScheduler,
    (ImageData, "augment"): nn.Module,
    (ImageClassifier, "network"): nn.Module,
    (DDP, "ddp_comm_hook"): NO_CLASS,
    (DDP, "ddp_comm_state"): NO_CLASS,
}
HOOKS = ("app.training.comm_hooks", "torch.distributed.algorithms.ddp_comm_hooks")


def public_modules(module: ModuleType) -> Iterator[ModuleType]:
    """Yield a module, and the public modules inside it."""
    yield module
    for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}."):
        if not info.name.rpartition(".")[2].startswith("_"):
            try:
                inner = importlib.import_module(info.name)
            except ImportError:  # a package that is not installed
                continue
            yield from public_modules(inner)


def members(hint) -> Iterator[Any]:
    """Yield the types in a union or a list that name a class or a callable."""
    if typing.get_origin(hint) in (list, Iterable, typing.Union, UnionType):
        for member in typing.get_args(hint):
            yield from members(member)
    elif hint not in (NoneType, bool, str):
        yield hint


def is_accepted(path: str, value, hints: list[Any]) -> bool:
    """Return whether one of a flag's types accepts a value."""
    for hint in hints:
        try:
            refuse_code(path, value, hint)
        except ValueError:
            continue
        return True
    return False


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    values = {
        id(value): (f"{module.__name__}.{name}", value)
        for library in (app, torch, torchvision, lightning, torchmetrics)
        for module in public_modules(library)
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_")
    }
    flags = [
        (name, parameters(cls)[name].annotation, kinds) for (cls, name), kinds in FLAGS.items()
    ]
    flags += [(cls.__name__, cls, cls) for cls in (LightningModule, LightningDataModule)]
    for flag, hint, kinds in flags:
        hints = [*members(hint)]
        for path, value in values.values():
            is_right = isinstance(value, type) and issubclass(value, kinds)
            is_hook = flag.startswith("ddp_comm") and str(
                getattr(value, "__module__", "")
            ).startswith(HOOKS)
            if is_accepted(path, value, hints) and not (is_right or is_hook):
                print(f"--{flag} accepts {path}")
    print(len(values))

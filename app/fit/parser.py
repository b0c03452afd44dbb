"""Parsers with one-line errors, and the classes that a command line may choose."""

import argparse
import inspect
import os
import pkgutil
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, set_loader, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from torchvision.transforms import v2

from app.errors import ExitStatus, UserError
from app.fit.arguments import load_yaml, subclasses
from app.fit.help import page
from app.fit.messages import rejection
from app.launch.process import TRUST
from app.modules import ImageClassifier
from app.networks import names_of_torchvision
from app.parallel import DDP
from app.recipe import Recipe
from app.system.patches import expects

# modules that a config may name; other modules are rejected, because instantiation runs their code
TRUSTED = ("app", "torch", "torchvision", "lightning", "torchmetrics")


def trusted_modules() -> list[str]:
    """Return the top-level modules that a config may name.

    These are TRUSTED, the modules of `--trust`, and the modules in the current folder or in a folder of PYTHONPATH.
    """
    folders = [Path.cwd(), *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    files = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
    local = {path.stem for path in files if path.suffix == ".py" or path.is_dir()} - sys.stdlib_module_names
    extra = filter(None, os.environ.get(TRUST, "").split(","))
    return [*TRUSTED, *(name for name in local if name.isidentifier() and name != "jsonargparse"), *extra]


def import_trusted_only() -> None:
    """Make jsonargparse reject repeated keys, and reject classes of untrusted modules before it imports them."""
    set_loader("yaml", load_yaml, (yaml.YAMLError,))
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=trusted_modules())


class PlainParser(ArgumentParser):
    """jsonargparse's parser with one-line errors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"exit_on_error": False, "allow_abbrev": False, **kwargs})

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments. A boolean flag needs no value: `--flag` means `--flag true`."""
        for action in self._actions:
            if isinstance(action.default, bool):
                action.nargs, action.const = "?", True
        return super().parse_args(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise a UserError with jsonargparse's message in one line."""
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        raise UserError(rejection(message, flags)) from ex


@expects("argparse:ArgumentParser._actions")
class Parser(LightningArgumentParser):
    """Lightning's parser with one-line errors and a short help page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.chosen: dict[str, str] = {}

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Format the help page, with the settings of the chosen model and data."""
        settings = LightningArgumentParser(usage=argparse.SUPPRESS, description="", add_help=False)
        for section, name in self.chosen.items():
            if (cls := find_class(section, name)) is not None:
                settings.add_class_arguments(cls, section, fail_untyped=False, skip={"num_classes"})
        return page(self, settings, self.chosen) if self.chosen else super().format_help(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise a UserError with jsonargparse's message in one line."""
        flags = [f"--model.optimizer.{name}" for name in parameters(torch.optim.SGD)]
        commands = [c for action in self._actions if isinstance(action.choices, dict) for c in action.choices.values()]
        actions = [action for parser in (self, *commands) for action in parser._actions]
        flags += [flag for action in actions for flag in action.option_strings if flag.startswith("--")]
        classes = {"model": subclasses(LightningModule), "data": subclasses(LightningDataModule)}
        for group, members in classes.items():
            flags += [f"--{group}.{name}" for cls in members for name in parameters(cls)]
        flags += [f"--trainer.strategy.{name}" for cls in (DDP, *subclasses(DDP)) for name in parameters(cls)]
        files = {path.stem: path.read_text(errors="ignore") for path in Path().glob("*.py") if path.is_file()}
        here = [f"{name}.{cls}" for name, text in files.items() for cls in re.findall(r"(?m)^class (\w+)", text)]
        bases: dict[str, type] = {"optimizer": torch.optim.Optimizer, "augment": v2.Transform}
        bases["scheduler"] = torch.optim.lr_scheduler.LRScheduler
        classes |= {name: subclasses(base) for name, base in {**bases, "callbacks": Callback}.items()}
        names = {flag: [*here, *(cls.__name__ for cls in members)] for flag, members in classes.items()}
        names["model"] += names_of_torchvision()
        raise UserError(rejection(message, flags, names)) from ex


def find_class(section: str, name: str) -> type | None:
    """Return the class of a name or import path, or None if parsing will reject it."""
    base = {"model": LightningModule, "data": LightningDataModule}[section]
    imported = {cls.__name__: cls for cls in subclasses(base)}
    if name in imported or name.partition(".")[0] not in trusted_modules():
        return imported.get(name)
    try:
        cls = pkgutil.resolve_name(name)
    except Exception:  # raised by the user's module; parsing reports it
        return None
    except SystemExit as end:
        if ExitStatus.of(end).status == "interrupted":  # SIGTERM
            raise
        return None
    return cls if isinstance(cls, type) else None


@cache
def parameters(cls: type | None) -> dict[str, inspect.Parameter]:
    """Return the `__init__` parameters of a class and its bases. For an `ImageClassifier`, add those of `Recipe`."""
    merged: dict[str, inspect.Parameter] = {}
    recipe = [Recipe] if cls and issubclass(cls, ImageClassifier) else []
    for base in (*recipe, *reversed(cls.__mro__ if cls else ())):
        with suppress(KeyError, NameError, TypeError):  # a base may lack `__init__`; annotations may not resolve
            merged |= inspect.signature(vars(base)["__init__"], eval_str=True).parameters
    return {name: parameter for name, parameter in merged.items() if name not in ("self", "args", "kwargs", "params")}

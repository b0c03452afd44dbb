"""Parsers with one-line errors, and the classes that a command line may choose."""

import argparse
import functools
import inspect
import pkgutil
import re
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
import yaml
from jsonargparse import ArgumentParser, _paths, _typehints, set_loader, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn
from torchvision.transforms import v2

from app.command.arguments import load_yaml, read_text, subclasses
from app.command.help import page
from app.command.messages import rejection
from app.errors import ExitStatus, UserError
from app.modules import ImageClassifier
from app.modules.networks import names_of_torchvision
from app.modules.recipe import Recipe
from app.system.patches import expects
from app.system.trust import is_within, may_run, module_of, trusted_modules
from app.training import DDP

# classes of libraries for a parameter whose type names no class, such as `Any` or `Callable`
OPEN = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
BASES: dict[str, type] = {  # base of the classes that a flag accepts, by the flag's last part
    "model": LightningModule,
    "data": LightningDataModule,
    "optimizer": torch.optim.Optimizer,
    "scheduler": torch.optim.lr_scheduler.LRScheduler,
    "augment": v2.Transform,
    "callbacks": Callback,
}
HOOKS = (
    "app.training.comm_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks",
)  # modules, for such parameters


def bases_of(hint: Any) -> tuple[type, ...]:
    """Return the classes that a type names; for a callable, the classes that it returns."""
    origin = get_origin(hint) or hint
    arguments = get_args(hint)
    if origin in (Union, UnionType):
        members = [bases_of(member) for member in arguments if member is not NoneType]
        return () if () in members else sum(members, ())
    if origin in (Callable, type):
        return bases_of(arguments[-1]) if arguments else ()
    is_open = (
        not isinstance(origin, type)
        or origin in (Any, object)
        or getattr(origin, "_is_protocol", False)
    )
    return () if is_open else (origin,)


def refuse_code(path: str, value: Any, hint: Any) -> None:
    """Reject a class or function that a flag must not call.

    Args:
        path: Its import path.
        value: The class or function.
        hint: The flag's type.

    Raises:
        ValueError: When it is of a library and no subclass of the flag's type, or a function and
            the type is a class.
    """
    bases = bases_of(hint)
    is_kind = isinstance(value, type) or _typehints.is_callable_type(hint)
    if is_kind and (
        may_run(value, bases or OPEN) or (not bases and is_within(module_of(value), HOOKS))
    ):
        return
    if bases and bases[0].__module__ != "builtins":
        raise ValueError(f"Expected '{path}' to be a subclass of {bases[0]}.")
    raise ValueError(f"Refused '{path}'.")


_NAMES = (
    "adapt_typehints",
    "import_object",
    "is_callable_type",
    "is_subclass_spec",
    "accepts_any_value",
    "instantiate_subclass_spec_in_any",
    "ActionTypeHint._check_type",
)


@expects(*(f"jsonargparse:_typehints.{name}" for name in _NAMES))
def guard_types() -> None:
    """Make jsonargparse check each class and function that a value names before calling it.

    jsonargparse only checks modules, and classes against a type that names some; it would call any
    function with the arguments of a config. At an upgrade: does `adapt_typehints` still convert
    each value, nested ones, too?
    """
    adapt = _typehints.adapt_typehints
    check_type = _typehints.ActionTypeHint._check_type
    defaults = [
        None
    ]  # default values of the parameters that are being converted, the innermost last

    def check(value: Any, hint: Any, given: Any = None) -> None:
        if isinstance(value, dict | list) and not bases_of(
            hint
        ):  # jsonargparse creates the classes in it, too
            for member in value.values() if isinstance(value, dict) else value:
                check(member, hint)
        if _typehints.is_subclass_spec(value) and hint is not NoneType:
            refuse_code(value["class_path"], _typehints.import_object(value["class_path"]), hint)
        elif isinstance(given, str) and callable(value):
            is_default = isinstance(defaults[-1], str) and given == defaults[-1]
            if not is_default:
                refuse_code(given, value, hint)

    def guarded(
        value: Any,
        hint: Any,
        serialize: bool = False,
        instantiate_classes: bool = False,
        **more: Any,
    ) -> Any:
        creates = (
            not _typehints.accepts_any_value(hint) or _typehints.instantiate_subclass_spec_in_any()
        )
        if creates and instantiate_classes:
            check(value, hint)
        converted = adapt(value, hint, serialize, instantiate_classes, **more)
        if creates and not instantiate_classes and not serialize:
            check(converted, hint, value)
        return converted

    @functools.wraps(check_type)  # because jsonargparse reads its signature
    def check_with_default(action: Any, *args: Any, **more: Any) -> Any:
        defaults.append(action.default)
        try:
            return check_type(action, *args, **more)
        finally:
            defaults.pop()

    if adapt.__name__ != guarded.__name__:
        _typehints.adapt_typehints = guarded  # type: ignore[assignment]
        _typehints.ActionTypeHint._check_type = check_with_default  # type: ignore[method-assign, assignment]


def create_in_any(value: bool) -> None:
    """Set whether a class in a value of type `Any` is created. In an experiment file, it is a value of a flag."""
    set_parsing_settings(
        validate_subclass_spec_in_any=value, instantiate_subclass_spec_in_any=value
    )


def _read_text(path: Any) -> str:
    """Read a file that a flag names in place of its value."""
    try:
        return read_text(path.absolute)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


@expects("jsonargparse:_paths.Path.read_text")
def import_trusted_only() -> None:
    """Make jsonargparse read files and YAML as this application does, and reject code that is not trusted."""
    set_loader("yaml", load_yaml, (yaml.YAMLError,))
    _paths.Path.read_text = _read_text  # type: ignore[method-assign, assignment]
    # Lightning's Timer has an enum as the default value of a string
    yaml.SafeDumper.add_multi_representer(
        Enum, lambda dumper, member: dumper.represent_data(member.value)
    )
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=trusted_modules())
    create_in_any(True)
    guard_types()


class PlainParser(ArgumentParser):
    """jsonargparse's parser with one-line errors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"exit_on_error": False, "allow_abbrev": False, **kwargs})

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments. A boolean flag needs no value: `--flag` means `--flag true`."""
        import_trusted_only()
        create_in_any(False)
        for action in self._actions:
            if isinstance(action.default, bool):
                action.nargs = "?"
                action.const = True
        return super().parse_args(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise a UserError with jsonargparse's message in one line."""
        flags = [
            flag
            for action in self._actions
            for flag in action.option_strings
            if flag.startswith("--")
        ]
        raise UserError(rejection(message, flags)) from ex


@expects("argparse:ArgumentParser._actions")
class Parser(LightningArgumentParser):
    """Lightning's parser with one-line errors and a short help page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.chosen: dict[str, str] = {}
        self.page = "help"

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Format the help page, with the settings of the chosen model and data."""
        settings = LightningArgumentParser(usage=argparse.SUPPRESS, description="", add_help=False)
        for section, name in self.chosen.items():
            cls = find_class(section, name)
            if cls is not None:
                settings.add_class_arguments(cls, section, fail_untyped=False, skip={"num_classes"})
        if not self.chosen:
            return super().format_help(*args, **kwargs)
        return page(self.prog, settings._actions + self._actions, self.chosen, self.page)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise a UserError with jsonargparse's message in one line."""
        flags = [f"--model.optimizer.{name}" for name in parameters(torch.optim.SGD)]
        commands = [
            c
            for action in self._actions
            if isinstance(action.choices, dict)
            for c in action.choices.values()
        ]
        actions = [action for parser in (self, *commands) for action in parser._actions]
        flags += [
            flag for action in actions for flag in action.option_strings if flag.startswith("--")
        ]
        classes = {flag: subclasses(base) for flag, base in BASES.items()}
        for group in ("model", "data"):
            flags += [f"--{group}.{name}" for cls in classes[group] for name in parameters(cls)]
        flags += [
            f"--trainer.strategy.{name}"
            for cls in (DDP, *subclasses(DDP))
            for name in parameters(cls)
        ]
        files = {
            path.stem: path.read_text(errors="ignore")
            for path in Path().glob("*.py")
            if path.is_file()
        }
        here = [
            f"{name}.{cls}"
            for name, text in files.items()
            for cls in re.findall(r"(?m)^class (\w+)", text)
        ]
        names = {
            flag: [*here, *(cls.__name__ for cls in members)] for flag, members in classes.items()
        }
        names["model"] += names_of_torchvision()
        raise UserError(rejection(message, flags, names)) from ex


def find_class(section: str, name: str) -> type | None:
    """Return the class of a name or import path, or None if parsing will reject it."""
    imported = {cls.__name__: cls for cls in subclasses(BASES[section])}
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


@functools.cache
def parameters(cls: type | None) -> dict[str, inspect.Parameter]:
    """Return the `__init__` parameters of a class and its bases. For an `ImageClassifier`, add those of `Recipe`."""
    merged: dict[str, inspect.Parameter] = {}
    recipe = [Recipe] if cls and issubclass(cls, ImageClassifier) else []
    for base in (*recipe, *reversed(cls.__mro__ if cls else ())):
        with suppress(
            KeyError, NameError, TypeError
        ):  # a base may lack `__init__`; annotations may not resolve
            merged |= inspect.signature(vars(base)["__init__"], eval_str=True).parameters
    return {
        name: parameter
        for name, parameter in merged.items()
        if name not in ("self", "args", "kwargs", "params")
    }

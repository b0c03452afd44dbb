"""Parsers with one-line errors, and the classes that a command line may choose."""

import argparse
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
import yaml
from jsonargparse import (
    ArgumentParser,
    _parameter_resolvers,
    _paths,
    _typehints,
    set_loader,
    set_parsing_settings,
)
from lightning import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn
from torchvision.transforms import v2

from app.command.arguments import load_yaml, read_text, subclasses
from app.command.help import page
from app.command.messages import rejection
from app.errors import ExitStatus, UserError
from app.modules.networks import names_of_torchvision
from app.system.patches import expects
from app.system.trust import is_within, may_run, module_of, trusted_modules
from app.training import DDP

# classes of libraries for a parameter whose type names no class, such as `Any` or `Callable`
OPEN = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
BASES: dict[str, type] = {  # base of the classes that a flag accepts
    "model": LightningModule,
    "data": LightningDataModule,
    "model.optimizer": torch.optim.Optimizer,
    "trainer.strategy": DDP,
    "model.scheduler": torch.optim.lr_scheduler.LRScheduler,
    "data.augment": v2.Transform,
    "trainer.callbacks": Callback,
}
# modules whose functions such a parameter takes, too
HOOKS = ("app.training.comm_hooks", "torch.distributed.algorithms.ddp_comm_hooks")


def bases_of(hint: Any) -> tuple[type, ...]:
    """Return the classes that a type names; for a callable, the classes that it returns."""
    origin = get_origin(hint) or hint
    arguments = get_args(hint)
    if origin in (Union, UnionType):
        members = [bases_of(member) for member in arguments if member is not NoneType]
        return tuple(itertools.chain(*members)) if all(members) else ()
    if origin in (Callable, type):
        return bases_of(arguments[-1]) if arguments else ()
    is_protocol = getattr(origin, "_is_protocol", False)
    if not isinstance(origin, type) or origin in (Any, object) or is_protocol:
        return ()
    return (origin,)


def takes_functions(hint: Any) -> bool:
    """Return whether a type is a callable, or a union with one."""
    if get_origin(hint) in (Union, UnionType):
        return any(map(takes_functions, get_args(hint)))
    return Callable in (hint, get_origin(hint))


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
    is_hook = not bases and is_within(module_of(value), HOOKS)
    is_allowed = is_hook or may_run(value, bases or OPEN)
    if is_allowed and (isinstance(value, type) or takes_functions(hint)):
        return
    if bases and bases[0].__module__ != "builtins":
        raise ValueError(f"Expected '{path}' to be a subclass of {bases[0]}.")
    raise ValueError(f"Refused '{path}'.")


@expects(
    "jsonargparse:_typehints.adapt_typehints",
    "jsonargparse:_typehints.get_parsing_setting",
    "jsonargparse:_typehints.is_subclass_spec",
    "jsonargparse:_typehints.ActionTypeHint._check_type",
)
def guard_types() -> None:
    """Make jsonargparse check each class and function that a value names before calling it.

    jsonargparse only checks modules, and classes against a type that names some; it would call any
    function with the arguments of a config. It also saves names of functions, and devices, as text
    that cannot be read again. At an upgrade: does `adapt_typehints` still convert each value,
    nested ones, too?
    """
    adapt = _typehints.adapt_typehints
    check_type = _typehints.ActionTypeHint._check_type
    # default values of the parameters that are being converted, the innermost last
    defaults: list[Any] = [None]

    def check(value: Any, hint: Any, given: Any = None) -> None:
        if not bases_of(hint):  # jsonargparse creates the classes in it, too
            members: Iterable[Any] = ()
            if isinstance(value, dict):
                members = value.values()
            elif isinstance(value, list):
                members = value
            for member in members:
                check(member, hint)
        if _typehints.is_subclass_spec(value) and hint is not NoneType:
            refuse_code(value["class_path"], resolve_name(value["class_path"]), hint)
        elif isinstance(given, str) and callable(value) and given != str(defaults[-1]):
            refuse_code(given, value, hint)

    def guarded(
        value: Any,
        hint: Any,
        serialize: bool = False,
        instantiate_classes: bool = False,
        **more: Any,
    ) -> Any:
        is_name = isinstance(value, str) and takes_functions(hint)
        if serialize and (is_name or isinstance(value, torch.device)):
            return str(value)
        in_any = _typehints.get_parsing_setting("instantiate_subclass_spec_in_any")
        creates = in_any or hint not in (Any, object)
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


def _read_text(path: Any) -> str:
    """Read a file that a flag names in place of its value."""
    try:
        return read_text(path.absolute)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


@expects("jsonargparse:_paths.Path.read_text")
def import_trusted_only(creates_in_any: bool = True) -> None:
    """Make jsonargparse read files and YAML as this application does, and reject untrusted code.

    Args:
        creates_in_any: Whether a class in a value of type `Any` is created; in an experiment, it is
            not.
    """
    set_loader("yaml", load_yaml, (yaml.YAMLError,))
    _paths.Path.read_text = _read_text  # type: ignore[method-assign, assignment]
    # Lightning's Timer has an enum as the default value of a string
    yaml.SafeDumper.add_multi_representer(
        Enum, lambda dumper, member: dumper.represent_data(member.value)
    )
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=trusted_modules(),
        validate_subclass_spec_in_any=creates_in_any,
        instantiate_subclass_spec_in_any=creates_in_any,
    )
    guard_types()


@expects("argparse:ArgumentParser._actions", "argparse:ArgumentParser._option_string_actions")
class PlainParser(ArgumentParser):
    """jsonargparse's parser with one-line errors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"exit_on_error": False, "allow_abbrev": False, **kwargs})

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments. A boolean flag needs no value: `--flag` means `--flag true`."""
        import_trusted_only(creates_in_any=False)
        for action in self._actions:
            if isinstance(action.default, bool):
                action.nargs = "?"
                action.const = True
        return super().parse_args(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise a UserError with jsonargparse's message in one line."""
        raise UserError(rejection(message, self._option_string_actions)) from ex


@expects("argparse:ArgumentParser._actions", "argparse:ArgumentParser._option_string_actions")
class Parser(LightningArgumentParser):
    """Lightning's parser with one-line errors and a short help page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.chosen: dict[str, str] = {}
        self.is_short = True

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Format the help page, with the settings of the chosen model and data."""
        if not self.chosen:  # a nested parser of jsonargparse's
            return super().format_help(*args, **kwargs)
        settings = LightningArgumentParser(usage=argparse.SUPPRESS, description="", add_help=False)
        for section, name in self.chosen.items():
            cls = find_class(section, name)
            if cls is not None:
                settings.add_class_arguments(cls, section, fail_untyped=False, skip={"num_classes"})
        return page(self.prog, settings._actions + self._actions, self.is_short)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise a UserError with jsonargparse's message in one line."""
        flags = list(self._option_string_actions)
        names = {}
        here = _classes_here()
        for flag, base in BASES.items():
            classes = [base, *subclasses(base)]
            names[f"--{flag}"] = here + [cls.__name__ for cls in classes]
            if flag in ("model", "data", "model.optimizer", "trainer.strategy"):
                for cls in classes:  # no other class of a user, which this program has imported
                    is_ours = cls.__module__.startswith(("app.", "torch."))
                    if is_ours or cls.__name__ in str(self.chosen):
                        flags += [f"--{flag}.{name}" for name in parameters(cls)]
        names["--model"] += names_of_torchvision()
        if self.chosen:  # a nested parser's message becomes a part of another one
            message = re.sub(
                "^Option '(.+)' is not accepted", r"unrecognized arguments: --\1", message
            )
        raise UserError(rejection(message, flags, names)) from ex


def _classes_here() -> list[str]:
    """Return the import paths of the classes in the current folder's modules."""
    classes = []
    for path in Path().glob("*.py"):
        if path.is_file():
            text = path.read_text(errors="ignore")
            classes += [f"{path.stem}.{name}" for name in re.findall(r"(?m)^class (\w+)", text)]
    return classes


def find_class(section: str, name: str) -> type | None:
    """Return the class of a name or import path, or None if parsing will reject it."""
    imported = {cls.__name__: cls for cls in subclasses(BASES[section])}
    if name in imported or name.partition(".")[0] not in trusted_modules():
        return imported.get(name)
    try:
        cls = resolve_name(name)
    except Exception:  # raised by the user's module; parsing reports it
        return None
    except SystemExit as end:
        if ExitStatus.of(end).status == "interrupted":  # SIGTERM
            raise
        return None
    return cls if isinstance(cls, type) else None


@expects("jsonargparse:_parameter_resolvers.get_signature_parameters")
@functools.cache
def parameters(cls: type | None) -> dict[str, Any]:
    """Return the parameters of a class that are flags; without a class, none."""
    resolved = [] if cls is None else _parameter_resolvers.get_signature_parameters(cls)
    return {parameter.name: parameter for parameter in resolved}

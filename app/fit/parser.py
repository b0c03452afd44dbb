"""How a command line is read: which classes it chooses, and what is said when it cannot be read."""

import argparse
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import app
from app.errors import ExitStatus, UserError, nearest, one_line
from app.fit.help import page
from app.fit.messages import rejection
from app.launch.process import TRUST
from app.parallel import DDP
from app.system.files import open_file
from app.system.patches import expects

# whose classes a config may name; a class that is made is code that is run
TRUSTED = ("app", "torch", "torchvision", "lightning", "torchmetrics")

SECTIONS = ("trainer", "model", "data", "run", "cluster", "best_checkpoint", "last_checkpoint", "lr_monitor")
NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)", re.IGNORECASE)  # in words; 1e400 is found when it is a number


def trusted_modules() -> list[str]:
    """Top modules whose classes may be named: known ones, those of the current folder and PYTHONPATH, and --trust's."""
    folders = [Path.cwd(), *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    files = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
    own = {path.stem for path in files if path.suffix == ".py" or path.is_dir()} - sys.stdlib_module_names
    given = filter(None, os.environ.get(TRUST, "").split(","))
    return [*TRUSTED, *(name for name in own if name.isidentifier() and name != "jsonargparse"), *given]


def import_trusted_only() -> None:
    """Have jsonargparse refuse, before it is imported, what a config names of other modules."""
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=trusted_modules())


class PlainParser(ArgumentParser):
    """Reports what a user did wrong in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"exit_on_error": False, "allow_abbrev": False, **kwargs})

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments; a switch may stand alone or have a value: `--flag`, `--flag true`."""
        for action in self._actions:
            if isinstance(action.default, bool):
                action.nargs, action.const = "?", True
        return super().parse_args(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise the message, without usage."""
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        raise UserError(rejection(message, flags)) from ex


@expects("argparse:ArgumentParser._actions")
class Parser(LightningArgumentParser):
    """Reports what a user did wrong in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.chosen: dict[str, str] = {}

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Say what matters first, with the settings of the chosen model and data."""
        settings = LightningArgumentParser(usage=argparse.SUPPRESS, description="", add_help=False)
        for section, name in self.chosen.items():
            cls = find_class(section, name)
            if cls is not None:
                settings.add_class_arguments(cls, section, fail_untyped=False, skip={"num_classes"})
        return page(self, settings, self.chosen) if self.chosen else super().format_help(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise the message, without usage."""
        flags = [f"--model.optimizer.{name}" for name in parameters(torch.optim.SGD)]
        commands = [command for action in self._actions for command in _commands(action)]
        actions = [action for parser in (self, *commands) for action in parser._actions]
        flags += [flag for action in actions for flag in action.option_strings if flag.startswith("--")]
        classes = {"model": _subclasses(LightningModule), "data": _subclasses(LightningDataModule)}
        for group, members in classes.items():
            flags += [f"--{group}.{name}" for cls in members for name in parameters(cls)]
        flags += [f"--trainer.strategy.{name}" for cls in (DDP, *_subclasses(DDP)) for name in parameters(cls)]
        files = {path.stem: path.read_text(errors="ignore") for path in Path().glob("*.py") if path.is_file()}
        here = [f"{name}.{cls}" for name, text in files.items() for cls in re.findall(r"(?m)^class (\w+)", text)]
        bases = {"optimizer": torch.optim.Optimizer, "scheduler": torch.optim.lr_scheduler.LRScheduler}
        classes |= {name: _subclasses(base) for name, base in {**bases, "callbacks": Callback}.items()}
        names = {flag: [*here, *(cls.__name__ for cls in members)] for flag, members in classes.items()}
        raise UserError(rejection(message, flags, names)) from ex


def _commands(action: argparse.Action) -> list[argparse.ArgumentParser]:
    return list(action.choices.values()) if isinstance(action.choices, dict) else []


def find_class(section: str, name: str) -> type | None:
    """Find the class of model or data that a name or import path means; None where parsing will refuse it."""
    base = {"model": LightningModule, "data": LightningDataModule}[section]
    named = {cls.__name__: cls for cls in _subclasses(base)}
    if name in named or name.partition(".")[0] not in trusted_modules():
        return named.get(name)
    try:
        found = pkgutil.resolve_name(name)
    except Exception:  # of a module of the user's; parsing says what is wrong
        return None
    except SystemExit as end:
        if ExitStatus.of(end).status == "interrupted":  # by SIGTERM
            raise
        return None
    return found if isinstance(found, type) else None


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return [*direct, *(below for child in direct for below in _subclasses(child))]


@cache
def parameters(cls: type | None) -> dict[str, inspect.Parameter]:
    """Return the parameters, with types and defaults, of a class's `__init__` and of its base classes'."""
    merged: dict[str, inspect.Parameter] = {}
    for base in reversed(cls.__mro__ if cls else ()):
        with suppress(KeyError, NameError, TypeError):  # annotations of a user's class may not resolve
            merged |= inspect.signature(vars(base)["__init__"], eval_str=True).parameters
    return {name: each for name, each in merged.items() if name not in ("self", "args", "kwargs", "params")}


def chosen_classes(arguments: Sequence[str]) -> dict[str, str]:
    """Find out which classes of model and data the user has chosen, by flag or in a config.

    Raises:
        UserError: When a config file is missing, not text, or not a YAML mapping.
    """
    chosen = {}
    for argument, following in pairwise([*arguments, "-"]):
        flag, given, value = argument.partition("=")
        value = value if given else following
        if flag.removesuffix(".class_path") in ("--model", "--data"):
            chosen[flag.removesuffix(".class_path").removeprefix("--")] = value
        if flag in ("--config", "-c") and not value.startswith("-"):
            config = read_yaml(value)
            for section in {"model", "data"} & config.keys():
                content = config[section]
                name = content.get("class_path") if isinstance(content, dict) else content
                if isinstance(name, str):
                    chosen[section] = name
    return chosen


def configs_and_classes_first(arguments: Sequence[str]) -> list[str]:
    """The same arguments in an order in which they can be read: configs, then classes, then the settings of these.

    A flag that names a class is one of whose settings there are flags: `--model`, `--model.optimizer`.
    """
    given: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("-") and not re.match(r"-[\d.]", argument):
            given.append([argument])
        elif given:
            given[-1].append(argument)
        else:
            given.append([argument])
    names = [each[0].partition("=")[0].removesuffix(".class_path").replace(".init_args", "") for each in given]

    def place(index: int) -> tuple[int, int]:
        name = names[index]
        if name in ("--config", "-c"):
            return 0, 0
        is_class = any(other.startswith(f"{name}.") for other in names)
        return (1, name.count(".")) if is_class and not name.endswith("+") else (2, 0)

    return [argument for index in sorted(range(len(given)), key=place) for argument in given[index]]


def spell_out_strategy(arguments: list[str]) -> list[str]:
    """Put the class that a registered name means, and its settings, before the first option of the strategy.

    jsonargparse knows the options of classes, such as `--trainer.strategy.bucket_cap_mb`, not those of names.

    Raises:
        UserError: When such an option comes without a strategy, or with one that there is not.
    """
    spelt, name = [], "auto"
    for argument, following in pairwise([*arguments, "-"]):
        flag, given, value = argument.partition("=")
        value = value if given else following
        if flag in ("--trainer.strategy", "--trainer.strategy.class_path"):
            name = value
            if name not in StrategyRegistry and ("." in name or name in [c.__name__ for c in _subclasses(Strategy)]):
                argument = argument.replace(flag, "--trainer.strategy.class_path", 1)  # or it would be a name
        elif flag in ("--config", "-c") and not value.startswith("-"):
            trainer = read_yaml(value).get("trainer")
            chosen = trainer.get("strategy") if isinstance(trainer, dict) else None
            name = (chosen.get("class_path") if isinstance(chosen, dict) else chosen) or name
        elif flag.startswith("--trainer.strategy.") and flag != "--trainer.strategy.help":
            if name in StrategyRegistry:
                cls, settings = StrategyRegistry[name]["strategy"], StrategyRegistry[name]["init_params"]
                name = f"{cls.__module__}.{cls.__qualname__}"
                spelt += [f"--trainer.strategy={name}", *(f"--trainer.strategy.{k}={v}" for k, v in settings.items())]
            elif "." not in name and name not in [cls.__name__ for cls in _subclasses(Strategy)]:
                wrong = (
                    "give --trainer.strategy ddp, or another one, before it"
                    if name == "auto"
                    else (f"there is no --trainer.strategy {name}{nearest(name, StrategyRegistry)}")
                )
                raise UserError(f"{flag}: {wrong}")
        spelt.append(argument)
    return spelt


def refuse_unusable(arguments: list[str]) -> None:
    """Reject values that jsonargparse misreads silently.

    Raises:
        UserError: For an optimizer's or scheduler's number that is not finite, for a flag without its value, for a null
            in place of a config's section, and for a repeated key.
    """
    for argument, following in pairwise([*arguments, "-"]):
        flag, given, value = argument.partition("=")
        value = value if given else following
        if flag.startswith(("--model.optimizer.", "--model.scheduler.")) and NOT_FINITE.fullmatch(value):
            raise UserError(f"{flag} {value}: give a finite number")
        if re.fullmatch(r"--[\w.]+\.(?!help)\w+\+?", argument) and re.match(r"--|-$", following):
            raise UserError(f"{flag} needs a value")
        if flag.startswith("--"):
            _look_at(flag, value)
        if flag in ("--config", "-c") and not value.startswith("-"):
            for section, content in read_yaml(value).items():
                for text in _texts(content):
                    _look_at(f"{section} in --config {value}:", text)
                names_class = section in ("model", "data") and isinstance(content, str)
                if section in SECTIONS and not names_class and not isinstance(content, dict):
                    said = "null" if content is None else str(content)[:50]
                    raise UserError(f"{section}: {said} in --config {value}: give its settings, or leave it out")


def _texts(content: Any) -> Iterator[str]:
    """Yield every string in nested settings, because each may name a file."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for inner in content.values() if isinstance(content, dict) else content:
            yield from _texts(inner)


def _look_at(flag: str, value: str) -> None:
    """Reject YAML with a repeated key, in a value or in the file that it names; and a pipe in place of a file."""
    names_file = value.endswith((".yaml", ".yml", ".json")) or flag.removeprefix("--") in SECTIONS
    if os.path.exists(value) and (names_file or Path(value).is_fifo()):
        read_yaml(value, flag)
    elif any(sign in value for sign in "&{"):
        try:
            yaml.load(value, Loader=_PlainLoader)
        except _RepeatedKeyError as error:
            raise UserError(f"{flag}: {one_line(str(error))}") from error
        except (yaml.YAMLError, ValueError, RecursionError):  # it is something else
            return


class _RepeatedKeyError(yaml.YAMLError):
    """A YAML mapping repeats a key."""


class _PlainLoader(yaml.SafeLoader):
    """Loader that rejects repeated keys; YAML silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
        for key in keys:
            if keys.count(key) > 1:
                raise _RepeatedKeyError(f"{key} is given twice, the second time after line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def shipped(argument: str) -> str:
    """Return a path, or `--flag=path`; a `configs/…` path that is missing here becomes the application's own."""
    flag, equals, path = argument.rpartition("=")
    ours = Path(app.__file__).parent / path
    is_shipped = path.startswith("configs/") and not os.path.exists(path) and ours.is_file()
    return f"{flag}{equals}{ours}" if is_shipped else argument


def read_yaml(name: str, flag: str = "--config") -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        UserError: When the file that the flag names is missing, no file, not text, or not a mapping with unique keys.
    """
    try:
        with open_file(shipped(name)) as file:
            content = yaml.load(file.read().decode(), Loader=_PlainLoader)
    except FileNotFoundError:
        near = nearest(name, map(str, Path(name).parent.glob("*.yaml")))
        raise UserError(f"{flag} {name}: there is no such file{near}") from None
    except OSError as error:
        raise UserError(f"{flag} {name}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: not text, or a huge number
        raise UserError(f"{flag} {name} cannot be read: {one_line(str(error))[:300]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{flag} {name}: not a config: expected `key: value` lines")
    return content

"""Command line as tokens, with the content of its config files."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import get_loader
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import app
from app.errors import UserError, nearest, one_line
from app.modules.networks import names_of_torchvision, own_network
from app.system.files import open_file

STRATEGY = "--trainer.strategy"
SECTIONS = (
    "trainer",
    "model",
    "data",
    "run",
    "cluster",
    "best_checkpoint",
    "last_checkpoint",
    "lr_monitor",
)
# jsonargparse's own loader, which `app.command.parser` replaces by `load_yaml`
PLAIN_LOADER = get_loader("yaml")
MOST_VALUES = 100_000  # values of a config


class Token(NamedTuple):
    """Flag with its value.

    Attributes:
        flag: Flag with its dashes; empty for words before the first flag.
        value: Value of the flag, or None.
        words: Words of the command line that make up the token.
    """

    flag: str
    value: str | None
    words: tuple[str, ...]

    @classmethod
    def of(cls, flag: str, value: str) -> "Token":
        """Return a token for a flag and its value."""
        return cls(flag, value, (f"{flag}={value}",))

    @property
    def name(self) -> str:
        """The flag without `.class_path` and `.init_args`."""
        return self.flag.removesuffix(".class_path").replace(".init_args", "")


def tokenise(words: Sequence[str]) -> list[Token]:
    """Group words into flags and values; a negative number is a value."""
    tokens: list[Token] = []
    for word in words:
        if word.startswith("-") and not re.match(r"-[\d.]", word):
            flag, equals, text = word.partition("=")
            value = text if equals else None
            tokens.append(Token(flag, value, (word,)))
        elif tokens:
            flag, value, before = tokens.pop()
            if value is None:
                value = word
            tokens.append(Token(flag, value, (*before, word)))
        else:
            tokens.append(Token("", None, (word,)))
    expanded: list[Token] = []
    for token in tokens:
        expanded += _expand_network(token)
    return expanded


def _expand_network(token: Token) -> list[Token]:
    """Expand `--model NAME` to `--model ImageClassifier --model.network NAME` for a network."""
    name = token.value or ""
    is_network = own_network(name) or name in names_of_torchvision() or name.startswith("timm/")
    if token.name != "--model" or not is_network:
        return [token]
    return [Token.of("--model", "ImageClassifier"), Token.of("--model.network", name)]


def _is_path(data: str) -> bool:
    """Return whether the value of `--data` is a path of images in place of a class."""
    names = [cls.__name__ for cls in subclasses(LightningDataModule)]
    if data in names or data.endswith((".yaml", ".yml")):
        return False
    return os.path.isdir(data) or data.endswith(".csv") or (os.sep in data and "{" not in data)


class Arguments:
    """Command line of `fit`, `validate`, `test` or `predict`.

    Args:
        argv: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Attributes:
        tokens: Flags in the order that jsonargparse needs: configs, classes, settings.
        configs: Content of each config file, by its path.

    Raises:
        UserError: When a config file is missing, not text, or not a YAML mapping.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.configs: dict[str, dict[str, Any]] = {}
        tokens = [self._read(token) for token in tokenise(argv[1:])]
        # a later --trainer.strategy replaces an earlier one, with its settings
        chosen = [index for index, token in enumerate(tokens) if token.name == STRATEGY]
        self.tokens: list[Token] = []
        for index, token in enumerate(tokens):
            is_setting = token.flag.startswith(f"{STRATEGY}.")
            if not (is_setting and chosen and chosen[0] <= index < chosen[-1]):
                self.tokens.append(token)
        names = [token.name for token in tokens]

        def place(token: Token) -> tuple[int, int]:
            """Sort configs first, then classes that have settings, the outer ones first."""
            if token.flag == "--config":
                return 0, 0
            has_settings = any(name.startswith(f"{token.name}.") for name in names)
            if has_settings and not token.name.endswith("+"):
                return 1, token.name.count(".")
            return 2, 0

        self.tokens.sort(key=place)

    def _read(self, token: Token) -> Token:
        """Read the config file of a `--config` token; return other tokens unchanged."""
        if token.flag not in ("--config", "-c") or token.value is None:
            return token
        file = shipped(token.value)
        self.configs[file] = read_yaml(file)
        return Token.of("--config", file)

    @property
    def words(self) -> list[str]:
        """The flags as words of a command line."""
        return [word for token in self.tokens for word in token.words]

    def value(self, flag: str) -> str | None:
        """Return a flag's last value on the command line, or None."""
        values = [token.value for token in self.tokens if token.flag == flag]
        return values[-1] if values else None

    def chosen(self, setting: str) -> str | None:
        """Return the last value of a setting, such as `model`, in flags and configs."""
        chosen = None
        for token in self.tokens:
            value: Any = None
            if token.flag == "--config":
                value = _value_in(self.configs.get(str(token.value)), setting)
            elif token.name == f"--{setting}":
                value = token.value
            if value is not None:
                chosen = str(value)
        return chosen

    def check(self) -> None:
        """Reject values that jsonargparse misreads silently.

        Raises:
            UserError: For a flag without a value, or a config section that is not a mapping.
        """
        for token in self.tokens:
            if token.value is None and re.fullmatch(r"--[\w.]+\.(?!help)\w+\+?", token.flag):
                raise UserError(f"{token.flag} needs a value")
            data = token.value or ""
            if token.flag == "--data" and _is_path(data):
                problem = "a path" if os.path.exists(data) else "a path that is missing"
                raise UserError(
                    f"--data {data}: {problem}: give --data ImageFolder --data.root {data}, or for "
                    "a CSV file --data ImageTable --data.csv"
                )
        for file, config in self.configs.items():
            for section, content in config.items():
                is_class = isinstance(content, str) and section in ("model", "data")
                if section in SECTIONS and not is_class and not isinstance(content, dict):
                    value = json.dumps(content, default=str)[:50]
                    raise UserError(
                        f"{section}: {value} in --config {file}: give its settings, or leave it out"
                    )

    def spell_out_strategy(self) -> None:
        """Replace a strategy's registered name by its class, if an option of it is set.

        jsonargparse accepts options such as `--trainer.strategy.bucket_cap_mb` only for a class.

        Raises:
            UserError: When an option is set without a strategy, or with an unknown strategy.
        """
        name = self.chosen("trainer.strategy") or "auto"
        classes = [cls.__name__ for cls in subclasses(Strategy)]
        spelt: list[Token] = []
        is_spelt = False
        for token in self.tokens:
            is_option = token.flag.startswith(f"{STRATEGY}.") and token.name != STRATEGY
            if is_option and token.flag != f"{STRATEGY}.help" and not is_spelt:
                spelt += _spelt(name, token.flag, classes)
                is_spelt = True
            value = token.value or ""
            if token.name == STRATEGY and ("." in value or value in classes):
                token = Token.of(f"{STRATEGY}.class_path", value)
            spelt.append(token)
        self.tokens = spelt


def _value_in(config: Any, setting: str) -> Any:
    """Return the value of a setting in a config, or None; for a class, its path."""
    for key in setting.split("."):
        if not isinstance(config, dict):
            return None
        settings = config.get("init_args", config)
        config = settings.get(key) if isinstance(settings, dict) else None
    return config.get("class_path") if isinstance(config, dict) else config


def _spelt(name: str, option: str, classes: list[str]) -> list[Token]:
    """Return the class of a registered strategy, and the options that its name implies."""
    if name in StrategyRegistry:
        strategy = StrategyRegistry[name]
        cls = strategy["strategy"]
        implied = strategy["init_params"].items()
        options = [Token.of(f"{STRATEGY}.{key}", str(value)) for key, value in implied]
        return [Token.of(STRATEGY, f"{cls.__module__}.{cls.__qualname__}"), *options]
    if name == "auto":
        raise UserError(f"{option}: give --trainer.strategy ddp, or another one, before it")
    if "." not in name and name not in classes:
        near = nearest(name, StrategyRegistry)
        raise UserError(f"{option}: there is no {STRATEGY} {name}{near}")
    return []


def subclasses(cls: type) -> list[type]:
    """Return all imported subclasses of a class."""
    found: list[type] = cls.__subclasses__()
    for child in list(found):
        found += subclasses(child)
    return found


class _UniqueKeys(yaml.BaseLoader):
    """YAML loader that rejects repeated keys. YAML keeps only the last of them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, after a check of its keys."""
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise UserError(f"{key} is given twice, the second time after line {line}")
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Load YAML as jsonargparse does, and update settings of earlier versions.

    Raises:
        UserError: For a repeated key, or aliases that would fill memory.
        YAMLError: For text that is not YAML.
    """
    if _count_values(yaml.load(text, _UniqueKeys), {}) > MOST_VALUES:
        raise UserError(f"its aliases (*) stand for more than {MOST_VALUES:,} values")
    content = PLAIN_LOADER(text)
    if isinstance(content, dict):
        _update(content.get("model"))
        _update(content.get("data"))
    return content


def _count_values(content: Any, known: dict[int, int]) -> int:
    """Count the values of a YAML document in which each alias is written out."""
    if not isinstance(content, dict | list):
        return 1
    if id(content) not in known:
        children = list(content.values()) if isinstance(content, dict) else content
        known[id(content)] = sum(_count_values(child, known) for child in children)
    return known[id(content)]


def _update(section: Any) -> None:
    """Rename Synthetic's `size` in a config, and drop removed settings that were off."""
    settings = section.get("init_args") if isinstance(section, dict) else None
    if not isinstance(settings, dict):
        return
    for name in ("cuda_graph", "micro_batch"):
        if not settings.get(name, True):
            del settings[name]
    if "size" in settings and str(section.get("class_path")).endswith("Synthetic"):
        settings["images"] = settings.pop("size")


def shipped(path: str) -> str:
    """Return the path of a config.

    If the current folder lacks `configs/…`, return that file's path in the installed package.
    """
    ours = Path(app.__file__).parent / path
    is_shipped = path.startswith("configs/") and not os.path.exists(path) and ours.is_file()
    return str(ours) if is_shipped else path


def read_yaml(name: str, flag: str = "--config") -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        UserError: When the file is missing or unreadable, or is not a YAML mapping as `load_yaml`
            takes it.
    """
    try:
        content = load_yaml(read_text(shipped(name)))
    except FileNotFoundError:
        near = nearest(name, map(str, Path(name).parent.glob("*.yaml")))
        raise UserError(f"{flag} {name}: there is no such file{near}") from None
    except OSError as error:
        raise UserError(f"{flag} {name}: {error.strerror}") from error
    # ValueError: not UTF-8
    except (ValueError, RecursionError, UserError, yaml.YAMLError) as error:
        raise UserError(f"{flag} {name} cannot be read: {one_line(str(error))[:300]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{flag} {name}: not a config: expected `key: value` lines")
    return content


def read_text(path: str | Path) -> str:
    """Read a text file that may become a config.

    Raises:
        OSError: When the file cannot be opened, or is not a regular file.
        ValueError: When it is not UTF-8.
    """
    with open_file(path) as file:
        return file.read().decode()

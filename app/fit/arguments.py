"""Command line as tokens, with the content of its config files."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import get_loader
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import app
from app.errors import UserError, nearest, one_line
from app.networks import names_of_torchvision, own_network
from app.system.files import open_file

STRATEGY = "--trainer.strategy"
SECTIONS = ("trainer", "model", "data", "run", "cluster", "best_checkpoint", "last_checkpoint", "lr_monitor")


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
            flag, equals, value = word.partition("=")
            tokens.append(Token(flag, value if equals else None, (word,)))
        elif tokens:
            flag, known, before = tokens[-1]
            tokens[-1] = Token(flag, word if known is None else known, (*before, word))
        else:
            tokens.append(Token("", None, (word,)))
    return [expanded for token in tokens for expanded in _network(token)]


def _network(token: Token) -> list[Token]:
    """Expand `--model NAME` to `--model ImageClassifier --model.network NAME` for the name of a network."""
    name = token.value or ""
    is_network = own_network(name) or name in names_of_torchvision() or name.startswith("timm/")
    if token.name != "--model" or not is_network:
        return [token]
    return [Token.of("--model", "ImageClassifier"), Token.of("--model.network", name)]


class Arguments:
    """Command line of `fit`, `validate`, `test` or `predict`.

    Args:
        argv: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Attributes:
        command: The command as a list of one word; an empty list if there is no command.
        tokens: Flags in the order that jsonargparse needs: configs, classes, settings.
        configs: Content of each config file, by its path.

    Raises:
        UserError: When a config file is missing, not text, or not a YAML mapping.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.command = [*argv[:1]]
        self.configs: dict[str, dict[str, Any]] = {}
        tokens = [self._read(token) for token in tokenise(argv[1:])]
        names = [token.name for token in tokens]

        def place(token: Token) -> tuple[int, int]:
            if token.flag in ("--config", "-c"):
                return 0, 0
            has_settings = any(name.startswith(f"{token.name}.") for name in names) and not token.name.endswith("+")
            return (1, token.name.count(".")) if has_settings else (2, 0)

        chosen = [index for index, token in enumerate(tokens) if token.name == STRATEGY]
        if chosen:  # drop the settings of a strategy that a later --trainer.strategy replaces
            between = range(chosen[0], chosen[-1])
            tokens = [t for i, t in enumerate(tokens) if i not in between or not t.flag.startswith(f"{STRATEGY}.")]
        self.tokens = sorted(tokens, key=place)

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
        return next((token.value for token in reversed(self.tokens) if token.flag == flag), None)

    def chosen(self, setting: str) -> str | None:
        """Return the last value that flags or configs give to a setting, such as `model` or `model.weights`."""
        text = None
        for token in self.tokens:
            if token.flag == "--config" and token.value in self.configs:
                content: Any = self.configs[token.value]
                for key in setting.split("."):
                    content = content.get("init_args", content) if isinstance(content, dict) else {}
                    content = content.get(key) if isinstance(content, dict) else None
                content = content.get("class_path") if isinstance(content, dict) else content
                text = text if content is None else str(content)
            elif token.name == f"--{setting}" and token.value is not None:
                text = token.value
        return text

    def check(self) -> None:
        """Reject values that jsonargparse misreads silently.

        Raises:
            UserError: For a flag without a value, or a config section that is not a mapping.
        """
        for token in self.tokens:
            if token.value is None and re.fullmatch(r"--[\w.]+\.(?!help)\w+\+?", token.flag):
                raise UserError(f"{token.flag} needs a value")
        for file, config in self.configs.items():
            for section, content in config.items():
                names_class = section in ("model", "data") and isinstance(content, str)
                if section in SECTIONS and not names_class and not isinstance(content, dict):
                    shown = "null" if content is None else str(content)[:50]
                    raise UserError(f"{section}: {shown} in --config {file}: give its settings, or leave it out")

    def spell_out_strategy(self) -> None:
        """Replace a strategy's registered name by its class, if the command line sets options of the strategy.

        jsonargparse accepts options such as `--trainer.strategy.bucket_cap_mb` only for a class.

        Raises:
            UserError: When an option is set without a strategy, or with an unknown strategy.
        """
        name = self.chosen("trainer.strategy") or "auto"
        classes = {cls.__name__ for cls in subclasses(Strategy)}
        no_settings = (f"{STRATEGY}.help", f"{STRATEGY}.class_path")
        settings = [t for t in self.tokens if t.flag.startswith(f"{STRATEGY}.") and t.flag not in no_settings]
        spelt: list[Token] = []
        for token in self.tokens:
            if token.name == STRATEGY and token.value is not None:
                is_class = token.value not in StrategyRegistry and ("." in token.value or token.value in classes)
                token = Token.of(f"{STRATEGY}.class_path", token.value) if is_class else token
            if settings and token is settings[0]:
                if name in StrategyRegistry:
                    cls, known = StrategyRegistry[name]["strategy"], StrategyRegistry[name]["init_params"]
                    spelt.append(Token.of(STRATEGY, f"{cls.__module__}.{cls.__qualname__}"))
                    spelt += [Token.of(f"{STRATEGY}.{key}", str(value)) for key, value in known.items()]
                elif name == "auto":
                    raise UserError(f"{token.flag}: give --trainer.strategy ddp, or another one, before it")
                elif "." not in name and name not in classes:
                    raise UserError(f"{token.flag}: there is no {STRATEGY} {name}{nearest(name, StrategyRegistry)}")
            spelt.append(token)
        self.tokens = spelt


def subclasses(cls: type) -> list[type]:
    """Return all imported subclasses of a class."""
    direct: list[type] = cls.__subclasses__()
    return [*direct, *(below for child in direct for below in subclasses(child))]


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects repeated keys. SafeLoader would silently use a repeated key's last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f"{key} is given twice, the second time after line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_load_plainly = get_loader("yaml")


def load_yaml(text: str) -> Any:
    """Load YAML as jsonargparse does, but reject repeated keys.

    Raises:
        UserError: For a repeated key.
        YAMLError: For text that is not YAML.
    """
    if ":" in text or "{" in text:  # only a mapping can repeat a key
        try:
            yaml.load(text, Loader=_Loader)
        except UserError as error:
            raise UserError(f"{one_line(text)[:100]}: {error}") from error
    return _current(_load_plainly(text))


def _current(content: Any) -> Any:
    """Rename a setting in the config of an earlier version: Synthetic's number of images was its `size`."""
    data = content.get("data") if isinstance(content, dict) else None
    settings = data.get("init_args") if isinstance(data, dict) else None
    name = str(data.get("class_path")).rpartition(".")[2] if isinstance(data, dict) else None
    if isinstance(settings, dict) and "size" in settings and name == "Synthetic":
        settings["images"] = settings.pop("size")
    return content


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
        UserError: When the file is missing or unreadable, is not a YAML mapping, or repeats a key.
    """
    try:
        with open_file(shipped(name)) as file:
            content = yaml.load(file.read().decode(), Loader=_Loader)
        # json.dumps raises for a mapping that contains itself; without this check, jsonargparse would never return
        json.dumps(content, default=str)
    except FileNotFoundError:
        near = nearest(name, map(str, Path(name).parent.glob("*.yaml")))
        raise UserError(f"{flag} {name}: there is no such file{near}") from None
    except OSError as error:
        raise UserError(f"{flag} {name}: {error.strerror}") from error
    except (ValueError, RecursionError, UserError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or a huge number
        raise UserError(f"{flag} {name} cannot be read: {one_line(str(error))[:300]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{flag} {name}: not a config: expected `key: value` lines")
    return _current(content)

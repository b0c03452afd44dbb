"""Command line as tokens, with the content of its config files."""

import itertools
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import _loaders_dumpers
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import app
from app.errors import UserError, nearest, one_line
from app.modules.networks import names_of_torchvision, own_network
from app.system.files import open_file
from app.system.patches import expects

STRATEGY = "--trainer.strategy"
LONGEST = 1_000_000  # characters of a YAML text
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


def _is_path(data: str) -> bool:
    """Return whether the value of `--data` is a path of images in place of a class."""
    if data in [cls.__name__ for cls in subclasses(LightningDataModule)] or data.endswith(
        (".yaml", ".yml")
    ):
        return False
    return os.path.isdir(data) or data.endswith(".csv") or (os.sep in data and "{" not in data)


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
            has_settings = any(
                name.startswith(f"{token.name}.") for name in names
            ) and not token.name.endswith("+")
            return (1, token.name.count(".")) if has_settings else (2, 0)

        chosen = [index for index, token in enumerate(tokens) if token.name == STRATEGY]
        if chosen:  # drop the settings of a strategy that a later --trainer.strategy replaces
            between = range(chosen[0], chosen[-1])
            tokens = [
                t
                for i, t in enumerate(tokens)
                if i not in between or not t.flag.startswith(f"{STRATEGY}.")
            ]
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
            value = token.value or ""
            if token.flag == "--data" and _is_path(value):
                problem = "a path" if os.path.exists(value) else "a path that is missing"
                raise UserError(
                    f"--data {value}: {problem}: give --data ImageFolder --data.root {value}, or for a CSV "
                    "file --data ImageTable --data.csv"
                )
            with suppress(yaml.YAMLError):
                try:
                    load_yaml(token.value or "")
                except (
                    UserError,
                    ValueError,
                ) as error:  # ValueError: an integer of thousands of digits
                    raise UserError(
                        f"{token.flag} {one_line(str(token.value))[:100]}: {error}"
                    ) from error
        for file, config in self.configs.items():
            for section, content in config.items():
                names_class = section in ("model", "data") and isinstance(content, str)
                if section in SECTIONS and not names_class and not isinstance(content, dict):
                    shown = "null" if content is None else str(content)[:50]
                    raise UserError(
                        f"{section}: {shown} in --config {file}: give its settings, or leave it out"
                    )

    def spell_out_strategy(self) -> None:
        """Replace a strategy's registered name by its class, if the command line sets options of the strategy.

        jsonargparse accepts options such as `--trainer.strategy.bucket_cap_mb` only for a class.

        Raises:
            UserError: When an option is set without a strategy, or with an unknown strategy.
        """
        name = self.chosen("trainer.strategy") or "auto"
        classes = {cls.__name__ for cls in subclasses(Strategy)}
        no_settings = (f"{STRATEGY}.help", f"{STRATEGY}.class_path")
        settings = [
            t
            for t in self.tokens
            if t.flag.startswith(f"{STRATEGY}.") and t.flag not in no_settings
        ]
        spelt: list[Token] = []
        for token in self.tokens:
            if token.name == STRATEGY and token.value is not None:
                is_class = token.value not in StrategyRegistry and (
                    "." in token.value or token.value in classes
                )
                token = Token.of(f"{STRATEGY}.class_path", token.value) if is_class else token
            if settings and token is settings[0]:
                if name in StrategyRegistry:
                    cls = StrategyRegistry[name]["strategy"]
                    known = StrategyRegistry[name]["init_params"]
                    spelt.append(Token.of(STRATEGY, f"{cls.__module__}.{cls.__qualname__}"))
                    spelt += [
                        Token.of(f"{STRATEGY}.{key}", str(value)) for key, value in known.items()
                    ]
                elif name == "auto":
                    raise UserError(
                        f"{token.flag}: give --trainer.strategy ddp, or another one, before it"
                    )
                elif "." not in name and name not in classes:
                    raise UserError(
                        f"{token.flag}: there is no {STRATEGY} {name}{nearest(name, StrategyRegistry)}"
                    )
            spelt.append(token)
        self.tokens = spelt


def subclasses(cls: type) -> list[type]:
    """Return all imported subclasses of a class."""
    direct: list[type] = cls.__subclasses__()
    return [*direct, *(below for child in direct for below in subclasses(child))]


@expects("jsonargparse:_loaders_dumpers.get_yaml_default_loader")
class Loader(yaml.SafeLoader):
    """YAML loader that rejects repeated keys and texts that would fill memory.

    Numbers and dates are read as jsonargparse's loader reads them.
    """

    yaml_implicit_resolvers = _loaders_dumpers.get_yaml_default_loader().yaml_implicit_resolvers

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise UserError(f"it is longer than {LONGEST:,} characters")
        super().__init__(text)

    def get_single_node(self) -> yaml.Node | None:
        """Return the root node, after a check of its length."""
        node = super().get_single_node()
        if node is not None and self._length(node, {}) > LONGEST:
            raise UserError(f"its aliases (*) expand it to more than {LONGEST:,} characters")
        return node

    def get_single_data(self) -> Any:
        """Return the value; a set such as `{1}` is text, because jsonargparse would fail."""
        value = super().get_single_data()
        is_set = isinstance(value, dict) and not any(
            isinstance(key, str) or value[key] is not None for key in value
        )
        return self.buffer.rstrip("\0") if is_set and value else _current(value)

    def _length(self, node: yaml.Node, known: dict[int, int]) -> int:
        """Return the number of characters of a node if each alias is replaced by a copy."""
        if isinstance(node, yaml.ScalarNode):
            if "\0" in node.value:
                raise UserError(f"line {node.start_mark.line + 1} contains a NUL character")
            return len(node.value) + 1
        if id(node) not in known:
            known[id(node)] = LONGEST + 1  # counts if the node contains itself
            parts = (
                node.value if isinstance(node, yaml.SequenceNode) else itertools.chain(*node.value)
            )
            known[id(node)] = 1 + sum(self._length(part, known) for part in parts)
        return known[id(node)]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, after a check of its keys."""
        keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(
                    f"{key} is given twice, the second time after line {node.start_mark.line + 1}"
                )
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Load YAML.

    Raises:
        UserError: For a repeated key, a NUL character, or a text that is too long.
        YAMLError: For text that is not YAML.
    """
    return yaml.load(text, Loader=Loader)


def _current(content: Any) -> Any:
    """Update the config of an earlier version: rename Synthetic's `size`, and drop removed settings that were off."""
    sections = content if isinstance(content, dict) else {}
    for section, removed in {"model": ("cuda_graph", False), "data": ("micro_batch", None)}.items():
        chosen = sections.get(section)
        if not isinstance(chosen, dict) or not isinstance(chosen.get("init_args"), dict):
            continue
        settings = chosen["init_args"]
        if removed in settings.items():
            del settings[removed[0]]
        if "size" in settings and str(chosen.get("class_path")).rpartition(".")[2] == "Synthetic":
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
    except (
        ValueError,
        RecursionError,
        UserError,
        yaml.YAMLError,
    ) as error:  # ValueError: not UTF-8
        raise UserError(f"{flag} {name} cannot be read: {one_line(str(error))[:300]}") from error
    if not isinstance(content, dict):
        raise UserError(f"{flag} {name}: not a config: expected `key: value` lines")
    return content


def read_text(path: str | Path) -> str:
    """Read a text file that may become a config. A longer one is cut, and `load_yaml` rejects it.

    Raises:
        OSError: When the file cannot be opened, or is not a regular file.
        ValueError: When it is not UTF-8.
    """
    with open_file(path) as file:
        return file.read(4 * LONGEST + 4).decode()

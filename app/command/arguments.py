"""Command line as tokens, with the content of its config files."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import Namespace, get_loader
from lightning import LightningDataModule
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import app
from app.errors import UserError, nearest, one_line
from app.modules.networks import names_of_torchvision, own_network
from app.system.files import open_file
from app.system.torch_files import check_exists

STRATEGY = "--trainer.strategy"
# jsonargparse's own loader, which `app.command.parser` replaces by `load_yaml`
PLAIN_LOADER = get_loader("yaml")
MOST_VALUES = 100_000  # values of a config


class Token(NamedTuple):
    """Flag with its value, or a word that belongs to no flag.

    Attributes:
        flag: Flag with its dashes, or the word.
        value: Value of the flag, or None.
    """

    flag: str
    value: str | None = None

    @property
    def name(self) -> str:
        """The flag without `.class_path` and `.init_args`."""
        return self.flag.removesuffix(".class_path").replace(".init_args", "")

    @property
    def word(self) -> str:
        """The token as one word of a command line."""
        return self.flag if self.value is None else f"{self.flag}={self.value}"


def tokenise(words: Sequence[str]) -> list[Token]:
    """Group words into flags and values; a negative number is a value.

    `--model NAME` becomes `--model ImageClassifier --model.network NAME` for a network's name, and
    `--data PATH` becomes `--data ImageFolder --data.root PATH`, or for a CSV file `--data
    ImageTable --data.csv PATH`.
    """
    tokens: list[Token] = []
    for word in words:
        last = tokens[-1] if tokens else Token("")
        if word.startswith("-") and not re.match(r"-[\d.]", word):
            flag, equals, value = word.partition("=")
            tokens.append(Token(flag, value if equals else None))
        elif last.flag.startswith("-") and last.value is None:
            tokens[-1] = Token(last.flag, word)
        else:
            tokens.append(Token(word))
        flag, name = tokens[-1]
        if flag in ("--model", "--model.class_path") and name and _is_network(name):
            tokens[-1:] = [Token("--model", "ImageClassifier"), Token("--model.network", name)]
        elif flag in ("--data", "--data.class_path") and name and _is_path(name):
            tokens[-1:] = [Token("--data", "ImageFolder"), Token("--data.root", name)]
            if name.endswith(".csv"):
                tokens[-2:] = [Token("--data", "ImageTable"), Token("--data.csv", name)]
    return tokens


def _is_path(name: str) -> bool:
    """Return whether a value of `--data` is a path: no class, config or import path."""
    classes = [cls.__name__ for cls in subclasses(LightningDataModule)]
    if name in classes or name.endswith((".yaml", ".yml")):
        return False
    return name.endswith(".csv") or os.path.isdir(name) or ("/" in name and "{" not in name)


def _is_network(name: str) -> bool:
    return name.startswith("timm/") or name in names_of_torchvision() or bool(own_network(name))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each flag of a configuration with its value, such as `trainer.devices` and 2.

    For a list, yield its items before the list.

    Raises:
        UserError: When a value contains a null character, which no path may contain.
    """
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            inner_path = path if key == "init_args" else f"{path}.{key}".lstrip(".")
            yield from leaves(inner, inner_path)
        return
    if isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner, path)
    if "\0" in str(value):
        raise UserError(f"--{path}: contains a null character: leave it out")
    yield path, value


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
        names = [token.name for token in tokens]
        if STRATEGY in names:  # a later one replaces an earlier one, with its settings
            first = names.index(STRATEGY)
            last = len(names) - names[::-1].index(STRATEGY) - 1
            tokens[first:last] = [
                token for token in tokens[first:last] if not token.flag.startswith(STRATEGY)
            ]

        self.tokens: list[Token] = []
        self.add(tokens)

    def add(self, tokens: Sequence[Token]) -> None:
        """Add flags: configs first, then classes that have settings, the outer ones first."""
        unsorted = [*self.tokens, *tokens]
        names = [token.name for token in unsorted]

        def place(token: Token) -> tuple[int, int]:
            if token.flag == "--config":
                return 0, 0
            has_settings = any(name.startswith(f"{token.name}.") for name in names)
            if has_settings and not token.name.endswith("+"):
                return 1, token.name.count(".")
            return 2, 0

        self.tokens = sorted(unsorted, key=place)

    def _read(self, token: Token) -> Token:
        """Read the config file of a `--config` token; return other tokens unchanged."""
        if token.flag not in ("--config", "-c") or token.value is None:
            return token
        file = shipped(token.value)
        self.configs[file] = read_yaml(file)
        return Token("--config", file)

    @property
    def words(self) -> list[str]:
        """The flags as words of a command line."""
        return [token.word for token in self.tokens]

    def chosen(self, setting: str) -> str | None:
        """Return the last value of a setting, such as `model`, in flags and configs."""
        chosen = None
        for token in self.tokens:
            value: Any = None
            if token.flag == "--config":
                settings = dict(leaves(self.configs.get(str(token.value))))
                value = settings.get(setting, settings.get(f"{setting}.class_path"))
            elif token.name == f"--{setting}":
                value = token.value
            if value is not None:
                chosen = str(value)
        return chosen

    def replaced_callbacks(self) -> str | None:
        """Return a line if a config's callbacks replace those of an earlier config, or None."""
        files = []
        for file, config in self.configs.items():
            trainer = config.get("trainer")
            if isinstance(trainer, dict) and trainer.get("callbacks"):
                files.append(file)
        if len(files) < 2:
            return None
        return (
            f"--config {files[-1]} replaces the callbacks of --config {files[-2]}: write "
            "`callbacks+:` in it to add to them"
        )

    def check(self) -> None:
        """Reject values that jsonargparse misreads silently.

        Raises:
            UserError: For a flag without a value, or a config section that is not a mapping.
        """
        for flag, value in self.tokens:
            if value is None and re.fullmatch(r"--[\w.]+\.(?!help)\w+\+?", flag):
                raise UserError(f"{flag} needs a value")
        for file, config in self.configs.items():
            for section, content in config.items():
                has_settings = section not in ("seed_everything", "ckpt_path")
                if has_settings and not isinstance(content, dict | str):
                    raise UserError(
                        f"{section}: {str(content)[:50]} in --config {file}: give its settings, or "
                        "leave it out"
                    )

    def spell_out_strategy(self) -> None:
        """Replace a strategy's registered name by its class, if an option of it is set.

        jsonargparse accepts options such as `--trainer.strategy.bucket_cap_mb` only for a class.

        Raises:
            UserError: When an option is set without a strategy, or with an unknown strategy.
        """
        classes = [cls.__name__ for cls in subclasses(Strategy)]
        name = self.chosen("trainer.strategy") or "auto"
        is_help = self.chosen("trainer.strategy.help") is not None
        is_class = is_help or "." in name or name in classes
        spelt = []
        for token in self.tokens:
            if token.name == STRATEGY and is_class:
                token = Token(f"{STRATEGY}.class_path", token.value)
            elif token.flag.startswith(f"{STRATEGY}.") and not is_class:
                if name not in StrategyRegistry:
                    near = nearest(name, StrategyRegistry)
                    raise UserError(
                        f"{token.flag}: give {STRATEGY} ddp, or another one, before it{near}"
                    )
                registered = StrategyRegistry[name]
                cls = registered["strategy"]
                spelt.append(Token(STRATEGY, f"{cls.__module__}.{cls.__qualname__}"))
                for option, implied in registered["init_params"].items():
                    spelt.append(Token(f"{STRATEGY}.{option}", str(implied)))
                is_class = True
            spelt.append(token)
        self.tokens = spelt


def subclasses(cls: type) -> list[type]:
    """Return all imported subclasses of a class."""
    found: list[type] = cls.__subclasses__()
    for child in list(found):
        found += subclasses(child)
    return found


def load_yaml(text: str) -> Any:
    """Load YAML as jsonargparse does.

    Raises:
        UserError: For a repeated key, or aliases that would fill memory.
        YAMLError: For text that is not YAML.
    """
    if _count_values(yaml.compose(text, yaml.BaseLoader), {}) > MOST_VALUES:
        raise UserError(f"its aliases (*) stand for more than {MOST_VALUES:,} values")
    return PLAIN_LOADER(text)


def _count_values(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Count the values of a YAML document in which each alias is written out.

    Raises:
        UserError: For a repeated key, because YAML keeps only the last of them.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [value for _, value in node.value]
            keys = [key.value for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    line = node.start_mark.line + 1
                    raise UserError(f"{key} is given twice, the second time after line {line}")
        known[id(node)] = sum(_count_values(child, known) for child in children)
    return known[id(node)]


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
    file = Path(shipped(name))
    check_exists(file, flag)
    try:
        content = load_yaml(read_text(file))
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

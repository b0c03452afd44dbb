"""Flags of fit, validate, test and predict, and the configuration of a command line."""

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

from jsonargparse import ArgumentParser, Namespace, capture_parser
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import app.data
import app.modules
from app.command.arguments import Arguments, Token, tokenise
from app.command.checkpoints import RunCheckpoint, find_checkpoint
from app.command.flag_rules import MADE
from app.command.help import PAGES, HelpPage
from app.command.parser import Parser, find_class, import_trusted_only, parameters
from app.command.rules import check_flags
from app.command.run_options import LimitedTrainer, Run
from app.errors import ExitStatus, UserError, one_line
from app.launch.rendezvous import Cluster
from app.modules.networks import checkpoint_of, image_settings
from app.monitor.loggers import RateMonitor, SaveConfig
from app.system.patches import expects
from app.training import register_strategies

FIT_FLAGS = (
    "--model",
    "--data",
    "--seed_everything",
    "--config",
)  # undotted flags of fit that other commands accept
DEFAULTS = {"model": "app.modules.CIFARCNN", "data": "app.data.CIFAR10"}

# exceptions that jsonargparse raises for odd values. `Exception` would be too wide, because
# `capture_parser` gets its parser from an exception that must propagate
PARSING = (
    *(
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        NameError,
        OSError,
    ),
    *(RuntimeError, SyntaxError, TypeError, ValueError),
)

# arguments of `Trainer.fit`, `Trainer.validate`, … that get no flag
_ARGUMENTS = {
    "model",
    "datamodule",
    "weights_only",
    "train_dataloaders",
    "val_dataloaders",
    "dataloaders",
}
_ARGUMENTS |= {"verbose", "return_predictions"}
SKIPPED = dict.fromkeys(("fit", "validate", "test", "predict"), _ARGUMENTS)


@expects("lightning.pytorch.cli:LightningCLI._parse_ckpt_path")
class Flags(LightningCLI):
    """Flags of fit, validate, test and predict, declared and parsed by LightningCLI.

    If the user chooses a class, `--model` or `--data` has no default class, because settings of the
    default class would remain: `--model FashionMLP` would train with CIFARCNN's loss and optimizer.

    Args:
        argv: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Raises:
        UserError: When the arguments cannot be read.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        import_trusted_only()
        self.arguments = read_arguments(argv)
        self.argv = [*self.arguments.command, *self.arguments.words]
        self.classes = classes_of(self.arguments)
        chosen = {section: self.arguments.chosen(section) for section in DEFAULTS}
        self.defaults = {
            key: {"class_path": path} for key, path in DEFAULTS.items() if chosen[key] is None
        }
        super().__init__(
            LightningModule,
            LightningDataModule,
            trainer_class=LimitedTrainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=42,
            trainer_defaults={
                "max_epochs": 50,
                "enable_autolog_hparams": False,
            },  # SaveConfig logs all hyperparameters
            auto_configure_optimizers=False,
            args=self.argv,
        )

    def _parse_ckpt_path(self) -> None:
        """Do nothing, because Lightning's method would replace the requested model's settings by the checkpoint's."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the flags of run and cluster, and the default callbacks."""
        parser.set_defaults(self.defaults)
        parser.chosen = self.classes  # type: ignore[attr-defined]
        if takes_classes_of_data(self.classes):
            parser.link_arguments(
                "data", "model.init_args.num_classes", self.count_classes, apply_on="instantiate"
            )
        parser.add_class_arguments(Run, "run")
        parser.add_class_arguments(Cluster, "cluster")
        parser.add_lightning_class_args(RunCheckpoint, "best_checkpoint")
        parser.add_lightning_class_args(RunCheckpoint, "last_checkpoint")
        parser.add_lightning_class_args(RateMonitor, "lr_monitor")
        for name in PAGES:
            parser.add_argument(f"--{name}", action=HelpPage)
        parser.set_defaults(
            {
                "best_checkpoint.monitor": "val_acc",
                "best_checkpoint.mode": "max",
                "best_checkpoint.filename": "best",
                "best_checkpoint.enable_version_counter": False,
                "last_checkpoint.filename": "last",
                "last_checkpoint.save_on_train_epoch_end": True,
                "last_checkpoint.enable_version_counter": False,
            }
        )

    def count_classes(self, data: app.data.ImageData) -> int:
        """Return the number of classes for the model."""
        return data.num_classes

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the arguments that get no flag, by command.

        List only the requested command, because Lightning builds a parser for each command listed
        here.
        """
        return (
            {self.argv[0]: SKIPPED[self.argv[0]]}
            if self.argv and self.argv[0] in SKIPPED
            else SKIPPED
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse `self.arguments` instead of `sys.argv`."""
        self.config = _parse(parser, self.arguments)


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Read arguments and configs; by default, validate, test and predict use the config of the checkpoint's run.

    Args:
        argv: The arguments of `python -m app`.

    Raises:
        UserError: When a config cannot be read, or the run of `--run.name` lacks the checkpoint
            `--ckpt_path`.
    """
    register_strategies()
    arguments = Arguments(argv)
    checkpoint = arguments.value("--ckpt_path")
    name = arguments.value("--run.name")
    if checkpoint is None or argv[0] not in ("validate", "test", "predict") or arguments.configs:
        return arguments
    if checkpoint in ("best", "last") and name is not None:
        checkpoint = find_checkpoint(
            checkpoint, [], arguments.value("--run.root") or Run.root, name
        )
    config = os.path.normpath(checkpoint_of(Path(checkpoint)) / "../../config.yaml")
    return Arguments([*argv, "--config", config]) if Path(config).is_file() else arguments


def classes_of(arguments: Arguments) -> dict[str, str]:
    """Return the chosen or default class of model and data, by section."""
    return {section: arguments.chosen(section) or default for section, default in DEFAULTS.items()}


def takes_classes_of_data(classes: dict[str, str]) -> bool:
    """Return whether the model takes `num_classes` from the data: an `ImageClassifier` with `ImageData` does."""
    ours = {"model": app.modules.ImageClassifier, "data": app.data.ImageData}
    return all(
        issubclass(find_class(section, classes[section]) or object, ours[section])
        for section in ours
    )


def with_switches(tokens: Sequence[Token], classes: Mapping[str, str]) -> list[Token]:
    """Set boolean flags without a value to true: `--data.flip` becomes `--data.flip=true`."""
    sections = MADE | {section: find_class(section, path) for section, path in classes.items()}

    def is_switch(flag: str) -> bool:
        section, _, name = flag.removeprefix("--").partition(".")
        known = parameters(sections.get(section))
        hint = known[name].annotation if name in known else None
        return bool in (hint, *get_args(hint)) and str not in get_args(hint)

    return [
        Token.of(t.flag, "true") if t.value is None and is_switch(t.flag) else t for t in tokens
    ]


def _follow_weights(arguments: Arguments, classes: Mapping[str, str]) -> None:
    """Set the data's unset normalisation, size and interpolation to those of the pretrained weights."""
    source = arguments.chosen("model.weights")
    if source in (None, "null"):
        return
    known = parameters(find_class("data", classes["data"]))
    for name, value in image_settings(source, arguments.chosen("model.network")).items():
        if name in known and arguments.chosen(f"data.{name}") is None:
            arguments.tokens.append(Token.of(f"--data.{name}", str(value)))


def _parse(parser: ArgumentParser, arguments: Arguments) -> Namespace:
    classes = classes_of(arguments)
    arguments.tokens = with_switches(arguments.tokens, classes)
    if any(
        token.flag == "--model.num_classes" for token in arguments.tokens
    ) and takes_classes_of_data(classes):
        raise UserError("--model.num_classes comes from the data: leave it out")
    known = parameters(find_class("data", classes["data"]))
    size = arguments.chosen("data.size")
    if size is not None and "images" in known and "size" not in known:
        raise UserError(
            f"--data.size {size}: the images have one size: for their number, give --data.images {size}"
        )
    try:
        arguments.check()
        arguments.spell_out_strategy()
        _follow_weights(arguments, classes)
        return parser.parse_args([*arguments.command, *arguments.words])
    except SystemExit as end:
        if ExitStatus.of(end).status != "failed":  # --help and SIGTERM end here, too
            raise
        raise UserError(
            f"a module that the arguments name ends the process when it is imported ({end.code})"
        ) from end
    except PARSING as error:  # raised by jsonargparse for odd values, or by the user's module
        raise UserError(
            f"{type(error).__name__}: {one_line(str(error))[:300]} (--verbose shows where)"
        ) from error


@cache
def _parser_for(command: str, model: str | None, data: str | None) -> ArgumentParser:
    """Return a command's parser for the chosen classes; cached, because building it takes longer than parsing."""
    chosen = [
        f"--{section}={name}"
        for section, name in (("model", model), ("data", data))
        if name is not None
    ]
    return capture_parser(Flags, [command, *chosen])


def resolve(argv: Sequence[str]) -> Namespace:
    """Return a command line's configuration with all defaults.

    Args:
        argv: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Raises:
        UserError: When the command line cannot be read.
    """
    arguments = read_arguments(argv)
    import_trusted_only()
    parser = _parser_for(*arguments.command, *(arguments.chosen(section) for section in DEFAULTS))
    config = _parse(parser, arguments)
    check_flags(config[config.subcommand])
    return config[config.subcommand]


def build(argv: Sequence[str]) -> tuple[LightningModule, LightningDataModule]:
    """Instantiate a command line's model and data.

    Raises:
        UserError: When the command line cannot be read, or model or data reject their arguments.
    """
    parser = capture_parser(Flags, argv)
    config = _parse(parser, read_arguments(argv))
    built = parser.instantiate_classes(config)[config.subcommand]
    return built.model, built.data


def shared_settings(config: Namespace) -> dict[str, str]:
    """Return the flags that must be equal on all nodes: all except addresses, paths and other settings of one node."""
    prefixes = (
        "config",
        "ckpt_path",
        "cluster.",
        "run.root",
        "trainer.default_root_dir",
        "trainer.devices",
    )
    suffixes = (
        ".root",
        ".csv",
        ".path",
        ".predict_dir",
        ".cache",
        ".dirpath",
        ".num_workers",
        ".placement",
    )
    flags = {
        name.replace(".init_args.", "."): str(value)
        for name, value in vars(config.as_flat()).items()
    }
    return {
        name: re.sub(
            " at 0x[0-9a-f]+", "", value
        )  # remove the memory address from a function's repr
        for name, value in flags.items()
        if not name.startswith(prefixes) and not name.endswith(suffixes)
    }


def split_flags(
    argv: Sequence[str], others: Sequence[str] = ()
) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate a command's own arguments from flags of `fit`.

    Args:
        argv: The arguments after the command, such as `--step 5 --data.batch_size 8` after
            `replay`.
        others: Further flags to treat as flags of `fit`.

    Returns:
        The words of the command's own arguments, and pairs of a flag of `fit` and its value.

    Raises:
        UserError: When a flag has no value.
    """
    remaining: list[str] = []
    flags: list[tuple[str, str]] = []
    tokens = tokenise(argv)
    chosen = {token.name.removeprefix("--"): token.value for token in tokens if token.value}
    for token in with_switches(
        tokens, {section: chosen.get(section, path) for section, path in DEFAULTS.items()}
    ):
        flag = token.flag
        if flag.startswith("--") and ("." in flag or flag in FIT_FLAGS or flag in others):
            if token.value is None:
                raise UserError(f"{flag} needs a value")
            flags.append((flag, token.value))
            remaining += token.words[2:] if token.words[0] == flag else token.words[1:]
        else:
            remaining += token.words
    return remaining, flags


def by_name(flags: Sequence[tuple[str, str]]) -> tuple[list[str], dict[str, str]]:
    """Split flags of `fit` into config files and a dictionary of the other flags, without dashes.

    If a flag is given twice, the dictionary keeps its last value.

    Raises:
        UserError: When `--name+=`, which appends to a list, is given twice: the dictionary could
            keep only one value.
    """
    configs = [value for flag, value in flags if flag == "--config"]
    others = [(flag[2:], value) for flag, value in flags if flag != "--config"]
    names = [name for name, _ in others]
    for name in names:
        if name.endswith("+") and names.count(name) > 1:
            raise UserError(f"--{name}= is given twice: put the list into a --config")
    return configs, dict(others)

"""Flags of fit, validate, test and predict, and the configuration of a command line."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args

from jsonargparse import ArgumentParser, Namespace, capture_parser
from jsonargparse._util import CaptureParserException
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden

import app.data
import app.modules
from app.command.arguments import Arguments, Token, leaves
from app.command.checkpoint_file import FLAG, read
from app.command.checkpoints import RunCheckpoint, find_checkpoint
from app.command.defaults import complete
from app.command.flag_rules import flag_problems, parameter_of
from app.command.parser import Parser, find_class, import_trusted_only, parameters
from app.command.resolved import Resolved
from app.command.rules import check
from app.command.run_options import PLACES, LimitedTrainer, Run, requested_checkpoint
from app.data.datasets import EncodedImages
from app.errors import ExitStatus, UserError, one_line
from app.launch.rendezvous import Cluster
from app.modules.weights import checkpoint_of
from app.monitor.loggers import SaveConfig
from app.system.patches import expects
from app.system.trust import trust_flags
from app.training import register_strategies

FIT_FLAGS = (
    "--model",
    "--data",
    "--seed_everything",
    "--config",
)  # undotted flags of fit that other commands accept
DEFAULTS = {"model": "app.modules.CIFARCNN", "data": "app.data.CIFAR10"}


class Flags(LightningCLI):
    """Flags of fit, validate, test and predict, declared and parsed by LightningCLI.

    The constructor parses and checks them. `app.command.run` builds model, data and Trainer.

    If the user chooses a class, `--model` or `--data` has no default class, because settings of the
    default class would remain: `--model FashionMLP` would train with CIFARCNN's loss and optimizer.

    Args:
        argv: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Attributes:
        command: `fit`, `validate`, `test` or `predict`.
        command_line: The command as typed in a shell.
        argv: The arguments for the ranks of this node.
        config: The configuration with all defaults, without the checkpoint.
        resolved: The configuration with everything derived from it.
        checkpoint: Value of `--ckpt_path`, or None.

    Raises:
        UserError: When the arguments cannot be read, or a run with them cannot work.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        import_trusted_only()
        self.command = argv[0]
        self.command_line = shlex.join(["python", "-m", "app", *argv, *trust_flags()])
        self.arguments = read_arguments(argv)
        self.argv = [self.command, *self.arguments.words]
        self.classes = classes_of(self.arguments)
        super().__init__(
            LightningModule,
            LightningDataModule,
            trainer_class=LimitedTrainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            parser_kwargs={"prog": f"python -m app {self.command}"},
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=42,
            # SaveConfig logs all hyperparameters
            trainer_defaults={"max_epochs": 50, "enable_autolog_hparams": False},
            auto_configure_optimizers=False,
            run=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the flags of run, cluster and checkpoint, and the default callbacks."""
        for section, path in self.classes.items():
            if self.arguments.chosen(section) is None:
                parser.set_defaults({section: {"class_path": path}})
        parser.chosen = self.classes  # type: ignore[attr-defined]
        parser.is_short = "--help_all" not in self.argv  # type: ignore[attr-defined]
        if takes_classes_of_data(self.classes):
            parser.link_arguments(
                "data", "model.init_args.num_classes", self.count_classes, apply_on="instantiate"
            )
        parser.add_class_arguments(Run, "run")
        parser.add_class_arguments(Cluster, "cluster")
        parser.add_lightning_class_args(RunCheckpoint, "best_checkpoint")
        parser.add_lightning_class_args(RunCheckpoint, "last_checkpoint")
        parser.add_lightning_class_args(LearningRateMonitor, "lr_monitor")
        parser.add_argument("--help_all", action="help")
        parser.add_argument(FLAG, type=str | None)
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
        """Return the number of classes. For evaluation, adopt the checkpoint's classes first."""
        if self.command != "fit" and self.checkpoint not in (None, "auto"):
            with suppress(UserError):  # rank zero reports it later
                file = requested_checkpoint(self.config, self.checkpoint)
                images = read(Path(file)).get("images") or {}
                data.adopt_classes(images.get("class_names", []))
        return data.num_classes

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and reject combinations that cannot work."""
        self.config = _parse(parser, self.arguments)
        self.checkpoint = self.config.ckpt_path
        self.config.ckpt_path = None  # so that the saved config can start new runs
        self.resolved = check(self.command, self.config)

    def instantiate_classes(self) -> None:
        """Build nothing in the constructor, because an agent starts ranks instead."""


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Read arguments and configs, and add the flags that follow others.

    Args:
        argv: The arguments of `python -m app`.

    Raises:
        UserError: As for `_read_arguments`, or when pretrained weights cannot be read.
    """
    arguments = _read_arguments(argv)
    if not any(word.startswith("--help") for word in arguments.words):
        complete(arguments, classes_of(arguments))
    return arguments


def _read_arguments(argv: Sequence[str]) -> Arguments:
    """Read arguments and configs; evaluation uses the config of the checkpoint's run by default.

    With `--data.predict_dir` alone, `predict` prepares images as the checkpoint's run did, so that
    it needs no training images.

    Args:
        argv: The arguments of `python -m app`.

    Raises:
        UserError: When a config cannot be read, the run of `--run.name` lacks the checkpoint
            `--ckpt_path`, or `--data.predict_dir` needs another flag.
    """
    register_strategies()
    arguments = Arguments(argv)
    checkpoint = arguments.chosen("ckpt_path")
    flags = {token.name for token in arguments.tokens if token.name.startswith("--data")}
    known = {f"--data.{name}" for name in parameters(app.data.NewImages)}
    has_new = argv[0] == "predict" and "--data.predict_dir" in flags
    is_alone = has_new and flags <= known  # without a flag about the training's images
    if has_new and checkpoint is None and not _reads_new_images(arguments):
        raise UserError("--data.predict_dir needs a trained model: give its --ckpt_path")
    if checkpoint in (None, "auto") or argv[0] not in ("validate", "test", "predict"):
        return arguments
    configs = list(arguments.configs)
    if configs and not is_alone:
        return arguments
    name = arguments.chosen("run.name")
    if name is not None or is_alone:
        root = arguments.chosen("run.root") or Run.root
        checkpoint = find_checkpoint(checkpoint, configs, root, name or "")
    file = checkpoint_of(Path(checkpoint))
    config = os.path.normpath(file / "../../config.yaml")
    if not configs and Path(config).is_file():
        arguments = Arguments([*argv, "--config", config])
    reads_new = _reads_new_images(arguments)
    if has_new and not is_alone and not reads_new:
        raise UserError(
            f"{min(flags - known)}: the checkpoint sets how images of --data.predict_dir are "
            "prepared: leave it out"
        )
    is_users = classes_of(arguments)["data"].rpartition(".")[2] not in app.data.__all__
    if not is_alone or (reads_new and (is_users or "images" not in read(file))):
        return arguments
    words = ["--data", "app.data.NewImages", "--data.checkpoint", str(file)]
    if arguments.chosen("model.weights") is not None:  # their file may be gone, too
        words += ["--model.weights", "null"]
    return Arguments([argv[0], *arguments.words, *words])


def _reads_new_images(arguments: Arguments) -> bool:
    """Return whether the chosen data class has a `predict_dir` of its own."""
    return "predict_dir" in parameters(find_class("data", classes_of(arguments)["data"]))


def classes_of(arguments: Arguments) -> dict[str, str]:
    """Return the chosen or default class of model and data, by section.

    A model with a `train_dataloader` of its own needs no data.
    """
    classes = dict(DEFAULTS)
    model = arguments.chosen("model")
    if model is not None:
        classes["model"] = model
        if is_overridden("train_dataloader", find_class("model", model), LightningModule):
            classes["data"] = f"{LightningDataModule.__module__}.LightningDataModule"
    classes["data"] = arguments.chosen("data") or classes["data"]
    data = find_class("data", classes["data"]) or object
    if model is None and issubclass(data, EncodedImages):
        classes["model"] = "app.modules.ImageClassifier"
    return classes


def takes_classes_of_data(classes: dict[str, str]) -> bool:
    """Return whether data sets `num_classes`: for an `ImageClassifier` with `ImageData`."""
    model = find_class("model", classes["model"]) or object
    data = find_class("data", classes["data"]) or object
    return issubclass(model, app.modules.ImageClassifier) and issubclass(data, app.data.ImageData)


def with_switches(tokens: Sequence[Token], classes: Mapping[str, str]) -> list[Token]:
    """Set boolean flags without a value to true: `--data.flip` becomes `--data.flip=true`."""
    sections = {section: find_class(section, path) for section, path in classes.items()}
    completed = []
    for token in tokens:
        hint = getattr(parameter_of(token.flag.removeprefix("--"), sections), "annotation", None)
        kinds = (hint, *get_args(hint))
        if token.value is None and bool in kinds and str not in kinds:
            token = Token(token.flag, "true")
        completed.append(token)
    return completed


@expects("jsonargparse:_util.CaptureParserException")
def _parse(parser: ArgumentParser, arguments: Arguments) -> Namespace:
    classes = classes_of(arguments)
    if arguments.chosen("model.num_classes") is not None and takes_classes_of_data(classes):
        raise UserError("--model.num_classes comes from the data: leave it out")
    try:
        arguments.tokens = with_switches(arguments.tokens, classes)
        arguments.check()
        arguments.spell_out_strategy()
        return parser.parse_args(arguments.words)
    except SystemExit as end:
        if ExitStatus.of(end).status != "failed":  # --help and SIGTERM end here, too
            raise
        raise UserError(
            f"a module that the arguments name ends the process when it is imported ({end.code})"
        ) from end
    except (UserError, CaptureParserException):
        raise
    except Exception as error:  # raised by jsonargparse for odd values, or by the user's module
        raise UserError(
            f"{type(error).__name__}: {one_line(str(error))[:300]} (--verbose shows where)"
        ) from error


@cache
def _parser_for(*argv: str) -> ArgumentParser:
    """Return the parser for a command and classes; cached, because building it takes long."""
    return capture_parser(Flags, [*argv, "--help"])  # a help page needs no weights


def resolve(argv: Sequence[str]) -> Namespace:
    """Return a command line's configuration with all defaults.

    Args:
        argv: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Raises:
        UserError: When the command line cannot be read.
    """
    import_trusted_only()
    arguments = read_arguments(argv)
    classes = []
    for section in DEFAULTS:
        name = arguments.chosen(section)
        if name is not None:
            classes.append(f"--{section}={name}")
    config = _parse(_parser_for(argv[0], *classes), arguments)
    for problem in flag_problems(Resolved(config)):
        raise UserError(problem)
    return config


def build(argv: Sequence[str]) -> tuple[LightningModule, LightningDataModule]:
    """Instantiate a command line's model and data.

    Raises:
        UserError: When the command line cannot be read, or model or data reject their arguments.
    """
    parser = _parser_for(*argv)
    built = parser.instantiate_classes(_parse(parser, read_arguments(argv)))
    return built.model, built.data


def shared_settings(config: Namespace) -> dict[str, str]:
    """Return the flags that must be equal on all nodes: all except addresses and paths."""
    prefixes = (
        "config",
        "ckpt_path",
        "cluster.",
        "run.root",
        "trainer.default_root_dir",
        "trainer.devices",
    )
    settings = {}
    for name, value in leaves(config):
        if not name.startswith(prefixes) and not name.endswith(PLACES):
            # without the memory address in a function's repr
            settings[name] = re.sub(" at 0x[0-9a-f]+", "", str(value))
    return settings


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
        UserError: When a flag has no value, or a config cannot be read.
    """
    remaining = []
    flags = []
    arguments = Arguments(["fit", *argv])
    for flag, value in with_switches(arguments.tokens, classes_of(arguments)):
        if not flag.startswith("--") or ("." not in flag and flag not in (*FIT_FLAGS, *others)):
            remaining.append(flag)
            if value is not None:
                remaining.append(value)
        elif value is None:
            raise UserError(f"{flag} needs a value")
        else:
            flags.append((flag, value))
    return remaining, flags


def by_name(flags: Sequence[tuple[str, str]]) -> tuple[list[str], dict[str, str]]:
    """Split flags of `fit` into config files and a dictionary of the other flags, without dashes.

    If a flag is given twice, the dictionary keeps its last value.

    Raises:
        UserError: When `--name+=`, which appends to a list, is given twice: the dictionary could
            keep only one value.
    """
    configs = []
    others = {}
    for flag, value in flags:
        name = flag.removeprefix("--")
        if flag == "--config":
            configs.append(value)
        elif name.endswith("+") and name in others:
            raise UserError(f"--{name}= is given twice: put the list into a --config")
        else:
            others[name] = value
    return configs, others

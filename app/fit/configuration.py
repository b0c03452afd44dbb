"""What a command line of fit, validate, test or predict means: its resolved configuration, without running it."""

import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from jsonargparse import ArgumentParser, Namespace, capture_parser
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser

import app.data
import app.modules
from app.errors import ExitStatus, UserError, one_line
from app.fit.checkpoints import RunCheckpoint, find_checkpoint
from app.fit.flag_rules import MADE
from app.fit.help import MORE, SectionHelp
from app.fit.parser import (
    Parser,
    chosen_classes,
    configs_and_classes_first,
    find_class,
    import_trusted_only,
    parameters,
    refuse_unusable,
    shipped,
    spell_out_strategy,
)
from app.fit.rules import check_flags
from app.fit.run_options import Run
from app.launch.rendezvous import Cluster
from app.monitor.loggers import RateMonitor, SaveConfig
from app.system.lightning_patches import CommandLine

FIT_FLAGS = ("--model", "--data", "--seed_everything", "--config")  # its other flags have a dot
DEFAULTS = {"model": "app.modules.CIFARCNN", "data": "app.data.CIFAR10"}

# not what jsonargparse raises to hand out a parser
PARSING = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError),
    *(RuntimeError, SyntaxError, TypeError, ValueError),
)

_COMMON = {"model", "datamodule", "weights_only"}
SKIPPED = {  # arguments of the Trainer's methods that are no flags
    "fit": {*_COMMON, "train_dataloaders", "val_dataloaders"},
    "validate": {*_COMMON, "dataloaders", "verbose"},
    "test": {*_COMMON, "dataloaders", "verbose"},
    "predict": {*_COMMON, "dataloaders", "return_predictions"},
}


class Flags(CommandLine):
    """The flags of fit, validate, test and predict, as LightningCLI declares and reads them.

    A section whose class the user has not chosen gets a default one. A default that is set regardless would leave its
    `init_args` behind: `--model FashionMLP` would train with CIFARCNN's loss and optimizer, since jsonargparse keeps
    what the new class accepts.

    Args:
        argv: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Raises:
        UserError: When they cannot be read.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        import_trusted_only()
        self.argv = [*argv[:1], *configs_and_classes_first(add_config_of_run(argv)[1:])]
        self.classes = DEFAULTS | (chosen := chosen_classes(self.argv))
        self.defaults = {key: {"class_path": path} for key, path in DEFAULTS.items() if key not in chosen}
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=42,
            trainer_defaults={"max_epochs": 50, "enable_autolog_hparams": False},  # SaveConfig logs them all
            auto_configure_optimizers=False,
            args=self.argv,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's name and tracking, and the callbacks that are on by default."""
        parser.set_defaults(self.defaults)
        parser.chosen = self.classes  # type: ignore[attr-defined]
        if takes_classes_of_data(self.classes):
            parser.link_arguments("data.num_classes", "model.init_args.num_classes", apply_on="instantiate")
        parser.add_class_arguments(Run, "run")
        parser.add_class_arguments(Cluster, "cluster")
        parser.add_lightning_class_args(RunCheckpoint, "best_checkpoint")
        parser.add_lightning_class_args(RunCheckpoint, "last_checkpoint")
        parser.add_lightning_class_args(RateMonitor, "lr_monitor")
        for section in MORE:
            parser.add_argument(f"--{section}.help", action=SectionHelp)
        parser.set_defaults(
            {
                "best_checkpoint.monitor": "val_acc",
                "best_checkpoint.mode": "max",
                "best_checkpoint.filename": "best",
                "best_checkpoint.enable_version_counter": False,
                "last_checkpoint.filename": "last",
                "last_checkpoint.save_on_train_epoch_end": True,
                "last_checkpoint.enable_version_counter": False,
                "lr_monitor.logging_interval": "epoch",
            }
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Lightning's, less what is set here; of a command that was typed, no other's, because each costs time."""
        return {self.argv[0]: SKIPPED[self.argv[0]]} if self.argv and self.argv[0] in SKIPPED else SKIPPED

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the arguments, and nothing of `sys.argv`."""
        self.config = _parse(parser, args)


def add_config_of_run(argv: Sequence[str]) -> list[str]:
    """Add the config of the run that wrote the checkpoint, for validate, test and predict without `--config`.

    Args:
        argv: The arguments of `python -m app`.

    Raises:
        UserError: When the run of `--run.name` has no such checkpoint.
    """
    given = dict(pairwise(part for argument in argv for part in argument.split("=", 1)))
    checkpoint, name = given.get("--ckpt_path"), given.get("--run.name")
    if checkpoint is None or argv[0] not in ("validate", "test", "predict") or {"--config", "-c"} & given.keys():
        return [*argv]
    if checkpoint in ("best", "last") and name is not None:
        checkpoint = find_checkpoint(checkpoint, [], given.get("--run.root", Run.root), name)
    config = os.path.normpath(Path(checkpoint, "../../config.yaml"))
    return [*argv, "--config", config] if Path(config).is_file() else [*argv]


def takes_classes_of_data(classes: dict[str, str]) -> bool:
    """Whether model and data are of this application, so that the model's number of classes is the data's."""
    ours = {"model": app.modules.ImageClassifier, "data": app.data.ImageData}
    return all(issubclass(find_class(section, classes[section]) or object, ours[section]) for section in ours)


def with_switches(argv: Sequence[str]) -> list[str]:
    """Add the value to switches that stand alone: `--data.flip` becomes `--data.flip=true`."""
    classes = MADE | {name: find_class(name, path) for name, path in (DEFAULTS | chosen_classes(argv)).items()}

    def is_switch(flag: str) -> bool:
        section, _, name = flag.removeprefix("--").partition(".")
        hint = parameters(classes[section])[name].annotation if name in parameters(classes.get(section)) else None
        return bool in (hint, *get_args(hint)) and str not in get_args(hint)

    pairs = pairwise([*argv, "--"])
    return [f"{flag}=true" if following.startswith("--") and is_switch(flag) else flag for flag, following in pairs]


def _parse(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    arguments = with_switches(["--run.profile" if argument == "--profile" else argument for argument in argv])
    flags = {"--config", "-c"}
    pairs = pairwise(["", *arguments])
    arguments = [shipped(each) if flags & {flag, each.partition("=")[0]} else each for flag, each in pairs]
    linked = any(argument.startswith("--model.num_classes") for argument in arguments)
    if linked and takes_classes_of_data(DEFAULTS | chosen_classes(arguments)):
        raise UserError("--model.num_classes comes from the data: leave it out")
    try:
        refuse_unusable(arguments)
        return parser.parse_args(spell_out_strategy(arguments))
    except SystemExit as end:
        if ExitStatus.of(end).status != "failed":  # --help and such, or SIGTERM
            raise
        raise UserError(f"a module that the arguments name ends the process when it is imported ({end.code})") from end
    except PARSING as error:  # of jsonargparse, for values that it does not expect, or of a module of the user's
        raise UserError(f"{type(error).__name__}: {one_line(str(error))[:300]} (--verbose shows where)") from error


def resolve(argv: Sequence[str]) -> Namespace:
    """The resolved configuration of a command line of fit, validate, test or predict, with all defaults.

    Args:
        argv: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Raises:
        UserError: When it cannot be read.
    """
    argv = add_config_of_run(argv)
    config = _parse(capture_parser(Flags, argv), argv)
    check_flags(config[config.subcommand])
    return config[config.subcommand]


def build(argv: Sequence[str]) -> tuple[LightningModule, LightningDataModule]:
    """Model and data of a command line.

    Raises:
        UserError: When it cannot be read, or model or data refuse their arguments.
    """
    parser = capture_parser(Flags, argv)
    config = _parse(parser, argv)
    built = parser.instantiate_classes(config)[config.subcommand]
    return built.model, built.data


def shared_settings(config: Namespace) -> dict[str, str]:
    """Flags and their values, as they must be on every node: without addresses, paths and how a node is used."""
    own = ("config", "ckpt_path", "cluster.", "run.root", "trainer.default_root_dir", "trainer.devices")
    nodes = (".root", ".predict_dir", ".cache", ".dirpath", ".num_workers", ".placement")
    flags = {name.replace(".init_args.", "."): str(value) for name, value in vars(config.as_flat()).items()}
    return {
        name: re.sub(" at 0x[0-9a-f]+", "", value)  # where a function lies
        for name, value in flags.items()
        if not name.startswith(own) and not name.endswith(nodes)
    }


def split_flags(argv: Sequence[str], others: Sequence[str] = ()) -> tuple[list[str], list[tuple[str, str]]]:
    """Part the flags of `fit`, and some others, with their values, from the rest of a command line.

    Raises:
        UserError: When one of them has no value.
    """
    remaining, flags, rest = [], [], with_switches(argv)
    while rest:
        argument = rest.pop(0)
        flag, given, value = argument.partition("=")
        if flag.startswith("--") and ("." in flag or flag in FIT_FLAGS or flag in others):
            if not given and not rest:
                raise UserError(f"{flag} needs a value")
            flags.append((flag, value if given else rest.pop(0)))
        else:
            remaining.append(argument)
    return remaining, flags


def by_name(flags: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Flags of `fit` by their names without dashes; of one that is given twice, the last value.

    Raises:
        UserError: When one that adds to a list is given twice: both are meant.
    """
    names = [flag[2:] for flag, _ in flags]
    for name in names:
        if name.endswith("+") and names.count(name) > 1:
            raise UserError(f"--{name}= is given twice, and taken once here: put what it adds into a --config")
    return dict(zip(names, (value for _, value in flags), strict=True))

"""What a command line of fit, validate, test or predict means: its resolved configuration, without running it."""

import pkgutil
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace, capture_parser
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry, MPSAccelerator
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry

import app.data
import app.modules
from app.errors import UserError
from app.fit.checkpoints import RunCheckpoint
from app.fit.parser import Parser, chosen_classes, find_class, refuse_unusable, spell_out_strategy
from app.fit.run_options import Run
from app.launch.cluster_environment import Launched, launched, other_launcher
from app.launch.rendezvous import Cluster
from app.monitor.loggers import SaveConfig
from app.system.lightning_patches import CommandLine, default_accelerator

FIT_FLAGS = ("--model", "--data", "--seed_everything", "--config")  # its other flags have a dot
DEFAULTS = {"model": "app.modules.CIFARCNN", "data": "app.data.CIFAR10"}


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
        self.argv = list(argv)
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
        parser.add_lightning_class_args(LearningRateMonitor, "lr_monitor")
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

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, less what is set here."""
        common = {"model", "datamodule", "weights_only"}
        return {
            "fit": {*common, "train_dataloaders", "val_dataloaders"},
            "validate": {*common, "dataloaders", "verbose"},
            "test": {*common, "dataloaders", "verbose"},
            "predict": {*common, "dataloaders", "return_predictions"},
        }

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the arguments, and nothing of `sys.argv`."""
        self.config = _parse(parser, args)


def takes_classes_of_data(classes: dict[str, str]) -> bool:
    """Whether model and data are of this application, so that the model's number of classes is the data's."""
    ours = {"model": app.modules.ImageClassifier, "data": app.data.ImageData}
    return all(issubclass(find_class(section, classes[section]) or object, ours[section]) for section in ours)


def _parse(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    arguments = list(argv)
    refuse_unusable(arguments)
    linked = any(argument.startswith("--model.num_classes") for argument in arguments)
    if linked and takes_classes_of_data(DEFAULTS | chosen_classes(arguments)):
        raise UserError("--model.num_classes comes from the data: leave it out")
    return parser.parse_args(spell_out_strategy(arguments))


def resolve_command(argv: Sequence[str]) -> tuple[str, Namespace]:
    """The command of a command line, and its resolved configuration, with all defaults.

    Args:
        argv: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Raises:
        UserError: When it cannot be read.
    """
    from app.fit.rules import check_flags  # which asks this module for devices and processes

    config = _parse(capture_parser(Flags, argv), argv)
    check_flags(config[config.subcommand])
    return config.subcommand, config[config.subcommand]


def resolve(argv: Sequence[str]) -> Namespace:
    """The resolved configuration of a command line of fit, validate, test or predict, with all defaults.

    Args:
        argv: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Raises:
        UserError: When it cannot be read.
    """
    return resolve_command(argv)[1]


def build(argv: Sequence[str]) -> tuple[LightningModule, LightningDataModule]:
    """Model and data of a command line.

    Raises:
        UserError: When it cannot be read, or model or data refuse their arguments.
    """
    parser = capture_parser(Flags, argv)
    config = _parse(parser, argv)
    built = parser.instantiate_classes(config)[config.subcommand]
    return built.model, built.data


# -- the trainer's section -----------------------------------------------------------------------------------


def class_of(chosen: Any) -> type | None:
    """The class that a section of the configuration names, with `class_path`; None where it names none."""
    path = getattr(chosen, "class_path", None)
    return pkgutil.resolve_name(path) if path else None


def accelerator_name(trainer: Namespace) -> str:
    """The accelerator: `cpu`, `cuda`, `mps`, or what else was asked for, with `auto` and `gpu` resolved."""
    flag = trainer.accelerator
    if flag == "auto":
        return default_accelerator()
    if flag == "gpu":
        return "mps" if MPSAccelerator.is_available() else "cuda"
    cls: Any = class_of(flag)
    return flag if cls is None else cls.name()


def accelerator_class(trainer: Namespace) -> type[Accelerator] | None:
    """Lightning's class of the accelerator; None where there is none of this name."""
    name = accelerator_name(trainer)
    return AcceleratorRegistry[name]["accelerator"] if name in AcceleratorRegistry else class_of(trainer.accelerator)


def devices_per_node(trainer: Namespace) -> int:
    """Devices on each node as Lightning reads the flags; no accelerator is touched, and none need be there.

    Args:
        trainer: Section `trainer` of a resolved configuration.

    Raises:
        UserError: When `devices` is no count and no list.
    """
    flag = trainer.devices
    text = str(flag).strip()
    if text == "auto" and trainer.strategy == "auto" and trainer.num_nodes == 1:
        return 1  # several only when they are asked for
    if text in ("auto", "-1"):
        accelerator = accelerator_class(trainer)
        return max(accelerator.auto_device_count(), 1) if accelerator else 1
    if isinstance(flag, list) or "," in text:
        return len(flag if isinstance(flag, list) else [part for part in text.split(",") if part.strip()])
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--trainer.devices {flag}: give a count from 1 on, a list such as 0,1, or auto")
    return int(text)


def strategy_class(trainer: Namespace) -> type[Strategy]:
    """The strategy's class; for `auto` the one that Lightning takes.

    Raises:
        KeyError: When no strategy has this name.
    """
    flag = trainer.strategy
    if cls := class_of(flag):
        return cls
    if flag == "auto":
        several = trainer.num_nodes > 1 or devices_per_node(trainer) > 1
        flag = "ddp" if several else SingleDeviceStrategy.strategy_name
    return StrategyRegistry[flag.lower()]["strategy"]


def strategy_options(trainer: Namespace) -> dict[str, Any]:
    """The strategy's options, as far as they are known before it is made."""
    flag = trainer.strategy
    if isinstance(flag, str):
        return StrategyRegistry[flag]["init_params"] if flag in StrategyRegistry else {}
    return vars(flag.get("init_args") or Namespace())


def processes_per_node(trainer: Namespace) -> int:
    """Processes on each node: one for each device, unless the strategy has several devices in a process."""
    cls: Any = strategy_class(trainer)
    if not issubclass(cls, ParallelStrategy):
        return 1
    return getattr(cls, "processes_per_node", None) or devices_per_node(trainer)


def agent_processes(config: Namespace) -> int:
    """Ranks of this node that this process is to start as their agent; 0 where another one has, or there is one rank.

    Args:
        config: A resolved configuration.
    """
    trainer, cluster = config.trainer, config.cluster
    plugins = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]
    if any(issubclass(class_of(plugin) or object, ClusterEnvironment) for plugin in plugins):  # the user's own
        return 0
    if launched() is not None or (cluster.init_method is None and other_launcher()):
        return 0
    starts_its_own = strategy_options(trainer).get("start_method", "popen") != "popen"
    if starts_its_own or not issubclass(strategy_class(trainer), ParallelStrategy):
        return 0
    processes = processes_per_node(trainer)
    return processes if processes * trainer.num_nodes > 1 else 0


def follow(trainer: Namespace, launcher: Launched | None) -> Namespace:
    """Section `trainer` with the numbers of a launcher where none were given.

    A strategy of several devices in a process keeps its `devices`: a launcher counts processes.
    """
    followed = trainer.clone()
    if launcher is None:
        return followed
    if trainer.devices == "auto" and not hasattr(strategy_class(trainer), "processes_per_node"):
        followed.devices = launcher.per_node or launcher.world_size
    if trainer.num_nodes == 1:
        followed.num_nodes = launcher.nodes
    return followed


def replicas(trainer: Namespace) -> int:
    """Devices that share a global batch, over all nodes."""
    return devices_per_node(trainer) * trainer.num_nodes


def split_flags(argv: Sequence[str], others: Sequence[str] = ()) -> tuple[list[str], list[tuple[str, str]]]:
    """Part the flags of `fit`, and some others, with their values, from the rest of a command line.

    Raises:
        UserError: When one of them has no value.
    """
    remaining, flags, rest = [], [], list(argv)
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

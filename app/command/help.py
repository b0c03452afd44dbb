"""Help pages of fit, validate, test and predict: the flags that most need, and all flags."""

import argparse
import re
from collections.abc import Iterable, Mapping

DESCRIPTIONS = {  # replaces Lightning's descriptions
    "config": "Config file; later files and flags override it",
    "seed_everything": "Seed of all random numbers (default: 42)",
    "model": "The LightningModule: CIFARCNN, FashionMLP, a network of torchvision such as "
    "resnet50, or the import path of your own class (default: CIFARCNN)",
    "data": "The LightningDataModule: CIFAR10, FashionMNIST, HuggingFace, ImageFolder, "
    "ImageTable, Synthetic, or the import path of your own class (default: CIFAR10)",
    "ckpt_path": "Checkpoint to start from: a file or a run's folder; `last` or `best` of the run "
    "whose config.yaml --config names, else of the newest run of --run.name; `auto`: the newest "
    "readable one of --run.name, if any",
    "trainer.strategy": "`auto`, `ddp`, `ddp_spawn`, `ddp_fork`, `dp`, `ddp_fp16`, `ddp_bf16`, "
    "`ddp_ring`, `fsdp` (GPUs), or a class (default: auto)",
    "trainer.devices": "Number or list of devices on each node: `2`, `0,1`, `auto` (default: "
    "auto, which is one for --trainer.strategy auto)",
    "trainer.num_nodes": "Number of nodes (default: 1)",
    "trainer.precision": "`32-true`, `bf16-mixed`, `16-mixed`, `bf16-true`, `16-true` or "
    "`64-true` (default: 32-true)",
    "trainer.accelerator": "`cpu`, `gpu` or `auto` (default: auto)",
    "trainer.callbacks": "Callbacks by name or import path; `--trainer.callbacks+=NAME` adds one",
}
# flags on the page of `--help`
COMMON = (
    "config",
    "model",
    "model.network",
    "model.weights",
    "model.optimizer",
    "model.optimizer.lr",
    "model.schedule",
    "data",
    "data.root",
    "data.batch_size",
    "trainer.max_epochs",
    "trainer.strategy",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.accelerator",
    "trainer.precision",
    "run.name",
    "ckpt_path",
)
MORE = (  # other help pages; jsonargparse prints those of classes
    "--help_all: all flags, also of the chosen --model and --data",
    "--print_config: all settings, as a config file",
    "--model.optimizer.help AdamW",
    "--model.scheduler.help StepLR",
    "--data.augment.help RandAugment",
    "--trainer.strategy.help app.training.DDP",
)


def _entry(action: argparse.Action, is_short: bool) -> argparse.Action:
    """Return an action that argparse prints as a flag, its value, description and default."""
    text = " ".join((action.help or "").split()).replace("``", "`")
    if is_short:
        text = re.split(r"(?<=[a-z`)]{2}\.)\s", text)[0]  # the first sentence
    text = text.rstrip(".")
    default = action.default
    if isinstance(default, Mapping):
        default = str(default.get("class_path")).rpartition(".")[2]
    if default not in (None, argparse.SUPPRESS, ()):
        text += f" (default: {default})"
    text = DESCRIPTIONS.get(action.dest, text).replace("%", "%%")
    metavar = action.dest.rpartition(".")[2].upper()
    if str(action.metavar).startswith("{"):  # choices
        metavar = str(action.metavar)
    return argparse.Action([f"--{action.dest}"], action.dest, help=text, metavar=metavar)


def page(prog: str, actions: Iterable[argparse.Action], is_short: bool) -> str:
    """Return a help page of a command.

    Args:
        prog: The command, such as `python -m app fit`.
        actions: Flags of the command, and of the chosen model and data.
        is_short: Whether to print only the flags of `COMMON`.
    """
    flags = {}
    sections: dict[str, list[argparse.Action]] = {"general": []}
    for action in actions:
        section, _, name = action.dest.rpartition(".")
        if name not in ("help", "help_all", "print_config"):
            sections.setdefault(section.partition(".")[0] or "general", []).append(action)
            flags[action.dest] = action
    optimizer = flags.get("model.optimizer")
    if optimizer is not None and isinstance(optimizer.default, Mapping):
        name = "model.optimizer.lr"
        rate = optimizer.default["init_args"].get("lr")
        flags[name] = argparse.Action([], name, default=rate, help="Learning rate")
    if is_short:
        sections = {"most used": [flags[flag] for flag in COMMON if flag in flags]}
    formatter = argparse.HelpFormatter(prog, max_help_position=28)
    formatter.add_usage(f"{prog} [--config FILE] [--FLAG VALUE ...]", [], [])
    for section, members in sections.items():
        formatter.start_section(section)
        for action in members:
            formatter.add_argument(_entry(action, is_short))
        formatter.end_section()
    return formatter.format_help() + "\n  ".join(["\nmore:", *MORE]) + "\n"

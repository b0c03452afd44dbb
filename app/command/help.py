"""Help pages of fit, validate, test and predict: the important settings first, the others on demand."""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentParser

from app.system.patches import expects

DESCRIPTIONS = {  # replaces Lightning's descriptions
    "config": "Config file; later files and flags override it",
    "print_config": "Print all settings as a config file, and exit",
    "seed_everything": "Seed of all random numbers (default: 42)",
    "model": "The LightningModule: CIFARCNN, FashionMLP, a network of torchvision such as resnet50, or the import path "
    "of your own class (default: CIFARCNN)",
    "data": "The LightningDataModule: CIFAR10, FashionMNIST, HuggingFace, ImageFolder, ImageTable, Synthetic, or "
    "the import path of your own class (default: CIFAR10)",
    "ckpt_path": "Checkpoint to start from: a file or a run's folder; `last` or `best` of the run whose config.yaml "
    "--config names, else of the newest run of --run.name; `auto`: the newest readable one of --run.name, if any",
    "trainer.strategy": "`auto`, `ddp`, `ddp_spawn`, `ddp_fork`, `dp`, `ddp_fp16`, `ddp_bf16`, `ddp_powersgd`, "
    "`ddp_ring`, `ddp_dp`, `fsdp` (GPUs), or a class (default: auto)",
    "trainer.devices": "Number or list of devices on each node: `2`, `0,1`, `auto` (default: auto, which is one for "
    "--trainer.strategy auto)",
    "trainer.num_nodes": "Number of nodes (default: 1)",
    "trainer.precision": "`32-true`, `bf16-mixed`, `16-mixed`, `bf16-true`, `16-true` or `64-true` (default: 32-true)",
    "trainer.accelerator": "`cpu`, `gpu` or `auto` (default: auto)",
    "trainer.callbacks": "Callbacks by name or import path; `--trainer.callbacks+=NAME` adds one",
}
# Trainer settings on the command's main page
TRAINER = (
    *(
        "strategy",
        "devices",
        "num_nodes",
        "precision",
        "accelerator",
        "max_epochs",
        "max_steps",
        "max_time",
    ),
    *("accumulate_grad_batches", "gradient_clip_val", "log_every_n_steps", "callbacks"),
)
MORE = {  # title of a section's separate help page
    "trainer": "all settings of the Trainer",
    "best_checkpoint": "choice of the best checkpoint",
    "last_checkpoint": "times to save the last checkpoint",
    "lr_monitor": "logging of the learning rate",
}
CLASSES = {  # settings whose value is a class, each with an example
    "model.optimizer": "AdamW",
    "model.scheduler": "StepLR",
    "data.augment": "RandAugment",
    "trainer.strategy": "app.training.PowerSGD",
}
ENDS = re.compile(r"(?<=[a-z`)]{2}\.)\s")  # end of a sentence


def _entry(action: argparse.Action) -> argparse.Action:
    """Return an action that argparse's help formatter prints as a flag with its value, description and default."""
    flag = max(action.option_strings, key=len).removesuffix("+")
    name = action.dest.rpartition(".")[2].upper()
    nargs = 0 if action.nargs == 0 or action.dest == "print_config" else None
    if isinstance(action.metavar, str) and action.metavar.startswith("{"):  # choices
        name = action.metavar
    text = (action.help or "").strip().rstrip(".").replace("``", "`")
    default = action.default
    if isinstance(default, Mapping):
        default = str(default.get("class_path", "")).rpartition(".")[2]
    if default not in (None, argparse.SUPPRESS, "", ()) and nargs is None:
        text += f" (default: {str(default).lower() if isinstance(default, bool) else default})"
    text = DESCRIPTIONS.get(action.dest, text).replace("%", "%%")
    return argparse.Action([flag], action.dest, nargs, help=text, metavar=name)


@expects("argparse:ArgumentParser._actions")
def page(
    parser: ArgumentParser,
    settings: ArgumentParser,
    classes: dict[str, str],
    section: str | None = None,
) -> str:
    """Return the help page of a command, or of one section of its settings.

    Args:
        parser: The command's parser.
        settings: Parser with the settings of the chosen model and data.
        classes: Names of the chosen model and data classes, by section.
        section: A section of `MORE`, or None for the command's page.
    """
    actions = {
        action.dest: action
        for action in parser._actions
        if action.option_strings and not _is_page(action)
    }
    formatter = argparse.HelpFormatter(parser.prog, max_help_position=28)

    def show(title: str, shown: Iterable[argparse.Action]) -> None:
        formatter.start_section(title)
        formatter.add_arguments(map(_entry, shown))
        formatter.end_section()

    def show_section(title: str, prefix: str) -> None:
        show(title, (action for dest, action in actions.items() if dest.startswith(f"{prefix}.")))

    if section is not None:
        show_section(MORE[section], section)
        return formatter.format_help()
    command = parser.prog.split()[-1]
    formatter.add_usage(f"python -m app {command} [--config FILE] [--FLAG VALUE ...]", [], [])
    show_section("run", "run")
    for name in ("model", "data"):
        chosen = (action for action in settings._actions if action.dest.startswith(f"{name}."))
        show(
            f"--{name} {classes[name].rpartition('.')[2]}",
            (action for action in chosen if not _is_page(action)),
        )
    short = [actions[f"trainer.{name}"] for name in TRAINER if f"trainer.{name}" in actions]
    for action in short:  # keep the first sentence
        action.help = ENDS.split(" ".join((action.help or "").split()))[0]
    show("devices, precision and length", short)
    show_section("processes and nodes", "cluster")
    groups = (*MORE, "run", "cluster", "help")
    show(
        "more",
        (action for dest, action in actions.items() if "." not in dest and dest not in groups),
    )
    pages = {f"--{name}.help": title for name, title in MORE.items() if name in actions}
    pages |= {f"--{name}.help {example}": "" for name, example in CLASSES.items()}
    return formatter.format_help() + "".join(
        f"  {flag:<26}{title}".rstrip() + "\n" for flag, title in pages.items()
    )


def _is_page(action: argparse.Action) -> bool:
    return action.option_strings[0].endswith(".help")


class SectionHelp(argparse.Action):
    """Action that prints a section's help page and exits."""

    def __init__(self, option_strings: Sequence[str], **_: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0)

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Print the help page and exit."""
        print(
            page(parser, parser, {}, str(option_string).removeprefix("--").removesuffix(".help")),
            end="",
        )
        parser.exit()

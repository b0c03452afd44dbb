"""What a command line of `fit` means, without running it."""

import sys
from collections.abc import Sequence

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule

from app.errors import UserError
from app.fit.command import CLI
from app.fit.parser import chosen_classes

FIT_FLAGS = ("--model", "--data", "--seed_everything", "--config")  # its other flags have a dot


class _Settings(CLI):
    """Reads a command line as `fit` does, and goes no further."""

    def _set_seed(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


class _Built(_Settings):
    """Goes on to build model and data."""

    def instantiate_classes(self) -> None:
        built = self.parser.instantiate_classes(self.config)[self.subcommand]
        self.model, self.datamodule = built.model, built.data


def _read(cls: type[_Settings], words: Sequence[str]) -> _Settings:
    before, sys.argv = sys.argv, [sys.argv[0], *words]  # which LightningCLI reads
    try:
        return cls(chosen_classes(sys.argv[1:]))
    finally:
        sys.argv = before


def resolve(words: Sequence[str]) -> Namespace:
    """What a command line means, with all defaults.

    Args:
        words: The arguments of `python -m app`, such as `fit --trainer.devices 2`.

    Raises:
        UserError: When it cannot be read.
    """
    cli = _read(_Settings, words)
    return cli.config[cli.subcommand]


def build(words: Sequence[str]) -> tuple[LightningModule, LightningDataModule]:
    """Model and data of a command line.

    Raises:
        UserError: When it cannot be read, or model or data refuse their arguments.
    """
    cli = _read(_Built, words)
    return cli.model, cli.datamodule


def split_words(words: Sequence[str], others: Sequence[str] = ()) -> tuple[list[str], list[tuple[str, str]]]:
    """Part the flags of `fit`, and some others, with their values, from the rest of a command line.

    Raises:
        UserError: When one of them has no value.
    """
    remaining, flags, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        flag, given, value = word.partition("=")
        if flag.startswith("--") and ("." in flag or flag in FIT_FLAGS or flag in others):
            if not given and not rest:
                raise UserError(f"{flag} needs a value")
            flags.append((flag, value if given else rest.pop(0)))
        else:
            remaining.append(word)
    return remaining, flags

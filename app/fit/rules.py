"""Checks of a configuration before anything is built; each message ends with a remedy.

The rules of `flag_rules` hold on every machine. The rules of `machine_rules` concern this machine and this process's
launcher; rules about the launcher are checked again on the built Trainer.
"""

import os
from collections.abc import Iterator
from itertools import chain

from jsonargparse import Namespace
from lightning.pytorch import Trainer

from app.errors import UserError
from app.fit.flag_rules import flag_problems
from app.fit.machine_rules import launcher_problems, machine_problems
from app.fit.resolved import Resolved
from app.launch.cluster_environment import launched


def _raise_first(problems: Iterator[str]) -> None:
    for problem in problems:
        raise UserError(problem)


def check_flags(config: Namespace) -> None:
    """Check the rules that hold on every machine.

    Args:
        config: Resolved configuration.

    Raises:
        UserError: With the reason and the remedy.
    """
    _raise_first(flag_problems(Resolved(config, "")))


def check(command: str, config: Namespace) -> None:
    """Check all rules, before anything is built.

    Args:
        command: The command: `fit`, `validate`, `test` or `predict`.
        config: Its resolved configuration.

    Raises:
        UserError: With the reason and the remedy.
    """
    resolved = Resolved(config, command, launched(), os.environ)
    _raise_first(chain(flag_problems(resolved), machine_problems(resolved)))


def check_trainer(trainer: Trainer) -> None:
    """Compare the built Trainer's sizes, which a user's strategy may set, with the launcher's.

    Raises:
        UserError: With the reason and the remedy.
    """
    processes = getattr(trainer.strategy, "num_processes", 1)
    _raise_first(launcher_problems(launched(), trainer.num_nodes, processes, trainer.world_size))

"""Checks whether a configuration can work, by tables of rules with messages and remedies.

`resolve` checks `FLAGS`, which hold on any machine. `HERE` rules concern this machine and this process's launcher.
`LAUNCHER` rules are checked again on the built Trainer. `check` does all before anything is built.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jsonargparse import Namespace
from lightning.pytorch import Trainer

from app.errors import UserError
from app.fit.flag_rules import FLAGS
from app.fit.machine_rules import HERE, LAUNCHER
from app.fit.resolved import Resolved
from app.fit.rule import Rule
from app.launch.cluster_environment import Launched, launched


class Built(NamedTuple):
    """Sizes of a built Trainer, because a user's strategy may start other processes."""

    launcher: Launched | None
    nodes: int
    processes: int
    world_size: int


def _check(rules: Sequence[Rule], resolved: Any) -> None:
    for rule in rules:
        if found := rule.broken(resolved):
            raise UserError(rule.message.format(s=resolved, **(found if isinstance(found, Mapping) else {})))


def check_flags(config: Namespace) -> None:
    """Check the rules that hold on any machine.

    Args:
        config: Resolved configuration.

    Raises:
        UserError: With the reason and the remedy.
    """
    _check(FLAGS, Resolved(config, ""))


def check(command: str, config: Namespace) -> None:
    """Check whether a run can work here, without building anything.

    Args:
        command: The command: `fit`, `validate`, `test` or `predict`.
        config: Its resolved configuration.

    Raises:
        UserError: With the reason and the remedy.
    """
    _check((*FLAGS, *HERE), Resolved(config, command, launched(), os.environ))


def check_trainer(trainer: Trainer) -> None:
    """Check the sizes of the built Trainer.

    Raises:
        UserError: With the reason and the remedy.
    """
    processes = getattr(trainer.strategy, "num_processes", 1)
    _check(LAUNCHER, Built(launched(), trainer.num_nodes, processes, trainer.world_size))

"""Whether what was asked for can work: rules in tables, each with what it says and what to do instead.

`FLAGS` hold on any machine, and `resolve` checks them; `HERE` are about this machine and what started this process;
of `LAUNCHER`, which are among them, the built Trainer may say otherwise. `check` does all, before anything is built.
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
    """What a Trainer is, in the end: a strategy of the user's own may have processes of its own."""

    launcher: Launched | None
    nodes: int
    processes: int
    world_size: int


def _check(rules: Sequence[Rule], asked: Any) -> None:
    for rule in rules:
        if found := rule.broken(asked):
            fields = found if isinstance(found, Mapping) else {}
            colon = "" if rule.message.endswith("?") else ":"
            text = f"{rule.message}{colon} {rule.remedy}" if rule.remedy else rule.message
            raise UserError(text.format(s=asked, **fields))


def check_flags(config: Namespace) -> None:
    """Check what holds on any machine, however the run is started.

    Args:
        config: Resolved configuration.

    Raises:
        UserError: With what is wrong and the remedy.
    """
    _check(FLAGS, Resolved(config, ""))


def check(command: str, config: Namespace) -> None:
    """Check whether a run can work here; nothing is built for it.

    Args:
        command: The command: `fit`, `validate`, `test` or `predict`.
        config: Its resolved configuration.

    Raises:
        UserError: With what is wrong and the remedy.
    """
    _check((*FLAGS, *HERE), Resolved(config, command, launched(), os.environ))


def check_trainer(trainer: Trainer) -> None:
    """Check what only the built Trainer shows.

    Raises:
        UserError: With what is wrong and the remedy.
    """
    processes = getattr(trainer.strategy, "num_processes", 1)
    _check(LAUNCHER, Built(launched(), trainer.num_nodes, processes, trainer.world_size))

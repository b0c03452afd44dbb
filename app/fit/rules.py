"""Whether what was asked for can work: one table of rules, each with what it says and what to do instead."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jsonargparse import Namespace
from lightning.pytorch.strategies import StrategyRegistry

from app.errors import UserError, nearest


class Rule(NamedTuple):
    """One way in which a run cannot work.

    Attributes:
        broken: Whether it is so: true, or the fields of the texts beside `s`, the run that is asked for.
        message: What is wrong, with the flag and its value.
        remedy: What to do instead.
    """

    broken: Callable[[Any], Any]
    message: str
    remedy: str


def _check(rules: Sequence[Rule], run: Any) -> None:
    for rule in rules:
        if found := rule.broken(run):
            fields = found if isinstance(found, dict) else {}
            text = f"{rule.message}: {rule.remedy}" if rule.remedy else rule.message
            raise UserError(text.format(s=run, **fields))


def _unknown_strategy(config: Namespace) -> Any:
    name, known = config.trainer.strategy, ["auto", *StrategyRegistry.available_strategies()]
    return isinstance(name, str) and name not in known and {"near": nearest(name, known)}


FLAGS = (
    Rule(_unknown_strategy, "--trainer.strategy {s.trainer.strategy}: unknown{near}", ""),
    Rule(
        lambda config: config.trainer.accumulate_grad_batches < 1,
        "--trainer.accumulate_grad_batches {s.trainer.accumulate_grad_batches}",
        "give 1 or more",
    ),
)


def check_flags(config: Namespace) -> None:
    """Check what holds on any machine, however the run is started.

    Args:
        config: Resolved configuration.

    Raises:
        UserError: With what is wrong and the remedy.
    """
    _check(FLAGS, config)

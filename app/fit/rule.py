"""A rule: one way in which a run cannot work."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Found = Mapping[str, Any] | bool | None


class Rule(NamedTuple):
    """One way in which a run cannot work.

    Attributes:
        broken: Return whether a `Resolved` breaks the rule: true, or fields for the message.
        message: The flag, its value, the reason, and the remedy; `s` is the `Resolved`.
    """

    broken: Callable[[Any], Found]
    message: str

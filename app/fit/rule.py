"""A rule: one way in which a run cannot work."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Found = Mapping[str, Any] | bool | None


class Rule(NamedTuple):
    """One way in which a run cannot work.

    Attributes:
        broken: Return whether a `Resolved` breaks the rule: true, or fields for the texts.
        message: The flag, its value, and what is wrong; `s` is the `Resolved`.
        remedy: What to do instead.
    """

    broken: Callable[[Any], Found]
    message: str
    remedy: str

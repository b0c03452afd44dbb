"""Properties of a strategy that decide which flags work with it."""

from collections.abc import Callable


class Traits:
    """Properties of a strategy, with the defaults for Lightning's own strategies.

    Attributes:
        single_process: Whether all devices belong to one process.
        fixed_hook: Communication hook of the strategy, or None.
    """

    single_process = False
    fixed_hook: Callable | None = None

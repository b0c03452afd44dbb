"""Console of the commands."""

import sys
from typing import Any

from rich.console import Console


def make_console(**options: Any) -> Console:
    """Return a console with the terminal's width; a file or a pipe has none, so it gets 110 columns."""
    return Console(width=None if sys.stdout.isatty() else 110, **options)

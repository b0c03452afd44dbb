"""Console of the commands."""

import sys
from typing import Any

from rich.console import Console


def make_console(**options: Any) -> Console:
    """Return a console as wide as the terminal, or 110 columns wide for a file or a pipe."""
    if not sys.stdout.isatty():
        options["width"] = 110
    return Console(**options)

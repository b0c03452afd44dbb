"""Terminal output of long commands."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def make_console(**options: Any) -> Console:
    """Return a console with the terminal's width; a file or a pipe has none, so it gets 110 columns."""
    return Console(width=None if sys.stdout.isatty() else 110, **options)


@contextmanager
def working(console: Console) -> Iterator[Callable[[str], None]]:
    """Show the current activity and its duration in the last line of a terminal.

    Yields:
        A function that sets the name of the current activity.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(activity: str) -> None:
            if progress.tasks[0].description != activity:
                progress.reset(task, description=activity)

        yield show

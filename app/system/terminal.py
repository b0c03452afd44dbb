"""What a command shows in a terminal while it works."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def working(console: Console) -> Iterator[Callable[[str], None]]:
    """Show in the last line what is being done, and for how long; nothing where there is no terminal.

    Yields:
        A function that is told what begins now.
    """
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda what: progress.reset(task, description=what)

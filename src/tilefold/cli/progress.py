"""The progress bar of commands that measure case after case."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

__all__ = ["measuring"]


@contextmanager
def measuring(
    console: Console, total: int, log: bool = False, verb: str = "measuring"
) -> Iterator[Callable[[str, str], None]]:
    """A bar of `total` steps while it is open -> step(case, what it does now); log: each step also leaves a line."""
    columns = (
        TextColumn(verb),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def step(case: str, what: str) -> None:
            progress.update(task, description=f"{case}: {what}")
            if log:
                console.print(Text(f"{time.strftime('%H:%M:%S')} {case}: {what}", style="dim"), soft_wrap=True)
            progress.advance(task)

        yield step

"""The progress bar of commands that measure case after case."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


@contextmanager
def measuring(
    console: Console, total: int, log: bool = False, verb: str = "measuring", by_case: bool = False
) -> Iterator[Callable[[str, str], None]]:
    """A bar of `total` steps while it is open -> step(case, what it does now); log: each step also leaves a line;
    by_case: all that is done of one case is one step."""
    columns = (TextColumn(verb), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as progress:
        task, begun = progress.add_task("", total=total), set[object]()

        def step(case: str, what: str) -> None:
            begun.add(case if by_case else len(begun))
            progress.update(task, description=f"{case}: {what}", completed=len(begun) - by_case)
            if log:
                console.print(Text(f"{time.strftime('%H:%M:%S')} {case}: {what}", style="dim"), soft_wrap=True)

        yield step

"""Why the stages of the video pipeline take their time, as `tilefold profile video` shows it: tables, lines, bars."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from tilefold.cli.runtime import print_tables

if TYPE_CHECKING:
    from tilefold.bench.page import Picture, Rows, Words
    from tilefold.profiling.video import Explanation, LaunchRow

__all__ = ["draw", "parts", "show"]


def show(why: "Explanation", console: Console) -> None:
    """On the console."""
    for head, rows in why.tables():
        print_tables(console, head, rows, left=2 if head[0] == "stage" else 1)
    for line in why.lines():
        console.print(Text(line, style="dim"), soft_wrap=True)


def parts(why: "Explanation") -> "list[Words | Rows | Picture]":
    """In a document."""
    from tilefold.bench import page

    tables = [page.Rows(head, rows) for head, rows in why.tables()]
    return [*tables, *(page.Words(line) for line in why.lines())]


def draw(axes: Any, launches: "Sequence[LaunchRow]") -> None:
    """Bars of what each launch takes and of what explains it."""
    rows = launches[::-1]
    places = range(len(rows))
    axes.barh(places, [(row.evidence.seconds or 0.0) * 1e6 for row in rows], height=0.7, label="taken")
    explained = [0.0 if row.predicted is None else row.predicted.seconds * 1e6 for row in rows]
    axes.barh(places, explained, height=0.3, label="explained")
    axes.set_yticks(places, [row.name for row in rows])
    axes.set_xlabel("us")
    axes.legend()

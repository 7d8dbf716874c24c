"""A report as a list of parts: headings, sentences, tables, figures.  Here they become an HTML file that needs nothing else, or
Markdown; `tilefold.cli.runtime.show` prints them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.errors import Unsupported

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType
    from rich.table import Table

INDENT = 2  # of rows under their title
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 84em; margin: 2em auto; padding: 0 1em; color: #1b1f24; }
table { border-collapse: collapse; margin: 1em 0; font-size: 14px; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .25em .6em; border-bottom: 1px solid #d0d7de; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
p { white-space: pre-line; }
p.note { color: #57606a; }
"""


@dataclass(frozen=True, slots=True)
class Words:
    """A paragraph; style: on a terminal."""

    text: str
    style: str = "dim"


@dataclass(frozen=True, slots=True)
class Heading:
    """Of what follows."""

    text: str


@dataclass(frozen=True, slots=True)
class Rows:
    """A table; the first `left` columns are left-aligned; without a heading where head is empty strings."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


@dataclass(frozen=True, slots=True)
class Picture:
    """A matplotlib figure, and what it shows."""

    figure: Any
    caption: str


Part = Heading | Words | Rows | Picture


def columns_that_fit(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int, keys: int
) -> list[tuple[int, ...]]:
    """How a table is cut into tables of at most `width` characters with two between columns: the columns of each, the first
    `keys` and as many more as fit, one at least."""
    widths = [max(map(len, column)) + 2 for column in zip(head, *rows, strict=True)]
    first = tuple(range(keys))
    parts: list[list[int]] = [[]]
    for at in range(keys, len(head)):
        if parts[-1] and sum(widths[i] for i in (*first, *parts[-1], at)) - 2 > width:
            parts.append([])
        parts[-1].append(at)
    return [(*first, *part) for part in parts]


def grouped_tables(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int, keys: int, left: int = 2
) -> "list[RenderableType]":
    """A table whose first column is long: each value of it is a line, and under it are its rows, all of one shape.  Cut as
    `columns_that_fit` does; keys and left count the first column, too."""
    from rich.text import Text

    cut = [tuple(row[1:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(head[1:], *cut, strict=True)]
    parts: list[RenderableType] = []
    for at in columns_that_fit(head[1:], cut, width - INDENT, keys - 1):
        parts.append(_aligned([head[1:]], at, widths, left - 1, "bold"))
        for name in dict.fromkeys(row[0] for row in rows):
            parts += [Text(name), _aligned([row[1:] for row in rows if row[0] == name], at, widths, left - 1)]
        parts.append(Text(""))
    return parts


def _aligned(
    rows: Sequence[Sequence[str]], columns: Sequence[int], widths: Sequence[int], left: int, style: str = ""
) -> "Table":
    """Rows without a head, of given widths, so that tables under each other line up."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for n, i in enumerate(columns):
        table.add_column(
            justify="left" if i < left else "right", no_wrap=True, min_width=widths[i] + (0 if n else INDENT)
        )
    for row in rows:
        cells = [Text(row[i], style="bold red" if row[i] == "WRONG" else style) for i in columns]
        table.add_row(Text(" " * INDENT).append_text(cells[0]), *cells[1:])
    return table


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure (inches) that needs no display. Unsupported if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"the picture needs the Python package {error.name!r}; install it with: pip install 'tilefold[plots]'"
        ) from None
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG."""
    made = BytesIO()
    figure.savefig(made, format="png")
    path.write_bytes(made.getvalue())


def to_html(title: str, parts: Sequence[Part]) -> str:
    """The whole document."""
    body = "\n".join(_part(part) for part in parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def to_markdown(parts: Sequence[Part]) -> str:
    """Headings, sentences and tables for a document."""
    blocks = []
    for part in parts:
        if isinstance(part, Rows):
            blocks.append("\n".join(table_lines(part.head, part.rows, part.left)))
        elif not isinstance(part, Picture):
            blocks.append(f"**{part.text}**" if isinstance(part, Heading) else part.text)
    return "\n\n".join(blocks) + "\n"


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A table's lines in markdown; left: columns that are aligned to the left."""
    dashes = ["---"] * left + ["---:"] * (len(head) - left)
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in (head, dashes, *rows)]


def _part(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h2>{escape(part.text)}</h2>"
    if isinstance(part, Words):
        return f"<p>{escape(part.text)}</p>"
    if isinstance(part, Picture):
        return f'{_svg(part.figure)}<p class="note">{escape(part.caption)}</p>'
    head = "".join(f"<th>{escape(cell)}</th>" for cell in part.head)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in part.rows)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'


def _svg(figure: "Figure") -> str:
    """The figure's <svg> element, without the XML prologue and the metadata, which have no place inside HTML."""
    made = StringIO()
    figure.savefig(made, format="svg")
    text = made.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], count=1, flags=re.DOTALL)

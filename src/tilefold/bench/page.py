"""A report as one HTML file that needs nothing else: text, tables, and figures as SVG inside."""

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

__all__ = ["Picture", "Rows", "Words", "new_figure", "save_png", "to_html"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 84em; margin: 2em auto; padding: 0 1em; color: #1b1f24; }
table { border-collapse: collapse; margin: 1em 0; font-size: 14px; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .25em .6em; border-bottom: 1px solid #d0d7de; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
p.note { color: #57606a; }
"""


@dataclass(frozen=True, slots=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Rows:
    """A table; the first column is left-aligned."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A matplotlib figure, and what it shows."""

    figure: Any
    caption: str


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


def to_html(title: str, parts: Sequence[Words | Rows | Picture]) -> str:
    """The whole document."""
    body = "\n".join(_part(part) for part in parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _part(part: Words | Rows | Picture) -> str:
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

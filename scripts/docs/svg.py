"""Parts of the pictures, as SVG: a whole one with its title and description, boxes, text, arrows, and their colours."""

from __future__ import annotations

import re
from html import escape

__all__ = ["EDGE", "FULL", "OTHERS", "OURS", "OURS_TOO", "arrow", "box", "svg", "text"]

STYLE = (
    "svg{color:#1f2328;font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}.paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3}.paper{fill:#0d1117}}"
)
OURS, OURS_TOO, OTHERS = "#5c6bc0", "#9fa8da", "#8b949e"  # on white and on black alike
FULL, EDGE = "#5c6bc0", "#e8a33d"


def svg(width: int, height: int, told: str, parts: list[str], detail: str = "") -> str:
    """A whole picture.  told: what a reader who does not see it is told; detail: more of it, such as all numbers."""
    title, _, rest = (told, "", detail) if detail else told.partition(": ")
    name = re.sub(r"\W+", "-", title.lower())[:40].strip("-")
    names = f"{name}-title {name}-desc" if rest else f"{name}-title"
    described = f'\n<desc id="{name}-desc">{escape(rest)}</desc>' if rest else ""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="{names}">\n'
        f'<title id="{name}-title">{escape(title)}</title>{described}\n<style>{STYLE}</style>\n'
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>\n{body}\n</svg>\n'
    )


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'


def text(
    x: float, y: float, said: str, size: int = 13, anchor: str = "start", weight: str = "", mono: bool = False
) -> str:
    more = f' font-weight="{weight}"' if weight else ""
    more += ' font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"' if mono else ""
    at = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {at} fill="currentColor"{more}>{escape(said)}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A line with a head, along one axis."""
    head = (
        f"{to_x - 7:g},{to_y - 4:g} {to_x - 7:g},{to_y + 4:g}"
        if y == to_y
        else f"{to_x - 4:g},{to_y - 7:g} {to_x + 4:g},{to_y - 7:g}"
    )
    line = f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="currentColor" stroke-width="1.4" fill="none"/>'
    return f'{line}<polygon points="{to_x:g},{to_y:g} {head}" fill="currentColor"/>'

"""Formulas of the docs, set as pictures inside the page: GitHub's own notation for them, drawn by matplotlib's mathtext.

A span is written $`...`$ and a display is a block with the language math, so that GitHub sets them, too.  The site needs no
script and no font for them.  A formula has the colour and the size of the text around it, and says its source to a screen reader.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

__all__ = ["set_formulas"]

BLOCK = re.compile(r"^```math\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"\$`([^`\n]+)`\$")
FENCE = re.compile(r"^(```.*?^```[ \t]*$)", re.MULTILINE | re.DOTALL)
SIZE = 100.0  # points an em: mathtext rounds to whole ones


def set_formulas(markdown: str) -> str:
    """The text of a page with its formulas as SVG.  ValueError names a formula that mathtext cannot set."""
    markdown = BLOCK.sub(lambda found: f'<div class="formula">{drawn(" ".join(found[1].split()))}</div>', markdown)
    parts = FENCE.split(markdown)
    return "".join(part if n % 2 else SPAN.sub(lambda found: drawn(found[1]), part) for n, part in enumerate(parts))


@cache
def drawn(formula: str) -> str:
    """One formula as an <svg> element on the line of the text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser
    from matplotlib.textpath import TextPath

    font = FontProperties(family="STIXGeneral", math_fontfamily="stix", size=SIZE)
    try:
        _, _, depth, *_ = MathTextParser("path").parse(f"${formula}$", dpi=72, prop=font)
        path: Any = TextPath((0, 0), f"${formula}$", size=SIZE, prop=font)
    except ValueError as error:
        raise ValueError(f"the formula {formula!r} cannot be set: {error}") from None
    box = path.get_extents()
    left, right = min(0.0, float(box.x0)), float(box.x1)
    low, high = min(-float(depth), float(box.y0)), float(box.y1)
    letters = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}
    lines = "".join(
        letters[int(code)] + ("" if code == 79 else " ".join(f"{value:.0f}" for value in _flipped(points)))
        for points, code in path.iter_segments(curves=True, simplify=False)
    )
    said = "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in formula)  # Markdown must not read it
    return (
        f'<svg class="math" role="img" aria-label="{said}" viewBox="{left:.0f} {-high:.0f} {right - left:.0f} {high - low:.0f}" '
        f'style="height:{(high - low) / SIZE:.3f}em;width:{(right - left) / SIZE:.3f}em;vertical-align:{low / SIZE:.3f}em">'
        f'<path fill="currentColor" d="{lines}"/></svg>'
    )


def _flipped(points: Any) -> list[float]:
    """Points of a path with y down, as SVG has it."""
    return [-float(value) if n % 2 else float(value) for n, value in enumerate(points)]

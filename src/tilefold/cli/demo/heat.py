"""A heat map as SVG text: cells with tooltips, labels on two sides, a colour bar; nothing but the standard library."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["HeatMap", "colour"]

# From paper white to dark blue, evenly darker (the ends and the middle of ColorBrewer's Blues).
STOPS = ((247, 251, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
CELL, GAP, FONT = 26, 6, 12
CHARACTER = 0.58 * FONT  # mean width of a character


def colour(share: float) -> str:
    """The scale's colour at 0 (light) to 1 (dark), as #rrggbb; beyond the ends, the ends'."""
    place = min(1.0, max(0.0, share)) * (len(STOPS) - 1)
    low = min(int(place), len(STOPS) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(STOPS[low], STOPS[low + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """values [rows][columns] between low and high; cells that are None stay grey.

    rows_title and columns_title name the axes; unit is the colour bar's title; breaks: draw a line before these rows and columns.
    """

    title: str
    values: Sequence[Sequence[float | None]]
    rows: Sequence[str]
    columns: Sequence[str]
    rows_title: str
    columns_title: str
    unit: str
    low: float
    high: float
    breaks: Sequence[int] = ()

    def svg(self) -> str:
        """The picture, sized by its labels."""
        left = GAP + FONT * 2 + max(len(label) for label in self.rows) * CHARACTER
        top = GAP + FONT * 2 + max(len(label) for label in self.columns) * CHARACTER
        wide, high = len(self.columns) * CELL, len(self.rows) * CELL
        width, height = left + wide + 90, top + high + GAP
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'role="img" aria-label="{escape(self.title)}" font-family="system-ui, sans-serif" font-size="{FONT}">',
            f'<text x="{left + wide / 2:.1f}" y="{FONT + 2}" text-anchor="middle" fill="#555">'
            f"{escape(self.columns_title)}</text>",
            f'<text transform="translate({FONT + 2},{top + high / 2:.1f}) rotate(-90)" text-anchor="middle" fill="#555">'
            f"{escape(self.rows_title)}</text>",
            *self._labels(left, top),
            *self._cells(left, top),
            *(self._line(left, top, at) for at in self.breaks),
            *self._bar(left + wide + 22, top, min(high, 8 * CELL)),
            "</svg>",
        ]
        return "\n".join(parts)

    def _labels(self, left: float, top: float) -> list[str]:
        found = []
        for i, label in enumerate(self.rows):
            y = top + (i + 0.5) * CELL + FONT * 0.35
            found.append(f'<text x="{left - GAP:.1f}" y="{y:.1f}" text-anchor="end">{escape(label)}</text>')
        for j, label in enumerate(self.columns):
            x = left + (j + 0.5) * CELL + FONT * 0.35
            found.append(f'<text transform="translate({x:.1f},{top - GAP:.1f}) rotate(-90)">{escape(label)}</text>')
        return found

    def _cells(self, left: float, top: float) -> list[str]:
        found = []
        for i, row in enumerate(self.values):
            for j, value in enumerate(row):
                fill = "#e4e4e4" if value is None else colour((value - self.low) / (self.high - self.low))
                text = "" if value is None else f"{self.rows[i]} → {self.columns[j]}: {value:.3f}"
                found.append(
                    f'<rect x="{left + j * CELL:.1f}" y="{top + i * CELL:.1f}" width="{CELL - 1}" height="{CELL - 1}" '
                    f'fill="{fill}"><title>{escape(text)}</title></rect>'
                )
        return found

    def _line(self, left: float, top: float, at: int) -> str:
        x, y = left + at * CELL - 0.5, top + at * CELL - 0.5
        across, down = left + len(self.columns) * CELL, top + len(self.rows) * CELL
        path = f"M{left:.1f} {y:.1f}H{across:.1f}M{x:.1f} {top:.1f}V{down:.1f}"
        return f'<path d="{path}" stroke="#333" stroke-width="1" fill="none"/>'

    def _bar(self, x: float, y: float, height: float) -> list[str]:
        """The colour scale with its ends and middle written beside it."""
        steps = 40
        found = [f'<text x="{x:.1f}" y="{y - GAP:.1f}" fill="#555">{escape(self.unit)}</text>']
        for step in range(steps):
            fill = colour(1 - (step + 0.5) / steps)
            where = f'x="{x:.1f}" y="{y + height * step / steps:.1f}" width="14" height="{height / steps + 0.5:.1f}"'
            found.append(f'<rect {where} fill="{fill}"/>')
        for share in (0.0, 0.5, 1.0):
            value = self.low + (self.high - self.low) * share
            at = y + height * (1 - share) + FONT * 0.35
            found.append(f'<text x="{x + 19:.1f}" y="{at:.1f}">{value:.2f}</text>')
        return found

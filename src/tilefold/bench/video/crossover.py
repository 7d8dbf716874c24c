"""From where on a sweep of the video pipeline is faster than a dense peer."""

from collections.abc import Sequence
from dataclasses import dataclass

from tilefold.bench.attention.crossing import Crossing, crossing_of
from tilefold.bench.video.stages import TOTAL
from tilefold.bench.video.sweep import FINE, SWEEPS, SweepRow


@dataclass(frozen=True, slots=True)
class Overtake:
    """From where on a line of a sweep the fine stage, or the whole, is faster than a dense peer."""

    sweep: str
    series: str
    what: str
    dense: str
    crossing: Crossing

    def __str__(self) -> str:
        at, unit = self.crossing, SWEEPS[self.sweep]
        name = "the whole" if self.what == TOTAL else f"the {self.what} stage"
        digits = ".1f" if self.sweep == "sparsity" else ".0f"
        least, most = f"{at.least:{digits}}", f"{at.most:{digits}}"
        if at.sparsity is not None:
            where = f"overtakes {self.dense} at {at.sparsity:{digits}} {unit} (between {least} and {most})"
        elif at.always:
            where = f"is faster than {self.dense} at every point, from {most} {unit} on"
        else:
            where = f"does not overtake {self.dense} up to {least} {unit}"
        return f"{self.series}: {name} {where}"


def overtakes(rows: Sequence[SweepRow]) -> list[Overtake]:
    """The crossovers of every line with two points at least, times between points taken as straight lines."""
    lines: dict[tuple[str, str, str, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        for dense in row.dense:
            for what in (FINE, TOTAL):
                mine, other = row.ms(what), row.ms(dense)
                if mine is not None and other is not None:
                    line = (row.point.sweep, row.point.series, what, dense)
                    lines.setdefault(line, []).append((row.value, mine, other))
    found = ((line, crossing_of(points)) for line, points in lines.items())
    return [Overtake(*line, crossing) for line, crossing in found if crossing is not None]

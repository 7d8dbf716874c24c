"""Measurements side by side: cells by case and implementation, ratios, means, and where sparse overtakes dense."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilefold.bench.attention.peers import IMPLEMENTATIONS
from tilefold.bench.run import Cell

__all__ = [
    "OURS",
    "Crossing",
    "Grid",
    "best_peer",
    "crossing_of",
    "crossings",
    "geometric_means",
    "is_ours",
    "ratio",
    "title_of",
]

OURS = "tilefold"
DENSE_PEER = "cudnn"  # what sparse attention has to overtake


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells by case and implementation, in the order in which they were measured."""

    cells: tuple[Cell, ...]

    @property
    def implementations(self) -> list[str]:
        return list(dict.fromkeys(cell.implementation for cell in self.cells))

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(cell.case.name for cell in self.cells))

    def at(self, case: str, implementation: str) -> Cell:
        return next(c for c in self.cells if c.case.name == case and c.implementation == implementation)

    def of(self, case: str) -> list[Cell]:
        """All cells of a case."""
        return [cell for cell in self.cells if cell.case.name == case]


def title_of(implementation: str) -> str:
    known = IMPLEMENTATIONS.get(implementation)
    return known.title if known else implementation


def is_ours(implementation: str) -> bool:
    """Whether a row is tilefold's, by whatever plan."""
    known = IMPLEMENTATIONS.get(implementation)
    return implementation == OURS or (known is not None and known.ours)


def ratio(ours: Cell, peer: Cell) -> float | None:
    """How many times as fast as the peer we are (above 1: we are faster), or None where one of the two has no time."""
    return peer.timing.ms / ours.timing.ms if ours.timing and peer.timing else None


def best_peer(cells: Sequence[Cell]) -> Cell | None:
    """The fastest of one case's cells that are not ours and do the same work: with lists, those that follow them."""

    def same_work(cell: Cell) -> bool:
        known = IMPLEMENTATIONS.get(cell.implementation)
        return cell.case.pattern is None or known is None or known.lists

    timed = [(cell.timing.ms, n) for n, cell in enumerate(cells) if cell.timing and not is_ours(cell.implementation)]
    timed = [(ms, n) for ms, n in timed if same_work(cells[n])]
    return cells[min(timed)[1]] if timed else None


def geometric_means(cells: Sequence[Cell]) -> dict[str, tuple[float, int]]:
    """Peer -> geometric mean of `ratio` over the cases that both ran, and how many those were. Peers without any are left out."""
    grid = Grid(tuple(cells))
    means: dict[str, tuple[float, int]] = {}
    for name in grid.implementations:
        if name == OURS:
            continue
        ratios = [r for case in grid.cases if (r := ratio(grid.at(case, OURS), grid.at(case, name))) is not None]
        if ratios:
            means[name] = mean_of(ratios), len(ratios)
    return means


def mean_of(ratios: Sequence[float]) -> float:
    """The geometric mean of at least one ratio."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


# --- the crossing -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Crossing:
    """At what sparsity, in per cent, sparse attention overtakes dense: at `least` it has not, from `most` on it has, and
    `sparsity` is the straight line's answer between those two. None where all measured points lie on one side: `always` says
    on which."""

    sparsity: float | None
    least: float
    most: float
    always: bool = False

    def __str__(self) -> str:
        if self.sparsity is not None:
            return f"at {self.sparsity:.1f} % sparsity (between {self.least:g} and {self.most:g} %)"
        return f"below {self.most:g} % sparsity" if self.always else f"not up to {self.least:g} % sparsity"


def crossing_of(points: Sequence[tuple[float, float, float]]) -> Crossing | None:
    """Where a sparse time falls below the dense one: points of (sparsity in per cent, sparse ms, dense ms).

    Between two measured sparsities both times are taken to be straight lines. The crossing is the last one on the way up, so that
    sparse wins at every measured point above it. None with fewer than two points."""
    ordered = sorted(points)
    if len(ordered) < 2:
        return None
    gains = [dense - sparse for _, sparse, dense in ordered]
    if gains[-1] <= 0:
        return Crossing(None, ordered[-1][0], 100.0)
    below = [n for n, gain in enumerate(gains) if gain <= 0]
    if not below:
        return Crossing(None, 0.0, ordered[0][0], always=True)
    n = below[-1]
    low, high = ordered[n][0], ordered[n + 1][0]
    share = -gains[n] / (gains[n + 1] - gains[n])
    return Crossing(low + share * (high - low), low, high)


def crossings(cells: Sequence[Cell]) -> list[tuple[str, Crossing]]:
    """(what, where) of every problem, block size and direction that was measured with random lists at several sparsities beside
    the dense peer."""
    grid = Grid(tuple(cells))
    points: dict[str, list[tuple[float, float, float]]] = {}
    for case in grid.cases:
        own = {cell.implementation: cell for cell in grid.of(case)}
        if OURS not in own or DENSE_PEER not in own:
            continue
        ours, dense = own[OURS], own[DENSE_PEER]
        pattern = ours.case.pattern
        if pattern is None or pattern.kind != "random" or ours.timing is None or dense.timing is None:
            continue
        what = case.replace(f"_{pattern.name}", f", blocks of {pattern.blocks}").replace("_backward", "")
        points.setdefault(f"{ours.case.direction}, {what}", []).append(
            (100 * (1 - ours.case.density), ours.timing.ms, dense.timing.ms)
        )
    found = ((what, crossing_of(some)) for what, some in points.items())
    return [(what, crossing) for what, crossing in found if crossing is not None]

"""Where one time falls below another along a sweep: from which sparsity on sparse attention overtakes dense."""

from collections.abc import Sequence
from dataclasses import dataclass


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

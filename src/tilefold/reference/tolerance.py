"""One function decides whether a result is right.

A result may be off by what rounding does to the same computation for the same dtype.  How much that is follows from the problem:
`reference.rounding` gives each element's standard deviation.  No error that anything happened to make is a measure.

The deviations come from a few draws, so an element's is at least that of its row times its column's, over that of all.  An
element may be off by c of it, and by the rounding of the result, half a unit in the last place.  One of n normal errors exceeds c
deviations with a probability of 1e-4 at most.  The relative L2 norm of the errors may be twice that of the
deviations, as errors of one row go together, and that of the rounding.

Infinities and zeros of dead rows must be where the oracle has them, NaN where the oracle has NaN.
"""

from dataclasses import dataclass
from statistics import NormalDist

import torch

from .rounding import U32, binade

__all__ = ["Comparison", "compare"]

FACTOR = 2.0
PROBABILITY = 1e-6
ROUNDINGS = 4
TINY = 1e-290


@dataclass(frozen=True)
class Comparison:
    """How far `got` is from the oracle: the error that is nearest to its limit, and that limit; all errors, relative L2."""

    max_error: float
    max_limit: float
    l2_error: float
    l2_limit: float
    same_specials: bool

    @property
    def ok(self) -> bool:
        return self.same_specials and self.max_error <= self.max_limit and self.l2_error <= self.l2_limit

    def __str__(self) -> str:
        specials = "" if self.same_specials else "; NaN, infinity or shape differs from the oracle"
        verdict = "ok" if self.ok else "WRONG"
        return (
            f"{verdict}: max error {self.max_error:.3e} (limit {self.max_limit:.3e}), relative L2 {self.l2_error:.3e} "
            f"(limit {self.l2_limit:.3e}){specials}"
        )


def compare(got: torch.Tensor, oracle: torch.Tensor, plain: torch.Tensor, unit: float = 0.0) -> Comparison:
    """Judge `got` (storage dtype) by `oracle` (fp64) and `plain`, the oracle one standard deviation off, all of one shape.

    plain: from a reference with a narrower `dtype`, or from `deviating`; the oracle, where nothing but the result is rounded.
    unit: a size below which rounding does not shrink with the result; 1 for logarithms, whose errors act as factors."""
    if got.shape != oracle.shape or plain.shape != oracle.shape:
        return Comparison(float("inf"), 0.0, float("inf"), 0.0, False)
    exact = oracle.detach().double()
    g, p = (t.detach().to(exact.device).double() for t in (got, plain))
    finite = exact.isfinite()
    same = torch.equal(g.isfinite(), finite) and _same_specials(g[~finite], exact[~finite])
    if not bool(finite.any()):
        return Comparison(0.0, 0.0, 0.0, 0.0, same)
    x, base = (torch.where(finite, t, 0.0) for t in (exact, p - exact))
    base, count, limits = _pooled(base, finite), int(finite.sum()), torch.finfo(got.dtype)
    tail = NormalDist().inv_cdf(1 - PROBABILITY / 2 / count)
    small = ROUNDINGS * U32 * x.abs().clamp_min(unit)
    spread = tail * base + small
    rounding = binade(x.abs() + spread).clamp_min_(limits.smallest_normal) * limits.eps / 2
    error = torch.where(g.isfinite() & finite, (g - x).abs(), 0.0)
    limit = spread + rounding
    global LAST; LAST = limit
    worst = (error / limit).argmax()
    norm = x.norm().clamp_min(limits.tiny)
    factor = max(FACTOR, 1 + NormalDist().inv_cdf(1 - PROBABILITY / 2) / count**0.5)
    l2 = torch.hypot(factor * (base * finite).norm(), ((rounding + small) * finite).norm())
    return Comparison(
        max_error=float(error.flatten()[worst]),
        max_limit=float(limit.flatten()[worst]),
        l2_error=float(error.norm() / norm),
        l2_limit=float(l2 / norm),
        same_specials=same,
    )


def _pooled(off: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Deviations off [.., C], 0 where not finite, raised to what those of row and column give, and to half their root mean square."""
    squares, live = (t.reshape(-1, t.shape[-1] if t.dim() else 1) for t in (off.square(), finite.double()))
    row, column, mean = (squares.sum(d, True) / live.sum(d, True).clamp_min(1) for d in (1, 0, (0, 1)))
    made = torch.maximum(squares, row * column / mean.clamp_min(TINY)).maximum(mean / 4)
    return made.sqrt().view(off.shape)


def _same_specials(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])

"""One function decides whether a result is right.

A result may be off by what rounding does to the same computation in the same dtype.  How much that is follows from the problem:
`reference.rounding` gives each element's standard deviation.  No error that anything happened to make is a measure.

The largest error may be five of the largest standard deviation: a sum of independent errors exceeds five of its own with a
probability of 2 exp(-25 / 2) at most (Hoeffding), and the elements of a result are much alike.  The relative L2 norm of the
errors may be twice that of the standard deviations: their squares add up to that on average, but errors of one row go together.
To either comes rounding: of the result to its dtype, and four times in fp32 (score, exponential, sum, quotient) at the size of
the largest element.

Independent errors do not make all of a result larger or smaller.  The factor by which it is too large, of least squares, may be
five of its standard deviation, the norm of the standard deviations divided by the root of their number, and twice the roundoff of
its dtype: what cuts off where it should round loses 0.72 of a roundoff on average, and may do so to what goes into the last
product and to what comes out of it.

Infinities and zeros of dead rows must be where the oracle has them, NaN where the oracle has NaN.
"""

from dataclasses import dataclass

import torch

__all__ = ["Comparison", "compare"]

FACTOR = 2.0
DEVIATIONS = 5.0
ROUNDINGS = 4


@dataclass(frozen=True)
class Comparison:
    """How far `got` is from the oracle, beside the limit that follows from the standard deviation of rounding."""

    max_error: float
    max_limit: float
    l2_error: float
    l2_limit: float
    same_specials: bool
    scale_error: float = 0.0
    scale_limit: float = 0.0

    @property
    def ok(self) -> bool:
        pairs = (self.max_error, self.max_limit), (self.l2_error, self.l2_limit), (self.scale_error, self.scale_limit)
        return self.same_specials and all(error <= limit for error, limit in pairs)

    def __str__(self) -> str:
        specials = "" if self.same_specials else "; NaN, infinity or shape differs from the oracle"
        verdict = "ok" if self.ok else "WRONG"
        return (
            f"{verdict}: max error {self.max_error:.3e} (limit {self.max_limit:.3e}), relative L2 {self.l2_error:.3e} "
            f"(limit {self.l2_limit:.3e}), scale {self.scale_error:.3e} (limit {self.scale_limit:.3e}){specials}"
        )


def compare(got: torch.Tensor, oracle: torch.Tensor, plain: torch.Tensor, unit: float = 0.0) -> Comparison:
    """Judge `got` (storage dtype) by `oracle` (fp64) and `plain`, the oracle one standard deviation off, all of one shape.

    plain: from a reference with a narrower `dtype`, or from `deviating`; the oracle rounded, where nothing else is.
    unit: a size below which rounding does not shrink with the result; 1 for logarithms, whose errors act as factors."""
    if got.shape != oracle.shape or plain.shape != oracle.shape:
        return Comparison(float("inf"), 0.0, float("inf"), 0.0, False)
    exact = oracle.detach().double().flatten()
    g, p = (t.detach().to(exact.device).double().flatten() for t in (got, plain))
    finite = exact.isfinite()
    same = torch.equal(g.isfinite(), finite) and _same_specials(g[~finite], exact[~finite])
    if not bool(finite.any()):
        return Comparison(0.0, 0.0, 0.0, 0.0, same)
    x = exact[finite]
    least, unit32 = torch.finfo(got.dtype).tiny, torch.finfo(torch.float32).eps / 2
    own, small = torch.finfo(got.dtype).eps / 2, ROUNDINGS * unit32 * x.abs().max().clamp_min(unit)
    rounding = x.abs() * own + small
    off = torch.where(g.isfinite(), g - exact, 0.0)[finite]
    base = torch.where(p.isfinite(), (p - exact).abs(), 0.0)[finite]
    norm, root = x.norm().clamp_min(least), len(x) ** 0.5
    even = min(1.0, DEVIATIONS / root) * base.norm() + 2 * own * norm + root * small
    return Comparison(
        max_error=float(off.abs().max()),
        max_limit=float(DEVIATIONS * base.max() + rounding.max() + least),
        l2_error=float(off.norm() / norm),
        l2_limit=float((FACTOR * base.norm() + rounding.norm()) / norm + least),
        same_specials=same,
        scale_error=float((off @ x).abs() / norm / norm),
        scale_limit=float(even / norm + least),
    )


def _same_specials(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])

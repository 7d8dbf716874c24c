"""One function decides whether a result is right.

A result may be off by what rounding does to the same computation for the same dtype.  How much that is follows from the problem:
`reference.rounding` gives each element's standard deviation.  No error that anything happened to make is a measure.

Every element has its own limit: c of its deviation, four roundings in fp32 (exponentials of GPUs are off by 2^-22, and sums are
rescaled; of a logarithm's unit), and the rounding of the result, half a unit in its last place.  One of n independent normal
errors exceeds c deviations with a probability of 1e-6; of results in fp32 c is half as large again, as the partial sums that
one element happens to have decide its deviation.  The deviations come from a few draws, so an element's is at least that
which its row and its column give (their mean squares' product over the mean square of all), and half of the root mean square.

The relative L2 norm of the errors may be 1.5 times that of the deviations, as errors of one row go together (of few elements
1 + 4.9 n^(-1/2) times), and those roundings' norm.

Infinities and zeros of dead rows must be where the oracle has them, NaN where the oracle has NaN.
"""

from dataclasses import dataclass
from statistics import NormalDist

import torch

from .rounding import U32, binade

FACTOR = 1.5
PROBABILITY = 1e-6
SUMS = 1.5
"""How much larger c is for fp32: an error whose deviation is itself random has a longer tail than a normal one."""
ROUNDINGS = 4
TINY = 1e-290


@dataclass(frozen=True)
class Comparison:
    """How far `got` is from the oracle.

    max_error, max_limit: of the element whose error is the largest part of its limit.  l2: of all.  largest_limit: of any.
    finite: False where a result that was compared in part has NaN or an infinity anywhere, which is wrong."""

    max_error: float
    max_limit: float
    l2_error: float
    l2_limit: float
    same_specials: bool
    largest_limit: float = 0.0
    finite: bool = True

    @property
    def ok(self) -> bool:
        within = self.max_error <= self.max_limit and self.l2_error <= self.l2_limit
        return self.same_specials and self.finite and within

    @property
    def strain(self) -> float:
        """How far it is into its limits: above 1 it is beyond one; NaN counts as infinitely far."""
        pairs = ((self.max_error, self.max_limit), (self.l2_error, self.l2_limit))
        strains = [error / limit if limit > 0 else float("inf") if error > 0 else 0.0 for error, limit in pairs]
        return float("inf") if not self.same_specials or any(s != s for s in strains) else max(strains)

    @property
    def words(self) -> str:
        """The figures, and what else is wrong."""
        specials = "" if self.same_specials else "; NaN, infinity or shape differs from the oracle"
        return (
            f"{'' if self.finite else 'output is not finite; '}max error {self.max_error:.2e} (limit {self.max_limit:.2e}), "
            f"relative L2 {self.l2_error:.2e} (limit {self.l2_limit:.2e}){specials}"
        )

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'WRONG'}: {self.words}"


def compare(got: torch.Tensor, oracle: torch.Tensor, plain: torch.Tensor, unit: float = 0.0) -> Comparison:
    """Judge `got` (storage dtype) by `oracle` (fp64) and `plain`, the oracle one standard deviation off, all of one shape.

    plain: from a reference with a narrower `dtype`, or from `deviating`; the oracle, where nothing but the result is rounded.
    unit: what four roundings in fp32 are roundings of, if not the result; 1 for logarithms, whose errors act as factors."""
    if got.shape != oracle.shape or plain.shape != oracle.shape:
        return Comparison(float("inf"), 0.0, float("inf"), 0.0, False)
    exact = oracle.detach().double()
    g, finite = got.detach().to(exact.device).double(), exact.isfinite()
    same = torch.equal(g.isfinite(), finite) and _same_specials(g[~finite], exact[~finite])
    if not bool(finite.any()):
        return Comparison(0.0, 0.0, 0.0, 0.0, same)
    error, base, rounding, limit = errors(got, oracle, plain, unit)
    worst = (error / limit).argmax()
    norm = exact[finite].norm().clamp_min(torch.finfo(got.dtype).tiny)
    factor = max(FACTOR, 1 + _tail(1) / int(finite.sum()) ** 0.5)
    return Comparison(
        max_error=float(error.flatten()[worst]),
        max_limit=float(limit.flatten()[worst]),
        l2_error=float(error.norm() / norm),
        l2_limit=float(torch.hypot(factor * base.norm(), rounding.norm()) / norm),
        same_specials=same,
        largest_limit=float(limit.max()),
    )


def errors(
    got: torch.Tensor, oracle: torch.Tensor, plain: torch.Tensor, unit: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """By element, fp64 on the oracle's device: the error, the deviation, what roundings may add, and the limit; arguments as of
    `compare`.  An element that is not finite has the error 0."""
    exact = oracle.detach().double()
    g, p = (t.detach().to(exact.device).double() for t in (got, plain))
    finite, limits = exact.isfinite(), torch.finfo(got.dtype)
    x = torch.where(finite, exact, 0.0)
    base = torch.where(finite, _pooled(torch.where(finite, p - exact, 0.0), finite), 0.0)
    spread = _tail(int(finite.sum())) * base * (SUMS if got.dtype == torch.float32 else 1.0)
    small = ROUNDINGS * U32 * (torch.full_like(x, unit) if unit else x.abs())
    rounding = small + binade(x.abs() + spread + small).clamp_min_(limits.smallest_normal) * limits.eps / 2
    error = torch.where(g.isfinite() & finite, (g - x).abs(), 0.0)
    return error, base, torch.where(finite, rounding, 0.0), spread + rounding


def _tail(count: int) -> float:
    """How many deviations the largest of so many normal numbers exceeds with PROBABILITY."""
    return NormalDist().inv_cdf(1 - PROBABILITY / 2 / max(1, count))


def _pooled(off: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Deviations off [.., C], 0 where not finite, at least what their row and column give, and half of all's root mean square."""
    squares, live = (t.reshape(-1, t.shape[-1] if t.dim() else 1) for t in (off.square(), finite.double()))
    row, column, mean = (squares.sum(d, True) / live.sum(d, True).clamp_min(1) for d in (1, 0, (0, 1)))
    made = torch.maximum(squares, row * column / mean.clamp_min(TINY)).maximum(mean / 4)
    return made.sqrt().view(off.shape)


def _same_specials(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])

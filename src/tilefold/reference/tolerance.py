"""One function decides whether a result is right.

The error against the fp64 oracle may be at most twice that of plain PyTorch computing the same thing in the same dtype, plus
rounding: of the result to its dtype, and four times in fp32 (score, exponential, sum, quotient) at the size of the largest
element.  Both the largest element and the relative L2 norm must hold; infinities and zeros of dead
rows must be where the oracle has them, and NaN must be where the oracle has NaN.

The largest of a few hundred rounding errors is a noisy number: it varies by a factor of two between draws.  So plain PyTorch's
largest error counts as at least four times its root mean square, which is what a few thousand normal errors reach.
"""

from dataclasses import dataclass

import torch

__all__ = ["Comparison", "compare"]

FACTOR = 2.0
DEVIATIONS = 4.0
ROUNDINGS = 4


@dataclass(frozen=True)
class Comparison:
    """How far `got` is from the oracle, beside the limit that follows from plain PyTorch's own error."""

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
    """Judge `got` (storage dtype) by `oracle` (fp64) and `plain` (PyTorch's result in the same dtype), all of one shape.

    unit: a size below which rounding does not shrink with the result; 1 for logarithms, whose errors act as factors."""
    if got.shape != oracle.shape or plain.shape != oracle.shape:
        return Comparison(float("inf"), 0.0, float("inf"), 0.0, False)
    exact = oracle.detach().double().flatten()
    g, p = (t.detach().to(exact.device).double().flatten() for t in (got, plain))
    finite = exact.isfinite()
    same = torch.equal(g.isfinite(), finite) and _same_specials(g[~finite], exact[~finite])
    if not bool(finite.any()):
        return Comparison(0.0, 0.0, 0.0, 0.0, same)
    size = exact[finite].abs()
    rounding = (
        size * torch.finfo(got.dtype).eps / 2
        + size.max().clamp_min(unit) * ROUNDINGS * torch.finfo(torch.float32).eps / 2
    )
    error = torch.where(g.isfinite(), (g - exact).abs(), 0.0)[finite]
    base = torch.where(p.isfinite(), (p - exact).abs(), 0.0)[finite]
    norm = exact[finite].norm().clamp_min(torch.finfo(got.dtype).tiny)
    return Comparison(
        max_error=float(error.max()),
        max_limit=float(
            FACTOR * torch.maximum(base.max(), DEVIATIONS * base.square().mean().sqrt())
            + rounding.max()
            + torch.finfo(got.dtype).tiny
        ),
        l2_error=float(error.norm() / norm),
        l2_limit=float((FACTOR * base.norm() + rounding.norm()) / norm + torch.finfo(got.dtype).tiny),
        same_specials=same,
    )


def _same_specials(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])

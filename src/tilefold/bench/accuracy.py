"""How two results differ, number by number: what an accuracy report of any two implementations is made of.

Nothing is judged here (`tilefold.bench.judge` does that): two right results may differ by the rounding of their dtype, and two
results that agree may both be wrong.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilefold import reference
from tilefold.bench.implementation import Inputs, window_of
from tilefold.errors import ShapeError, Unsupported

LARGEST = 1 << 27  # scores of the fp64 reference, which holds them all
CHUNK = 1 << 22  # elements that are held in fp64 at a time
BINS = range(-12, 4)  # decades of absolute differences: bin e counts 10**e <= |a - b| < 10**(e + 1)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a tensor is: shape, dtype, Euclidean norm, largest and smallest value, how many are NaN or infinite (they count in
    none of the others), and the SHA-256 of its bytes in row-major order."""

    shape: tuple[int, ...]
    dtype: str
    norm: float
    largest: float
    smallest: float
    specials: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Difference:
    """How `second` differs from `first`.

    close: |first - second| <= atol + rtol * |second| everywhere (torch.allclose; NaN is close to nothing). max_abs, mean,
    mean_abs, rmse: of first - second over the places where both are finite, mean with its sign; relative_l2: its norm over that
    of second. differing: places whose values are not equal (NaN equals NaN here); specials: those of them where one is NaN or
    infinite. decades: how many differences lie in each decade of BINS, the smaller and the larger ones in the first and the
    last. along: the largest difference at each index of dimension `axis`.
    """

    name: str
    first: Facts
    second: Facts
    close: bool
    rtol: float
    atol: float
    max_abs: float
    mean: float
    mean_abs: float
    rmse: float
    relative_l2: float
    differing: int
    specials: int
    elements: int
    decades: tuple[int, ...] = field(repr=False)
    axis: int
    along: tuple[float, ...] = field(repr=False)

    @property
    def identical(self) -> bool:
        """Whether both have the same bits."""
        return self.first.dtype == self.second.dtype and self.first.sha256 == self.second.sha256


def facts_of(t: Tensor) -> Facts:
    """The facts of a tensor on any device, of any strides."""
    digest = hashlib.sha256()
    squares, largest, smallest, specials = 0.0, -float("inf"), float("inf"), 0
    for part in _chunks(t):
        digest.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        exact = part.double()
        finite = exact[exact.isfinite()]
        specials += part.numel() - finite.numel()
        if finite.numel():
            squares += float(finite.square().sum())
            largest, smallest = max(largest, float(finite.max())), min(smallest, float(finite.min()))
    if largest < smallest:  # nothing finite
        largest = smallest = float("nan")
    dtype = str(t.dtype).removeprefix("torch.")
    return Facts(tuple(t.shape), dtype, squares**0.5, largest, smallest, specials, digest.hexdigest())


def difference_of(
    name: str, first: Tensor, second: Tensor, rtol: float = 1e-5, atol: float = 1e-5, axis: int = 1
) -> Difference:
    """How `second` differs from `first`, computed in fp64; name: what the tensors are called in a report.

    axis: the dimension along which the largest differences are listed (1: the tokens of [batch, tokens, heads, dim]), the last
    one if there are fewer. Raises ShapeError if the shapes are not the same.
    """
    if first.shape != second.shape:
        raise ShapeError(f"{name} has shapes {tuple(first.shape)} and {tuple(second.shape)}: they must be the same")
    axis = max(0, min(axis, first.dim() - 1))
    sums = torch.zeros(4, dtype=torch.float64)  # of differences, their sizes, their squares, the squares of the second
    count, largest, differing, specials, close = 0, 0.0, 0, 0, True
    decades = torch.zeros(len(BINS), dtype=torch.int64)
    for a, b in zip(_chunks(first), _chunks(second.to(first.device)), strict=True):
        x, y = a.double(), b.double()
        both = x.isfinite() & y.isfinite()
        signed = (x - y)[both]
        delta = signed.abs()
        reference = y[both].abs()
        equal = (x == y) | (x.isnan() & y.isnan())
        differing += int((~equal).sum())
        specials += int((~both & ~equal).sum())
        close = close and bool((delta <= atol + rtol * reference).all()) and bool((both | (x == y)).all())
        if delta.numel():
            largest = max(largest, float(delta.max()))
        count += delta.numel()
        sums += torch.stack([signed.sum(), delta.sum(), delta.square().sum(), reference.square().sum()]).cpu()
        exponents = delta[delta > 0].log10().floor().clamp(BINS[0], BINS[-1]).long().cpu() - BINS[0]
        decades += torch.bincount(exponents, minlength=len(BINS))
    total, size, squares, norm = sums.tolist()
    relative = (squares / norm) ** 0.5 if norm else (0.0 if largest == 0 else float("inf"))
    count = max(1, count)
    return Difference(
        name, facts_of(first), facts_of(second), close, rtol, atol, largest, total / count, size / count,
        (squares / count) ** 0.5, relative, differing, specials, first.numel(), tuple(decades.tolist()), axis,
        _along(first, second, axis),
    )  # fmt: skip


def _chunks(t: Tensor) -> Iterator[Tensor]:
    """The elements in row-major order, a few at a time: nothing is copied whole."""
    if t.numel() <= CHUNK or t.dim() == 0:
        yield t.detach().reshape(-1)
        return
    for part in t.detach():
        yield from _chunks(part)


def _along(first: Tensor, second: Tensor, axis: int) -> tuple[float, ...]:
    """The largest finite difference at each index of a dimension."""
    if first.dim() == 0 or first.numel() == 0:
        return ()
    found = []
    for a, b in zip(first.detach().unbind(axis), second.detach().to(first.device).unbind(axis), strict=True):
        delta = (a.double() - b.double()).abs()
        finite = delta[delta.isfinite()]
        found.append(float(finite.max()) if finite.numel() else float("nan"))
    return tuple(found)


def exact_result(inputs: Inputs) -> dict[str, Tensor]:
    """out and lse, or dq, dk, dv, of the reference in fp64, from inputs widened to it, so that gradients are not rounded either.

    Unsupported for a case whose scores it could not hold."""
    p = inputs.problem
    if p.varlen:
        raise Unsupported(f"{inputs.case.name} is a packed batch; compare its sequences as cases of their own")
    if p.batch * p.heads * p.seq_q * p.seq_k > LARGEST:
        raise Unsupported(
            f"fp64 cannot take {inputs.case.name}: its {p.batch} x {p.heads} x {p.seq_q} x {p.seq_k} scores are more than "
            f"{LARGEST}. Choose a smaller case, as --quick does"
        )
    q, k, v = (t.double().requires_grad_(inputs.case.backward) for t in (inputs.q, inputs.k, inputs.v))
    if inputs.index is not None:
        out, lse = reference.sparse_attention(q, k, v, inputs.index, causal=p.causal, dtype=torch.float64)
    else:
        out, lse = reference.attention(q, k, v, causal=p.causal, window=window_of(p), dtype=torch.float64)
    if inputs.grad is None:
        return {"out": out, "lse": lse}
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), inputs.grad.double()), strict=True))

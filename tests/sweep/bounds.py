"""How far a result may lie from fp64: one function, fed with sums over the very terms that the result is a sum of."""

import torch

TF32 = 2.0**-10  # of a product, about its middle, which is as much too small: see `limit`
FP32 = 2.0**-23  # of sums in fp32, which tensor cores cut off rather than round
DEVIATIONS = 5.0
SYSTEMATIC = 1 / 8


class Wrong(AssertionError):
    """A result that is not what the documents say."""


def roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to dtype; the interpreter cuts off where a device rounds to bfloat16."""
    u = torch.finfo(dtype).eps / 2
    return 2 * u if dtype == torch.bfloat16 and not torch.cuda.is_available() else u


def steps(n: int) -> float:
    """Roundings that a sum of n numbers in fp32 adds up to: random ones, and a few that are not."""
    return 4.0 + float(n) ** 0.5


def of_terms(unit: float, linear: torch.Tensor, squares: torch.Tensor | None) -> torch.Tensor:
    """What rounding every term by `unit` adds up to: see `limit`."""
    random = linear if squares is None else DEVIATIONS * squares.sqrt() + SYSTEMATIC * linear
    return unit * torch.minimum(linear, random)


def of_offsets(size: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """What a product size @ off.mT of sizes loses where each number behind `off` is that far away at most."""
    linear = size @ off.mT
    return torch.minimum(2 * (size**2 @ (off**2).mT).sqrt() + linear / 8, linear)


def limit(
    exact: torch.Tensor,
    out: torch.dtype,
    linear: torch.Tensor,
    squares: torch.Tensor | None = None,
    unit: float = 0.0,
    terms: int = 1,
    extra: torch.Tensor | float = 0.0,
    cut: float = 0.0,
) -> torch.Tensor:
    """The largest error that rounding explains, element by element.

    exact: the result in fp64, rounded once to `out`.  linear: the sum of its terms' sizes; squares: the sum of their squares.
    unit: what each term is rounded by: errors of many terms go by the root of their squares, which no sample reaches
    five times, and share an eighth of the linear sum, never beyond all of it.  terms: how many are summed in fp32.
    extra: what else is known to be off.  cut: by how much the middle of each term's error makes it too small: tensor cores cut 13
    bits off either number of a tf32 product, which loses between nothing and 2^-9, that is 2^-10 and 2^-10 either way."""
    found = FP32 * steps(terms) * linear + cut * exact.abs() + extra
    if unit:
        found = found + of_terms(unit, linear, squares)
    least = torch.finfo(out).smallest_normal * torch.finfo(out).eps
    return found + roundoff(out) * (exact.abs() + found) + max(least, 1e-30)  # what is rounded is off already

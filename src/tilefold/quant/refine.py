"""Zero points between codes that lessen the error of rounding, group by group, without data.

Half-quadratic quantisation: Hicham Badri and Appu Shaji, "Half-Quadratic Quantization of Large Machine Learning Models",
Mobius Labs, 2023.  It minimises the l_p norm (p < 1) of the error w - (q - z) s over z, with q the nearest codes for z, by
splitting off an auxiliary error e and taking turns:

    e = shrink(w - (q - z) s)        shrink(x) = sign(x) max(|x| - |x|**(p - 1) / beta, 0)
    z = mean over the group of q - (w - e) / s
    beta grows by a factor

Two things differ here.  Errors are in units of the step s, so that w and 8 w get the same zero points.  And of all zero points
seen, the start among them, a group keeps one for which neither the l_p nor the l_2 error is above that of any zero point
kept before, computed from the values as stored: the result is never worse than the start in either.
"""

import torch

P = 0.7
BETA, GROWTH = 10.0, 1.01
STEPS = 20
LEAST = 1e-6  # steps; a smaller error counts in proportion, so that its power p - 1 stays finite


def nearest_codes(grouped: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes, fp32 like grouped [N, groups, group], nearest to grouped / scales + zeros; scales and zeros fp32 [N, groups]."""
    return (grouped / scales[..., None] + zeros[..., None]).round_().clamp_(0, 2**bits - 1)


def squared_errors(
    grouped: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, real: torch.Tensor
) -> torch.Tensor:
    """fp64 [N, groups]: what the nearest codes lose with these scales and zero points, both as they will be stored."""
    return _left(grouped, scales.float(), zeros.float(), bits, real).square_().sum(-1)


def refine_zeros(
    grouped: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, real: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Zero points [N, groups] in `dtype`, from zeros [N, groups] on.

    grouped: fp32 [N, groups, group], zero where real [groups, group] is false; scales: [N, groups] as they will be stored."""
    count = real.sum(-1).float()
    step = scales.float()
    best = zeros.to(dtype)
    error, power, best_lp, best_l2 = _errors(grouped, step, best.float(), bits, real)
    current, beta = best.float(), BETA
    for _ in range(STEPS):
        e = error.sign() * (error.abs() - power / beta).clamp_min_(0)
        # q - (w - e) / s, with w / s = q - z + error, is z - error + e; columns past K have error 0 and so e 0.
        current = (current + (e - error).sum(-1) / count).to(dtype).float()  # as it would be stored
        error, power, lp, l2 = _errors(grouped, step, current, bits, real)
        better = (lp < best_lp) & (l2 <= best_l2)
        best = torch.where(better, current.to(dtype), best)
        best_lp, best_l2 = torch.where(better, lp, best_lp), torch.where(better, l2, best_l2)
        beta *= GROWTH
    return best


def _errors(
    grouped: torch.Tensor, step: torch.Tensor, zeros: torch.Tensor, bits: int, real: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The error in steps of the nearest codes for these zero points, |error|**(p - 1), both fp32, and sums a group, fp64:
    of |error|**p, and of the squared error in w's own units."""
    exact = _left(grouped, step, zeros, bits, real)
    error = (exact / step[..., None]).float()
    size = error.abs()
    power = size.clamp_min(LEAST).pow_(P - 1)
    return error, power, (size * power).sum(-1, dtype=torch.float64), exact.square_().sum(-1)


def _left(
    grouped: torch.Tensor, step: torch.Tensor, zeros: torch.Tensor, bits: int, real: torch.Tensor
) -> torch.Tensor:
    """What the nearest codes leave of the weight, fp64: dequantised in fp32, as QuantizedTensor does it, and compared in fp64."""
    back = (nearest_codes(grouped, step, zeros, bits) - zeros[..., None]) * step[..., None]
    return (grouped.double() - back.double()) * real

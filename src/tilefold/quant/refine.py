"""Zero points between codes that lessen the error of rounding, group by group, without data.

Half-quadratic quantisation: Hicham Badri and Appu Shaji, "Half-Quadratic Quantization of Large Machine Learning Models",
Mobius Labs, 2023.  It minimises the l_p norm (p < 1) of the error w - (q - z) s over z, with q the nearest codes for z, by splitting
off an auxiliary error e and taking turns:

    e = shrink(w - (q - z) s)        shrink(x) = sign(x) max(|x| - |x|**(p - 1) / beta, 0)
    z = mean over the group of q - (w - e) / s
    beta grows by a factor

Two things differ here.  Errors are in units of the step s, so that w and 8 w get the same zero points.  And of all zero points
seen, the start among them, a group keeps one for which neither the l_p nor the l_2 error is above that of any zero point
kept before, computed from the values as stored: the result is never worse than the start in either.
"""

import torch

__all__ = ["nearest_codes", "refine_zeros"]

P = 0.7
BETA, GROWTH = 10.0, 1.01
STEPS = 20


def nearest_codes(grouped: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes, fp32 like grouped [N, groups, group], nearest to grouped / scales + zeros; scales and zeros fp32 [N, groups]."""
    return (grouped / scales[..., None] + zeros[..., None]).round_().clamp_(0, 2**bits - 1)


def refine_zeros(
    grouped: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    """Zero points [N, groups] in `dtype`, from zeros (uint8 [N, groups]) on.

    grouped: fp32 [N, groups, group], zero past column k; scales: [N, groups] as they will be stored."""
    n, groups, group = grouped.shape
    real = (torch.arange(groups * group, device=grouped.device) < k).view(groups, group)
    count = real.sum(-1).float()
    step = scales.float()
    best = zeros.to(dtype)
    error, best_lp, best_l2 = _errors(grouped, step, best.float(), bits, real)
    current, beta = best.float(), BETA
    for _ in range(STEPS):
        size = error.abs()
        e = error.sign() * (size - size.clamp_min(1e-6).pow(P - 1) / beta).clamp_min_(0)
        # q - (w - e) / s with w / s = q - z + error: z - error + e, over the real columns (padding has error and e of its own).
        mean = ((e - error) * real).sum(-1) / count
        current = (current + mean).to(dtype).float()  # as it would be stored
        error, lp, l2 = _errors(grouped, step, current, bits, real)
        better = (lp < best_lp) & (l2 <= best_l2)
        best = torch.where(better, current.to(dtype), best)
        best_lp, best_l2 = torch.where(better, lp, best_lp), torch.where(better, l2, best_l2)
        beta *= GROWTH
    return best


def _errors(
    grouped: torch.Tensor, step: torch.Tensor, zeros: torch.Tensor, bits: int, real: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The error in steps, fp32, and its l_p and squared l_2 sums a group, fp64, of the nearest codes for these zero points.

    The weight is dequantised in fp32, as QuantizedTensor does it, and compared in fp64."""
    back = (nearest_codes(grouped, step, zeros, bits) - zeros[..., None]) * step[..., None]
    error = (grouped.double() - back.double()) / step[..., None].double() * real
    size = error.abs()
    return error.float(), size.pow(P).sum(-1), (size * size).sum(-1)

"""fp64 oracles of RMSNorm with a residual, and with the rotary embedding."""

from typing import Any

import torch

from .rounding import in_dtype, stored


@in_dtype
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """out, or (out, sum), as `tilefold.ops.rms_norm` defines them, computed in `dtype`."""
    s = x.to(dtype)
    if residual is not None:
        s = stored(s + residual.to(dtype))
    out = s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(dtype)
    return out if residual is None else (out, s)


@in_dtype
def rms_norm_rotary(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """`tilefold.ops.rms_norm_rotary`, computed in `dtype`."""
    wide = x.to(dtype)
    over = (-2, -1) if weight.dim() == 2 else (-1,)
    normed = wide * (wide.square().mean(over, keepdim=True) + eps).rsqrt() * weight.to(dtype)
    c, s = (t[..., : x.shape[1], None, :].to(dtype) for t in (cos, sin))
    pairs = cos.shape[-1]
    turning, rest = normed[..., : 2 * pairs], normed[..., 2 * pairs :]
    first, second = turning.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    turned = torch.stack((first * c - second * s, first * s + second * c), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned, rest), -1)

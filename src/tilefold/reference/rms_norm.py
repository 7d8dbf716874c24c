"""fp64 oracle of RMSNorm with a residual."""

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

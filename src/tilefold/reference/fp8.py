"""Plain PyTorch's attention of e4m3 tensors: dequantised, the weights rounded to e4m3 as FP8 kernels round them."""

import math
from typing import Any

import torch

from .attention import attention
from .rounding import in_dtype

__all__ = ["attention_fp8"]

SHIFT = 8  # weights are 2^8 times as large


@in_dtype
def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    layout: str = "bshd",
    weights: torch.dtype | None = torch.float8_e4m3fn,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as `tilefold.attention` of e4m3 tensors, computed in `dtype`.

    The weights exp(s - largest score of the row) are rounded to `weights`, 2^8 times as large; their sum is of unrounded ones.
    With weights None and dtype float64 it is the oracle: nothing is rounded.  options: causal, window, scale."""
    heads = q.shape[2 if layout == "bshd" else 1]
    wide = [
        t.to(dtype) if f is None else (t.double() * _spread(f, t, layout)).to(dtype)
        for t, f in ((q, q_descale), (k, k_descale), (v, v_descale))
    ]
    out, lse = attention(*wide, layout=layout, dtype=dtype, **options)
    if weights is None:
        return out, lse
    values = wide[2].transpose(1, 2) if layout == "bshd" else wide[2]
    values = values.repeat_interleave(heads // max(1, values.shape[1]), 1)
    p, total = _weights(wide[0], wide[1], layout, dtype, options)
    rounded = (p.float() * 2**SHIFT).to(weights).to(dtype) / 2**SHIFT
    made = torch.einsum("bhqk,bhkd->bhqd", rounded, values) / torch.where(total == 0, 1.0, total)
    made = made.transpose(1, 2) if layout == "bshd" else made
    return made, lse


def _weights(
    q: torch.Tensor, k: torch.Tensor, layout: str, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(s - largest) [B, H, Sq, Sk] and its sums [B, H, Sq, 1], 0 in rows without a live key."""
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    k = k.repeat_interleave(q.shape[1] // max(1, k.shape[1]), 1)
    scale = options.get("scale")
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    seq_q, seq_k = s.shape[2:]
    i, j = torch.arange(seq_q, device=q.device)[:, None] + seq_k - seq_q, torch.arange(seq_k, device=q.device)[None]
    left, right = (None if w in (None, -1) else w for w in (options.get("window") or (None, None)))
    right = 0 if options.get("causal") else right
    keep = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device)
    if left is not None:
        keep &= j >= i - left
    if right is not None:
        keep &= j <= i + right
    s = s.masked_fill(~keep, float("-inf"))
    largest = s.amax(3, keepdim=True) if seq_k else s.new_zeros(*s.shape[:3], 1)
    p = torch.exp(s - torch.where(largest == float("-inf"), 0.0, largest))
    return p, p.sum(3, keepdim=True)


def _spread(factor: torch.Tensor, t: torch.Tensor, layout: str) -> torch.Tensor:
    """factor [B, heads, or fewer that divide them] for each number of t."""
    factor = factor.repeat_interleave(t.shape[2 if layout == "bshd" else 1] // factor.shape[1], 1)
    return factor[:, None, :, None] if layout == "bshd" else factor[:, :, None, None]

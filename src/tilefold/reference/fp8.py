"""The oracle of attention of e4m3 tensors: what they mean, times their factors."""

from typing import Any, cast

import torch

from .attention import attention
from .rounding import deviating


def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    layout: str = "bshd",
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as `tilefold.attention` of e4m3 tensors, in fp64.  options: causal, window, scale.

    dtype: torch.float8_e4m3fn gives them one standard deviation off, as weights that are rounded to e4m3 make them;
    torch.bfloat16 as inputs that are, times their factors, and weights that are rounded to bfloat16."""
    heads = q.shape[2 if layout == "bshd" else 1]
    descales = [
        None if f is None else f.double().repeat_interleave(t.shape[2 if layout == "bshd" else 1] // f.shape[1], 1)
        for t, f in ((q, q_descale), (k, k_descale), (v, v_descale))
    ]

    def multiplied() -> tuple[torch.Tensor, torch.Tensor]:
        """Eight bits are multiplied; the products get the factors."""
        of_q, of_k, of_v = (None if f is None else f.repeat_interleave(heads // f.shape[1], 1) for f in descales)

        def scaled(s: torch.Tensor, *_: Any) -> torch.Tensor:
            for f in (of_q, of_k):
                s = s if f is None else s * f[:, :, None, None]
            return s

        wide = (t.double() for t in (q, k, v))
        out, lse = attention(*wide, layout=layout, score_mod=scaled, **options)
        return out if of_v is None else out * _spread(of_v, layout), lse

    def dequantised() -> tuple[torch.Tensor, torch.Tensor]:
        wide = (
            t.double() if f is None else t.double() * _spread(f, layout)
            for t, f in zip((q, k, v), descales, strict=True)
        )
        return attention(*wide, layout=layout, **options)

    if dtype == torch.float64:
        return multiplied()
    return cast(
        tuple[torch.Tensor, torch.Tensor],
        deviating(multiplied if dtype == torch.float8_e4m3fn else dequantised, dtype),
    )


def _spread(factor: torch.Tensor, layout: str) -> torch.Tensor:
    """factor [B, H] beside a tensor."""
    return factor[:, None, :, None] if layout == "bshd" else factor[:, :, None, None]

"""Tensors to e4m3 with one factor a head, in plain torch."""

import torch

from ..check import FLOATS, TensorSpec, bind
from ..errors import ValueRangeError
from ..types import Layout

__all__ = ["LARGEST", "quantize_fp8"]

LARGEST = 448.0  # of e4m3


def quantize_fp8(x: torch.Tensor, *, per: str = "head", layout: Layout = "bshd") -> tuple[torch.Tensor, torch.Tensor]:
    """x as float8_e4m3fn and what to multiply that with: x is about x8 * descale, which is what `attention` takes.

    Args:
        x: [batch, seq, heads, dim] fp16, bf16 or fp32, finite (a NaN makes its head NaN, as does an infinity).
        per: "head" for a factor of each batch entry and head, "tensor" for one of all.
        layout: "bshd", or "bhsd" for [batch, heads, seq, dim].

    Returns:
        (x8, descale): x8 float8_e4m3fn of x's shape, contiguous, the largest number of a head (or of all) being 448; descale
        [batch, heads] fp32, 1 where every number is 0.  No gradient passes.

    Raises:
        DtypeError, ShapeError, LayoutError, ValueRangeError, naming the argument.
    """
    if layout not in ("bshd", "bhsd"):
        raise ValueRangeError(f"layout must be 'bshd' or 'bhsd', got {layout!r}")
    if per not in ("head", "tensor"):
        raise ValueRangeError(f"per must be 'head' or 'tensor', got {per!r}")
    dims = "batch seq heads dim" if layout == "bshd" else "batch heads seq dim"
    sizes = bind((TensorSpec("x", dims, FLOATS),), {"x": x})
    batch, heads = sizes["batch"], sizes["heads"]
    with torch.no_grad():
        wide = x.float()
        over = (1, 3) if layout == "bshd" else (2, 3)
        largest = wide.abs().amax(over) if x.numel() else wide.new_zeros(batch, heads)
        if per == "tensor" and largest.numel():
            largest = largest.amax().expand(batch, heads).contiguous()
        descale = torch.where(largest == 0, 1.0, largest / LARGEST)
        factor = descale[:, None, :, None] if layout == "bshd" else descale[:, :, None, None]
        # the quotient of the largest number may be rounded to just above it
        return (wide / factor).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).contiguous(), descale

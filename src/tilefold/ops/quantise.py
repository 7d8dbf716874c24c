"""Tensors to e4m3 or int8 with a factor a head, in plain torch."""

import torch

from ..check import CODED, FLOATS, TensorSpec, bind
from ..errors import DtypeError, ValueRangeError
from ..types import Layout
from .watch import refuse_tangents

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


def quantize_kv(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, per: str = "head", scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, keys or values, as a cache holds them, and their factors: x is about codes * scale.

    Args:
        x: [caches or pages, rows, kv_heads, dim] fp16, bf16 or fp32, finite (a NaN makes its factor NaN, as does an infinity).
        dtype: torch.float8_e4m3fn or torch.int8.
        per: "head" for a factor of each head, "page" for one of each head of each page (or cache).
        scale: [kv_heads] or [caches or pages, kv_heads] fp32, greater than 0, to be used as they are, whatever `per` says; what
            is too large for them saturates.  Default: the largest number in size becomes 448, or 127.

    Returns:
        (codes, scale): codes like x in dtype, contiguous, by the rounding of `kvcache_append`: both give the same bits.  scale
        fp32 [kv_heads] or [caches or pages, kv_heads], 1 where every number is 0.  No gradient passes.

    Raises:
        DtypeError, ShapeError, LayoutError, ValueRangeError, naming the argument."""
    if not isinstance(dtype, torch.dtype) or dtype not in CODED:
        raise DtypeError(f"dtype must be torch.float8_e4m3fn or torch.int8, got {dtype!r}")
    if per not in ("head", "page"):
        raise ValueRangeError(f"per must be 'head' or 'page', got {per!r}")
    specs = (
        TensorSpec("x", "pages rows kv_heads dim", FLOATS),
        TensorSpec("scale", "kv_heads / pages kv_heads", (torch.float32,), optional=True),
    )
    n = bind(specs, {"x": x, "scale": scale})
    refuse_tangents({"x": x, "scale": scale})  # no_grad does not stop them
    low, high = CODED[dtype].limits
    with torch.no_grad():
        wide = x.float()
        if scale is None:
            over, shape = ((0, 1, 3), (n["kv_heads"],)) if per == "head" else ((1, 3), (n["pages"], n["kv_heads"]))
            largest = wide.abs().amax(over) if x.numel() else wide.new_zeros(shape)
            scale = torch.where(largest == 0, 1.0, largest / high)
        wide = (wide / scale[..., None, :, None]).clamp(low, high)
        if dtype == torch.int8:
            wide = wide.round().nan_to_num()  # to even, as the kernel
        return wide.to(dtype).contiguous(), scale

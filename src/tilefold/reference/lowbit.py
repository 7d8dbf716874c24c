"""Products with weights of few bits: the weight dequantised, then a plain product."""

from typing import Any

import torch

from .rounding import in_dtype


@in_dtype
def lowbit_matmul(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """x [..., K] times the transpose of what `weight` (a QuantizedTensor [N, K]) stands for, computed and returned in `dtype`."""
    out: torch.Tensor = x.to(dtype) @ weight.dequantize(dtype).t()
    return out if bias is None else out + bias.to(dtype)


def row_codes(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] as whole numbers in fp32 or as e4m3 by kind, and what they were divided by, [..., 1]."""
    largest = 127.0 if kind == torch.int8 else 448.0
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True) if x.numel() else wide[..., :1]
    divisor = torch.full_like(most, largest)  # a tensor: by a number a GPU multiplies with its rounded inverse
    scale = torch.where(most == 0, 1.0, (most / divisor).clamp_min(2.0**-120))
    codes = (wide * (1.0 / scale)).clamp(-largest, largest)
    return (codes.round() if kind == torch.int8 else codes.to(kind)), scale


@in_dtype
def matmul_w8a8(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The codes of x's rows, made in fp32 as they are defined, times the transpose of weight [N, K], scaled, in `dtype`."""
    codes, scale = row_codes(x, weight.dtype)
    out: torch.Tensor = codes.to(dtype) @ weight.to(dtype).t() * scale.to(dtype) * weight_scale.to(dtype)
    return out if bias is None else out + bias.to(dtype)

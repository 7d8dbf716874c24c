"""Products with weights of few bits: the weight dequantised, then a plain product."""

from typing import Any

import torch

__all__ = ["lowbit_matmul"]


def lowbit_matmul(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """x [..., K] times the transpose of what `weight` (a QuantizedTensor [N, K]) stands for, computed and returned in `dtype`."""
    out: torch.Tensor = x.to(dtype) @ weight.dequantize(dtype).t()
    return out if bias is None else out + bias.to(dtype)

"""Oracles of add, transpose and conv2d in plain torch, fp64."""

import torch
import torch.nn.functional as F

from .matmul import ACTIVATIONS
from .rounding import activated, in_dtype


@in_dtype
def add(x: torch.Tensor, y: torch.Tensor, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """x + y, computed in `dtype`."""
    return x.to(dtype) + y.to(dtype)


def transpose(x: torch.Tensor) -> torch.Tensor:
    """[M, N] -> [N, M], contiguous."""
    return torch.stack([x[:, i] for i in range(x.shape[1])]) if x.shape[1] else x.new_empty((0, x.shape[0]))


@in_dtype
def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Cross-correlation as `tilefold.ops.conv2d` defines it, by torch's own, in `dtype`."""
    batched = x[None] if x.dim() == 3 else x
    (dh, dw), (rows, columns) = pair(dilation), weight.shape[2:]
    if padding == "same":
        (top, bottom), (left, right) = ((t // 2, t - t // 2) for t in (dh * (rows - 1), dw * (columns - 1)))
    else:
        top, left = bottom, right = (0, 0) if padding == "valid" else pair(padding)  # type: ignore[arg-type]
    padded = F.pad(batched.to(dtype), (left, right, top, bottom))
    found = F.conv2d(padded, weight.to(dtype), None, pair(stride), 0, pair(dilation), groups)
    if bias is not None:
        found = found + bias.to(dtype)[:, None, None]
    found = found if activation is None else activated(ACTIVATIONS[activation], found)
    return found[0] if x.dim() == 3 else found


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value

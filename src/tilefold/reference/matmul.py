"""fp64 oracle of matrix products with bias and activation."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .rounding import activated, in_dtype


@in_dtype
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """activation(scale_a a b scale_b + bias) as `tilefold.ops.matmul` defines it, computed in `dtype`; of 2 or 3 dimensions."""
    z = a.to(dtype) @ b.to(dtype)
    if scale_a is not None:
        z = z * scale_a.to(dtype).reshape(-1, 1)
    if scale_b is not None:
        z = z * scale_b.to(dtype).reshape(1, -1)
    if bias is not None:
        z = z + bias.to(dtype)
    return z if activation is None else activated(ACTIVATIONS[activation], z)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


@in_dtype
def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The same of `tilefold.ops.bmm`: a [B, M, K] or [M, K], b [B, K, N] or [K, N]."""
    return matmul(a, b, bias=bias, activation=activation, dtype=dtype)

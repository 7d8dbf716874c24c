"""fp64 oracle of matrix products with bias and activation."""

import torch

__all__ = ["bmm", "matmul"]


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
    if activation == "relu":
        return torch.relu(z)
    if activation == "silu":
        return torch.nn.functional.silu(z)
    if activation in ("gelu", "gelu_tanh"):
        return torch.nn.functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    return z


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

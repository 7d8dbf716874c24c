"""Matrix products with bias and activation, in fp32; and weights of few bits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

__all__ = ["ACTIVATIONS", "activation_gradient", "dequantise", "product"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def product(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, saved: torch.Tensor | None, bias: torch.Tensor | None,
    scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, activation: str, fold: bool,
) -> None:  # fmt: skip
    """Write activation(a b * scales + bias) to out, and what it is applied to, to saved; a, b of 2 or 3 dimensions.

    fold: sum over the batch, too.  scale_a: a number or one a row; scale_b: one a column."""
    wide = torch.matmul(a.float(), b.float())
    if fold and wide.dim() == 3:
        wide = wide.sum(0)
    if scale_a is not None:
        wide = wide * (scale_a if scale_a.numel() == 1 else scale_a[:, None])
    if scale_b is not None:
        wide = wide * scale_b
    if bias is not None:
        wide = wide + bias
    if saved is not None:
        saved.copy_(wide)
    out.copy_(ACTIVATIONS[activation](wide))


def activation_gradient(dout: torch.Tensor, saved: torch.Tensor, dz: torch.Tensor, activation: str) -> None:
    """Write dout * activation'(saved) to dz, in fp32 before it is rounded."""
    x, do = saved.float(), dout.float()
    if activation == "relu":
        made = torch.where(x > 0, do, 0.0)
    elif activation == "silu":
        made = torch.ops.aten.silu_backward(do, x)
    else:
        made = torch.ops.aten.gelu_backward(do, x, approximate="tanh" if activation == "gelu_tanh" else "none")
    dz.copy_(made)


def dequantise(weight: Any, out: torch.Tensor) -> None:
    """Write a `QuantizedTensor` in out's dtype, columns as stored."""
    out.copy_(dataclasses.replace(weight, perm=None).dequantize(out.dtype))

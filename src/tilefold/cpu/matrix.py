"""Matrix products with bias and activation, in fp32; and weights of few bits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from . import ordered
from .rotary import turned

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def product(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, saved: torch.Tensor | None, bias: torch.Tensor | None,
    scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, activation: str, fold: bool, in_order: bool,
) -> None:  # fmt: skip
    """Write activation(a b * scales + bias) to out, and what it is applied to, to saved; a, b of 2 or 3 dimensions.

    fold: sum over the batch, too.  scale_a: a number or one a row; scale_b: one a column.  in_order: an element's bits do not
    depend on other rows."""
    wide = ordered.product(a, b.mT) if in_order else torch.matmul(a.float(), b.float())
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
    made = ACTIVATIONS[activation]
    out.copy_(ordered.elementwise(made, wide) if in_order else made(wide))


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


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, summed: torch.Tensor | None,
    rstd: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    """Write x, or x + residual (to summed, too), over the root of each row's mean square, times the weight; rstd: one over it."""
    if residual is not None and summed is not None:
        x = torch.add(x, residual, out=summed)
    wide = x.float()
    rstd.copy_(wide.square().mean(-1).add_(eps).rsqrt_())
    out.copy_(wide * rstd[..., None] * weight.float())


def rms_norm_gradient(
    dout: torch.Tensor, dsum: torch.Tensor | None, s: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor,
    dx: torch.Tensor, dw: torch.Tensor,
) -> None:  # fmt: skip
    """Write the gradients of s, what was normalised, and of the weight, fp32 [1, columns]; dsum: the gradient of s beside."""
    rows = rstd.reshape(-1, 1)
    do, normed = (t.reshape(-1, t.shape[-1]).float() for t in (dout, s))
    normed = normed * rows
    dw.copy_((do * normed).sum(0, keepdim=True))
    do = do * weight.float()
    made = (do - normed * (do * normed).mean(-1, keepdim=True)) * rows
    if dsum is not None:
        made += dsum.reshape(made.shape)
    dx.copy_(made.view(dx.shape))


def rms_norm_rotary(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, rstd: torch.Tensor,
    eps: float, interleaved: bool,
) -> None:  # fmt: skip
    """Write x [batch, seq, heads, dim], normalised and then turned, to out.

    weight [dim] or [heads, dim]; cos, sin [positions, pairs] or one for each entry of the batch."""
    normed, together = torch.empty(x.shape), weight.dim() == 2
    x, flat = (t.flatten(2) if together else t for t in (x, normed))
    rms_norm(x, None, weight.flatten(), flat, None, rstd, eps)
    out.copy_(_turned(normed, cos, sin, interleaved, False))


def rms_norm_rotary_gradient(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rstd: torch.Tensor,
    dx: torch.Tensor, dw: torch.Tensor, interleaved: bool,
) -> None:  # fmt: skip
    """Write the gradients of x and, fp32 [1, ..], of the weight."""
    do, together = _turned(dout, cos, sin, interleaved, True), weight.dim() == 2
    do, x = (t.flatten(2) if together else t for t in (do, x))
    rms_norm_gradient(do, None, x, weight.flatten(), rstd, dx, dw.flatten(1))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, conjugate: bool) -> torch.Tensor:
    """Token i turned by row i of the tables, or of its batch entry's."""
    at = torch.arange(x.shape[1]).expand(x.shape[:2])
    if cos.dim() == 3 and cos.shape[0] > 1:
        at = at + torch.arange(x.shape[0])[:, None] * cos.shape[1]
    cos, sin = (t.reshape(-1, t.shape[-1]) for t in (cos, sin))
    return turned(x, cos, sin, at, interleaved, conjugate)


def dequantise(weight: Any, out: torch.Tensor) -> None:
    """Write a `QuantizedTensor` in out's dtype, columns as stored."""
    out.copy_(dataclasses.replace(weight, perm=None).dequantize(out.dtype))

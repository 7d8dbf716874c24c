"""Gradients of a product: dz = dout * activation'(z), then da = dz b', db = a' dz and dbias, dz summed over what was broadcast.

z was saved by the forward pass, one more store of the result's size, where the activation needs it (of ReLU the result itself
serves): making it again would be a third product's work for each training step.  Where it was not saved (a compiled region whose
inputs did not say that they want a gradient), it is made again.

The gradient of an operand that serves a whole batch is one product that is summed over the batch as well: a batch that lies as a
longer k would is one, any other is gone through inside the kernel, so nothing is copied and the sum stays in fp32.
"""

from collections.abc import Sequence

import torch

from .product import Epilogue, activation_gradient, product


def gradient(
    dout: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, saved: torch.Tensor, activation: str,
    order: str, tf32: bool, wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(da, db, dbias), None where not wanted."""
    if activation == "none":
        dz = readable(dout if dout.dtype == a.dtype else dout.to(a.dtype))
    else:
        if saved.shape != dout.shape:
            made = Epilogue("none", order, tf32, dout.dtype)
            saved = product(a, b, bias, None, None, made)[0]
        dz = activation_gradient(dout, saved, activation, a.dtype)
    plain = Epilogue("none", order, tf32, a.dtype)
    da = db = dbias = None
    if wanted[0]:
        summed = a.dim() == 2 and dz.dim() == 3
        da = product(dz, b.mT, None, None, None, plain._replace(fold=summed))[0]
    if wanted[1]:
        summed = b.dim() == 2 and dz.dim() == 3
        db = product(a.mT, dz, None, None, None, plain._replace(fold=summed))[0]
    if wanted[2] and bias is not None:
        dbias = summed_to(dout if activation == "none" else dz, bias)
    return da, db, dbias


def readable(t: torch.Tensor) -> torch.Tensor:
    """A gradient with rows or columns that lie side by side: after sum() every element is at one address."""
    if not t.numel() or 1 in t.stride()[-2:]:
        return t
    return t.contiguous()


def summed_to(dz: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """dz summed, in fp32, over the dimensions along which the bias is broadcast; in the bias's dtype and shape."""
    shape = (1,) * (dz.dim() - bias.dim()) + tuple(bias.shape)
    dims = [d for d, (n, size) in enumerate(zip(shape, dz.shape, strict=True)) if n == 1 and size != 1]
    total = dz.sum(dims, keepdim=True, dtype=torch.float32) if dims else dz
    return (
        total.to(bias.dtype, copy=True).view(bias.shape)
        if dims
        else total.reshape(bias.shape).to(bias.dtype, copy=True)
    )

"""Oracles of matrix products with bias and activation, products with weights of few bits, add, transpose, conv2d and RMSNorm."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .rounding import activated, in_dtype, stored


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


@in_dtype
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> Any:
    """out, or (out, sum), as `tilefold.ops.rms_norm` defines them, computed in `dtype`."""
    s = x.to(dtype)
    if residual is not None:
        s = stored(s + residual.to(dtype))
    out = s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(dtype)
    return out if residual is None else (out, s)


@in_dtype
def rms_norm_rotary(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """`tilefold.ops.rms_norm_rotary`, computed in `dtype`."""
    wide = x.to(dtype)
    over = (-2, -1) if weight.dim() == 2 else (-1,)
    normed = wide * (wide.square().mean(over, keepdim=True) + eps).rsqrt() * weight.to(dtype)
    c, s = (t[..., : x.shape[1], None, :].to(dtype) for t in (cos, sin))
    pairs = cos.shape[-1]
    turning, rest = normed[..., : 2 * pairs], normed[..., 2 * pairs :]
    first, second = turning.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    turned = torch.stack((first * c - second * s, first * s + second * c), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned, rest), -1)

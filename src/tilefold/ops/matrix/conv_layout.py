"""Layouts of a convolution's tensors: what lies side by side, channels-last copies, the weight as kernels read it."""

import math
from collections.abc import Callable
from typing import Any

import torch

from ...plan.matrix.conv import RELAYOUT, ConvPlan, ConvProblem
from ...plan.matrix.conv_layout import FEW, copy_tile, padded
from ..bound import Bound, Example

Numbers = tuple[int, ...]
Change = Callable[[torch.Tensor], torch.Tensor]
INTEGERS = {2: torch.int16, 4: torch.int32}
AT_ONCE = 16  # bytes of the widest load


def dense(shape: Numbers, channels_last: bool, like: torch.Tensor) -> torch.Tensor:
    """Fresh memory for [N, C, H, W] in like's dtype, on its device."""
    kind = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=kind)


def gradient_of(t: torch.Tensor) -> torch.Tensor:
    """Fresh memory for the gradient of x, weight or bias: channels-last where the tensor is."""
    return dense(tuple(t.shape), t.dim() == 4 and lies_channels_last(t), t)


def strides_of(t: torch.Tensor) -> Numbers:
    """0 where there is one element: any number is right there, and 0 spoils the alignment of no address."""
    return tuple(0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True))


def lies_channels_last(t: torch.Tensor) -> bool:
    """Whether [N, C, H, W] ascends in memory as (C, W, H, N); a tensor that also ascends as (W, H, C, N) is channels-first."""
    if 0 in t.shape or t.stride(1) == 0:
        return False
    least = 0
    for i in (1, 3, 2, 0):
        if t.stride(i) < least or (i == 0 and least == t.stride(1)):
            return False
        least = t.stride(i) * max(1, t.shape[i])
    return True


def result_last(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the result is channels-last."""
    return lies_channels_last(x) or lies_channels_last(weight)


def last_strides(shape: Numbers, width: int = 0) -> Numbers:
    """Of [N, C, H, W] with channels inside, pixels `width` or as many as there are channels apart; 0 as in strides_of."""
    n, c, h, w = shape
    width = width or c
    strides = (h * w * width, 1, w * width, width)
    return tuple(0 if size == 1 else s for size, s in zip((n, c, h, w), strides, strict=True))


def pixels_nearer(strides: Numbers) -> bool:
    """Whether neighbouring pixels lie closer together than neighbouring channels; strides of [N, C, H, W]."""
    return strides[1] > strides[3] > 0


def order(strides: Numbers) -> Numbers:
    """Strides of [N, C, H, W] -> (image, line, column, channel)."""
    n, c, h, w = strides
    return n, h, w, c


def pixels_run(high: int, wide: int, strides: Numbers, itemsize: int) -> int:
    """How many pixels of [N, C, high, wide] lie side by side from each multiple of that number on: at most 16 bytes."""
    n, c, h, w = strides
    if w != 1 or wide == 1:
        return 1
    lines = (high * wide,) if high == 1 or h == wide else (wide, h)
    return math.gcd(AT_ONCE // itemsize, n, c, *lines)


def channels_run(channels: int, strides: Numbers, itemsize: int) -> int:
    """As pixels_run, of the channels of each pixel; strides: of channels first, then the others."""
    return math.gcd(AT_ONCE // itemsize, channels, *strides[1:]) if strides[0] == 1 else 1


def copy_launch(n: ConvProblem, shape: Numbers, strides: Numbers, width: int, device: Any, index: int) -> Bound:
    """-> the launch of the channels-last copy of [N, C, H, W] by strides, to pixels `width` channels apart."""
    from ...kernels.matrix.relayout import channels_last

    images, channels, high, wide = shape
    total = images * high * wide
    block_m, block_n, warps = copy_tile(total, width, n.itemsize, device)
    span = sum((size + 1024) * abs(s) for size, s in zip(shape, strides, strict=True))
    constants = {
        "RUN": pixels_run(high, wide, strides, n.itemsize),
        "OUT_RUN": math.gcd(AT_ONCE // n.itemsize, width),
        "WIDE": max(span, total + 1024) >= 2**31,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    programs = -(-total // block_m) * -(-width // block_n)
    numbers = total, high, wide, channels, width, order(strides)
    return Bound.of(channels_last, programs, 2, numbers, constants, index, num_warps=warps)


def bind_copy(n: ConvProblem, shape: Numbers, strides: Numbers, width: int, device: Any, index: int) -> Change:
    """-> copy(t): t [N, C, H, W] by strides -> the same with channels inside, width - C of them zeros."""
    bound = copy_launch(n, shape, strides, width, device, index)
    images, _, high, wide = shape

    def copy(t: torch.Tensor) -> torch.Tensor:
        out = torch.empty((images, high, wide, width), dtype=t.dtype, device=t.device)
        bits = INTEGERS[t.element_size()]
        bound((t.view(bits), out.view(bits)))
        return out.permute(0, 3, 1, 2)

    return copy


def bind_pack(plan: ConvPlan, shape: Numbers, strides: Numbers, width: int, index: int) -> tuple[Change, Numbers]:
    """-> pack(weight), the weight as the kernels read it fast, and its strides; shape, strides: of the weight
    [K, C / groups, R, S]; width: channels a group that the kernel sees.  Channels lie next to one another; of few channels in one
    group, output channels."""
    n = plan.problem
    if width == shape[1] and width < FEW and n.groups == 1 and n.taps != (1, 1) and plan.method != RELAYOUT:
        k, c, r, s = shape
        steps = (1, k, s * c * k, c * k)

        def turned(weight: torch.Tensor) -> torch.Tensor:
            return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)

        return turned, tuple(0 if size == 1 else step for size, step in zip((k, c, r, s), steps, strict=True))
    if width == shape[1] and (strides[1] <= 1 or n.taps == (1, 1)):
        return lambda weight: weight, strides
    return bind_copy(n, shape, strides, width, plan.device, index), last_strides((shape[0], width, *shape[2:]), width)


def width_of(plan: ConvPlan) -> int:
    """Channels a group that the forward kernel sees."""
    n = plan.problem
    return padded(n) if plan.method == RELAYOUT and n.groups == 1 else n.reduced


def example_copy(plan: ConvPlan) -> Example:
    """(kernel, args, kwargs) of the copy of a channels-first x: to compile ahead of time."""
    n = plan.problem
    x = torch.empty((n.batch, n.channels, n.high, n.wide), dtype=INTEGERS[n.itemsize], device="meta")
    return copy_launch(n, tuple(x.shape), strides_of(x), padded(n), plan.device, 0).example((x, x))

"""Shared by the tests and timings of convolution: the check of a call with its gradients, and ResNet-50's distinct layers."""

import torch

from cases import hold, hold_back
from tilefold import ops
from tilefold.reference import matrix as oracle

# channels, size of the input, output channels, taps, stride; padding keeps the size (for stride 1)
RESNET50 = {
    "7x7/2 3->64 @224": (3, 224, 64, 7, 2),
    "1x1 64->64 @56": (64, 56, 64, 1, 1),
    "3x3 64->64 @56": (64, 56, 64, 3, 1),
    "1x1 64->256 @56": (64, 56, 256, 1, 1),
    "1x1 256->64 @56": (256, 56, 64, 1, 1),
    "1x1 256->128 @56": (256, 56, 128, 1, 1),
    "3x3/2 128->128 @56": (128, 56, 128, 3, 2),
    "1x1/2 256->512 @56": (256, 56, 512, 1, 2),
    "1x1 128->512 @28": (128, 28, 512, 1, 1),
    "1x1 512->128 @28": (512, 28, 128, 1, 1),
    "3x3 128->128 @28": (128, 28, 128, 3, 1),
    "1x1 512->256 @28": (512, 28, 256, 1, 1),
    "3x3/2 256->256 @28": (256, 28, 256, 3, 2),
    "1x1/2 512->1024 @28": (512, 28, 1024, 1, 2),
    "1x1 256->1024 @14": (256, 14, 1024, 1, 1),
    "1x1 1024->256 @14": (1024, 14, 256, 1, 1),
    "3x3 256->256 @14": (256, 14, 256, 3, 1),
    "1x1 1024->512 @14": (1024, 14, 512, 1, 1),
    "3x3/2 512->512 @14": (512, 14, 512, 3, 2),
    "1x1/2 1024->2048 @14": (1024, 14, 2048, 1, 2),
    "1x1 512->2048 @7": (512, 7, 2048, 1, 1),
    "1x1 2048->512 @7": (2048, 7, 512, 1, 1),
    "3x3 512->512 @7": (512, 7, 512, 3, 1),
}


def layer(name, batch=32, dtype=torch.bfloat16, device="cuda", memory_format=torch.channels_last):
    """-> x, weight, and the arguments of the convolution."""
    c, size, k, taps, stride = RESNET50[name]
    x = torch.randn(batch, c, size, size, device=device).to(dtype).contiguous(memory_format=memory_format)
    w = (torch.randn(k, c, taps, taps, device=device) / (c * taps * taps) ** 0.5).to(dtype)
    return x, w.contiguous(memory_format=memory_format), {"stride": stride, "padding": taps // 2}


def held(x, weight, bias=None, *, backward=True, plan=None, **options):
    """Result and gradients against the oracle."""
    inputs = [t.detach().requires_grad_(backward) for t in (x, weight, bias) if t is not None]
    got = ops.conv2d(*inputs, plan=plan, **options)
    shown = {k: v for k, v in options.items() if k not in ("method", "tf32")}
    note = f"{x.stride()} {options}"
    if backward:
        return hold_back(got, oracle.conv2d, *inputs, what=note, **shown)[0]
    assert got.dtype == x.dtype
    hold(got, oracle.conv2d, *inputs, what=note, **shown)
    return got

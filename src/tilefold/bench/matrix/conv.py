"""What `tilefold bench conv` measures: two-dimensional convolutions of networks that are in use."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilefold import ops
from tilefold.bench.family import normal_numbers
from tilefold.bench.matrix.product import BYTES, Call, Operands, name_of, roof_of, torch_family, unusual

METHODS = ("auto", "implicit", "im2col")


@dataclass(frozen=True, slots=True)
class ConvCase:
    """x [batch, channels, size, size] with weight [out, channels / groups, kernel, kernel], and a bias.

    last: both in torch's channels_last layout.  method: of `ops.conv2d`."""

    batch: int
    channels: int
    size: int
    out: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    last: bool = False
    method: str = "auto"
    dtype: str = "bfloat16"

    @property
    def side(self) -> int:
        """Height and width of the result."""
        return (self.size + 2 * self.padding - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    @property
    def name(self) -> str:
        """Such as "b32_c256_s14_o256_r3" or "b32_c3_s224_o64_r7_stride2_pad3_last"."""
        shape = f"b{self.batch}_c{self.channels}_s{self.size}_o{self.out}_r{self.kernel}"
        window = unusual(self.stride, 1, "stride"), unusual(self.padding, self.kernel // 2, "pad")
        parts = unusual(self.dilation, 1, "dilation"), unusual(self.groups, 1, "groups"), "last" * self.last
        return name_of(shape, *window, *parts, unusual(self.method, "auto"), unusual(self.dtype, "bfloat16"))

    @property
    def bytes(self) -> int:
        """Input, weight, bias and result, each once."""
        numbers = self.batch * (self.channels * self.size**2 + self.out * self.side**2)
        return BYTES[self.dtype] * (numbers + self.out * (self.channels // self.groups) * self.kernel**2 + self.out)

    @property
    def flops(self) -> int:
        """2 for each pair of a weight and a number of the result that it enters; padding counts."""
        return 2 * self.batch * self.out * self.side**2 * (self.channels // self.groups) * self.kernel**2

    @property
    def options(self) -> dict[str, int]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}


def conv_inputs(case: ConvCase, device: str, seed: int = 0) -> Operands:
    """Standard-normal x and bias, weights over the root of what they sum over; the same for a seed and device."""
    normal, inner = normal_numbers(device, seed, case.dtype), case.channels // case.groups
    x = normal(case.batch, case.channels, case.size, case.size)
    weight = normal(case.out, inner, case.kernel, case.kernel) * (inner * case.kernel**2) ** -0.5
    if case.last:
        x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
    return Operands(case, x, weight, normal(case.out))


def by_torch(i: Operands) -> Call:
    return lambda: torch.nn.functional.conv2d(i.x, i.y, i.bias, **i.case.options)


def by_tilefold(i: Operands) -> Call:
    """The public function as a user calls it."""
    function = ops.conv2d
    return lambda: function(i.x, i.y, i.bias, **i.case.options, method=i.case.method)


def _tried() -> AbstractContextManager[Any]:
    """cuDNN tries its algorithms at the first call."""
    found: AbstractContextManager[Any] = torch.backends.cudnn.flags(enabled=True, benchmark=True)
    return found


MIDDLE, SMALL = ConvCase(32, 256, 14, 256), ConvCase(2, 6, 9, 8)
LAYERS = (
    ConvCase(32, 3, 224, 64, 7, 2, 3),
    ConvCase(32, 64, 56, 64),
    ConvCase(32, 64, 56, 256, 1, padding=0),
    ConvCase(32, 128, 28, 128),
    ConvCase(32, 256, 56, 128, 1, padding=0),
    ConvCase(32, 128, 56, 128, stride=2),
    MIDDLE,
    ConvCase(32, 512, 7, 512),
)
CASES = {
    "full": (
        *LAYERS,
        *(replace(one, last=True) for one in LAYERS),
        *(replace(MIDDLE, method=method) for method in METHODS[1:]),
        replace(MIDDLE, dtype="float16"),
        ConvCase(8, 320, 64, 320, last=True),
        ConvCase(8, 1280, 16, 1280, last=True),
        ConvCase(8, 512, 64, 512, dilation=2, padding=2),
        ConvCase(32, 256, 28, 256, groups=32),
        ConvCase(32, 384, 28, 384, 7, padding=3, groups=384),
    ),
    "quick": (LAYERS[1], LAYERS[2], MIDDLE, replace(MIDDLE, last=True)),
    "tiny": (
        SMALL,
        replace(SMALL, stride=2, kernel=1, padding=0),
        replace(SMALL, dilation=2, padding=2, method="im2col"),
        replace(SMALL, groups=2, last=True, method="implicit"),
        replace(SMALL, dtype="float16", kernel=2, padding=0),
    ),
}
WHAT = ("ops.conv2d", "cuDNN through torch")
CONV = torch_family(
    "conv", CASES, conv_inputs, (by_tilefold, by_torch), WHAT, context=_tried, rotating="inputs", roof=roof_of
)

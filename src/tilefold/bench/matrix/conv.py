"""What `tilefold bench conv` measures: two-dimensional convolutions of networks that are in use."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilefold.bench.choice import of_size
from tilefold.bench.family import Calls, Family, Peer, by_name, each
from tilefold.bench.matrix.product import BYTES, WholeJudge, ours, roof_of

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
        parts = [f"b{self.batch}", f"c{self.channels}", f"s{self.size}", f"o{self.out}", f"r{self.kernel}"]
        parts += [f"stride{self.stride}"] if self.stride > 1 else []
        parts += [f"pad{self.padding}"] if self.padding != self.kernel // 2 else []
        parts += [f"dilation{self.dilation}"] if self.dilation > 1 else []
        parts += [f"groups{self.groups}"] if self.groups > 1 else []
        parts += ["last"] if self.last else []
        parts += [self.method] if self.method != "auto" else []
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        return "_".join(parts)

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


@dataclass(frozen=True)
class ConvInputs:
    case: ConvCase
    x: Tensor
    weight: Tensor
    bias: Tensor


def conv_inputs(case: ConvCase, device: str, seed: int = 0) -> ConvInputs:
    """Standard-normal x and bias, weights over the root of what they sum over; the same for a seed and device."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, case.dtype))

    inner = case.channels // case.groups
    x = normal(case.batch, case.channels, case.size, case.size)
    weight = normal(case.out, inner, case.kernel, case.kernel) * (inner * case.kernel**2) ** -0.5
    if case.last:
        x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
    return ConvInputs(case, x, weight, normal(case.out))


def by_torch(inputs: ConvInputs) -> Callable[[], Tensor]:
    i = inputs
    return lambda: torch.nn.functional.conv2d(i.x, i.weight, i.bias, **i.case.options)


def _prepare_torch(sets: Sequence[ConvInputs]) -> Calls:
    """cuDNN, which tries its algorithms at the first call."""

    def context() -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = torch.backends.cudnn.flags(enabled=True, benchmark=True)
        return found

    return Calls([by_torch(one) for one in sets], context)


def conv_judge(inputs: ConvInputs) -> WholeJudge:
    def compute(dtype: torch.dtype) -> Tensor:
        return by_torch(ConvInputs(inputs.case, *(t.to(dtype) for t in (inputs.x, inputs.weight, inputs.bias))))()

    return WholeJudge(compute, inputs.x.dtype)


def by_tilefold(inputs: ConvInputs) -> Callable[[], Tensor]:
    """The public function as a user calls it."""
    i, function = inputs, ours("conv2d")
    return lambda: function(i.x, i.weight, i.bias, **i.case.options, method=i.case.method)


def conv_cases(size: str = "full") -> tuple[ConvCase, ...]:
    """The cases of a size: "full", "quick" or "tiny".  ValueRangeError for another one."""
    middle, small = ConvCase(32, 256, 14, 256), ConvCase(2, 6, 9, 8)
    layers = (
        ConvCase(32, 3, 224, 64, 7, 2, 3),
        ConvCase(32, 64, 56, 64),
        ConvCase(32, 64, 56, 256, 1, padding=0),
        ConvCase(32, 128, 28, 128),
        ConvCase(32, 256, 56, 128, 1, padding=0),
        ConvCase(32, 128, 56, 128, stride=2),
        middle,
        ConvCase(32, 512, 7, 512),
    )
    full = (
        *layers,
        *(replace(one, last=True) for one in layers),
        *(replace(middle, method=method) for method in METHODS[1:]),
        replace(middle, dtype="float16"),
        ConvCase(8, 320, 64, 320, last=True),
        ConvCase(8, 1280, 16, 1280, last=True),
        ConvCase(8, 512, 64, 512, dilation=2, padding=2),
        ConvCase(32, 256, 28, 256, groups=32),
        ConvCase(32, 384, 28, 384, 7, padding=3, groups=384),
    )
    tiny = (
        small,
        replace(small, stride=2, kernel=1, padding=0),
        replace(small, dilation=2, padding=2, method="im2col"),
        replace(small, groups=2, last=True, method="implicit"),
        replace(small, dtype="float16", kernel=2, padding=0),
    )
    return of_size(
        size, {"full": full, "quick": (layers[1], layers[2], middle, replace(middle, last=True)), "tiny": tiny}
    )


CONV = Family(
    name="conv",
    cases=conv_cases,
    inputs=conv_inputs,
    judge=conv_judge,
    peers=by_name(
        Peer("tilefold", "tilefold", "ops.conv2d", "tilefold", each(by_tilefold)),
        Peer("torch", "torch", "cuDNN through torch", "torch", _prepare_torch),
    ),
    defaults={"cuda": ("torch",), "cpu": ("torch",)},
    record=asdict,
    rotating="inputs",
    roof=roof_of,
)

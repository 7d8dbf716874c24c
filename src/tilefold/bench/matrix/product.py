"""What the families gemm, conv, lowbit and move share: operands, names of cases, the device's roof, judges of whole results."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold import reference
from tilefold.bench.choice import of_size
from tilefold.bench.family import Family, Judge, Peer, by_name, each
from tilefold.bench.judge import verdict_of
from tilefold.ops.device import device_of
from tilefold.reference import Comparison

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
ACTIVATIONS = (None, "relu", "silu", "gelu", "gelu_tanh")
Call = Callable[[], Tensor]


class Operands(NamedTuple):
    """The tensors of a case.  y: the second factor, weight or matrix, a QuantizedTensor of few bits; scale: of y's rows."""

    case: Any
    x: Tensor
    y: Any = None
    bias: Tensor | None = None
    scale: Any = None

    def to(self, dtype: torch.dtype) -> "Operands":
        others = (None if t is None else t.to(dtype) for t in self[2:])
        return Operands(self.case, self.x.to(dtype), *others)


def name_of(*parts: str) -> str:
    """The parts of a case's name that are not empty."""
    return "_".join(filter(None, parts))


def unusual(value: object, usual: object, prefix: str = "") -> str:
    """A part of a case's name: empty for what most cases have."""
    return "" if value == usual else f"{prefix}{value}"


@dataclass(frozen=True)
class WholeJudge:
    """All of a result against `compute` in fp64 on the device, and against what rounding to `dtype` does to it.

    compute: (dtype) -> the result by plain torch, in that dtype."""

    compute: Callable[[torch.dtype], Tensor]
    dtype: torch.dtype

    def verdict(self, out: Tensor) -> Comparison:
        def exact() -> Tensor:
            return self.compute(torch.float64)

        return verdict_of((out,), [(out, exact(), reference.deviating(exact, self.dtype, kept=self.dtype))])


def product_of(x: Tensor, weight: Callable[[torch.dtype], Tensor]) -> WholeJudge:
    """x times the transpose of a weight, given by dtype."""
    return WholeJudge(lambda dtype: x.to(dtype) @ weight(dtype).t(), x.dtype)


def torch_family(
    name: str,
    cases: Mapping[str, tuple[Any, ...]],
    inputs: Callable[[Any, str, int], Operands],
    calls: tuple[Callable[[Operands], Call], Callable[[Operands], Call]],
    what: tuple[str, str],
    judge: Callable[[Operands], Judge] | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> Family:
    """A family of operations beside torch's own, by whose result in fp64 both are judged unless `judge` says otherwise.

    cases: by size.  calls, what: by tilefold and by torch, and in words; context: open while torch's run."""
    own, theirs = calls

    def by_torch(one: Operands) -> WholeJudge:
        return WholeJudge(lambda dtype: theirs(one.to(dtype))(), one.x.dtype)

    peers = by_name(
        Peer("tilefold", "tilefold", what[0], "tilefold", each(own)),
        Peer("torch", "torch", what[1], "torch", each(theirs, context)),
    )
    defaults = {"cuda": ("torch",), "cpu": ("torch",)}
    sizes = lambda size="full": of_size(size, cases)  # noqa: E731
    return Family(name, sizes, inputs, judge or by_torch, peers, defaults, record=asdict, **options)


def activated(x: Tensor, activation: str | None) -> Tensor:
    """An activation by its name, by torch."""
    f = torch.nn.functional
    if activation is None:
        return x
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": f.relu,
        "silu": f.silu,
        "gelu": f.gelu,
        "gelu_tanh": lambda t: f.gelu(t, approximate="tanh"),
    }
    return calls[activation](x)


def roof_of(case: Any, device: str) -> float:
    """Operations a second that the device does in the case's dtype, measured or by its datasheet, of bytes twice those of
    bfloat16; 0 on the CPU."""
    if device != "cuda":
        return 0.0
    machine = device_of(torch.device("cuda"))
    if case.dtype == "float8_e4m3fn" or hasattr(case, "kind"):
        return 2 * machine.matmul_rate("bfloat16")
    return machine.matmul_rate(case.dtype)

"""What the families gemm, conv, lowbit and move share: sizes of numbers, the device's roof, a judge over whole results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold import ops, reference
from tilefold.bench.judge import verdict_of
from tilefold.errors import Unsupported
from tilefold.ops.device import device_of
from tilefold.reference import Comparison

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
ACTIVATIONS = (None, "relu", "silu", "gelu", "gelu_tanh")


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

    def compute(dtype: torch.dtype) -> Tensor:
        return x.to(dtype) @ weight(dtype).t()

    return WholeJudge(compute, x.dtype)


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
    bfloat16; 0 in the interpreter."""
    if device != "cuda":
        return 0.0
    machine = device_of(torch.device("cuda"))
    if case.dtype == "float8_e4m3fn" or hasattr(case, "kind"):
        return 2 * machine.matmul_rate("bfloat16")
    return machine.matmul_rate(case.dtype)


def ours(name: str) -> Any:
    """An operation of the collection.  Unsupported where this build does not have it."""
    if name not in ops.COLLECTION:
        raise Unsupported(f"tilefold.ops.{name} is not in this build")
    return getattr(ops, name)

"""What `tilefold bench lowbit` measures: activations of 16 bits times weights of 8, 4, 3 and 2; of 8 times 8 (matrix.eight)."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilefold.bench.choice import of_size
from tilefold.bench.family import Calls, Family, Peer, by_name, each
from tilefold.bench.matrix.eight import (
    EightCase,
    EightInputs,
    eight_by_cublas,
    eight_by_tilefold,
    eight_inputs,
    eight_judge,
    prepare_scaled,
    refuses_scaled,
)
from tilefold.bench.matrix.lowbit_peers import LIBRARIES
from tilefold.bench.matrix.product import BYTES, WholeJudge, ours, product_of, roof_of
from tilefold.quant import QuantizedTensor, quantize_weight


@dataclass(frozen=True, slots=True)
class LowbitCase:
    """x [M, K] times the transpose of a weight [N, K] in few bits; group 0: a scale a row."""

    m: int
    n: int = 8192
    k: int = 8192
    bits: int = 4
    group: int = 128
    scheme: str = "asymmetric"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Such as "4bit_m1_n8192_k8192_g128" or "2bit_m16_n8192_k8192_row_symmetric"."""
        parts = [f"{self.bits}bit", f"m{self.m}", f"n{self.n}", f"k{self.k}", f"g{self.group}" if self.group else "row"]
        parts += ["symmetric"] if self.scheme == "symmetric" else []
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        return "_".join(parts)

    @property
    def bytes(self) -> int:
        """Codes, scales in the activations' dtype, zero points of a byte, activations and results, each once, without padding."""
        groups = -(-self.k // self.group) if self.group else 1
        scales = groups * self.n * (BYTES[self.dtype] + (1 if self.scheme == "asymmetric" else 0))
        return self.n * self.k * self.bits // 8 + scales + BYTES[self.dtype] * self.m * (self.n + self.k)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class LowbitInputs:
    case: LowbitCase
    x: Tensor
    weight: QuantizedTensor


def family_inputs(case: LowbitCase | EightCase, device: str, seed: int = 0) -> LowbitInputs | EightInputs:
    """Inputs of either kind of case."""
    return eight_inputs(case, device, seed) if isinstance(case, EightCase) else lowbit_inputs(case, device, seed)


def lowbit_inputs(case: LowbitCase, device: str, seed: int = 0) -> LowbitInputs:
    """Standard-normal x, and a normal weight over the root of K, quantised; the same for a seed and device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    x = torch.randn(case.m, case.k, generator=generator, device=device, dtype=dtype)
    w = torch.randn(case.n, case.k, generator=generator, device=device, dtype=dtype) * case.k**-0.5
    return LowbitInputs(case, x, quantize_weight(w, case.bits, case.group or None, case.scheme))


def lowbit_judge(inputs: LowbitInputs | EightInputs) -> WholeJudge:
    if isinstance(inputs, EightInputs):
        return eight_judge(inputs)
    return product_of(inputs.x, inputs.weight.dequantize)


def by_tilefold(inputs: LowbitInputs | EightInputs) -> Callable[[], Tensor]:
    """The public function as a user calls it."""
    if isinstance(inputs, EightInputs):
        return eight_by_tilefold(inputs)
    i, function = inputs, ours("lowbit_matmul")
    return lambda: function(i.x, i.weight)


def by_cublas(inputs: LowbitInputs) -> Callable[[], Tensor]:
    """The dequantised weight in 16 bits, as torch multiplies by it."""
    x, weight = inputs.x, inputs.weight.dequantize(inputs.x.dtype)
    return lambda: torch.nn.functional.linear(x, weight)


def prepare_cublas(sets: Sequence[Any]) -> Calls:
    """The same of all sets of a case."""
    return eight_by_cublas(sets) if isinstance(sets[0], EightInputs) else each(by_cublas)(sets)


def lowbit_cases(size: str = "full") -> tuple[LowbitCase | EightCase, ...]:
    """The cases of a size: "full", "quick" or "tiny".  ValueRangeError for another one."""
    one, small = LowbitCase(1), LowbitCase(3, 72, 160, group=32)
    layers = (
        (4608, 3584),
        (3584, 3584),
        (37888, 3584),
        (3584, 18944),
        (152064, 3584),
    )  # of Qwen2-7B, joined as examples do
    full: tuple[LowbitCase | EightCase, ...] = (
        *(LowbitCase(m) for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)),
        *(LowbitCase(m, bits=bits) for bits in (8, 3, 2) for m in (1, 16, 64)),
        *(replace(one, group=group) for group in (0, 32, 64)),
        *(LowbitCase(m, scheme="symmetric", dtype="float16") for m in (1, 16)),
        *(LowbitCase(m, n, k) for n, k in layers for m in (1, 16)),
        *(EightCase(m, kind=kind) for kind in ("int8", "e4m3") for m in (1, 16, 64, 256, 1024, 4096)),
    )
    tiny: tuple[LowbitCase | EightCase, ...] = (
        *(replace(small, bits=bits) for bits in (8, 4, 3, 2)),
        replace(small, scheme="symmetric", dtype="float16"),
        replace(small, m=40, group=0),
        EightCase(3, 72, 160),
        EightCase(5, 40, 100, kind="e4m3", dtype="float16"),
    )
    quick = (one, LowbitCase(16), LowbitCase(64), LowbitCase(1, bits=8), LowbitCase(1, bits=2))
    return of_size(size, {"full": full, "quick": quick, "tiny": tiny})


PEERS = (
    Peer("tilefold", "tilefold", "ops.lowbit_matmul, ops.matmul_w8a8", "tilefold", each(by_tilefold)),
    Peer("cublas", "cuBLAS", "torch, the dequantised weight in 16 bits", "torch", prepare_cublas),
    Peer(
        "scaled_mm",
        "torch, 8 bits",
        "torch._scaled_mm, torch._int_mm of given codes",
        "torch",
        prepare_scaled,
        refuses_scaled,
    ),
    *LIBRARIES,
)
LOWBIT = Family(
    name="lowbit",
    cases=lowbit_cases,
    inputs=family_inputs,
    judge=lowbit_judge,
    peers=by_name(*PEERS),
    defaults={"cuda": tuple(peer.name for peer in PEERS[1:]), "cpu": ("cublas",)},
    record=asdict,
    rotating="weights",
    roof=roof_of,
)

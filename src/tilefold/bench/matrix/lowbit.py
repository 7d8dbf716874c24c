"""What `tilefold bench lowbit` measures: activations of 16 bits times weights of 8, 4, 3 and 2; of 8 times 8 (matrix.eight)."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from tilefold import ops
from tilefold.bench.choice import of_size
from tilefold.bench.family import Family, Peer, by_name, each, normal_numbers
from tilefold.bench.matrix import eight
from tilefold.bench.matrix.eight import EightCase
from tilefold.bench.matrix.lowbit_peers import LIBRARIES, by_own_weight
from tilefold.bench.matrix.product import BYTES, Call, Operands, WholeJudge, name_of, product_of, roof_of, unusual
from tilefold.quant import quantize_weight


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
        group = f"g{self.group}" if self.group else "row"
        rest = unusual(self.scheme, "asymmetric"), unusual(self.dtype, "bfloat16")
        return name_of(f"{self.bits}bit_m{self.m}_n{self.n}_k{self.k}", group, *rest)

    @property
    def bytes(self) -> int:
        """Codes, scales in the activations' dtype, zero points of a byte, activations and results, each once, without padding."""
        groups = -(-self.k // self.group) if self.group else 1
        scales = groups * self.n * (BYTES[self.dtype] + (1 if self.scheme == "asymmetric" else 0))
        return self.n * self.k * self.bits // 8 + scales + BYTES[self.dtype] * self.m * (self.n + self.k)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def lowbit_inputs(case: LowbitCase | EightCase, device: str, seed: int = 0) -> Operands:
    """Standard-normal x, and a normal weight over the root of K, quantised; the same for a seed and device."""
    if isinstance(case, EightCase):
        return eight.eight_inputs(case, device, seed)
    normal = normal_numbers(device, seed, case.dtype)
    x, w = normal(case.m, case.k), normal(case.n, case.k) * case.k**-0.5
    return Operands(case, x, quantize_weight(w, case.bits, case.group or None, case.scheme))


def lowbit_judge(inputs: Operands) -> WholeJudge:
    if isinstance(inputs.case, EightCase):
        return eight.eight_judge(inputs)
    return product_of(inputs.x, inputs.y.dequantize)


def by_tilefold(i: Operands) -> Call:
    """The public function as a user calls it; with weights in 8 bits and a scale a row it quantises x."""
    if i.scale is not None:
        eight_bits = ops.matmul_w8a8
        return lambda: eight_bits(i.x, i.y, i.scale)
    function = ops.lowbit_matmul
    return lambda: function(i.x, i.y)


def by_cublas(i: Operands) -> tuple[Call, Callable[[torch.dtype], Tensor]]:
    """The dequantised weight in 16 bits, as torch multiplies by it."""
    x = i.x
    wide: Tensor = i.y.dequantize(x.dtype) if i.scale is None else i.y.double() * i.scale.double()[:, None]
    weight = wide.to(x.dtype)
    return (lambda: torch.nn.functional.linear(x, weight)), weight.to


ONE, SMALL = LowbitCase(1), LowbitCase(3, 72, 160, group=32)
QWEN2 = (
    (4608, 3584),
    (3584, 3584),
    (37888, 3584),
    (3584, 18944),
    (152064, 3584),
)  # layers of 7B, joined as examples do
CASES: dict[str, tuple[LowbitCase | EightCase, ...]] = {
    "full": (
        *(LowbitCase(m) for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)),
        *(LowbitCase(m, bits=bits) for bits in (8, 3, 2) for m in (1, 16, 64)),
        *(replace(ONE, group=group) for group in (0, 32, 64)),
        *(LowbitCase(m, scheme="symmetric", dtype="float16") for m in (1, 16)),
        *(LowbitCase(m, n, k) for n, k in QWEN2 for m in (1, 16)),
        *(EightCase(m, kind=kind) for kind in ("int8", "e4m3") for m in (1, 16, 64, 256, 1024, 4096)),
    ),
    "quick": (ONE, LowbitCase(16), LowbitCase(64), LowbitCase(1, bits=8), LowbitCase(1, bits=2)),
    "tiny": (
        *(replace(SMALL, bits=bits) for bits in (8, 4, 3, 2)),
        replace(SMALL, scheme="symmetric", dtype="float16"),
        replace(SMALL, m=40, group=0),
        EightCase(3, 72, 160),
        EightCase(5, 40, 100, kind="e4m3", dtype="float16"),
    ),
}
GIVEN = "torch._scaled_mm, torch._int_mm of given codes"
PEERS = (
    Peer("tilefold", "tilefold", "ops.lowbit_matmul, ops.matmul_w8a8", "tilefold", each(by_tilefold)),
    Peer("cublas", "cuBLAS", "torch, the dequantised weight in 16 bits", "torch", by_own_weight(by_cublas)),
    Peer("scaled_mm", "torch, 8 bits", GIVEN, "torch", each(eight.scaled), eight.refuses_scaled),
    *LIBRARIES,
)
LOWBIT = Family(
    name="lowbit",
    cases=lambda size: of_size(size, CASES),
    inputs=lowbit_inputs,
    judge=lowbit_judge,
    peers=by_name(*PEERS),
    defaults={"cuda": tuple(peer.name for peer in PEERS[1:]), "cpu": ("cublas",)},
    record=asdict,
    roof=roof_of,
)

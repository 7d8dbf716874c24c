"""What `tilefold bench gemm` measures: products of matrices, plain and batched, and what is fused behind them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilefold import ops
from tilefold.bench.family import normal_numbers
from tilefold.bench.matrix.product import (
    ACTIVATIONS,
    BYTES,
    Call,
    Operands,
    WholeJudge,
    activated,
    name_of,
    roof_of,
    torch_family,
    unusual,
)

EIGHT = "float8_e4m3fn"
SIZES = {**BYTES, EIGHT: 1}


@dataclass(frozen=True, slots=True)
class GemmCase:
    """a [M, K] or [batch, M, K] times b [K, N] or [batch, K, N]; batch 0 is `ops.matmul`, more `ops.bmm`.

    shared: "a" or "b" has no batch of its own.  transposed: b is a view of [N, K], as weights lie.  bias: over N, "" or "n", or
    "batch".  activation: as the op names it."""

    m: int
    n: int
    k: int
    batch: int = 0
    shared: str = ""
    transposed: bool = False
    bias: str = ""
    activation: str | None = None
    order: str = "grouped"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Such as "m4096_n4096_k4096_nt_bias_gelu" or "b32_m512_n512_k512_sharedb"."""
        shape = unusual(self.batch, 0, "b"), f"m{self.m}_n{self.n}_k{self.k}", "nt" * self.transposed
        after = {"": "", "n": "bias", "batch": "biasbatch"}[self.bias], self.activation or ""
        rest = unusual(self.order, "grouped"), unusual(self.dtype, "bfloat16")
        return name_of(*shape, unusual(self.shared, "", "shared"), *after, *rest)

    @property
    def bytes(self) -> int:
        """Both factors, the bias and the product (of bytes in bfloat16), each once."""
        many = max(1, self.batch)
        a = self.m * self.k * (1 if self.shared == "a" else many)
        b = self.k * self.n * (1 if self.shared == "b" else many)
        bias = {"": 0, "n": self.n, "batch": self.batch}[self.bias]
        written = many * self.m * self.n * (2 if self.dtype == EIGHT else BYTES[self.dtype])
        return SIZES[self.dtype] * (a + b + bias) + written

    @property
    def flops(self) -> int:
        """2 M N K for each product."""
        return 2 * max(1, self.batch) * self.m * self.n * self.k


def gemm_inputs(case: GemmCase, device: str, seed: int = 0) -> Operands:
    """Standard-normal factors, b over the root of K, so that products are of size 1; the same for a seed and device."""
    normal = normal_numbers(device, seed, "bfloat16" if case.dtype == EIGHT else case.dtype)

    def batched(name: str) -> tuple[int, ...]:
        return (case.batch,) if case.batch and case.shared != name else ()

    a = normal(*batched("a"), case.m, case.k)
    inner = (case.n, case.k) if case.transposed else (case.k, case.n)
    b = normal(*batched("b"), *inner) * case.k**-0.5
    shapes = {"n": (case.n,), "batch": (case.batch, 1, 1)}
    bias = normal(*shapes[case.bias]) if case.bias else None
    if case.dtype == EIGHT:  # of b numbers of size 1, which e4m3 has three bits for
        a, b = a.to(torch.float8_e4m3fn), (b * case.k**0.5).to(torch.float8_e4m3fn)
    return Operands(case, a, b.mT if case.transposed else b, bias)


def by_torch(i: Operands) -> Call:
    """matmul, or addmm where the bias is over N, then the activation as a call of its own; bytes by _scaled_mm."""
    if i.x.dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=i.x.device)
        return lambda: torch._scaled_mm(i.x, i.y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    def call() -> Tensor:
        if i.bias is not None and not i.case.batch:
            return activated(torch.addmm(i.bias, i.x, i.y), i.case.activation)
        out = torch.matmul(i.x, i.y)
        return activated(out if i.bias is None else out + i.bias, i.case.activation)

    return call


def gemm_judge(inputs: Operands) -> WholeJudge:
    """Bias and activation in the dtype of the product: plain torch rounds after each."""
    dtype = torch.bfloat16 if inputs.case.dtype == EIGHT else inputs.x.dtype
    return WholeJudge(lambda wide: by_torch(inputs.to(wide))(), dtype)


def by_tilefold(i: Operands) -> Call:
    """The public function as a user calls it."""
    function: Any = ops.bmm if i.case.batch else ops.matmul
    options = {"bias": i.bias, "activation": i.case.activation, "order": i.case.order}
    return lambda: function(i.x, i.y, **options)


SQUARE, SMALL, MANY = GemmCase(4096, 4096, 4096), GemmCase(70, 40, 50), GemmCase(512, 512, 512, batch=32)
FEW, BATCHED = GemmCase(16, 8192, 8192, transposed=True), GemmCase(20, 33, 17, batch=3)
CASES = {
    "full": (
        *(GemmCase(n, n, n) for n in (512, 1024, 2048, 4096, 8192)),
        replace(SQUARE, transposed=True),
        replace(SQUARE, order="plain"),
        replace(SQUARE, dtype="float16"),
        GemmCase(4095, 4097, 4100),
        *(replace(FEW, m=m) for m in (1, 16, 64, 256)),
        GemmCase(4096, 18944, 3584, transposed=True),
        GemmCase(4096, 3584, 18944, transposed=True),
        *(replace(SQUARE, bias="n", activation=each_one) for each_one in ACTIVATIONS),
        MANY,
        replace(MANY, shared="b", bias="n", activation="gelu"),
        replace(MANY, shared="a", bias="batch", activation="relu"),
        GemmCase(128, 128, 64, batch=1024),
        GemmCase(2048, 2048, 128, batch=16),
        *(GemmCase(n, n, n, transposed=True, dtype=EIGHT) for n in (4096, 8192)),
    ),
    "quick": (SQUARE, FEW, replace(SQUARE, bias="n", activation="gelu"), MANY),
    "tiny": (
        SMALL,
        replace(SMALL, transposed=True, bias="n", activation="gelu"),
        replace(SMALL, order="plain", dtype="float16"),
        BATCHED,
        replace(BATCHED, shared="b", bias="n", activation="silu"),
        replace(BATCHED, shared="a", bias="batch", activation="relu"),
    ),
}
CALLS, WHAT = (by_tilefold, by_torch), ("ops.matmul, ops.bmm", "cuBLAS through torch")
GEMM = torch_family("gemm", CASES, gemm_inputs, CALLS, WHAT, gemm_judge, rotating="factors", roof=roof_of)

"""What `tilefold bench gemm` measures: products of matrices, plain and batched, and what is fused behind them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilefold.bench.choice import of_size
from tilefold.bench.family import Family, Peer, by_name, each
from tilefold.bench.matrix.product import ACTIVATIONS, BYTES, WholeJudge, activated, ours, roof_of

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
        parts = [f"b{self.batch}"] if self.batch else []
        parts += [f"m{self.m}", f"n{self.n}", f"k{self.k}"]
        parts += ["nt"] if self.transposed else []
        parts += [f"shared{self.shared}"] if self.shared else []
        parts += [{"n": "bias", "batch": "biasbatch"}[self.bias]] if self.bias else []
        parts += [self.activation] if self.activation else []
        parts += ["plain"] if self.order == "plain" else []
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        return "_".join(parts)

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


@dataclass(frozen=True)
class GemmInputs:
    case: GemmCase
    a: Tensor
    b: Tensor
    bias: Tensor | None


def gemm_inputs(case: GemmCase, device: str, seed: int = 0) -> GemmInputs:
    """Standard-normal factors, b over the root of K, so that products are of size 1; the same for a seed and device."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        made = torch.bfloat16 if case.dtype == EIGHT else getattr(torch, case.dtype)
        return torch.randn(shape, generator=generator, device=device, dtype=made)

    def batched(name: str) -> tuple[int, ...]:
        return (case.batch,) if case.batch and case.shared != name else ()

    a = normal(*batched("a"), case.m, case.k)
    inner = (case.n, case.k) if case.transposed else (case.k, case.n)
    b = normal(*batched("b"), *inner) * case.k**-0.5
    shapes = {"n": (case.n,), "batch": (case.batch, 1, 1)}
    bias = normal(*shapes[case.bias]) if case.bias else None
    if case.dtype == EIGHT:  # of b numbers of size 1, which e4m3 has three bits for
        a, b = a.to(torch.float8_e4m3fn), (b * case.k**0.5).to(torch.float8_e4m3fn)
    return GemmInputs(case, a, b.mT if case.transposed else b, bias)


def by_torch(inputs: GemmInputs) -> Callable[[], Tensor]:
    """matmul, or addmm where the bias is over N, then the activation as a call of its own; bytes by _scaled_mm."""
    i = inputs
    if i.a.dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=i.a.device)
        return lambda: torch._scaled_mm(i.a, i.b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    def call() -> Tensor:
        if i.bias is not None and not i.case.batch:
            return activated(torch.addmm(i.bias, i.a, i.b), i.case.activation)
        out = torch.matmul(i.a, i.b)
        return activated(out if i.bias is None else out + i.bias, i.case.activation)

    return call


def gemm_judge(inputs: GemmInputs) -> WholeJudge:
    """Bias and activation in the dtype of the product: plain torch rounds after each."""

    def compute(dtype: torch.dtype) -> Tensor:
        bias = None if inputs.bias is None else inputs.bias.to(dtype)
        return by_torch(GemmInputs(inputs.case, inputs.a.to(dtype), inputs.b.to(dtype), bias))()

    return WholeJudge(compute, torch.bfloat16 if inputs.case.dtype == EIGHT else inputs.a.dtype)


def by_tilefold(inputs: GemmInputs) -> Callable[[], Tensor]:
    """The public function as a user calls it."""
    i, case = inputs, inputs.case
    function: Any = ours("bmm" if case.batch else "matmul")
    options = {"bias": i.bias, "activation": case.activation, "order": case.order}
    return lambda: function(i.a, i.b, **options)


def gemm_cases(size: str = "full") -> tuple[GemmCase, ...]:
    """The cases of a size: "full", "quick" or "tiny".  ValueRangeError for another one."""
    square, small = GemmCase(4096, 4096, 4096), GemmCase(70, 40, 50)
    few = tuple(GemmCase(m, 8192, 8192, transposed=True) for m in (1, 16, 64, 256))
    many = GemmCase(512, 512, 512, batch=32)
    quick = (square, GemmCase(16, 8192, 8192, transposed=True), replace(square, bias="n", activation="gelu"), many)
    full = (
        *(GemmCase(n, n, n) for n in (512, 1024, 2048, 4096, 8192)),
        replace(square, transposed=True),
        replace(square, order="plain"),
        replace(square, dtype="float16"),
        GemmCase(4095, 4097, 4100),
        *few,
        GemmCase(4096, 18944, 3584, transposed=True),
        GemmCase(4096, 3584, 18944, transposed=True),
        *(replace(square, bias="n", activation=each_one) for each_one in ACTIVATIONS),
        many,
        replace(many, shared="b", bias="n", activation="gelu"),
        replace(many, shared="a", bias="batch", activation="relu"),
        GemmCase(128, 128, 64, batch=1024),
        GemmCase(2048, 2048, 128, batch=16),
        *(GemmCase(n, n, n, transposed=True, dtype=EIGHT) for n in (4096, 8192)),
    )
    tiny = (
        small,
        replace(small, transposed=True, bias="n", activation="gelu"),
        replace(small, order="plain", dtype="float16"),
        GemmCase(20, 33, 17, batch=3),
        GemmCase(20, 33, 17, batch=3, shared="b", bias="n", activation="silu"),
        GemmCase(20, 33, 17, batch=3, shared="a", bias="batch", activation="relu"),
    )
    return of_size(size, {"full": full, "quick": quick, "tiny": tiny})


GEMM = Family(
    name="gemm",
    cases=gemm_cases,
    inputs=gemm_inputs,
    judge=gemm_judge,
    peers=by_name(
        Peer("tilefold", "tilefold", "ops.matmul, ops.bmm", "tilefold", each(by_tilefold)),
        Peer("torch", "torch", "cuBLAS through torch", "torch", each(by_torch)),
    ),
    defaults={"cuda": ("torch",), "cpu": ("torch",)},
    record=asdict,
    rotating="factors",
    roof=roof_of,
)

"""Cases of `tilefold bench lowbit` with activations in 8 bits: what is measured, and beside what."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold import reference
from tilefold.bench.family import normal_numbers
from tilefold.bench.matrix.product import BYTES, Call, Operands, WholeJudge, name_of, unusual

KINDS = {"int8": "int8", "e4m3": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class EightCase:
    """x [M, K], quantised by rows on the way, times the transpose of a weight [N, K] in the same 8 bits, a scale a row."""

    m: int
    n: int = 8192
    k: int = 8192
    kind: str = "int8"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Such as "w8a8_int8_m1_n8192_k8192"."""
        return name_of("w8a8", f"{self.kind}_m{self.m}_n{self.n}_k{self.k}", unusual(self.dtype, "bfloat16"))

    @property
    def bytes(self) -> int:
        """Weights and their scales, activations, their codes written and read, results, each once."""
        return self.n * self.k + 4 * self.n + BYTES[self.dtype] * self.m * (self.n + self.k) + 2 * self.m * self.k

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def eight_inputs(case: EightCase, device: str, seed: int) -> Operands:
    """Standard-normal x, and a normal weight over the root of K, rounded by rows; the same for a seed and device."""
    normal = normal_numbers(device, seed, case.dtype)
    x, w = normal(case.m, case.k), normal(case.n, case.k).float() * case.k**-0.5
    codes, scale = _rounded(w, getattr(torch, KINDS[case.kind]))
    return Operands(case, x, codes, scale=scale)


def _rounded(w: Tensor, kind: Any) -> tuple[Tensor, Tensor]:
    """Codes of the rows of w and their scales."""
    scale = w.float().abs().amax(1) / (127.0 if kind == torch.int8 else 448.0)
    codes = w.float() / scale[:, None]
    return (codes.round() if kind == torch.int8 else codes).to(kind), scale


def eight_judge(inputs: Operands) -> WholeJudge:
    """As `matmul_w8a8` defines it: of x's codes."""

    def compute(dtype: torch.dtype) -> Tensor:
        wide = dtype if dtype == torch.float64 else torch.float32
        return reference.matmul_w8a8(inputs.x, inputs.y, inputs.scale, None, wide).to(dtype)

    return WholeJudge(compute, inputs.x.dtype)


def scaled(i: Operands) -> Call:
    """torch's own products of codes, which it is given: torch._scaled_mm with scales of rows, or torch._int_mm and the scales."""
    codes, rows = _rounded(i.x, i.y.dtype)
    w, of_x, of_w = i.y.t(), rows[:, None].contiguous(), i.scale[None, :].contiguous()
    if i.case.kind == "int8":
        return lambda: (torch._int_mm(codes, w) * of_x * of_w).to(i.x.dtype)
    return lambda: torch._scaled_mm(codes, w, scale_a=of_x, scale_b=of_w, out_dtype=i.x.dtype)


def refuses_scaled(case: Any, device: str) -> str | None:
    """Why torch has no such product, or None."""
    if not isinstance(case, EightCase):
        return "multiplies 8-bit activations only"
    if device != "cuda":
        return "needs a GPU"
    if case.kind == "int8" and case.m <= 16:
        return "torch._int_mm takes more than 16 rows"
    return "takes N and K in multiples of 16" if case.n % 16 or case.k % 16 else None

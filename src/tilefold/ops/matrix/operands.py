"""The tensors of a product as its kernels see them: batches and layouts as strides, and what TMA can read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..bound import strides_named

if TYPE_CHECKING:
    from ...plan.matrix.matmul import MatmulPlan

BIAS = {"none": 0, "columns": 1, "rows": 2, "full": 3}  # of device.epilogue
TOO_LONG = 1 << 31  # elements of a dimension, for TMA and for 32-bit offsets
GIVEN_TO_PRODUCTS = ("A", "B", "Out", "Pre", "Bias", "ScaleA", "ScaleB")
"""What a call gives to every kernel of products."""
Scales = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(slots=True)
class Operands:
    """Views of a call's tensors: a [batch or 1, m, k], b [batch or 1, k, n], bias as strides (batch, m, n) or None."""

    a: torch.Tensor
    b: torch.Tensor
    bias: tuple[int, int, int] | None
    batch: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.a.shape[1], self.b.shape[2], self.a.shape[2]


def operands(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, fold: bool) -> Operands:
    """Batches as strides.  A batch over which B, bias and layout agree is more rows of one product; one that is summed over, and
    lies as a longer k would, is a longer k."""
    a3, b3 = (t if t.dim() == 3 else t.unsqueeze(0) for t in (a, b))
    batch = max(a.shape[0] if a.dim() == 3 else 1, b.shape[0] if b.dim() == 3 else 1)
    if (a.dim() == 3 and not a.shape[0]) or (b.dim() == 3 and not b.shape[0]):
        batch = 0
    steps = None if bias is None else bias_strides(bias)
    if fold and _continues(a3, 2) and _continues(b3, 1):
        return Operands(_joined(a3, 2), _joined(b3, 1), steps, 1)
    rows = a3.shape[1]
    if (
        not fold
        and a.dim() == 3
        and b.dim() == 2
        and _continues(a3, 1)
        and (steps is None or steps[0] == rows * steps[1])
    ):
        return Operands(_joined(a3, 1), b3, None if steps is None else (0, steps[1], steps[2]), 1)
    return Operands(a3, b3, steps, batch)


def _continues(t: torch.Tensor, axis: int) -> bool:
    """Whether the batch goes on where dimension `axis` ends."""
    return t.shape[0] == 1 or (t.shape[axis] > 0 and t.stride(0) == t.shape[axis] * t.stride(axis))


def _joined(t: torch.Tensor, axis: int) -> torch.Tensor:
    """[1, .., ..] with the batch in front of dimension `axis`."""
    shape, strides = [1, *t.shape[1:]], [0, *t.stride()[1:]]
    shape[axis] *= t.shape[0]
    return t.as_strided(shape, strides)


def bias_strides(bias: torch.Tensor) -> tuple[int, int, int]:
    """Strides of a bias by batch entry, row and column, 0 where one number serves all."""
    missing = 3 - bias.dim()
    found = [0] * missing + [0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True)]
    return found[0], found[1], found[2]


def major(t: torch.Tensor, row: str, column: str) -> str:
    """Which dimension lies side by side; the last where both do."""
    return column if t.stride(2) == 1 or (t.shape[2] == 1 and t.stride(1) != 1) else row


def boxable(t: torch.Tensor) -> bool:
    """Whether TMA can read t [batch, rows, columns], one of whose last two dimensions lies side by side."""
    step = 16 // t.element_size()
    across = 1 if t.stride(2) == 1 or t.shape[2] == 1 else 2
    strides = [t.stride(d) for d in (0, across) if t.shape[d] > 1]
    fits = all(s > 0 and s % step == 0 and s * t.element_size() < 1 << 40 for s in strides)
    return t.data_ptr() % 16 == 0 and fits and t.numel() > 0 and max(t.shape) < TOO_LONG


def values_of(x: Operands, plan: "MatmulPlan", scales: Scales, tiles: tuple[int, int]) -> dict[str, Any]:
    """Lengths and strides by the names that all kernels of products share; tiles: of the result, along m and n."""
    m, n, k = x.sizes
    return {
        "m": m,
        "n": n,
        "k": k,
        "tiles_m": tiles[0],
        "tiles_n": tiles[1],
        "splits": plan.splits,
        **strides_named("o", (m * n, n, plan.problem.results * m * n), "bms"),
        **strides_named("c", x.bias or (0, 0, 0), "bmn"),
        **strides_named("s", tuple(0 if s is None or s.numel() == 1 else s.stride(0) for s in scales), "ab"),
    }

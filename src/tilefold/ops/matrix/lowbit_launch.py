"""The launches behind `lowbit_matmul`: each bound once for a weight and a kind of activations."""

from typing import TYPE_CHECKING, Any

import torch

from ...quant import QuantizedTensor
from ..device import device_of, interpreting
from ..records import remember

if TYPE_CHECKING:
    from ...plan.matrix.lowbit import LowbitPlan

__all__ = ["call", "dequantise", "plan_of"]


def dequantise(weight: QuantizedTensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """The weight [N, K] in `dtype`, columns as stored: the bits of `weight.dequantize(dtype)` but for the order."""
    n, k = weight.shape
    if out is None:
        out = torch.empty(n, k, dtype=dtype, device=weight.device)
    key = "dequantise", _facts(weight), dtype, out.stride(0)
    launch, tail = _CACHE.get(key) or remember(_CACHE, key, _bind_dequantise(weight, out))
    launch((weight.packed, weight.packed_high, weight.scales, weight.zeros, weight.table, out, *tail))
    return out


_CACHE: dict[Any, Any] = {}


def _facts(weight: QuantizedTensor) -> Any:
    """What of a weight decides launches and compilations."""
    zeros = None if weight.zeros is None else weight.zeros.dtype
    table, perm, one = weight.table is not None, weight.perm is not None, weight.scales.numel() == 1
    return weight.shape, weight.bits, weight.group, weight.scales.dtype, one, zeros, table, perm, weight.device


def _scale_strides(weight: QuantizedTensor) -> tuple[int, int]:
    """Of scales and zeros, group and row; 0 where one holds for all."""
    return (0, 0) if weight.scales.numel() == 1 else (weight.shape[0], 1)


def _bind_dequantise(weight: QuantizedTensor, out: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
    from ...kernels.matrix.lowbit_dequantise import lowbit_dequantise
    from ..launch import Launch

    if weight.device.type != "meta":
        device_of(weight.device)
    n, k = weight.shape
    blocks, rows = weight.packed.shape[:2]
    slabs = {8: 2, 4: 4, 3: 8, 2: 8}[weight.bits]
    block_n = 64
    constants = {
        "BITS": weight.bits,
        "EMULATE": interpreting(),
        "SLABS": slabs,
        "WHOLE": weight.group % 32 == 0 or weight.groups == 1,
        "BLOCK_N": block_n,
    }
    tail = (n, k, rows, weight.group, weight.groups, blocks, *_scale_strides(weight), out.stride(0))
    grid = (blocks * -(-n // block_n), 1, 1)
    return Launch(lowbit_dequantise, grid, constants, {"num_warps": 4}, weight.device.index or 0), tail


# ---------------------------------------------------------------- products


def call(
    x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None, deterministic: bool, plan: "LowbitPlan | None"
) -> torch.Tensor:
    """x [..., K] times the weight's transpose, plus bias, by a plan or the planner's own."""
    from .lowbit import check

    check(x, weight, bias)
    device_of(x.device)
    if weight.perm is not None:
        x = x.index_select(x.dim() - 1, weight.perm)
    return torch.nn.functional.linear(x, dequantise(weight, x.dtype), bias)


def plan_of(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None, deterministic: bool) -> "LowbitPlan":
    """The planner's plan for a call."""
    from ...plan.matrix.lowbit import plan_lowbit

    return plan_lowbit(problem_of(x, weight, deterministic), device_of(x.device))


def problem_of(x: torch.Tensor, weight: QuantizedTensor, deterministic: bool) -> Any:
    """What the planner is told of a call."""
    from ...plan.matrix.lowbit import LowbitProblem

    n, k = weight.shape
    zeros = "none"
    if weight.table is not None:
        zeros = "table"
    elif weight.zeros is not None:
        zeros = "integer" if weight.zeros.dtype == torch.uint8 else "float"
    rows = x.numel() // k
    aligned = x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    dtype, scales = (str(t.dtype).removeprefix("torch.") for t in (x, weight.scales))
    return LowbitProblem(rows, n, k, weight.bits, weight.group, zeros, dtype, scales, aligned, deterministic)

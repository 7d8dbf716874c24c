"""What the bindings of both Gluon kernels of the backward pass share: descriptors and statistics."""

from typing import TYPE_CHECKING, Any

import torch

from ...types import Layout
from ..dense.attention_parts import head_strides
from ..hopper import box_of

if TYPE_CHECKING:
    from ..launch import Box

__all__ = [
    "STATISTICS",
    "UNIT",
    "kept_box",
    "side_boxes",
    "statistics_arguments",
    "statistics_box",
    "statistics_launch",
]

UNIT = 64  # tokens of a tile
STATISTICS = 2 * UNIT  # fp32 numbers of a tile of queries


def side_boxes(
    q: torch.Tensor, dout: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout
) -> "tuple[Box, ...]":
    """The descriptors of q, dout, k and v, in the kernels' order."""
    return tuple(box_of(t, layout, UNIT) for t in (q, dout, k, v))


def statistics_box(rows: int, numbers: int = STATISTICS) -> "Box":
    """Of fp32 [rows * numbers], a row at a time."""
    from ...kernels.hopper.gluon import TensorDescriptor, gl
    from ..launch import Box

    t = torch.empty(rows * numbers, dtype=torch.float32, device="meta")
    return Box(t, [t.numel()], [1], [numbers], TensorDescriptor, gl.NVMMASharedLayout(0, 32, 1))


def kept_box(rows: int, dtype: torch.dtype) -> "Box":
    """Of room for dS [rows, 64], a tile of 64 rows at a time."""
    from ...kernels.hopper.gluon import TensorDescriptor, gl
    from ..launch import Box

    layout = gl.NVMMASharedLayout.get_default_for([UNIT, UNIT], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    t = torch.empty(rows, UNIT, dtype=dtype, device="meta")
    return Box(t, [rows, UNIT], [UNIT, 1], [UNIT, UNIT], TensorDescriptor, layout)


def statistics_launch(
    problem: Any,
    out: torch.Tensor,
    dout: torch.Tensor,
    layout: Layout,
    per: int,
    q_units: int,
    counters: int,
    size_strides: tuple[int, ...],
    unit: int = UNIT,
) -> tuple[Any, tuple[int, ...]]:
    """The launch that makes the statistics and clears the counters, and its last arguments.

    problem: of the forward pass, an AttentionProblem.  per: tiles of a query block.  q_units: tiles of a head.  unit: queries of
    a tile."""
    from ...kernels.backward_statistics import backward_statistics
    from ..launch import Launch

    n = problem
    out_strides, do_strides = head_strides(out, layout), head_strides(dout, layout)
    constants = {
        "WIDE": max(out_strides[1], do_strides[1]) * unit >= 1 << 31,
        "DIM": n.dim_v,
        "BLOCK_D": n.block_v,
        "UNIT": unit,
        "PER": per,
    }
    grid = n.batch * n.heads * q_units + 1, 1, 1
    launch = Launch(backward_statistics, grid, constants, {"num_warps": 4}, out.device.index or 0)
    return launch, (n.seq_q, n.heads, q_units, counters, *out_strides, *do_strides, *size_strides)


def statistics_arguments(
    bound: Any,
    tensors: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    made: tuple[torch.Tensor, ...],
) -> tuple[Any, ...]:
    """The run-time arguments of that launch, in order; bound: its last ones as statistics_tail; tensors: q, k, v, out; made:
    statistics and progress first."""
    return (tensors[3], dout, lse, dlse, None, *made[:2], *bound.statistics_tail)

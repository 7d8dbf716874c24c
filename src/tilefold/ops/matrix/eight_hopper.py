"""Bindings of the Gluon kernels for products of 8-bit numbers on sm_90."""

from typing import TYPE_CHECKING, Any

import torch

from ..bound import Bound, Box, Slot, meta, strides_named
from ..hopper import require, shared_layout
from .operands import BIAS, GIVEN_TO_PRODUCTS, Scales, values_of
from .options import CODES

if TYPE_CHECKING:
    from ...plan.matrix.eight import EightPlan
    from ...plan.matrix.matmul import MatmulPlan
    from .operands import Operands

GIVEN = ("A", "B", "ScaleA", "ScaleB", "Bias", "Out", "Part", "Arrived")
"""What a call with quantised activations gives to every kernel: codes, weight, factors of both; Part, Arrived: of splits."""
REGISTERS = 168, 240, 24  # of a thread at launch, of one that multiplies, of the loading warp
FEW = 128  # of a thread, where two programs of one consumer may share an SM


def panel_box(t: torch.Tensor, rows: int) -> Box:
    """The descriptor of t [rows, k] of bytes, k side by side, with boxes of `rows` by 128.  The stride of a dimension of size 1
    means nothing and may be invalid."""
    from ...kernels.hopper.gluon import TensorDescriptor, gl

    row = -(-t.shape[1] // 16) * 16 if t.shape[0] == 1 else t.stride(0)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return Box(t, list(t.shape), [row, 1], [rows, 128], TensorDescriptor, layout)


def box_of_result(shape: tuple[int, int, int], dtype: torch.dtype) -> Box:
    """The descriptor of a result that TMA stores."""
    from ...kernels.hopper.gluon import TensorDescriptor

    made, box = meta(*shape, dtype=dtype), [1, 64, 64]
    return Box(made, list(shape), list(made.stride()), box, TensorDescriptor, shared_layout((1, 64, 64), dtype))


def constants_of(block_n: int, stages: int, group: int, outside: bool, boxes: bool) -> dict[str, Any]:
    """Constants of matmul_eight_hopper but for bias, activation and dependent launches."""
    return {
        "OUTSIDE": outside,
        "BOXES": boxes,
        "GROUP": group,
        "BLOCK_N": block_n,
        "SLOTS": stages,
        "CONSUMER_REGISTERS": REGISTERS[1],
        "PRODUCER_REGISTERS": REGISTERS[2],
    }


def bind(
    plan: "EightPlan", codes: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Any, out_dtype: torch.dtype
) -> Bound:
    """The launch of a product, of what GIVEN names; codes [m, k]: of x, an example without memory."""
    from ...plan.matrix.eight import ROWS

    require("plan.kernel", plan.kernel)
    made = _bind_rows if plan.kernel == ROWS else _bind_large
    stride = 0 if scale.shape[0] == 1 else scale.stride(0)
    return made(plan, codes, weight, stride, bias is not None, out_dtype)


def _bind_rows(
    plan: "EightPlan", codes: torch.Tensor, weight: torch.Tensor, stride: int, biased: bool, out_dtype: torch.dtype
) -> Bound:
    from ...kernels.hopper.matmul_eight_rows import matmul_eight_rows

    p, early = plan.problem, plan.device.dependent_launches
    consumers = plan.block_n // 64
    constants = {
        "SPLITS": plan.parts,
        "EARLY": early,
        "BLOCK_M": plan.block_m,
        "CONSUMERS": consumers,
        "PANELS": plan.block_k // 128,
        "SLOTS": plan.stages,
    }
    values = {
        "x_desc": Slot("A", panel_box(codes, plan.block_m).over),
        "w_desc": Slot("B", panel_box(weight, plan.block_n).over),
        "M": p.m,
        "N": p.n,
        "steps": plan.steps,
        "each": plan.each,
        "stride_sb": stride,
        "stride_om": p.n,
    }
    registers = FEW if plan.small else REGISTERS[0]
    grid = plan.items, plan.parts, 1
    return Bound.of(matmul_eight_rows, grid, GIVEN, values, constants, weight.device, maxnreg=registers)


def _bind_large(
    plan: "EightPlan", codes: torch.Tensor, weight: torch.Tensor, stride: int, biased: bool, out_dtype: torch.dtype
) -> Bound:
    from ...kernels.hopper.matmul_eight import matmul_eight_hopper

    p, early = plan.problem, plan.device.dependent_launches
    stored = p.n % 8 == 0
    constants = {
        **constants_of(plan.block_n, plan.stages, plan.group, p.kind != "int8", stored),
        "BIAS": BIAS["columns" if biased else "none"],
        "ACTIVATION": 0,
        "EARLY": early,
    }
    values = {
        "a_desc": Slot("A", panel_box(codes, 64).over),
        "b_desc": Slot("B", panel_box(weight, plan.block_n).over),
        "o_desc": Slot("Out", box_of_result((1, p.m, p.n), out_dtype).over) if stored else None,
        "p_desc": None,
        "Pre": None,
        "m": p.m,
        "n": p.n,
        "tiles_m": -(-p.m // plan.block_m),
        "tiles_n": -(-p.n // plan.block_n),
        "steps": plan.steps,
        "splits": 1,
        "work": plan.items,
        **strides_named("s", (1, stride), "ab"),
        **strides_named("c", (0, 0, 1), "bmn"),
        **strides_named("o", (p.m * p.n, p.n, p.m * p.n), "bms"),
    }
    programs = min(plan.items, plan.device.sms)
    return Bound.of(matmul_eight_hopper, programs, GIVEN, values, constants, weight.device, maxnreg=REGISTERS[0])


def bind_product(x: "Operands", plan: "MatmulPlan", scales: Scales, device: torch.device) -> Bound:
    """The launch of a product of `ops.matmul` in e4m3, of what GIVEN_TO_PRODUCTS names; Unsupported without Gluon."""
    require("plan.kernel", plan.kernel)
    from ...kernels.hopper.matmul_eight import matmul_eight_hopper

    problem, tile = plan.problem, plan.tile
    m, n, _ = x.sizes
    shared = plan.splits > 1
    stored = not shared and problem.out_dtype != "float32" and problem.out_descriptors
    constants = {
        **constants_of(tile.block_n, tile.num_stages, tile.group, True, stored),
        "BIAS": BIAS["none" if shared else problem.bias],
        "ACTIVATION": 0 if shared else CODES[problem.activation],
        "EARLY": False,
    }
    values = {
        **values_of(x, plan, scales, (-(-m // tile.block_m), -(-n // tile.block_n))),
        "a_desc": Slot("A", panel_box(x.a[0], 64).over),
        "b_desc": Slot("B", panel_box(x.b[0].t(), tile.block_n).over),
        "o_desc": Slot("Out", box_of_result((1, m, n), getattr(torch, problem.out_dtype)).over) if stored else None,
        "p_desc": None,
        "Pre": None,
        "steps": tile.steps(problem),
        "work": tile.tiles(problem) * plan.splits,
    }
    options = {"num_warps": tile.num_warps, "maxnreg": REGISTERS[0]}
    return Bound.of(matmul_eight_hopper, plan.grid, GIVEN_TO_PRODUCTS, values, constants, device, **options)

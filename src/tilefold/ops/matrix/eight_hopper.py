"""Bindings of the Gluon kernels for products of 8-bit numbers on sm_90."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..hopper import require

if TYPE_CHECKING:
    from ...plan.matrix.eight import EightPlan
    from ...plan.matrix.matmul import MatmulPlan
    from ..launch import Box
    from .operands import Operands

__all__ = ["Boxes", "bind", "bind_product", "boxes_of", "constants_of", "panel_box", "product_arguments"]

REGISTERS = 168, 240, 24  # of a thread at launch, of one that multiplies, of the loading warp
FEW = 128  # of a thread, where two programs of one consumer may share an SM


class Boxes(NamedTuple):
    """Descriptors of both factors [rows, k], and of the result if the copy engine stores it."""

    a: "Box"
    b: "Box"
    out: "Box | None" = None


def panel_box(t: torch.Tensor, rows: int) -> "Box":
    """The descriptor of t [rows, k] of bytes, k side by side, with boxes of `rows` by 128.  The stride of a dimension of size 1
    means nothing and may be invalid."""
    from ...kernels.hopper.gluon import TensorDescriptor, gl
    from ..launch import Box

    row = -(-t.shape[1] // 16) * 16 if t.shape[0] == 1 else t.stride(0)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return Box(t, list(t.shape), [row, 1], [rows, 128], TensorDescriptor, layout)


def boxes_of(
    a: torch.Tensor, b: torch.Tensor, block_n: int, out_dtype: torch.dtype, shape: tuple[int, int, int] | None
) -> Boxes:
    """For a [m, k] and b [n, k] of matmul_eight_hopper; shape: of the result, where the copy engine stores it."""
    from ...kernels.hopper.gluon import TensorDescriptor, gl
    from ..launch import Box

    out = None
    if shape is not None:
        dtype = gl.bfloat16 if out_dtype == torch.bfloat16 else gl.float16
        made = torch.empty(shape, dtype=out_dtype, device="meta")
        box = [1, 64, 64]
        layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
        out = Box(made, list(shape), list(made.stride()), box, TensorDescriptor, layout)
    return Boxes(panel_box(a, 64), panel_box(b, block_n), out)


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
) -> tuple[Any, Any]:
    """(launch, function that makes its arguments) of a product; codes [m, k]: of x, an example without memory.

    The arguments are made of codes, weight, scales of x, weight_scale, bias, result, sums of splits, counters."""
    from ...plan.matrix.eight import ROWS

    require("plan.kernel", plan.kernel)
    made = _bind_rows if plan.kernel == ROWS else _bind_large
    stride = 0 if scale.shape[0] == 1 else scale.stride(0)
    return made(plan, codes, weight, stride, bias is not None, out_dtype)


def _bind_rows(
    plan: "EightPlan", codes: torch.Tensor, weight: torch.Tensor, stride: int, biased: bool, out_dtype: torch.dtype
) -> tuple[Any, Any]:
    from ...kernels.hopper.matmul_eight_rows import matmul_eight_rows
    from ..launch import Launch

    p, early = plan.problem, plan.device.dependent_launches
    consumers = plan.block_n // 64
    of_x, of_w = panel_box(codes, plan.block_m), panel_box(weight, plan.block_n)
    constants = {
        "SPLITS": plan.parts,
        "EARLY": early,
        "BLOCK_M": plan.block_m,
        "CONSUMERS": consumers,
        "PANELS": plan.block_k // 128,
        "SLOTS": plan.stages,
    }
    registers = FEW if plan.small else REGISTERS[0]
    options = {"num_warps": 4, "maxnreg": registers, **({"launch_pdl": True} if early else {})}
    launch = Launch(matmul_eight_rows, (plan.items, plan.parts, 1), constants, options, weight.device.index or 0)
    scalars = p.m, p.n, plan.steps, plan.each, stride, p.n

    def arguments(codes: Any, w: Any, scales: Any, s: Any, bias: Any, out: Any, part: Any, arrived: Any) -> Any:
        return (of_x.over(codes), of_w.over(w), scales, s, bias, out, part, arrived, *scalars)

    return launch, arguments


def _bind_large(
    plan: "EightPlan", codes: torch.Tensor, weight: torch.Tensor, stride: int, biased: bool, out_dtype: torch.dtype
) -> tuple[Any, Any]:
    from ...kernels.hopper.matmul_eight import matmul_eight_hopper
    from ..launch import Launch
    from .operands import BIAS

    p, early = plan.problem, plan.device.dependent_launches
    stored = p.n % 8 == 0
    boxes = boxes_of(codes, weight, plan.block_n, out_dtype, (1, p.m, p.n) if stored else None)
    constants = {
        **constants_of(plan.block_n, plan.stages, plan.group, p.kind != "int8", stored),
        "BIAS": BIAS["columns" if biased else "none"],
        "ACTIVATION": 0,
        "EARLY": early,
    }
    options = {"num_warps": 4, "maxnreg": REGISTERS[0], **({"launch_pdl": True} if early else {})}
    grid = min(plan.items, plan.device.sms), 1, 1
    launch = Launch(matmul_eight_hopper, grid, constants, options, weight.device.index or 0)
    tiles = -(-p.m // plan.block_m), -(-p.n // plan.block_n)
    scalars = (p.m, p.n, *tiles, plan.steps, 1, plan.items, 1, stride, 0, 0, 1, p.m * p.n, p.m * p.n, p.n)

    def arguments(codes: Any, w: Any, scales: Any, s: Any, bias: Any, out: Any, part: Any, arrived: Any) -> Any:
        of_out = None if boxes.out is None else boxes.out.over(out)
        return (boxes.a.over(codes), boxes.b.over(w), of_out, None, out, None, bias, scales, s, *scalars)

    return launch, arguments


def bind_product(
    x: "Operands", plan: "MatmulPlan", scales: tuple[torch.Tensor | None, torch.Tensor | None], device: torch.device
) -> tuple[Any, tuple[Any, ...], Boxes]:
    """(launch, scalars, boxes) of a product of `ops.matmul` in e4m3; Unsupported without Gluon."""
    require("plan.kernel", plan.kernel)
    from ...kernels.hopper.matmul_eight import matmul_eight_hopper
    from ..launch import Launch
    from .operands import BIAS
    from .options import CODES

    problem, tile = plan.problem, plan.tile
    m, n, _ = x.sizes
    shared = plan.splits > 1
    stored = not shared and problem.out_dtype != "float32" and problem.out_descriptors
    boxes = boxes_of(x.a[0], x.b[0].t(), tile.block_n, getattr(torch, problem.out_dtype), (1, m, n) if stored else None)
    constants = {
        **constants_of(tile.block_n, tile.num_stages, tile.group, True, stored),
        "BIAS": BIAS["none" if shared else problem.bias],
        "ACTIVATION": 0 if shared else CODES[problem.activation],
        "EARLY": False,
    }
    tiles = -(-m // tile.block_m), -(-n // tile.block_n)
    scalars = (
        m, n, *tiles, tile.steps(problem), plan.splits, tile.tiles(problem) * plan.splits,
        *(0 if s is None or s.numel() == 1 else s.stride(0) for s in scales),
        *((0, 0, 0) if x.bias is None else x.bias), m * n, m * n, n,
    )  # fmt: skip
    options = {"num_warps": tile.num_warps, "maxnreg": REGISTERS[0]}
    return Launch(matmul_eight_hopper, plan.grid, constants, options, device.index or 0), scalars, boxes


def product_arguments(boxes: Boxes, a: Any, b: Any, out: Any, bias: Any, scales: Any, scalars: tuple[Any, ...]) -> Any:
    """The run-time arguments of what `bind_product` has bound, in order."""
    of_out = None if boxes.out is None else boxes.out.over(out)
    return (boxes.a.over(a), boxes.b.over(b), of_out, None, out, None, bias, *scales, *scalars)

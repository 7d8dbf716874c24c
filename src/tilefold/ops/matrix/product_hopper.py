"""Binding of the Gluon kernels for matrix products on sm_90: of 16 bits here, of bytes in eight_hopper."""

from typing import TYPE_CHECKING, Any

import torch

from ..hopper import require
from .eight_hopper import Boxes, bind_product, product_arguments
from .operands import BIAS, Operands
from .options import CODES

if TYPE_CHECKING:
    from ...plan.matrix.matmul import MatmulPlan
    from ..launch import Box

__all__ = ["arguments", "bind"]

REGISTERS = 168, 240, 24  # of a thread at launch, of one that multiplies, of the loading warp


def bind(
    x: Operands,
    plan: "MatmulPlan",
    device: torch.device,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> tuple[Any, tuple[Any, ...], Any]:
    """(launch, scalars, boxes of a, b and the result); scales: of products in e4m3.  Unsupported without Gluon."""
    if x.a.element_size() == 1:
        return bind_product(x, plan, scales, device)
    require("plan.kernel", plan.kernel)
    from ...kernels.hopper.matmul import matmul_hopper
    from ..launch import Launch

    problem, tile = plan.problem, plan.tile
    m, n, k = x.sizes
    shared = plan.splits > 1
    through_boxes = not shared and problem.out_dtype == problem.dtype and problem.out_descriptors
    a_turned, b_turned = problem.a_major == "m", problem.b_major == "k"
    boxes: list[Any] = [_box(x.a, a_turned, 64), _box(x.b, b_turned, tile.block_n)]
    if through_boxes:
        out = torch.empty((problem.results, m, n), dtype=x.a.dtype, device="meta")
        boxes.append(_box(out, False, 64))
    tiles = -(-m // 128), -(-n // tile.block_n), -(-k // 64)
    constants = {
        "A_TURNED": a_turned,
        "B_TURNED": b_turned,
        "FOLD": problem.fold,
        "BOXES": through_boxes,
        "BIAS": BIAS["none" if shared else problem.bias],
        "ACTIVATION": 0 if shared else CODES[problem.activation],
        "GROUP": tile.group,
        "BLOCK_N": tile.block_n,
        "SLOTS": tile.num_stages,
        "CONSUMER_REGISTERS": REGISTERS[1],
        "PRODUCER_REGISTERS": REGISTERS[2],
    }
    steps = (int(t.shape[0] > 1) for t in (x.a, x.b))
    scalars = (
        m, n, *tiles, tile.steps(problem), plan.splits, tile.tiles(problem) * plan.splits, *steps,
        *((0, 0, 0) if x.bias is None else x.bias), problem.results * m * n, m * n, n,
    )  # fmt: skip
    options = {"num_warps": tile.num_warps, "maxnreg": REGISTERS[0]}
    return Launch(matmul_hopper, plan.grid, constants, options, device.index or 0), scalars, tuple(boxes)


def _box(t: torch.Tensor, turned: bool, rows: int) -> "Box":
    """The descriptor of [batch, rows, columns], of its transpose if turned, with boxes of `rows` if it is brought so, and
    of 64 columns.  The stride of a dimension of size 1 means nothing and may be invalid."""
    from ...kernels.hopper.gluon import TensorDescriptor, gl
    from ..launch import Box

    t = t.mT if turned else t
    row = -(-t.shape[2] // 8) * 8
    strides = [row if size == 1 else stride for size, stride in zip(t.shape[:2], t.stride()[:2], strict=True)]
    dtype = gl.bfloat16 if t.dtype == torch.bfloat16 else gl.float16
    box = [1, rows if turned else 64, 64]
    return Box(t, list(t.shape), [*strides, 1], box, TensorDescriptor, gl.NVMMASharedLayout.get_default_for(box, dtype))


def arguments(boxes: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, pre: torch.Tensor | None,
              bias: torch.Tensor | None, scales: tuple[Any, Any], scalars: tuple[Any, ...]) -> tuple[Any, ...]:  # fmt: skip
    """The kernel's run-time arguments, in order."""
    if isinstance(boxes, Boxes):
        made: tuple[Any, ...] = product_arguments(boxes, a, b, out, bias, scales, scalars)
        return made
    of_out = boxes[2].over(out) if len(boxes) == 3 else None
    of_pre = boxes[2].over(pre) if len(boxes) == 3 and pre is not None else None
    return boxes[0].over(a), boxes[1].over(b), of_out, of_pre, out, pre, bias, *scalars

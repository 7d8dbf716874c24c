"""Binding of the Gluon kernels for matrix products on sm_90: of 16 bits here, of bytes in eight_hopper."""

from typing import TYPE_CHECKING

import torch

from ..bound import Bound, Box, Slot, meta
from ..hopper import require, shared_layout
from .eight_hopper import bind_product
from .operands import BIAS, GIVEN_TO_PRODUCTS, Operands, Scales, values_of
from .options import CODES

if TYPE_CHECKING:
    from ...plan.matrix.matmul import MatmulPlan

REGISTERS = 168, 240, 24  # of a thread at launch, of one that multiplies, of the loading warp


def bind(x: Operands, plan: "MatmulPlan", device: torch.device, scales: Scales = (None, None)) -> Bound:
    """The launch of a product, of what GIVEN_TO_PRODUCTS names; scales: of products in e4m3.  Unsupported without Gluon."""
    if x.a.element_size() == 1:
        return bind_product(x, plan, scales, device)
    require("plan.kernel", plan.kernel)
    from ...kernels.hopper.matmul import matmul_hopper

    problem, tile = plan.problem, plan.tile
    m, n, k = x.sizes
    shared = plan.splits > 1
    through_boxes = not shared and problem.out_dtype == problem.dtype and problem.out_descriptors
    a_turned, b_turned = problem.a_major == "m", problem.b_major == "k"
    constants = {
        "A_TRANSPOSED": a_turned,
        "B_TRANSPOSED": b_turned,
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
    of_out = _box(meta(problem.results, m, n, dtype=x.a.dtype), False, 64).over if through_boxes else None
    values = {
        **values_of(x, plan, (None, None), (-(-m // 128), -(-n // tile.block_n))),
        "a_desc": Slot("A", _box(x.a, a_turned, 64).over),
        "b_desc": Slot("B", _box(x.b, b_turned, tile.block_n).over),
        "o_desc": Slot("Out", of_out) if of_out else None,
        "p_desc": Slot("Pre", of_out) if of_out and problem.saved else None,
        "tiles_k": -(-k // 64),
        "steps": tile.steps(problem),
        "work": tile.tiles(problem) * plan.splits,
        "step_a": int(x.a.shape[0] > 1),
        "step_b": int(x.b.shape[0] > 1),
    }
    options = {"num_warps": tile.num_warps, "maxnreg": REGISTERS[0]}
    return Bound.of(matmul_hopper, plan.grid, GIVEN_TO_PRODUCTS, values, constants, device, **options)


def _box(t: torch.Tensor, turned: bool, rows: int) -> Box:
    """The descriptor of [batch, rows, columns], of its transpose if turned, with boxes of `rows` if it is brought so, and
    of 64 columns.  The stride of a dimension of size 1 means nothing and may be invalid."""
    from ...kernels.hopper.gluon import TensorDescriptor

    t = t.mT if turned else t
    row = -(-t.shape[2] // 8) * 8
    strides = [row if size == 1 else stride for size, stride in zip(t.shape[:2], t.stride()[:2], strict=True)]
    box = (1, rows if turned else 64, 64)
    return Box(t, list(t.shape), [*strides, 1], list(box), TensorDescriptor, shared_layout(box, t.dtype))

"""Binding of the Gluon kernel for dense attention on sm_90."""

from typing import TYPE_CHECKING, Any

import torch

from .attention import Prepared, head_strides, hooks_of, kind_of
from .call import UNBOUNDED, Call
from .hopper import box_of, require, tickets

if TYPE_CHECKING:
    from ..plan import AttentionPlan

__all__ = ["arguments", "bind", "compile"]


def bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    window: tuple[int, int],
    scale: float,
    plan: "AttentionPlan",
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Prepared:
    """Kernel, descriptors, run-time scalars and compile-time constants of this call; Unsupported without Gluon."""
    from ..device import mods, ranges
    from ..plan.attention_hopper import KEYS, REGISTERS, hopper_programs
    from ..plan.hopper import PRODUCER_REGISTERS
    from .launch import Launch

    require("plan.kernel", plan.kernel)
    from ..kernels.hopper.attention_forward import attention_forward_hopper

    n = plan.problem
    at_launch, folding = REGISTERS
    constants = {
        "KIND": kind_of(ranges, window),
        "D": n.dim_qk,
        "SLOTS": plan.num_stages,
        "FENCE": n.dim_qk == 128,
        "CONSUMER_REGISTERS": folding,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    options = {"num_warps": plan.num_warps, "maxnreg": at_launch}
    sides = (UNBOUNDED if side < 0 else side for side in window)
    blocks = -(-n.seq_q // plan.block_m)
    grid = hopper_programs(n, plan.device), 1, 1
    return Prepared(
        plan=plan,
        out_shape=shapes[0],
        lse_shape=shapes[1],
        scalars=(scale, n.seq_q, n.seq_k, n.heads, n.group, blocks, plan.grid[0], *sides),
        strides=head_strides(torch.empty(shapes[0], device="meta"), call.layout),
        boxes=tuple(box_of(t, call.layout, rows) for t, rows in ((q, 64), (k, KEYS), (v, KEYS))),
        launch=Launch(attention_forward_hopper, grid, constants, options, q.device.index or 0),
        mods=mods,
        keep=hooks_of(call),
    )


def arguments(
    p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[Any, ...]:
    """The kernel's run-time arguments, in order."""
    boxes = (box.over(t) for box, t in zip(p.boxes, (q, k, v), strict=True))
    return (*boxes, out, lse, tickets(q.device), *p.scalars, *p.strides)


def compile(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Compile the kernel for this call, without a result; what the compiler raises passes through."""
    out = torch.empty(p.out_shape, dtype=q.dtype, device="meta")
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device="meta")
    p.launch.compile(arguments(p, q, k, v, out, lse))

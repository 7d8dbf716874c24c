"""Binding of the Gluon kernel for block-sparse attention on sm_90."""

from typing import TYPE_CHECKING, Any

import torch

from ..dense.attention_parts import head_strides
from ..hopper import box_of, require, tickets
from .sparse_call import SparseCall
from .sparse_parts import Prepared, list_strides

if TYPE_CHECKING:
    from ...plan.sparse import SparsePlan

__all__ = ["arguments", "bind", "compile"]

NOTHING = (0,) * 6  # strides of what is not there


def bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: SparseCall,
    scale: float,
    plan: "SparsePlan",
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Prepared:
    """Kernel, descriptors, run-time scalars and compile-time constants of this call; Unsupported without Gluon."""
    from ...device import mods
    from ...plan.hopper import PRODUCER_REGISTERS
    from ...plan.sparse_hopper import key_slots, registers
    from ..launch import Launch

    require("plan.kernel", plan.kernel)
    from ...kernels.hopper.sparse_forward import sparse_forward_hopper

    problem, index = plan.problem, call.lists
    n = problem.attention
    q_blocks = -(-n.seq_q // problem.block_q)
    at_launch, folding = registers(problem)
    constants = {
        "D": n.dim_qk,
        "KV_BLOCK": problem.block_k,
        "WARPGROUPS": problem.block_q // 64,
        "K_SLOTS": key_slots(problem, plan.tile),
        "V_SLOTS": plan.num_stages,
        "MASKED": problem.masked or n.seq_k % problem.block_k != 0,
        "SIZED": problem.masked,
        "Q_SIZED": index.query_sizes is not None,
        "MIXED": 0,
        "CONSUMER_REGISTERS": folding,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    options = {"num_warps": plan.num_warps, "maxnreg": at_launch}
    out_strides = head_strides(torch.empty(shapes[0], device="meta"), call.layout)
    return Prepared(
        plan=plan,
        out_shape=shapes[0],
        lse_shape=shapes[1],
        scalars=(scale, n.seq_q, n.seq_k, n.heads, n.group, q_blocks, n.batch * n.heads * q_blocks),
        strides=(*out_strides, *list_strides(index)),
        boxes=tuple(box_of(t, call.layout, rows) for t, rows in ((q, 64), (k, problem.block_k), (v, problem.block_k))),
        mods=mods,
        launch=Launch(sparse_forward_hopper, plan.grid, constants, options, q.device.index or 0),
        keep=(call.score_mod, call.score_grad, call.mask_mod, call.plan),
    )


def arguments(
    p: Prepared,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: SparseCall,
    mixed: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:
    """The kernel's run-time arguments, in order; counts stand for sizes that there are none of, and are not read as such.

    mixed: the other branch as boxes, its gate, this one's gate, and the strides of the two."""
    index, (q_box, k_box, v_box) = call.lists, p.boxes
    sizes, query_sizes = (index.counts if t is None else t for t in (index.block_sizes, index.query_sizes))
    sides = (q_box.over(q), k_box.over(k), v_box.over(v))
    counter = tickets(q.device)
    branch, *gates = mixed or (sides[0], lse, lse, *NOTHING)
    lists = index.indices, index.counts, sizes, query_sizes
    return (*sides, branch, out, lse, *lists, counter, *gates[:2], *p.scalars, *p.strides, *gates[2:])


def compile(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall) -> None:
    """Compile the kernel for this call, without a result; what the compiler raises passes through."""
    out = torch.empty(p.out_shape, dtype=q.dtype, device="meta")
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device="meta")
    p.launch.compile(arguments(p, q, k, v, out, lse, call))

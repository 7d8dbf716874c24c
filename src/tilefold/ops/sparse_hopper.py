"""Binding of the Gluon kernel for block-sparse attention on sm_90, and the way back to the portable kernels without it."""

from typing import TYPE_CHECKING, Any

import torch

from ..errors import Unsupported
from .attention import head_strides
from .hopper import box_of, tickets, warn_portable
from .sparse import Prepared, SparseCall, list_strides

if TYPE_CHECKING:
    from ..plan.sparse import SparsePlan

__all__ = ["arguments", "bind", "compiles"]

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
    from ..device import mods
    from ..kernels import hopper
    from ..plan.sparse_hopper import key_slots, registers
    from .launch import Launch

    if refusal := hopper.refusal():
        raise Unsupported(f"plan.kernel is {plan.kernel!r}, but {refusal}")
    from ..kernels.hopper.sparse_forward import sparse_forward_hopper

    problem, index = plan.problem, call.lists
    n = problem.attention
    q_blocks = -(-n.seq_q // problem.block_q)
    at_launch, folding, loading = registers(problem)
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
        "PRODUCER_REGISTERS": loading,
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


def compiles(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall) -> bool:
    """Compile the kernel; False, with one warning a process, if this Triton cannot."""
    out, lse = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in ((p.out_shape, q.dtype), (p.lse_shape, torch.float32))
    )
    try:
        p.launch.compile(arguments(p, q, k, v, out, lse, call))
    except Exception as problem:  # the compiler raises what it likes, and the portable kernel can do without it
        warn_portable("block-sparse", f"it does not compile: {type(problem).__name__}: {problem}")
        return False
    return True

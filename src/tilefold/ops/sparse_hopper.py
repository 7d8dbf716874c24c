"""Binding of the Gluon kernel for block-sparse attention on sm_90, and the way back to the portable kernels without it."""

import warnings
from typing import TYPE_CHECKING, Any

import torch

from ..errors import Unsupported
from .attention import describe_box, head_strides
from .sparse import Prepared, SparseCall, list_strides

if TYPE_CHECKING:
    from ..plan.sparse import SparsePlan
    from .launch import Box

__all__ = ["arguments", "bind", "box_of", "compiles"]

NOTHING = (0,) * 6  # strides of what is not there
_WARNED: set[str] = set()
_COUNTERS: dict[tuple[int | None, int], torch.Tensor] = {}  # by device and stream


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
        boxes=tuple(box_of(t, call, rows) for t, rows in ((q, 64), (k, problem.block_k), (v, problem.block_k))),
        mods=mods,
        launch=Launch(sparse_forward_hopper, plan.grid, constants, options, q.device.index or 0),
        keep=(call.score_mod, call.score_grad, call.mask_mod, call.plan),
    )


def box_of(t: torch.Tensor, call: SparseCall, rows: int) -> "Box":
    """Boxes of 64 columns: 128 bytes, the widest that the copy engine swizzles."""
    from ..kernels.hopper.gluon import TensorDescriptor, gl

    dtype = gl.bfloat16 if t.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, 64], dtype)
    return describe_box(t, call.layout, rows, 64, TensorDescriptor, layout)


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
    tickets = _tickets(q.device)
    branch, *gates = mixed or (sides[0], lse, lse, *NOTHING)
    lists = index.indices, index.counts, sizes, query_sizes
    return (*sides, branch, out, lse, *lists, tickets, *gates[:2], *p.scalars, *p.strides, *gates[2:])


def _tickets(device: torch.device) -> torch.Tensor:
    """A counter that is 0, from which the programs draw their work; a launch leaves it at 0 again.

    One per stream, since launches on one stream follow one another.  A captured graph may be replayed beside anything else, so
    each captured launch has its own, set to 0 by the graph itself."""
    if device.type == "meta" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    import triton

    key = device.index, triton.runtime.driver.active.get_current_stream(device.index)
    found = _COUNTERS.get(key)
    if found is None:
        found = _COUNTERS[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


def compiles(p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: SparseCall) -> bool:
    """Compile the kernel; False, with one warning a process, if this Triton cannot."""
    out, lse = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in ((p.out_shape, q.dtype), (p.lse_shape, torch.float32))
    )
    try:
        p.launch.compile(arguments(p, q, k, v, out, lse, call))
    except Exception as problem:  # the compiler raises what it likes, and the portable kernel can do without it
        warn_portable(f"it does not compile: {type(problem).__name__}: {problem}")
        return False
    return True


def warn_portable(why: str) -> None:
    """Say once that the portable kernel serves, and why."""
    if why not in _WARNED:
        _WARNED.add(why)
        warnings.warn(
            f"the block-sparse kernel for this GPU cannot be used, a portable one serves instead ({why})",
            RuntimeWarning,
            stacklevel=2,
        )

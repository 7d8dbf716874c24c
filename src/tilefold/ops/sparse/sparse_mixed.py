"""The fine branch with the gates in its epilogue: what is attended, times a gate, plus another branch times its gate.

Where the kernel for this GPU can do it, the branch is read once and nothing of the fine branch alone is written; elsewhere the
two are fused by a launch of their own.  No gradient passes: the backward pass needs the fine branch by itself.
"""

from typing import TYPE_CHECKING

import torch

from ..dense.attention_parts import boxable
from . import fuse, sparse
from .project import facts
from .sparse_call import SparseCall
from .sparse_parts import HOPPER_KERNEL, Prepared

if TYPE_CHECKING:
    from ..launch import Box, Launch

__all__ = ["attend_and_fuse", "bind"]

Gate = torch.Tensor | None


def attend_and_fuse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: SparseCall,
    branch: torch.Tensor,
    gate_branch: Gate,
    gate: Gate,
) -> torch.Tensor:
    """gate_branch * branch + gate * sparse attention, branch being like the result; gates, errors: `tilefold.sparse.fuse`."""
    p = sparse.prepare(q, k, v, call)
    by_rows = all(g is None or (isinstance(g, torch.Tensor) and g.dim() < 4) for g in (gate_branch, gate))
    if p.plan is None or p.plan.kernel != HOPPER_KERNEL or not by_rows or not boxable(branch):
        fine, _ = sparse.forward(q, k, v, call)
        return fuse.forward((branch, fine), (gate_branch, gate), call.layout)
    from . import sparse_hopper

    out = torch.empty(p.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=q.device)
    key = tuple(map(facts, (branch, gate_branch, gate)))
    launch, box, strides = p.mixed.get(key) or p.mixed.setdefault(key, bind(p, call, out, branch, gate_branch, gate))
    gates = (lse if g is None else g for g in (gate_branch, gate))
    launch(sparse_hopper.arguments(p, q, k, v, out, lse, call, (box.over(branch), *gates, *strides)))
    return out


def bind(
    p: Prepared, call: SparseCall, out: torch.Tensor, branch: torch.Tensor, gate_branch: Gate, gate: Gate
) -> "tuple[Launch, Box, tuple[int, ...]]":
    """The launch of this combination, the branch as boxes, and the strides (batch, sequence, heads) of both gates."""
    from ...kernels.hopper import sparse_forward as kernel
    from ..hopper import box_of
    from ..launch import Launch

    fuse.check(branch, out, gate_branch, gate, call.layout)
    made = p.launch
    parts = ((kernel.BRANCH, branch), (kernel.BRANCH_GATE, gate_branch), (kernel.GATE, gate))
    bits = sum(bit.value for bit, tensor in parts if tensor is not None)
    strides: tuple[int, ...] = ()
    for g in (gate_branch, gate):
        strides += (0, 0, 0) if g is None else _gate_strides(g, call.layout)
    assert p.plan is not None
    box = box_of(branch, call.layout, p.plan.problem.block_k)
    return Launch(made.fn, made.grid, {**made.keywords, "MIXED": bits}, {}, made.device), box, strides


def _gate_strides(gate: torch.Tensor, layout: str) -> tuple[int, int, int]:
    first, second, third = fuse.gate_strides(gate, layout)
    return (first, second, third) if layout == "bshd" else (first, third, second)

"""The fine branch with the gates in its epilogue: what is attended, times a gate, plus another branch times its gate.

Where the kernel for this GPU can do it, the branch is read once and nothing of the fine branch alone is written; elsewhere the
two are fused by a launch of their own.  No gradient passes: the backward pass needs the fine branch by itself.
"""

import torch

from ..bound import Bound, Prepared, Slot, strides_named
from ..call import Call
from ..dense.attention_parts import GIVEN, boxable
from ..source import facts_of_values
from . import fuse, sparse
from .sparse_parts import HOPPER_KERNEL

Gate = torch.Tensor | None


def attend_and_fuse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    branch: torch.Tensor,
    gate_branch: Gate,
    gate: Gate,
) -> torch.Tensor:
    """gate_branch * branch + gate * sparse attention, branch being like the result; gates, errors: `tilefold.sparse.fuse`."""
    p = sparse.prepare(q, k, v, call)
    by_rows = all(g is None or (isinstance(g, torch.Tensor) and g.dim() < 4) for g in (gate_branch, gate))
    dense = p.plan is not None and p.plan.kernel == HOPPER_KERNEL and call.source is None
    if not dense or not by_rows or not boxable(branch):
        fine, _ = sparse.forward(q, k, v, call)
        return fuse.forward(branch, fine, gate_branch, gate, call.layout)
    out = torch.empty(p.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(p.lse_shape, dtype=torch.float32, device=q.device)
    key = "mixed", facts_of_values(branch, gate_branch, gate)
    bound = p.further.get(key) or p.further.setdefault(key, bind(p, call, out, branch, gate_branch, gate))
    bound((q, k, v, out, lse, call, branch, gate_branch, gate))
    return out


def bind(p: Prepared, call: Call, out: torch.Tensor, branch: torch.Tensor, gate_branch: Gate, gate: Gate) -> Bound:
    """The launch of this combination: the sparse one, with the branch as boxes and both gates by their strides."""
    from ...kernels.hopper import sparse_forward as kernel
    from ..hopper import box_of

    fuse.check(branch, out, gate_branch, gate, call.layout)
    made = p.bound.launch
    parts = ((kernel.BRANCH, branch), (kernel.BRANCH_GATE, gate_branch), (kernel.GATE, gate))
    bits = sum(bit.value for bit, tensor in parts if tensor is not None)
    assert p.plan is not None
    values = {**p.bound.values, "branch_desc": Slot("branch", box_of(branch, call.layout, p.plan.problem.block_k).over)}
    for name, letter, of, t in (("GateB", "y", "gate_branch", gate_branch), ("Gate", "z", "gate", gate)):
        if t is not None:
            values |= {name: Slot(of), **strides_named(letter, _gate_strides(t, call.layout), "bmh")}
    given, constants = (*GIVEN, "branch", "gate_branch", "gate"), {**made.keywords, "MIXED": bits}
    return Bound.of(made.fn, made.grid, given, values, constants, made.device, num_warps=made.keywords["num_warps"])


def _gate_strides(gate: torch.Tensor, layout: str) -> tuple[int, int, int]:
    first, second, third = fuse.gate_strides(gate, layout)
    return (first, second, third) if layout == "bshd" else (first, third, second)

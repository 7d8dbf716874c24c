"""Binding of the Gluon kernel for block-sparse attention on sm_90."""

from typing import TYPE_CHECKING, Any

import torch

from ..bound import Bound, Slot, attribute, strides_named
from ..call import Call
from ..dense.attention_parts import GIVEN, TENSORS, sequence_strides
from ..hopper import WORK_COUNTER, box_of, require
from .sparse_parts import LISTED, list_strides, list_values

if TYPE_CHECKING:
    from ...plan.sparse.sparse import SparsePlan

NO_GATES = {f"stride_{name}": 0 for name in ("yb", "ym", "yh", "zb", "zm", "zh")}


def bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    scale: float,
    plan: "SparsePlan",
    out_shape: tuple[int, ...],
) -> Bound:
    """Kernel, descriptors, run-time scalars and compile-time constants of this call; Unsupported without Gluon."""
    from ...plan.hopper import PRODUCER_REGISTERS, REGISTERS
    from ...plan.sparse.sparse_hopper import box_rows, is_masked, key_slots, warpgroups

    require("plan.kernel", plan.kernel)
    from ...kernels.hopper.sparse_forward import sparse_forward_hopper

    problem, index = plan.problem, call.lists
    n = problem.attention
    at_launch, folding = REGISTERS[warpgroups(problem)]
    constants = {
        "D": n.dim_qk,
        "KV_BLOCK": problem.block_k,
        "PAGE": problem.page_size,
        "WARPGROUPS": problem.block_q // 64,
        "K_SLOTS": key_slots(problem, plan.tile),
        "V_SLOTS": plan.num_stages,
        "MASKED": is_masked(problem),
        "SIZED": problem.masked,
        "Q_SIZED": index.query_sizes is not None,
        "CAUSAL": n.causal,
        "MIXED": 0,
        "CONSUMER_REGISTERS": folding,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }
    values, grid = values_of_lengths(q, call, plan, out_shape)
    keys, lists = box_rows(problem), list_values(call)
    boxes = {name: box_of(t, call.layout, rows) for name, t, rows in (("q", q, 64), ("k", k, keys), ("v", v, keys))}
    values |= {
        **TENSORS,
        **{f"{name}_desc": Slot(name, box.over) for name, box in boxes.items()},
        "branch_desc": Slot("q", boxes["q"].over),  # which nothing reads
        **lists,
        # counts stand for sizes that there are none of, and are not read as such
        **{name: lists[name] or lists["Count"] for name in ("Sizes", "QuerySizes")},
        "scale": scale,
        "heads": n.heads,
        "group": n.group,
        "Counter": WORK_COUNTER,
        "GateB": Slot("lse"),
        "Gate": Slot("lse"),
        **NO_GATES,
        **_places(q, n.batch, call),
    }
    options = {"num_warps": plan.num_warps, "maxnreg": at_launch}
    return Bound.of(sparse_forward_hopper, grid, GIVEN, values, constants, q.device, **options)


def values_of_lengths(
    q: torch.Tensor, call: Call, plan: "SparsePlan", out_shape: tuple[int, ...]
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """Numbers that differ with the lengths of a call, and the grid; plan: of these, or of others that make the same tiles."""
    problem, n = plan.problem, plan.problem.attention
    blocks = -(-call.lists.seq_q // problem.block_q)
    items = n.batch * n.heads * blocks
    if call.packed is not None:  # places of all sequences: kernels.hopper.scheduler.sequence_of_place
        blocks = q.shape[0] // problem.block_q + n.batch
        items = n.heads * blocks
    values = {
        **strides_named("", list_strides(call.lists), LISTED),
        "seq_q": call.lists.seq_q,
        "seq_k": call.lists.seq_k,
        "q_blocks": blocks,
        "items": items,
        **strides_named("o", sequence_strides(out_shape, call.layout), "bmh"),
    }
    return values, (min(plan.grid[0], items), 1, 1)


def _places(q: torch.Tensor, batch: int, call: Call) -> dict[str, Any]:
    """Where sequences, or pages, begin; None for what the call does not have."""
    packed, paged = call.packed, call.paged
    return {
        "CuQ": attribute("call", "source.cu_q", packed),
        "CuK": attribute("call", "source.cu_k", packed),
        "batch": None if packed is None else batch,
        "total_q": None if packed is None else q.shape[0],
        "Table": attribute("call", "source.block_table", paged),
        "Lengths": attribute("call", "source.cache_seqlens", paged),
        "stride_tb": None if paged is None else paged.block_table.stride(0),
    }

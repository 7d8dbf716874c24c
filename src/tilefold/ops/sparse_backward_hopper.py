"""Binding of the Gluon kernels for the backward pass of block-sparse attention on sm_90.

Statistics of the queries, the places of ds, and then, for a few KV heads at a time, dk and dv with ds kept, and dq from it.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import Unsupported
from . import sparse
from .attention import describe_box, head_strides

if TYPE_CHECKING:
    from ..plan.sparse_backward import SparseBackwardPlan
    from .sparse_call import Lists, SparseCall

__all__ = ["HopperBound", "bind", "example_parts", "run"]

BLOCK = 64
ENTRIES = 128  # list entries that a program of list_places looks up at a time


@dataclass(slots=True)
class HopperBound:
    """The launches of a backward pass, each with the arguments that do not change from call to call."""

    plan: "SparseBackwardPlan"
    statistics: Any
    statistics_tail: tuple[Any, ...]
    places: Any
    places_tail: tuple[Any, ...]
    keys: tuple[tuple[Any, tuple[Any, ...]], ...]  # (launch, its tail) for some KV heads after the others
    queries: tuple[tuple[Any, tuple[Any, ...]], ...]
    boxes: tuple[Any, ...]  # of q, dout, k, v
    statistics_box: Any
    kept_box: Any
    statistics_shape: tuple[int, ...]
    kept_shape: tuple[int, int]


def bind(
    saved: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    call: "SparseCall",
    transposed: "Lists",
    plan: "SparseBackwardPlan",
    scale: float,
) -> HopperBound:
    """Unsupported where Gluon is missing."""
    from ..kernels import hopper

    if refusal := hopper.refusal():
        raise Unsupported(f"backward_plan.kernel is {plan.kernel!r}, but {refusal}")
    from ..kernels.backward_statistics import backward_statistics
    from ..kernels.hopper.gluon import TensorDescriptor, gl
    from ..kernels.list_places import list_places
    from .launch import Box, Launch

    q, k, v, out, _ = saved
    n = plan.problem.attention
    q_blocks, rows = -(-n.seq_q // BLOCK), n.batch * n.heads
    turned = transposed._replace(block_sizes=call.lists.block_sizes, query_sizes=call.lists.query_sizes)
    lists, back = sparse.list_strides(call.lists), sparse.list_strides(turned)
    device = q.device.index or 0
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    swizzled = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK, BLOCK], dtype)
    kept_shape = (plan.heads * n.group * q_blocks * plan.problem.capacity * BLOCK, BLOCK)
    statistics_shape = (rows * q_blocks + 1, 2, BLOCK)
    numbers = math.prod(statistics_shape)
    out_strides, do_strides = head_strides(out, call.layout), head_strides(dout, call.layout)
    wide = max(out_strides[1], do_strides[1]) * BLOCK >= 1 << 31
    steps = max(1, math.ceil(math.log2(transposed.indices.shape[3] + 1)))
    keys, queries = _by_heads(saved, call, plan, scale, lists, back, device)
    return HopperBound(
        plan,
        Launch(backward_statistics, (rows * q_blocks + 1, 1, 1), {"WIDE": wide, "DIM": n.dim_v, "BLOCK_D": n.block_v,
                                                                  "BLOCK": BLOCK}, {"num_warps": 4}, device),
        (n.seq_q, n.heads, q_blocks, *out_strides, *do_strides, *lists[7:9]),
        Launch(list_places, (rows * q_blocks, 1, 1), {"ENTRIES": ENTRIES}, {"num_warps": 4}, device),
        (n.heads, q_blocks, plan.problem.capacity, steps, *lists[:5], *back[:5]),
        keys,
        queries,
        tuple(describe_box(t, call.layout, BLOCK, BLOCK, TensorDescriptor, swizzled) for t in (q, dout, k, v)),
        Box(torch.empty(numbers, device="meta"), [numbers], [1], [2 * BLOCK], TensorDescriptor, gl.NVMMASharedLayout(0, 32, 1)),
        Box(torch.empty(kept_shape, dtype=q.dtype, device="meta"), list(kept_shape), [BLOCK, 1], [BLOCK, BLOCK], TensorDescriptor,
            gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], dtype)),
        statistics_shape,
        kept_shape,
    )  # fmt: skip


def _by_heads(
    saved: tuple[torch.Tensor, ...],
    call: "SparseCall",
    plan: "SparseBackwardPlan",
    scale: float,
    lists: tuple[int, ...],
    back: tuple[int, ...],
    device: int,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The launches for `plan.heads` KV heads after the others, and their tails."""
    from ..kernels.hopper.sparse_backward_keys import sparse_backward_keys_hopper
    from ..kernels.hopper.sparse_backward_sums import sparse_backward_sums_hopper
    from .launch import Launch

    n, capacity = plan.problem.attention, plan.problem.capacity
    q_blocks, kv_blocks = -(-n.seq_q // BLOCK), -(-n.seq_k // BLOCK)
    fresh = [head_strides(torch.empty(t.shape, device="meta"), call.layout) for t in saved[:3]]
    common = {"D": n.dim_qk, "CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 24, "SIZED": plan.problem.masked}
    masked = plan.problem.masked or n.seq_k % BLOCK != 0
    of_keys = {**common, "SLOTS": plan.keys.num_stages, "MASKED": masked, "Q_SIZED": plan.problem.query_masked}
    of_queries = {**common, "SLOTS": plan.queries.num_stages}
    options = {"num_warps": 4, "maxnreg": 128}
    per_row, rows, kept = q_blocks * capacity, n.batch * n.heads, plan.heads * n.group * q_blocks * capacity * BLOCK
    keys, queries = [], []
    for first in range(0, n.batch * n.kv_heads, plan.heads):
        here = min(plan.heads, n.batch * n.kv_heads - first)
        launch = Launch(sparse_backward_keys_hopper, (here * kv_blocks, 1, 1), of_keys, options, device)
        keys.append((launch, (scale, n.seq_q, n.seq_k, n.heads, n.group, q_blocks, kv_blocks, first, rows * q_blocks, per_row,
                              kept, *fresh[1], *fresh[2], *back)))  # fmt: skip
        launch = Launch(sparse_backward_sums_hopper, (here * n.group * q_blocks, 1, 1), of_queries, options, device)
        queries.append(
            (launch, (scale, n.seq_q, n.heads, n.group, q_blocks, first * n.group, capacity, *fresh[0], *lists[:7]))
        )
    return tuple(keys), tuple(queries)


def run(
    bound: HopperBound,
    saved: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: "SparseCall",
    transposed: "Lists",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv)."""
    q, k, v = saved[:3]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    statistics, places, keys, queries = _arguments(bound, saved, dout, dlse, call, transposed, (dq, dk, dv))
    bound.statistics(statistics)
    bound.places(places)
    for (make_keys, keys_tail), (make_queries, queries_tail) in zip(bound.keys, bound.queries, strict=True):
        make_keys((*keys, *keys_tail))
        make_queries((*queries, *queries_tail))
    return dq, dk, dv


def _arguments(
    bound: HopperBound,
    saved: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: "SparseCall",
    transposed: "Lists",
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[tuple[Any, ...], ...]:
    """The run-time arguments of the four kernels, but for those that the heads of a launch decide."""
    q, k, v, out, lse = saved
    dq, dk, dv = gradients
    lists = call.lists
    statistics = torch.empty(bound.statistics_shape, dtype=torch.float32, device=q.device)
    kept = torch.empty(bound.kept_shape, dtype=q.dtype, device=q.device)
    places = torch.empty_like(transposed.indices)
    # Counts stand for sizes that there are none of, and are not read as such.
    sizes, query_sizes = (lists.counts if t is None else t for t in (lists.block_sizes, lists.query_sizes))
    q_box, do_box, k_box, v_box = (box.over(t) for box, t in zip(bound.boxes, (q, dout, k, v), strict=True))
    kept_box = bound.kept_box.over(kept)
    return (
        (out, dout, lse, dlse, lists.query_sizes, statistics, *bound.statistics_tail),
        (*lists[:2], *transposed[:2], places, *bound.places_tail),
        (q_box, do_box, k_box, v_box, bound.statistics_box.over(statistics), kept_box, dk, dv, *transposed[:2], places,
         sizes, query_sizes),
        (k_box, kept_box, dq, *lists[:2], sizes),
    )  # fmt: skip


def example_parts(
    bound: HopperBound, saved: tuple[torch.Tensor, ...], dout: torch.Tensor, call: "SparseCall", transposed: "Lists"
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """(launch, args) of each part on tensors without memory, to compile ahead."""
    args = _arguments(bound, saved, dout, None, call, transposed, saved[:3])  # type: ignore[arg-type]
    (make_keys, keys_tail), (make_queries, queries_tail) = bound.keys[0], bound.queries[0]
    return {
        "statistics": (bound.statistics, args[0]),
        "places": (bound.places, args[1]),
        "keys": (make_keys, (*args[2], *keys_tail)),
        "queries": (make_queries, (*args[3], *queries_tail)),
    }

"""Launches of block-sparse attention on tensors without memory, to compile ahead."""

from typing import TYPE_CHECKING

import torch

from ..bound import Bound, Example, Prepared, meta
from ..call import Call, result_shapes, sizes_of
from ..dense.split import Split
from ..source import Lists, Packed, Paged
from . import sparse, sparse_mixed

if TYPE_CHECKING:
    from ...plan.sparse.sparse import SparsePlan


def example_call(
    plan: "SparsePlan",
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Call, Prepared, torch.Tensor, torch.Tensor]:
    """((q, k, v), call, its record, out, lse) of a call that has this plan, on tensors without memory."""
    n, problem = plan.problem.attention, plan.problem
    dtype = getattr(torch, n.dtype)
    source: Packed | Paged | None = None
    queries: tuple[int, ...] = (n.batch, n.seq_q)
    keys: tuple[int, ...] = (n.batch, n.seq_k)
    if n.varlen:
        queries, keys = (n.batch * n.seq_q,), (n.batch * n.seq_k,)
        offsets = meta(n.batch + 1, dtype=torch.int32)
        source = Packed(offsets, offsets, n.seq_q, n.seq_k)
    elif problem.page_size:
        pages = -(-n.seq_k // problem.page_size)
        keys = (n.batch * pages, problem.page_size)
        source = Paged(meta(n.batch, pages, dtype=torch.int32), meta(n.batch, dtype=torch.int32))
    q = meta(*queries, n.heads, n.dim_qk, dtype=dtype)
    k, v = (meta(*keys, n.kv_heads, d, dtype=dtype) for d in (n.dim_qk, n.dim_v))
    rows, blocks = -(-n.seq_q // problem.block_q), -(-n.seq_k // problem.block_k)
    lists = Lists(
        meta(n.batch, n.heads, rows, problem.capacity, dtype=torch.int32),
        meta(n.batch, n.heads, rows, dtype=torch.int32),
        meta(n.batch, n.heads, blocks, dtype=torch.int32) if problem.masked else None,
        None,
        problem.block_q,
        problem.block_k,
        n.seq_q,
        n.seq_k,
    )
    call = Call(causal=n.causal, plan=plan, source=source, lists=lists)
    sizes = sizes_of(q, k, v, call)
    shapes = result_shapes(call, sizes)
    p = sparse.bind(q, k, v, call, sizes, 1.0, plan, shapes)
    return (q, k, v), call, p, meta(*shapes[0], dtype=dtype), meta(*shapes[1])


def example_launch(plan: "SparsePlan", merge: bool = False, mixed: bool = False) -> Example:
    """(kernel, args, kwargs) of a call that has this plan, of its merge, or with another branch mixed in, on tensors without
    memory, to compile ahead."""
    qkv, call, p, out, lse = example_call(plan)
    split = p.bound if isinstance(p.bound, Split) else None
    bound: Bound = p.bound if split is None else split.launch
    if merge:
        assert split is not None
        return split.merge.example((meta(plan.splits, *p.out_shape), meta(plan.splits, *p.lse_shape), out, lse))
    given = (*qkv, out, lse, call)
    if mixed:
        branch, gate = meta(*p.out_shape, dtype=out.dtype), meta(*p.out_shape[:3], dtype=out.dtype)
        bound, given = sparse_mixed.bind(p, call, out, branch, gate, gate), (*given, branch, gate, gate)  # type: ignore[assignment]
    return bound.example(given)

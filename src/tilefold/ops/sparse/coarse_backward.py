"""Coarse attention: its call, what all of its kernels share; backward: statistics, dq, and dk and dv over shares of
the queries."""

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ..backward.backward_parts import ROWS, boxes, delta_bound, readable, side_strides, statistics_by, tiled
from ..bound import Bound, Example, Prepared, meta, strides_named
from ..dense.attention_parts import boxable, dims_of, lengths_of
from ..device import interpreting
from ..serve import BoundFunction, function_at
from ..source import facts_of
from .project import size_strides
from .sparse_parts import Launches

if TYPE_CHECKING:
    from ...plan.sparse.coarse import CoarsePlan


class CoarseCall(NamedTuple):
    """Everything but q and the rows of k and v.

    reduction: "mean", "max", or "each" if every query is a block of its own (query_sizes then says which are live).
    finite: dead rows of k and v hold finite numbers.  names: of the rows of k and v, for errors."""

    block_sizes: torch.Tensor | None
    query_sizes: torch.Tensor | None
    block: int
    scale: float | None
    reduction: str
    layout: str
    finite: bool
    names: str = "k v"


def constants_of(plan: "CoarsePlan", dtype: torch.dtype, wide: bool) -> dict[str, Any]:
    """Compile-time constants that the three kernels share; wide: rows of one tile lie 2^31 elements or more apart."""
    return {
        "EMULATE": interpreting() and dtype == torch.bfloat16,
        "WIDE": wide,
        "Q_BLOCK": plan.problem.block,
        **dims_of(plan.problem.attention),
    }


def values_of(plan: "CoarsePlan", call: CoarseCall, scale: float) -> dict[str, Any]:
    """Lengths and strides of sizes by the names that the three kernels share."""
    return {
        **lengths_of(plan.problem.attention),
        "scale": scale,
        **strides_named("s", size_strides(call.block_sizes), "bh"),
        **strides_named("p", size_strides(call.query_sizes), "bh"),
    }


# ---------------------------------------------------------------- the gradients

GIVEN = ("Q", "K", "V", "DOut", "Lse2", "Delta", "DQ", "DK", "DV", "Sizes", "QuerySizes")
"""What a call gives to the kernels of its gradients."""


def backward(
    p: Prepared,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: CoarseCall,
    want_q: bool,
    want_rows: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), contiguous, empty where not wanted; saved: q, k, v, out, lse of the forward pass."""
    q, k, v, out, lse = saved
    plan = cast("CoarsePlan", p.plan)
    if isinstance(p.bound, BoundFunction):
        own = function_at("attend_rows_backward", q.device, call.layout, p.scale)
        dq, dk, dv = own((*saved, dout, dlse, call.block_sizes, (want_q, want_rows, want_rows)))
        return dq, dk, dv
    dout, dlse = readable(dout), None if dlse is None else dlse.contiguous()
    key = facts_of(dout), None if dlse is None else facts_of(dlse)
    bound: Launches = p.further.get(key) or p.further.setdefault(key, bind(plan, (q, k, v, out), dout, call, p.scale))
    rows = q, k, v, dout, *statistics_by(bound.delta, out, dout, lse, dlse)
    dq, dk, dv = (t.new_empty(0) for t in (q, k, v))
    sizes = call.block_sizes, live_queries(call)
    if want_q:
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        bound.queries((*rows, dq, None, None, *sizes))
    if want_rows and bound.keys is not None:
        parts = shares(plan, q.device)
        bound.keys((*rows, None, *parts, *sizes))
        dk, dv = (_added(part, call.layout, t.dtype) for part, t in zip(parts, (k, v), strict=True))
    return dq, dk, dv


def shares(plan: "CoarsePlan", device: torch.device | str) -> list[torch.Tensor]:
    """Room for what each share of the queries adds to dk and dv."""
    n = plan.problem.attention
    lead = plan.shares * n.group, n.batch, n.kv_heads, n.seq_k
    return [torch.empty((*lead, d), dtype=torch.float32, device=device) for d in (n.dim_qk, n.dim_v)]


def live_queries(call: CoarseCall) -> torch.Tensor | None:
    """Pooled queries of empty blocks are finite and have lse -inf, which is enough."""
    return None if call.reduction == "each" else call.query_sizes


def _added(part: torch.Tensor, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Shares [shares, B, H, rows, D] fp32 added up in order, as [B, rows, H, D] (or with H before)."""
    total = part[0] if part.shape[0] == 1 else part.sum(0)
    return (total.transpose(1, 2) if layout == "bshd" else total).to(dtype, memory_format=torch.contiguous_format)


def bind(
    plan: "CoarsePlan", tensors: tuple[torch.Tensor, ...], dout: torch.Tensor, call: CoarseCall, scale: float
) -> Launches:
    """tensors: q, k, v, out."""
    from ...kernels.sparse import coarse_backward as kernels

    q, k, v, out = tensors
    n, layout = plan.problem.attention, cast("Any", call.layout)
    strides = side_strides(layout, q=q, k=k, v=v, d=dout, o=out, g=meta(*q.shape))
    wide = max(strides[f"stride_{name}"] for name in ("qm", "kn", "vn", "dm", "om")) * ROWS >= 1 << 31
    constants = constants_of(plan, q.dtype, wide)
    live = live_queries(call)
    values = {**strides, **values_of(plan, call._replace(query_sizes=live), scale)}
    kv_box, q_box = plan.boxes[1], plan.boxes[2] and boxable(dout)
    of_k = boxes(layout, plan.queries.block_n, K=(k, n.block_qk), V=(v, n.block_v)) if kv_box else {}
    of_q = boxes(layout, plan.keys.block_m, Q=(q, n.block_qk), DOut=(dout, n.block_v)) if q_box else {}
    edge = live is not None or n.seq_q % plan.keys.block_m != 0

    def bound(part: str, tile: Any, own: dict[str, Any], **more: bool) -> Any:
        kernel = getattr(kernels, f"coarse_backward_{part}")
        return tiled(kernel, tile, plan.grid(part), GIVEN, {**values, **own}, {**constants, **more}, q.device)

    return Launches(
        delta_bound(n, n.seq_q * n.batch, n.seq_q, wide, strides, q.device),
        bound("queries", plan.queries, of_k, BOX=kv_box),
        bound("keys", plan.keys, of_q, BOX=q_box, EDGE=edge),
    )


def example_launch(
    plan: "CoarsePlan", tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, call: CoarseCall, part: str
) -> Example:
    """(kernel, args, kwargs) of "queries" or "keys" on tensors without memory: q, k, v and out."""
    q, k, v, out = tensors
    bound: Bound = getattr(bind(plan, tensors, out, call, 1.0), part)
    return bound.example((q, k, v, out, lse, lse, q, *shares(plan, "meta"), call.block_sizes, call.query_sizes))

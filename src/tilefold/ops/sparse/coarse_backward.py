"""Backward coarse attention: statistics, dq, and dk and dv over shares of the queries."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from .. import torch_cpu
from ..backward.backward_parts import ROWS, delta_launch, readable, tiled
from ..call import facts_of
from ..dense.attention_parts import boxable, describe_box, head_strides
from .project import size_strides

if TYPE_CHECKING:
    from ...plan.coarse import CoarsePlan
    from .coarse_parts import CoarseCall, Prepared

__all__ = ["Bound", "backward", "bind"]


@dataclass(slots=True)
class Bound:
    """The three launches of a backward pass, each with the arguments that do not change from call to call."""

    delta: Any
    delta_tail: tuple[Any, ...]
    queries: Any
    queries_boxes: tuple[Any, ...]  # of k and v, or none
    queries_tail: tuple[Any, ...]
    keys: Any
    keys_boxes: tuple[Any, ...]  # of q and dout, or none
    keys_tail: tuple[Any, ...]


def backward(
    p: "Prepared",
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    call: "CoarseCall",
    want_q: bool,
    want_rows: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), contiguous, empty where not wanted; saved: q, k, v, out, lse of the forward pass."""
    q, k, v, out, lse = saved
    plan = cast("CoarsePlan", p.plan)
    if torch_cpu.on_cpu(plan):
        grads = [
            torch.empty(t.shape, dtype=t.dtype) if w else None
            for t, w in zip((q, k, v), (want_q, want_rows, want_rows), strict=True)
        ]
        first = [None if t is None else torch_cpu.heads_first(t, call.layout) for t in (q, k, v, dout, *grads)]
        delta = torch_cpu.delta_of(out, dout, dlse, call.layout == "bshd")
        run = torch_cpu.served("attend_rows_backward")
        run(*first[:3], (lse, delta), first[3], call.block_sizes, p.scale, tuple(first[4:]))
        dq, dk, dv = (t.new_empty(0) if g is None else g for g, t in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv
    dout, dlse = readable(dout), None if dlse is None else dlse.contiguous()
    key = facts_of(dout), None if dlse is None else facts_of(dlse)
    bound: Bound = p.backward.get(key) or bind(plan, (q, k, v, out), dout, call, p.scale)
    p.backward[key] = bound
    statistics = torch.empty((2, *lse.shape), dtype=torch.float32, device=lse.device)
    lse2, delta = statistics.unbind()
    bound.delta((out, dout, lse, dlse, lse2, delta, *bound.delta_tail))
    sizes = call.block_sizes, live_queries(call)
    dq, dk, dv = (t.new_empty(0) for t in (q, k, v))
    if want_q:
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        sides = _boxed(bound.queries_boxes, k, v)
        bound.queries((q, *sides, dout, lse2, delta, dq, *sizes, *bound.queries_tail))
    if want_rows:
        n = plan.problem.attention
        lead = plan.shares * n.group, n.batch, n.kv_heads, n.seq_k
        parts = [torch.empty((*lead, d), dtype=torch.float32, device=q.device) for d in (n.dim_qk, n.dim_v)]
        boxed_q, boxed_do = _boxed(bound.keys_boxes, q, dout)
        bound.keys((boxed_q, k, v, boxed_do, lse2, delta, *parts, *sizes, *bound.keys_tail))
        dk, dv = (_added(part, call.layout, t.dtype) for part, t in zip(parts, (k, v), strict=True))
    return dq, dk, dv


def live_queries(call: "CoarseCall") -> torch.Tensor | None:
    """Pooled queries of empty blocks are finite and have lse -inf, which is enough."""
    return None if call.reduction == "each" else call.query_sizes


def _added(part: torch.Tensor, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Shares [shares, B, H, rows, D] fp32 added up in order, as [B, rows, H, D] (or with H before)."""
    total = part[0] if part.shape[0] == 1 else part.sum(0)
    return (total.transpose(1, 2) if layout == "bshd" else total).to(dtype, memory_format=torch.contiguous_format)


def _boxed(boxes: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[Any, ...]:
    return tuple(box.over(t) for box, t in zip(boxes, tensors, strict=True)) if boxes else tensors


def bind(
    plan: "CoarsePlan", tensors: tuple[torch.Tensor, ...], dout: torch.Tensor, call: "CoarseCall", scale: float
) -> Bound:
    """tensors: q, k, v, out."""
    from ...kernels import coarse_backward as kernels
    from .coarse_parts import constants_of

    q, k, v, out = tensors
    n, layout, device = plan.problem.attention, cast("Any", call.layout), q.device.index or 0
    sides = [head_strides(t, layout) for t in (q, k, v, dout)]
    inputs = tuple(one for s in sides for one in s)
    dq_strides = head_strides(torch.empty(q.shape, device="meta"), layout)
    out_strides = head_strides(out, layout)
    wide = max(s[1] for s in (*sides, out_strides)) * ROWS >= 1 << 31
    constants = constants_of(plan, q.dtype, wide)
    strides = *size_strides(call.block_sizes), *size_strides(live_queries(call))
    lengths = scale, n.seq_q, n.seq_k
    edge = live_queries(call) is not None or n.seq_q % plan.keys.block_m != 0
    kv_box, q_box = plan.boxes[1], plan.boxes[2] and boxable(dout)

    def part(fn: Any, name: str, **more: Any) -> Any:
        return tiled(fn, plan.tile(name), plan.grid(name), {**constants, **more}, device)

    def boxes(wanted: bool, rows: int, *pair: torch.Tensor) -> tuple[Any, ...]:
        widths = n.block_qk, n.block_v
        return tuple(describe_box(t, layout, rows, w) for t, w in zip(pair, widths, strict=True)) if wanted else ()

    return Bound(
        delta_launch(n, n.seq_q * n.batch, n.seq_q, wide, device),
        (n.seq_q, n.heads, *out_strides, *sides[3]),
        part(kernels.coarse_backward_queries, "queries", BOX=kv_box),
        boxes(kv_box, plan.queries.block_n, k, v),
        (*lengths, n.heads, n.group, *inputs, *dq_strides, *strides),
        part(kernels.coarse_backward_keys, "keys", BOX=q_box, EDGE=edge),
        boxes(q_box, plan.keys.block_m, q, dout),
        (*lengths, n.kv_heads, n.group, n.batch, *inputs, *strides),
    )


def example_launch(
    plan: "CoarsePlan", tensors: tuple[torch.Tensor, ...], lse: torch.Tensor, call: "CoarseCall", part: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of "queries" or "keys" on tensors without memory: q, k, v and out."""
    q, k, v, out = tensors
    bound = bind(plan, tensors, out, call, 1.0)
    n, sizes = plan.problem.attention, (call.block_sizes, call.query_sizes)
    if part == "queries":
        sides = _boxed(bound.queries_boxes, k, v)
        return bound.queries.fn, (q, *sides, out, lse, lse, q, *sizes, *bound.queries_tail), bound.queries.keywords
    lead = plan.shares * n.group, n.batch, n.kv_heads, n.seq_k
    parts = [torch.empty((*lead, d), dtype=torch.float32, device="meta") for d in (n.dim_qk, n.dim_v)]
    boxed_q, boxed_do = _boxed(bound.keys_boxes, q, out)
    return bound.keys.fn, (boxed_q, k, v, boxed_do, lse, lse, *parts, *sizes, *bound.keys_tail), bound.keys.keywords

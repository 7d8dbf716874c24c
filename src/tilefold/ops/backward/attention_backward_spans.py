"""Binding of the Gluon kernel for dense gradients on sm_90 where the queries are made in spans: a launch for each, in one room.

The rows of each gradient: dq has its span's, in place; dk and dv are fp32 sums to which each launch adds.  Statistics are made
once, for all queries; a launch reads its own from there."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...types import Layout
from ..call import Call
from ..dense.attention import example_call
from ..first_call import in_background
from ..hopper import chosen_or_none
from .attention_backward_hopper import main_launch
from .hopper_backward import (
    STATISTICS,
    UNIT,
    kept_box,
    side_boxes,
    statistics_arguments,
    statistics_box,
    statistics_launch,
)

if TYPE_CHECKING:
    from ...plan.attention import AttentionPlan
    from ...plan.attention_backward import AttentionBackwardPlan
    from ...plan.attention_backward_spans import Span
    from ...plan.problem import AttentionProblem
    from ..launch import Box

__all__ = ["SpansBound", "bind", "bound_launches", "cut", "example_launch", "run", "sums", "unseen"]

Tensors = tuple[torch.Tensor, ...]


class SpanLaunch(NamedTuple):
    """The launch for one span, with what does not change from call to call."""

    span: "Span"
    main: Any
    tail: tuple[Any, ...]
    boxes: "tuple[Box, ...]"  # of q, dout, k, v
    statistics_box: "Box"
    counters: tuple[int, int]  # first and behind the last of its counters


@dataclass(slots=True)
class SpansBound:
    """All launches of a backward pass."""

    plan: "AttentionBackwardPlan"
    layout: Layout
    statistics: Any
    statistics_tail: tuple[int, ...]
    launches: tuple[SpanLaunch, ...]  # of the spans that have keys
    kept_box: "Box"
    sizes: tuple[int, int, int, int]  # rows of statistics, counters, rows of dS, fp32 numbers of sums between stripes


def bind(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> SpansBound | None:
    """The bound launches; None, after a warning, if this Triton cannot make them, or an error if the caller chose the plan.

    tensors: q, k, v, out."""

    def made() -> SpansBound:
        return bound_launches(scale, tensors, dout, call, plan)

    def compile(bound: SpansBound) -> None:
        made = scratch(bound, tensors, "meta")
        lse = torch.empty(made[0].shape, device="meta")
        small = statistics_arguments(bound, tensors, dout, lse, None, made)
        in_background(lambda: bound.statistics.compile(small))
        kinds = {tuple(one.main.keywords.items()): one for one in bound.launches}
        for one in kinds.values():
            one.main.compile(arguments(bound, one, tensors, dout, made))

    return chosen_or_none(plan, call.backward_plan, "dense", made, compile, "its backward pass")


def run(
    bound: SpansBound, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
) -> Tensors:
    """(dq, dk, dv), contiguous; tensors: q, k, v, out; dlse like lse or None."""
    dq, dk, dv = sums(bound, tensors, dout, lse, dlse)
    return dq, dk.to(tensors[1].dtype), dv.to(tensors[2].dtype)


def sums(
    bound: SpansBound, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> Tensors:
    """(dq, dk, dv), dk and dv in fp32."""
    made = scratch(bound, tensors, tensors[0].device)
    bound.statistics(statistics_arguments(bound, tensors, dout, lse, dlse, made))
    for one in bound.launches:
        one.main(arguments(bound, one, tensors, dout, made))
    dq, dk, dv = made[4:]
    del made  # the room for dS, before anything else is made room for
    for rows, gradients in zip(
        unseen(bound.plan.spans, tensors[1].shape[_rows(bound.layout)]), ((dq,), (dk, dv)), strict=True
    ):
        for low, high in rows:
            for gradient in gradients:
                cut(gradient, bound.layout, low, high).zero_()
    return dq, dk, dv


def scratch(bound: SpansBound, tensors: Tensors, device: Any) -> Tensors:
    """Statistics, progress, rooms for dS, sums between stripes; then dq, and dk and dv in fp32."""
    rows, counters, kept, sums = bound.sizes
    return (
        torch.empty(rows * STATISTICS, dtype=torch.float32, device=device),
        torch.empty(counters, dtype=torch.int32, device=device),
        torch.empty(kept, UNIT, dtype=tensors[0].dtype, device=device),
        torch.empty(max(1, sums), dtype=torch.float32, device=device),
        torch.empty(tensors[0].shape, dtype=tensors[0].dtype, device=device),
        *(torch.empty(t.shape, dtype=torch.float32, device=device) for t in tensors[1:3]),
    )


def arguments(
    bound: SpansBound, one: SpanLaunch, tensors: Tensors, dout: torch.Tensor, made: Tensors
) -> tuple[Any, ...]:
    """The kernel's run-time arguments for one span, in order."""
    statistics, progress, kept, sums, dq, dk, dv = made
    q, dout, dq = (cut(t, bound.layout, *one.span[:2]) for t in (tensors[0], dout, dq))
    k, v, dk, dv = (cut(t, bound.layout, *one.span[2:4]) for t in (*tensors[1:3], dk, dv))
    sides = (box.over(t) for box, t in zip(one.boxes, (q, dout, k, v), strict=True))
    first = one.span.q_low // UNIT * STATISTICS
    boxes = one.statistics_box.over(statistics[first:]), bound.kept_box.over(kept)
    return *sides, *boxes, dq, dk, dv, sums, progress[slice(*one.counters)], *one.tail


def cut(t: torch.Tensor, layout: Layout, low: int, high: int) -> torch.Tensor:
    """Rows low to high of every head."""
    return t.narrow(_rows(layout), low, high - low)


def unseen(spans: "tuple[Span, ...]", seq_k: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Which rows of dq, and which of dk and dv, no launch writes: queries without keys, keys before and behind all spans'."""
    seen = [span for span in spans if span.k_high > span.k_low]
    queries = [span[:2] for span in spans if span.k_high == span.k_low]
    ends = (0, seen[0].k_low), (seen[-1].k_high, seq_k)
    return queries, [(low, high) for low, high in ends if low < high]


def _rows(layout: Layout) -> int:
    return 1 if layout == "bshd" else 2


# ---------------------------------------------------------------- the first time


def bound_launches(
    scale: float, tensors: Tensors, dout: torch.Tensor, call: Call, plan: "AttentionBackwardPlan"
) -> SpansBound:
    """Launches, scalars, strides and descriptors of this call under this plan; tensors: q, k, v, out."""
    from ...plan import attention_backward_hopper as rules

    q, out, n = tensors[0], tensors[3], plan.problem
    q_units, _ = rules.tiles(n)
    rows = n.batch * n.heads * q_units + 1
    plans = list(_plans(plan))
    batches = [rules.batches_of(one.problem, one.heads_at_once, one.keys_at_once) for _, one in plans]
    counters = -(-(1 + 2 * max(batches)) // 4) * 4  # of each, so that they begin where 16 bytes do
    room = [_room(one) for _, one in plans]
    sizes = rows, counters * len(plans), max(kept for kept, _ in room), max(sums for _, sums in room)
    striped = any(-(-rules.tiles(one.problem)[1] * UNIT // one.keys_at_once) > 1 for _, one in plans)
    launches = []
    for i, (span, one) in enumerate(plans):
        first = span.q_low // UNIT
        own = rows - first, counters, sizes[2], sizes[3]
        main, tail = main_launch(one, scale, tensors, call, own, (span.written, q_units), striped)
        own_q, own_dout = (cut(t, call.layout, *span[:2]) for t in (q, dout))
        own_k, own_v = (cut(t, call.layout, *span[2:4]) for t in tensors[1:3])
        boxes = side_boxes(own_q, own_dout, own_k, own_v, call.layout)
        launches.append(SpanLaunch(span, main, tail, boxes, statistics_box(own[0]), (i * counters, (i + 1) * counters)))
    return SpansBound(
        plan,
        call.layout,
        *statistics_launch(n, out, dout, call.layout, 1, q_units, sizes[1], (0, 0)),
        tuple(launches),
        kept_box(sizes[2], q.dtype),
        sizes,
    )


def _plans(plan: "AttentionBackwardPlan") -> "Iterator[tuple[Span, AttentionBackwardPlan]]":
    """Each span that has keys, with the plan of its launch."""
    from ...plan.attention_backward_spans import batch_of, problem_of

    for span in plan.spans:
        if span.k_high > span.k_low:
            problem = problem_of(plan.problem, span)
            heads, keys = batch_of(problem, plan.heads_at_once, plan.keys_at_once)
            yield span, replace(plan, problem=problem, heads_at_once=heads, keys_at_once=keys, queries_at_once=0)


def _room(plan: "AttentionBackwardPlan") -> tuple[int, int]:
    """Rows of dS of a launch, fp32 numbers of its sums between stripes."""
    from ...plan import attention_backward_hopper as rules

    n, at_once = plan.problem, (plan.heads_at_once, plan.keys_at_once)
    kept = rules.kept_bytes(n, plan.device, *at_once) // (UNIT * n.itemsize)
    return kept, rules.partial_bytes(n, plan.device, at_once[1]) // 4


# ---------------------------------------------------------------- without a GPU


def example_launch(
    problem: "AttentionProblem", plan: "AttentionPlan", backward_plan: "AttentionBackwardPlan", part: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of the launch for the last span of a call that has these plans, on tensors without memory, to
    compile ahead; part: "main"."""
    inputs, call, _, out, _ = example_call(problem, plan)
    tensors = (*inputs, out)
    bound = bound_launches(1.0, tensors, out, call, backward_plan)
    one = {"main": bound.launches[-1]}[part]
    args = arguments(bound, one, tensors, out, scratch(bound, tensors, "meta"))
    return one.main.fn, args, one.main.keywords

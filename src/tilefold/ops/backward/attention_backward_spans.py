"""Binding of the Gluon kernel for dense gradients on sm_90 where the queries are made in spans: a launch for each.

The rows of each gradient: dq has its span's, in place; dk and dv are fp32 sums to which each launch adds.  Statistics are made
once, for all queries; a launch reads its own from there."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...types import Layout
from ..bound import Bound
from ..call import Call
from ..first_call import in_background
from .attention_backward_hopper import GIVEN, Sizes, main_bound, scratch_of
from .hopper_backward import STATISTICS, UNIT, Scratch, gradients_of, statistics_bound

if TYPE_CHECKING:
    from ...plan.backward.attention_backward import AttentionBackwardPlan
    from ...plan.backward.attention_backward_spans import Span

Tensors = tuple[torch.Tensor, ...]


class SpanLaunch(NamedTuple):
    """The launch for one span."""

    span: "Span"
    main: Bound
    counters: tuple[int, int]  # first and behind the last of its counters


@dataclass(slots=True)
class SpansBound:
    """All launches of a backward pass."""

    plan: "AttentionBackwardPlan"
    layout: Layout
    buffers: tuple[Scratch, ...]  # scratch, then dq, and dk and dv in fp32
    first: Bound
    launches: tuple[SpanLaunch, ...]  # of the spans that have keys

    def scratch(self, device: Any) -> Tensors:
        """New tensors for all of them."""
        return tuple([one.made(device) for one in self.buffers])

    def run(
        self, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
    ) -> Tensors:
        """(dq, dk, dv), contiguous; tensors: q, k, v, out; dlse like lse or None."""
        dq, dk, dv = self.sums(tensors, dout, lse, dlse, call)
        return dq, dk.to(tensors[1].dtype), dv.to(tensors[2].dtype)

    def sums(
        self, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
    ) -> Tensors:
        """(dq, dk, dv), dk and dv in fp32."""
        made = self.scratch(dout.device)
        self.first((*tensors, dout, lse, dlse, call, *made))
        for one in self.launches:
            one.main(self.given(one, tensors, dout, call, made))
        dq, dk, dv = made[4:]
        del made  # the ring of dS, before anything else is allocated
        rows = unseen(self.plan.spans, tensors[1].shape[_rows(self.layout)])
        for spans, gradients in zip(rows, ((dq,), (dk, dv)), strict=True):
            for low, high in spans:
                for gradient in gradients:
                    cut(gradient, self.layout, low, high).zero_()
        return dq, dk, dv

    def given(
        self, one: SpanLaunch, tensors: Tensors, dout: torch.Tensor, call: Call, made: Tensors
    ) -> tuple[Any, ...]:
        """What a call gives to the launch for one span."""
        statistics, progress, kept, sums, dq, dk, dv = made
        q, out, dout, dq = (cut(t, self.layout, *one.span[:2]) for t in (tensors[0], tensors[3], dout, dq))
        k, v, dk, dv = (cut(t, self.layout, *one.span[2:4]) for t in (*tensors[1:3], dk, dv))
        first = one.span.q_low // UNIT * STATISTICS
        own = statistics[first:], progress[slice(*one.counters)]
        return q, k, v, out, dout, None, None, call, *own, kept, sums, dq, dk, dv

    def compile(
        self, tensors: Tensors, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, call: Call
    ) -> None:
        """Compile for a call; raises what the compiler raises."""
        made = self.scratch("meta")
        given = (*tensors, dout, lse, dlse, call, *made)
        if not self.first.found(given):
            in_background(lambda: self.first.compile(given))
        kinds = {tuple(one.main.launch.keywords.items()): one for one in self.launches}
        for one in kinds.values():
            one.main.compile(self.given(one, tensors, dout, call, made))


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
    """The launches of this call under this plan; tensors: q, k, v, out."""
    from ...plan.backward import attention_backward_hopper as rules

    q, out, n = tensors[0], tensors[3], plan.problem
    q_units, _ = rules.tiles(n)
    rows = n.batch * n.heads * q_units + 1
    plans = list(_plans(plan))
    batches = [rules.batches_of(one.problem, one.heads_at_once, one.keys_at_once) for _, one in plans]
    counters = -(-(1 + 2 * max(batches)) // 4) * 4  # of each, so that they begin where 16 bytes do
    needs = [_needs(one) for _, one in plans]
    sizes: Sizes = rows, counters * len(plans), max(kept for kept, _ in needs), max(sums for _, sums in needs)
    split = any(-(-rules.tiles(one.problem)[1] * UNIT // one.keys_at_once) > 1 for _, one in plans)
    launches = []
    for i, (span, one) in enumerate(plans):
        own = rows - span.q_low // UNIT, counters, sizes[2], sizes[3]
        own_q, own_dout = (cut(t, call.layout, *span[:2]) for t in (q, dout))
        own_k, own_v = (cut(t, call.layout, *span[2:4]) for t in tensors[1:3])
        sides = own_q, own_dout, own_k, own_v
        main = main_bound(one, scale, tensors, sides, call, own, (span.written, q_units), split)
        launches.append(SpanLaunch(span, main, (i * counters, (i + 1) * counters)))
    return SpansBound(
        plan,
        call.layout,
        (*scratch_of(sizes, q.dtype), *gradients_of(tensors, torch.float32)),
        statistics_bound(n, out, dout, call.layout, q_units, sizes[1], GIVEN),
        tuple(launches),
    )


def _plans(plan: "AttentionBackwardPlan") -> "Iterator[tuple[Span, AttentionBackwardPlan]]":
    """Each span that has keys, with the plan of its launch."""
    from ...plan.backward.attention_backward_spans import batch_of, problem_of

    for span in plan.spans:
        if span.k_high > span.k_low:
            problem = problem_of(plan.problem, span)
            heads, keys = batch_of(problem, plan.heads_at_once, plan.keys_at_once)
            yield span, replace(plan, problem=problem, heads_at_once=heads, keys_at_once=keys, queries_at_once=0)


def _needs(plan: "AttentionBackwardPlan") -> tuple[int, int]:
    """Rows of dS of a launch, fp32 numbers of its sums between KV splits."""
    from ...plan.backward import attention_backward_hopper as rules

    n, at_once = plan.problem, (plan.heads_at_once, plan.keys_at_once)
    kept = rules.kept_bytes(n, plan.device, *at_once) // (UNIT * n.itemsize)
    return kept, rules.partial_bytes(n, plan.device, at_once[1]) // 4

"""Gradients of calls too long for the room of their dS: how queries are cut into spans, and that the sum over spans is the whole.

The kernel itself needs a GPU (tests/gpu); its protocol and its code ahead of time are held elsewhere.  Here the portable kernels
make the spans."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import judge, qkv, rand
from cases.gradient import oracle
from examples import examples
from tilefold.errors import PlanError
from tilefold.ops.backward import attention_backward
from tilefold.ops.backward.attention_backward_spans import bound_launches, cut, unseen
from tilefold.ops.call import Call
from tilefold.ops.dense import attention
from tilefold.plan import AttentionProblem, device_named, plan_attention
from tilefold.plan.backward import attention_backward_hopper as rules
from tilefold.plan.backward import attention_backward_spans as spans
from tilefold.plan.backward.attention_backward import AttentionBackwardPlan, _hopper, plan_attention_backward
from tilefold.plan.backward.kept_backward import least_kept

H200 = device_named("h200")
LONG = AttentionProblem(1, 32768, 32768, 32, 8, 128, 128, causal=True)
NARROWER = {"dim_qk": 96, "dim_v": 96}  # whose kernels are those of 128; no other kernel serves it
WINDOWS = ((-1, -1), (-1, 0), (70, 0), (0, 0), (0, -1), (100, 30), (-1, 5), (3, -1))


def seen(i: int, j: int, seq_q: int, seq_k: int, window: tuple[int, int]) -> bool:
    own = i + seq_k - seq_q
    return (window[0] < 0 or j >= own - window[0]) and (window[1] < 0 or j <= own + window[1])


# ---------------------------------------------------------------- the cut


@examples(150)
@given(
    seq_q=st.integers(1, 200),
    seq_k=st.integers(1, 200),
    window=st.sampled_from(WINDOWS),
    queries=st.sampled_from((64, 128)),
)
def test_every_pair_is_in_one_span(seq_q: int, seq_k: int, window: tuple[int, int], queries: int) -> None:
    """The mask of a rectangle is the call's; what is written before counts the keys of earlier spans; nothing else is unseen."""
    problem = AttentionProblem(1, seq_q, seq_k, 1, 1, 64, 64, window=window)
    found = spans.spans_of(problem, queries)
    assert [span.q_low for span in found] == list(range(0, seq_q, queries))
    made: set[int] = set()
    for low, high, k_low, k_high, own, written in found:
        assert high == min(low + queries, seq_q)
        for i in range(low, high):
            wanted = [j for j in range(seq_k) if seen(i, j, seq_q, seq_k, window)]
            rectangle = range(k_low, k_high)
            assert wanted == [j for j in rectangle if seen(i - low, j - k_low, high - low, k_high - k_low, own)]
        if k_high > k_low:
            assert min(own) >= -1
            assert sorted(made & set(range(k_low, k_high))) == list(range(k_low, k_low + written))
            made |= set(range(k_low, k_high))
    queries_left, keys_left = unseen(found, seq_k)
    assert [list(range(*rows)) for rows in queries_left] == [list(range(*s[:2])) for s in found if s[2] == s[3]]
    assert made | {j for rows in keys_left for j in range(*rows)} == set(range(seq_k))


def test_a_mask_keeps_its_kind() -> None:
    """A causal mask is causal in every span and a full one full: one compilation serves all."""
    for sides in ((-1, 0), (-1, -1)):
        problem = AttentionProblem(1, 1000, 1300, 1, 1, 64, 64, window=sides)
        assert {spans.problem_of(problem, span).sides for span in spans.spans_of(problem, 64)} == {sides}


CASES: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (150, 150, {"causal": True}),
    (70, 129, {"causal": True}),
    (200, 100, {"causal": True}),  # a span and more without keys
    (130, 90, {}),
    (150, 130, {"window": (40, 10)}),
    (100, 250, {"window": (20, 0)}),  # keys that nobody sees
)


@pytest.mark.parametrize(("seq_q", "seq_k", "options"), CASES, ids=str)
def test_the_sum_over_spans_is_the_whole(seq_q: int, seq_k: int, options: dict[str, Any]) -> None:
    """Each span with lse and out over all keys, as the launches are; dk and dv in fp32."""
    q, k, v = qkv(1, seq_q, seq_k, 2, 1, 32, dtype=torch.float16)
    call = Call(**options)
    out, lse = attention.forward(q, k, v, call)
    dout, dlse = rand(*out.shape, dtype=q.dtype), rand(*lse.shape)
    problem = AttentionProblem(1, seq_q, seq_k, 2, 1, 32, 32, causal=call.causal, window=call.window or (-1, -1))
    found = spans.spans_of(problem, 64)
    sums = [torch.full(t.shape, torch.nan) for t in (q, k, v)]
    for low, high, k_low, k_high, window, written in found:
        if k_low == k_high:
            continue
        rows, keys = (low, high), (k_low, k_high)
        saved = (cut(t, "bshd", *at) for t, at in zip((q, k, v, out), (rows, keys, keys, rows), strict=True))
        given = dout[:, low:high], dlse[:, :, low:high], Call(window=window), (True, True, True, False, False)
        got = attention_backward.backward((*saved, lse[:, :, low:high]), *given, whole=False)
        sums[0][:, low:high] = got[0]
        for total, part in zip(sums[1:], got[1:3], strict=True):
            total[:, k_low : k_low + written] += part[:, :written]
            total[:, k_low + written : k_high] = part[:, written:].float()
    for total, rows in zip(sums, (unseen(found, seq_k)[0], *[unseen(found, seq_k)[1]] * 2), strict=True):
        for low, high in rows:
            total[:, low:high] = 0.0
    want, plain = (oracle((q, k, v), dout, dlse, dtype, **options) for dtype in (torch.float64, q.dtype))
    for name, a, b, c in zip(("dq", "dk", "dv"), sums, want, plain, strict=True):
        judge(a.to(q.dtype), b, c, f"{name} {seq_q} {seq_k} {options}")


# ---------------------------------------------------------------- the plan


def kept(problem: AttentionProblem) -> AttentionBackwardPlan:
    """The plan that keeps dS, whether it is the fastest or not."""
    return _hopper(problem, H200)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 52),
        ({"causal": False} | NARROWER, 52),
        ({"seq_q": 131072, "seq_k": 131072}, 205),
        ({"seq_q": 131072, "seq_k": 131072, "heads": 16, "kv_heads": 16} | NARROWER, 49),
        ({"heads": 16, "kv_heads": 4, "dim_qk": 256, "dim_v": 256, "seq_q": 131072, "seq_k": 131072}, 25),
        ({"seq_q": 16384, "seq_k": 16384}, 26),  # keys would come in KV splits
        ({"seq_q": 16384, "seq_k": 16384, "causal": False} | NARROWER, 26),
    ],
    ids=str,
)
def test_long_calls_come_in_spans(changes: dict[str, Any], count: int) -> None:
    """And each span has room for dS of so many keys as keep the device at work."""
    problem = replace(LONG, **changes)
    plan = kept(problem)
    assert (plan.kernel, len(plan.spans)) == (rules.KERNEL, count)
    assert AttentionBackwardPlan.from_json(plan.to_json()) == plan
    assert f"spans     {count} of {plan.queries_at_once} queries" in str(plan)
    assert "Queries come in spans: of all at once" in plan.reason
    last = spans.problem_of(problem, plan.spans[-2])
    heads, keys = spans.batch_of(last, plan.heads_at_once, plan.keys_at_once)
    held = rules.slots(last, H200, heads, keys) * heads * keys // 64
    least = spans.HELD_IN_MANY if count >= spans.MANY else spans.HELD
    most = least + 1 if count > 2 else 2 * least  # whole spans: of two each may have up to twice as much as would do
    assert least - 0.5 <= held / rules.places(last, H200) <= most
    row = 4 * problem.kv_heads * (problem.dim_qk + problem.dim_v)
    assert spans.sum_bytes(problem) == row * problem.seq_k
    assert (
        spans.sum_bytes(problem)
        < plan.scratch_bytes
        < least_kept(problem.dim_qk, problem.dim_v) + 13 * row * problem.seq_k
    )


def test_short_calls_do_not() -> None:
    short = replace(LONG, batch=4, seq_q=4096, seq_k=4096)
    for problem in (
        short,
        replace(short, causal=False, kv_heads=32, **NARROWER),
        replace(LONG, batch=8, seq_q=8192, seq_k=8192, heads=16, kv_heads=16),
        replace(LONG, seq_q=65536, seq_k=65536, heads=16, kv_heads=16, causal=False, window=(4096, 0)),
    ):
        plan = kept(problem)
        assert (plan.kernel, plan.queries_at_once, "spans" in str(plan)) == (rules.KERNEL, 0, False)
        assert [span[:2] for span in plan.spans] == [(0, problem.seq_q)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"queries_at_once": 100}, "queries_at_once: must be 0 .all. or a multiple of 64, got 100"),
        ({"queries_at_once": -64}, "queries_at_once: must be 0"),
        ({"queries_at_once": 32768}, "keys_at_once: 2 GiB hold dS of 8192 keys"),
        ({"queries_at_once": 0}, "keys_at_once: 2 GiB hold dS of 8192 keys"),
        ({"keys_at_once": 100}, "keys_at_once: must be a multiple of 64 up to 32768, got 100"),
        ({"heads_at_once": 3}, "heads_at_once: must be a divisor of 8"),
        ({"queries_at_once": 8192, "kernel": "attention_backward_box"}, "queries_at_once: must be 0 with attention_backward_box"),
    ],
    ids=str,
)  # fmt: skip
def test_overrides_that_do_not_fit(fields: dict[str, Any], named: str) -> None:
    plan = kept(LONG)
    with pytest.raises(PlanError, match=named):
        plan.with_tiles(**fields)


def test_what_no_span_makes_fit_is_refused() -> None:
    many = replace(
        LONG, heads=8192, kv_heads=1, dim_qk=256, dim_v=256
    )  # of one tile of queries dS would take more than there is room
    plan = plan_attention_backward(many, H200)
    assert plan.kernel == "attention_backward_box"
    assert "attention_backward_hopper is not taken" in plan.reason


@pytest.mark.parametrize("causal", [False, True])
def test_memory_of_a_call(causal: bool) -> None:
    """What is allocated beside the gradients is what the plan says."""
    problem = replace(LONG, batch=2, seq_q=5000, seq_k=7100, heads=8, kv_heads=2, causal=causal)
    plan = kept(problem).with_tiles(queries_at_once=1024, keys_at_once=1024)
    q, k, v = (
        torch.empty(2, n, h, 128, dtype=torch.bfloat16, device="meta") for n, h in ((5000, 8), (7100, 2), (7100, 2))
    )
    bound = bound_launches(1.0, (q, k, v, q), q, Call(causal=causal, plan=plan_attention(problem, H200)), plan)
    made = bound.scratch("meta")
    assert [one.span for one in bound.launches] == list(plan.spans)
    used = sum(t.numel() * t.element_size() for i, t in enumerate(made) if i != 4)  # but dq
    assert plan.scratch_bytes <= used + 4096
    assert used <= plan.scratch_bytes + 4096
    firsts = [tuple(one.main.values[name] for name in ("written", "stat_tiles")) for one in bound.launches]
    assert firsts == [(span.written, 79) for span in plan.spans]
    assert len({one.counters for one in bound.launches}) == len(bound.launches) == 5

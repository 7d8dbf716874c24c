"""The plan of the packed backward kernel for sm_90: what it refuses and why, how much it keeps, and that nothing can lock up."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from tilefold.errors import PlanError, TilefoldError
from tilefold.plan import AttentionProblem, device_named
from tilefold.plan import attention_backward_packed as rules
from tilefold.plan.attention_backward import AttentionBackwardPlan, plan_attention_backward
from tilefold.plan.attention_backward_hopper import KERNEL, places
from tilefold.plan.hopper_backward import KEPT_LIMIT
from tilefold.plan.limits import Tile

H200 = device_named("h200")
MIXED = AttentionProblem(64, 7251, 7251, 16, 16, 128, 128, varlen=True)


def forced(problem: AttentionProblem = MIXED, **fields: Any) -> AttentionBackwardPlan:
    return plan_attention_backward(problem, H200).with_tiles(kernel=KERNEL, **fields)


def test_taken_but_for_a_portable_plan() -> None:
    assert plan_attention_backward(MIXED, H200).kernel == KERNEL
    assert plan_attention_backward(MIXED, H200, portable=True).kernel == "attention_backward"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float32"}, "it multiplies bfloat16 and float16, not float32"),
        ({"dim_v": 64}, "it has head dims of 64 and 128, the same for V, not 128 and 64"),
        ({"sinks": True}, "no sinks"),
        ({"query_descriptors": False}, "strides of Q are not multiples of 16 bytes"),
        ({"descriptors": False}, "strides of K or V are not multiples of 16 bytes"),
        ({"seq_k": 0}, "there are no keys"),
        (
            {"seq_q": 65536, "seq_k": 65536},
            "4 GiB hold dS of 32768 keys of sequences of up to 65536 queries, fewer than",
        ),
        ({"batch": 1 << 20}, "sequences times heads are 16777216, more than 4194303"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], why: str) -> None:
    problem = replace(MIXED, **changes)
    assert plan_attention_backward(problem, H200).kernel != KERNEL
    with pytest.raises(PlanError, match=f"attention_backward_hopper cannot be used: .*{why}"):
        forced(problem)


def test_what_is_kept() -> None:
    """Four key items for each running program and the longest sequence, or what 4 GiB hold; a window's width."""
    for problem, kept in (
        (MIXED, (1171, 1.0)),
        (replace(MIXED, causal=True), (1171, 1.0)),
        (replace(MIXED, kv_heads=4), (1149, 4.0)),
        (replace(MIXED, window=(512, 0)), (1171, 0.1)),
        (replace(MIXED, batch=2, seq_q=100, seq_k=100, heads=2, kv_heads=2), (12, 0.0)),
    ):
        plan = forced(problem)
        gib = rules.kept_bytes(problem, H200, 1, plan.keys_at_once) / 2**30
        assert (plan.heads_at_once, plan.keys_at_once // 64) == (1, kept[0])
        assert kept[1] <= round(gib, 1) + 0.05 < kept[1] + 0.15
        assert AttentionBackwardPlan.from_json(plan.to_json()) == plan
        assert plan.scratch_bytes >= gib * 2**30
    assert "as many are made: dS of 74944 keys is kept in" in str(forced())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"heads_at_once": 2}, "heads_at_once: must be 1 for a packed batch, got 2"),
        (
            {"keys_at_once": 64 * 114},
            "keys_at_once: must be a multiple of 64 from 7360, the longest sequence, got 7296",
        ),
        ({"keys_at_once": 7401}, "keys_at_once: must be a multiple of 64"),
        ({"keys_at_once": 64 * 5000}, "keys_at_once: dS of 320000 keys would take 4.3 GiB, more than 4"),
        ({"queries": Tile(64, 64, 4, 1)}, "queries: must be the tile of keys"),
    ],
    ids=str,
)
def test_overrides_that_do_not_fit(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        forced(**fields)


lengths = st.one_of(st.integers(1, 300), st.integers(1, 40_000), st.integers(1, 2**30))
problems = st.builds(
    lambda kv_heads, group, dim, **rest: AttentionProblem(
        heads=kv_heads * group, kv_heads=kv_heads, dim_qk=dim, dim_v=dim, varlen=True, **rest
    ),
    kv_heads=st.integers(1, 16),
    group=st.sampled_from([1, 2, 7, 8]),
    dim=st.sampled_from([64, 128]),
    batch=st.one_of(st.integers(1, 8), st.integers(1, 100_000)),
    seq_q=lengths,
    seq_k=lengths,
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (4096, 0), (0, -1), (100, 100)]),
)


@examples(200)
@given(problem=problems, share=st.floats(0.001, 1.0))
def test_any_problem(problem: AttentionProblem, share: float) -> None:
    """Whatever is not refused fits: memory, a descriptor's rows, and lines for the longest sequence and the shift."""
    try:
        plan = forced(problem)
    except TilefoldError:
        return
    n = problem
    totals = (min(1 << 26, max(m, int(share * n.batch * m))) for m in (n.seq_q, n.seq_k))
    order = rules.order_of(n, H200, plan.keys_at_once, *totals)
    assert rules.kept_bytes(n, H200, 1, plan.keys_at_once) <= KEPT_LIMIT
    assert order.lines * n.group * order.width * 64 < 1 << 31
    assert order.shift >= 0
    assert order.lines == order.keys or order.longest + order.shift <= order.lines
    assert order.lines >= min(order.keys, order.longest + places(problem, H200) // 2)
    with contextlib.suppress(PlanError):  # lengths that no grid of portable programs counts
        assert plan.with_tiles(kernel="attention_backward").heads_at_once == 0

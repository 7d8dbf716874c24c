"""Backward passes of calls that differ in lengths alone, on sm_90: what is kept of the first is as a call of its own has it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cases
from examples import examples
from tilefold.ops import records
from tilefold.ops.backward import attention_backward as backward
from tilefold.ops.bound import stand_in
from tilefold.ops.call import Call, result_shapes, sizes_of, window_of
from tilefold.ops.dense import attention
from tilefold.ops.dense.attention_hopper import bind
from tilefold.ops.dense.attention_parts import problem_of
from tilefold.ops.source import Packed
from tilefold.plan import AttentionProblem, DecodePlan, device_named, plan_attention
from tilefold.plan.backward.attention_backward import plan_attention_backward
from tilefold.plan.backward.attention_backward_packed import order_of
from tilefold.plan.backward.kept_backward import kept_limit
from tilefold.plan.dense.forward import lengths_alike, plan_forward, shared_by_tiles
from tilefold.plan.problem import mean_of

DEVICE = "h200"


def made(n, m, heads, dim, layout):
    """q, k, v, out and dout without memory, and lse."""
    shapes = [
        (2, rows, h, dim) for rows, h in ((n, heads[0]), (m, heads[1]), (m, heads[1]), (n, heads[0]), (n, heads[0]))
    ]
    if layout == "bhsd":
        shapes = [(b, h, rows, d) for b, rows, h, d in shapes]
    if layout == "packed":
        shapes = [shape[1:] for shape in shapes]
    q, k, v, out, dout = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    return (q, k, v, out), dout, torch.empty(*[2] * (layout != "packed"), heads[0], n, device="meta")


def packed(longest, causal=True):
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    return Call(causal=causal, source=Packed(cu, cu, *longest))


@pytest.fixture
def on_sm_90(monkeypatch):
    """As where both passes have been compiled; counts the plans of the backward pass."""
    planned = []

    def plan_of(problem, *rest, **options):
        planned.append(problem)
        return plan_attention_backward(problem, *rest, **options)

    def prepare(q, k, v, call):
        sizes, window = sizes_of(q, k, v, call), window_of(call.window, call.causal)
        problem = problem_of(q, k, v, call, sizes, window)
        if call.packed is not None:
            mean = mean_of(q.shape[0], problem.batch)
            problem = problem.of_lengths(problem.seq_q, problem.seq_k, mean)
        plan = plan_attention(problem, device_named(DEVICE))
        return bind(q, k, v, call, window, 0.125, plan, result_shapes(call, sizes))

    monkeypatch.setattr(records, "CACHE", {})
    for module in (attention, backward):
        monkeypatch.setattr(module, "device_of", lambda *args: device_named(DEVICE))
    monkeypatch.setattr(attention, "prepare_anew", prepare)
    monkeypatch.setattr(backward, "chosen_or_none", lambda plan, given, kind, bind, *rest: bind())
    monkeypatch.setattr("tilefold.plan.backward.attention_backward.plan_attention_backward", plan_of)
    return planned


def both(tensors, dout, lse, call, dlse=None):
    """The bound backward pass of a call, as `attention` finds it."""
    prepared = attention.prepare(*tensors[:3], call)
    return backward._bound(prepared, tensors, (dout, lse, dlse), call, False, ())


def told(bound, tensors, dout, lse, call, dlse=None):
    """What its launches are given, descriptors by what they say, tensors by their shapes."""
    scratch = [stand_in(one.dtype) for one in bound.buffers]
    found = []
    for one in (bound.first, bound.main, *([bound.last] if bound.last else [])):
        found += cases.told(one.arguments((*tensors, dout, lse, dlse, call, *scratch)))
        found += [one.launch.grid, one.launch.keywords, one.launch.fn]
    return found, [(tuple(one.shape), one.dtype, one.zeroed) for one in bound.buffers]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["", "groups"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [((1033, 1033), (1039, 1039)), ((1030, 1550), (1026, 1546))])
def test_the_launches_are_those_of_a_call_of_its_own(lengths, dim, causal, heads, layout, on_sm_90, monkeypatch):
    call = Call(causal=causal, layout=layout)
    near = both(*made(*lengths[0], heads, dim, layout), call)
    count = len(on_sm_90)
    given = made(*lengths[1], heads, dim, layout)
    again = both(*given, call)
    assert len(on_sm_90) == count, "it is not planned again"
    monkeypatch.setattr(records, "CACHE", {})
    own = both(*given, call)
    assert len(on_sm_90) > count and own.plan.kernel == backward.HOPPER
    assert again.first is not near.first
    assert told(again, *given, call) == told(own, *given, call)


@pytest.mark.parametrize(("dim", "kernel"), [(128, backward.HOPPER), (96, backward.REDUCE)])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("tokens", [(3000, 3777), (30_010, 30_010)])
def test_packed_launches_are_those_of_a_call_of_its_own(tokens, causal, dim, kernel, on_sm_90, monkeypatch):
    """Of any tokens of all sequences whose mean length rounds up to the same power of two."""
    for more, plans in (((5, 7), 1), ((70, 5), 1), ((20_000, 0), 2)):
        monkeypatch.setattr(records, "CACHE", {})
        on_sm_90.clear()
        for extra in ((0, 0), more):
            call = packed([1030 + n % 4 for n in extra], causal)
            given = made(*[n + add for n, add in zip(tokens, extra, strict=True)], (8, 2), dim, "packed")
            again = both(*given, call)
        assert len(on_sm_90) == plans
        monkeypatch.setattr(records, "CACHE", {})
        assert told(again, *given, call) == told(both(*given, call), *given, call)
        assert again.plan.kernel == kernel


def test_other_differences_of_lengths_are_planned_anew(on_sm_90):
    """Under a causal mask they move the diagonal, and with it how many tiles see each other."""
    call, count = Call(causal=True), 0
    for lengths in ((1033, 1033), (1033, 1039), (1039, 1033)):
        both(*made(*lengths, (4, 4), 64, "bshd"), call)
        assert len(on_sm_90) > count
        count = len(on_sm_90)


def test_tensors_that_leave_more_room_for_ds_are_planned_anew(on_sm_90, monkeypatch):
    """Of the same tiles, but of more bytes, by which more heads have room at a time."""
    call = Call(causal=True)
    for n in (1895, 1858):
        given = made(n, n, (64, 8), 128, "bshd")
        again = both(*given, call)
    monkeypatch.setattr(records, "CACHE", {})
    assert told(again, *given, call) == told(both(*given, call), *given, call)


def test_what_is_no_length_is_bound_anew(on_sm_90):
    call = Call()
    (q, k, v, out), dout, lse = made(1033, 1033, (4, 4), 64, "bshd")
    near = both((q, k, v, out), dout, lse, call)
    (q, k, v, out), dout, lse = made(1039, 1039, (4, 4), 64, "bshd")
    rows_apart = torch.empty(2, 1039, 8, 64, dtype=torch.bfloat16, device="meta")[:, :, ::2]
    for other in (rows_apart, dout):
        found = both((q, k, v, out), other, lse, call)
        assert told(found, (q, k, v, out), other, lse, call) != told(near, (q, k, v, out), dout, lse, call)
    with_dlse = both((q, k, v, out), dout, lse, call, lse)
    assert with_dlse is not both((q, k, v, out), dout, lse, call)


@pytest.mark.parametrize("at", range(3), ids="qkv")
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize("dim", [96, 128])
def test_rows_of_another_stride_are_read_where_they_lie(dim, layout, at, on_sm_90, monkeypatch):
    """The packed kernel that adds dq in memory reads ends of sequences by the strides of q, k and v."""
    for n in (1033, 1039):
        call = packed((n, n)) if layout == "packed" else Call(causal=True, layout=layout)
        tensors, *others = made(n, n, (8, 2), dim, layout)
        if n == 1039:
            one = tensors[at]
            apart = torch.empty(*one.shape[:-1], 3 * dim, dtype=one.dtype, device="meta")[..., :dim]
            tensors = (*tensors[:at], apart, *tensors[at + 1 :])
        again = both(tensors, *others, call)
    monkeypatch.setattr(records, "CACHE", {})
    assert told(again, tensors, *others, call) == told(both(tensors, *others, call), tensors, *others, call)


@examples(300)
@given(
    seq_q=st.integers(128, 9000),
    seq_k=st.integers(1, 9000),
    more=st.integers(-63, 63),
    heads=st.sampled_from([(1, 1), (4, 1), (16, 4), (32, 32), (7, 1), (64, 8)]),
    dim=st.sampled_from([64, 128, 256]),
    batch=st.integers(1, 9),
    sides=st.sampled_from(
        [(False, (-1, -1)), (True, (-1, -1)), (False, (100, 0)), (True, (300, -1)), (False, (5, 4000))]
    ),
    deterministic=st.booleans(),
    equal=st.booleans(),
    tokens=st.none() | st.tuples(st.integers(1, 40_000), st.integers(1, 40_000)),
)
def test_tiles_decide_the_plan(seq_q, seq_k, more, heads, dim, batch, sides, deterministic, equal, tokens):
    """Of the kernel that keeps dS, where queries and keys grow alike; of a packed batch also the order of its work."""
    seq_k, device = seq_q if equal else seq_k, device_named(DEVICE)
    sides = sides if tokens or sides[1] == (-1, -1) else (True, (-1, -1))
    problem = AttentionProblem(batch, seq_q, seq_k, *heads, dim, dim, "bfloat16", *sides, tokens is not None)
    other = replace(problem, seq_q=max(1, seq_q + more), seq_k=max(1, seq_k + more))
    alike = lengths_alike(seq_q, seq_k)
    if alike is None or lengths_alike(other.seq_q, other.seq_k) != alike:
        return
    if any(
        isinstance(each, DecodePlan) or not shared_by_tiles(each)
        for each in (plan_forward(n, device) for n in (problem, other))
    ):
        return
    shifted = other.seq_k - other.seq_q != seq_k - seq_q or kept_limit(other) != kept_limit(problem)
    if not tokens and (shifted or (2 * seq_q >= seq_k) != (2 * other.seq_q >= other.seq_k)):
        return
    plan = plan_attention_backward(problem, device, deterministic=deterministic)
    if plan.kernel != backward.HOPPER or plan.queries_at_once:
        return
    own = plan_attention_backward(other, device, deterministic=deterministic)
    assert plan.alike(other, (), lambda: own) == own
    if tokens:
        assert order_of(problem, device, plan.keys_at_once, *tokens) == order_of(
            other, device, own.keys_at_once, *tokens
        )

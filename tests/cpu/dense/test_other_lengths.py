"""Calls of attention that differ in lengths alone, on sm_90: what is kept of the first is what a call of its own would have."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import as_its_own
from examples import examples
from tilefold.ops.bound import Bound, Slot
from tilefold.ops.call import Call, result_shapes, sizes_of
from tilefold.ops.dense import attention
from tilefold.ops.dense.attention import _bind, _key_of_any_length, _of_lengths
from tilefold.ops.dense.attention_hopper import bind
from tilefold.ops.dense.attention_parts import problem_of
from tilefold.ops.launch import Launch
from tilefold.ops.source import Packed, key_of
from tilefold.plan import AttentionProblem, DecodePlan, device_named, plan_attention, plan_forward
from tilefold.plan.dense.forward import lengths_alike, plan_alike, shared_by_tiles


def made(n, m=0, heads=16, kv_heads=4, dim=64, layout="bshd", packed=False, dtype=torch.bfloat16):
    """q, k, v without memory, and what a packed batch adds to its call."""
    shapes = ((n, heads, dim), (m or n, kv_heads, dim))
    if not packed:
        shapes = tuple((2, *(s if layout == "bshd" else (s[1], s[0], s[2]))) for s in shapes)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in (shapes[0], *shapes[1:] * 2))
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    return q, k, v, {"source": Packed(cu, cu, n - 7, (m or n) - 7)} if packed else {"layout": layout}


def family_of(q, k, v, call):
    return _key_of_any_length(key_of(q, k, v, call), call)


def record(q, k, v, call, portable=False):
    """(the plan, the record of a call of its own) on an H200; portable: by pointers, or by boxes, of which Triton specialises
    strides."""
    sizes, window = sizes_of(q, k, v, call), (-1, 0) if call.causal else (-1, -1)
    plan, shapes = (
        plan_attention(problem_of(q, k, v, call, sizes, window), device_named("h200"), portable),
        result_shapes(call, sizes),
    )
    if portable:
        return plan, _bind(q, k, v, call, sizes, 0.125, shapes, plan)
    return plan, bind(q, k, v, call, window, 0.125, plan, shapes)


SORTS = {
    "dense": {},
    "causal": {"causal": True},
    "no groups": {"heads": 32, "kv_heads": 32, "dim": 128},
    "bhsd": {"layout": "bhsd", "causal": True},
    "packed": {"packed": True, "causal": True},
    "boxes": {"portable": True, "dim": 128},
    "pointers": {"portable": True, "packed": True},
}


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("lengths", [(1057, 0), (1100, 1603), (1664, 1664)])
def test_the_record_is_that_of_a_call_of_its_own(sort, lengths):
    options = dict(SORTS[sort])
    causal, portable = options.pop("causal", False), options.pop("portable", False)
    q, k, v, more = made(1500, **options)
    _, near = record(q, k, v, Call(causal=causal, **more), portable)
    near.bound.launch._compiled = None if portable else "compiled"  # the interpreter knows no specialisation
    first = family_of(q, k, v, Call(causal=causal, **more))
    q, k, v, more = made(*lengths, **options)
    call = Call(causal=causal, **more)
    assert family_of(q, k, v, call) == first is not None
    plan, own = record(q, k, v, call, portable)
    if plan.tile != near.plan.tile or plan.options != near.plan.options:
        assert attention._of_other_lengths(near, q, k, v, call) is None
        return
    again = _of_lengths(near, q, k, v, call, plan, plan)
    as_its_own(again, own, q, k, v, call)
    assert again.bound.launch._compiled is near.bound.launch._compiled and near.plan.problem.seq_q != plan.problem.seq_q


def test_integers_of_another_class_are_compiled_for():
    params = [SimpleNamespace(do_not_specialize=flag) for flag in (True, False)]
    launch = Launch(SimpleNamespace(arg_names=["n", "stride"], params=params), (1, 1, 1), {}, {}, 0)
    bound = Bound(launch, (), {"n": 16, "stride": 32})
    launch._compiled = "compiled"
    for name, value, kept in (
        ("n", 17, True), ("n", 1 << 31, False), ("stride", 48, True), ("stride", 33, False), ("stride", 1, False)
    ):  # fmt: skip
        other = bound.with_values({name: value}, (2, 1, 1)).launch
        assert (other._compiled == "compiled") is kept and other.grid == (2, 1, 1) != launch.grid


@pytest.mark.parametrize("sort", [sort for sort, options in SORTS.items() if "portable" not in options])
@pytest.mark.parametrize("lengths", [(1025, 1039), (1484, 1473), (1537, 1551)])
def test_lengths_of_the_same_tiles_are_not_planned_again(sort, lengths, monkeypatch):
    options = dict(SORTS[sort])
    causal = options.pop("causal", False)
    monkeypatch.setattr(attention, "device_of", lambda *args: device_named("h200"))
    monkeypatch.setattr(attention.records, "CACHE", {})
    monkeypatch.setattr(attention, "prepare_anew", lambda q, k, v, call: record(q, k, v, call)[1])
    first, second = (made(n + 7 * bool(options.get("packed")), **options) for n in lengths)
    near = attention.prepare(*first[:3], Call(causal=causal, **first[3]))
    q, k, v, more = second
    call = Call(causal=causal, **more)
    plan, own = record(q, k, v, call)
    monkeypatch.setattr(attention, "prepare_anew", None)
    monkeypatch.setattr(attention, "_plan_of_lengths", None)
    again = attention.prepare(q, k, v, call)
    assert again.plan == plan and again.plan.problem != near.plan.problem and again.shared is near.shared
    as_its_own(again, own, q, k, v, call)


@examples(400)
@given(
    lengths=st.tuples(st.integers(128, 9000), st.integers(1, 9000)),
    more=st.tuples(st.integers(-6, 6), st.one_of(st.integers(-30, 30), st.integers(-9000, 9000))),
    heads=st.sampled_from([(1, 1), (4, 1), (16, 4), (32, 32), (7, 1), (64, 8)]),
    dims=st.sampled_from([(64, 64), (128, 128), (192, 128), (96, 96), (256, 256), (32, 32)]),
    batch=st.integers(1, 9),
    sides=st.sampled_from(
        [(False, (-1, -1)), (True, (-1, -1)), (False, (100, 0)), (False, (5, 7)), (False, (3000, 100))]
    ),
    varlen=st.booleans(),
    score_mods=st.sampled_from([(), ("softcap",)]),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    device=st.sampled_from(["h200", "h100"]),
)
def test_tiles_decide_the_plan(lengths, more, heads, dims, batch, sides, varlen, score_mods, dtype, device):
    """Of lengths with the same `lengths_alike` the whole plan is that of one of them, with the other's problem."""
    problem = AttentionProblem(batch, *lengths, *heads, *dims, dtype, *sides, varlen, score_mods)
    plan, group = plan_forward(problem, device_named(device)), 1 if varlen else heads[0] // heads[1]
    same = [max(1, n + change) for n, change in zip(lengths, more, strict=True)]
    key = lengths_alike(*lengths, group)
    if key is None or lengths_alike(*same, group) != key or isinstance(plan, DecodePlan) or not shared_by_tiles(plan):
        return
    own = plan_forward(replace(problem, seq_q=same[0], seq_k=same[1]), device_named(device))
    assert plan_alike(plan, *same) == own


CHANGES = {
    "k is longer than v": lambda q, k, v, call: (q, k, v[:, :-1], call),
    "another head dim": lambda q, k, v, call: (q[..., :32], k[..., :32], v, call),
    "fewer heads": lambda q, k, v, call: (q[:, :, :8], k, v, call),
    "rows apart": lambda q, k, v, call: (q, k.expand(2, -1, -1, -1)[..., ::2], v, call),
    "another dtype": lambda q, k, v, call: (q.half(), k, v, call),
    "a softcap": lambda q, k, v, call: (q, k, v, call._replace(softcap=30.0)),
    "a number for a flag": lambda q, k, v, call: (q, k, v, call._replace(causal=0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_length_has_a_key_of_its_own(change):
    q, k, v, more = made(1500)
    key = family_of(q, k, v, Call(**more))
    assert family_of(*CHANGES[change](q, k, v, Call(**more))) != key


def test_calls_with_tensors_of_their_own_share_nothing():
    q, k, v, more = made(1500)
    for field in ("bias", "mask", "sinks", "alibi_slopes"):
        assert family_of(q, k, v, Call(**more, **{field: q})) is None
    q, k, v, more = made(1500, packed=True)
    assert family_of(q, k, v, Call(source=more["source"]._replace(max_q=0))) is None
    assert family_of(q, k, v, Call(source=more["source"]._replace(max_q=True))) is None


def test_a_launch_is_ready_where_another_was_compiled_alike(monkeypatch):
    from tilefold.kernels.hopper.attention_forward import attention_forward_hopper as fn
    from tilefold.ops import launch

    monkeypatch.setattr(launch, "_COMPILED", {})
    one, other = (Launch(fn, (1, 1, 1), {"KIND": 1}, {}, 0) for _ in range(2))
    args = [None] * 6 + [0.5, 100]
    assert not one.found(args) and one._compiled is None
    launch._COMPILED[one._key(args)] = "entry", []
    assert other.found([None] * 6 + [0.5, 112]) and other._compiled == "entry"  # lengths are not specialised
    assert not other.found([None] * 6 + [0.5, 1 << 31])


def test_slots_are_replaced_by_slots():
    q, k, v, more = made(1500)
    bound: Bound = record(q, k, v, Call(**more))[1].bound
    other = bound.with_values({"q_desc": Slot("q", lambda t: "another")})
    at = bound.names.index("q_desc")
    given = (q, k, v, q, q, Call(**more))
    assert other.arguments(given)[at] == "another" != bound.arguments(given)[at]


def test_lengths_of_the_decode_kernel_have_a_record_of_their_own(monkeypatch):
    """Packed prompts, then packed steps of generation: the key is the same, the kernel is not."""
    q, k, v, more = made(4096, packed=True)
    _, near = record(q, k, v, Call(**more))
    steps = more["source"]._replace(max_q=1)
    assert isinstance(plan_forward(replace(near.plan.problem, seq_q=1), device_named("h200")), DecodePlan)
    monkeypatch.setattr(attention, "device_of", lambda *args: device_named("h200"))
    monkeypatch.setattr(attention.records, "CACHE", {family_of(q, k, v, Call(**more)): near})
    monkeypatch.setattr(attention, "prepare_anew", lambda *args: SimpleNamespace(bound="decoder"))
    assert attention.prepare(q, k, v, Call(source=steps)).bound == "decoder"

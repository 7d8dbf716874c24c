"""Few queries of `attention` and `attention_varlen`: the plan that splits the keys, when it is made, and what it gives."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilefold
from cases import graph_gives, hold, hold_back
from cases import qkv as qkv_on
from cases.refusals import refuses
from tilefold import reference
from tilefold.errors import PlanError
from tilefold.plan import (
    AttentionPlan,
    AttentionProblem,
    DecodePlan,
    DecodeProblem,
    device_named,
    plan_attention,
    plan_decode,
    plan_forward,
    plan_splits,
)
from tilefold.plan.dense.forward import FILLED_ROWS, LEAST_SPLIT, STEP, cut_of, plan_holds

H200 = device_named("h200")


@pytest.fixture(autouse=True)
def here(device):
    """Tensors are made on the device of the tests."""
    with torch.device(device):
        yield


def qkv(*sizes, **kinds):
    return qkv_on(*sizes, **kinds, device=torch.get_default_device())


def held(q, k, v, layout="bshd", **options):
    """The call by the decode kernel, held to the oracle; -> its plan."""
    plan = tilefold.attention_plan(q, k, v, layout=layout, **options)
    assert isinstance(plan, DecodePlan)
    out, lse = tilefold.attention(q, k, v, layout=layout, return_lse=True, **options)
    assert out.shape == (*q.shape[:-1], v.shape[-1]) and out.is_contiguous()
    rows = [x.transpose(1, 2) for x in (q, k, v)] if layout == "bhsd" else (q, k, v)
    got = out.transpose(1, 2) if layout == "bhsd" else out
    hold((got, lse), reference.attention, *rows, **options)
    return plan


@pytest.mark.parametrize(
    ("layout", "seq_q", "heads", "kv_heads", "dim", "dim_v"),
    [("bshd", 1, 7, 1, 32, 32), ("bshd", 5, 8, 2, 17, 33), ("bhsd", 3, 4, 4, 40, 24)],
)
def test_options(layout, seq_q, heads, kv_heads, dim, dim_v):
    keys = LEAST_SPLIT + 37
    q, k, v = qkv(2, seq_q, keys, heads, kv_heads, dim, dim_v)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    lost = torch.rand(2, 1, 1, keys) > 0.4
    lost[1] = False  # nothing is seen: 0 and -inf
    for options in (
        {},
        {"causal": True},
        {"window": (50, 0), "softcap": 5.0},
        {"mask": lost, "causal": True},
        {"mask": torch.rand(1, heads, seq_q, keys) > 0.3, "sinks": torch.randn(heads)},
        {"bias": torch.randn(2, 1, seq_q, keys), "alibi_slopes": torch.rand(2, heads)},
    ):
        held(q, k, v, layout, **options)


def test_strides_and_half_precision():
    q, k, v = qkv(2, 1, 300, 8, 2, 32, dtype=torch.float16)
    wide = torch.zeros(2, 300, 2, 80, dtype=torch.float16)
    wide[..., :32], wide[..., 40:72] = k, v
    held(q.expand(2, 1, 8, 32), wide[..., :32], wide[..., 40:72], causal=True)
    held(q, k.transpose(1, 2).contiguous().transpose(1, 2), v)


def test_packed_sequences():
    q, k, v = torch.randn(9, 4, 32), torch.randn(1000, 2, 32), torch.randn(1000, 2, 16)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 4, 9], [0, 400, 700, 1000]))
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 5, "max_seqlen_k": 400, "causal": True}
    assert isinstance(tilefold.attention_plan(q, k, v, **options), DecodePlan)
    out, lse = tilefold.attention_varlen(q, k, v, **options, return_lse=True)
    hold((out, lse), reference.attention_varlen, q, k, v, **options)


def test_gradients_of_what_the_decode_kernel_made():
    """Its lse is as good as another's: the backward pass of the same problem."""
    q, k, v = qkv(1, 2, LEAST_SPLIT + 5, 4, 2, 16)
    bias = torch.randn(1, 1, 2, LEAST_SPLIT + 5)
    assert isinstance(tilefold.attention_plan(q, k, v, bias=bias), DecodePlan)
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]

    def oracle(*tensors, dtype):
        return reference.attention(*tensors[:3], bias=tensors[3], causal=True, dtype=dtype)[0]

    hold_back(tilefold.attention(q, k, v, bias=bias, causal=True), oracle, *leaves)


@pytest.mark.no_poison  # dynamo would take the poisoned functions for torch's own, for good
def test_compiled():
    """Through torch's dispatcher the same kernel runs."""
    q, k, v = qkv(1, 1, LEAST_SPLIT + 3, 4, 2, 16)
    graph_gives(lambda *x: tilefold.attention(*x, causal=True), q, k, v)


def test_plans_that_callers_give():
    q, k, v = qkv(1, 1, 300, 4, 2, 16)
    plan = tilefold.attention_plan(q, k, v)
    assert tilefold.attention_plan(q, k, v, plan=plan) == plan
    dense = plan_attention(plan.problem.attention, plan.device)
    one, other = (tilefold.attention(q, k, v, plan=p) for p in (plan, dense))
    assert (one - other).abs().max() < 1e-5
    refuses(PlanError, "seq_k=300, the call has seq_k=299", tilefold.attention, q, k[:, 1:], v[:, 1:], plan=plan)
    paged = plan_decode(DecodeProblem(plan.problem.attention, page_size=16), plan.device)
    refuses(PlanError, "page_size=16, the call has page_size=0", tilefold.attention, q, k, v, plan=paged)


@given(
    st.sampled_from([1, 2, 8, 64]), st.integers(1, 200), st.integers(1, 40000),
    st.sampled_from([(1, 1), (28, 4), (32, 8), (16, 16), (64, 1)]), st.sampled_from([40, 64, 128]), st.booleans(),
)  # fmt: skip
def test_the_decision(batch, seq_q, keys, heads, dim, varlen):
    """The decode kernel takes what its tiles hold, unless dense tiles are full and fill the device; one answer everywhere."""
    problem = AttentionProblem(batch, seq_q, keys, *heads, dim, dim, varlen=varlen, causal=True, descriptors=not varlen)
    plan, dense = plan_forward(problem, H200), plan_attention(problem, H200)
    group = heads[0] // heads[1]
    if isinstance(plan, DecodePlan):
        assert seq_q * group <= 128
        assert plan.problem.attention == problem and plan.problem.equal == (not varlen)
        assert f" for {H200.sms} SMs" in plan.rejected[0].why
        least = int(re.search(r"(\d+) tile", plan.rejected[0].why).group(1))
        assert least == dense.grid[0] or (least < dense.grid[0] and (seq_q > 64 or "at least" in plan.rejected[0].why))
    else:
        assert plan == dense
        full = seq_q * group >= FILLED_ROWS and batch * heads[0] >= H200.sms
        assert seq_q * group > 128 or full or (seq_q > 1 and keys < LEAST_SPLIT)
    decision = plan_splits(problem, H200, call="varlen" if varlen else "dense")
    assert decision.kernel == ("attention_decode" if isinstance(plan, DecodePlan) else dense.kernel)
    assert type(plan).from_json(plan.to_json()) == plan


def test_other_calls_stay_dense():
    asked = {"batch": 1, "seq_q": 1, "seq_k": 8192, "heads": 8, "kv_heads": 8, "dim_qk": 64, "dim_v": 64}
    for changes in ({"score_mods": ("user",)}, {"mask_mods": ("user",)}, {"dropout": True}, {"seq_q": 129}):
        assert isinstance(plan_forward(AttentionProblem(**{**asked, **changes}), H200), AttentionPlan)
    assert isinstance(plan_forward(AttentionProblem(**asked), H200), DecodePlan)
    json.loads(plan_forward(AttentionProblem(**asked), H200).to_json())


@pytest.mark.parametrize("seq_q", [1, 33])
@pytest.mark.parametrize("page", [0, 16])
def test_masks_over_caches(page, seq_q):
    """By the number of a key in its sequence, whatever lies behind the last; 33 queries of 4 heads are a prompt."""
    q, k, v = qkv(3, seq_q, 96, 8, 2, 16)
    lengths, table = torch.tensor([96, 70, 40], dtype=torch.int32), torch.randperm(18).view(3, 6).int()
    given, options = (k, v), {"cache_seqlens": lengths, "causal": True}
    if page:
        given = tuple(
            torch.full((18, 16, 2, 16), float("nan")).index_put_((table.long(),), x.view(3, 6, 16, 2, 16))
            for x in (k, v)
        )
        options["block_table"] = table
    for shape in ((3, 1, 1, 96), (1, 8, seq_q, 96)):
        mask = torch.rand(shape) > 0.4
        out, lse = tilefold.attention_kvcache(q, *given, mask=mask, return_lse=True, **options)
        for b, n in enumerate(lengths.tolist()):
            part = (q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])
            seen = {"mask": mask[b % len(mask) : b % len(mask) + 1, ..., :n], "causal": True}
            hold((out[b : b + 1], lse[b : b + 1]), reference.attention, *part, **seen)


def test_masks_over_caches_are_checked():
    q, k, v = qkv(2, 1, 40, 4, 2, 16)
    for mask, error in ((torch.ones(2, 1, 1, 39, dtype=torch.bool), "capacity"), (torch.ones(2, 1, 1, 40), "bool")):
        with pytest.raises((tilefold.ShapeError, tilefold.DtypeError), match=error):
            tilefold.attention_kvcache(q, k, v, mask=mask)


# ---------------------------------------------------------------- a cache that grows


GROWING = st.fixed_dictionaries({
    "batch": st.sampled_from([1, 2, 8, 64]), "seq_q": st.sampled_from([1, 2, 5]), "seq_k": st.integers(1, 200_000),
    "kv_heads": st.sampled_from([1, 2, 4, 8]), "group": st.sampled_from([1, 4, 7, 8]),
    "dim_qk": st.sampled_from([64, 80, 128, 256]), "dtype": st.sampled_from(["bfloat16", "float32"]),
})  # fmt: skip


@pytest.mark.parametrize("cached", [False, True])
@given(
    given=GROWING, at=st.integers(0, STEP - 1), device=st.sampled_from(["h200", "h100", "a100", "interpreter"]),
    page=st.sampled_from([0, 1, 16, 64]), storage=st.sampled_from(["plain", "int8"]), equal=st.booleans(),
)  # fmt: skip
def test_a_plan_that_holds_is_that_of_all_its_step(cached, given, at, device, page, storage, equal):
    """Of every length, and of every capacity of a cache."""
    group, here = given.pop("group"), device_named(device)
    problem = AttentionProblem(heads=given["kv_heads"] * group, dim_v=given["dim_qk"], causal=True, **given)

    def plan(keys):
        asked = replace(problem, seq_k=keys)
        return (
            plan_decode(DecodeProblem(asked, storage, page, False, equal), here)
            if cached
            else plan_forward(asked, here)
        )

    if plan_holds(problem.seq_k, plan):
        other = plan((problem.seq_k - 1) // STEP * STEP + 1 + at)
        assert isinstance(other, DecodePlan)
        assert cut_of(other) == cut_of(plan(problem.seq_k))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dim", [32, 40])
def test_a_growing_cache(layout, dim, monkeypatch):
    """Each length is right, its plan is that of a call that saw no other, and lengths that are cut alike are bound once."""
    from tilefold.ops import records
    from tilefold.ops.dense import attention as ops

    planned = []
    monkeypatch.setattr(
        ops, "prepare_anew", lambda *call, made=ops.prepare_anew: planned.append(call[1].shape) or made(*call)
    )
    monkeypatch.setattr(records, "CACHE", {})
    lengths = (6 * STEP - 1, 6 * STEP, 6 * STEP + 1, 6 * STEP + 70, 8 * STEP - 1, 8 * STEP)
    for length in lengths:
        q, k, v = qkv(2, 1, length, 4, 2, dim)
        if layout == "bhsd":
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        plan = held(q, k, v, layout, causal=True)
        assert plan.problem.attention.seq_k == length
        assert plan == plan_forward(plan.problem.attention, plan.device)
    # Heads of n rows of 40 elements are a multiple of 16 apart where n is even, and the kernel is compiled for that.
    assert len(planned) == (2 if dim == 40 and layout == "bhsd" else 1)


def test_a_growing_cache_with_padding():
    """The mask grows with it, as in generation from a batch of prompts of different lengths."""
    for length in (4 * STEP, 4 * STEP + 1, 4 * STEP + 2, 4 * STEP + 17):
        mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
        mask[1, ..., :9] = False
        held(*qkv(2, 1, length, 4, 2, 32), causal=True, mask=mask)


def test_a_growing_cache_is_still_checked():
    q, k, v = qkv(1, 1, 400, 4, 2, 32)
    tilefold.attention(q, k, v, causal=True)
    longer, other = (torch.cat([x, x[:, :1]], 1) for x in (k, v))
    tilefold.attention(q, longer, other, causal=True)
    with pytest.raises(tilefold.errors.ShapeError, match="seq_k"):
        tilefold.attention(q, torch.cat([longer, longer[:, :1]], 1), other, causal=True)
    with pytest.raises(tilefold.errors.DtypeError, match="causal"):
        tilefold.attention(q, torch.cat([longer, longer[:, :1]], 1), torch.cat([other, other[:, :1]], 1), causal=1)

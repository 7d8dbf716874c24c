"""Attention of e4m3 tensors without a GPU: what is refused, the dequantising path, plans, the transposition, the dispatcher."""

import math

import pytest
import torch

import tilefold
from cases import graph_gives, rand
from cases.fp8 import check, quantised
from cases.refusals import refuses
from tilefold.errors import DtypeError, LayoutError, PlanError, ShapeError, TilefoldError, Unsupported, ValueRangeError
from tilefold.kernels.dense.transpose_values import transpose_values
from tilefold.ops.call import Call
from tilefold.ops.dense.attention_fp8 import ATTENTION_FP8
from tilefold.ops.source import Scales
from tilefold.plan import AttentionFp8Plan, AttentionProblem, device_named, plan_attention_fp8

H200 = device_named("h200")
E4M3 = torch.float8_e4m3fn


# ---------------------------------------------------------------- quantising


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_numbers_are_near_and_use_the_range(layout, dtype):
    x = rand(2, 30, 3, 16, dtype=dtype) * torch.tensor([1e-3, 1.0, 50.0])[:, None]
    x[1, :, 0] = 0
    if layout == "bhsd":
        x = x.transpose(1, 2)
    x = x.to(dtype)
    x8, descale = tilefold.quantize_fp8(x, layout=layout)
    assert (x8.dtype, x8.shape, descale.dtype, descale.shape) == (E4M3, x.shape, torch.float32, (2, 3))
    factor = descale[:, None, :, None] if layout == "bshd" else descale[:, :, None, None]
    back = x8.float() * factor
    assert ((back - x.float()).abs() <= x.float().abs() / 16 + factor * 2**-10).all()
    largest = x8.float().abs().amax((1, 3) if layout == "bshd" else (2, 3))
    assert descale[1, 0] == 1
    assert (largest[0] == 448).all()


def test_one_factor_of_all():
    x = rand(2, 5, 3, 8)
    x8, descale = tilefold.quantize_fp8(x, per="tensor")
    assert (descale == x.abs().max() / 448).all()
    assert x8.float().abs().max() == 448
    empty, ones = tilefold.quantize_fp8(x[:, :0])
    assert (empty.shape, ones.shape) == ((2, 0, 3, 8), (2, 3))
    assert (ones == 1).all()


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (ValueRangeError, "per must be 'head' or 'tensor', got 'row'", {"per": "row"}),
        (ValueRangeError, "layout must be", {"layout": "sbhd"}),
        (DtypeError, "x has dtype float8_e4m3fn", {"x": torch.zeros(1, 1, 1, 1).to(E4M3)}),
        (ShapeError, "x has 3 dimensions", {"x": torch.zeros(1, 1, 1)}),
    ],
)
def test_quantising_refuses(error, text, options):
    with pytest.raises(error, match=text):
        tilefold.quantize_fp8(**{"x": torch.zeros(1, 1, 1, 1), **options})


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 3), "scale": 0.3}], ids=str)
def test_against_the_oracle(options, layout, device):
    for b, sq, sk, h, hk, d, dv in ((2, 20, 33, 4, 2, 64, 64), (1, 40, 17, 2, 2, 40, 24)):
        tensors, factors = quantised(b, sq, sk, h, hk, d, dv, layout=layout, device=device)
        check(*tensors, factors, layout=layout, **options)


def test_factors_by_kv_head_by_none_and_by_stride(device):
    (q, k, v), factors = quantised(2, 12, 20, 4, 2, 32, device=device)
    shared = factors["q_descale"][:, :2].clone()
    got = tilefold.attention(q, k, v, **{**factors, "q_descale": shared})
    want = tilefold.attention(q, k, v, **{**factors, "q_descale": shared.repeat_interleave(2, 1)})
    assert torch.equal(got, want)
    every_other = torch.stack((factors["k_descale"],) * 2, 2)[..., 0]
    assert torch.equal(
        tilefold.attention(q, k, v, **factors), tilefold.attention(q, k, v, **{**factors, "k_descale": every_other})
    )
    ones = {name: torch.ones_like(t) for name, t in factors.items()}
    assert torch.equal(tilefold.attention(q, k, v, scale=1e-4), tilefold.attention(q, k, v, scale=1e-4, **ones))


def test_nothing_to_see_and_nothing_to_do(device):
    (q, k, v), factors = quantised(1, 30, 10, 2, 2, 16, device=device)
    out, lse = check(q, k, v, factors, causal=True)
    assert (out[:, :20] == 0).all()
    assert (lse[..., :20] == -math.inf).all()
    out, lse = tilefold.attention(q, k[:, :0], v[:, :0], **factors, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert tilefold.attention(q[:, :0], k, v, **factors).shape == (1, 0, 2, 16)
    refuses(Unsupported, "there is no query", tilefold.attention_plan, q[:, :0], k, v)


@pytest.mark.parametrize("n", [1, 15, 16, 100, 200])
def test_values_are_transposed_with_their_keys_in_the_order_of_the_weights(n, device):
    """By the registers of wgmma: a thread t of a quad holds keys 8 j + 2 t + e of a group of 8 j, and places 16 g + 4 t + i."""
    v = torch.arange(2 * n * 3 * 24, device=device).remainder(251).to(torch.uint8).view(2, n, 3, 24)[..., :20]
    places = -(-n // 16) * 16
    made = torch.full((2, 3, 20, places), 255, dtype=torch.uint8, device=device)
    grid = (2 * 3 * -(-places // 64),)
    transpose_values[grid](v, made, n, 3, -(-places // 64), places, *v.stride()[:3], DIM=20, BLOCK_D=32, BLOCK_N=64)
    for place in range(places):
        t, i = place % 16 // 4, place % 4
        key = place // 16 * 16 + 8 * (i // 2) + 2 * t + i % 2
        want = v[:, key] if key < n else torch.zeros_like(v[:, 0])
        assert torch.equal(made[..., place], want), (place, key)


# ---------------------------------------------------------------- what is refused


BAD = [
    (DtypeError, "k has dtype bfloat16, accepted: float8_e4m3fn", {"k": torch.bfloat16}),
    (DtypeError, "q has dtype float8_e5m2", {"q": torch.float8_e5m2}),
    (DtypeError, "q_descale has dtype float16", {"q_descale": torch.ones(2, 4).half()}),
    (ShapeError, r"q_descale has shape \(2, 3\), expected \[batch, heads\] or", {"q_descale": torch.ones(2, 3)}),
    (ShapeError, "k_descale has shape", {"k_descale": torch.ones(2, 4)}),
    (ShapeError, "v_descale has 1 dimensions", {"v_descale": torch.ones(2)}),
    (Unsupported, "softcap was given with q of dtype float8_e4m3fn", {"softcap": 5.0}),
    (Unsupported, "sinks was given", {"sinks": torch.zeros(4)}),
    (Unsupported, "mask was given", {"mask": torch.ones(1, 1, 1, 20, dtype=torch.bool)}),
    (Unsupported, "dropout_p was given", {"dropout_p": 0.1}),
    (DtypeError, "causal must be a bool", {"causal": 1}),
    (DtypeError, "window must be", {"window": (1, 2, 3)}),
    (ValueRangeError, "layout must be", {"layout": "hbsd"}),
    (DtypeError, "plan must be an AttentionFp8Plan", {"plan": 3}),
    (DtypeError, "return_lse must be a bool", {"return_lse": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "changes"), BAD, ids=[text for _, text, _ in BAD])
def test_bad_arguments(error, text, changes, device):
    (q, k, v), factors = quantised(2, 12, 20, 4, 2, 16, device=device)
    tensors = {"q": q, "k": k, "v": v}
    for name, change in changes.items():
        if name in tensors:
            tensors[name] = tensors[name].float().to(change)
        else:
            factors[name] = change.to(device) if isinstance(change, torch.Tensor) else change
    if changes.keys() == {"q"}:
        factors = {}
    with pytest.raises(error, match=text) as found:
        tilefold.attention(**tensors, **factors)
    assert isinstance(found.value, TilefoldError)


def test_factors_without_bytes_strides_and_packed_sequences(device):
    x = rand(1, 4, 2, 16, device=device)
    with pytest.raises(
        DtypeError, match="v_descale goes with q, k and v of dtype float8_e4m3fn, but q has dtype float32"
    ):
        tilefold.attention(x, x, x, v_descale=torch.ones(1, 2, device=device))
    x8 = x.to(E4M3)
    refuses(LayoutError, "q needs a contiguous last dimension", tilefold.attention, x8.transpose(2, 3), x8, x8)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    refuses(Unsupported, "attention_varlen does not take", tilefold.attention_varlen, x8[0], x8[0], x8[0], cu, cu, 4, 4)
    with pytest.raises(Unsupported, match="attention_varlen does not take"):
        tilefold.attention_plan(x8[0], x8[0], x8[0], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=4, max_seqlen_k=4)
    refuses(Unsupported, "softcap was given", tilefold.attention_plan, x8, x8, x8, softcap=1.0)


def test_gradients_are_refused(device):
    (q, k, v), factors = quantised(1, 4, 4, 1, 1, 16, device=device)
    wanted = {**factors, "k_descale": factors["k_descale"].requires_grad_()}
    refuses(Unsupported, "k_descale requires a gradient", tilefold.attention, q, k, v, **wanted)
    with torch.no_grad():
        tilefold.attention(q, k, v, **wanted)
    with pytest.raises(Unsupported, match="no transforms"):
        torch.func.vmap(lambda f: tilefold.attention(q, k, v, k_descale=f))(factors["k_descale"].detach()[None])


# ---------------------------------------------------------------- plans


def problem(dim=128, dim_v=None, **changes):
    shape = {"batch": 1, "seq_q": 4096, "seq_k": 4096, "heads": 16, "kv_heads": 4, "dim_qk": dim, "dim_v": dim_v or dim}
    return AttentionProblem(**{**shape, **changes})


def test_bfloat16_is_taken_where_it_is_faster():
    plan = plan_attention_fp8(problem(64), H200)
    assert plan.kernel == "dequantise"
    assert any("V of at most 64 columns bfloat16's kernel is faster" in entry.why for entry in plan.rejected)
    assert plan.with_tile(kernel="attention_forward_fp8").kernel == "attention_forward_fp8"


def test_the_kernel_of_bytes_is_planned_on_sm_90():
    for made in (problem(), problem(64, 128, causal=True), problem(80, 128, window=(100, 0))):
        plan = plan_attention_fp8(made, H200)
        assert (plan.kernel, plan.rule) == ("attention_forward_fp8", "fp8")
        assert AttentionFp8Plan.from_json(plan.to_json()) == plan
        assert "transpose_values" in str(plan)
        assert plan.shared_bytes <= H200.smem_per_block
        assert max(map(len, str(plan).splitlines())) <= 110
    # products take half the time of bfloat16's
    assert (
        plan_attention_fp8(problem(), H200).bound.seconds
        < 0.6 * plan_attention_fp8(problem(), H200, True).bound.seconds
    )


@pytest.mark.parametrize(
    ("made", "device", "why"),
    [
        (problem(), "a100", "it is written for sm_90"),
        (problem(), "interpreter", "it is written for sm_90"),
        (problem(256), "h200", "V has 256 columns"),
        (problem(query_descriptors=False), "h200", "strides of Q"),
        (problem(descriptors=False), "h200", "strides of K"),
        (problem(128, 66), "h200", "4 columns at a time"),
    ],
)
def test_elsewhere_the_tensors_are_dequantised(made, device, why):
    plan = plan_attention_fp8(made, device_named(device))
    assert plan.kernel == plan.rule == "dequantise"
    assert why.lower() in plan.rejected[0].why.lower()
    assert plan.portable.kernel in str(plan)
    assert AttentionFp8Plan.from_json(plan.to_json()) == plan


def test_plans_that_are_asked_for():
    plan = plan_attention_fp8(problem(), H200)
    direct = plan.with_tile(options=("direct", "turns"), num_stages=2)
    assert (direct.options, direct.num_stages, direct.rule) == (("direct", "turns"), 2, "override")
    wide = plan_attention_fp8(problem(256), H200)
    forced = wide.with_tile(kernel="attention_forward_fp8")
    assert forced.options == ("direct", "fence", "turns")
    assert plan.with_tile(kernel="dequantise").options == ()
    for changes, text in (
        ({"block_m": 64}, "block_m: must be 128 or 192"),
        ({"block_m": 192}, "block_n: accumulators and weights need 208 registers"),
        ({"block_n": 32}, "block_n: must be 64 or 128"),
        ({"options": ("late",)}, "options: must be among"),
        ({"options": ("turns", "turns")}, "options: must name each version once"),
        ({"num_stages": 8}, "num_stages: needs"),
        ({"num_warps": 8}, "num_warps: must be 4"),
        ({"kernel": "attention_forward"}, "kernel: must be"),
        ({"kernel": "dequantise", "options": ("turns",)}, "options: must be empty"),
    ):
        with pytest.raises(PlanError, match=text):
            plan.with_tile(**changes)
    refuses(PlanError, "seq_k", plan.check, problem(seq_k=5), H200)
    refuses(PlanError, "backend", plan.check, problem(), device_named("interpreter"))
    refuses(PlanError, "problem: its dtype is the output's", plan_attention_fp8, problem(dtype="float16"), H200)


@pytest.mark.interpreter
def test_the_plan_of_a_call_is_followed():
    (q, k, v), factors = quantised(1, 12, 20, 2, 2, 16)
    plan = tilefold.attention_plan(q, k, v, **factors, window=[3, 4], return_lse=True)
    assert isinstance(plan, tilefold.AttentionFp8Plan)
    out = tilefold.attention(q, k, v, **factors, window=(3, 4), plan=plan)
    assert torch.equal(out, tilefold.attention(q, k, v, **factors, window=[3, 4], plan=tilefold.constant(plan)))
    refuses(PlanError, "window", tilefold.attention, q, k, v, **factors, plan=plan)
    refuses(DtypeError, "plan must be an AttentionPlan", tilefold.attention, *(t.float() for t in (q, k, v)), plan=plan)


# ---------------------------------------------------------------- the dispatcher


@pytest.mark.no_poison
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "layout": "bhsd"}, {"window": (4, None), "scale": 0.2}], ids=str
)
def test_compile_fullgraph(options, device):
    (q, k, v), factors = quantised(2, 12, 12, 2, 2, 16, device=device, layout=options.get("layout", "bshd"))

    def layer(q, k, v, factors):
        out, lse = tilefold.attention(q, k, v, **factors, return_lse=True, **options)
        return out + 1, lse

    graph_gives(layer, q, k, v, factors)


@pytest.mark.no_poison
def test_operator(device):
    (q, k, v), factors = quantised(1, 6, 9, 2, 1, 16, device=device)
    # torch's own check of the schema multiplies the inputs, which it cannot in e4m3
    flat = ATTENTION_FP8.flat(q, k, v, Call(causal=True, scales=Scales(*factors.values())))
    torch.library.opcheck(ATTENTION_FP8.op, flat, test_utils="test_faketensor")
    meta = tilefold.attention(*(t.to("meta") for t in (q, k, v)))
    assert (meta.shape, meta.dtype) == (q.shape, torch.bfloat16)
    with pytest.raises(ShapeError, match="heads of q must be a multiple"):
        tilefold.attention(*(t.to("meta") for t in (q, torch.cat((k,) * 3, 2), torch.cat((v,) * 3, 2))))

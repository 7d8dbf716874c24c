"""Bad input: every refusal names the argument, what was given and what is accepted, and nothing is launched."""

import warnings

import numpy as np
import pytest
import torch
import triton

import tilefold
from cases import dilated, looped, qkv, relative
from cases.refusals import refuses
from tilefold import DeviceError, DtypeError, LayoutError, ShapeError, Unsupported, ValueRangeError, masks, scores
from tilefold.ops import launch
from tilefold.ops.device import device_of


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch):
    def refuse(*args):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(launch.Launch, "__call__", refuse)


@triton.jit
def five_arguments(score, batch, head, q_index, kv_index):
    return score


def half(*shape, device="cpu"):
    return torch.randn(*shape, device=device).half()


@triton.jit
def three_of_args(score, batch, head, q_index, kv_index, args):
    first, seq_q, seq_k = args
    return kv_index < first + 0 * (seq_q + seq_k)


@triton.jit
def third_of_args(score, batch, head, q_index, kv_index, args):
    return kv_index < args[2]


@triton.jit
def lengths_alone(score, batch, head, q_index, kv_index, args):
    seq_q, seq_k = args
    return score + seq_q - seq_k


def test_a_mod_that_takes_another_number_of_args(device):
    """Before anything is launched or compiled, in every function that takes mods; the same of score_mod and score_grad."""
    q, k, v = qkv(1, 16, 16, 2, 2, 16, dtype=torch.float32, device=device)
    index = tilefold.BlockIndex.from_map(
        torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device), block_q=16, block_k=16
    )
    cu = torch.tensor([0, 16], dtype=torch.int32, device=device)
    calls = (
        lambda **mods: tilefold.attention(q, k, v, **mods),
        lambda **mods: tilefold.attention_plan(q, k, v, **mods),
        lambda **mods: tilefold.attention_varlen(q[0], k[0], v[0], cu, cu, 16, 16, **mods),
        lambda **mods: tilefold.sparse_attention(q, k, v, index, **mods),
    )
    line = "first, seq_q, seq_k = args"
    text = f"mask_mod takes 3 values out of args ({line}), but there are 2: the 0 of mask_args, then seq_q and seq_k"
    for call in calls:
        with pytest.raises(ValueRangeError) as caught:
            call(mask_mod=three_of_args)
        assert str(caught.value) == f"{text}; mask_args must hold 1"
        with pytest.raises(ValueRangeError, match=r"mask_mod takes 3 values .* there are 4: the 2 of mask_args"):
            call(mask_mod=three_of_args, mask_args=(1, 2))
        with pytest.raises(
            ValueRangeError, match=r"at least 3 values .* \(args\[2\]\), .* mask_args must hold at least 1"
        ):
            call(mask_mod=third_of_args)
        with pytest.raises(ValueRangeError, match=r"score_mod takes 2 values .* the 1 of score_args"):
            call(score_mod=lengths_alone, score_args=(1.0,))
        with pytest.raises(ValueRangeError, match=r"score_grad takes 3 values .* the 2 of score_args"):
            call(score_mod=relative, score_args=(torch.zeros(2, 9, device=device), 4), score_grad=three_of_args)


HINT = "; as [batch, heads, seq, dim] all shapes fit: if they lie so, pass layout='bhsd'"


def turned_calls(device):
    """(function, tensors, options) whose shapes say that the heads come second."""
    q, k, v = (t.transpose(1, 2).contiguous() for t in qkv(2, 20, 33, 4, 2, 32, dtype=torch.float16, device=device))
    one = q[:, :, :1]
    bias = torch.zeros(1, 4, 20, 20, device=device)
    yield tilefold.attention, (q, k, v), {}
    yield tilefold.attention, (one, k, v), {}
    yield tilefold.attention, (q, q, q), {"bias": bias}
    yield tilefold.attention, (q, q, q), {"sinks": torch.zeros(4, device=device)}
    yield tilefold.attention_plan, (q, k, v), {}
    yield tilefold.attention, tuple(t.to(torch.float8_e4m3fn) for t in (q, k, v)), {}
    index = tilefold.BlockIndex.from_map(torch.ones(1, 1, 2, 3, dtype=torch.bool, device=device), block_q=16, block_k=16,
                                         seq_q=20, seq_k=33)  # fmt: skip
    yield tilefold.sparse_attention, (q, k, v, index), {}
    square = tilefold.BlockIndex.from_map(torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device), block_q=16, block_k=16,
                                          seq_q=20, seq_k=20)  # fmt: skip
    yield tilefold.sparse_attention, (q, q, q, square), {}


def test_heads_before_tokens_are_recognised(device):
    """Wherever shapes betray the layout; what fits neither layout has no such hint, and the other way round the same."""
    for function, tensors, options in turned_calls(device):
        with pytest.raises(ShapeError) as caught:
            function(*tensors, **options)
        assert str(caught.value).endswith(HINT) and str(caught.value).count("layout='bhsd'") == 1, str(caught.value)
    q, k, v = qkv(2, 20, 33, 4, 2, 32, dtype=torch.float16, device=device)
    with pytest.raises(ShapeError, match=r"as \[batch, seq, heads, dim\] all shapes fit: .* pass layout='bshd'"):
        tilefold.attention(q, k, v, layout="bhsd")
    with pytest.raises(ShapeError) as caught:
        tilefold.attention(q, k[:1], v)
    assert "all shapes fit" not in str(caught.value)


def test_bad_calls(device):
    q, k, v = qkv(2, 20, 33, 4, 2, 32, dtype=torch.float16, device=device)

    def bad(error, text, *tensors, **options):
        refuses(error, text, tilefold.attention, *(tensors or (q, k, v)), **options)

    other = torch.randn(2, 33, 2, 32, device=device)
    bad(ShapeError, "q has 3 dimensions, shape (20, 4, 32); expected [batch, seq_q, heads, dim_qk]", q[0], k, v)
    bad(ShapeError, "dimension 0 (batch) is 1, should be 2 as in q", q, k[:1], v)
    bad(ShapeError, "dimension 3 (dim_qk) is 16, should be 32 as in q", q, k[..., :16], v)
    bad(ShapeError, "v has shape (2, 30, 2, 32), expected [batch, seq_k, kv_heads, dim_v]", q, k, v[:, :30])
    bad(ShapeError, "dimension 2 (kv_heads) is 1, should be 2 as in k", q, k, v[:, :, :1])
    bad(ShapeError, "q has 3 heads and k has 2: the heads of q must be a multiple", q[:, :, :3], k, v)
    bad(DtypeError, "k has dtype float32, but q has float16", q, other, v)
    bad(DtypeError, "q has dtype float64, accepted: float16, bfloat16, float32", q.double(), k, v)
    bad(DtypeError, "v must be a torch.Tensor, got NoneType", q, k, None)
    bad(DtypeError, "q must be a torch.Tensor, got list", [1.0], k, v)
    bad(DeviceError, "k is on meta, but q is on", q, k.to("meta"), v)
    wide = half(2, 20, 4, 520, device=device)
    bad(Unsupported, "q and k have head dim 520; accepted: 1 to 512", wide, wide, wide)
    bad(Unsupported, "v has head dim 520", q, q, wide)
    bad(Unsupported, "q and k have head dim 0; accepted: 1 to 512", q[..., :0], k[..., :0], v)
    turned = half(2, 20, 32, 4, device=device).transpose(2, 3)
    bad(LayoutError, "q needs a contiguous last dimension (stride 1), got strides", turned, k, v)
    bad(LayoutError, "v needs a contiguous last dimension", q, k, half(2, 33, 2, 64, device=device)[..., ::2])
    for value in (0.0, -1.0):
        bad(ValueRangeError, f"scale must be greater than 0, got {value}", scale=value)
    bad(ValueRangeError, "scale must be greater than 0, got nan", scale=float("nan"))
    for value in (1e-46, 1e39, float("inf"), 10**400):
        bad(ValueRangeError, "scale must be between 1e-30 and 1e+30 in size", scale=value)
    bad(ValueRangeError, "softcap must be between 1e-30 and 1e+30", softcap=1e-50)
    bad(DtypeError, "scale must be a number, got '1'", scale="1")
    bad(ValueRangeError, "softcap must be at least 0, got -3", softcap=-3)
    bad(DtypeError, "softcap must be a number, got None", softcap=None)
    bad(DtypeError, "causal must be a bool, got 1", causal=1)
    bad(DtypeError, "window must be None or a pair (left, right), got 5", window=5)
    bad(DtypeError, "window must hold integers or None", window=(1.5, 2))
    bad(ValueRangeError, "window sides must be at least 0", window=(-2, 0))
    bad(DtypeError, "window must hold integers or None", window=(True, 1))
    bad(DtypeError, "window must be None or a pair", window=())
    bad(ValueRangeError, "layout must be 'bshd' or 'bhsd', got 'sbhd'", layout="sbhd")
    bad(ShapeError, "bias has shape (2, 4, 20, 1)", bias=torch.zeros(2, 4, 20, 1, device=device))
    bad(ShapeError, "dimension 1 (heads) is 3, should be 4 or 1 as in q", bias=torch.zeros(2, 3, 20, 33, device=device))
    bad(ShapeError, "bias has 2 dimensions", bias=torch.zeros(20, 33, device=device))
    bad(DtypeError, "bias has dtype bool", bias=torch.ones(2, 4, 20, 33, device=device) > 0)
    bad(DtypeError, "mask has dtype float32, accepted: bool", mask=torch.ones(2, 4, 20, 33, device=device))
    bad(ShapeError, "alibi_slopes has shape (3,), expected [heads]", alibi_slopes=torch.ones(3, device=device))
    bad(DtypeError, "alibi_slopes has dtype float16", alibi_slopes=half(4, device=device))
    bad(ShapeError, "sinks has shape (2,), expected [heads]", sinks=torch.ones(2, device=device))
    bad(DeviceError, "sinks is on meta", sinks=torch.ones(4, device="meta"))
    bad(DtypeError, "score_mod must be a @triton.jit function of (score, batch, head,", score_mod=lambda s, *a: s)
    bad(DtypeError, "mask_mod must be a @triton.jit function", mask_mod=tilefold.attention)
    bad(DtypeError, "score_args must be a tuple, got list", score_mod=relative, score_args=[1])
    bad(DtypeError, "mask_args[0] must be a tensor, an int or a float, got str", mask_mod=dilated, mask_args=("2",))
    bad(DeviceError, "score_args[0] is on meta", score_mod=relative, score_args=(torch.ones(4, device="meta"), 1))
    bad(ValueRangeError, "score_args were given without score_mod", score_args=(1,))
    bad(DtypeError, "score_args must be a tuple, got float", score_mod=relative, score_args=1.0)
    bad(DtypeError, "score_args must be a tuple, got Tensor", score_mod=relative, score_args=q)
    bad(DtypeError, "mask_args[0] must be a tensor, an int or a float, got bool", mask_mod=dilated, mask_args=(True,))
    bad(ValueRangeError, "mask_args[0] must fit 64 bits", mask_mod=dilated, mask_args=(2**70,))
    bad(DtypeError, "score_mod takes 5 arguments", score_mod=five_arguments)
    for name in ("bias", "mask", "sinks", "alibi_slopes"):
        bad(
            DtypeError,
            f"{name} must be a torch.Tensor{', a value of tilefold.masks' * (name == 'mask')} or None, got ndarray",
            **{name: np.ones((1, 1, 20, 33))},
        )
    lazy = torch.view_as_complex(torch.randn(2, 4, 20, 33, 2, device=device)).conj().imag
    bad(LayoutError, "bias is a lazy negation", bias=lazy)
    bad(LayoutError, "q must be a dense strided tensor", q.to_sparse(), k, v)
    bad(DtypeError, "plan must be an AttentionPlan, a DecodePlan, an InvariantPlan or None, got str", plan="fast")
    learned = q.clone().requires_grad_()
    bad(Unsupported, "only assignments, `if` and `return` may depend on the score", learned, k, v, score_mod=looped)
    slopes = torch.ones(4, device=device).requires_grad_()
    bad(Unsupported, "alibi_slopes requires a gradient", alibi_slopes=slopes)
    bad(DtypeError, "backward_plan must be an AttentionBackwardPlan", learned, k, v, backward_plan="fast")
    bad(ValueRangeError, "score_grad was given without score_mod", score_grad=relative)


def test_bad_calls_on_a_warm_cache(device, monkeypatch):
    """Values that compare equal to good ones are refused after the good call too."""
    q, k, v = qkv(1, 20, 20, 2, 2, 16, device=device)
    flat = [t[0] for t in (q, k, v)]
    cu = torch.tensor([0, 20], dtype=torch.int32, device=device)
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, args: None)
    tilefold.attention(q, k, v, causal=True, window=(1, 1), scale=1.0, softcap=0.0)
    tilefold.attention_varlen(*flat, cu, cu, 20, 20)
    for bad in ({"causal": 1}, {"window": (1.0, 1)}, {"window": (True, 1)}, {"scale": True}, {"softcap": False}):
        with pytest.raises(DtypeError):
            tilefold.attention(q, k, v, **{"causal": True, "window": (1, 1), "scale": 1.0, "softcap": 0.0, **bad})
    refuses(DtypeError, "max_seqlen_q must be an int, got float", tilefold.attention_varlen, *flat, cu, cu, 20.0, 20)


@pytest.mark.parametrize("wrong", ["causal", masks.causal, scores.softcap(3.0)], ids=["word", "function", "score"])
def test_what_a_mask_may_be(wrong, device):
    q = torch.randn(1, 30, 2, 16, device=device)
    text = f"mask must be a torch.Tensor, a value of tilefold.masks or None, got {type(wrong).__name__}"
    refuses(DtypeError, text, tilefold.attention, q, q, q, mask=wrong)
    refuses(DtypeError, text, tilefold.attention_kvcache, q, q, q, mask=wrong)


def test_bad_varlen(device):
    q, k, v = (torch.randn(30, 2, 16, device=device) for _ in range(3))
    cu = torch.tensor([0, 10, 30], dtype=torch.int32, device=device)
    good = (cu, cu, 20, 20)
    for error, text, tensors, where, options in (
        (ShapeError, "q has 4 dimensions", (q[None], k, v), good, {}),
        (ShapeError, "k has 4 dimensions", (q, k[None], v[None]), good, {}),
        (ShapeError, "q has 4 dimensions", (q[None], k[None], v[None]), good, {}),
        (DtypeError, "cu_seqlens_q has dtype int64, accepted: int32", (q, k, v), (cu.long(), cu, 20, 20), {}),
        (ShapeError, "cu_seqlens_k has shape (2,), expected [batch+1]", (q, k, v), (cu, cu[:2], 20, 20), {}),
        (DtypeError, "cu_seqlens_q must be a torch.Tensor, got list", (q, k, v), ([0, 30], cu, 20, 20), {}),
        (DtypeError, "max_seqlen_q must be an int, got float", (q, k, v), (cu, cu, 20.0, 20), {}),
        (ValueRangeError, "max_seqlen_k must be at least 0, got -1", (q, k, v), (cu, cu, 20, -1), {}),
        (ShapeError, "cu_seqlens_q is empty", (q, k, v), (cu[:0], cu[:0], 20, 20), {}),
        (DeviceError, "cu_seqlens_k is on meta", (q, k, v), (cu, cu.to("meta"), 20, 20), {}),
        (
            ShapeError,
            "bias has shape (2, 2, 20, 30)",
            (q, k, v),
            good,
            {"bias": torch.zeros(2, 2, 20, 30, device=device)},
        ),
        (
            ShapeError,
            "alibi_slopes has shape (3, 2)",
            (q, k, v),
            good,
            {"alibi_slopes": torch.zeros(3, 2, device=device)},
        ),
    ):
        refuses(error, text, tilefold.attention_varlen, *tensors, *where, **options)


def test_plan_of_another_problem(device):
    q, k, v = qkv(2, 20, 33, 4, 2, 32, dtype=torch.float16, device=device)
    plan = tilefold.attention_plan(q, k, v)
    for tensors, options, text in (
        ((q[:1], k[:1], v[:1]), {}, "batch=2, the call has batch=1"),
        ((q, k, v), {"causal": True}, "causal=False, the call has causal=True"),
        ((q.float(), k.float(), v.float()), {}, "dtype='float16'"),
    ):
        refuses(tilefold.PlanError, text, tilefold.attention, *tensors, plan=plan, **options)


def test_plan_without_queries(device):
    q = torch.randn(1, 0, 2, 16, device=device)
    refuses(Unsupported, "there is no query", tilefold.attention_plan, q, q, q)


def test_tensors_that_no_architecture_serves(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    q = torch.empty(3, 5, 7, 16, device="meta")
    refuses(
        DeviceError,
        "tensors are on meta, which holds no numbers; plans of them take device=",
        device_of,
        q.device,
        "attention",
    )


def test_a_mod_that_a_kernel_does_not_compile_with_is_told_without_a_warning(monkeypatch):
    from tilefold.kernels import hopper
    from tilefold.ops.hopper import bound_or_none

    def fail(bound):
        try:
            raise TypeError("full() has no layout")
        except TypeError as cause:
            raise RuntimeError("at 12:4:\n    kernel") from cause

    monkeypatch.setattr(hopper, "refusal", lambda: None)
    faults: list[str] = []
    assert bound_or_none("dense", lambda: 1, lambda bound: None, faults=faults) == 1
    assert faults == []
    with warnings.catch_warnings(action="error"):
        assert bound_or_none("dense", lambda: 1, fail, faults=faults) is None
    assert faults == ["full() has no layout"]
    with pytest.warns(RuntimeWarning, match="does not compile: RuntimeError"):
        assert bound_or_none("dense", lambda: 1, fail) is None

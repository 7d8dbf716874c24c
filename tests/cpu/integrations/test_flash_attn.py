"""flash_attn's six functions without a cache against fp64: layouts, windows, mods, dropout, packed sequences, gradients."""

import math

import pytest
import torch

from cases import hold_back, judge, packed, qkv, rand, same
from tilefold import reference
from tilefold.compat import flash_attn as fa

INFINITY = float("inf")


def held(got, q, k, v, **options):
    """out, and lse where it is given, against the oracle."""
    varlen = options.pop("varlen", None)
    run = reference.attention if varlen is None else reference.attention_varlen
    exact = run(q, k, v, *(varlen or ()), **options)
    plain = run(q, k, v, *(varlen or ()), dtype=q.dtype, **options)
    out = got[0] if isinstance(got, tuple) else got
    judge(out, exact[0], plain[0], "out")
    if isinstance(got, tuple):
        want, near = (lse.masked_fill(lse == -INFINITY, INFINITY) for lse in (exact[1], plain[1]))
        judge(got[1], want, near, "lse")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {}),
        ({"causal": True}, {"causal": True}),
        ({"window_size": (3, 2)}, {"window": (3, 2)}),
        ({"window_size": torch.tensor([4, 0])}, {"window": (4, 0)}),
        ({"window_size": [-5, 2]}, {"window": (-1, 2)}),
        ({"window_size": (3, 7), "causal": True}, {"window": (3, 0)}),
        ({"softcap": 5.0, "softmax_scale": 0.5}, {"softcap": 5.0, "scale": 0.5}),
        ({"deterministic": True}, {}),
    ],
)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(11, 17), (17, 11)])
def test_dense(device, seq_q, seq_k, given, meant):
    q, k, v = qkv(2, seq_q, seq_k, 4, 2, 20, device=device)
    out, lse, dropped = fa.flash_attn_func(q, k, v, return_attn_probs=True, **given)
    held((out, lse), q, k, v, **meant)
    assert dropped.shape == (0,)
    assert torch.equal(fa.flash_attn_func(q, k, v, **given), out)
    if seq_q > seq_k and given.get("causal"):
        assert (lse[:, :, : seq_q - seq_k] == INFINITY).all()
        assert not out[:, : seq_q - seq_k].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [9, 40, 59])
def test_odd_head_dims_and_dtypes(device, dim, dtype):
    q, k, v = qkv(1, 20, 33, 6, 3, dim, dim + 3, dtype=dtype, device=device)
    slopes = torch.rand(6, device=device)
    held(fa.flash_attn_func(q, k, v, alibi_slopes=slopes), q, k, v, alibi_slopes=slopes)
    both = slopes[None].expand(1, 6) * 0.5
    held(fa.flash_attn_func(q, k, v, alibi_slopes=both, causal=True), q, k, v, alibi_slopes=both, causal=True)


def test_packed_tensors_are_views(device):
    qkv_ = rand(2, 9, 3, 4, 16, device=device)
    q, k, v = qkv_.unbind(2)
    want = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    for got in (
        fa.flash_attn_qkvpacked_func(qkv_, causal=True, return_attn_probs=True),
        fa.flash_attn_kvpacked_func(q, qkv_[:, :, 1:], causal=True, return_attn_probs=True),
    ):
        assert same(got, want)
    held(want[:2], q, k, v, causal=True)


def test_last_dimension_is_made_contiguous(device):
    q, k, v = (t.transpose(1, 3).contiguous().transpose(1, 3) for t in qkv(1, 9, 9, 2, 2, 16, device=device))
    assert q.stride(-1) != 1
    held(fa.flash_attn_func(q, k, v), q, k, v)


@pytest.mark.parametrize("window", [(-1, -1), (6, 1)])
def test_gradients(device, window):
    q, k, v = (t.requires_grad_() for t in qkv(1, 9, 14, 4, 2, 12, device=device))
    out = fa.flash_attn_func(q, k, v, window_size=window)
    hold_back(out, lambda *leaves, dtype: reference.attention(*leaves, window=window, dtype=dtype)[0], q, k, v)


def test_gradients_of_packed_tensors(device):
    q, k, v = qkv(2, 8, 8, 2, 2, 16, device=device)
    grad = rand(2, 8, 2, 16, device=device)
    parts = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(fa.flash_attn_func(*parts), parts, grad)
    whole = torch.stack((q, k, v), 2).requires_grad_()
    (got,) = torch.autograd.grad(fa.flash_attn_qkvpacked_func(whole), whole, grad)
    assert torch.equal(got, torch.stack(want, 2))
    kv = torch.stack((k, v), 2).requires_grad_()
    (got,) = torch.autograd.grad(fa.flash_attn_kvpacked_func(q, kv), kv, grad)
    assert torch.equal(got, torch.stack(want[1:], 2))


# ---------------------------------------------------------------- dropout


def scores_of(q, k, scale, causal):
    """[B, H, Sq, Sk] fp64, -inf where a key is not seen."""
    k = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * scale
    if causal:
        seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril(s.shape[-1] - s.shape[-2])
        s = s.masked_fill(~seen, -INFINITY)
    return s


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropped_weights_are_negative(device, dtype, causal):
    """S_dmask says what out was made of: out = (softmax, where S_dmask >= 0) v / (1 - p)."""
    p = 0.3
    q, k, v = qkv(2, 30, 37, 4, 2, 16, dtype=dtype, device=device)
    out, lse, dropped = fa.flash_attn_func(q, k, v, p, causal=causal, return_attn_probs=True)
    assert dropped.shape == (2, 4, 128, 128)
    assert dropped.dtype == dtype
    assert not dropped[:, :, 30:].any()
    assert not dropped[..., 37:].any()
    dropped = dropped[:, :, :30, :37]
    s = scores_of(q, k, 16**-0.5, causal)
    seen = s > -INFINITY
    assert not dropped[~seen].any()
    share = (dropped < 0)[seen].float().mean().item()
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / int(seen.sum()))

    def weights():
        s = scores_of(q, k, 16**-0.5, causal)
        return torch.exp(s - s.amax(-1, keepdim=True))

    judge(dropped.abs(), weights(), reference.deviating(weights, dtype), "weights")

    def attended():
        s = scores_of(q, k, 16**-0.5, causal)
        kept = torch.softmax(s, -1) * (dropped >= 0) / (1 - p)
        return torch.einsum("bhqk,bkhd->bqhd", kept, v.double().repeat_interleave(2, 2)), torch.logsumexp(s, -1)

    for name, *three in zip(("out", "lse"), (out, lse), attended(), reference.deviating(attended, dtype), strict=True):
        judge(*three, name)


def test_a_dropped_weight_shows_even_if_it_underflows(device):
    q = torch.zeros(1, 1, 1, 16, dtype=torch.float16, device=device)
    k = torch.zeros(1, 64, 1, 16, dtype=torch.float16, device=device)
    q[..., 0], k[:, 1:, :, 0] = 40.0, -40.0  # the first key takes all
    *_, dropped = fa.flash_attn_func(q, k, k, 0.5, return_attn_probs=True, softmax_scale=1.0)
    negative = int((dropped < 0).sum())
    assert 10 < negative < 54


def test_dropout_of_packed_sequences(device):
    (q, k, v), varlen = packed([20, 0, 9], [25, 3, 11], h=2, hk=1, d=16, dv=16, device=device)
    out, lse, dropped = fa.flash_attn_varlen_func(q, k, v, *varlen, 0.25, return_attn_probs=True)
    assert dropped.shape == (3, 2, 128, 128)
    for b, (rows, keys) in enumerate(((slice(0, 20), slice(0, 25)), (slice(20, 29), slice(28, 39)))):
        b = 2 * b
        mine = dropped[b, :, : rows.stop - rows.start, : keys.stop - keys.start]

        def product(rows=rows, keys=keys, mine=mine):
            s = scores_of(q[None, rows], k[None, keys], 0.25, False)[0]
            return torch.einsum("hqk,kd->qhd", torch.softmax(s, -1) * (mine >= 0) / 0.75, v[keys, 0].double())

        judge(out[rows], product(), reference.deviating(product, torch.float32), "out")
    assert not dropped[1].any()


# ---------------------------------------------------------------- packed sequences


def test_varlen(device):
    (q, k, v), varlen = packed([13, 0, 5, 7], [20, 4, 0, 7], h=4, hk=2, d=24, dv=24, device=device)
    slopes = torch.rand(4, 4, device=device)
    for given, meant in (({}, {}), ({"causal": True}, {"causal": True}), ({"window_size": (4, 1), "softcap": 9.0},
                         {"window": (4, 1), "softcap": 9.0}), ({"alibi_slopes": slopes}, {"alibi_slopes": slopes})):  # fmt: skip
        got = fa.flash_attn_varlen_func(q, k, v, *varlen, return_attn_probs=True, **given)
        held(got[:2], q, k, v, varlen=varlen, **meant)
        assert (got[1][:, 13:18] == INFINITY).all()  # the sequence without keys
        assert not got[0][13:18].any()


def test_varlen_packed_tensors(device):
    (q, k, v), varlen = packed([9, 6], [9, 6], h=2, hk=2, d=16, dv=16, device=device)
    want = fa.flash_attn_varlen_func(q, k, v, *varlen, causal=True)
    got = fa.flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), varlen[0], 9, causal=True)
    assert torch.equal(got, want)
    got = fa.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *varlen, causal=True)
    assert torch.equal(got, want)
    tensors = varlen[0], torch.tensor(9)
    assert torch.equal(fa.flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), *tensors, causal=True), want)


def test_gradients_past_the_last_sequence_are_zero(device):
    (q, k, v), (cu_q, cu_k, *longest) = packed([7, 5], [6, 9], h=2, hk=1, d=16, dv=16, device=device)
    tail = [torch.cat((t, rand(4, *t.shape[1:], device=device))).requires_grad_() for t in (q, k, v)]
    out = fa.flash_attn_varlen_func(*tail, cu_q, cu_k, *longest)
    grad = rand(*out.shape, device=device)
    got = torch.autograd.grad(out, tail, grad)
    alone = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(fa.flash_attn_varlen_func(*alone, cu_q, cu_k, *longest), alone, grad[:12])
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one[: len(other)], other)
        assert not one[len(other) :].any()


def test_sinks_under_each_name(device):
    q, k, v = qkv(1, 6, 9, 2, 2, 16, device=device)
    sinks = rand(2, device=device).requires_grad_()
    for name in ("sinks", "learnable_sink", "s_aux"):
        got = fa.flash_attn_func(q, k, v, return_attn_probs=True, **{name: sinks})
        held(got[:2], q, k, v, sinks=sinks.detach())
        assert torch.autograd.grad(got[0].sum(), sinks)[0].abs().sum() > 0


# ---------------------------------------------------------------- the private functions


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_private_dense_functions(device, p):
    from tilefold.compat.flash_attn import flash_attn_interface as interface

    q, k, v = qkv(1, 9, 12, 4, 2, 16, device=device)
    grad = rand(1, 9, 4, 16, device=device)
    torch.manual_seed(3)
    alone = [t.clone().requires_grad_() for t in (q, k, v)]
    out = fa.flash_attn_func(*alone, p, causal=True)
    want = torch.autograd.grad(out, alone, grad)
    torch.manual_seed(3)
    rest = 16**-0.5, True, -1, 0, 0.0, None
    got, lse, _, state = interface._flash_attn_forward(q, k, v, p, *rest, False)
    assert torch.equal(got, out)
    assert state.shape == (2,)
    grads = [torch.full_like(t, INFINITY) for t in (q, k, v)]
    delta = interface._flash_attn_backward(grad, q, k, v, got, lse, *grads, p, *rest, False, state)
    for one, other in zip(grads, want, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert torch.allclose(delta, (got * grad).sum(-1).transpose(1, 2), atol=1e-5)


def test_private_varlen_functions(device):
    from tilefold.compat.flash_attn import flash_attn_interface as interface

    (q, k, v), varlen = packed([7, 5], [6, 9], h=2, hk=1, d=16, dv=16, device=device)
    q = torch.cat((q, q[:3]))
    grad = rand(*q.shape, device=device)
    alone = [t.clone().requires_grad_() for t in (q, k, v)]
    want_out = fa.flash_attn_varlen_func(*alone, *varlen)
    want = torch.autograd.grad(want_out, alone, grad)
    out, lse, weights, _ = interface._flash_attn_varlen_forward(q, k, v, *varlen, 0.0, 0.25, False, zero_tensors=True)
    assert torch.equal(out[:12], want_out[:12])
    assert not out[12:].any()
    assert weights.shape == (0,)
    grads = [torch.full_like(t, INFINITY) for t in (q, k, v)]
    interface._flash_attn_varlen_backward(
        grad, q, k, v, out, lse, *grads, *varlen, 0.0, 0.25, False, -1, -1, 0.0, None, True
    )
    for one, other in zip(grads, want, strict=True):
        assert torch.allclose(one, other, atol=1e-6)

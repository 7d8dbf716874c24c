"""Gradients of dense attention with bias, sinks, masks and mods, of packed sequences, and through torch's dispatcher."""

import pytest
import torch

import tilefold
from cases import (
    dilated,
    dilated_twin,
    graph_gives,
    looped,
    one,
    packed,
    qkv,
    rand,
    relative,
    relative_twin,
    same,
)
from cases.gradient import BOX_BACKWARD, check_gradients, gradients
from tilefold.ops.call import Call
from tilefold.ops.dense import attention
from tilefold.ops.dense.library import ATTENTION
from tilefold.plan import device_named, plan_attention
from tilefold.plan.dense.attention_hopper import KERNEL

BIASES = [(2, 2, 20, 33), (1, 2, 20, 33), (2, 1, 20, 33), (1, 1, 20, 33), (2, 2, 1, 33), (1, 2, 1, 33), (1, 1, 1, 33)]


@pytest.mark.parametrize("number", range(len(BIASES)))
def test_bias(number, device):
    """Every way to share a bias: its gradient is the sum over what shares it, in one share or in three."""
    q, k, v = qkv(2, 20, 33, 2, 1, 16, dtype=torch.float16, device=device)
    shares, band = ((3, {"window": (14, 9)}), (1, {"causal": True}))[number % 2]
    check_gradients(q, k, v, bias=rand(*BIASES[number], device=device), shares=shares, **band)


def test_bias_of_other_dtypes_and_strides(device):
    q, k, v = qkv(1, 20, 33, 2, 2, 16, dtype=torch.float16, device=device)
    check_gradients(q, k, v, bias=rand(1, 2, 20, 33, dtype=torch.float16, device=device), kernel=BOX_BACKWARD)
    check_gradients(q, k, v, bias=rand(1, 2, 33, 20, device=device).transpose(2, 3), tile=None)
    bias = rand(1, 2, 1, 33, device=device).expand(1, 2, 20, 33)  # no copy of it is made; its gradient is a whole one
    assert check_gradients(q, k, v, bias=bias)[3].shape == bias.shape
    check_gradients(*qkv(1, 20, 33, 2, 2, 16, dtype=torch.bfloat16, device=device),
                    bias=rand(1, 1, 20, 33, dtype=torch.bfloat16, device=device))  # fmt: skip


def test_bias_of_minus_infinity(device):
    """Scores that a bias takes away, whole rows of them too, are as masked: the oracle's own autograd has NaN for such rows."""
    q, k, v = qkv(1, 20, 33, 2, 1, 16, device=device)
    mask = rand(1, 2, 20, 33, device=device) > -0.5
    mask[:, 1, 7] = False
    bias = rand(1, 2, 20, 33, device=device).masked_fill(~mask, 0.0)
    check_gradients(q, k, v, bias=bias, mask=mask, softcap=3.0)
    dout, dlse = rand(1, 20, 2, 16, device=device), rand(1, 2, 20, device=device)
    want = gradients((q, k, v), dout, dlse, bias=bias, mask=mask, softcap=3.0)
    got = gradients((q, k, v), dout, dlse, bias=bias.masked_fill(~mask, float("-inf")), softcap=3.0)
    assert same(got, want)


def test_softcap_alibi_sinks_mask(device):
    q, k, v = qkv(2, 20, 33, 2, 1, 16, device=device)
    half = (q.half(), k.half(), v.half())
    check_gradients(q, k, v, softcap=2.0, scale=0.4, causal=True)
    check_gradients(*half, softcap=2.0)
    check_gradients(*half, alibi_slopes=rand(2, 2, device=device).abs(), sinks=rand(2, device=device), causal=True)
    check_gradients(q, k, v, mask=rand(2, 1, 20, 33, device=device) > -0.5, sinks=rand(2, device=device))


def test_mods(device):
    """A user's mod comes after the bias: the gradient of the bias goes through its slope."""
    q, k, v = qkv(1, 20, 33, 2, 1, 16, device=device)
    hook = {"score_mod": relative, "score_grad": one, "score_args": (rand(2, 9, device=device), 4)}
    hook |= {"mask_mod": dilated, "mask_args": (2,), "twins": {"score_mod": relative_twin, "mask_mod": dilated_twin}}
    check_gradients(q, k, v, softcap=3.0, causal=True, **hook)
    from tilefold.device import mods

    hook = {"score_mod": mods.softcap_exact, "score_grad": mods.softcap_exact_slope, "score_args": (1.5,)}
    hook |= {"twins": {"score_mod": lambda score, b, h, i, j, args: 1.5 * torch.tanh(score / 1.5)}}
    every = {"bias": rand(1, 2, 1, 33, device=device), "alibi_slopes": rand(2, device=device).abs(), "softcap": 4.0}
    check_gradients(q, k, v, sinks=rand(2, device=device), mask=rand(1, 1, 20, 33, device=device) > -1, **every, **hook)


LENGTHS = [([20, 0, 33, 1], [10, 30, 0, 5]), ([5, 40, 16], [50, 2, 16])]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences(lengths, device):
    tensors, where = packed(*lengths, h=2, hk=1, d=16, dv=8, device=device)
    for band in ({}, {"causal": True}, {"window": (9, 3)}):
        check_gradients(*tensors, varlen=where, **band)


def test_packed_options(device):
    tensors, where = packed([20, 0, 33], [10, 30, 25], h=2, hk=1, d=16, dv=16, device=device)
    check_gradients(*tensors, varlen=where, bias=rand(3, 2, 33, 30, device=device), sinks=rand(2, device=device))
    check_gradients(*tensors, varlen=where, bias=rand(1, 1, 1, 30, device=device), causal=True, shares=2, softcap=2.0)
    check_gradients(*(t.half() for t in tensors), varlen=where, mask=rand(1, 1, 33, 30, device=device) > -0.5)
    loose = (*where[:2], where[2] + 50, where[3] + 50)
    check_gradients(*tensors, varlen=loose, causal=True, tile=None, alibi_slopes=rand(3, 2, device=device).abs())


def test_rows_of_no_sequence(device):
    """Their results are not written and hold NaN here: they get gradient 0, and nothing of them reaches another row or a sink."""
    (q, k, v), (cu_q, cu_k, max_q, max_k) = packed([20, 7], [33, 12], h=2, hk=1, d=16, dv=16, device=device)
    where, sinks = (cu_q, cu_k, max_q, max_k), rand(2, device=device)
    dout, dlse = rand(27, 2, 16, device=device), rand(2, 27, device=device)
    want = gradients((q, k, v), dout, dlse, where, sinks=sinks)
    extra = [torch.cat([t, torch.full_like(t[:5], float("nan"))]) for t in (q, k, v, dout)]
    got = gradients(extra[:3], extra[3], torch.cat([dlse, dlse[:, :5]], 1), where, sinks=sinks)
    for a, b, length in zip(got, want, (27, 45, 45, 2), strict=True):
        assert torch.equal(a[:length], b)
        assert not a[length:].any()


# ---------------------------------------------------------------- the dispatcher

OPTIONS = {
    "terms": lambda device: (
        {"bias": rand(1, 2, 20, 33, device=device), "sinks": rand(2, device=device)},
        {"causal": True, "mask": rand(1, 1, 20, 33, device=device) > -1, "alibi_slopes": rand(2, device=device).abs()},
    ),
    "hooks": lambda device: (
        {},
        {
            "score_mod": tilefold.constant(relative),
            "score_grad": tilefold.constant(one),
            "score_args": (rand(2, 9, device=device), 4),
            "window": (9, None),
        },
    ),
}


@pytest.mark.no_poison
@pytest.mark.parametrize("name", OPTIONS)
def test_compile_fullgraph(name, device):
    extra, options = OPTIONS[name](device)
    inputs = [
        t.requires_grad_() for t in (*qkv(1, 20, 33, 2, 1, 16, dtype=torch.float16, device=device), *extra.values())
    ]

    def layer(q, k, v, *more):
        out, lse = tilefold.attention(2 * q, k, v, return_lse=True, **dict(zip(extra, more, strict=True)), **options)
        return out + 1, lse

    graph_gives(layer, *inputs, times=2)


@pytest.mark.no_poison
def test_compile_varlen_and_plans(device):
    tensors, where = packed([20, 7], [33, 12], h=2, hk=1, d=16, dv=16, device=device)
    leaves = [t.requires_grad_() for t in tensors]
    names = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), where, strict=True))
    plan = tilefold.constant(tilefold.attention_backward_plan(*leaves, **names, causal=True))

    def layer(q, k, v):
        return tilefold.attention_varlen(q, k, v, *where, causal=True, backward_plan=plan)

    graph_gives(layer, *leaves)


@pytest.mark.no_poison
def test_opcheck_and_refusals_of_the_operator(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 20, 33, 2, 1, 16, device=device))
    bias, sinks = rand(1, 2, 1, 33, device=device).requires_grad_(), rand(2, device=device).requires_grad_()
    torch.library.opcheck(ATTENTION.op, ATTENTION.flat(q, k, v, Call(causal=True, bias=bias, sinks=sinks)))
    modded = Call(causal=True, score_mod=relative, score_args=(rand(2, 9, device=device), 4), score_grad=one)
    torch.library.opcheck(ATTENTION.op, ATTENTION.flat(q, k, v, modded))
    slopes = rand(2, device=device).requires_grad_()
    table = rand(2, 9, device=device).requires_grad_()
    torch.library.opcheck(ATTENTION.op, ATTENTION.flat(q, k, v, modded._replace(score_args=(table, 4))))
    for call, match in (
        (Call(causal=True, alibi_slopes=slopes), "alibi_slopes requires a gradient, but only q, k, v, bias, sinks and"),
        (Call(mask_mod=dilated, mask_args=(3, table)), r"mask_args\[1\] requires a gradient, but only"),
        (Call(score_mod=looped), "give score_grad"),
    ):
        out, _ = ATTENTION.dispatched(q, k, v, call)
        with pytest.raises(tilefold.Unsupported, match=match):
            out.sum().backward()


@pytest.mark.no_poison
def test_functorch_and_fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = qkv(1, 20, 33, 2, 1, 16, device=device)
    bias = rand(1, 2, 20, 33, device=device)

    def loss(q, bias):
        return tilefold.attention(q, k, v, bias=bias, mask=bias.detach() > -1).square().sum()

    got = torch.func.grad(loss, argnums=(0, 1))(q, bias)
    leaves = [t.clone().requires_grad_() for t in (q, bias)]
    assert same(got, torch.autograd.grad(loss(*leaves), leaves))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t).requires_grad_() for t in (q, k, v, bias)]
        out = tilefold.attention(*fakes[:3], bias=fakes[3])
        grads = torch.autograd.grad(out.sum(), fakes)
    assert [g.shape for g in grads] == [t.shape for t in fakes]


def test_rounding_of_lse(monkeypatch, device):
    """An error of lse is one of all probabilities of its row: in fp32, where it would show, they are made to sum to 1 again."""
    forward = attention.forward

    def rounded(q, k, v, call):
        out, lse = forward(q, k, v, call)
        return out, lse + 1e-4 * torch.arange(lse.shape[-1], device=lse.device)

    monkeypatch.setattr(attention, "forward", rounded)
    q, k, v = qkv(2, 20, 33, 2, 1, 16, device=device)
    check_gradients(q, k, v, bias=rand(2, 1, 20, 33, device=device), sinks=rand(2, device=device), causal=True)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    check_gradients(*heads_first, mask=rand(2, 2, 20, 33, device=device) > 0, window=(15, 9), layout="bhsd")
    tensors, where = packed([20, 7], [33, 12], h=2, hk=1, d=16, dv=16, device=device)
    check_gradients(*tensors, varlen=where, causal=True, softcap=3.0)


@pytest.mark.interpreter
def test_after_the_hopper_forward(monkeypatch, device):
    """Out and lse may come from the kernel for sm_90: the backward pass finds all that it needs on that call's record, too."""
    q, k, v = qkv(1, 40, 50, 2, 1, 64, dtype=torch.float16, device=device)
    dout, dlse = rand(1, 40, 2, 64, dtype=torch.float16, device=device), rand(1, 2, 40, device=device)
    want = gradients((q, k, v), dout, dlse, causal=True)
    results = tilefold.attention(q, k, v, causal=True, return_lse=True)
    problem = tilefold.attention_plan(q, k, v, causal=True).problem
    portable = plan_attention(problem, device_named("h200"))
    plan = portable.with_tile(block_m=128, block_n=128, num_warps=4, num_stages=4, kernel=KERNEL)
    prepared = attention.example_call(problem, plan)[2]
    prepared.scale = 1 / 8  # 1 in the example

    def launch(given):
        for made, result in zip(given[3:5], results, strict=True):
            made.copy_(result)

    prepared.bound = launch
    monkeypatch.setattr(attention, "prepare", lambda *call: prepared)
    got = gradients((q, k, v), dout, dlse, causal=True)
    assert same(got, want)

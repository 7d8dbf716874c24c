"""The gradients of short sequences, a program a KV head, on a GPU; see tests/cpu/backward/test_attention_backward_short.py."""

import pytest
import torch

import tilefold
from cases import check as check_forward
from cases import packed, qkv, rand
from cases.gradient import WHERE, check_gradients, gradients, judged, learned, oracle, upstream, with_stored_ds
from cases.mods import slanted, slanted_twin, sliding, sliding_twin
from tilefold.plan.backward.attention_backward_short import KERNEL, MOST

BANDS = [{}, {"causal": True}, {"window": (17, 5)}]
HALVES = (torch.float16, torch.bfloat16)


def check(tensors, **options):
    """By the kernel's own tile, whether plans take it or not."""
    return check_gradients(*tensors, tile=None, kernel=KERNEL, **options)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", sorted(MOST))
@pytest.mark.parametrize("tokens", [1, 16, 31, 49, 64, 100, 128, 196, 256])
def test_lengths(tokens, dim, dtype, device):
    if tokens > MOST[dim]:
        pytest.skip("longer than the kernel takes")
    for band in BANDS:
        few = ("dq", "dk") if tokens == 1 else ()
        check(qkv(5, tokens, tokens, 3, 3, dim, dtype=dtype, device=device), unjudged=few, **band)


@pytest.mark.parametrize("dims", [(40, 24), (72, 128), (16, 64)])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_groups_dims_and_lengths(dims, kv_heads, device):
    check(qkv(200, 33, 50, 4, kv_heads, *dims, dtype=torch.bfloat16, device=device), causal=True)


PACKED = {
    "of 64": ([64] * 40, [64] * 40),
    "of 16": ([16, 3, 0, 9] * 30, [16, 5, 7, 0] * 30),
    "to 50": ([50, 1, 33, 0, 47, 16, 25], [50, 1, 33, 9, 47, 60, 0]),
    "to 128": ([128, 1, 100, 0, 64, 65, 33], [128, 1, 100, 9, 64, 65, 0]),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name, dim, dtype, device):
    """Forward by the planner's tile, gradients by the largest of the kernel; zeros where there is no sequence."""
    if PACKED[name][0][0] > MOST[max(32, 1 << (dim - 1).bit_length())]:
        pytest.skip("longer than the kernel takes")
    for heads, kv_heads, band in ((3, 3, {}), (2, 2, {"causal": True}), (4, 2, {"window": (17, 5)})):
        if kv_heads < heads and PACKED[name][0][0] > 64:
            continue
        tensors, where = packed(*PACKED[name], h=heads, hk=kv_heads, d=dim, dv=dim, dtype=dtype, device=device)
        check_forward(*tensors, None, varlen=where, **band)
        check_gradients(*tensors, varlen=where, tile=(64, 64) if where[2] > 32 else (16, 16), kernel=KERNEL, **band)
    tensors, where = packed(*PACKED[name], h=4, hk=4, d=dim, dv=dim, dtype=dtype, device=device)
    more = [torch.cat([t, torch.full_like(t[:1].expand(999, -1, -1), torch.nan)]) for t in tensors]
    dout, dlse = upstream(more[0].nan_to_num(), more[2])
    plan = tilefold.attention_backward_plan(*more, **dict(zip(WHERE, where, strict=True))).with_tiles(kernel=KERNEL)
    got = gradients(more, dout, dlse, where, backward_plan=plan)
    ends = len(tensors[0]), len(tensors[1]), len(tensors[1])
    assert all(t[:end].isfinite().all() and not t[end:].any() for t, end in zip(got, ends, strict=True))


def test_changes_of_scores(device):
    q, k, v = qkv(7, 49, 64, 4, 4, 64, dtype=torch.bfloat16, device=device)
    check((q, k, v), alibi_slopes=torch.rand(4, device=device), softcap=5.0, causal=True)
    check((q, k, v), sinks=rand(4, device=device))
    check((q, k, v), mask=rand(7, 1, 49, 64, device=device) > 0)
    mods = {
        "score_mod": slanted,
        "mask_mod": sliding,
        "score_args": (torch.rand(4, device=device),),
        "mask_args": (20,),
    }
    check((q, k, v), twins={"score_mod": slanted_twin, "mask_mod": sliding_twin}, **mods)
    check(tuple(t.transpose(1, 2) for t in (q, k, v)), layout="bhsd")
    check(tuple(t[:, ::3] for t in (q, k, v)))


def test_a_bias_behind_softcap(device):
    q, k, v = qkv(7, 49, 49, 4, 4, 32, dtype=torch.bfloat16, device=device)
    check((q, k, v), bias=rand(7, 4, 49, 49, dtype=torch.bfloat16, device=device).requires_grad_(), softcap=2.0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(7, 4), (1, 4), (7, 1), (1, 1)], ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(49, 32), (64, 64), (31, 32), (16, 128), (50, 128)])
def test_learned_bias(tokens, dim, shape, dtype, device):
    q, k, v = qkv(7, tokens, tokens, 4, 4, dim, dtype=dtype, device=device)
    bias = rand(*shape, tokens, tokens, dtype=dtype, device=device)
    dout, dlse = upstream(q, v)
    leaves, options = learned((q, k, v), {"bias": bias})
    plan = tilefold.attention_backward_plan(*leaves[:3], **options)
    assert plan.kernel == KERNEL
    got = gradients((q, k, v), dout, dlse, bias=bias)
    want, plain = (oracle((q, k, v), dout, dlse, d, bias=bias) for d in (torch.float64, dtype))
    if plan.stores_ds:
        plain = with_stored_ds(plain, (q, k, v), dout, dlse, bias=bias)
    judged(got, want, plain, shape, ("dq", "dk", "dv", "dbias"))
    again = gradients((q, k, v), dout, dlse, bias=bias)
    assert all(map(torch.equal, got, again))

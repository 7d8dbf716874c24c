"""The flash_attn functions on a GPU: real sizes against fp64, graphs with changed lengths, no synchronisation, same bits."""

import pytest
import torch

from cases import hold, hold_back, judge, packed, qkv, rand
from cases.device import DEVICE, captured, no_waiting
from cases.flash import a_cache, angles, in_pages, kvcache_oracle, out_of_pages, turned
from tilefold import reference
from tilefold.compat import flash_attn as fa
from tilefold.ops.cache.rotary import apply_rotary

pytestmark = pytest.mark.no_poison
HALVES = [torch.float16, torch.bfloat16]


MASKS = [({}, {}), ({"causal": True}, {"causal": True}), ({"window_size": (70, 9)}, {"window": (70, 9)})]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [59, 64, 128, 256])
@pytest.mark.parametrize(("given", "meant"), MASKS)
def test_dense_with_gradients(dim, dtype, given, meant):
    q, k, v = (t.requires_grad_() for t in qkv(2, 300, 515, 4, 2, dim, dtype=dtype, device=DEVICE))
    grad = rand(2, 300, 4, dim, dtype=dtype, device=DEVICE)
    fa.flash_attn_func(q, k, v, **given)  # compiled
    with no_waiting():
        out, lse, _ = fa.flash_attn_func(q, k, v, return_attn_probs=True, **given)

    def oracle(*leaves, dtype):
        o, e = reference.attention(*leaves, dtype=dtype, **meant)
        return o, e.masked_fill(e == float("-inf"), float("inf"))

    hold_back((out, lse), oracle, q, k, v, back=[grad])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_dropout_is_what_it_says(kind, dtype):
    p = 0.17
    (q, k, v), varlen = packed([200, 0, 131], [260, 3, 100], h=4, hk=2, d=64, dv=64, dtype=dtype, device=DEVICE)
    if kind == "dense":
        out, lse, dropped = fa.flash_attn_func(q[None], k[None], v[None], p, return_attn_probs=True)
        parts = [(slice(0, 331), slice(0, 363), 0)]
        out = out[0]
    else:
        out, lse, dropped = fa.flash_attn_varlen_func(q, k, v, *varlen, p, return_attn_probs=True)
        parts = [(slice(0, 200), slice(0, 260), 0), (slice(200, 331), slice(263, 363), 2)]
    for rows, keys, b in parts:
        mine = dropped[b, :, : rows.stop - rows.start, : keys.stop - keys.start]
        assert abs((mine < 0).float().mean().item() - p) < 0.01

        def product(rows=rows, keys=keys, mine=mine):
            wide_k, wide_v = (t[keys].double().repeat_interleave(2, 1) for t in (k, v))
            s = torch.einsum("qhd,khd->hqk", q[rows].double(), wide_k) / 8
            return torch.einsum("hqk,khd->qhd", torch.softmax(s, -1) * (mine >= 0) / (1 - p), wide_v)

        judge(out[rows], product(), reference.deviating(product, dtype), "out")


@pytest.mark.parametrize("dtype", HALVES)
def test_packed_gradients(dtype):
    (q, k, v), varlen = packed([200, 0, 131, 7], [260, 3, 0, 90], h=4, hk=2, d=64, dv=64, dtype=dtype, device=DEVICE)
    inputs = [torch.cat((t, rand(9, *t.shape[1:], dtype=dtype, device=DEVICE))).requires_grad_() for t in (q, k, v)]
    with no_waiting():
        out, lse, _ = fa.flash_attn_varlen_func(*inputs, *varlen, causal=True, return_attn_probs=True)
    grad = rand(*out.shape, dtype=dtype, device=DEVICE)
    grads = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    again = torch.autograd.grad(out, inputs, grad)
    hold(out[:338], reference.attention_varlen, q, k, v, *varlen, causal=True)
    assert (lse[:, 200:331] == float("inf")).all()
    for one, other, t in zip(grads, again, (q, k, v), strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all() and not one[len(t) :].any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("page", [0, 16, 256, 7])
@pytest.mark.parametrize("seq_q", [1, 5, 130])
@pytest.mark.parametrize(("given", "meant"), MASKS)
def test_kvcache(seq_q, page, dtype, given, meant):
    batch, rows, heads, kv_heads, dim = 3, 700, 14, 2, 128  # groups of 7
    caches = a_cache(batch, rows, kv_heads, dim, dtype=dtype, device=DEVICE)
    new = a_cache(batch, seq_q, kv_heads, dim, dtype=dtype, device=DEVICE)
    q = rand(batch, seq_q, heads, dim, dtype=dtype, device=DEVICE)
    lengths = torch.tensor([403, 0, rows - seq_q], dtype=torch.int32, device=DEVICE)
    table = angles(rows, 32, dtype, DEVICE)
    options = {"k": new[0], "v": new[1], "cos": table[0], "sin": table[1], "interleaved": False, **meant}
    exact = kvcache_oracle(q, *caches, lengths, **options)
    plain = kvcache_oracle(q, *caches, lengths, dtype=dtype, **options)
    for splits in (0, 1, 5):
        if page:
            both, block_table = in_pages(torch.cat(caches, -1), page)
            held = both[..., :dim], both[..., dim:]
        else:
            held, block_table = tuple(c.clone() for c in caches), None
        call = {"block_table": block_table, "rotary_interleaved": False, "return_softmax_lse": True, **given}
        call = {"num_splits": splits, **call}
        fa.flash_attn_with_kvcache(q, *held, *new, *table, lengths, **call)
        with no_waiting():
            out, lse = fa.flash_attn_with_kvcache(q, *held, *new, *table, lengths, **call)
        judge(out, exact[0], plain[0], f"out splits {splits}")
        judge(lse, exact[1], plain[1], f"lse splits {splits}")
        ends = [out_of_pages(t, block_table, rows) if page else t for t in held]
        judge(ends[0], exact[2].double(), plain[2], "k_cache")
        assert torch.equal(ends[1], exact[3])


def test_padding_batch_index_alibi_and_sinks():
    caches = a_cache(5, 300, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    index = torch.tensor([4, 0, 2], dtype=torch.int32, device=DEVICE)
    lengths, pads = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([300, 20, 111], [17, 20, 0]))
    q = rand(3, 3, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    mine = [c[index.long()] for c in caches]
    slopes, sinks = torch.rand(3, 8, device=DEVICE), rand(8, device=DEVICE)
    for name, value in (("alibi_slopes", slopes), ("sinks", sinks), ("softcap", 5.0)):
        exact = kvcache_oracle(q, *mine, lengths, pads, causal=True, **{name: value})
        plain = kvcache_oracle(q, *mine, lengths, pads, causal=True, dtype=q.dtype, **{name: value})
        out, lse = fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, cache_batch_idx=index, cache_leftpad=pads,
                                              causal=True, return_softmax_lse=True, num_splits=3, **{name: value})  # fmt: skip
        judge(out, exact[0], plain[0], f"out {name}")
        judge(lse, exact[1], plain[1], f"lse {name}")


def test_varlen_over_pages_and_used_keys():
    (q, k, v), (cu_q, cu_k, *longest) = packed([100, 1, 60], [300, 90, 200], h=4, hk=2, d=64, dv=64, dtype=torch.bfloat16,
                                               device=DEVICE)  # fmt: skip
    cache = torch.zeros(3, 300, 2, 128, dtype=q.dtype, device=DEVICE)
    for b in range(3):
        rows = slice(int(cu_k[b]), int(cu_k[b + 1]))
        cache[b, : rows.stop - rows.start] = torch.cat((k, v), -1)[rows]
    pages, table = in_pages(cache, 16)
    want = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, causal=True)
    exact = reference.attention_varlen(q, k, v, cu_q, cu_k, *longest, causal=True)[0]
    with no_waiting():
        got = fa.flash_attn_varlen_func(
            q, pages[..., :64], pages[..., 64:], cu_q, cu_k, *longest, causal=True, block_table=table
        )
    judge(got, exact, want, "out over pages")
    used = torch.tensor([150, 90, 3], dtype=torch.int32, device=DEVICE)
    got = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, seqused_k=used)
    for b in range(3):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b]) + int(used[b]))
        exact, _ = reference.attention(q[None, rows], k[None, keys], v[None, keys])
        plain, _ = reference.attention(q[None, rows], k[None, keys], v[None, keys], dtype=q.dtype)
        judge(got[rows], exact[0], plain[0], f"out {b}")


def test_a_graph_follows_lengths_and_tables():
    """One captured decoding step, replayed while the cache grows and its pages move."""
    batch, heads, dim = 4, 8, 64
    cache = torch.cat(a_cache(batch, 512, 2, dim, dtype=torch.bfloat16, device=DEVICE), -1)
    pages, table = in_pages(cache, 16)
    held = pages[..., :dim], pages[..., dim:]
    q, new = rand(batch, 1, heads, dim, dtype=torch.bfloat16, device=DEVICE), a_cache(batch, 1, 2, dim, dtype=torch.bfloat16,
                                                                                     device=DEVICE)  # fmt: skip
    lengths = torch.full((batch,), 100, dtype=torch.int32, device=DEVICE)
    cos, sin = angles(512, 32, torch.bfloat16, DEVICE)

    def step():
        return fa.flash_attn_with_kvcache(q, *held, *new, cos, sin, lengths, block_table=table, causal=True)

    graph, out = captured(step)
    for length in (3, 200, 511):
        lengths.fill_(length)
        table.copy_(table.flip(0))
        q.normal_()
        graph.replay()
        got = out.clone()
        assert torch.equal(got, step())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_rotary(dtype, interleaved):
    x = rand(3, 400, 9, 128, dtype=dtype, device=DEVICE)
    cos, sin = angles(1000, 48, dtype, DEVICE)
    offsets = torch.tensor([0, 77, 600], device=DEVICE)
    place = torch.arange(400, device=DEVICE)
    with no_waiting():
        got = apply_rotary(x, cos, sin, interleaved=interleaved, offsets=offsets)
    for b in range(3):
        exact = turned(x[b], cos, sin, interleaved, int(offsets[b]) + place)
        plain = turned(x[b], cos, sin, interleaved, int(offsets[b]) + place, dtype)
        judge(got[b], exact, plain, "rotary")
    y = x.clone()
    apply_rotary(y, cos, sin, interleaved=interleaved, offsets=offsets, inplace=True)
    assert torch.equal(y, got)


@pytest.mark.large
def test_a_cache_of_more_than_two_billion_elements():
    pages = torch.zeros(70000, 256, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    pages[-4:].normal_()
    table = torch.arange(69996, 70000, dtype=torch.int32, device=DEVICE)[None]
    q = rand(1, 2, 7, 128, dtype=torch.bfloat16, device=DEVICE)
    out = fa.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=1000, block_table=table, causal=True)
    flat = pages[-4:].view(1, 1024, 1, 128)[:, :1000]
    hold(out, reference.attention, q, flat, flat, causal=True)

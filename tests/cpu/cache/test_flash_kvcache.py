"""flash_attn_with_kvcache, and packed sequences whose keys lie in pages, end early or begin late, against fp64."""

import pytest
import torch

import tilefold
from cases import hold, judge, packed, rand
from cases.flash import a_cache, angles, in_pages, kvcache_oracle, out_of_pages
from tilefold import reference
from tilefold.compat import flash_attn as fa

INFINITY = float("inf")


def queries(device, seq=5, heads=2, dim=24, batch=3, dtype=torch.float32):
    return rand(batch, seq, heads, dim, dtype=dtype, device=device)


def check(
    device, q, caches, lengths, page=0, pads=None, new=None, table=None, interleaved=True, splits=0, meant=None, **given
):
    """One call, its caches in one piece or in pages, held to the oracle; returns (out, lse)."""
    k_cache, v_cache = caches
    k, v = new or (None, None)
    cos, sin = table or (None, None)
    options = {"k": k, "v": v, "cos": cos, "sin": sin, "interleaved": interleaved, **(meant or {})}
    exact = kvcache_oracle(q, *caches, lengths, pads, **options)
    plain = kvcache_oracle(q, *caches, lengths, pads, dtype=q.dtype, **options)
    block_table = None
    if page:
        pages_k, block_table = in_pages(k_cache, page)
        pages_v = torch.full((len(pages_k), *pages_k.shape[1:3], v_cache.shape[-1]), float("nan"), device=q.device).to(
            q.dtype
        )
        padded = torch.zeros(len(q), block_table.shape[1] * page, *v_cache.shape[2:], dtype=q.dtype, device=q.device)
        padded[:, : v_cache.shape[1]] = v_cache
        pages_v[block_table.flatten().long()] = padded.view(-1, page, *v_cache.shape[2:])
        held = pages_k, pages_v
    else:
        held = k_cache.clone(), v_cache.clone()
    out, lse = fa.flash_attn_with_kvcache(
        q, *held, k, v, cos, sin, lengths, cache_leftpad=pads, block_table=block_table, rotary_interleaved=interleaved,
        num_splits=splits, return_softmax_lse=True, **given,
    )  # fmt: skip
    judge(out, exact[0], plain[0], "out")
    judge(lse, exact[1], plain[1], "lse")
    rows = k_cache.shape[1]
    for got, want in zip(held, exact[2:], strict=True):
        got = out_of_pages(got, block_table, rows) if page else got
        assert torch.allclose(got.float(), want.float(), atol=2e-7 if q.dtype == torch.float32 else 0.02)
    if new:
        got_v = out_of_pages(held[1], block_table, rows) if page else held[1]
        assert torch.equal(got_v, exact[3])
    return out, lse


MASKS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (7, 2)}, {"window": (7, 2)}),
    ({"window_size": torch.tensor([9, 0])}, {"window": (9, 0)}),
]


@pytest.mark.parametrize(("given", "meant"), MASKS)
@pytest.mark.parametrize(("page", "padded"), [(0, True), (16, False), (7, True)])
def test_lengths_pages_and_padding(device, page, padded, given, meant):
    lengths = torch.tensor([17, 0, 40], dtype=torch.int32, device=device)
    pads = torch.tensor([4, 0, 11], dtype=torch.int32, device=device) if padded else None
    splits = 3 if page else 0
    check(device, queries(device), a_cache(device=device), lengths, page, pads, splits=splits, meant=meant, **given)


@pytest.mark.parametrize(("given", "meant"), MASKS[:3])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seq_new", [1, 5])
def test_append_and_rotary(device, seq_new, interleaved, page, given, meant):
    lengths = torch.tensor([17, 0, 35], dtype=torch.int32, device=device)
    pads = torch.tensor([4, 0, 11], dtype=torch.int32, device=device) if page == 0 else None
    new = a_cache(rows=seq_new, device=device)
    table = angles(48, 8 if seq_new == 1 else 12, device=device)
    q, caches = queries(device), a_cache(device=device)
    check(device, q, caches, lengths, page, pads, new, table, interleaved, meant=meant, **given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(device, dtype):
    lengths = torch.tensor([30, 3, 35], dtype=torch.int32, device=device)
    caches, new = a_cache(dtype=dtype, device=device), a_cache(rows=2, dtype=dtype, device=device)
    q = queries(device, 2, dtype=dtype)
    check(device, q, caches, lengths, 0, None, new, angles(48, 8, dtype, device), meant={"causal": True}, causal=True)
    check(device, q, caches, lengths, 8, splits=2)


def test_alibi_softcap_sinks_and_value_dims(device):
    lengths = torch.tensor([17, 9, 40], dtype=torch.int32, device=device)
    slopes, sinks = torch.rand(3, 4, device=device), rand(4, device=device)
    caches, q = a_cache(heads=2, dim_v=10, device=device), queries(device, 2, 4)
    for page, name, value in (
        (0, "alibi_slopes", slopes),
        (16, "softcap", 3.0),
        (0, "sinks", sinks),
        (16, "sinks", sinks),
    ):
        check(device, q, caches, lengths, page, splits=2, meant={name: value}, **{name: value})
    both = {"softmax_scale": 0.3, "softcap": 2.0}
    check(device, q, caches, lengths, meant={"scale": 0.3, "softcap": 2.0}, **both)


def test_batch_index(device):
    q, lengths = queries(device), torch.tensor([17, 9, 38], dtype=torch.int32, device=device)
    k_cache, v_cache = a_cache(batch=5, device=device)
    index = torch.tensor([3, 0, 4], dtype=torch.int32, device=device)
    mine = k_cache[index.long()].clone(), v_cache[index.long()].clone()
    new = a_cache(rows=2, device=device)
    want = fa.flash_attn_with_kvcache(q, *mine, *new, cache_seqlens=lengths, causal=True)
    got = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, *new, cache_seqlens=lengths, cache_batch_idx=index, causal=True
    )
    assert torch.equal(got, want)
    assert torch.equal(k_cache[index.long()], mine[0])
    assert torch.equal(v_cache[index.long()], mine[1])


def test_length_as_an_int_and_whole_caches(device):
    q, caches = queries(device), a_cache(device=device)
    want = fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=torch.full((3,), 21, dtype=torch.int32, device=device))
    assert torch.equal(fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=21), want)
    whole, lse = fa.flash_attn_with_kvcache(q, *caches, causal=True, return_softmax_lse=True)
    hold((whole, lse), reference.attention, q, *caches, causal=True)
    pages, table = in_pages(caches[0], 8)
    assert fa.flash_attn_with_kvcache(q, pages, pages, page_table=table).isfinite().all()


def test_packed_queries(device):
    caches = a_cache(device=device)
    lengths = torch.tensor([17, 30, 21], dtype=torch.int32, device=device)
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
    q, table = rand(8, 2, 24, device=device), angles(48, 8, device=device)
    new = a_cache(rows=6, device=device)
    got, lse = fa.flash_attn_with_kvcache(q, *(c.clone() for c in caches), *new, *table, lengths, causal=True, cu_seqlens_q=cu,
                                          max_seqlen_q=5, return_softmax_lse=True, num_splits=2)  # fmt: skip
    for b in (0, 2):
        rows = slice(*cu[b : b + 2].tolist())
        mine = [t[b : b + 1] for t in (*caches, *new)]
        call = q[None, rows], *mine[:2], lengths[b : b + 1], None, *mine[2:], *table
        hold((got[None, rows], lse[None, :, rows]), kvcache_oracle, *call, causal=True)


def test_append_alone(device):
    lengths, pads = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([17, 0, 35], [4, 0, 11]))
    check(device, queries(device), a_cache(device=device), lengths, 0, pads, a_cache(rows=3, device=device))


# ---------------------------------------------------------------- packed sequences


@pytest.mark.parametrize(("given", "meant"), MASKS[:3])
@pytest.mark.parametrize("kind", ["pages", "used", "padded", "used padded"])
def test_varlen_keys_in_pages_ending_early_beginning_late(device, kind, given, meant):
    lengths_q, lengths_k = [6, 0, 9, 3], [20, 5, 0, 13]
    (q, k, v), (cu_q, cu_k, *longest) = packed(lengths_q, lengths_k, h=2, hk=1, d=24, dv=24, device=device)
    options = {}
    begin, end = [0] * 4, list(lengths_k)
    if "used" in kind:
        end = [11, 5, 0, 1]
        options["seqused_k"] = torch.tensor(end, dtype=torch.int32, device=device)
    if "padded" in kind:
        begin = [3, 5, 0, 0]
        options["leftpad_k"] = torch.tensor(begin, dtype=torch.int32, device=device)
    keys = k, v
    if kind == "pages":
        cache = torch.zeros(4, 20, 1, 48, device=device)
        for b, n in enumerate(lengths_k):
            cache[b, :n] = torch.cat((k, v), -1)[int(cu_k[b]) : int(cu_k[b]) + n]
        pages, options["block_table"] = in_pages(cache, 8)
        keys = pages[..., :24], pages[..., 24:]
    got = fa.flash_attn_varlen_func(q, *keys, cu_q, cu_k, *longest, return_attn_probs=True, **options, **given)
    for b, n in enumerate(lengths_q):
        if n == 0:
            continue
        rows = slice(int(cu_q[b]), int(cu_q[b]) + n)
        mine = slice(int(cu_k[b]) + begin[b], int(cu_k[b]) + max(end[b], begin[b]))
        exact = reference.attention(q[None, rows], k[None, mine], v[None, mine], **meant)
        near = reference.attention(q[None, rows], k[None, mine], v[None, mine], dtype=q.dtype, **meant)
        judge(got[0][rows], exact[0][0], near[0][0], f"out {b}")
        want, plain = (t[1][0].masked_fill(t[1][0] == -INFINITY, INFINITY) for t in (exact, near))
        judge(got[1][:, rows], want, plain, f"lse {b}")
    assert got[2].shape == (0,)


def test_varlen_dropout_is_that_of_packed_keys(device):
    """One seed drops the same weights, wherever the keys lie."""
    (q, k, v), varlen = packed([6, 9], [20, 13], h=2, hk=1, d=24, dv=24, device=device)
    found = []
    for options in ({}, {"seqused_k": varlen[1].diff().int()}):
        torch.manual_seed(5)
        found.append(fa.flash_attn_varlen_func(q, k, v, *varlen, 0.4, causal=True, **options))
    assert torch.allclose(*found, atol=1e-6)
    plain = fa.flash_attn_varlen_func(q, k, v, *varlen, causal=True)
    assert not torch.allclose(found[0], plain, atol=0.1)


# ---------------------------------------------------------------- nothing there


def test_empty_everything(device):
    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device=device)

    table, lengths = zeros(2, 3, dtype=torch.int32), zeros(0, dtype=torch.int32)
    one = zeros(2, 1, 2, 8)
    calls = [  # q, cache, options
        (zeros(2, 0, 2, 8), zeros(2, 4, 1, 8), {"cache_seqlens": 3}),
        (zeros(0, 1, 2, 8), zeros(0, 4, 1, 8), {"cache_seqlens": lengths}),
        (one, zeros(2, 0, 1, 8), {"cache_seqlens": 0}),
        (one, zeros(0, 4, 1, 8), {"cache_seqlens": 0, "block_table": table}),
        (one, zeros(3, 4, 1, 8), {"cache_seqlens": 0, "block_table": table[:, :0]}),
        (one, zeros(2, 4, 1, 8), {"cache_seqlens": 0, "k": zeros(2, 0, 1, 8), "v": zeros(2, 0, 1, 8)}),
        (
            one,
            zeros(2, 4, 1, 8),
            {"cache_seqlens": 2, "cache_leftpad": zeros(2, dtype=torch.int32) + 3, "num_splits": 4},
        ),
    ]
    for q, cache, options in calls:
        out, lse = fa.flash_attn_with_kvcache(q, cache, cache.clone(), return_softmax_lse=True, **options)
        assert out.shape == q.shape and not out.any()
        assert (lse == INFINITY).all()
    for q, k in ((0, 4), (3, 0), (3, 4)):
        batch = 0 if q and k else 2
        out, lse, dropped = fa.flash_attn_func(
            zeros(batch, q, 2, 8), *[zeros(batch, k, 1, 8)] * 2, 0.1, return_attn_probs=True
        )
        assert not out.any() and (lse == INFINITY).all() and not dropped.any()
    starts = zeros(2, dtype=torch.int32)
    for options in ({}, {"seqused_k": starts[:1]}):
        out = fa.flash_attn_varlen_func(zeros(0, 2, 8), *[zeros(0, 1, 8)] * 2, starts, starts, 0, 0, **options)
        assert out.shape == (0, 2, 8)


# ---------------------------------------------------------------- what is refused


def test_there_is_no_gradient(device):
    q, caches = queries(device).requires_grad_(), a_cache(device=device)
    out = fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=12)  # serving code seldom turns gradients off
    with pytest.raises(tilefold.Unsupported, match="forward only"):
        out.sum().backward()
    with pytest.raises(tilefold.Unsupported, match="k_cache"):
        fa.flash_attn_with_kvcache(q, caches[0].clone().requires_grad_(), caches[1])
    with torch.no_grad():
        fa.flash_attn_with_kvcache(q, caches[0].clone().requires_grad_(), caches[1])


def test_lengths_past_the_end_read_nothing_outside(device, monkeypatch):
    """On a GPU nobody looks at them before the kernel does."""
    from tilefold.ops.cache import cache_append, cached

    monkeypatch.setattr(cached, "check_values", lambda *args: None)
    monkeypatch.setattr(cache_append, "_check_values", lambda *args: None)
    q, caches, new = queries(device), a_cache(device=device), a_cache(rows=4, device=device)
    want = fa.flash_attn_with_kvcache(q, *caches)
    far = torch.full((3,), 1 << 29, dtype=torch.int32, device=device)
    pages, table = in_pages(torch.cat(caches, -1), 8)
    held = pages[..., :24], pages[..., 24:]
    before = [c.clone() for c in (*caches, pages)]
    for length in (far, far * 0 + 41):
        for keys, options in ((caches, {}), (held, {"block_table": table})):
            got = fa.flash_attn_with_kvcache(q, *keys, cache_seqlens=length, **options)
            assert torch.allclose(got, want, atol=1e-6)
            fa.flash_attn_with_kvcache(q, *keys, *new, cache_seqlens=length, **options)
    for now, then in zip((*caches, pages), before, strict=True):
        assert torch.equal(now.nan_to_num(7), then.nan_to_num(7))

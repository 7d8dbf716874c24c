"""Appending to caches, shared prefixes and mixed batches on a GPU: real sizes, 2^31 elements, graphs, no synchronisation."""

import pytest
import torch

import tilefold
from cases import in_two_parts, judge, rand
from cases.device import DEVICE, captured, no_waiting
from cases.flash import angles, turned
from tilefold import reference
from tilefold.ops.cache.cached import attention_cached
from tilefold.ops.call import Call
from tilefold.ops.source import Cache

pytestmark = pytest.mark.no_poison
CODED = [torch.float8_e4m3fn, torch.int8]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def a_table(batch, pages):
    return torch.randperm(batch * pages).view(batch, pages).int().to(DEVICE)


def placed(pages, table, row):
    """Rows [n] of every sequence [B, n, H, D]."""
    size = pages.shape[1]
    at = table.long()[:, row // size]
    return pages[at, row % size]


@pytest.mark.parametrize("page", [1, 16, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *CODED])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 67])
def test_append(tokens, packed, dtype, page):
    batch, heads, kv_heads, dim, capacity = 9, 14, 2, 128, 512
    table = a_table(batch, capacity // page)
    pages = [torch.zeros(batch * capacity // page, page, kv_heads, dim, device=DEVICE).to(dtype) for _ in range(2)]
    k, v = (rand(batch, tokens, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    q = rand(batch, tokens, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    cos, sin = angles(capacity, 64, torch.bfloat16, DEVICE)
    lengths = torch.full((batch,), 100, dtype=torch.int32, device=DEVICE)
    scales = [torch.rand(len(pages[0]), kv_heads, device=DEVICE) * 0.02 + 0.01 for _ in range(2)]
    given = {} if dtype == torch.bfloat16 else {"k_scale": scales[0], "v_scale": scales[1]}
    call = [k, v, q]
    if packed:
        given["cu_seqlens"] = (torch.arange(batch + 1, device=DEVICE) * tokens).int()
        call = [t.flatten(0, 1) for t in call]
    options = {"cache_seqlens": lengths, "block_table": table, "rotary_cos": cos, "rotary_sin": sin, **given}
    tilefold.kvcache_append(*call[:2], *pages, q=call[2], **options)  # compiled
    for t in pages:
        t.zero_()
    with no_waiting():
        got = tilefold.kvcache_append(*call[:2], *pages, q=call[2], **options)
    row = torch.arange(100, 100 + tokens, device=DEVICE)
    exact, plain = (turned(q, cos, sin, False, row, kind) for kind in (torch.float64, torch.bfloat16))
    judge(got.view(q.shape), exact, plain, "q")
    keys = turned(k, cos, sin, False, row, torch.float64)
    for cache, want, scale in zip(pages, (keys, v.double()), scales, strict=True):
        stored = placed(cache.view(torch.uint8) if dtype == CODED[0] else cache, table, row)
        stored = stored.view(dtype).double()
        if dtype == torch.bfloat16:
            assert torch.allclose(stored, want, rtol=2**-8, atol=1e-6)
            continue
        want = want / placed(scale[:, None].expand(-1, page, -1).contiguous(), table, row).double()[..., None]
        low, high = (-128, 127) if dtype == torch.int8 else (-448, 448)
        unit = 1.0 if dtype == torch.int8 else 2.0 ** (want.abs().clamp(min=2.0**-6).log2().floor() - 3)
        turn = 2.0**-22 * want.abs().max()  # fp32 sums of two products, which may cancel
        assert ((stored - want.clamp(low, high)).abs() <= unit / 2 + turn).all()
    others = torch.ones(capacity, dtype=torch.bool, device=DEVICE)
    others[row] = False
    for cache in pages:
        raw = cache.view(torch.uint8) if dtype == CODED[0] else cache
        assert not placed(raw, table, torch.arange(capacity, device=DEVICE)[others]).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "pairs", "tokens", "packed"),
    [(256, 93, 11, True), (256, 105, 11, True), (128, 29, 300, False), (128, 51, 300, False), (64, 13, 300, False)],
)
def test_bytes_with_an_odd_number_of_pairs(dim, pairs, tokens, packed, interleaved, dtype):
    """Codes that are stored one by one, off any alignment, of rows that were loaded several numbers at a time."""
    batch, kv_heads, heads, first = 3, 2, 4, 7
    caches = [torch.zeros(batch, 512, kv_heads, dim, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    k, v = (rand(batch, tokens, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    q = rand(batch, tokens, heads, dim, dtype=dtype, device=DEVICE)
    cos, sin = angles(512, pairs, torch.float32, DEVICE)
    scale = torch.tensor([0.0553, 0.0379], device=DEVICE)
    call, given = [k, v, q], {}
    if packed:
        call = [t.flatten(0, 1) for t in call]
        given = {"cu_seqlens": (torch.arange(batch + 1, device=DEVICE) * tokens).int(), "max_seqlen": tokens}
    lengths = torch.full((batch,), first, dtype=torch.int32, device=DEVICE)
    options = {"cache_seqlens": lengths, "rotary_cos": cos, "rotary_sin": sin, "interleaved": interleaved, **given}
    for with_q in (False, True):  # of other launches: fewer rows a program
        more = {"q": call[2]} if with_q else {}
        tilefold.kvcache_append(*call[:2], *caches, k_scale=scale, v_scale=scale, **more, **options)
        rows = torch.arange(first, first + tokens, device=DEVICE)
        for cache, new in zip(caches, (turned(k, cos, sin, interleaved, rows), v.double()), strict=True):
            want = new / scale.double()[:, None]
            turn = 2.0**-22 * want.abs().max()  # fp32 sums of two products, which may cancel
            assert ((cache[:, rows].double() - want.clamp(-128, 127)).abs() <= 0.5 + turn).all()
            cache.zero_()


@pytest.mark.parametrize("dtype", CODED)
def test_codes_are_quantize_kv_s(dtype):
    """Bit for bit, without rotation: every exponent, ties among them."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=DEVICE).to(torch.int16).view(torch.bfloat16)
    x = torch.where(bits.isfinite(), bits, 0.0).view(1, -1, 1, 128)
    for factor in (1.0, 0.037):
        scale = torch.tensor([factor], device=DEVICE)
        held = [torch.zeros(x.shape, device=DEVICE).to(dtype) for _ in range(2)]
        tilefold.kvcache_append(x, x, *held, cache_seqlens=ints(0), k_scale=scale, v_scale=scale)
        want = tilefold.quantize_kv(x, dtype, scale=scale)[0]
        assert torch.equal(held[0].view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(held[1].view(torch.uint8), want.view(torch.uint8))


def test_graph_follows_lengths_and_tables():
    k = rand(4, 1, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    pages = [torch.zeros(64, 16, 2, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    lengths, table = ints(0, 5, 17, 100), a_table(4, 16)
    run = lambda: tilefold.kvcache_append(k, k, *pages, cache_seqlens=lengths, block_table=table)  # noqa: E731
    graph, _ = captured(run)
    for step in range(5):
        lengths.copy_(ints(3, 40 + step, 15, 255 - step))
        table.copy_(a_table(4, 16))
        for t in pages:
            t.zero_()
        graph.replay()
        for b, n in enumerate(lengths.tolist()):
            assert torch.equal(pages[0][int(table[b, n // 16]), n % 16], k[b, 0])
        assert int((pages[1] != 0).any(-1).any(-1).sum()) == 4


@pytest.mark.large
def test_more_than_2_31_elements():
    cache = torch.zeros(9, 1 << 20, 2, 128, dtype=torch.float8_e4m3fn, device=DEVICE)  # 2.4e9
    k = rand(9, 3, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    scale = torch.ones(2, device=DEVICE)
    lengths = torch.full((9,), (1 << 20) - 2, dtype=torch.int32, device=DEVICE)
    tilefold.kvcache_append(k, k, cache, cache, cache_seqlens=lengths, k_scale=scale, v_scale=scale)
    got = cache[:, -2:].view(torch.uint8)
    assert torch.equal(got, k[:, :2].to(torch.float8_e4m3fn).view(torch.uint8))
    assert not cache[:, : (1 << 20) - 2].view(torch.uint8).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seq_q", [1, 4])
@pytest.mark.parametrize("page", [16, 256])
def test_shared_prefix(page, seq_q, dtype):
    batch, heads, kv_heads, dim, prefix, capacity = 8, 14, 2, 128, 1024, 1536
    each, shared = capacity // page, prefix // page
    numbers = torch.randperm(shared + batch * (each - shared)).int()
    table = torch.empty(batch, each, dtype=torch.int32)
    table[:, :shared], table[:, shared:] = numbers[:shared], numbers[shared:].view(batch, -1)
    table = table.to(DEVICE)
    k, v = (rand(len(numbers), page, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    q = rand(batch, seq_q, heads, dim, dtype=dtype, device=DEVICE)
    lengths = torch.linspace(prefix + seq_q, capacity, batch).int().to(DEVICE)
    options = {"prefix_length": prefix, "cache_seqlens": lengths, "block_table": table, "return_lse": True}
    tilefold.attention_shared_prefix(q, k, v, cascade=True, **options)
    with no_waiting():
        out, lse = tilefold.attention_shared_prefix(q, k, v, cascade=True, **options)
    for b, n in enumerate(lengths.tolist()):
        keys, values = (placed(t, table[b : b + 1], torch.arange(n, device=DEVICE)) for t in (k, v))
        exact = reference.attention(q[b : b + 1], keys, values, causal=True)
        plain = in_two_parts(q[b : b + 1], keys, values, prefix, dtype)
        judge(out[b : b + 1], exact[0], plain[0], "out")
        judge(lse[b : b + 1], exact[1], plain[1], "lse")


def test_merge():
    dtype = torch.bfloat16
    out = [rand(64, 3, 32, 128, dtype=dtype, device=DEVICE) for _ in range(2)]
    lse = [rand(64, 32, 3, device=DEVICE) * 20 for _ in range(2)]
    lse[1][5] = float("-inf")
    got, total = tilefold.merge_attention(out[0], lse[0], out[1], lse[1])
    assert torch.equal(got[5], out[0][5]) and torch.equal(total[5], lse[0][5])

    def merged():
        both = torch.logaddexp(*(t.double() for t in lse))
        weights = [torch.exp(t.double() - both).transpose(1, 2)[..., None] for t in lse]
        return weights[0] * out[0].double() + weights[1] * out[1].double(), both

    exact, plain = merged(), reference.deviating(merged, dtype)
    judge(got, exact[0], plain[0], "out")
    judge(total, exact[1], plain[1], "lse")


def test_one_token_and_a_long_chunk_in_one_call():
    batch, heads, kv_heads, dim, page = 6, 14, 2, 128, 16
    new, lengths = [1, 300, 1, 0, 129, 1], [900, 200, 64, 3, 0, 0]
    dtype = torch.bfloat16
    table = a_table(batch, 64)
    pages = [rand(batch * 64, page, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    total = sum(new)
    q, k, v = (rand(total, h, dim, dtype=dtype, device=DEVICE) for h in (heads, kv_heads, kv_heads))
    cu = ints(0, *torch.tensor(new).cumsum(0).tolist())
    tilefold.kvcache_append(k, v, *pages, cache_seqlens=ints(*lengths), block_table=table, cu_seqlens=cu)
    ends = [n + more for n, more in zip(lengths, new, strict=True)]
    cache = Cache(lengths=ints(*ends), block_table=table, cu_q=cu, max_q=300)
    out, lse = attention_cached(q, *pages, Call(causal=True, source=cache))
    for b, end in enumerate(ends):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        keys, values = (placed(t, table[b : b + 1], torch.arange(end, device=DEVICE)) for t in pages)
        assert torch.equal(values[0, lengths[b] :], v[rows])
        sides = [reference.attention(q[rows][None], keys, values, causal=True, dtype=d) for d in (torch.float64, dtype)]
        judge(out[rows], sides[0][0][0], sides[1][0][0], f"out {b}")
        judge(lse[:, rows], sides[0][1][0], sides[1][1][0], f"lse {b}")

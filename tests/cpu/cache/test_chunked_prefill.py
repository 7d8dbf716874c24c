"""Prefill by chunks over a paged cache, and prefill and decoding in one packed call: append, attend, held to fp64."""

import pytest
import torch

import tilefold
from cases import hold, ints, rand
from tilefold import reference
from tilefold.ops.cache.cached import attention_cached
from tilefold.ops.call import Call
from tilefold.ops.source import Cache


def step(q, k, v, held, table, lengths, new):
    """Append the new tokens of each sequence to its pages and attend: packed, causal; -> (out, lse)."""
    device = q.device
    cu = ints(0, *torch.tensor(new).cumsum(0).tolist(), device=device)
    before = ints(*lengths, device=device)
    tilefold.kvcache_append(k, v, *held, cache_seqlens=before, block_table=table, cu_seqlens=cu)
    after = ints(*(n + more for n, more in zip(lengths, new, strict=True)), device=device)
    cache = Cache(lengths=after, block_table=table, cu_q=cu, max_q=max(new))
    return attention_cached(q, *held, Call(causal=True, source=cache))


def pool(device, batch, capacity, page, kv_heads, dim, dtype):
    """(k pages, v pages), table: nothing is in them yet."""
    each = -(-capacity // page)
    table = torch.randperm(batch * each).view(batch, each).int().to(device)
    pages = [
        torch.full((batch * each, page, kv_heads, dim), float("nan"), dtype=dtype, device=device) for _ in range(2)
    ]
    return pages, table


@pytest.mark.parametrize(("cuts", "page"), [((7, 1, 13, 3), 8), ((17, 7), 5), ((1,) * 6, 4)])
def test_chunks_are_the_whole_prompt(device, cuts, page):
    n, heads, kv_heads, dim = sum(cuts), 4, 2, 16
    q, k, v = (rand(n, h, dim, device=device) for h in (heads, kv_heads, kv_heads))
    pages, table = pool(device, 1, n, page, kv_heads, dim, torch.float32)
    found, done = [], 0
    for more in cuts:
        rows = slice(done, done + more)
        found.append(step(q[rows], k[rows], v[rows], pages, table, [done], [more]))
        done += more
    alone, whole = pool(device, 1, n, page, kv_heads, dim, torch.float32)
    chunks = torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)
    for got in (chunks, step(q, k, v, alone, whole, [0], [n])):
        hold([t[None] for t in got], reference.attention, q[None], k[None], v[None], causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_and_prefill_in_one_call(device, dtype):
    """One token over a long cache, a chunk in the middle of a prompt, a prompt's beginning, a sequence that rests."""
    lengths, new, heads, kv_heads, dim, page = [29, 9, 0, 12, 0], [1, 14, 11, 0, 1], 6, 2, 16, 8
    total = sum(new)
    q, k, v = (rand(total, h, dim, dtype=dtype, device=device) for h in (heads, kv_heads, kv_heads))
    pages, table = pool(device, 5, 32, page, kv_heads, dim, dtype)
    past = [[rand(n, kv_heads, dim, dtype=dtype, device=device) for _ in range(2)] for n in lengths]
    flat = [torch.cat([p[i] for p in past]) for i in range(2)]
    offsets = ints(0, *torch.tensor(lengths).cumsum(0).tolist(), device=device)
    empty = torch.zeros(5, dtype=torch.int32, device=device)
    tilefold.kvcache_append(*flat, *pages, cache_seqlens=empty, block_table=table, cu_seqlens=offsets)
    out, lse = step(q, k, v, pages, table, lengths, new)
    at = 0
    for b, more in enumerate(new):
        rows = slice(at, at + more)
        at += more
        keys, values = (torch.cat([past[b][i], t[rows]])[None] for i, t in enumerate((k, v)))
        got = out[None, rows], lse[None, :, rows]
        hold(got, reference.attention, q[rows][None], keys, values, what=str(b), causal=True)


@pytest.mark.parametrize(("group", "sinks"), [(1, False), (4, True), (20, False)])
def test_few_queries_and_many_are_two_kernels_work(device, group, sinks):
    """Lengths on both sides of what the decode kernel takes, none twice, none left out; fresh memory is NaN here."""
    few = max(1, 16 // group)
    new = [1, few, few + 1, 0, 130 // group + 2, 2]
    lengths, heads = [n + past for n, past in zip(new, (30, 3, 0, 9, 1, 64), strict=True)], 2 * group
    q = rand(sum(new), heads, 16, device=device)
    pages, table = pool(device, len(new), 136, 8, 2, 16, torch.float32)
    for one in pages:
        one.copy_(rand(*one.shape, device=device))
    extra = rand(heads, device=device) if sinks else None
    cache = Cache(lengths=ints(*lengths, device=device), block_table=table, cu_q=ints(0, *torch.tensor(new).cumsum(0).tolist(),
                  device=device), max_q=max(new))  # fmt: skip
    out, lse = attention_cached(q, *pages, Call(causal=True, sinks=extra, source=cache))
    first = 0
    for b, (n, length) in enumerate(zip(new, lengths, strict=True)):
        rows = slice(first, first + n)
        k, v = (one[table[b].long()].flatten(0, 1)[None, :length] for one in pages)
        got, what = (out[None, rows], lse[None, :, rows]), f"of sequence {b}"
        hold(got, reference.attention, q[None, rows], k, v, what=what, causal=True, sinks=extra)
        first += n


def test_a_batch_of_prompts_and_tokens_launches_both_kernels(device, monkeypatch):
    from tilefold.ops.launch import Launch

    ran, call = [], Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda self, args: (ran.append(self.fn.__name__), call(self, args))[1])
    pages, table = pool(device, 2, 16, 8, 1, 16, torch.float32)
    for one in pages:
        one.zero_()
    for new, kernels in (
        ((9, 1), {"attention_cached", "attention_decode"}),
        ((9,), {"attention_cached"}),
        ((1, 1), {"attention_decode"}),
    ):
        cu, held = ints(0, *torch.tensor(new).cumsum(0).tolist(), device=device), table[: len(new)].contiguous()
        ran.clear()
        cache = Cache(lengths=ints(*[10] * len(new), device=device), block_table=held, cu_q=cu, max_q=max(new))
        attention_cached(rand(sum(new), 16, 16, device=device), *pages, Call(causal=True, source=cache))
        assert {name for name in ran if "attention" in name} == kernels

"""The paged cache on a GPU: under a captured graph, without synchronisation, with copies that are still under way."""

import time

import pytest
import torch

import tilefold
from cases import judge, rand, same
from cases.device import DEVICE, captured, no_waiting
from cases.flash import angles, turned
from cases.paged import audit, coded, rows_of
from tilefold import PagedKVCache, reference

HEADS, DIM = 2, 64
pytestmark = pytest.mark.no_poison


def a_cache(layers=1, pages=400, page_size=16, max_tokens=1200, dtype=torch.bfloat16, **options):
    return PagedKVCache(layers, HEADS, DIM, num_pages=pages, page_size=page_size, max_sequences=8, max_tokens=max_tokens,
                        dtype=dtype, device=DEVICE, **options)  # fmt: skip


def in_8_bits(dtype, layers=1, **options):
    """With factors of every layer and head, such that some numbers saturate."""
    most = 448 if dtype == torch.float8_e4m3fn else 127
    scales = {name: (torch.rand(layers, HEADS, device=DEVICE) + 2) / most for name in ("k_scale", "v_scale")}
    return a_cache(layers, dtype=dtype, **scales, **options)


def same_bytes(cache, id, rows, layer):
    pairs = zip(rows_of(cache, id, layer), rows, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def filled(cache, *lengths):
    """(ids, [(k, v) of each in the last layer]) of sequences whose rows are random in all layers."""
    ids = [cache.add() for _ in lengths]
    batch = cache.batch(ids, lengths)
    for layer in range(cache.layers):
        k, v = (rand(batch.total, HEADS, DIM, dtype=cache.dtype, device=DEVICE) for _ in range(2))
        cache.append(layer, k, v, batch)
    return ids, list(zip(k.split(lengths), v.split(lengths), strict=True))


def holds(cache, id, rows):
    return same(rows_of(cache, id, cache.layers - 1), rows)


def replayed(cache, ids, steps, step):
    """(queries, keys and values of all steps, what a graph of step(q, k, v, batch) fills in, an iterator that replays it while
    sequences grow and the host waits for nothing)."""
    shapes = [(steps, len(ids), 1, heads, DIM) for heads in (4 * HEADS, HEADS, HEADS)]
    drawn = [rand(*shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes]
    given, batch = [x[0].clone() for x in drawn], cache.batch(ids, 1)
    # what the first step writes is written again by the first replay
    graph, out = captured(lambda: step(*given, batch))

    def run():
        for i in range(steps):
            with no_waiting():
                for into, source in zip(given, drawn, strict=True):
                    into.copy_(source[i])
                graph.replay()
            yield i
            if i < steps - 1:
                with no_waiting():
                    batch.next()

    return drawn, out, run()


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_thousand_steps_of_a_captured_graph(page_size):
    """Append with rotary, turn the queries, attend: one graph, replayed while sequences grow, as if computed from scratch."""
    steps, starts, kind = 1000, (37, 1, 128), torch.bfloat16
    cache = a_cache(page_size=page_size, pages=3 * -(-1200 // page_size))
    ids = [cache.add() for _ in starts]
    cos, sin = angles(1200, DIM // 2, torch.float32, DEVICE)
    batch = cache.batch(ids, starts)
    prompt = [rand(batch.total, HEADS, DIM, dtype=kind, device=DEVICE) for _ in range(2)]
    cache.append(0, *prompt, batch, cos, sin)

    def step(q, k, v, batch):
        cache.append(0, k, v, batch, cos, sin)
        return cache.attend(0, tilefold.apply_rotary(q, cos, sin, offsets=batch.lengths_before), batch)

    (queries, keys, values), out, run = replayed(cache, ids, steps, step)
    kept = {i: out.clone() for i in run if i in (0, 1, 15, 16, 100, 511, 998, 999)}
    firsts = torch.tensor([0, *starts]).cumsum(0).tolist()
    for i, got in kept.items():
        for b, start in enumerate(starts):
            rows = [
                torch.cat([p[firsts[b] : firsts[b + 1]], x[: i + 1, b, 0]])
                for p, x in zip(prompt, (keys, values), strict=True)
            ]
            place = torch.arange(start + i + 1, device=DEVICE)
            key = turned(rows[0], cos, sin, False, place).to(kind)
            query = turned(queries[i, b], cos, sin, False, place[-1:]).to(kind)
            exact, _ = reference.attention(query[None], key[None], rows[1][None], causal=True)
            plain, _ = reference.attention(query[None], key[None], rows[1][None], causal=True, dtype=kind)
            judge(got[b][None], exact, plain, f"out of sequence {b} at step {i}")
    assert [cache.length(id) for id in ids] == [start + steps for start in starts]
    audit(cache.allocator)


@pytest.mark.alone
def test_nothing_waits_and_no_buffer_is_overwritten_in_flight():
    """The device sleeps while the host is many steps ahead: every step still gets its own numbers."""
    cache = a_cache()
    ids, _ = filled(cache, 5, 40, 700)
    batch = cache.batch(ids, 1)
    torch.cuda.synchronize()
    seen = []
    with no_waiting():
        begin = time.perf_counter()
        torch.cuda._sleep(8_000_000_000)  # about four seconds: the host may be a slow one
        for _ in range(60):  # launches that wait are limited, to a thousand or so
            batch.next()
            seen.append((batch.cache_seqlens.clone(), batch.slot_mapping.clone(), batch.block_table.clone()))
            pages = [cache.pages(id) for id in ids]
            seen[-1] += ([cache.length(id) for id in ids], pages)
        ahead = time.perf_counter() - begin
        busy = not torch.cuda.current_stream().query()
    assert busy, f"the device was done before the host ({ahead:.2f} s): nothing was tested"
    assert len(cache.staging) > 50
    for seqlens, slots, table, lengths, pages in seen:
        assert seqlens.tolist() == lengths
        assert slots.tolist() == [p[(n - 1) // 16] * 16 + (n - 1) % 16 for p, n in zip(pages, lengths, strict=True)]
        assert [tuple(row[: len(p)]) for row, p in zip(table.tolist(), pages, strict=True)] == pages
    length = len(cache.staging)
    for _ in range(3 * length):  # buffers come back
        batch.next(0)
    torch.cuda.synchronize()
    length = len(cache.staging)
    for _ in range(10):
        batch.next(0)
        torch.cuda.synchronize()
    assert len(cache.staging) == length


def test_sharing_copies_and_moves_without_synchronisation():
    cache = a_cache(layers=3)
    (a, b), rows = filled(cache, 100, 37)
    torch.cuda.synchronize()
    cache.copy_pages([(0, 399)])
    with no_waiting():
        fork, prefix = cache.fork(a), cache.share_prefix(b, 33)
        batch = cache.batch([fork, prefix, a], [1, 20, 0])
        k, v = (torch.zeros(21, HEADS, DIM, dtype=cache.dtype, device=DEVICE) for _ in range(2))
        for layer in range(3):
            cache.append(layer, k, v, batch)
        cache.truncate(fork, 90)
        cache.free(a)
        moved = cache.defragment()
    assert moved
    audit(cache.allocator)
    assert holds(cache, b, rows[1])
    assert holds(cache, fork, [x[:90] for x in rows[0]])
    assert holds(cache, prefix, [torch.cat([x[:33], y[1:]]) for x, y in zip(rows[1], (k, v), strict=True)])


def test_swap_with_pinned_memory_in_stream_order(monkeypatch):
    """The copy out is still waiting behind a sleep when its pages are written by others; what comes back is what was there."""
    monkeypatch.setattr(tilefold.paged.pool, "AT_ONCE", 64 * 16 * HEADS * DIM * 2 * 2 * 2)  # several chunks
    cache = a_cache(layers=2, pages=100)
    (a, b), rows = filled(cache, 1100, 300)
    torch.cuda.synchronize()
    with no_waiting():
        torch.cuda._sleep(400_000_000)
        assert cache.swap_out(a) == 69
        assert all(t.is_pinned() for chunk, _ in cache._pool._host.values() for t in chunk)
        other = cache.add()
        batch = cache.batch([other], 1100)
        junk = torch.ones(1100, HEADS, DIM, dtype=cache.dtype, device=DEVICE)
        for layer in range(2):
            cache.append(layer, junk, junk, batch)
        cache.free(other)
        assert cache.swap_in(a) == 69
    assert holds(cache, a, rows[0])
    assert holds(cache, b, rows[1])
    assert not cache._pool._host


def test_ragged_prefill_then_decode():
    cache = a_cache(dtype=torch.float16)
    ids = [cache.add() for _ in range(3)]
    cos, sin = angles(1200, 16, torch.float16, DEVICE)
    stored = [[], [], []]
    batch = cache.batch(ids, (700, 3, 129))
    for counts in ((50, 0, 1), (1, 1, 1), None):
        k, v = (rand(batch.total, HEADS, DIM, dtype=cache.dtype, device=DEVICE) for _ in range(2))
        q = rand(batch.total, 8, DIM, dtype=cache.dtype, device=DEVICE)
        cache.append(0, k, v, batch, cos, sin, interleaved=True)
        out = cache.attend(0, q, batch)
        cu, places = batch.cu_seqlens_q.tolist(), batch.positions
        for i in range(3):
            new = slice(cu[i], cu[i + 1])
            stored[i].append((turned(k[new], cos, sin, True, places[new]).to(cache.dtype), v[new]))
            if cu[i + 1] > cu[i]:
                rows = [torch.cat(x)[None] for x in zip(*stored[i], strict=True)]
                exact, _ = reference.attention(q[new][None], *rows, causal=True)
                plain, _ = reference.attention(q[new][None], *rows, causal=True, dtype=cache.dtype)
                judge(out[new][None], exact, plain, f"out of sequence {i}, counts {batch.counts}")
        if counts is not None:
            batch.next(counts)


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_captured_graph_over_8_bits(dtype, page_size):
    """Ragged prompts in packed rows, then a graph of append and attend, replayed while sequences grow."""
    steps, starts, kind = 150, (37, 1, 700), torch.bfloat16
    cache = in_8_bits(dtype, page_size=page_size, pages=3 * -(-1200 // page_size))
    ids = [cache.add() for _ in starts]
    batch = cache.batch(ids, starts)
    prompt = [rand(batch.total, HEADS, DIM, dtype=kind, device=DEVICE) for _ in range(2)]
    query = rand(batch.total, 4 * HEADS, DIM, dtype=kind, device=DEVICE)
    cache.append(0, *prompt, batch)
    stored = [list(rows) for rows in zip(*(x.split(starts) for x in coded(cache, 0, *prompt)), strict=True)]

    def hold(got, q, at):
        for b, id in enumerate(ids):
            assert same_bytes(cache, id, stored[b], 0), f"sequence {b} {at}"
            keys = [
                (x.float() * s[0][:, None])[None]
                for x, s in zip(stored[b], (cache.k_scale, cache.v_scale), strict=True)
            ]
            exact, _ = reference.attention(q[b][None], *keys, causal=True)
            plain, _ = reference.attention(q[b][None], *keys, causal=True, dtype=kind)
            judge(got[b][None], exact, plain, f"out of sequence {b} {at}")

    hold(cache.attend(0, query, batch).split(starts), query.split(starts), "of the prompt")

    def step(q, k, v, batch):
        cache.append(0, k, v, batch)
        return cache.attend(0, q, batch)

    (queries, keys, values), out, run = replayed(cache, ids, steps, step)
    for i in run:
        new = coded(cache, 0, keys[i, :, 0], values[i, :, 0])
        for b in range(3):
            stored[b] = [torch.cat(x) for x in zip(stored[b], (t[b : b + 1] for t in new), strict=True)]
        if i in (0, 1, 15, 16, 149):
            hold(out, queries[i], f"at step {i}")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_bytes_are_shared_copied_and_moved(dtype):
    cache = in_8_bits(dtype, layers=2)
    ids, counts = [cache.add() for _ in range(2)], (100, 37)
    batch = cache.batch(ids, counts)
    rows = []
    for layer in range(2):
        k, v = (rand(batch.total, HEADS, DIM, device=DEVICE) for _ in range(2))
        cache.append(layer, k, v, batch)
        rows.append(list(zip(*(x.split(counts) for x in coded(cache, layer, k, v)), strict=True)))
    torch.cuda.synchronize()
    cache.copy_pages([(0, 399)])
    k, v = (rand(3, HEADS, DIM, device=DEVICE) for _ in range(2))  # drawn on the CPU: the copy waits
    with no_waiting():
        fork = cache.fork(ids[0])
        batch = cache.batch([fork], 3)
        cache.append(0, k, v, batch)
        cache.append(1, k, v, batch)
        cache.swap_out(ids[1])
        cache.free(ids[0])
        cache.defragment()
        cache.swap_in(ids[1])
    for layer in range(2):
        assert same_bytes(cache, ids[1], rows[layer][1], layer)
        new = coded(cache, layer, k, v)
        assert same_bytes(cache, fork, [torch.cat(x) for x in zip(rows[layer][0], new, strict=True)], layer)
    audit(cache.allocator)

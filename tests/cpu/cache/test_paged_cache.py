"""PagedKVCache: what is written is read back, whatever is shared, copied, moved or swapped; decoding equals recomputation."""

from itertools import pairwise

import pytest
import torch

import tilefold
from cases import hold, rand, same
from cases.flash import angles, turned
from cases.paged import audit, rows_of, snapshot
from cases.refusals import refuses
from tilefold import OutOfPages, PagedKVCache, reference
from tilefold.errors import DeviceError, DtypeError, LayoutError, ShapeError, ValueRangeError

HEADS, DIM, DIM_V = 2, 16, 8


def a_cache(device, layers=2, pages=24, page_size=4, max_tokens=48, dtype=torch.float32, **options):
    return PagedKVCache(layers, HEADS, DIM, num_pages=pages, page_size=page_size, max_sequences=8, max_tokens=max_tokens,
                        dtype=dtype, device=device, head_dim_v=DIM_V, **options)  # fmt: skip


def new_rows(cache, batch, model):
    """Write random rows of the batch's new tokens into every layer, and into the model: sequence -> [layer] -> [rows]."""
    written = []
    for layer in range(cache.layers):
        k = rand(batch.total, HEADS, DIM, dtype=cache.dtype, device=cache.device)
        v = rand(batch.total, HEADS, DIM_V, dtype=cache.dtype, device=cache.device)
        cache.append(layer, k, v, batch)
        written.append((k, v))
    first = 0
    for sequence, count in zip(batch.sequences, batch.counts, strict=True):
        for layer, (k, v) in enumerate(written):
            old_k, old_v = model[sequence][layer]
            model[sequence][layer] = (
                torch.cat([old_k, k[first : first + count]]),
                torch.cat([old_v, v[first : first + count]]),
            )
        first += count


def empty_rows(cache):
    return [
        (torch.zeros(0, HEADS, DIM, dtype=cache.dtype, device=cache.device),
         torch.zeros(0, HEADS, DIM_V, dtype=cache.dtype, device=cache.device))
        for _ in range(cache.layers)
    ]  # fmt: skip


def check_rows(cache, model):
    """Every resident sequence holds what the model says, in all layers."""
    audit(cache.allocator)
    assert set(cache.sequences) == set(model)
    for sequence, layers in model.items():
        assert cache.length(sequence) == len(layers[0][0])
        if not cache.is_swapped(sequence):
            for layer, rows in enumerate(layers):
                assert same(rows_of(cache, sequence, layer), rows)


def check_tensors(cache, batch):
    """The tensors of a batch say where its new rows lie, and the table where all rows do."""
    lengths = [cache.length(sequence) for sequence in batch.sequences]
    before = [n - new for n, new in zip(lengths, batch.counts, strict=True)]
    assert batch.cache_seqlens.tolist() == lengths
    assert batch.lengths_before.tolist() == before
    assert batch.cu_seqlens_q.tolist() == [sum(batch.counts[:i]) for i in range(len(batch) + 1)]
    rows = [(i, j) for i in range(len(batch)) for j in range(before[i], lengths[i])]
    assert batch.positions.tolist() == [j for _, j in rows]
    table = batch.block_table.tolist()
    page = cache.page_size
    assert batch.slot_mapping.tolist() == [table[i][j // page] * page + j % page for i, j in rows]
    for row, sequence in zip(table, batch.sequences, strict=True):
        pages = cache.pages(sequence)
        assert tuple(row[: len(pages)]) == pages
    assert (batch.max_seqlen_q, batch.total) == (max(batch.counts, default=0), len(rows))


def started(cache, *lengths):
    """(model, ids) of sequences with random rows of these lengths."""
    ids = [cache.add() for _ in lengths]
    model = {id: empty_rows(cache) for id in ids}
    batch = cache.batch(ids, lengths)
    new_rows(cache, batch, model)
    check_tensors(cache, batch)
    return model, ids


@pytest.mark.parametrize("count", [1, 3, (2, 0, 5)])
def test_rows_are_where_the_table_says(device, count):
    cache = a_cache(device, layers=3)
    model, ids = started(cache, 3, 0, 9)
    batch = cache.batch(ids, count, max_new=12)
    new_rows(cache, batch, model)
    for more in (1, (0, 3, 1), 4):
        assert batch.next(more) is batch
        new_rows(cache, batch, model)
        check_tensors(cache, batch)
    check_rows(cache, model)


@pytest.mark.parametrize("writer", ["fork", "source"])
def test_copy_on_write_in_all_layers(device, writer):
    cache = a_cache(device, layers=3)
    model, (a,) = started(cache, 6)
    b, c = cache.fork(a), cache.share_prefix(a, 5)
    model[b], model[c] = list(model[a]), [(k[:5], v[:5]) for k, v in model[a]]
    assert cache.statistics().pages_used == 2
    check_rows(cache, model)
    new_rows(cache, cache.batch([b, c] if writer == "fork" else [a], 1), model)
    check_rows(cache, model)
    new_rows(cache, cache.batch([a, b, c], [2, 0, 3]), model)
    check_rows(cache, model)
    cache.free(a)
    del model[a]
    check_rows(cache, model)


def test_exhaustion_loses_nothing(device):
    cache = a_cache(device, pages=7)
    model, (a, b) = started(cache, 7, 8)
    fork = cache.fork(a)
    model[fork] = list(model[a])
    batch = cache.batch([b, fork], 1, max_new=40)  # a page for b, a copy for the fork
    new_rows(cache, batch, model)
    check_rows(cache, model)
    before, tensors = snapshot(cache.allocator), [batch.block_table.clone(), batch.cache_seqlens.clone()]
    for call in (lambda: batch.next([4, 1]), lambda: cache.batch([a, b], [9, 0])):
        refuses(OutOfPages, "2 pages are needed, 1 of 7 are free", call)
        assert snapshot(cache.allocator) == before
    assert torch.equal(batch.block_table, tensors[0]) and torch.equal(batch.cache_seqlens, tensors[1])
    check_tensors(cache, batch)
    cache.free(a)
    del model[a]
    new_rows(cache, batch.next([4, 1]), model)
    check_rows(cache, model)


def test_truncate_and_write_again(device):
    cache = a_cache(device)
    model, (a, b) = started(cache, 13, 4)
    fork = cache.fork(a)
    model[fork] = list(model[a])
    batch = cache.batch([a, b], 1)
    new_rows(cache, batch, model)
    cache.truncate(a, 6)
    model[a] = [(k[:6], v[:6]) for k, v in model[a]]
    check_rows(cache, model)
    with pytest.raises(ValueRangeError, match="the batch is out of date: sequence 0 was freed, truncated"):
        cache.append(0, rand(2, HEADS, DIM, device=device), rand(2, HEADS, DIM_V, device=device), batch)
    new_rows(cache, batch.next(), model)
    check_tensors(cache, batch)
    check_rows(cache, model)


def test_defragment_and_swap_round_trip(device, monkeypatch):
    monkeypatch.setattr(tilefold.paged.pool, "AT_ONCE", 1)  # every page is a copy of its own
    cache = a_cache(device)
    model, (a, b, c, d) = started(cache, 9, 12, 3, 7)
    fork = cache.share_prefix(b, 10)
    model[fork] = [(k[:10], v[:10]) for k, v in model[b]]
    batch = cache.batch([b, d], 1)
    new_rows(cache, batch, model)
    cache.free(a)
    del model[a]
    moved = cache.defragment()
    assert moved and cache.statistics().holes == 0
    check_rows(cache, model)
    new_rows(cache, batch.next(), model)
    check_tensors(cache, batch)
    free = cache.free_pages
    assert cache.swap_out(b) == 1  # the other three are the fork's as well
    assert cache.free_pages == free + 1
    refuses(ValueRangeError, "sequence 1 is swapped out: call swap_in", cache.batch, [b])
    refuses(ValueRangeError, "sequence 1 of this batch was swapped out since", batch.next)
    new_rows(cache, cache.batch([fork, c], [5, 9]), model)  # into what b had
    cache.swap_out(fork)
    assert cache.statistics().bytes_swapped == cache.page_bytes * cache.statistics().pages_swapped > 0
    new_rows(cache, cache.batch([c, d], [6, 6]), model)
    for back in (b, fork):
        cache.swap_in(back)
        check_rows(cache, model)
    new_rows(cache, batch.next(), model)
    check_tensors(cache, batch)
    check_rows(cache, model)
    cache.swap_out(b)
    cache.free(b)
    del model[b]
    cache.swap_out(fork)
    check_rows(cache, model)
    cache.swap_in(fork)
    check_rows(cache, model)
    assert not cache._pool._host
    for id in list(model):
        cache.free(id)
    assert cache.free_pages == cache.num_pages


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 9), (torch.bfloat16, 3)])
def test_a_decode_loop_equals_recomputation(device, dtype, steps):
    """Three sequences; keys are turned by their row; queries, too."""
    cache = a_cache(device, layers=1, max_tokens=56, pages=40, dtype=dtype)
    ids = [cache.add() for _ in range(3)]
    cos, sin = angles(64, 4, dtype, device)
    batch = cache.batch(ids, [5, 1, 8], max_new=14)
    stored = [[], [], []]
    for step in range(steps + 1):
        k = rand(batch.total, HEADS, DIM, dtype=dtype, device=device)
        v = rand(batch.total, HEADS, DIM_V, dtype=dtype, device=device)
        q = rand(batch.total, 2 * HEADS, DIM, dtype=dtype, device=device)
        q = tilefold.apply_rotary(q, cos, sin, offsets=batch.lengths_before, cu_seqlens=batch.cu_seqlens_q,
                                  max_seqlen=batch.max_seqlen_q)  # fmt: skip
        cache.append(0, k, v, batch, cos, sin)
        out = cache.attend(0, q, batch)
        positions = batch.positions
        for i, (first, end) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
            new = slice(first, end)
            turned_k = turned(k[new], cos, sin, False, positions[new]).to(dtype)
            stored[i].append((turned_k, v[new]))
            if step in (0, 1, 7, steps):
                keys, values = (torch.cat(x)[None] for x in zip(*stored[i], strict=True))
                what = f"of sequence {i} at step {step}"
                hold(out[new][None], reference.attention, q[new][None], keys, values, what=what, causal=True)
                got = rows_of(cache, ids[i], 0)
                assert torch.allclose(got[0].float(), keys[0].float(), atol=2e-6 if dtype == torch.float32 else 0.02)
                assert torch.equal(got[1], values[0])
        if step < steps:
            batch.next()


def test_padded_and_packed_calls_agree(device):
    cache = a_cache(device, layers=2)
    _, ids = started(cache, 5, 0, 7)
    batch = cache.batch(ids, 3)
    k, v = rand(3, 3, HEADS, DIM, device=device), rand(3, 3, HEADS, DIM_V, device=device)
    q = rand(3, 3, 4, DIM, device=device)
    cos, sin = angles(64, 8, device=device)
    cache.append(0, k, v, batch, cos, sin, interleaved=True)
    cache.append(1, k.flatten(0, 1), v.flatten(0, 1), batch, cos, sin, True)
    for id in ids:
        for one, other in zip(rows_of(cache, id, 0), rows_of(cache, id, 1), strict=True):
            assert torch.equal(one[-3:], other[-3:])
    out, lse = cache.attend(0, q, batch, return_lse=True)
    flat, flat_lse = cache.attend(0, q.flatten(0, 1), batch, return_lse=True)
    assert flat.shape == (9, 4, DIM_V) and flat_lse.shape == (4, 9)
    torch.testing.assert_close(flat, out.flatten(0, 1))
    torch.testing.assert_close(flat_lse, lse.transpose(0, 1).flatten(1))
    batch = cache.batch(ids, 1)
    cache.append(0, k[:, :1], v[:, :1], batch)
    out, lse = cache.attend(0, q[:, 0], batch, return_lse=True, window=(6, 0), softcap=5.0, num_splits=2)
    other, other_lse = cache.attend(0, q[:, :1], batch, return_lse=True, window=(6, 0), softcap=5.0)
    torch.testing.assert_close(out, other[:, 0])
    torch.testing.assert_close(lse, other_lse[..., 0].T)


def test_empty_batches_and_counts_of_nothing(device):
    cache = a_cache(device)
    _, ids = started(cache, 4, 2)
    for batch in (cache.batch([]), cache.batch(ids, 0)):
        check_tensors(cache, batch)
        cache.append(0, rand(0, HEADS, DIM, device=device), rand(0, HEADS, DIM_V, device=device), batch)
        assert cache.attend(0, rand(0, 4, DIM, device=device), batch).shape == (0, 4, DIM_V)
        assert batch.next(0).total == 0


def test_addresses_stay(device):
    cache = a_cache(device)
    _, ids = started(cache, 4, 2)
    batch = cache.batch(ids, 3)
    names = ("block_table", "lengths_before", "cache_seqlens", "cu_seqlens_q", "positions", "slot_mapping")
    addresses = [getattr(batch, name).data_ptr() for name in names]
    for counts in (1, [0, 2], 3):
        batch.next(counts)
        assert [getattr(batch, name).data_ptr() for name in names] == addresses
        check_tensors(cache, batch)


def test_only_changed_entries_are_copied(device, monkeypatch):
    cache = a_cache(device)
    _, ids = started(cache, 4, 6, 7)
    batch = cache.batch(ids, 1)
    copied = []
    whole = cache.staging.int64s
    monkeypatch.setattr(cache.staging, "int64s", lambda *lists: copied.append(lists) or whole(*lists))
    for entries in (1, 1, 0, 1):  # lengths 6 8 9, 7 9 10, 8 10 11, 9 11 12
        copied.clear()
        batch.next([1, 1, 1])
        assert sum(len(places) for places, _ in copied) == entries
        check_tensors(cache, batch)


def test_refusals(device):
    cache = a_cache(device)
    _, (a, b) = started(cache, 4, 6)
    batch = cache.batch([a, b], 2)
    other = a_cache(device).batch([])
    k, v, q = rand(4, HEADS, DIM, device=device), rand(4, HEADS, DIM_V, device=device), rand(4, 4, DIM, device=device)
    gone = cache.batch([cache.add()], 1)
    cache.free(gone.sequences[0])
    cos = torch.ones(30, 4, device=device)
    before, held = snapshot(cache.allocator), [t.nan_to_num() for t in (*cache.k, *cache.v)]
    for call, kind, message in (
        (lambda: cache.batch(5), DtypeError, "sequences must be ids of sequences, got 5"),
        (lambda: cache.batch([a], None), DtypeError, "counts must be an int or one for each sequence, got None"),
        (lambda: batch.next(1.5), DtypeError, "counts must be an int or one for each sequence, got 1.5"),
        (lambda: cache.append(0, k, v.to("meta"), batch), DeviceError, "v is on meta"),
        (lambda: cache.append(0, k, v, batch, None, None, 1), DtypeError, "interleaved must be a bool, got 1"),
        (lambda: cache.append(0, k, v, batch, cos, cos.half()), DtypeError, "rotary_sin has dtype"),
        (lambda: cache.attend(0, q, batch, return_lse=1), DtypeError, "return_lse must be a bool, got 1"),
        (lambda: a_cache("foo"), DeviceError, "device must be cuda or cpu, got 'foo'"),
        (lambda: a_cache(None), DeviceError, "got None"),
        (lambda: cache.batch([a, 9]), ValueRangeError, "sequence 9 is not in the cache"),
        (lambda: cache.batch([a, a]), ValueRangeError, "sequences has 0 more than once"),
        (lambda: cache.batch([a], -1), ValueRangeError, "counts must be at least 0, got -1"),
        (lambda: cache.batch([a, b], [1, -2]), ValueRangeError, "counts[1] must be at least 0, got -2"),
        (lambda: cache.batch([a, b], [1, 2.0]), DtypeError, "counts[1] must be an int, got 2.0"),
        (lambda: cache.batch([a, b], [1]), ShapeError, "counts has 1 numbers for 2 sequences"),
        (lambda: cache.batch([a], 50), ValueRangeError, "counts[0] is 50: sequence 0 has 6 tokens, and max_tokens is 48"),
        (lambda: cache.batch([a], 5, max_new=4), ValueRangeError, "max_new must be at least 5, got 4"),
        (lambda: batch.next(3), ValueRangeError, "counts are 6 tokens, the tensors of this batch have room for 4"),
        (lambda: gone.next(), ValueRangeError, "sequence 2 of this batch was freed since"),
        (lambda: gone.next(0), ValueRangeError, "sequence 2 of this batch was freed since"),
        (lambda: cache.append(2, k, v, batch), ValueRangeError, "layer must be 0 to 1, got 2"),
        (lambda: cache.append(0, k, v, other), ValueRangeError, "batch belongs to another cache"),
        (lambda: cache.append(0, k, v, None), DtypeError, "batch must be what PagedKVCache.batch returned, got NoneType"),
        (lambda: cache.append(0, k[:3], v, batch), ShapeError, "k has shape (3, 2, 16), this batch takes [2, 2, heads, dim] or"),
        (lambda: cache.append(0, k, v, gone), ValueRangeError, "sequence 2 was freed"),
        (lambda: cache.append(0, k, [v], batch), DtypeError, "v must be a torch.Tensor, got list"),
        (lambda: cache.append(0, k.half(), v.half(), batch), DtypeError, "k has dtype float16, but k_cache has float32"),
        (lambda: cache.append(0, k.to_sparse(), v, batch), LayoutError, "k must be a dense strided tensor, got"),
        (lambda: cache.append(0, k[:, :1], v, batch), ShapeError, "k has shape (2, 2, 1, 16)"),
        (lambda: cache.append(0, k[..., ::2], v, batch), (LayoutError, ShapeError), "k has shape"),
        (lambda: cache.attend(0, q[:3], batch), ShapeError, "q has shape (3, 4, 16)"),
        (lambda: cache.attend(0, q, batch, bias=q), ValueRangeError, "unexpected keyword argument 'bias'; it takes window"),
        (lambda: cache.attend(0, q, batch, softmax_scale=1.0), ValueRangeError, "'softmax_scale': here it is scale; it takes"),
        (lambda: cache.append(0, k, v, batch, *[torch.zeros(2, 4, device=device)] * 2), ShapeError, "has 2 positions, the"),
        (lambda: cache.attend(0, q[:, :3], batch), ShapeError, "3"),
        (lambda: cache.share_prefix(a, None), DtypeError, "tokens must be an int, got None"),
        (lambda: a_cache(device, dtype=torch.int32), DtypeError, "dtype must be float16, bfloat16, float32, float8_e4m3fn or"),
        (lambda: a_cache("meta"), DeviceError, "device must be cuda or cpu, got meta"),
        (lambda: a_cache(device, layers=0), ValueRangeError, "layers must be at least 1, got 0"),
    ):  # fmt: skip
        refuses(kind, message, call)
        assert snapshot(cache.allocator) == before
    assert same(held, [t.nan_to_num() for t in (*cache.k, *cache.v)])
    ragged = cache.batch([a, b], [1, 3])
    for call, kind, message in (
        (lambda: cache.append(0, k.to_sparse(), v, ragged), LayoutError, "k must be a dense"),
        (lambda: cache.append(0, k.half(), v, ragged), DtypeError, "k has dtype float16, but k_cache has float32"),
        (
            lambda: cache.append(0, k, v[:, :1], ragged),
            ShapeError,
            "v has shape (4, 1, 8), expected [tokens, kv_heads, dim_v]",
        ),
        (
            lambda: cache.append(0, k, v, ragged, rotary_cos=k),
            ValueRangeError,
            "rotary_cos and rotary_sin come together",
        ),
        (lambda: cache.append(0, k[None], v, ragged), ShapeError, "this batch takes [4, heads, dim]"),
    ):
        refuses(kind, message, call)


def test_staging_never_writes_what_is_being_read():
    """A buffer whose copy is not done is not lent; the ring grows instead of waiting."""
    staging = tilefold.paged.staging.Staging(torch.device("cpu"))
    first = staging.lend(10)
    assert staging.lend(10) is first and len(staging) == 1
    large = staging.lend(100_000)
    assert large is not first and staging.lend(70_000) is large and len(staging) == 2  # a ring for each size
    busy = staging.lend(1)
    busy._event = type("Event", (), {"query": lambda self: False, "record": lambda self: None})()
    second = staging.lend(1)
    assert second is not busy and len(staging) == 3
    assert staging.lend(1) is not second and len(staging) == 4  # the oldest is still read

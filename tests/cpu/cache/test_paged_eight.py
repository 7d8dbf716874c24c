"""PagedKVCache in 8 bits: what is stored is what quantize_kv makes, wherever its page goes; attention over it against fp64."""

from itertools import pairwise

import pytest
import torch

import tilefold
from cases import judge, rand
from cases.flash import angles
from cases.paged import audit, coded, rows_of
from cases.refusals import refuses
from tilefold import PagedKVCache, reference
from tilefold.errors import DtypeError, ShapeError, ValueRangeError

LAYERS, HEADS, DIM, DIM_V = 2, 2, 16, 8
E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def scales(device, per_layer=True):
    """Such that some numbers saturate."""
    shape = (LAYERS, HEADS) if per_layer else (HEADS,)
    return {name: ((torch.rand(shape) + 0.5) / 60).to(device) for name in ("k_scale", "v_scale")}


def a_cache(device, dtype, **options):
    return PagedKVCache(LAYERS, HEADS, DIM, num_pages=16, page_size=4, max_sequences=8, max_tokens=24, dtype=dtype,
                        device=device, head_dim_v=DIM_V, **options)  # fmt: skip


def grow(cache, batch, model, dtype, cos=None, sin=None):
    """Write random rows into every layer, and their codes into the model: sequence -> [layer] -> [k, v]."""
    for layer in range(LAYERS):
        k = rand(batch.total, HEADS, DIM, dtype=dtype, device=cache.device)
        v = rand(batch.total, HEADS, DIM_V, dtype=dtype, device=cache.device)
        if batch.count is not None and layer:  # either form, for equal counts
            cache.append(layer, *(x.unflatten(0, (len(batch), batch.count)) for x in (k, v)), batch, cos, sin)
        else:
            cache.append(layer, k, v, batch, cos, sin)
        if cos is not None:
            k = tilefold.apply_rotary(k, cos, sin, offsets=batch.lengths_before, cu_seqlens=batch.cu_seqlens_q,
                                      max_seqlen=batch.max_seqlen_q)  # fmt: skip
        rows = coded(cache, layer, k, v)
        for id, (first, end) in zip(batch.sequences, pairwise(batch.cu_seqlens_q.tolist()), strict=True):
            held = model.setdefault(id, [[] for _ in range(LAYERS)])[layer]
            held[:] = [torch.cat(both) for both in zip(held, (x[first:end] for x in rows), strict=True)] if held else [
                x[first:end] for x in rows
            ]  # fmt: skip


def check(cache, model):
    audit(cache.allocator)
    for id, layers in model.items():
        for layer, rows in enumerate(layers):
            for got, want in zip(rows_of(cache, id, layer), rows, strict=True):
                assert got.dtype == cache.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "source"), [(E4M3, torch.bfloat16), (INT8, torch.float32)])
def test_codes_are_where_they_are_after_any_move(device, dtype, source):
    cache, model = a_cache(device, dtype, **scales(device)), {}
    a, b = cache.add(), cache.add()
    grow(cache, cache.batch([a, b], [6, 3]), model, source)
    fork = cache.fork(a)
    model[fork] = [list(rows) for rows in model[a]]
    grow(cache, cache.batch([fork, b], 2), model, source)  # copies a page of all layers
    check(cache, model)
    cache.swap_out(b)
    cache.free(a)
    del model[a]
    assert cache.defragment()
    cache.swap_in(b)
    check(cache, model)
    cache.truncate(b, 2)
    model[b] = [[x[:2] for x in rows] for rows in model[b]]
    grow(cache, cache.batch([b, fork], [3, 0]), model, source)
    check(cache, model)


@pytest.mark.parametrize(("dtype", "source"), [(E4M3, torch.float32), (INT8, torch.float16)])
def test_attention_over_codes(device, dtype, source):
    """A ragged prompt, ragged chunks, single tokens; more rows a KV head than a prompt over floats would leave the kernel."""
    cache, model = a_cache(device, dtype, **scales(device)), {}
    ids = [cache.add() for _ in range(3)]
    cos, sin = angles(32, 4, torch.float32, device)
    batch = cache.batch(ids, [7, 2, 9])
    for counts in ((3, 0, 1), 1, None):
        grow(cache, batch, model, source, *((cos, sin) if source == torch.float32 else ()))
        q = rand(batch.total, 32 if counts == 1 else 4, DIM, dtype=source, device=device)
        layer = 1
        out, lse = cache.attend(layer, q, batch, return_lse=True)
        got, exact, plain = [], [], []
        for id, (first, end) in zip(ids, pairwise(batch.cu_seqlens_q.tolist()), strict=True):
            if first == end:
                continue
            keys = [(x.float() * s[layer][:, None])[None]
                    for x, s in zip(model[id][layer], (cache.k_scale, cache.v_scale), strict=True)]  # fmt: skip
            got.append((out[first:end], lse[:, first:end]))
            exact.append([x[0] for x in reference.attention(q[None, first:end], *keys, causal=True)])
            near = [x.to(source) for x in keys]
            plain.append([x[0] for x in reference.attention(q[None, first:end], *near, causal=True, dtype=source)])
        for i, name in ((0, "out"), (1, "lse")):
            sides = [torch.cat([x[i].flatten() for x in side]) for side in (got, exact, plain)]
            judge(*sides[:2], sides[2], f"{name}, {batch.counts}")
        if counts is not None:
            batch = cache.batch(ids, counts)


def test_memory_and_factors(device):
    given = scales(device, per_layer=False)
    cache = a_cache(device, E4M3, **given)
    assert cache.k[0].dtype == E4M3 and torch.equal(cache.k_scale, given["k_scale"].expand(LAYERS, -1))
    given["k_scale"].zero_()  # a copy was taken
    assert (cache.k_scale > 0).all()
    batch = cache.batch([cache.add()], 5)
    figures = cache.statistics()
    assert figures.row_bytes == LAYERS * HEADS * (DIM + DIM_V) and cache.page_bytes == 4 * figures.row_bytes
    assert figures.scale_bytes == 2 * 4 * LAYERS * HEADS
    assert figures.bytes_allocated == 16 * cache.page_bytes + figures.scale_bytes
    assert figures.bytes_contiguous == 24 * figures.row_bytes + figures.scale_bytes
    assert "32 B of them factors" in str(figures) and batch.total == 5
    assert torch.equal(a_cache(device, E4M3).v_scale, torch.ones(LAYERS, HEADS, device=device))
    assert a_cache(device, torch.float32).k_scale is None


def test_refusals(device):
    one = scales(device)["k_scale"]
    for dtype, options, kind, message in (
        (INT8, {}, ValueRangeError, "k_scale and v_scale must be given with an int8 cache"),
        (E4M3, {"k_scale": one}, ValueRangeError, "k_scale and v_scale come together"),
        (torch.float16, {"k_scale": one, "v_scale": one}, DtypeError, "k_scale was given, but the cache holds float16"),
        (INT8, {"k_scale": one, "v_scale": 0.1}, DtypeError, "v_scale must be a torch.Tensor or None, got float"),
        (INT8, {"k_scale": one.half(), "v_scale": one}, DtypeError, "k_scale must be float32, got float16"),
        (INT8, {"k_scale": one[:, :1], "v_scale": one}, ShapeError, "k_scale has shape (2, 1), expected [2] (KV heads) or"),
        (INT8, {"k_scale": one, "v_scale": one.new_ones(2, 16, 2)}, ShapeError, "factors of single pages are not kept"),
        (INT8, {"k_scale": one, "v_scale": -one}, ValueRangeError, "v_scale[0, 0] must be a number above 0, got -0."),
        (E4M3, {"k_scale": one[0] * float("inf"), "v_scale": one}, ValueRangeError, "k_scale[0] must be a number above 0"),
    ):  # fmt: skip
        refuses(kind, message, a_cache, device, dtype, **options)

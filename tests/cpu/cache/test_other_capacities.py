"""Calls of the decode kernel that differ in the number of keys alone, on sm_90: what is kept of the first is as a call of its
own has it."""

import pytest
import torch

from tilefold.ops import records
from tilefold.ops.bound import stand_in
from tilefold.ops.cache import kvcache
from tilefold.ops.call import Call
from tilefold.ops.dense import attention
from tilefold.ops.faults import watch_of
from tilefold.ops.source import UNSCALED, Cache, Scales, key_of
from tilefold.plan import device_named

DEVICE = device_named("h200")


@pytest.fixture(autouse=True)
def on_sm_90(monkeypatch):
    monkeypatch.setattr(records, "CACHE", {})
    for module in (attention, kvcache):
        monkeypatch.setattr(module, "device_of", lambda *args: DEVICE)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def in_one_piece(keys, batch=2, queries=1, **options):
    """q, k, v, the call: `keys` rows of longer caches."""
    cache = meta(batch, keys + 100, 4, 64)[:, :keys]
    lengths = meta(batch, dtype=torch.int32)
    return meta(batch, queries, 16, 64), cache, cache.clone(), Call(causal=True, source=Cache(lengths), **options)


def of_one_sequence(keys):
    return in_one_piece(keys, batch=1)


def shared(keys):
    """V is part of K."""
    q, k, _, call = in_one_piece(keys)
    return q, k, k[..., :32], call


def in_pages(keys, dtype=torch.bfloat16, scales=UNSCALED):
    pages, table = meta(50, 16, 4, 64, dtype=dtype), meta(2, -(-keys // 16), dtype=torch.int32)
    cache = Cache(meta(2, dtype=torch.int32), block_table=table)
    return meta(2, 3, 16, 64), pages, pages.clone(), Call(source=cache, scales=scales)


def in_eight_bits(keys):
    return in_pages(keys, torch.float8_e4m3fn, Scales(None, meta(4, dtype=torch.float32), meta(4, dtype=torch.float32)))


SORTS = {make.__name__: make for make in (in_one_piece, of_one_sequence, shared, in_pages, in_eight_bits)}


def prepared(q, k, v, call, check=False):
    return kvcache.prepare(q, k, v, call, check)


def told(decoder, q, k, v, call):
    """What the launches are given, tensors by their shapes."""
    floats, given = stand_in(torch.float32), (None,) * 2
    made = [decoder.parts, decoder.counted, decoder.limit, decoder.merge is None]
    for bound in (decoder.launch, decoder.merge):
        if bound is not None:
            arguments = bound.arguments((q, k, v, q, floats, call, floats, floats, *given[:1], (0,) * 6))
            made += [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in arguments]
            made += [bound.launch.grid, bound.launch.keywords, bound.launch.fn]
    return made


@pytest.mark.parametrize("check", [False, watch_of("attention_kvcache")], ids=["", "watched"])
@pytest.mark.parametrize("keys", [(2000, 2001), (1000, 5000), (70, 12345), (4096, 4112)])
@pytest.mark.parametrize("sort", SORTS)
def test_the_record_is_that_of_a_call_of_its_own(sort, keys, check, monkeypatch):
    near = prepared(*SORTS[sort](keys[0]), check)
    given = SORTS[sort](keys[1])
    again = prepared(*given, check)
    own = kvcache._prepared(*given, check)
    assert again.sizes == own.sizes and again.sizes != near.sizes
    assert (again.out_shape, again.lse_shape) == (own.out_shape, own.lse_shape)
    assert (again.run, again.look) == (own.run, own.look)
    assert told(again.bound, *given) == told(own.bound, *given)


def test_lengths_that_are_cut_alike_are_not_checked_again(monkeypatch):
    prepared(*in_one_piece(2000))
    monkeypatch.setattr(kvcache, "_prepared", None)
    for keys in (2001, 2007, 1999):
        assert prepared(*in_one_piece(keys)).sizes["capacity"] == keys


def test_what_is_no_capacity_has_a_key_of_its_own():
    q, k, v, call = in_one_piece(2000)
    cache = call.source

    def family(q, k, v, call, check=False):
        return kvcache._key_of_any_capacity(key_of(q, k, v, call, check), call)

    key = family(q, k, v, call)
    assert key is not None and key == family(*in_one_piece(3000))
    for other in (
        (q, k[:, :-1], v, call),
        (q[:, :, :8], k, v, call),
        (q, k.half(), v.half(), call),
        (q, k.transpose(1, 2).contiguous().transpose(1, 2), v, call),
        (q, k, v, call._replace(softcap=3.0)),
        (q, k, v, call._replace(causal=False)),
        (q, k, v, call._replace(mask=q)),
        (q, k, v, call._replace(source=cache._replace(pads=cache.lengths))),
        (q, k, v, call._replace(source=cache._replace(splits=3))),
        (q, k, k, call),
        (q, k, v, call, watch_of("attention_kvcache")),
    ):
        assert family(*other) != key
    paged = in_pages(160)
    apart = paged[3].source._replace(block_table=meta(2, 2, dtype=torch.int32)[:, ::2])  # a column: any stride will do
    assert family(*paged[:3], paged[3]._replace(source=apart)) is None
    key = family(*in_pages(160))
    assert key is not None and key == family(*in_pages(1600)) != family(*in_eight_bits(160))


@pytest.mark.parametrize("keys", [(2000, 2001), (1000, 5000), (700, 12345)])
def test_attention_of_one_query(keys, monkeypatch):
    """By the decode kernel, over keys that are a cache of their own."""

    def made(n):
        q, k, v, _ = in_one_piece(n)
        return q, k, v, Call()

    near, given = attention.prepare(*made(keys[0])), made(keys[1])
    again, own = attention.prepare(*given), attention.prepare_anew(*given)
    assert again.plan == own.plan != near.plan and str(again.plan) == str(own.plan)
    assert (again.out_shape, again.lse_shape, again.problem) == (own.out_shape, own.lse_shape, own.problem)
    assert told(again.bound, *given) == told(own.bound, *given)

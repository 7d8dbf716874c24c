"""What calls of KV caches refuse, by the argument's own name and before anything is written; each case was a fault once."""

import pytest
import torch

import tilefold
from cases import ints
from cases.paged import snapshot
from cases.refusals import refuses
from tilefold.errors import DtypeError, LayoutError, Unsupported, ValueRangeError

E4M3 = torch.float8_e4m3fn


def attend(**changes):
    """Two queries of 4 heads over two caches of 16 rows."""
    k = torch.randn(2, 16, 2, 32)
    call = {"q": torch.randn(2, 1, 4, 32), "k_cache": k, "v_cache": k.clone(), "cache_seqlens": ints(5, 16)}
    return call | changes


def packed(**changes):
    return attend(q=torch.randn(2, 4, 32), cu_seqlens_q=ints(0, 1, 2)) | changes


def bytes_of(table=None, **changes):
    """A call over e4m3, whose caches have a factor each."""
    q = attend()
    cached = {name: q[name].to(E4M3) for name in ("k_cache", "v_cache")}
    return q | cached | {"k_scale": torch.ones(2, 2), "v_scale": torch.ones(2, 2)} | changes


BAD = torch.tensor([[1.0, 1.0], [1.0, -2.0]])
WIDE = torch.randn(2, 16, 2, 576)
NONE = torch.randn(2, 16, 2, 0)

ATTENTION = [
    (attend(max_seqlen_q=3), ValueRangeError, "max_seqlen_q is 3, but there are no cu_seqlens_q"),
    (packed(), ValueRangeError, "max_seqlen_q must be given with cu_seqlens_q: at least the longest sequence, got 0"),
    (packed(cu_seqlens_q=[0, 1, 2]), DtypeError, "cu_seqlens_q must be a torch.Tensor or None, got list"),
    (attend(k_cache=torch.ones(2, 16, 2, 32, dtype=torch.uint8)), DtypeError,
     "accepted: float16, bfloat16, float32, float8_e4m3fn, int8"),
    (attend(q=WIDE[:, :1], k_cache=WIDE, v_cache=WIDE[..., :64].clone()), Unsupported, "more only where v_cache is a part"),
    (attend(q=torch.randn(2, 1, 4, 0), k_cache=NONE, v_cache=NONE), Unsupported, "q and k_cache have head dim 0; accepted"),
    (attend(k_cache=torch.randn(2, 16, 2, 32).to_sparse()), LayoutError, "k_cache must be a dense strided tensor"),
    (attend(k_cache=torch.tensor(1.0), v_cache=torch.tensor(1.0)), tilefold.ShapeError, "k_cache has 0 dimensions"),
    (attend(v_cache=torch.randn(2, 16, 2, 520)), Unsupported, "v_cache has head dim 520; accepted: 1 to 512"),
    (bytes_of(k_scale=BAD, check=True), ValueRangeError, "k_scale[1, 1] must be a number above 0, got -2.0"),
    (attend(k_scale=torch.ones(2)), ValueRangeError, "v_scale"),
    (attend(k_scale=torch.ones(2), v_scale=torch.ones(2)), DtypeError, "k_scale"),
    (attend(**dict.fromkeys(("k_cache", "v_cache"), torch.zeros(2, 16, 2, 32).to(torch.int8))), ValueRangeError, "int8"),
    (bytes_of(v_cache=torch.randn(2, 16, 2, 32)), DtypeError, "v_cache"),
    (bytes_of(k_scale=torch.ones(1), v_scale=torch.ones(1)), tilefold.ShapeError, "k_scale"),
    (attend(num_splits=129), ValueRangeError, "num_splits"),
    (attend(check=1), DtypeError, "check"),
    (attend(plan=3), DtypeError, "plan"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(ATTENTION)))
def test_attention_kvcache(case):
    call, kind, message = ATTENTION[case]
    refuses(kind, message, tilefold.attention_kvcache, **call)


def test_factors_that_nobody_uses_may_be_anything():
    """Pages of nobody have factors of nobody."""
    call = bytes_of(k_scale=BAD, check=True)
    found = tilefold.attention_kvcache(**call, cache_batch_idx=ints(0, 0))
    pages = tilefold.attention_kvcache(**call, block_table=torch.tensor([[0, 1], [0, 1]], dtype=torch.int32))
    assert found.isfinite().all()
    torch.testing.assert_close(found, pages)


def test_the_plan_refuses_what_the_call_does_and_follows_a_given_plan():
    call = attend()
    plan = tilefold.attention_kvcache_plan(**call, return_lse=True, check=True)
    assert tilefold.attention_kvcache_plan(**call, plan=plan) is plan
    for changes, kind in (({"return_lse": 1}, DtypeError), ({"check": 1}, DtypeError), ({"plan": 3}, DtypeError)):
        with pytest.raises(kind, match=next(iter(changes))):
            tilefold.attention_kvcache_plan(**call, **changes)
    with pytest.raises(TypeError, match="unexpected keyword argument 'depth'"):
        tilefold.attention_kvcache_plan(**call, depth=3)


def append(**changes):
    call = {"k": torch.randn(2, 3, 2, 32), "v": torch.randn(2, 3, 2, 32), "cache_seqlens": ints(5, 13)}
    return call | {"k_cache": torch.zeros(2, 16, 2, 32), "v_cache": torch.zeros(2, 16, 2, 32)} | changes


def append_bytes(**changes):
    held = {name: torch.zeros(2, 16, 2, 32, dtype=torch.int8) for name in ("k_cache", "v_cache")}
    return append(**held) | {"k_scale": torch.ones(2), "v_scale": torch.ones(2)} | changes


APPEND = [
    (append(max_seqlen=-1), ValueRangeError, "max_seqlen must be at least 0, got -1"),
    (append(rotary_cos=torch.ones(20, 17), rotary_sin=torch.ones(20, 17)), tilefold.ShapeError,
     "rotary_cos has shape (20, 17): it turns 34 channels, k_cache has 32"),
    (append(rotary_cos=torch.ones(20, 8), rotary_sin=torch.ones(20, 8).half()), DtypeError, "rotary_sin has dtype float16"),
    (append_bytes(k_scale=None), ValueRangeError, "k_scale must be given with a cache of int8"),
    (append_bytes(v_scale=torch.tensor([1.0, 0.0])), ValueRangeError, "v_scale[1] must be a number above 0, got 0.0"),
    (append_bytes(k_scale=BAD), ValueRangeError, "k_scale[1, 1] must be a number above 0, got -2.0"),
    (append_bytes(k_scale=torch.ones(2, requires_grad=True)), Unsupported, "k_scale requires a gradient"),
    (append(k=torch.randn(2, 3, 2, 32).to_sparse()), LayoutError, "k must be a dense strided tensor"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(APPEND)))
def test_kvcache_append(case):
    call, kind, message = APPEND[case]
    refuses(kind, message, tilefold.kvcache_append, **call)
    assert not call["k_cache"].any() and not call["v_cache"].any()


def test_the_others():
    k, shared = (
        torch.randn(6, 4, 2, 32),
        {"prefix_length": 4, "cascade": True, "block_table": ints(1, 2, 0).expand(2, 3)},
    )
    call = {"q": torch.randn(2, 1, 4, 32), "k_cache": k, "v_cache": k, "cache_seqlens": ints(7, 8), **shared}
    call["block_table"] = call["block_table"].contiguous()
    loose = {"q": torch.randn(2, 4, 32), "cu_seqlens_q": ints(0, 1, 2)}
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 4, 3)
    for kind, message, ask in (
        (ValueRangeError, "max_seqlen_q must be given", lambda: tilefold.attention_shared_prefix(**call | loose)),
        (ValueRangeError, "prefix_length is -1", lambda: tilefold.attention_shared_prefix(**call | {"prefix_length": -1})),
        (ValueRangeError, "cache_seqlens[1] is 13, the cache has room for 12 keys",
         lambda: tilefold.attention_shared_prefix(**call | {"cache_seqlens": ints(7, 13)})),
        (LayoutError, "q must be a dense", lambda: tilefold.attention_shared_prefix(**call | {"q": call["q"].to_sparse()})),
        (LayoutError, "out_b must be a dense", lambda: tilefold.merge_attention(out, lse, out.to_sparse(), lse)),
        (DtypeError, "dtype must be torch.float8_e4m3fn or torch.int8", lambda: tilefold.quantize_kv(k, [])),
    ):  # fmt: skip
        refuses(kind, message, ask)


def test_transforms():
    """Forward-mode derivatives would have been 0 without a word; torch.func.grad ended in torch's own error."""
    call, new, x = attend(), append(), torch.randn(3, 4, 2, 32)

    def out(q):
        return tilefold.attention_kvcache(**call | {"q": q})

    cache = a_cache()
    batch = cache.batch([cache.add()], 3)

    def step(q):
        return cache.attend(0, q, batch)

    rows = torch.randn(3, 4, 16)
    for ask, message in (
        (lambda: torch.func.jvp(step, (rows,), (rows,)), "q carries a forward-mode tangent"),
        (lambda: torch.func.grad(lambda q: step(q).sum())(rows), "q requires a gradient"),
        (lambda: torch.func.jvp(out, (call["q"],), (call["q"],)), "q carries a forward-mode tangent"),
        (lambda: torch.func.grad(lambda q: out(q).sum())(call["q"]), "q requires a gradient"),
        (lambda: torch.func.jvp(tilefold.quantize_kv, (x,), (x,)), "x carries a forward-mode tangent"),
        (lambda: torch.func.vmap(lambda k: tilefold.kvcache_append(**new | {"k": k}))(torch.stack([new["k"]] * 2)),
         "k is batched by vmap, but kvcache_append writes in place"),
    ):  # fmt: skip
        refuses(Unsupported, message, ask)
    assert not new["k_cache"].any()


# ---------------------------------------------------------------- PagedKVCache


def a_cache(device="cpu"):
    room = {"num_pages": 8, "page_size": 4, "max_sequences": 3, "max_tokens": 20}
    return tilefold.PagedKVCache(2, 2, 16, **room, dtype=torch.float32, device=device)


def test_uneven_counts_are_one_launch(monkeypatch):
    """Packed rows with rotary go where `kvcache_append` puts them, in one call of it."""
    from tilefold.ops.cache import cache_append

    calls, original = [], cache_append.cache_append
    monkeypatch.setattr(cache_append, "cache_append", lambda *given: calls.append(1) or original(*given))
    cache = a_cache()
    for t in (*cache.k, *cache.v):
        t.zero_()
    sequences = [cache.add(), cache.add()]
    batch = cache.batch(sequences, [6, 3])
    k, v, cos, sin = torch.randn(9, 2, 16), torch.randn(9, 2, 16), torch.rand(20, 4), torch.rand(20, 4)
    cache.append(1, k, v, batch, cos, sin)
    turned = tilefold.apply_rotary(k, cos, sin, cu_seqlens=batch.cu_seqlens_q, max_seqlen=6)
    flat = cache.k[1].flatten(0, 1), cache.v[1].flatten(0, 1)
    assert len(calls) == 1 and not cache.k[0].any()
    torch.testing.assert_close(flat[0][batch.slot_mapping], turned)
    assert flat[1][batch.slot_mapping].equal(v)


def test_no_host_memory_loses_nothing(monkeypatch):
    """What swapping out needs on the host is there before any page is given up."""
    cache = a_cache()
    a = cache.add()
    cache.batch([a], 7)
    before, empty = snapshot(cache.allocator), torch.empty

    def refuse(*shape, **options):
        if "pin_memory" in options:
            raise RuntimeError("no memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RuntimeError, match="no memory"):
        cache.swap_out(a)
    assert before == snapshot(cache.allocator)
    monkeypatch.undo()
    assert cache.swap_out(a) == 2 and cache.swap_in(a) == 2


def test_no_device_memory_moves_pages_one_by_one(monkeypatch):
    """Forks, swaps and defragmenting need temporary memory, but do not depend on it."""

    def exhausted(*given):
        raise torch.OutOfMemoryError("no memory")

    def history(cache):
        a, b = cache.add(), cache.add()
        batch = cache.batch([a, b], [7, 6])
        rows = torch.arange(13.0).view(13, 1, 1).expand(13, 2, 16).contiguous()
        for layer in range(2):
            cache.append(layer, rows + 100 * layer, -rows, batch)
        fork = cache.fork(a)
        batch = cache.batch([fork])
        for layer in range(2):
            cache.append(layer, rows[:1] + 50, -rows[:1], batch)
        cache.swap_out(b)
        cache.free(a)
        cache.swap_in(b)
        cache.free(fork)
        cache.defragment()
        return [cache.k[layer][list(cache.pages(b))].flatten(0, 1)[:6].clone() for layer in range(2)], cache.pages(b)

    expected, pages = history(a_cache())
    monkeypatch.setattr(torch.Tensor, "index_copy_", exhausted)
    monkeypatch.setattr(torch.Tensor, "index_select", exhausted)
    found, again = history(a_cache())
    assert pages == again and all(x.equal(y) for x, y in zip(expected, found, strict=True))
    assert found[1][:, 0, 0].tolist() == [107.0, 108.0, 109.0, 110.0, 111.0, 112.0]

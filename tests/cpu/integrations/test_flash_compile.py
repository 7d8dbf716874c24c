"""The flash_attn functions under torch.compile(fullgraph=True); and none of them reads a tensor on the host."""

import pytest
import torch

from cases import graph_gives, one_graph, packed, qkv, rand
from cases.flash import a_cache, angles, in_pages
from cases.host import NoReads
from tilefold.compat import flash_attn as fa
from tilefold.compat.flash_attn.layers.rotary import RotaryEmbedding

pytestmark = pytest.mark.no_poison


def test_dense_and_packed(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 9, 12, 4, 2, 16, device=device))
    (tq, tk, tv), varlen = packed([3, 6], [5, 7], h=2, hk=1, d=16, dv=16, device=device)

    def both(q, k, v, tq, tk, tv):
        x = fa.flash_attn_func(q, k, v, causal=True, softcap=3.0)
        y = fa.flash_attn_varlen_func(tq, tk, tv, *varlen, window_size=(3, 1), return_attn_probs=True)
        return x, *y

    graph_gives(both, q, k, v, tq, tk, tv)


def test_packed_tensors_and_dropout(device):
    x = rand(1, 9, 3, 2, 16, device=device)

    def call(x):
        return fa.flash_attn_qkvpacked_func(x, 0.4, return_attn_probs=True)

    out, lse, dropped = one_graph(call)(x)
    assert dropped.shape == (1, 2, 128, 128) and (dropped < 0).any()
    plain, same, _ = call(x)
    assert torch.equal(lse, same) and not torch.equal(out, plain)


def a_step(device):
    """A decoding step over pages, and one over a cache in one piece, with new keys and rotary embedding."""
    q, new = rand(3, 1, 2, 24, device=device), a_cache(rows=1, device=device)
    caches = a_cache(device=device)
    pages, table = in_pages(torch.cat(caches, -1), 8)
    lengths = torch.tensor([17, 0, 35], dtype=torch.int32, device=device)
    cos, sin = angles(48, 8, device=device)

    def step(q, k, v, k_cache, v_cache, pages, lengths, table):
        held = pages[..., :24], pages[..., 24:]
        options = {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": lengths, "causal": True}
        x = fa.flash_attn_with_kvcache(q, *held, k, v, block_table=table, **options)
        y = fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, return_softmax_lse=True, num_splits=2, **options)
        return x, *y, fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=20)

    return step, (q, *new, *caches, pages, lengths, table)


def test_a_decoding_step(device):
    step, given = a_step(device)
    mine = [t.clone() for t in given]
    eager = step(*given)
    found = one_graph(step)(*mine)
    for one, other in zip((*found, *mine), (*eager, *given), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def test_rotary_module(device):
    module = RotaryEmbedding(8, device=device)
    x = rand(2, 5, 3, 2, 16, device=device)
    graph_gives(lambda x: module(x.clone(), seqlen_offset=2), x)


def test_nothing_is_read_on_the_host(device, monkeypatch):
    """The launches themselves run under the mode: nobody routes around it, and no values are checked as in the interpreter."""
    from tilefold.ops import operator
    from tilefold.ops.cache import cache_append, cached, rotary
    from tilefold.ops.dense import attention

    monkeypatch.setattr(rotary, "check_offsets", lambda *args: None)
    for module in (cached, cache_append, rotary):
        monkeypatch.setattr(module, "is_watched", lambda tensors: False)
    monkeypatch.setattr(operator, "watchers", lambda tensors: (False, operator.wants_gradient(tensors)))
    monkeypatch.setattr(attention, "check_inside", lambda *args: None)
    monkeypatch.setattr(cached, "check_side", lambda *args: None)
    monkeypatch.setattr(cached, "check_values", lambda *args: None)
    monkeypatch.setattr(cache_append, "_check_values", lambda *args: None)
    step, given = a_step(device)
    q, k, v = (t.requires_grad_() for t in qkv(1, 9, 12, 4, 2, 16, device=device))
    (tq, tk, tv), varlen = packed([3, 6], [5, 7], h=2, hk=1, d=16, dv=16, device=device)
    used = torch.tensor([2, 3], dtype=torch.int32, device=device)
    module = RotaryEmbedding(8, device=device)
    x = rand(2, 5, 3, 2, 16, device=device)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoReads("_local_scalar_dense", "nonzero"):
        used.max().item()
    with NoReads("_local_scalar_dense", "nonzero"):
        step(*given)
        out, *_ = fa.flash_attn_func(q, k, v, 0.2, causal=True, return_attn_probs=True)
        out.sum().backward()
        fa.flash_attn_varlen_func(tq, tk, tv, *varlen, return_attn_probs=True)
        fa.flash_attn_varlen_func(tq, tk, tv, *varlen, seqused_k=used, leftpad_k=used - 1)
        module(x, seqlen_offset=used, max_seqlen=9)


def test_operators_are_what_their_schemas_say(device):
    """Which arguments change, and that fake tensors see the shapes that come out."""
    from tilefold.ops.cache.cached import ATTENTION_CACHED
    from tilefold.ops.cache.rotary import ROTARY
    from tilefold.ops.call import Call
    from tilefold.ops.dense.attention_weights import ATTENTION_WEIGHTS as weights
    from tilefold.ops.source import Cache

    q, new, caches = rand(3, 5, 2, 24, device=device), a_cache(rows=5, device=device), a_cache(device=device)
    lengths = torch.tensor([17, 0, 35], dtype=torch.int32, device=device)
    cos, sin = angles(48, 8, device=device)
    kinds = ("test_schema", "test_faketensor")
    check = torch.library.opcheck
    flat = ATTENTION_CACHED.flat(q, *caches, Call(causal=True, source=Cache(lengths, splits=2)), False)
    check(ATTENTION_CACHED.op, flat, test_utils=kinds)
    check(ROTARY.op, ROTARY.flat(q, cos, sin, lengths, 0, 1, None, -1, True, False), test_utils=kinds)
    seed = torch.ones(1, dtype=torch.int64, device=device)
    check(weights.op, weights.flat(q, new[0], Call(dropout_p=0.3, dropout_seed=seed), 128), test_utils=kinds)

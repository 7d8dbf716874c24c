"""Which bits of out and lse depend on a sequence alone (docs/invariance.md): the portable fold's, for one length of KV tiles and
one share of the keys; and what moves them today.

The interpreter's products are a library's, whose bits depend on a row's place in a tile; here they are summed in order."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import tilefold
from cases import dense_plan, qkv, rand, same, small_plan
from cases.flash import in_pages
from cases.invariant import products_in_order  # noqa: F401
from tilefold.plan.cache.decode import slices_of

pytestmark = pytest.mark.interpreter
DTYPES = [torch.float32, torch.bfloat16]
ROWS = 45
ONE = {"block_n": 16, "splits": 1}


def dense(q, k, v, tile=(16, 16), **options):
    plan = dense_plan(tilefold.attention_plan(q, k, v, **options))
    plan = plan.with_tile(block_m=tile[0], block_n=tile[1], num_warps=4, num_stages=2)
    return tilefold.attention(q, k, v, return_lse=True, plan=plan, **options)


def cached(q, k, v, lengths, fields, **options):
    options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    plan = replace(tilefold.attention_kvcache_plan(q, k, v, **options), **fields)
    return tilefold.attention_kvcache(q, k, v, return_lse=True, plan=plan, **options)


def beside(before, *tensors, after=0):
    """Each tensor [1, ...] among others of a batch."""
    sides = [[rand(n, *t.shape[1:], dtype=t.dtype) for n in (before, after)] for t in tensors]
    return [torch.cat((first, t, last)) for t, (first, last) in zip(tensors, sides, strict=True)]


def longer(n, *tensors):
    """With n rows of something else behind."""
    return [torch.cat((t, rand(t.shape[0], n, *t.shape[2:], dtype=t.dtype)), 1) for t in tensors]


# ---------------------------------------------------------------- what holds


@pytest.fixture(params=DTYPES)
def sequence(request):
    """q, k, v of one sequence, and what a causal call of it alone gives."""
    tensors = qkv(1, ROWS, ROWS, 4, 2, 32, dtype=request.param)
    return tensors, dense(*tensors, causal=True)


def test_neighbours_in_a_batch(sequence):
    tensors, alone = sequence
    out, lse = dense(*beside(1, *tensors, after=2), causal=True)
    assert same((out[1:2], lse[1:2]), alone)


def test_neighbours_in_a_packed_batch(sequence):
    tensors, alone = sequence
    q, k, v = (
        torch.cat((rand(7, *t.shape[2:], dtype=t.dtype), t[0], rand(30, *t.shape[2:], dtype=t.dtype))) for t in tensors
    )
    cu = torch.tensor([0, 7, 7 + ROWS, 37 + ROWS], dtype=torch.int32)
    place = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": ROWS, "max_seqlen_k": ROWS}
    plan = small_plan(q, k, v, causal=True, **place)
    out, lse = tilefold.attention_varlen(q, k, v, **place, causal=True, return_lse=True, plan=plan)
    assert same((out[7 : 7 + ROWS], lse[:, 7 : 7 + ROWS]), (alone[0][0], alone[1][0]))


def test_padding(sequence):
    """Behind a causal sequence; and keys that a mask takes out."""
    tensors, alone = sequence
    out, lse = dense(*longer(20, *tensors), causal=True)
    assert same((out[:, :ROWS], lse[..., :ROWS]), alone)
    q, k, v = tensors
    seen = (torch.arange(ROWS + 20) < ROWS).expand(1, 1, 1, -1)
    assert same(dense(q, *longer(20, k, v), mask=seen), dense(q, k, v))


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 0)}])
@pytest.mark.parametrize("cuts", [(0, 16, 32, ROWS), (0, 5, 6, 29, ROWS)])
def test_chunks_of_a_prompt(sequence, cuts, options):
    q, k, v = sequence[0]
    out, lse = dense(q, k, v, **options)
    for a, b in pairwise(cuts):
        assert same(dense(q[:, a:b], k[:, :b], v[:, :b], **options), (out[:, a:b], lse[..., a:b]))


@pytest.mark.parametrize("rows", [32, 64])
def test_rows_of_a_tile(sequence, rows):
    tensors, alone = sequence
    assert same(dense(*tensors, tile=(rows, 16), causal=True), alone)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_caches(dtype, queries):
    """The last queries over a cache in one share of keys: as the dense kernel has them, in pages of any size and order, in a
    larger cache, beside other sequences."""
    q, k, v = qkv(1, queries, ROWS, 4, 2, 32, dtype=dtype)
    alone = dense(q, k, v, causal=True)
    assert same(cached(q, k, v, [ROWS], ONE, causal=True), alone)
    for page in (3, 16, 1024):
        both, table = in_pages(torch.cat((k, v), -1), page)
        assert same(cached(q, both[..., :32], both[..., 32:], [ROWS], ONE, causal=True, block_table=table), alone)
    assert same(cached(q, *longer(60, k, v), [ROWS], ONE, causal=True), alone)
    out, lse = cached(*beside(1, q, k, v, after=1), [7, ROWS, 20], ONE, causal=True)
    assert same((out[1:2], lse[1:2]), alone)


# ---------------------------------------------------------------- what moves bits today


def test_keys_of_a_tile_move_bits():
    tensors = qkv(1, ROWS, ROWS, 4, 2, 32)
    assert not same(dense(*tensors, tile=(16, 32), causal=True), dense(*tensors, causal=True))


def test_shares_of_the_keys_move_bits():
    q, k, v = qkv(1, 1, 100, 4, 2, 32)
    whole, shares = (cached(q, k, v, [100], {**ONE, "splits": splits}) for splits in (1, 3))
    assert not same(whole, shares)


def test_even_slices_move_bits_with_the_neighbour():
    """A program's slice ends where its share of everybody's tiles ends."""
    q, k, v = qkv(2, 1, 100, 4, 2, 32)
    fields = {"block_n": 16, "splits": 0, "programs": 6}
    long, short = (cached(q, k, v, [100, other], fields) for other in (90, 9))
    assert not same((long[0][:1],), (short[0][:1],))
    cuts = [[piece[1:3] for one in slices_of([7, other], 2, 6) for piece in one if piece[0] < 2] for other in (6, 1)]
    assert cuts[0] != cuts[1]

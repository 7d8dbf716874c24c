"""Block-sparse attention on a GPU, in rows, packed and over pages: planned tiles at real sizes, graphs whose lists, tables and
lengths change, the same bits, no synchronisation.

The caches are NaN wherever no key of a sequence lies.
"""

from functools import partial

import pytest
import torch

import tilefold
from cases import qkv, same
from cases.device import DEVICE, captured, repeated
from cases.index import cache, held, lists, offsets, top
from tilefold import BlockIndex

pytestmark = pytest.mark.no_poison


BF = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, BF, torch.float32])
DIMS = pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])


def rows(*sizes, dim=128, dtype=BF):
    """(q, k, v), no further arguments, of [batch, queries, keys, heads, KV heads]."""
    return qkv(*sizes, dim, dtype=dtype, device=DEVICE), {}


@DTYPES
@DIMS
def test_tiles_of_rows(dim, dtype):
    tensors, where = rows(2, 500, 1000, 4, 2, dim=dim, dtype=dtype)
    sizes = torch.randint(0, 65, (16,), dtype=torch.int32, device=DEVICE)
    for index in (top(500, 1000, 7), top(500, 1000, 7, block_sizes=sizes), top(500, 1000, 3, batch=2)):
        held("sparse_attention", tensors, index, where, splits=0)


@DTYPES
@DIMS
def test_packed_tiles(dim, dtype):
    """Odd and zero lengths, causal, with and without sizes, lists of each sequence and shared ones."""
    tensors, where = offsets([500, 0, 77, 300], [1000, 64, 333, 300], dim=dim, dtype=dtype)
    sizes = torch.randint(0, 65, (4, 16), dtype=torch.int32, device=DEVICE)
    for index in (top(500, 1000, 7, batch=4), top(500, 1000, 7, heads=1), top(500, 1000, 7, block_sizes=sizes)):
        held("sparse_attention_varlen", tensors, index, where, splits=0, causal=True)
    held("sparse_attention_varlen", tensors, top(500, 1000, 5, batch=4), where, splits=3)


@DTYPES
@DIMS
def test_paged_tiles(dim, dtype):
    """Pages of one key to several blocks, of no multiple of anything; an empty cache among others."""
    for page in (16, 64, 256, 100, 1):
        made = cache([1000, 0, 333], page, sq=200, d=dim, dv=dim, dtype=dtype, device=DEVICE)
        for splits, causal in ((0, True), (3, False)):
            held("sparse_attention_paged", made[0], top(200, 1000, 7, batch=3), made[1], splits=splits, causal=causal)


@pytest.mark.parametrize("blocks", [(64, 128), (128, 64), (128, 128), (16, 32)])
def test_unequal_blocks(blocks):
    block_q, block_k = blocks
    index = lists(2, 4, 300, 700, block=block_k, block_q=block_q, device=DEVICE)
    tensors, where = offsets([300, 130], [700, 200], dtype=torch.float16)
    held("sparse_attention_varlen", tensors, index, where, splits=0, causal=True)
    tensors, where = cache([700, 200], 48, sq=300, d=128, dv=128, dtype=torch.float16, device=DEVICE)
    held("sparse_attention_paged", tensors, index, where, splits=0, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_one_query_block_against_many(causal):
    """Few query blocks: deep pipelines, split lists, merged; dense K and V with a mask too."""
    index = top(64, 8192, 100)
    tensors, where = cache([8192], 16, sq=64, hk=4, d=128, dv=128, dtype=BF, device=DEVICE)
    plan = tilefold.sparse_plan(*tensors, index, **where, causal=causal)
    assert plan.splits > 1
    held("sparse_attention_paged", tensors, index, where, splits=0, causal=causal)
    (q, k, v), where = offsets([64], [8192], kv_heads=4)
    held("sparse_attention_varlen", (q, k, v), index, where, splits=0, causal=causal)
    held("sparse_attention", (q[None], k[None], v[None]), index, {}, splits=0, causal=causal)


@pytest.mark.parametrize("sq", [64, 512])
def test_graph_replays_with_changed_lists(sq):
    tensors, where = rows(1, sq, 2048, 4, 4)
    index = top(sq, 2048, 9)
    run = partial(tilefold.sparse_attention, *tensors, index, return_lse=True)
    graph, got = captured(run)
    for keep in (1, 9, 5):
        other = top(sq, 2048, keep)
        index.indices[..., :keep].copy_(other.indices)
        index.counts.copy_(other.counts)
        tensors[0].normal_()
        graph.replay()
        assert same(got, run())
        held("sparse_attention", tensors, index, where, splits=0)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("sq", [1, 64, 512])
def test_graph_replays_with_changed_tables_and_lengths(sq, page):
    tensors, where = cache([2048, 2048], page, sq=sq, hk=4, d=128, dv=128, dtype=BF, device=DEVICE)
    index = top(sq, 2048, 9, batch=2)
    run = partial(tilefold.sparse_attention_paged, *tensors, index, **where, causal=True, return_lse=True)
    graph, got = captured(run)
    for lengths in ([2048, 100], [33, 0], [1500, 2047]):
        order = torch.randperm(where["block_table"].numel(), device=DEVICE)
        where["block_table"].copy_(where["block_table"].flatten()[order].view_as(where["block_table"]))
        where["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        index.indices.copy_(top(sq, 2048, 9, batch=2).indices)
        tensors[0].normal_()
        graph.replay()
        again = run()
        assert same(got, again)
        held("sparse_attention_paged", tensors, index, where, splits=0, causal=True)


def test_graph_replays_with_changed_offsets():
    tensors, where = offsets([300, 212], [1000, 1048])
    index = top(512, 2048, 9, batch=2)
    run = partial(tilefold.sparse_attention_varlen, *tensors, index, **where, causal=True, return_lse=True)
    graph, got = captured(run)
    for cut_q, cut_k in ((500, 1), (0, 2048), (77, 999)):
        where["cu_seqlens_q"][1], where["cu_seqlens_k"][1] = cut_q, cut_k
        graph.replay()
        assert same(got, run())
        held("sparse_attention_varlen", tensors, index, where, splits=0, causal=True)


def test_same_bits_and_no_synchronisation():
    paged = cache([4096, 1000], 16, sq=64, hk=4, d=128, dv=128, dtype=BF, device=DEVICE)
    flat, apart = offsets([64, 30], [4096, 1000], kv_heads=4), rows(1, 64, 4096, 4, 4)
    for batch, name, (tensors, where) in ((2, "_paged", paged), (2, "_varlen", flat), (1, "", apart)):
        index = top(64, 4096, 30, batch=batch)
        run = partial(getattr(tilefold, f"sparse_attention{name}"), *tensors, index, **where, return_lse=True)
        first, runs = repeated(run, 20)
        assert all(same(first, other) for other in runs)


def test_one_compilation_serves_all_lengths():
    """Lengths, capacities and numbers of pages are no constants; the page size is."""
    from tilefold.ops import launch

    known = None
    for n in (640, 1000, 1700):
        tensors, where = cache([n, 17], 16, sq=n // 2, dtype=torch.float16, device=DEVICE)
        tilefold.sparse_attention_paged(*tensors, top(n // 2, n, 3, batch=2), **where)
        tensors, where = offsets([n // 2, 9], [n, 17])
        tilefold.sparse_attention_varlen(*tensors, top(n // 2, n, 3, batch=2), **where)
        known = known or len(launch._COMPILED)
        assert len(launch._COMPILED) == known


@pytest.mark.large
def test_more_than_2_to_the_31_elements():
    b, s, h, d = 33, 8192, 64, 128
    assert b * s * h * d > 1 << 31
    q, k, v = (torch.randn(b, s, h, d, dtype=BF, device=DEVICE) for _ in range(3))
    index = top(s, s, 2, heads=1)
    out, lse = tilefold.sparse_attention(q, k, v, index, return_lse=True)
    kernel = tilefold.sparse_plan(q, k, v, index).kernel
    for i_b, i_h in ((0, 0), (b - 1, h - 1)):
        one = [t[i_b : i_b + 1, :, i_h : i_h + 1].contiguous() for t in (q, k, v)]
        plan = tilefold.sparse_plan(*one, index).with_tile(kernel=kernel, splits=1)
        alone = tilefold.sparse_attention(*one, index, return_lse=True, plan=plan)
        assert torch.equal(out[i_b : i_b + 1, :, i_h : i_h + 1], alone[0])
        assert torch.equal(lse[i_b : i_b + 1, i_h : i_h + 1], alone[1])


@pytest.mark.large
def test_packed_rows_and_a_page_of_more_than_2_to_the_31_elements():
    """Rows of a packed batch, and a page, that lie past 2^31 elements."""
    heads, dim, total = 64, 128, 300_000
    assert total * heads * dim > 1 << 31
    q, k, v = (torch.randn(total, heads, dim, dtype=BF, device=DEVICE) for _ in range(3))
    cu = torch.tensor([0, total - 1000, total], dtype=torch.int32, device=DEVICE)
    rows = torch.arange(-(-total // 64), dtype=torch.int32, device=DEVICE)
    # its own block, and one that the last sequence, of 16 blocks, has too
    two = torch.stack([rows, (rows + 7) % 16], 1)[None, None]
    index = BlockIndex.from_indices(two, None, seq_q=total, seq_k=total)
    out, lse = tilefold.sparse_attention_varlen(q, k, v, index, cu, cu, return_lse=True)
    last = [t[-1000:].clone() for t in (q, k, v)]
    start = torch.tensor([0, 1000], dtype=torch.int32, device=DEVICE)
    alone = tilefold.sparse_attention_varlen(*last, index, start, start, return_lse=True)
    assert torch.equal(out[-1000:], alone[0]) and torch.equal(lse[:, -1000:], alone[1])
    # the same keys as one page, which spans more than 2^31 elements
    table, length = (
        torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        torch.full((1,), total, dtype=torch.int32, device=DEVICE),
    )
    some = top(1000, total, 3, heads=1)
    paged = tilefold.sparse_attention_paged(last[0][None], k[None], v[None], some, table, length)
    dense = tilefold.sparse_attention(last[0][None], k[None], v[None], some)
    torch.testing.assert_close(paged, dense, atol=2e-2, rtol=2e-2)

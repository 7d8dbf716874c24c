"""Streaming calls as people make them: with a sparsity, with mistakes, with parameters."""

import pytest
import torch

from cases import rand
from tilefold import BlockIndex, sparse
from tilefold.errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from tilefold.nn import SparseVideoAttention

pytestmark = pytest.mark.interpreter  # how it is called does not depend on the device


def blocks(seed=1, heads=2, tokens=16):
    torch.manual_seed(seed)
    return rand(1, tokens, heads, 16)


def cache_of(capacity=160):
    return sparse.VideoCache(1, capacity, 2, 16, block=16, dtype=torch.float32)


@pytest.mark.parametrize("sparsity", [0.5, torch.tensor([0.25, 0.75])], ids=["number", "heads"])
def test_a_sparsity_is_a_share_of_what_the_cache_holds(sparsity):
    select = sparse.SelectOptions(method="top_k", sparsity=sparsity)
    cache, seen = cache_of(), []
    for step in range(6):
        x = blocks(step)
        seen.append(x)
        got, stages = sparse.sparse_video_attention(x, x, x, cache=cache, block=16, select=select, return_stages=True)
        whole = torch.cat(seen, 1)
        want = sparse.sparse_video_attention(x, whole, whole, block=16, select=select)
        assert torch.allclose(got, want, atol=1e-6)
        share = torch.as_tensor(sparsity).expand(2)
        expected = ((1 - share) * (step + 1)).double().ceil().clamp(min=1)
        assert stages.index.counts.flatten().tolist() == expected.int().tolist()


@pytest.mark.parametrize("mistake", [
    {"gate_fine": torch.rand(3)}, {"gate_fine": 0.5}, {"scale": -1.0},
    {"select": sparse.SelectOptions(method="top_k", top_k=torch.ones(7))}, {"query_sizes": torch.ones(7, dtype=torch.int32)},
], ids=["gate", "number", "scale", "select", "sizes"])  # fmt: skip
def test_a_failed_call_appends_nothing(mistake):
    cache, clean = cache_of(), cache_of()
    first, second = blocks(1), blocks(2)
    for c in (cache, clean):
        sparse.sparse_video_attention(first, first, first, cache=c, block=16)
    with pytest.raises((DtypeError, ShapeError, ValueRangeError)):
        sparse.sparse_video_attention(second, second, second, cache=cache, block=16, **mistake)
    assert cache.tokens == 16
    assert cache.lengths.tolist() == [16]
    assert cache.block_sizes.sum() == 16
    again = (sparse.sparse_video_attention(second, second, second, cache=c, block=16) for c in (cache, clean))
    assert torch.equal(*again)


@pytest.mark.parametrize("name", ["weight_k", "weight_v", "gate_coarse", "gate_fine"])
def test_a_cache_enters_no_graph(name):
    cache, x = cache_of(), blocks()
    parameter = torch.nn.Parameter(torch.rand(2, 16) if name.startswith("weight") else torch.rand(2))
    with pytest.raises(Unsupported, match=f"{name} requires a gradient"):
        sparse.sparse_video_attention(x, x, x, cache=cache, block=16, **{name: parameter})
    assert cache.tokens == 0
    with torch.no_grad():
        sparse.sparse_video_attention(x, x, x, cache=cache, block=16, **{name: parameter})
    assert not cache.rows_k.requires_grad


def test_queries_are_among_the_keys():
    with pytest.raises(ShapeError, match="q has 48 tokens, but the cache holds 16"):
        sparse.sparse_video_attention(blocks(tokens=48), blocks(), blocks(), cache=cache_of(), block=16)


def test_what_a_map_forces_beyond_a_bound_stays():
    force = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    for most in (2, torch.tensor([2])):
        index = sparse.select(torch.rand(1, 1, 2, 6), max_blocks=most, force=force).index
        assert index.counts.flatten().tolist() == [6, 6]


def test_dense_projections_keep_their_dtype_under_autocast():
    x, weight = blocks(tokens=32), torch.rand(2, 32)
    with torch.autocast("cpu", torch.bfloat16):
        rows = sparse.project(x, weight, block=16, kind="dense")
    assert rows.dtype == torch.float32
    assert torch.equal(rows, sparse.project(x, weight, block=16, kind="dense"))


def test_lists_of_a_ragged_grid_need_its_sizes():
    made = SparseVideoAttention(32, 2, grid=(5, 3, 3), cube=(4, 2, 2), coarse=None)
    n = sparse.GridTiling((5, 3, 3), (4, 2, 2)).block_count
    index = BlockIndex.from_map(torch.ones(1, 1, n, n, dtype=torch.bool), block_q=16, block_k=16)
    with pytest.raises(ValueRangeError, match="index has no block_sizes, but cubes of"):
        made(rand(1, 45, 32), index=index)

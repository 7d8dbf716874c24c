"""Streaming: what a cache gives is what the whole sequence gives, block after block, contiguous or in pages; calls as people make
them: with a sparsity, with mistakes, with parameters."""

import pytest
import torch

from cases import judge, rand
from tilefold import BlockIndex, DtypeError, ShapeError, Unsupported, ValueRangeError, reference, sparse
from tilefold.nn import SparseVideoAttention
from tilefold.sparse import CoarseOptions, SelectOptions, VideoCache, sparse_video_attention, streaming

pytestmark = pytest.mark.interpreter
BLOCK, DIM = 16, 16
TOP = SelectOptions("top_k", top_k=2)


def tokens(batch, seq, heads, dim=DIM):
    return torch.randn(batch, seq, heads, dim)


def cache_of(blocks, batch=1, heads=1, **options):
    return VideoCache(batch, blocks * BLOCK, heads, DIM, block=BLOCK, dtype=torch.float32, **options)


def check(out, stages, q, k, v, sizes, select, **options):
    """Against the oracle over everything that came, on the lists that were used."""
    held = k.shape[1] // BLOCK
    listed = stages.index.to_map()
    assert not listed[..., held:].any()
    index = BlockIndex.from_map(listed[..., :held], block_q=BLOCK, block_k=BLOCK, seq_q=q.shape[1], seq_k=k.shape[1],
                                block_sizes=sizes)  # fmt: skip
    given = {"select": select, "index": index, "block": BLOCK, "block_sizes": sizes}
    exact, plain = (
        reference.sparse_video_attention(q, k, v, **given, dtype=dtype, return_stages=True, **options)
        for dtype in (torch.float64, torch.float32)
    )
    judge(out, exact[0], plain[0], f"{select} {options}")
    assert torch.equal(stages.scores[..., held:], torch.zeros_like(stages.scores[..., held:]))
    judge(stages.scores[..., :held], exact[1].scores, plain[1].scores, "scores")
    wanted = reference.select(exact[1].scores, **select.arguments(), block_q=BLOCK, block_k=BLOCK, seq_q=q.shape[1],
                              seq_k=k.shape[1], block_sizes=sizes)  # fmt: skip
    assert torch.equal(listed[..., :held].cpu(), wanted.keep.cpu())


@pytest.mark.parametrize(
    ("page_size", "select"), [(None, TOP), (16, SelectOptions("gini", tau_min=0.3, tau_max=0.6)), (24, TOP)]
)
def test_block_by_block(page_size, select):
    """Two blocks, then one at a time; the newest block of queries over all that came."""
    cache = cache_of(6, 2, page_size=page_size)
    k, v = (tokens(2, 0, 1) for _ in range(2))
    for new in (2, 1, 1, 2):
        more = [tokens(2, new * BLOCK, 1) for _ in range(2)]
        q = tokens(2, new * BLOCK, 2)
        k, v = (torch.cat([a, b], 1) for a, b in zip((k, v), more, strict=True))
        out, stages = sparse_video_attention(q, *more, cache=cache, select=select, block=BLOCK, return_stages=True)
        check(out, stages, q, k, v, None, select)
        assert cache.tokens == k.shape[1]
        assert cache.lengths.tolist() == [k.shape[1]] * 2


def test_ragged_blocks_gates_and_weights():
    cache = cache_of(5)
    weights = {"weight_k": torch.rand(1, BLOCK), "weight_v": torch.rand(1, BLOCK)}
    k, v, sizes = tokens(1, 0, 1), tokens(1, 0, 1), torch.empty(1, 0, dtype=torch.int32)
    for fresh in ([16, 5], [0], [9, 16]):
        new = torch.tensor([fresh], dtype=torch.int32)
        more = [tokens(1, len(fresh) * BLOCK, 1) for _ in range(2)]
        q = tokens(1, BLOCK, 1)
        gates = {name: torch.rand(1, BLOCK, 1) for name in ("gate_coarse", "gate_fine")}
        k, v, sizes = torch.cat([k, more[0]], 1), torch.cat([v, more[1]], 1), torch.cat([sizes, new], 1)
        out, stages = sparse_video_attention(q, *more, cache=cache, select=TOP, block=BLOCK, block_sizes=new, return_stages=True,
                                             **weights, **gates)  # fmt: skip
        check(out, stages, q, k, v, sizes, TOP, **weights, **gates)


def test_old_rows_are_not_made_again(monkeypatch):
    """What `project` is given is the new block alone."""
    seen = []
    real = streaming.project
    monkeypatch.setattr(
        streaming, "project", lambda x, *args, **options: seen.append(x.shape[1]) or real(x, *args, **options)
    )
    cache = cache_of(4)
    for _ in range(3):
        x = tokens(1, BLOCK, 1)
        sparse_video_attention(x, x, x, cache=cache, select=TOP, block=BLOCK)
    assert seen == [BLOCK] * 6


def test_other_layout_and_clear():
    x = tokens(1, 2 * BLOCK, 2)
    q = tokens(1, BLOCK, 2)
    cache = cache_of(4, heads=2)
    first = sparse_video_attention(q, x, x, cache=cache, select=TOP, block=BLOCK)
    cache.clear()
    turned = (t.transpose(1, 2) for t in (q, x, x))
    again = sparse_video_attention(*turned, cache=cache, select=TOP, block=BLOCK, layout="bhsd")
    assert torch.equal(first, again.transpose(1, 2))
    assert str(cache) == "VideoCache(1 x 32 of 64 tokens in blocks of 16)"


def test_forced_blocks_are_counted_from_the_newest():
    cache = cache_of(8)
    x = tokens(1, 4 * BLOCK, 1)
    options = {"cache": cache, "block": BLOCK, "return_stages": True}
    select = SelectOptions("top_k", top_k=1, force_self=True)
    _, stages = sparse_video_attention(x[:, -BLOCK:], x, x, select=select, **options)
    assert stages.index.to_map()[0, 0, 0].nonzero().flatten().tolist() == [3]
    y = tokens(1, BLOCK, 1)
    _, stages = sparse_video_attention(y, y, y, select=SelectOptions("top_k", top_k=1, local_window=1), **options)
    assert stages.index.to_map()[0, 0, 0].nonzero().flatten().tolist() == [3, 4]


def test_refusals():
    cache = cache_of(2)
    x = tokens(1, BLOCK, 1)
    for change, error, message in (
        (
            {"k": tokens(1, 8, 1), "v": tokens(1, 8, 1)},
            ShapeError,
            "k has 8 tokens: a cache grows by whole blocks of 16",
        ),
        ({"k": tokens(1, 3 * BLOCK, 1), "v": tokens(1, 3 * BLOCK, 1)}, ShapeError, "has room for 32 more"),
        ({"k": x.half(), "v": x.half()}, DtypeError, "k must have the cache's dtype torch.float32, got torch.float16"),
        ({"k": tokens(2, BLOCK, 1)}, ShapeError, "batch"),
        (
            {"coarse": CoarseOptions("pooled")},
            ValueRangeError,
            "coarse.kind must be 'block' with a cache, got 'pooled'",
        ),
        ({"block": 32}, ValueRangeError, "block is 32, but the cache has blocks of 16"),
        ({"k": x.clone().requires_grad_()}, Unsupported, "requires a gradient, but a cache passes none"),
        ({"q": x.clone().requires_grad_()}, Unsupported, "requires a gradient, but a cache passes none"),
        ({"coarse": None}, ValueRangeError, "cache"),
    ):
        given = {"q": x, "k": x, "v": x, "cache": cache, "select": TOP, "block": BLOCK} | change
        with pytest.raises(error, match=message):
            sparse_video_attention(**given)
        assert cache.tokens == 0
    for arguments, error, message in (
        ((0, 32, 1, 16), ShapeError, "batch must be an integer of at least 1, got 0"),
        ((1, 40, 1, 16), ShapeError, "capacity must be whole blocks of 16 tokens, got 40"),
    ):
        with pytest.raises(error, match=message):
            VideoCache(*arguments, block=16)


@pytest.mark.parametrize("sparsity", [0.5, torch.tensor([0.25, 0.75])], ids=["number", "heads"])
def test_a_sparsity_is_a_share_of_what_the_cache_holds(sparsity):
    select = SelectOptions(method="top_k", sparsity=sparsity)
    cache, seen = cache_of(10, heads=2), []
    for step in range(6):
        x = tokens(1, BLOCK, 2)
        seen.append(x)
        got, stages = sparse_video_attention(x, x, x, cache=cache, block=16, select=select, return_stages=True)
        whole = torch.cat(seen, 1)
        want = sparse_video_attention(x, whole, whole, block=16, select=select)
        assert torch.allclose(got, want, atol=1e-6)
        share = torch.as_tensor(sparsity).expand(2)
        expected = ((1 - share) * (step + 1)).double().ceil().clamp(min=1)
        assert stages.index.counts.flatten().tolist() == expected.int().tolist()


@pytest.mark.parametrize("mistake", [
    {"gate_fine": torch.rand(3)}, {"gate_fine": 0.5}, {"scale": -1.0},
    {"select": SelectOptions(method="top_k", top_k=torch.ones(7))}, {"query_sizes": torch.ones(7, dtype=torch.int32)},
], ids=["gate", "number", "scale", "select", "sizes"])  # fmt: skip
def test_a_failed_call_appends_nothing(mistake):
    cache, clean = (cache_of(10, heads=2) for _ in range(2))
    first, second = (tokens(1, BLOCK, 2) for _ in range(2))
    for c in (cache, clean):
        sparse_video_attention(first, first, first, cache=c, block=16)
    with pytest.raises((DtypeError, ShapeError, ValueRangeError)):
        sparse_video_attention(second, second, second, cache=cache, block=16, **mistake)
    assert cache.tokens == 16
    assert cache.lengths.tolist() == [16]
    assert cache.block_sizes.sum() == 16
    again = (sparse_video_attention(second, second, second, cache=c, block=16) for c in (cache, clean))
    assert torch.equal(*again)


@pytest.mark.parametrize("name", ["weight_k", "weight_v", "gate_coarse", "gate_fine"])
def test_a_cache_enters_no_graph(name):
    cache, x = cache_of(10, heads=2), tokens(1, BLOCK, 2)
    parameter = torch.nn.Parameter(torch.rand(2, 16) if name.startswith("weight") else torch.rand(2))
    with pytest.raises(Unsupported, match=f"{name} requires a gradient"):
        sparse_video_attention(x, x, x, cache=cache, block=16, **{name: parameter})
    assert cache.tokens == 0
    with torch.no_grad():
        sparse_video_attention(x, x, x, cache=cache, block=16, **{name: parameter})
    assert not cache.rows_k.requires_grad


def test_queries_are_among_the_keys():
    with pytest.raises(ShapeError, match="q has 48 tokens, but the cache holds 16"):
        sparse_video_attention(tokens(1, 48, 2), *[tokens(1, BLOCK, 2)] * 2, cache=cache_of(10, heads=2), block=16)


def test_what_a_map_forces_beyond_a_bound_stays():
    force = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    for most in (2, torch.tensor([2])):
        index = sparse.select(torch.rand(1, 1, 2, 6), max_blocks=most, force=force).index
        assert index.counts.flatten().tolist() == [6, 6]


def test_dense_projections_keep_their_dtype_under_autocast():
    x, weight = tokens(1, 32, 2), torch.rand(2, 32)
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

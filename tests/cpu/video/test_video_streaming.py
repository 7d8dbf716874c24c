"""Streaming: what a cache gives is what the whole sequence gives, block after block, contiguous or in pages."""

import pytest
import torch

from cases import judge
from tilefold import BlockIndex, DtypeError, ShapeError, Unsupported, ValueRangeError, reference
from tilefold.sparse import CoarseOptions, SelectOptions, VideoCache, sparse_video_attention, streaming

pytestmark = pytest.mark.interpreter
BLOCK, DIM = 16, 16
TOP = SelectOptions("top_k", top_k=2)


def tokens(batch, seq, heads, dim=DIM):
    return torch.randn(batch, seq, heads, dim)


def check(out, stages, q, k, v, sizes, select, **options):
    """Against the oracle over everything that came, on the lists that were used."""
    held = k.shape[1] // BLOCK
    listed = stages.index.to_map()
    assert not listed[..., held:].any()
    index = BlockIndex.from_map(listed[..., :held], block_q=BLOCK, block_k=BLOCK, seq_q=q.shape[1], seq_k=k.shape[1],
                                block_sizes=sizes)  # fmt: skip
    exact, plain = (
        reference.sparse_video_attention(
            q,
            k,
            v,
            select=select,
            index=index,
            block=BLOCK,
            block_sizes=sizes,
            dtype=dtype,
            return_stages=True,
            **options,
        )
        for dtype in (torch.float64, torch.float32)
    )
    judge(out, exact[0], plain[0], f"{select} {options}")
    assert torch.equal(stages.scores[..., held:], torch.zeros_like(stages.scores[..., held:]))
    judge(stages.scores[..., :held], exact[1].scores, plain[1].scores, "scores")
    wanted = reference.select(exact[1].scores, **select.arguments(), block_q=BLOCK, block_k=BLOCK, seq_q=q.shape[1],
                              seq_k=k.shape[1], block_sizes=sizes)  # fmt: skip
    assert torch.equal(listed[..., :held].cpu(), wanted.keep.cpu())


@pytest.mark.parametrize("page_size", [None, 16, 24])
@pytest.mark.parametrize("select", [TOP, SelectOptions("gini", tau_min=0.3, tau_max=0.6)])
def test_block_by_block(page_size, select):
    """Two blocks, then one at a time; the newest block of queries over all that came."""
    cache = VideoCache(2, 6 * BLOCK, 1, DIM, block=BLOCK, page_size=page_size, dtype=torch.float32)
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
    cache = VideoCache(1, 5 * BLOCK, 1, DIM, block=BLOCK, dtype=torch.float32)
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
    cache = VideoCache(1, 4 * BLOCK, 1, DIM, block=BLOCK, dtype=torch.float32)
    for _ in range(3):
        x = tokens(1, BLOCK, 1)
        sparse_video_attention(x, x, x, cache=cache, select=TOP, block=BLOCK)
    assert seen == [BLOCK] * 6


def test_other_layout_and_clear():
    x = tokens(1, 2 * BLOCK, 2)
    q = tokens(1, BLOCK, 2)
    cache = VideoCache(1, 4 * BLOCK, 2, DIM, block=BLOCK, dtype=torch.float32)
    first = sparse_video_attention(q, x, x, cache=cache, select=TOP, block=BLOCK)
    cache.clear()
    turned = (t.transpose(1, 2) for t in (q, x, x))
    again = sparse_video_attention(*turned, cache=cache, select=TOP, block=BLOCK, layout="bhsd")
    assert torch.equal(first, again.transpose(1, 2))
    assert str(cache) == "VideoCache(1 x 32 of 64 tokens in blocks of 16)"


def test_forced_blocks_are_counted_from_the_newest():
    cache = VideoCache(1, 8 * BLOCK, 1, DIM, block=BLOCK, dtype=torch.float32)
    x = tokens(1, 4 * BLOCK, 1)
    options = {"cache": cache, "block": BLOCK, "return_stages": True}
    select = SelectOptions("top_k", top_k=1, force_self=True)
    _, stages = sparse_video_attention(x[:, -BLOCK:], x, x, select=select, **options)
    assert stages.index.to_map()[0, 0, 0].nonzero().flatten().tolist() == [3]
    y = tokens(1, BLOCK, 1)
    _, stages = sparse_video_attention(y, y, y, select=SelectOptions("top_k", top_k=1, local_window=1), **options)
    assert stages.index.to_map()[0, 0, 0].nonzero().flatten().tolist() == [3, 4]


def test_refusals():
    cache = VideoCache(1, 2 * BLOCK, 1, DIM, block=BLOCK, dtype=torch.float32)
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

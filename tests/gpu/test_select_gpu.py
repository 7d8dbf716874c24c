"""Selection on a GPU: every kind of row against the oracle, captured into CUDA graphs, never synchronising, the same bits."""

import pytest
import torch

import tilefold
from cases.device import DEVICE, captured, no_waiting
from cases.select import KINDS, held, kept, rows
from tilefold import reference, sparse, video

METHODS = {
    "gini": {},
    "tau": {"tau": lambda g: 0.9 - 0.5 * g},
    "top_p": {"method": "top_p", "top_p": 0.7},
    "top_k": {"method": "top_k", "top_k": 36},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_kinds_of_rows(kind, method):
    held(rows(kind, 2, 3, 20, 364).to(DEVICE), **METHODS[method])


@pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 64, 65, 364, 500, 1000, 1024, 1025, 2048, 4096, 4097])
@pytest.mark.parametrize("forced", [False, True])
def test_lengths_of_rows(blocks, forced):
    """One warp and several warps a row, and the path of long rows."""
    scores = rows("peaked", 1, 2, 5, blocks).to(DEVICE)
    options = {"local_window": 1, "force": torch.rand(5, blocks, device=DEVICE) < 0.05} if forced else {}
    held(scores, **options)
    held(rows("tied", 1, 2, 5, blocks).to(DEVICE), method="top_p", top_p=0.6, **options)


@pytest.mark.parametrize("blocks", [33, 364, 1260, 4096, 4097])
def test_logits(blocks):
    """Their lists are those of their softmax, but where a score is next to the last one kept."""
    logits = 3 * torch.randn(1, 2, 20, blocks, device=DEVICE)
    scores = (logits.double() * 0.4).softmax(-1).float()
    for options in ({"method": "top_k", "top_k": 20}, {"method": "top_p", "top_p": 0.7}, {}):
        found, wanted = sparse.select(logits, softmax_scale=0.4, **options), sparse.select(scores, **options)
        same = (kept(found) == kept(wanted)).all(-1).to(DEVICE)
        assert same.float().mean() > 0.9
        assert bool(((found.mass - wanted.mass).abs()[same] <= 1e-5).all())
        torch.testing.assert_close(found.gini, wanted.gini, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_means(dtype):
    """16-bit means are multiplied as such, with sums in fp32; two sequences, KV heads that are shared."""
    tiling = sparse.GridTiling((6, 9, 13), (4, 4, 4))
    site = video.Site(0, 1, 4, None, tiling, 0.2, {})
    q, k = (torch.randn(2, tiling.padded, heads, 64, device=DEVICE, dtype=dtype) for heads in (4, 2))
    found = video.Pooled(sparsity=0.5).logits(q, k, site)
    sizes = tiling.sizes(q.device)
    rows_q, rows_k = (sparse.project(x, block=64, block_sizes=sizes).double().transpose(1, 2) for x in (q, k))
    wanted = rows_q @ rows_k.repeat_interleave(2, 1).transpose(-1, -2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    held(rows("random", 1, 2, 20, 364).to(DEVICE, dtype))
    held(rows("infinite", 1, 2, 20, 365).to(DEVICE, dtype)[..., 1:], force_self=True)


def test_settings_per_head_and_sizes():
    heads = torch.tensor([0.3, 0.6, 0.9], device=DEVICE)
    sizes = torch.randint(0, 65, (2, 3, 100), dtype=torch.int32, device=DEVICE)
    scores = rows("random", 2, 3, 20, 100).to(DEVICE)
    held(scores, tau_min=heads / 2, tau_max=heads, block_sizes=sizes, min_blocks=(9 * heads).int())
    held(scores, method="top_k", sparsity=heads, max_blocks=(60 * heads)[:, None])
    held(scores.permute(2, 1, 0, 3), method="top_p", top_p=heads, force_first=2)


@pytest.mark.no_poison
@pytest.mark.parametrize("blocks", [364, 5000])
@pytest.mark.parametrize("method", METHODS)
def test_a_replay_selects_by_the_scores_of_that_replay(method, blocks):
    scores = rows("random", 1, 2, 20, blocks).to(DEVICE)
    options = {**METHODS[method], "force_self": True, "seq_q": 1280, "seq_k": 64 * blocks}
    graph, made = captured(lambda: sparse.select(scores, **options))
    seen = []
    for kind in ("peaked", "tied", "nan"):
        scores.copy_(rows(kind, 1, 2, 20, blocks))
        graph.replay()
        fresh = sparse.select(scores.clone(), **options)
        assert torch.equal(made.index.indices, fresh.index.indices)
        assert torch.equal(made.index.counts, fresh.index.counts)
        assert torch.equal(made.mass, fresh.mass)
        seen.append(kept(made))
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.no_poison
def test_a_graph_from_scores_to_attention():
    """Select, index and the fine stage in one capture: other scores, other blocks, still right."""
    q, k, v = (torch.randn(1, 640, 2, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    scores = rows("random", 1, 2, 10, 10).to(DEVICE)

    def stage():
        index = sparse.select(scores, method="top_p", top_p=0.4).index
        return index, tilefold.sparse_attention(q, k, v, index)

    graph, (index, out) = captured(stage)
    for seed in (1, 2):
        scores.copy_(rows("peaked", 1, 2, 10, 10, seed=seed))
        graph.replay()
        args = (*(t.cpu() for t in (q, k, v)), index.to("cpu"))
        oracle, plain = (reference.sparse_attention(*args, **dtype)[0] for dtype in ({}, {"dtype": torch.bfloat16}))
        assert reference.compare(out.cpu(), oracle, plain).ok


@pytest.mark.no_poison
@pytest.mark.parametrize("blocks", [364, 5000])
@pytest.mark.parametrize("method", METHODS)
def test_no_synchronisation(method, blocks):
    scores = rows("random", 1, 2, 20, blocks).to(DEVICE)
    force = torch.rand(20, blocks, device=DEVICE) < 0.01
    sparse.select(scores, **METHODS[method], force=force)
    with no_waiting():
        sparse.select(scores, **METHODS[method], force=force)
        sparse.index(scores > 0.5)


@pytest.mark.no_poison
def test_the_same_bits_every_run():
    scores = rows("tied", 1, 12, 364, 364).to(DEVICE)
    first = sparse.select(scores, local_window=1)
    for _ in range(5):
        again = sparse.select(scores, local_window=1)
        assert torch.equal(again.index.indices, first.index.indices)
        assert torch.equal(again.index.counts, first.index.counts)
        assert all(torch.equal(getattr(again, n), getattr(first, n)) for n in ("gini", "tau", "mass"))


@pytest.mark.no_poison
def test_the_shape_of_a_video():
    """Twelve heads of 364 x 364 blocks, all rows."""
    held(rows("peaked", 1, 12, 364, 364).to(DEVICE), force_self=True)

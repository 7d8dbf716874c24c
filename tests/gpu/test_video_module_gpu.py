"""The video module on a GPU: real head dims in bf16 against fp64, captured graphs, the compiler, no host synchronisation."""

import pytest
import torch

from cases.device import DEVICE, alike_every_run, no_waiting
from cases.video import gradients_held
from tilefold.nn import SparseVideoAttention
from tilefold.sparse import CoarseOptions, SelectOptions
from tilefold.video.scene import Scene
from video_next_frame import Training, train
from video_reconstruction import reconstruct, scene_qkv

pytestmark = pytest.mark.no_poison
GRID, RAGGED = (8, 12, 16), (7, 13, 18)


def module(heads=4, head_dim=64, dtype=torch.bfloat16, **options):
    made = SparseVideoAttention(
        heads * head_dim, heads, **{"kv_heads": heads // 2, "grid": GRID, **options}, device=DEVICE
    )
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return made.to(dtype)


def tokens(made, batch=1):
    t, h, w = made.grid
    return torch.randn(batch, t * h * w, made.dim, device=DEVICE, dtype=made.qkv.weight.dtype)


@pytest.mark.parametrize("grid", [GRID, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("coarse", ["block", "dense", "pooled", None])
def test_gradients(coarse, grid):
    made = module(grid=grid, coarse=coarse)
    gradients_held(made, tokens(made))


def test_head_dim_128():
    made = module(head_dim=128, select=SelectOptions("top_k", sparsity=0.65))
    gradients_held(made, tokens(made, batch=2))


def test_a_captured_graph_follows_its_input():
    """Another input in the same memory selects other blocks, and the replay is what a call gives."""
    made = module(grid=RAGGED)
    x = tokens(made)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            made(x, return_stages=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        out, got = made(x, return_stages=True)
    seen = []
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        with torch.no_grad():
            want, other = made(x, return_stages=True)
        assert torch.equal(out, want)
        assert torch.equal(got.index.counts, other.index.counts)
        seen.append(got.index.to_map())
    assert not torch.equal(seen[0], seen[1])


def test_no_host_synchronisation():
    made = module(grid=RAGGED)
    x = tokens(made).requires_grad_()
    made(x).float().square().sum().backward()
    torch.cuda.synchronize()
    with no_waiting():
        made(x).float().square().sum().backward()


def test_the_same_bits_every_run():
    made = module(grid=RAGGED)
    x = tokens(made).requires_grad_()

    def run():
        out = made(x)
        return out, *torch.autograd.grad(out.float().square().sum(), [x, *made.parameters()])

    alike_every_run(run, 2)


def test_inductor():
    torch._dynamo.reset()
    made = module(qk_norm=True)
    x = tokens(made)
    compiled = torch.compile(made, fullgraph=True)
    want = made(x)
    out = compiled(x)
    assert float((out - want).detach().float().norm() / want.detach().float().norm()) < 0.02
    out.float().square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in made.parameters())


@pytest.mark.large
def test_the_published_shape():
    """N = 23296, 12 heads of 128: forward and backward are finite, and no [N, N] is made."""
    made = SparseVideoAttention(
        1536, 12, grid=(16, 28, 52), device=DEVICE, dtype=torch.bfloat16, select=SelectOptions("top_k", sparsity=0.651)
    )
    x = tokens(made).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made(x).float().square().mean().backward()
    assert bool(x.grad.isfinite().all())
    assert torch.cuda.max_memory_allocated() - before < 4 << 30


def test_reconstruction_of_real_structure():
    (q, k, v), tiling = scene_qkv(Scene(frames=16, height=96, width=128), (1, 4, 4), 4, 64, device=DEVICE)
    kept = [SelectOptions("top_k", top_k=round(tiling.block_count * (1 - s))) for s in (0.3, 0.6, 0.9)]
    for kind in ("block", "pooled"):
        rows = reconstruct(q, k, v, tiling, kept, CoarseOptions(kind))
        for row in rows:
            print(kind, row)
            assert row.best >= row.mass > row.random
        assert rows[0].mass > rows[1].mass > rows[2].mass


def test_training_goes_as_with_dense_attention():
    dense, sparse = (
        train(Training(attention=one), device=DEVICE)
        for one in ({"coarse": None}, {"select": SelectOptions("top_k", top_k=4)})
    )
    assert dense.copy > 4 * dense.held_out
    assert sparse.held_out < 1.3 * dense.held_out

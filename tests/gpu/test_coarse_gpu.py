"""The coarse and fuse stages on a GPU: planned tiles at real sizes, forward and backward, graphs, the same bits, memory."""

import math

import pytest
import torch

from cases import hold_back, judge, qkv, rand, same
from cases.coarse import held, padding, run, sized, weights
from cases.device import DEVICE, alike_every_run, followed, no_waiting
from tilefold import reference, sparse

pytestmark = pytest.mark.no_poison


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_planned_tiles(dim, dtype):
    """Tails, groups, tiles of rows that end inside the last one; masked and not, so that boxes and pointers are met."""
    q, k, v = qkv(2, 500, 5000, 4, 2, dim, dtype=dtype, device=DEVICE)
    w = weights("block", 2, 5000, 64, device=DEVICE)
    held(q, k, v, *w)
    sizes = torch.randint(0, 65, (79,), dtype=torch.int32, device=DEVICE)
    queries = torch.randint(0, 65, (2, 4, 8), dtype=torch.int32, device=DEVICE)
    # A mean of at most 8 of 64 tokens leaves fp32 gradients whose error is that of terms larger than their sum.
    few = sizes if dtype == torch.float32 else sizes.clamp(max=8)
    held(q, k, v, *w, block_sizes=few, query_sizes=queries, reduction="max")


@pytest.mark.parametrize("kind", ["block", "dense", "pooled"])
@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_kinds(kind, reduction):
    q, k, v = qkv(1, 1024, 4096, 8, 2, 128, 64, dtype=torch.bfloat16, device=DEVICE)
    w = weights(kind, 2, 4096, 64, dtype=torch.bfloat16, device=DEVICE)
    held(q, k, v, *w, kind=kind, reduction=reduction)


@pytest.mark.parametrize("block", [16, 32, 128, 256])
def test_blocks(block):
    q, k, v = qkv(1, 1000, 3000, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    blocks = -(-1000 // block)
    queries = torch.randint(0, block + 1, (blocks,), dtype=torch.int32, device=DEVICE)
    held(q, k, v, block=block)
    held(q, k, v, block=block, query_sizes=queries)


def test_poisoned_padding():
    q, k, v = qkv(1, 640, 1000, 4, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    sizes = torch.randint(0, 65, (16,), dtype=torch.int32, device=DEVICE)
    sizes[::5] = 0
    queries = torch.randint(0, 65, (10,), dtype=torch.int32, device=DEVICE)
    for kind in ("block", "dense", "pooled"):
        w = weights(kind, 1, 1000, 64, dtype=torch.bfloat16, device=DEVICE)
        options = {"kind": kind, "block_sizes": sizes, "query_sizes": queries}
        clean = run(sparse.coarse, (q, k, v, *w), options)
        dirty_q, dirty_k, dirty_v = q.clone(), k.clone(), v.clone()
        dirty_q[:, padding(640, 64, queries)] = math.nan
        dirty_k[:, padding(1000, 64, sizes)] = math.nan
        dirty_v[:, padding(1000, 64, sizes)] = math.nan
        dirty = run(sparse.coarse, (dirty_q, dirty_k, dirty_v, *w), options)
        for a, b in zip((*clean[0], *clean[1]), (*dirty[0], *dirty[1]), strict=True):
            assert torch.equal(a, b)


def test_strides_without_descriptors():
    """Rows at odd addresses: pointers serve them."""
    q, k, v = (t[..., 1:] for t in qkv(1, 300, 700, 2, 2, 65, dtype=torch.bfloat16, device=DEVICE))
    held(q, k, v)
    held(*(t.transpose(1, 2) for t in (q, k, v)), layout="bhsd")


@pytest.mark.large
def test_the_video_shape():
    """B=1, H=12, N=23296, D=128 bf16; the oracle is asked for one head."""
    q, k, v = (rand(1, 23296, 12, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    got = sparse.coarse(q, k, v, return_lse=True)
    one = [t[:, :, 5:6] for t in (q, k, v)]
    want, plain = (reference.coarse(*one, return_lse=True, dtype=d) for d in (torch.float64, torch.bfloat16))
    judge(got.out[:, :, 5:6], want.out, plain.out, "out")
    judge(got.scores[:, 5:6], want.scores, plain.scores, "scores")
    judge(got.lse[:, 5:6], want.lse, plain.lse, "lse")
    assert torch.allclose(got.scores.sum(-1), torch.ones(1, 12, 364, device=DEVICE), atol=1e-3)


def test_memory():
    """Forward: rows, out, lse, scores, and nothing of size [heads, tokens, blocks]."""
    q, k, v = (rand(1, 8192, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    sparse.coarse(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = sparse.coarse(q, k, v)
    peak = torch.cuda.max_memory_allocated() - before
    rows, out, lse, scores = 2 * 128 * 8 * 128 * 2, 8192 * 8 * 128 * 2, 8 * 8192 * 4, 8 * 128 * 128 * 4
    assert peak <= rows + out + lse + scores + 1024 * 1024, (peak, result.out.shape)


def test_graph_replays_with_changed_inputs():
    """Values, sizes and weights may change under a captured graph, forward and backward; nothing is read on the host."""
    inputs = [t.requires_grad_() for t in qkv(1, 1024, 2048, 4, 4, 128, dtype=torch.bfloat16, device=DEVICE)]
    w = weights("block", None, 2048, 64, device=DEVICE)[0].requires_grad_()
    sizes = torch.full((32,), 64, dtype=torch.int32, device=DEVICE)
    gate = rand(1, 1024, 4, device=DEVICE).requires_grad_()

    def step():
        rough = sparse.coarse(*inputs, weight_k=w, block_sizes=sizes, return_lse=True)
        out = sparse.fuse(rough.out, inputs[0], gate)
        return out, rough.scores, *torch.autograd.grad(out.float().square().sum(), (*inputs, w, gate))

    def change():
        for t in inputs:
            t.copy_(torch.randn_like(t))
        sizes.copy_(torch.randint(0, 65, (32,)))

    followed(step, change, change)


def test_no_synchronisation():
    q, k, v = (t.requires_grad_() for t in qkv(1, 512, 512, 4, 4, 64, dtype=torch.bfloat16, device=DEVICE))
    sizes = sized([64] * 8, device=DEVICE)
    dout = rand(1, 512, 4, 64, dtype=torch.bfloat16, device=DEVICE)

    def step():
        for kind in ("block", "pooled"):
            got = sparse.coarse(q, k, v, kind=kind, block_sizes=sizes, query_sizes=sizes)
            torch.autograd.grad(sparse.fuse(got.out, None), (q, k, v), dout)

    step()
    with no_waiting():
        step()


def test_the_same_bits_every_run():
    inputs = (
        *qkv(2, 3000, 5000, 4, 2, 128, dtype=torch.bfloat16, device=DEVICE),
        *weights("block", 2, 5000, 64, device=DEVICE),
    )
    first, *others = (run(sparse.coarse, inputs, {}) for _ in range(5))
    for other in others:
        assert same((*first[0], *first[1]), (*other[0], *other[1]))


@pytest.mark.parametrize("kind", ["block", "pooled"])
def test_inductor(kind):
    torch._dynamo.reset()
    q, k, v = (t.requires_grad_() for t in qkv(1, 256, 512, 4, 2, 64, dtype=torch.bfloat16, device=DEVICE))
    gate = rand(4, device=DEVICE).requires_grad_()

    def layer(q, k, v, gate):
        return sparse.fuse(sparse.coarse(q, k, v, kind=kind).out, q, gate)

    results = []
    for fn in (layer, torch.compile(layer, fullgraph=True)):
        out = fn(q, k, v, gate)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v, gate))))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=2e-2, rtol=2e-2)


# ---------------------------------------------------------------- fuse


B, N, H, D = 2, 1000, 12, 128
GATES = [(None, None), ((H,), (B, N, H)), ((B, N, H, 1), (B, N, H, D)), ((1, 1, H, D), (1, N, 1, 1))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shapes", GATES)
def test_gates(shapes, dtype):
    a, b = rand(B, N, 2, H, D, dtype=dtype, device=DEVICE).unbind(2)
    gates = [None if s is None else rand(*s, dtype=dtype, device=DEVICE).requires_grad_() for s in shapes]
    given = (a.detach().requires_grad_(), b.detach().requires_grad_(), *gates)
    hold_back(sparse.fuse(*given), reference.fuse, *given)


def test_the_same_bits_every_run_fuse():
    shapes = (B, N, H, D), (B, N, H, D), (H,), (1, 1, H, D)
    inputs = [rand(*shape, device=DEVICE).requires_grad_() for shape in shapes]
    dout = rand(B, N, H, D, device=DEVICE)
    alike_every_run(lambda: torch.autograd.grad(sparse.fuse(*inputs), inputs, dout), 4)


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    x = torch.ones(1, 70000, 256, 128, dtype=torch.bfloat16, device=DEVICE)
    gate = torch.full((256,), 2.0, device=DEVICE)
    out = sparse.fuse(x, x, gate)
    assert float(out[0, -1, -1, -1]) == 3.0 and float(out[0, 35000, 100].float().sum()) == 3.0 * 128

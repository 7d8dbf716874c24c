"""fastvideo-kernel's functions: their contract written out in fp64, gradients, what is refused."""

import math

import pytest
import torch

from cases import judge, rand
from cases.refusals import refuses
from tilefold import sparse_attention
from tilefold.compat.fastvideo_kernel import block_sparse_attn, block_sparse_attn_from_indices, video_sparse_attn
from tilefold.errors import ShapeError, TilefoldError, ValueRangeError
from tilefold.reference import deviating
from tilefold.sparse import BlockIndex
from torch_cpu import torch_cpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("torch_cpu")
BLOCK, HEADS, DIM = 64, 2, 32
SIZES = torch.tensor([64, 40, 64, 1, 64])


def padded(sizes, batch=2, dtype=torch.float32):
    """[batch, heads, seq, dim], 0 past each block's size."""
    x = rand(batch, HEADS, len(sizes) * BLOCK, DIM, dtype=dtype)
    live = (torch.arange(BLOCK) < sizes[:, None]).flatten()
    return x * live[:, None].to(dtype)


def contract(q, k, v, keep, sizes):
    """(out, base-2 lse) of the listed blocks' valid tokens."""
    live = (torch.arange(BLOCK) < sizes[:, None]).flatten()
    seen = keep.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2) & live
    scores = (q @ k.mT / math.sqrt(DIM)).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1) / math.log(2)


def vsa(q, k, v, q_sizes, keep, weight):
    """The sum of both branches; a query past its block's size gives 0."""
    means = [x.unflatten(2, (len(n), -1)).sum(3) / n.view(-1, 1) for x, n in ((q, q_sizes), (k, SIZES), (v, SIZES))]
    coarse = ((means[0] @ means[1].mT / math.sqrt(DIM)).softmax(-1) @ means[2]).repeat_interleave(BLOCK, 2)
    live = (torch.arange(BLOCK) < q_sizes[:, None]).flatten()
    return (coarse * weight + contract(q, k, v, keep, SIZES)[0]) * live[:, None]


def listed(q, k, q_sizes, topk):
    """The topk blocks of highest score, bool [batch, heads, Q blocks, KV blocks]."""
    means = [x.double().unflatten(2, (len(n), -1)).sum(3) / n.view(-1, 1) for x, n in ((q, q_sizes), (k, SIZES))]
    scores = means[0] @ means[1].mT
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, scores.topk(topk).indices, True)


def held(q, k, v, keep):
    """out and lse against fp64; gradients those of `sparse_attention` over the same lists, to the bit."""
    out, lse = block_sparse_attn(q, k, v, keep, SIZES)
    want, plain = (contract(*(x.detach().to(d) for x in (q, k, v)), keep, SIZES) for d in (torch.float64, q.dtype))
    judge(out.detach(), want[0], plain[0], "out")
    judge(lse.detach(), want[1], plain[1].float(), "lse")
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    index = BlockIndex.from_map(keep, block_sizes=SIZES.int())
    own, other = block_sparse_attn(*inputs, keep, SIZES)[0], sparse_attention(*inputs, index, layout="bhsd")
    dout = rand(*own.shape, dtype=q.dtype)
    for a, b in zip(*(torch.autograd.grad(one, inputs, dout) for one in (own, other)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_sparse(dtype):
    torch.manual_seed(0)
    q, k, v = (padded(SIZES, dtype=dtype) for _ in range(3))
    keep = torch.rand(2, HEADS, 5, 5) < 0.5
    keep[..., 0] = True
    held(q, k, v, keep)
    order = keep.int().argsort(dim=-1, descending=True, stable=True)
    out, lse = block_sparse_attn_from_indices(q, k, v, order, keep.sum(-1), SIZES)
    other = block_sparse_attn(q, k, v, keep, SIZES)
    assert torch.equal(out, other[0]) and torch.equal(lse, other[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topk", [1, 3, 5])
def test_video_sparse(dtype, topk):
    """Output and gradients against fp64; one number of block_size stands for three."""
    torch.manual_seed(1)
    q_sizes = torch.tensor([64, 40])
    q, k, v = padded(q_sizes, dtype=dtype), *(padded(SIZES, dtype=dtype) for _ in range(2))
    weight, upstream = (rand(2, HEADS, 128, DIM, dtype=dtype) for _ in range(2))
    keep = listed(q, k, q_sizes, topk)
    inputs = [x.requires_grad_() for x in (q, k, v, weight)]
    out = video_sparse_attn(q, k, v, SIZES, q_sizes, topk, 4, weight)
    got = out, *torch.autograd.grad(out, inputs, upstream)
    exact = [x.detach().double().requires_grad_() for x in inputs]

    def wanted():
        want = vsa(*exact[:3], q_sizes, keep, exact[3])
        return want, *torch.autograd.grad(want, exact, upstream.double())

    rows = zip(("out", "dq", "dk", "dv", "dweight"), got, wanted(), deviating(wanted, dtype, kept=dtype), strict=True)
    keys, queries = ((torch.arange(BLOCK) < n[:, None]).flatten() for n in (SIZES, q_sizes))
    for name, *three in rows:  # what lies past a block's size gets no gradient
        live = keys if name in ("dk", "dv") else queries
        judge(*(x.detach()[:, :, live] for x in three), name)
    plain = video_sparse_attn(q, k, v, SIZES, q_sizes, topk, (4, 4, 4))
    assert torch.equal(plain, video_sparse_attn(q, k, v, SIZES, q_sizes, topk, (2, 4, 8)))
    assert torch.equal(plain, video_sparse_attn(q, k, v, SIZES, q_sizes, topk, 4, torch.ones(1, 1, 1, 1, dtype=dtype)))


def test_refusals():
    q = padded(SIZES)
    refuses(ValueRangeError, "topk must be at least 1, got 0", video_sparse_attn, q, q, q, SIZES, SIZES, 0)
    refuses(ShapeError, "expected blocks of 128 tokens", video_sparse_attn, q, q, q, SIZES, SIZES, 1, (2, 8, 8))
    with pytest.raises(ShapeError, match="a multiple of 7 blocks"):
        block_sparse_attn(q, q, q, torch.ones(1, 1, 7, 5, dtype=torch.bool), SIZES)
    with pytest.raises(TilefoldError, match="block_sizes"):
        block_sparse_attn(q, q, q, torch.ones(1, 1, 5, 5, dtype=torch.bool), SIZES[:4])

"""The coarse and fuse stages under torch.compile, opcheck, FakeTensor and torch.func: opaque operators with the eager result."""

import pytest
import torch

from cases import graph_gives, one_graph, qkv, rand, same
from cases.coarse import sized, weights
from tilefold import sparse
from tilefold.ops.sparse.coarse import COARSE, CoarseCall
from tilefold.ops.sparse.fuse import FUSE
from tilefold.ops.sparse.project import NAMES, PROJECT, SPREAD

pytestmark = pytest.mark.no_poison

SIZES = [16, 0, 1]


def layer(q, k, v, w, gate, heads, kind, sizes):
    """Coarse and fuse with a tensor that stands for the fine branch."""
    rough = sparse.coarse(2 * q, k, v, weight_k=w, weight_v=w, kind=kind, block=16, block_sizes=sizes, query_sizes=sizes,
                          return_lse=True)  # fmt: skip
    out = sparse.fuse(rough.out, q * 0.5, gate, heads)
    return out + 1, rough.scores, rough.lse


def inputs_of(kind, device):
    q, k, v = qkv(1, 33, 33, 4, 2, 16, device=device)
    w = weights(kind, 2, 33, 16, device=device)[0]
    leaves = (q, k, v, w, rand(1, 33, 4, device=device), rand(4, device=device))
    return [t.requires_grad_() for t in leaves], sized(SIZES, device=device)


@pytest.mark.parametrize("kind", ["block", "dense", "pooled"])
def test_compile_fullgraph(kind, device):
    """Forward and backward, bit for bit (a dense projection is torch's own product, which a compiler may order differently)."""
    leaves, sizes = inputs_of(kind, device)
    compiled = one_graph(layer)
    results = []
    for fn in (layer, compiled, compiled):
        out, scores, lse = fn(*leaves, kind, sizes)
        assert not scores.requires_grad
        loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
        results.append((out, scores, lse, *torch.autograd.grad(loss, leaves)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b) if kind != "dense" else torch.allclose(a, b, atol=1e-5, rtol=1e-4)


def test_compile_without_gradients(device):
    leaves, sizes = inputs_of("block", device)
    graph_gives(layer, *(t.detach() for t in leaves), "block", sizes)


def test_opcheck(device):
    q, k, v = (t.requires_grad_() for t in qkv(1, 33, 3, 2, 1, 16, device=device))
    sizes = sized(SIZES, device=device)
    w, gate = (rand(*shape, device=device).requires_grad_() for shape in ((2, 16), (2,)))
    rows = rand(1, 3, 2, 16, device=device).requires_grad_()
    torch.library.opcheck(PROJECT.op, (q, w, sizes, 16, 1, "bshd", NAMES))
    torch.library.opcheck(PROJECT.op, (q, None, None, 16, 0, "bshd", NAMES))
    torch.library.opcheck(SPREAD.op, (rows, sizes, 33, 16, "bshd"))
    torch.library.opcheck(COARSE.op, COARSE.flat(q, k, v, CoarseCall(sizes, sizes, 16, None, "mean", "bshd", True)))
    torch.library.opcheck(FUSE.op, (q, q.detach().clone().requires_grad_(), gate, None, "bshd"))


def test_fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = qkv(2, 33, 40, 4, 2, 16, 24, dtype=torch.float16, device=device)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        for kind in ("block", "pooled"):
            out, scores, lse = sparse.coarse(*fakes, kind=kind, block=16, return_lse=True)
            assert (out.shape, out.dtype) == ((2, 33, 4, 24), torch.float16)
            assert (scores.shape, scores.dtype) == ((2, 4, 3, 3), torch.float32)
            assert (lse.shape, lse.dtype) == ((2, 4, 3 if kind == "pooled" else 33), torch.float32)
        assert sparse.fuse(out, out).shape == out.shape


@pytest.mark.parametrize("kind", ["block", "pooled"])
def test_functorch_grad(kind, device):
    leaves, sizes = inputs_of(kind, device)
    plain = [t.detach() for t in leaves]

    def loss(*tensors):
        return layer(*tensors, kind, sizes)[0].square().sum()

    got = torch.func.grad(loss, tuple(range(6)))(*plain)
    want = torch.autograd.grad(loss(*leaves), leaves)
    assert same(got, want)


def test_out_is_refused_inside_a_graph(device):
    x = rand(1, 4, 1, 16, device=device)
    with pytest.raises(Exception, match="out was given under"):
        one_graph(lambda x: sparse.fuse(x, None, out=x))(x)

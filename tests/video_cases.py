"""Shared by the tests of the video module: the module computed by the reference, and the comparison of all gradients with it."""

import copy

import torch

from cases import judge
from tilefold import BlockIndex, reference
from tilefold.nn import SparseVideoAttention


class Oracle(SparseVideoAttention):
    """The module with the reference in place of the kernels, over lists that are given."""

    lists: BlockIndex | None = None

    def attend(self, q, k, v, **options):
        lists = {"index": self.lists} if self.lists is not None else {}
        return reference.sparse_video_attention(q, k, v, **{**options, **lists}, dtype=q.dtype)


def oracle_of(made, index, dtype=torch.float64):
    """A copy in another dtype, computed by the reference over `index`."""
    twin = copy.deepcopy(made).to(dtype)
    twin.__class__, twin.lists = Oracle, index
    return twin


def gradients_held(made, x):
    """Output and gradients of x and of every parameter against fp64 autograd, over the lists that were selected; -> stages."""
    x = x.detach().requires_grad_()
    out, got = made(x, return_stages=True)
    dout = torch.randn_like(out)
    names = ["x", *(n for n, _ in made.named_parameters())]
    results = [(out, *torch.autograd.grad(out, [x, *made.parameters()], dout))]
    for dtype in (torch.float64, x.dtype):
        twin, given = oracle_of(made, got.index, dtype), x.detach().to(dtype).requires_grad_()
        want = twin(given)
        results.append((want, *torch.autograd.grad(want, [given, *twin.parameters()], dout.to(dtype))))
    for what, *three in zip(["out", *(f"gradient of {n}" for n in names)], *results, strict=True):
        judge(*three, what)
    return got

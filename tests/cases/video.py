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
        return reference.sparse_video_attention(q, k, v, **{**options, **lists})


def oracle_of(made, index):
    """A copy in fp64, computed by the reference over `index`."""
    twin = copy.deepcopy(made).double()
    twin.__class__, twin.lists = Oracle, index
    return twin


def gradients_held(made, x):
    """Output and gradients of x and of every parameter against fp64 autograd, over the lists that were selected; -> stages."""
    x = x.detach().requires_grad_()
    out, got = made(x, return_stages=True)
    dout = torch.randn_like(out)
    names = ["x", *(n for n, _ in made.named_parameters())]
    results = [(out, *torch.autograd.grad(out, [x, *made.parameters()], dout))]
    twin, given = oracle_of(made, got.index), x.detach().double().requires_grad_()

    def wanted():
        want = twin(given)
        return want, *torch.autograd.grad(want, [given, *twin.parameters()], dout.double())

    results += [wanted(), reference.deviating(wanted, x.dtype, kept=x.dtype)]
    for what, *three in zip(["out", *(f"gradient of {n}" for n in names)], *results, strict=True):
        judge(*three, what)
    return got

"""The fuse stage on a GPU: gates of every shape at real sizes, forward and backward, many elements, the same bits."""

import pytest
import torch

from cases import judge, rand, same
from cases.device import DEVICE
from tilefold import reference, sparse

pytestmark = pytest.mark.no_poison
B, N, H, D = 2, 1000, 12, 128
GATES = [
    (None, None),
    ((H,), (B, N, H)),
    ((B, N, H, 1), (B, N, H, D)),
    ((1, 1, H, D), (1, N, 1, 1)),
]


def gradients(out, inputs, dout):
    return torch.autograd.grad(out, inputs, dout.to(out.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shapes", GATES)
def test_gates(shapes, dtype):
    a, b = rand(B, N, 2, H, D, dtype=dtype, device=DEVICE).unbind(2)
    gates = [None if s is None else rand(*s, dtype=dtype, device=DEVICE).requires_grad_() for s in shapes]
    given = (a.detach().requires_grad_(), b.detach().requires_grad_(), *gates)
    inputs = [t for t in given if t is not None]
    dout = rand(B, N, H, D, dtype=dtype, device=DEVICE)
    got = sparse.fuse(*given)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    leaves = [t for t in wide if t is not None]
    want, plain = (reference.fuse(*wide, dtype=d) for d in (torch.float64, dtype))
    judge(got, want, plain, f"out {shapes} {dtype}")
    pairs = (got, inputs), (want, leaves), (plain, leaves)
    for t, x, y, z in zip(inputs, *(gradients(r, sought, dout) for r, sought in pairs), strict=True):
        judge(x, y, z, f"gradient of {tuple(t.shape)} {shapes} {dtype}")


def test_the_same_bits_every_run():
    shapes = (B, N, H, D), (B, N, H, D), (H,), (1, 1, H, D)
    inputs = [rand(*shape, device=DEVICE).requires_grad_() for shape in shapes]
    dout = rand(B, N, H, D, device=DEVICE)
    first, *others = (gradients(sparse.fuse(*inputs), inputs, dout) for _ in range(5))
    assert all(same(first, other) for other in others)


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    x = torch.ones(1, 70000, 256, 128, dtype=torch.bfloat16, device=DEVICE)
    gate = torch.full((256,), 2.0, device=DEVICE)
    out = sparse.fuse(x, x, gate)
    assert float(out[0, -1, -1, -1]) == 3.0 and float(out[0, 35000, 100].float().sum()) == 3.0 * 128

"""The fuse stage against its fp64 oracle, forward and backward: gates of every shape, one branch, strides, what is refused."""

import pytest
import torch

from cases import hold_back, rand
from cases.refusals import refuses, refuses_given
from tilefold import reference, sparse
from tilefold.errors import DtypeError, LayoutError, ShapeError, Unsupported, ValueRangeError

B, N, H, D = 2, 37, 3, 24
GATES = {
    "none": (None, None),
    "heads": ((H,), None),
    "tokens": ((B, N, H), (B, N, H, 1)),
    "channels": ((B, N, H, D), (B, N, H)),
    "channels of all tokens": ((1, 1, H, D), (1, 1, 1, D)),
    "batch": ((B, 1, 1, 1), (1, N, 1, 1)),
    "one": ((1, 1, 1, 1), (H,)),
}


def held(*given, layout="bshd"):
    """Result and gradients of everything that is there, of (coarse, fine, gate_coarse, gate_fine)."""
    for t in given:
        if t is not None:
            t.requires_grad_()
    got = sparse.fuse(*given, layout=layout)
    assert got.is_contiguous()
    hold_back(got, reference.fuse, *given, layout=layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", GATES)
def test_gates(name, dtype, device):
    """The reference rounds the sums over broadcast dimensions in the gate's dtype, which is fp32 here as in a module."""
    a, b = (rand(B, N, H, D, dtype=dtype, device=device) for _ in range(2))
    held(a, b, *(None if shape is None else rand(*shape, device=device) for shape in GATES[name]))


@pytest.mark.parametrize("name", ["heads", "tokens", "channels of all tokens"])
def test_gates_in_the_branches_dtype(name, device):
    a, b = (rand(B, N, H, D, dtype=torch.bfloat16, device=device) for _ in range(2))
    held(a, b, *(None if s is None else rand(*s, dtype=torch.bfloat16, device=device) for s in GATES[name]))


def test_heads_first(device):
    a, b = (rand(B, H, N, D, device=device) for _ in range(2))
    for shapes in (((H,), (B, H, N)), ((B, H, N, D), (1, H, 1, 1)), (None, (B, H, 1, D))):
        held(a, b, *(None if s is None else rand(*s, device=device) for s in shapes), layout="bhsd")


def test_one_branch(device):
    x, gate = rand(B, N, H, D, device=device), rand(B, N, H, device=device)
    held(x, None, gate, None)
    held(None, x.detach().clone(), None, gate.detach().clone())
    held(x.detach().clone(), None, None, None)


@pytest.mark.parametrize("dim", [1, 16, 100, 256])
def test_head_dims(dim, device):
    a, b = (rand(1, 5, 2, dim, dtype=torch.float16, device=device) for _ in range(2))
    held(a, b, rand(1, 5, 2, 1, device=device), rand(1, 5, 2, dim, device=device))


def test_strides(device):
    """Branches cut from one tensor, gates that are views of a projection, a gradient that is one number everywhere."""
    a, b = rand(B, N, 2, H, D, device=device).unbind(2)
    gates = rand(B, N, H, 2, device=device).unbind(3)
    held(a, b, *gates)
    held(a.detach(), b.detach(), rand(B, D, H, N, device=device).permute(0, 3, 2, 1), None)
    x = rand(B, N, H, D, device=device).requires_grad_()
    sparse.fuse(x, x.detach(), gates[0].detach(), None).sum().backward()
    assert torch.equal(x.grad, gates[0].detach()[..., None].expand_as(x))


def test_in_place(device):
    """The result may be written over a branch, or elsewhere; never where a gradient is asked for."""
    a, b, gate = rand(B, N, H, D, device=device), rand(B, N, H, D, device=device), rand(B, N, H, device=device)
    want = sparse.fuse(a, b, gate)
    elsewhere = torch.empty(B, H, N, D, device=device).transpose(1, 2)
    assert sparse.fuse(a, b, gate, out=elsewhere) is elsewhere
    assert torch.equal(elsewhere, want)
    assert sparse.fuse(a, b, gate, out=b) is b
    assert torch.equal(b, want)
    refuses(Unsupported, "out was given and an input requires a gradient", sparse.fuse, a.requires_grad_(), b, out=b)
    refuses(ShapeError, "out has shape (2, 36, 3, 24)", sparse.fuse, a.detach(), b, out=b[:, 1:])
    with pytest.raises(ValueRangeError, match="several elements share one place"):
        sparse.fuse(a.detach(), b, out=b[:, :1].expand(B, N, H, D))


def test_nothing_to_compute(device):
    for shape in ((0, N, H, D), (B, 0, H, D)):
        a, b = (rand(*shape, device=device).requires_grad_() for _ in range(2))
        gate = rand(H, device=device).requires_grad_()
        out = sparse.fuse(a, b, gate)
        assert out.shape == shape
        *_, dgate = torch.autograd.grad(out.sum(), (a, b, gate))
        assert not dgate.any()


def test_only_what_is_wanted(device):
    """A branch alone requires a gradient, or a gate alone."""
    a, b, gate = rand(B, N, H, D, device=device), rand(B, N, H, D, device=device), rand(B, N, H, device=device)
    for t in (a, b, gate):
        t.requires_grad_()
        want = reference.fuse(a, b, gate, None)
        (got,) = torch.autograd.grad(sparse.fuse(a, b, gate, None).square().sum(), t)
        (exact,) = torch.autograd.grad(want.square().sum(), t)
        assert torch.allclose(got, exact, rtol=1e-4, atol=1e-5)
        t.requires_grad_(False)


def test_second_derivatives_are_refused(device):
    x = rand(1, 4, 1, 16, device=device).requires_grad_()
    gate = rand(1, 4, 1, device=device).requires_grad_()
    (dx,) = torch.autograd.grad(sparse.fuse(x, None, gate).sum(), x, create_graph=True)
    refuses(Unsupported, "first derivatives only", dx.sum().backward)


X = (1, 5, 2, 16)
REFUSED = [
    ({"coarse": None, "fine": None}, ValueRangeError, "coarse and fine are both None: one of the branches must be a tensor"),
    ({"coarse": None, "gate_coarse": torch.zeros(2)}, ValueRangeError,
     "gate_coarse was given without the branch that it multiplies: coarse is None"),
    ({"layout": "nope"}, ValueRangeError, "layout must be 'bshd' or 'bhsd', got 'nope'"),
    ({"fine": torch.zeros(1, 6, 2, 16)}, ShapeError,
     "fine has shape (1, 6, 2, 16), expected [batch, seq, heads, dim]: dimension 1 (seq) is 6, should be 5 as in coarse"),
    ({"fine": torch.zeros(X, dtype=torch.float16)}, DtypeError,
     "fine has dtype float16, but coarse has float32: they must be the same (nothing is converted silently)"),
    ({"coarse": torch.zeros(X, dtype=torch.float64)}, DtypeError,
     "coarse has dtype float64, accepted: float16, bfloat16, float32"),
    ({"gate_fine": torch.zeros(3)}, ShapeError,
     "gate_fine has shape (3,), expected [heads]: dimension 0 (heads) is 3, should be 2"),
    ({"gate_fine": torch.zeros(1, 5, 1)}, ShapeError,
     "gate_fine has shape (1, 5, 1), expected [batch, seq, heads]: dimension 2 (heads) is 1, should be 2"),
    ({"gate_coarse": torch.zeros(1, 5, 2, 8)}, ShapeError,
     "gate_coarse has shape (1, 5, 2, 8), expected [batch|1, seq|1, heads|1, dim|1]: dimension 3 (dim) is 8, should be 16 or 1"),
    ({"gate_coarse": 0.5}, DtypeError, "gate_coarse must be a torch.Tensor or None, got float"),
    ({"gate_coarse": torch.zeros(2, dtype=torch.bool)}, DtypeError,
     "gate_coarse has dtype bool, accepted: float16, bfloat16, float32"),
    ({"coarse": torch.zeros(1, 5, 16, 2).transpose(2, 3)}, LayoutError,
     "coarse needs a contiguous last dimension (stride 1), got strides (160, 32, 1, 2) for shape (1, 5, 2, 16); "
     "call coarse.contiguous() first if a copy is acceptable"),
    ({"coarse": torch.zeros(1, 5, 2, 257)}, ShapeError, "fine has shape (1, 5, 2, 16), expected [batch, seq, heads, dim]: "
     "dimension 3 (dim) is 16, should be 257 as in coarse"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=[text[:40] for _, _, text in REFUSED])
def test_refusals(changes, error, text, device):
    refuses_given(error, text, sparse.fuse, device, **{"coarse": torch.zeros(X), "fine": torch.zeros(X), **changes})

"""add and transpose against their oracles: dtypes, strides, odd sizes, gradients, compilation, what is refused."""

import pytest
import torch

from cases import judge, one_graph, rand
from cases.refusals import refuses
from tilefold import ops, reference
from tilefold.errors import DtypeError, LayoutError, ShapeError, Unsupported, ValueRangeError
from tilefold.plan import device_named
from tilefold.plan.matrix.transpose import METHODS, TransposeProblem, plan_transpose
from tilefold.reference import matrix as oracle

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def held(x, y):
    got = ops.add(x, y)
    assert got.dtype == x.dtype and got.shape == x.shape
    judge(
        got,
        oracle.add(x, y),
        oracle.add(x, y, dtype=x.dtype),
        f"add {tuple(x.shape)} {x.dtype} {x.stride()} {y.stride()}",
    )
    return got


@pytest.mark.parametrize("dtype", FLOATS)
def test_add(dtype, device):
    held(rand(3001, dtype=dtype, device=device), rand(3001, dtype=dtype, device=device))
    x = rand(40, 150, dtype=dtype, device=device)
    held(x, rand(40, 150, dtype=dtype, device=device))
    for strided in (x.t(), x[:, ::3], x[::2], x[:, :1].expand(40, 150), x[5:6], x[:, 7:8]):
        held(strided, rand(*strided.shape, dtype=dtype, device=device))
    held(x[:, 3], rand(40, dtype=dtype, device=device))
    assert held(x.t(), x.t()).stride() == (1, 150)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_add_integers(dtype, device):
    """They wrap around as torch's."""
    x = torch.arange(-700, 700, device=device).to(dtype).reshape(35, 40)
    assert torch.equal(ops.add(x, x.flip(0)), x + x.flip(0))
    assert torch.equal(ops.add(x.t()[3], x.t()[5]), x.t()[3] + x.t()[5])


def test_add_of_nothing(device):
    for shape in ((0,), (0, 5), (5, 0)):
        assert ops.add(torch.ones(shape, device=device), torch.ones(shape, device=device)).shape == shape


def test_add_differentiates(device):
    x, y = (rand(5, 7, device=device).requires_grad_() for _ in range(2))
    dout = rand(5, 7, device=device)
    assert all(torch.equal(g, dout) for g in torch.autograd.grad(ops.add(x, y), (x, y), dout))


def test_add_refuses(device):
    x = torch.ones(4, 5, device=device)
    refuses(DtypeError, "y has dtype float16, but x has float32", ops.add, x, x.half())
    with pytest.raises(DtypeError, match="x has dtype complex64, accepted: float16, bfloat16, float32, float64, uint8"):
        ops.add(x.to(torch.complex64), x.to(torch.complex64))
    refuses(ShapeError, "dimension 1 (n) is 1, should be 5 as in x", ops.add, x, x[:, :1])
    refuses(ShapeError, "y has 1 dimensions, shape (5,); expected [m, n]", ops.add, x, x[0])
    refuses(ShapeError, "x has 3 dimensions", ops.add, x[None], x[None])


# ---------------------------------------------------------------- transpose


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.complex64])
def test_transpose(method, dtype, device):
    step = 16 // torch.empty((), dtype=dtype).element_size()
    x = rand(2 * step, 48, device=device).mul(10).to(dtype)
    for t in (x, x[:, :37], x[:step]):
        got = ops.transpose(t, method=method)
        assert got.is_contiguous() and torch.equal(got, oracle.transpose(t))
    if method != "descriptors":
        for t in (x[1:, 1:], x.t(), x[::2, ::3], x[:, :1].expand(2 * step, 20), x[:0], x[:, :0]):
            got = ops.transpose(t, method=method)
            assert got.is_contiguous() and torch.equal(got, oracle.transpose(t))


def test_transpose_differentiates(device):
    x = rand(5, 33, device=device).requires_grad_()
    dout = rand(33, 5, device=device)
    (dx,) = torch.autograd.grad(ops.transpose(x), x, dout)
    assert torch.equal(dx, dout.t())


@pytest.mark.no_poison
def test_compiled(device):
    def both(x, y):
        return ops.transpose(ops.add(x, y))

    x, y = (rand(8, 20, device=device).requires_grad_() for _ in range(2))
    got = one_graph(both)(x, y)
    assert torch.equal(got, (x + y).t())
    got.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and torch.equal(y.grad, x.grad)


def test_transpose_refuses(device):
    x = torch.ones(8, 8, device=device)
    refuses(ShapeError, "x has 1 dimensions", ops.transpose, x[0])
    refuses(DtypeError, "x has dtype complex128", ops.transpose, x.to(torch.complex128))
    with pytest.raises(
        ValueRangeError, match="method must be one of 'auto', 'registers', 'strides', 'descriptors', got 'smem'"
    ):
        ops.transpose(x, method="smem")
    refuses(LayoutError, "lazy conjugate", ops.transpose, x.to(torch.complex64).conj())
    for t, why in (
        (x.t()[:, :4].contiguous().t(), "descriptors need a contiguous last dimension"),
        (torch.ones(8, 9, device=device), "a row of x is 36 bytes apart from the next: not a multiple of 16"),
        (x[:7], "a row of the result has 28 bytes: not a multiple of 16"),
        (x[:, 1:], "x does not begin at a multiple of 16 bytes"),
    ):
        with pytest.raises(Unsupported, match=f"method 'descriptors' is not possible here: .*{why}"):
            ops.transpose(t, method="descriptors")
        assert torch.equal(ops.transpose(t), t.t())


def test_transpose_plan():
    problem = TransposeProblem(4096, 8192, 2, (8192, 1))
    plan = plan_transpose(problem, device_named("h200"))
    assert plan.bytes == 2 * 2 * 4096 * 8192 and plan.programs == 32 * 64 and not problem.wide
    assert {name for name, _ in plan.rejected} | {plan.method} == set(METHODS)
    assert "no tensor memory accelerator" in dict(plan_transpose(problem, device_named("a100")).rejected)["descriptors"]
    assert TransposeProblem(2**24, 256, 2, (256, 1)).wide
    assert reference.compare(torch.ones(2), torch.ones(2).double(), torch.ones(2)).ok

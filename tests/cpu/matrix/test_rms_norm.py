"""RMSNorm with a residual against its oracle: dtypes, shapes, gradients, compilation, plans, what is refused."""

import pytest
import torch

from cases import graph_gives, hold_back, rand
from cases.refusals import each_refuses
from tilefold import ops, reference
from tilefold.errors import DtypeError, LayoutError, ShapeError, Unsupported, ValueRangeError
from tilefold.plan import device_named
from tilefold.plan.matrix.rms_norm import RMSNormProblem, plan_rms_norm

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def check(*tensors, **options):
    """Hold results, and gradients of all tensors, to the oracle; returns them."""
    own = [t.detach().requires_grad_() for t in tensors]
    return hold_back(ops.rms_norm(*own, **options), reference.rms_norm, *own, names=("out", "sum"), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33, 64), (5, 7, 100), (300, 17), (64,)])
def test_against_the_oracle(shape, dtype, device):
    x, residual = (rand(*shape, dtype=dtype, device=device) for _ in range(2))
    weight = rand(shape[-1], dtype=dtype, device=device)
    check(x, weight)
    got = check(x, weight, residual, eps=1e-3)
    assert torch.equal(got[2], got[4]), "the sum's gradient is that of both"
    assert torch.equal(got[1], x + residual)


def test_strides_and_a_wider_weight(device):
    x = rand(6, 9, 96, dtype=torch.bfloat16, device=device)
    check(x[..., :50], rand(50, device=device), x[..., 40:90])
    check(x[:, 3], rand(96, device=device))


def test_gradients_of_one_result(device):
    """Of out alone and of the sum alone, whose weight gets 0."""
    x, weight, residual = (rand(*s, device=device).requires_grad_() for s in ((9, 40), (40,), (9, 40)))
    dout = rand(9, 40, device=device)
    out, summed = ops.rms_norm(x, weight, residual)
    dx, dw, dr = torch.autograd.grad(summed, (x, weight, residual), dout, retain_graph=True)
    torch.testing.assert_close(dx, dout)
    assert torch.equal(dx, dr)
    assert not dw.any()
    alone = ops.rms_norm((x + residual).detach().requires_grad_(), weight)
    assert torch.equal(alone, out)
    assert torch.equal(torch.autograd.grad(out, weight, dout)[0], torch.autograd.grad(alone, weight, dout)[0])


def test_the_same_bits_and_nothing(device):
    x, weight = rand(500, 24, device=device).requires_grad_(), rand(24, device=device).requires_grad_()
    first, second = (torch.autograd.grad(ops.rms_norm(x, weight).sum(), (x, weight)) for _ in range(2))
    assert all(map(torch.equal, first, second))
    nothing = torch.zeros(0, 24, device=device, requires_grad=True)
    out = ops.rms_norm(nothing, weight)
    assert out.shape == (0, 24)
    assert not torch.autograd.grad(out.sum(), weight)[0].any()


@pytest.mark.no_poison
def test_compiled(device):
    x, weight, residual = (rand(*s, device=device).requires_grad_() for s in ((9, 40), (40,), (9, 40)))

    def layer(x, weight, residual):
        out, summed = ops.rms_norm(x, weight, residual, eps=1e-5)
        return out * 2 + summed

    graph_gives(layer, x, weight, residual)
    torch.library.opcheck(ops.matrix.rms_norm.RMS_NORM.op, (x, weight, residual, 1e-6))


def test_plan(device):
    device = device_named("h200")
    plan = plan_rms_norm(RMSNormProblem(8192, 4096, 2, True), device)
    assert (plan.block_rows, plan.block_columns, plan.tiles) == (1, 4096, 8192)
    assert plan.bytes == 4 * 8192 * 4096 * 2
    assert "one row of 4096 columns" in str(plan)
    small = plan_rms_norm(RMSNormProblem(8192, 100, 2), device)
    assert small.block_rows * small.block_columns == 4096
    for rows in (1, 2, 33, 100_000):  # of any number of rows a row is added in one order
        few = plan_rms_norm(RMSNormProblem(rows, 100, 2), device)
        assert (few.block_rows, few.num_warps) == (small.block_rows, small.num_warps)
    assert small.backward_programs == min(small.tiles, 2 * device.sms)
    assert ops.rms_norm_plan(torch.zeros(3, 5), torch.zeros(5)).problem == RMSNormProblem(3, 5, 4)


def test_refusals(device):
    x, weight = torch.ones(4, 5, device=device), torch.ones(5, device=device)
    each_refuses(
        (DtypeError, "x has dtype int32", lambda: ops.rms_norm(x.int(), weight)),
        (DtypeError, "residual has dtype float16, but x has float32", lambda: ops.rms_norm(x, weight, x.half())),
        (ShapeError, "weight has shape", lambda: ops.rms_norm(x, weight[:4])),
        (ShapeError, "residual has shape", lambda: ops.rms_norm(x, weight, x[:3])),
        (LayoutError, "x needs a contiguous last dimension", lambda: ops.rms_norm(x.t(), weight[:4])),
        (LayoutError, "evenly apart", lambda: ops.rms_norm(torch.ones(4, 6, 5, device=device)[:, :3], weight)),
        (ValueRangeError, "eps must be greater than 0", lambda: ops.rms_norm(x, weight, eps=0.0)),
        (Unsupported, "40000 columns", lambda: ops.rms_norm(torch.ones(1, 40000), torch.ones(40000))),
    )

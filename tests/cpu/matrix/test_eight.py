"""Products of 8-bit weights and activations quantised by rows: codes, sums, scales, odd shapes, refusals."""

import pytest
import torch

from cases import graph_gives, judge, rand
from cases.refusals import each_refuses
from tilefold import ops, reference
from tilefold.errors import DtypeError, ShapeError, Unsupported
from tilefold.ops.matrix import eight

KINDS = (torch.int8, torch.float8_e4m3fn)


def weight_of(n, k, kind, device):
    return (torch.randn(n, k) * 40).clamp(-127, 127).to(kind).to(device)


def hold(x, weight, scale, bias=None):
    got = ops.matmul_w8a8(x, weight, scale, bias)
    want, plain = (reference.matmul_w8a8(x, weight, scale, bias, d) for d in (torch.float64, torch.float32))
    assert got.dtype == x.dtype and got.shape == want.shape
    judge(got, want, plain, f"{tuple(x.shape)} {x.dtype} {weight.dtype}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_against_fp64(device, kind, dtype):
    """Any leading dimensions, K and N off the tile, one factor or one a row, a row of zeros."""
    for shape, n, one in (((5, 100), 50, False), ((2, 3, 130), 33, True), ((70,), 16, False), ((0, 64), 16, True)):
        x = rand(*shape, dtype=dtype, device=device)
        if shape == (5, 100):
            x[2] = 0
        scale = (torch.rand(1 if one else n) * 0.01 + 0.001).to(device)
        hold(x, weight_of(n, shape[-1], kind, device), scale, None if one else rand(n, dtype=dtype, device=device))


@pytest.mark.parametrize("kind", KINDS)
def test_identity_recovers_the_weight(device, kind):
    """A row of the identity has the code 127 or 448 and the scale 1/127 or 1/448: the product is the weight, rounded."""
    weight = weight_of(40, 72, kind, device)
    one = torch.ones(40, device=device)
    got = ops.matmul_w8a8(torch.eye(72, dtype=torch.float16, device=device), weight, one)
    want = weight.to(torch.float16).t()
    assert bool(((got - want).abs() <= want.abs() * 2**-10).all())
    assert not torch.allclose(got, want.roll(1, 0)) and not torch.allclose(got, want.roll(1, 1))


def test_strides_and_nan(device):
    weight, scale = weight_of(24, 96, torch.int8, device), torch.rand(48, device=device)[::2]
    x = rand(6, 101, dtype=torch.float16, device=device)[:, 2:98]
    hold(x, weight[:, :96], scale)
    x[1, 5] = float("nan")
    got = ops.matmul_w8a8(x, weight, scale)
    assert bool(got[1].isnan().all()) and bool(got[[0, 2, 3, 4, 5]].isfinite().all())


def test_a_row_longer_than_a_program_holds(device, monkeypatch):
    monkeypatch.setattr(eight, "ROW", 128)
    weight, scale = weight_of(16, 300, torch.int8, device), torch.rand(16, device=device)
    x = rand(3, 300, dtype=torch.float16, device=device)
    x[1, 290] = 9.0
    hold(x, weight, scale)
    x[2, 299] = float("nan")
    got = ops.matmul_w8a8(x, weight, scale)
    assert bool(got[2].isnan().all()) and bool(got[:2].isfinite().all())


def test_the_plan_can_be_seen(device):
    weight = weight_of(24, 64, torch.int8, device)
    plan = ops.matmul_w8a8_plan(torch.empty(2, 3, 64, dtype=torch.float16, device=device), weight)
    assert (plan.problem.m, plan.problem.n, plan.problem.k) == (6, 24, 64) and "not matmul_eight_rows" in str(plan)


@pytest.mark.no_poison
def test_operator_and_compile(device):
    weight, scale = weight_of(24, 64, torch.int8, device), torch.rand(24, device=device)
    x = rand(4, 64, dtype=torch.float16, device=device)
    graph_gives(lambda x: ops.matmul_w8a8(x, weight, scale) + 1, x)


def test_refusals(device):
    weight, scale = weight_of(24, 64, torch.int8, device), torch.rand(24, device=device)
    x = rand(4, 64, dtype=torch.float16, device=device)
    each_refuses(
        (DtypeError, "x has dtype", lambda: ops.matmul_w8a8(x.float(), weight, scale)),
        (DtypeError, "weight has dtype", lambda: ops.matmul_w8a8(x, weight.half(), scale)),
        (ShapeError, "weight_scale has shape", lambda: ops.matmul_w8a8(x, weight, scale[:5])),
        (ShapeError, "K = 64", lambda: ops.matmul_w8a8(x[:, :60], weight, scale)),
        (ShapeError, "bias", lambda: ops.matmul_w8a8(x, weight, scale, x[0, :5])),
        (Unsupported, "x requires", lambda: ops.matmul_w8a8(x.clone().requires_grad_(), weight, scale)),
    )

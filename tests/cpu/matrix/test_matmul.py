"""Matrix products against their fp64 oracle: layouts, odd sizes, batches, bias, activations, types, shares of k, refusals."""

import pytest
import torch

from cases import rand
from cases.matmul import ACTIVATIONS, check, matrix
from cases.refusals import refuses, refuses_given
from tilefold import ops
from tilefold.errors import DtypeError, LayoutError, PlanError, ShapeError, Unsupported, ValueRangeError
from tilefold.ops.device import device_of
from tilefold.ops.matrix.operands import operands
from tilefold.ops.matrix.product import Epilogue, bind_portable, problem_of
from tilefold.plan.device import device_named
from tilefold.plan.matrix.matmul import plan_matmul

E4M3 = torch.float8_e4m3fn


def planned(a, b, bias=None, activation="none", out_dtype=None, order="grouped", scaled=False, **tile):
    """A plan of this call with a tile of the test's choice."""
    epilogue = Epilogue(activation, order, False, out_dtype or a.dtype)
    problem = problem_of(operands(a, b, bias, False), epilogue, scaled)
    small = {"block_m": 16, "block_n": 32, "block_k": 16, "num_stages": 1}
    return plan_matmul(problem, device_of(a.device), order).with_tile(kernel="matmul", **{**small, **tile})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("order", ["grouped", "plain"])
def test_layouts(dtype, turned, order, device):
    a = matrix(37, 29, dtype=dtype, device=device, turned=turned[0])
    b = matrix(29, 83, dtype=dtype, device=device, turned=turned[1])
    group = 2 if order == "grouped" else 1
    check(a, b, order=order, plan=planned(a, b, order=order, group=group))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(50,), (20, 1), (20, 50), (), (1, 50)])
def test_bias_and_activation(activation, shape, device):
    a, b = matrix(20, 33, device=device), matrix(33, 50, device=device)
    check(a, b, bias=rand(*(shape or (1,)), device=device).view(shape), activation=activation)


def test_orders_make_the_same_bits(device):
    a, b = matrix(70, 40, device=device), matrix(40, 70, device=device)
    results = [
        ops.matmul(a, b, order=order, plan=planned(a, b, order=order, group=group))
        for order, group in (("plain", 1), ("grouped", 2), ("grouped", 3), ("grouped", 8))
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])


BATCHES = [((3, 20, 18), (3, 18, 35)), ((3, 20, 18), (18, 35)), ((20, 18), (3, 18, 35))]


@pytest.mark.parametrize("shapes", BATCHES)
@pytest.mark.parametrize("bias", [None, (35,), (3, 1, 1), (20, 1), (3, 20, 35), (1, 20, 35)])
def test_batches(shapes, bias, device):
    a, b = (rand(*shape, device=device) for shape in shapes)
    check(a, b, bias=None if bias is None else rand(*bias, device=device), activation="gelu")


@pytest.mark.parametrize("shapes", [*BATCHES, ((1, 18), (3, 18, 35)), ((3, 1, 18), (18, 35))])
def test_a_bias_of_the_batch(shapes, device):
    """[B, 1] is a number a batch entry, also as a strided view and with a gradient; [B, 1, 1] says the same."""
    a, b = (rand(*shape, device=device) for shape in shapes)
    bias = rand(3, 4, device=device)[:, 1:2]
    got = ops.bmm(a, b, bias=bias, activation="relu")
    assert torch.equal(got, check(a, b, bias=bias[:, :, None], activation="relu"))
    leaf = bias.detach().clone().requires_grad_()
    (given,) = torch.autograd.grad(ops.bmm(a, b, bias=leaf).sum(), leaf)
    assert torch.allclose(given, torch.full_like(leaf, got[0].numel()))


def test_a_bias_of_as_many_rows_as_entries_is_of_the_rows(device):
    """Broadcasting comes first: [3, 1] with M = 3 is a number a row, whatever the batch."""
    a, b, bias = rand(3, 18, device=device), rand(3, 18, 35, device=device), rand(3, 1, device=device)
    check(a, b, bias=bias)
    refuses(ShapeError, "bias has shape (2, 1)", ops.bmm, a, b, bias=rand(2, 1, device=device))
    refuses(ShapeError, "bias has shape (18, 1)", ops.matmul, a, b[0], bias=rand(18, 1, device=device))


def test_batch_strides(device):
    """Batches that lie inside rows, that repeat one matrix."""
    a = rand(20, 3, 18, device=device).transpose(0, 1)
    b = rand(18, 35, device=device).expand(3, 18, 35)
    check(a, b)
    check(rand(20, 2, 18, device=device)[:, :1].transpose(0, 1), rand(1, 35, 18, device=device).mT)
    check(
        rand(3, 18, 20, device=device).mT,
        rand(35, 3, 18, device=device).permute(1, 2, 0),
        bias=rand(3, 1, 1, device=device),
    )


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 70, 17), (65, 1, 130), (64, 64, 64), (3, 2, 300)])
def test_sizes(sizes, device):
    m, n, k = sizes
    check(matrix(m, k, device=device), matrix(k, n, device=device), bias=rand(n, device=device))


@pytest.mark.parametrize("sizes", [(0, 5, 4), (5, 0, 4), (5, 6, 0), (0, 0, 0)])
@pytest.mark.parametrize("batch", [None, 0, 2])
def test_empty(sizes, batch, device):
    """Without k the result is activation(bias)."""
    m, n, k = sizes
    lead = () if batch is None else (batch,)
    bias = rand(n, device=device)
    got = check(rand(*lead, m, k, device=device), rand(k, n, device=device), bias=bias, activation="silu")
    assert got.shape == (*lead, m, n)
    if got.numel():
        want = torch.nn.functional.silu(bias).expand(got.shape)
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares(splits, dtype, device):
    a, b = rand(2, 20, 75, dtype=dtype, device=device), rand(2, 75, 33, dtype=dtype, device=device)
    bias = rand(2, 1, 1, dtype=dtype, device=device)
    plan = planned(a, b, bias, "gelu_tanh", splits=splits)
    got = check(a, b, bias=bias, activation="gelu_tanh", plan=plan)
    assert torch.equal(got, ops.bmm(a, b, bias=bias, activation="gelu_tanh", plan=plan))


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_out_dtype(out_dtype, device):
    a, b = rand(20, 33, dtype=torch.bfloat16, device=device), rand(33, 40, dtype=torch.bfloat16, device=device)
    check(a, b, out_dtype=out_dtype, bias=rand(40, device=device))


@pytest.mark.parametrize("scales", [(None, None), ((), (1,)), ((20,), (40,)), ((20,), None)])
def test_eight_bits(scales, device):
    a, b = rand(20, 150, device=device).to(E4M3), rand(40, 150, device=device).to(E4M3).t()
    scale_a, scale_b = (None if s is None else rand(*(s or (1,)), device=device).abs().view(s) + 0.1 for s in scales)
    check(a, b, scale_a=scale_a, scale_b=scale_b, bias=rand(40, dtype=torch.bfloat16, device=device), activation="relu")
    check(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)


def test_specials(device):
    """NaN stays what it is and is not spread past its row; tails of k are not read as NaN."""
    a, b = rand(20, 33, device=device), rand(33, 40, device=device)
    a[3, 5] = float("nan")
    for activation in ACTIVATIONS:
        got = ops.matmul(a, b, activation=activation)
        assert bool(got[3].isnan().all()) and not bool(got[:3].isnan().any()) and not bool(got[4:].isnan().any())
    wide = torch.full((20, 64), float("nan"), device=device)
    wide[:, :33] = rand(20, 33, device=device)
    assert not bool(ops.matmul(wide[:, :33], b).isnan().any())


def test_offsets_past_two_to_the_31(device):
    """Rows so far apart that offsets inside a tile need 64 bits; what the kernel then computes is a test on the GPU."""
    far = 3 << 28
    a = torch.empty_strided((16, 16), (far, 1), device="meta")
    b = torch.empty((16, 16), device="meta")
    x = operands(a, b, None, False)
    problem = problem_of(x, Epilogue(out_dtype=torch.float32), False)
    bound = bind_portable(x, plan_matmul(problem, device_named("h200")), (None, None), torch.device("cuda", 0))
    assert bound.launch.keywords["WIDE"]


# ---------------------------------------------------------------- plans and refusals


def test_a_plan_is_followed_or_refused(device):
    a, b = rand(20, 33, device=device), rand(33, 40, device=device)
    plan = planned(a, b)
    check(a, b, plan=plan)
    with pytest.raises(PlanError, match="plan was made for m=20, the call has m=21"):
        ops.matmul(rand(21, 33, device=device), b, plan=plan)
    with pytest.raises(PlanError, match="plan was made for activation='none', the call has activation='relu'"):
        ops.matmul(a, b, activation="relu", plan=plan)
    refuses(PlanError, "this call has order='plain'", ops.matmul, a, b, order="plain", plan=plan)
    refuses(PlanError, "plan must be a MatmulPlan or None, got str", ops.matmul, a, b, plan="fast")


Z = torch.zeros
REFUSED = [
    ({"a": Z(3, 4, 5)}, ShapeError, "a has 3 dimensions, shape (3, 4, 5); expected [m, k]"),
    ({"b": Z(5, 6)}, ShapeError, "b has shape (5, 6), expected [k, n]: dimension 0 (k) is 5, should be 4 as in a"),
    ({"b": Z(4, 6).half()}, DtypeError,
     "b has dtype float16, but a has float32: they must be the same (nothing is converted silently)"),
    ({"a": Z(3, 4).double()}, DtypeError, "a has dtype float64, accepted: float16, bfloat16, float32, float8_e4m3fn"),
    ({"a": 3}, DtypeError, "a must be a torch.Tensor, got int"),
    ({"a": Z(6, 8)[::2, ::2]}, LayoutError,
     "a needs rows or columns whose elements lie side by side (stride 1), got strides (16, 2) for shape (3, 4); call "
     "a.contiguous() first if a copy is acceptable"),
    ({"bias": Z(5)}, ShapeError, "bias has shape (5,), expected [n|1]: dimension 0 (n) is 5, should be 6 or 1"),
    ({"bias": Z(6).double()}, DtypeError, "bias has dtype float64, accepted: float16, bfloat16, float32"),
    ({"activation": "tanh"}, ValueRangeError,
     "activation must be None or one of 'relu', 'silu', 'gelu', 'gelu_tanh', got 'tanh'"),
    ({"order": "best"}, ValueRangeError, "order must be 'grouped' or 'plain', got 'best'"),
    ({"tf32": 1}, DtypeError, "tf32 must be a bool, got 1"),
    ({"out_dtype": torch.float64}, DtypeError, "out_dtype must be None, float16, bfloat16 or float32, got float64"),
    ({"scale_a": Z(3)}, Unsupported, "scale_a is for operands in float8_e4m3fn, a has float32: multiply the result instead"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=[text[:40] for _, _, text in REFUSED])
def test_refusals(changes, error, text, device):
    refuses_given(error, text, ops.matmul, device, **{"a": Z(3, 4), "b": Z(4, 6), **changes})


def test_refusals_of_batches(device):
    a, b = Z(3, 4, device=device), Z(4, 6, device=device)
    refuses(ShapeError, "bmm needs a batch in one of them", ops.bmm, a, b)
    with pytest.raises(ShapeError, match=r"b has shape \(3, 4, 6\).*dimension 0 \(batch\) is 3, should be 2 as in a"):
        ops.bmm(Z(2, 3, 4, device=device), Z(3, 4, 6, device=device))
    refuses(ShapeError, "scale_a has shape (2,)", ops.matmul, a.to(E4M3), b.to(E4M3), scale_a=Z(2, device=device))
    refuses(DtypeError, "a has dtype float8_e4m3fn", ops.bmm, a.to(E4M3), Z(2, 4, 6, device=device).to(E4M3))

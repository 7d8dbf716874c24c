"""Products with weights of few bits: exact recovery of the weight, fp64, gradients, operators, refusals."""

from dataclasses import replace

import pytest
import torch

from cases import graph_gives, hold, hold_back, rand
from cases.refusals import each_refuses
from tilefold import ops, quant, reference
from tilefold.errors import DtypeError, LayoutError, PlanError, ShapeError
from tilefold.ops.matrix import lowbit_launch
from tilefold.plan import device_named
from tilefold.plan.matrix.lowbit import LowbitPlan, LowbitProblem, plan_lowbit
from tilefold.plan.matrix.lowbit_choices import CHOICES, choice_for

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def random_weight(n, k, bits, group=None, zeros="integer", dtype=torch.float16, perm=False, device="cpu"):
    """Codes, scales and zero points random and distinct in every group: a wrong code, group or zero point cannot hide.

    zeros: "none", "integer", "float", "table", or "tensor": one scale and zero point in all."""
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    packed, high = quant.pack(codes, bits)
    group = k if group is None else min(group, k)
    shape = (1, 1) if zeros == "tensor" else (-(-k // group), n)
    scales = (0.5 + torch.rand(shape)).to(dtype)
    given = {}
    if zeros in ("integer", "tensor"):
        given = {"zeros": torch.randint(0, 2**bits, shape, dtype=torch.uint8)}
    elif zeros == "float":
        given = {"zeros": (torch.rand(shape) * 2**bits).to(dtype)}
    elif zeros == "table":
        given = {"table": torch.randn(2**bits)}
    scheme = {"none": "symmetric", "table": "table"}.get(zeros, "asymmetric")
    order = torch.randperm(k).to(torch.int32) if perm else None
    made = quant.QuantizedTensor(packed=packed, packed_high=high, scales=scales, bits=bits, group=group, shape=(n, k),
                                 scheme=scheme, dtype=dtype, perm=order, **given)  # fmt: skip
    return made.to(device)


def planned(x, weight, deterministic=True, **changes):
    """The planner's plan of a call with other fields; path="tile" tests the kernel that the interpreter can run."""
    plan = ops.lowbit_matmul_plan(x, weight, deterministic=deterministic)
    return replace(plan, **changes) if changes else plan


def recovered(weight, dtype, device="cpu", deterministic=True, **changes):
    """Rows of the identity times the weight."""
    x = torch.eye(weight.shape[1], dtype=dtype, device=device)
    plan = planned(x, weight, deterministic, **changes)
    return ops.lowbit_matmul(x, weight, deterministic=deterministic, plan=plan)


def assert_recovers(weight, dtype, device="cpu", **changes):
    """Rows of the identity give the dequantised weight's columns, bit for bit."""
    got, want = recovered(weight, dtype, device, **changes), weight.dequantize(dtype).t()
    assert torch.equal(got, want), f"{weight}: {int((got != want).sum())} of {want.numel()} differ"


TILE = {"path": "tile", "block_n": 64, "block_m": 64, "splits": 1, "atomic": False}


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("zeros", ["none", "integer", "float", "table", "tensor"])
def test_the_dequantised_path_recovers_the_weight(device, bits, zeros):
    """Any group, also one that lies across slabs, and short last groups."""
    for group, dtype in ((32, torch.float16), (None, torch.float32), (17, torch.bfloat16)):
        group = None if zeros == "tensor" else group
        weight = random_weight(70, 140, bits, group, zeros, torch.float16, device=device)
        assert_recovers(weight, dtype, device, path="dequantise")


@pytest.mark.parametrize("bits", [8, 3])
def test_zero_points_far_from_the_codes(device, bits):
    """Weights on one side of 0: their floating zero points lie outside of the codes, some below 0."""
    w = torch.rand(70, 136, generator=torch.Generator().manual_seed(1)) + 2
    w[::2] *= -1
    weight = quant.quantize_weight(w, bits, 64).to(device)
    assert weight.zeros.is_floating_point()
    assert weight.zeros.min() < 0 and weight.zeros.max() > 2**bits - 1
    assert_recovers(weight, torch.bfloat16, device, **TILE | {"scaled": "before"})
    assert_recovers(weight, torch.float32, device, path="dequantise")


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("zeros", ["none", "integer", "float", "table", "tensor"])
def test_the_kernel_recovers_the_weight(device, bits, zeros):
    """K no multiple of tile or group; scaled after the product and before it; K in one part and in two."""
    group = None if zeros == "tensor" else 96 if bits == 4 else 64 if bits == 3 else 32
    for dtype, scaled, splits in ((torch.float16, "after", 2), (torch.bfloat16, "before", 1)):
        weight = random_weight(70, 136, bits, 32 if group == 96 and bits != 4 else group, zeros, dtype, device=device)
        assert_recovers(weight, dtype, device, **TILE | {"scaled": scaled, "splits": splits})


@pytest.mark.parametrize("group", [32, 64, 128, 160, None])
def test_groups(device, group):
    """Also where the scales' dtype is not x's: the product is scaled in fp32, or the weight rounded once."""
    for scaled, scales in (("after", torch.float32), ("before", torch.float32), ("before", torch.float16)):
        weight = random_weight(64, 200, 4, group, "integer", scales, device=device)
        assert_recovers(weight, torch.float16, device, **TILE | {"scaled": scaled})


@pytest.mark.parametrize("bits", [4, 3])
def test_the_order_of_columns_is_undone(device, bits):
    for path in ("tile", "dequantise"):
        assert_recovers(random_weight(40, 96, bits, 32, perm=True, device=device), torch.float16, device, path=path)


def test_the_same_bits_every_run(device):
    """Several parts of K, added by whoever comes last, in order; by atomics close to it."""
    weight = random_weight(70, 700, 4, 64, dtype=torch.float16, device=device)
    x = rand(5, 700, dtype=torch.float16, device=device)
    plan = planned(x, weight, path="tile", splits=3)
    first, *others = (ops.lowbit_matmul(x, weight, plan=plan) for _ in range(4))
    assert all(torch.equal(first, other) for other in others)
    loose = planned(x, weight, False, path="tile", splits=3, atomic=True)
    for made in (first, *(ops.lowbit_matmul(x, weight, deterministic=False, plan=loose) for _ in range(2))):
        hold(made, reference.lowbit_matmul, x, weight, what="splits")


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_fp64(device, dtype):
    weight = quant.quantize_weight(rand(70, 200, dtype=dtype), 4, 64).to(device)
    bias = rand(70, dtype=dtype, device=device)
    for shape in ((1, 200), (2, 3, 200), (200,), (33, 200), (0, 200)):
        x = rand(*shape, dtype=dtype, device=device)
        got = ops.lowbit_matmul(x, weight, bias)
        assert got.shape == (*shape[:-1], 70)
        hold(got, reference.lowbit_matmul, x, weight, bias)


def test_gradients(device):
    weight = random_weight(40, 96, 4, 32, perm=True, device=device)
    x = rand(3, 5, 96, dtype=torch.float16, device=device).requires_grad_()
    bias = rand(40, dtype=torch.float16, device=device).requires_grad_()
    hold_back(
        ops.lowbit_matmul(x, weight, bias), lambda x, b, dtype: reference.lowbit_matmul(x, weight, b, dtype), x, bias
    )


def test_strided_and_odd_activations(device):
    weight = random_weight(704, 96, 4, 32, device=device)
    wide = rand(6, 4, 101, dtype=torch.float16, device=device)
    for x in (wide[:, :, :96], wide[:, 1, 3:99], wide.transpose(0, 1)[:, :, :96], wide[0, :0, :96]):
        hold(ops.lowbit_matmul(x, weight), reference.lowbit_matmul, x, weight, what=f"{tuple(x.shape)} {x.stride()}")


@pytest.mark.no_poison
def test_operator_and_compile(device):
    weight = random_weight(40, 96, 4, 32, device=device)
    x, bias = rand(3, 96, dtype=torch.float16, device=device), rand(40, dtype=torch.float16, device=device)
    for given in (x, x.clone().requires_grad_()):
        graph_gives(lambda x: ops.lowbit_matmul(x, weight, bias) * 2, given)


def test_refusals(device):
    weight = random_weight(40, 96, 4, 32, device=device)
    x = rand(3, 96, dtype=torch.float16, device=device)
    other = ops.lowbit_matmul_plan(x[:2], weight)
    each_refuses(
        (DtypeError, "weight must be", lambda: ops.lowbit_matmul(x, x)),
        (DtypeError, "x has dtype", lambda: ops.lowbit_matmul(x.double(), weight)),
        (DtypeError, "x must be", lambda: ops.lowbit_matmul(None, weight)),
        (ShapeError, "K = 96", lambda: ops.lowbit_matmul(x[:, :95], weight)),
        (
            LayoutError,
            "x needs",
            lambda: ops.lowbit_matmul(rand(96, 3, dtype=torch.float16, device=device).t(), weight),
        ),
        (ShapeError, "bias", lambda: ops.lowbit_matmul(x, weight, x[0, :39])),
        (DtypeError, "bias", lambda: ops.lowbit_matmul(x, weight, rand(40, device=device))),
        (DtypeError, "deterministic", lambda: ops.lowbit_matmul(x, weight, deterministic=1)),
        (PlanError, "plan is for", lambda: ops.lowbit_matmul(x, weight, plan=other)),
        (DtypeError, "plan must be", lambda: ops.lowbit_matmul(x, weight, plan="tile")),
        (PlanError, "atomic", lambda: replace(other, atomic=True)),
        (PlanError, "path", lambda: replace(other, path="fast")),
    )


def recovered_rows(weight, dtype, device, rows, **changes):
    """Some rows of the identity times the weight."""
    x = torch.eye(weight.shape[1], dtype=dtype)[list(rows)].to(device)
    return ops.lowbit_matmul(x, weight, plan=planned(x, weight, **changes))


@pytest.mark.parametrize("group", [64, 128, None])
def test_scales_read_as_words(device, group):
    """Each of a word's scales and zero points, groups of half a block, a block and whole rows; in two dtypes of scales."""
    for scales in (torch.float16, torch.float32):
        weight = random_weight(68, 320, 4, group, "integer", scales, device=device)
        got = recovered_rows(weight, torch.float16, device, range(0, 320, 7), **TILE | {"join": True, "splits": 2})
        assert torch.equal(got, weight.dequantize(torch.float16).t()[::7])


def test_the_table_of_choices():
    """On an H200: the first row that fits; every row can be the first; portable kernels elsewhere."""
    h200 = device_named("h200")
    made = {m: plan_lowbit(LowbitProblem(m, 8192, 8192, 4, 128, "integer"), h200) for m in (1, 16, 64, 256, 4096)}
    assert made[4096].path == "dequantise" and all(made[m].path != "dequantise" for m in (1, 16, 64, 256))
    for row in CHOICES:
        for bits in row.bits:
            given = (bits, row.m, row.n or 1 << 20, row.k or 1 << 20)
            assert choice_for(*given, (row.path,)) is not None
        assert (
            row is choice_for(row.bits[0], row.m, row.n or 1 << 20, row.k or 1 << 20, (row.path,)) or len(row.bits) > 1
        )
    problem = LowbitProblem(1, 8192, 8192, 4, 128, "integer")
    assert plan_lowbit(problem, device_named("a100")).path == "tile"
    with pytest.raises(PlanError, match="sm_90"):
        LowbitPlan(problem, device_named("mi300x"), "hopper", "")


def test_plans_without_the_kernels_of_sm_90(monkeypatch):
    """By the planner's word, and by the environment's: no problem gets them, and the plan says why."""
    h200, why = device_named("h200"), "is left out: portable kernels were asked for"
    for m in (1, 16, 64, 256):
        for bits in (8, 4, 3, 2):
            problem = LowbitProblem(m, 8192, 8192, bits, 128, "integer")
            plan = plan_lowbit(problem, h200, portable=True)
            assert plan.path == ("tile" if m <= 128 else "dequantise")
            assert f"hopper {why}" in plan.rejected and any(line.startswith("rows ") for line in plan.rejected)
            chosen = plan_lowbit(problem, h200)
            assert chosen.path in ("rows", "hopper") or replace(plan, rejected=chosen.rejected) == chosen
    monkeypatch.setattr(lowbit_launch, "device_of", lambda *given: h200)
    weight = random_weight(4096, 256, 4, 128, "integer")
    x = torch.empty(1, 256, dtype=torch.float16)
    assert ops.lowbit_matmul_plan(x, weight).path == "rows"
    monkeypatch.setenv("TILEFOLD_DISABLE_HOPPER", "1")
    plan = ops.lowbit_matmul_plan(x, weight)
    assert plan.path == "tile" and f"rows {why}" in str(plan)


@pytest.mark.parametrize("rows", [1, 64, 512])
@pytest.mark.parametrize("why", ["refused", "does not compile"])
def test_a_triton_without_the_kernels_of_sm_90_takes_portable_ones(rows, why, monkeypatch):
    from tilefold.kernels import hopper
    from tilefold.ops.bound import Bound

    monkeypatch.setattr("tilefold.ops.hopper._WARNED", set())
    if why == "refused":
        monkeypatch.setattr(hopper, "refusal", lambda: "this Triton is too old")
    else:
        monkeypatch.setattr(hopper, "refusal", lambda: None)
        monkeypatch.setattr(Bound, "compile", lambda *args: (_ for _ in ()).throw(ValueError("no such layout")))
    problem = LowbitProblem(rows, 4096, 4096, 4, 128, "integer", "float16", "float16", True, True)
    planned = plan_lowbit(problem, device_named("h100"))
    assert planned.path in ("rows", "hopper")
    x, weight = lowbit_launch.example_tensors(planned)
    with pytest.warns(
        RuntimeWarning, match="^the low-bit matrix product kernel for this GPU cannot be used, a portable"
    ):
        bound, plan = lowbit_launch.bound_of(x, weight, None, planned, False)
    assert plan == plan_lowbit(problem, device_named("h100"), portable=True)
    assert plan.path in ("tile", "dequantise")
    assert (bound is None) == (plan.path == "dequantise")
    if why == "refused":
        chosen, same = lowbit_launch.bound_of(x, weight, None, planned, True)  # the caller's own plan is followed
        assert chosen is not None and same is planned

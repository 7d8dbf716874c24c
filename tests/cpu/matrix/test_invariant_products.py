"""numerics="invariant" of products: a row's bits do not depend on the other rows, nor on how many there are.

The interpreter's products are a library's, whose bits depend on a row's place in a tile; here they are summed in order."""

from dataclasses import replace

import pytest
import torch

import tilefold
from cases import hold, judge, rand
from cases.invariant import products_in_order  # noqa: F401
from tilefold import PlanError, ValueRangeError, reference
from tilefold.ops.matrix.matmul import plan_name
from tilefold.plan import device_named
from tilefold.plan.matrix.lowbit import LowbitProblem, invariant_lowbit
from tilefold.plan.matrix.matmul import invariant_matmul, plan_matmul
from tilefold.plan.matrix.problem import MatmulProblem
from tilefold.quant import quantize_weight

ROWS = (1, 3, 17, 70)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}, {"activation": "silu"}])
def test_matmul(options, dtype, device):
    a, w = rand(70, 130, dtype=dtype, device=device), rand(40, 130, dtype=dtype, device=device)
    bias = rand(40, device=device)
    whole = tilefold.matmul(a, w.t(), bias=bias, numerics="invariant", **options)
    hold(whole, reference.matmul, a, w.t(), what=f"{options} {dtype}", bias=bias, **options)
    for first in (0, 7, 52):
        for rows in ROWS:
            part = tilefold.matmul(a[first : first + rows], w.t(), bias=bias, numerics="invariant", **options)
            assert torch.equal(part, whole[first : first + rows])
    with tilefold.numerics("invariant"):
        assert torch.equal(tilefold.matmul(a, w.t(), bias=bias, **options), whole)


def test_bmm(device):
    a, w = rand(3, 20, 96, device=device), rand(3, 96, 33, device=device)
    whole = tilefold.bmm(a, w, numerics="invariant")
    judge(whole, reference.bmm(a, w), reference.bmm(a, w, dtype=torch.float32), "bmm")
    assert torch.equal(tilefold.bmm(a[1:2, 5:9], w[1:2], numerics="invariant"), whole[1:2, 5:9])
    assert torch.equal(tilefold.matmul(a[2], w[2], numerics="invariant"), whole[2])


@pytest.mark.parametrize(("bits", "group", "dtype"), [(4, 64, torch.bfloat16), (8, 32, torch.float16), (3, 32, torch.bfloat16),
                                                      (4, 64, torch.float32)])  # fmt: skip
def test_lowbit(bits, group, dtype, device):
    weight = quantize_weight(rand(48, 192, dtype=dtype, device=device), bits=bits, group=group)
    x, bias = rand(70, 192, dtype=dtype, device=device), rand(48, dtype=dtype, device=device)
    whole = tilefold.lowbit_matmul(x, weight, bias, numerics="invariant")
    wanted, plain = (reference.lowbit_matmul(x, weight, bias, kind) for kind in (torch.float64, dtype))
    judge(whole, wanted, plain, f"{bits} bits {dtype}")
    for rows in ROWS:
        part = tilefold.lowbit_matmul(x[70 - rows :], weight, bias, numerics="invariant")
        assert torch.equal(part, whole[70 - rows :])
    x.requires_grad_()
    assert torch.equal(tilefold.lowbit_matmul(x, weight, bias, numerics="invariant"), whole)


def test_what_is_refused(device):
    a, b = rand(20, 64, device=device), rand(64, 20, device=device)
    for call in (tilefold.matmul, lambda a, b, **options: tilefold.bmm(a[None], b, **options)):
        with pytest.raises(ValueRangeError, match="numerics must be 'fast', 'invariant' or None, got 'exact'"):
            call(a, b, numerics="exact")


@pytest.mark.interpreter
def test_plans_that_break_it(device):
    a, b = rand(20, 64, device=device), rand(64, 20, device=device)
    plan = invariant_matmul(
        MatmulProblem(1, 20, 20, 64, dtype="float32", out_dtype="float32", b_major="n"), device_named("interpreter")
    )
    assert plan_name(plan)
    made = tilefold.matmul(a, b, plan=plan, numerics="invariant")
    assert torch.equal(made, tilefold.matmul(a, b, numerics="invariant"))
    with pytest.raises(PlanError, match="plan field kernel, block_m, .* numerics"):
        tilefold.matmul(a, b, plan=plan.with_tile(block_k=32), numerics="invariant")
    weight = quantize_weight(rand(48, 192, dtype=torch.bfloat16, device=device), bits=4, group=64)
    x = rand(3, 192, dtype=torch.bfloat16, device=device)
    low = tilefold.lowbit_matmul_plan(x, weight, numerics="invariant")
    with pytest.raises(PlanError, match="plan field splits: numerics"):
        tilefold.lowbit_matmul(x, weight, plan=replace(low, splits=2), numerics="invariant")


@pytest.mark.interpreter
def test_few_bits_and_their_floats(device):
    """In the interpreter, where sums are one chain, a row has the bits of the product with the dequantised weight, too."""
    for bits in (8, 4, 3, 2):
        weight = quantize_weight(rand(48, 512, dtype=torch.bfloat16, device=device), bits=bits, group=64)
        x, bias = (rand(*shape, dtype=torch.bfloat16, device=device) for shape in ((20, 512), (48,)))
        plan = replace(tilefold.lowbit_matmul_plan(x, weight, numerics="invariant"), scaled="before")
        floats = weight.dequantize(torch.bfloat16)
        got = tilefold.lowbit_matmul(x, weight, bias, plan=plan)
        assert torch.equal(got, tilefold.matmul(x, floats.t(), bias=bias, numerics="invariant")), bits


@pytest.mark.parametrize("device", ["a100", "b200", "mi300x", "h200"])
def test_plans_do_not_follow_rows(device):
    """But for the rows of a tile, each warp of which has the same 16.  By wgmma columns and steps are free, too."""
    for dtype in ("bfloat16", "float32"):
        made = [
            invariant_matmul(MatmulProblem(1, m, 4096, 4096, dtype=dtype, out_dtype=dtype), device_named(device))
            for m in (1, 64, 5000)
        ]
        if (device, dtype) != ("h200", "bfloat16"):
            assert len({(p.kernel, p.block_n, p.block_k, p.splits, p.block_m // p.num_warps) for p in made}) == 1
    low = [invariant_lowbit(LowbitProblem(m, 4096, 4096, 4, 128), device_named(device)) for m in (1, 64, 5000)]
    if device != "h200":
        assert len({(p.path, p.block_n, p.num_warps, p.splits, p.scaled, p.join) for p in low}) == 1
    assert "numerics=invariant" in str(low[0])
    assert "numerics=invariant" in str(made[0])


SIZES = [(m, n, k) for m in (1, 20, 64, 65, 300, 1024, 70000) for n, k in ((4096, 4096), (1000, 520), (64, 65536))]


def test_tiles_by_wgmma():
    """One chain over k: no shares, 16 rows a warp; the kernel for sm_90 where its bits were compared."""
    h200, kernels = device_named("h200"), set()
    for m, n, k in SIZES:
        for changes in ({}, {"activation": "gelu"}, {"fold": True, "batch": 3}, {"descriptors": False}):
            problem = MatmulProblem(**{"batch": 1, "m": m, "n": n, "k": k, **changes})
            plan = invariant_matmul(problem, h200)
            plan.require_invariant()
            assert plan.splits == 1 and (plan.block_m, plan.num_warps) in ((64, 4), (128, 8), (128, 4))
            assert plan.kernel == "matmul" or not changes
            assert invariant_matmul(problem, h200, portable=True).kernel == "matmul"
            kernels.add(plan.kernel)
    assert len(kernels) == 2
    plan = invariant_matmul(MatmulProblem(1, 300, 4096, 4096), h200, portable=True)
    for changes, field in (
        ({"splits": 2}, "splits"),
        ({"num_warps": 8, "block_m": 64}, "block_m, num_warps"),
        ({"block_m": 32}, "block_m, num_warps"),
    ):
        with pytest.raises(PlanError, match=f"plan field {field}: numerics"):
            plan.with_tile(**changes).require_invariant()
    gelu = plan_matmul(MatmulProblem(1, 5000, 4096, 4096, activation="gelu"), h200)
    with pytest.raises(PlanError, match="plan field kernel: numerics=.*its gelu is made of other instructions"):
        gelu.require_invariant()


def test_few_bits_by_wgmma():
    """Every path without shares of K has the bits of the dequantised weight's product."""
    h200, paths = device_named("h200"), set()
    for m, n, k in SIZES:
        for bits, zeros in ((4, "integer"), (8, "none"), (3, "integer"), (2, "float"), (4, "table")):
            problem = LowbitProblem(m, n, k, bits, 128, zeros)
            plan = invariant_lowbit(problem, h200)
            plan.require_invariant()
            assert plan.path == "dequantise" or (plan.splits, plan.scaled) == (1, "before")
            assert invariant_lowbit(problem, h200, portable=True).path in ("tile", "dequantise")
            paths.add(plan.path)
    assert paths == {"tile", "hopper", "dequantise"}
    few = invariant_lowbit(LowbitProblem(4, 4096, 4096, 4, 128), h200)
    for changes, field in (
        ({"splits": 2}, "splits"),
        ({"scaled": "after"}, "scaled"),
        ({"num_warps": 8}, "num_warps"),
        ({"block_n": 32}, "block_n"),
        ({"block_m": 8}, "block_m"),
        ({"path": "rows", "block_n": 16}, "path"),
    ):
        with pytest.raises(PlanError, match=f"plan field {field}: numerics"):
            replace(few, **changes).require_invariant()
    replace(few, path="hopper", block_n=128).require_invariant()

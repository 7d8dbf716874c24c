"""Plans of matrix products, of 8-bit ones too: which kernel for which shape, limits, refusals with their reasons."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import products
import pytest

from cases.refusals import refuses
from tilefold.errors import PlanError, Unsupported
from tilefold.plan.device import DEVICES, device_named
from tilefold.plan.matrix.eight import HOPPER, PORTABLE, ROWS, EightPlan, EightProblem, plan_eight, seconds
from tilefold.plan.matrix.lowbit import MOST_FEW, LowbitProblem, invariant_lowbit, plan_lowbit
from tilefold.plan.matrix.matmul import MatmulProblem, invariant_matmul, plan_matmul

H200 = device_named("h200")
SIZES = (0, 1, 17, 64, 1000, 4096, 65536)


@pytest.mark.parametrize("device", sorted(DEVICES))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_every_shape_has_a_plan_within_the_limits(device, dtype):
    """A plan checks itself when it is made; JSON gives it back."""
    record = device_named(device)
    if dtype == "float8_e4m3fn" and (record.backend == "hip" or record.generation == 80):
        with pytest.raises(Unsupported, match="float8_e4m3fn need sm_89 or newer"):
            plan_matmul(MatmulProblem(1, 64, 64, 64, dtype=dtype), record)
        return
    for m, n, k in itertools.product(SIZES, repeat=3):
        for order in ("grouped", "plain"):
            plan = plan_matmul(MatmulProblem(3, m, n, k, dtype=dtype, activation="gelu", saved=True), record, order)
            assert plan.order == order and (order == "grouped" or plan.group == 1)
            assert 1 <= plan.splits <= max(1, plan.tile.steps(plan.problem))


def test_which_kernel():
    def kernel(**changes):
        return plan_matmul(MatmulProblem(**{"batch": 1, "m": 4096, "n": 4096, "k": 4096, **changes}), H200)

    assert kernel().kernel == "matmul_hopper" and kernel().tile.block_n == 256 and kernel().grid == (132, 1, 1)
    assert kernel(dtype="float32").kernel == "matmul"
    assert kernel(descriptors=False).kernel == "matmul"
    assert kernel(k=0).kernel == "matmul"
    assert kernel(m=16).kernel == "matmul"
    assert kernel(m=512, n=512).kernel == "matmul"
    assert kernel(m=16, n=4096, batch=100).kernel == "matmul"
    assert "TMA needs" in kernel(descriptors=False).rejected[0].why
    assert plan_matmul(MatmulProblem(1, 4096, 4096, 4096), device_named("a100")).kernel == "matmul"
    assert plan_matmul(MatmulProblem(1, 4096, 4096, 4096), H200, portable=True).kernel == "matmul"


RESULTS = Path(__file__).parents[3] / "benchmarks/results"


def cases(kind):
    """(record, us of plans that a caller can give, us of the default before)."""
    lines = [
        (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in ("products", "products_before")
    ]
    now, before = (list(map(json.loads, each)) for each in lines)
    earlier = {tuple(case.get(name) for name in KEY): case["us"]["default"] for case in before}
    for case in now:
        if case["kind"] == kind:
            us = {name: time for name, time in case["us"].items() if name not in ("cuBLAS", "default", "invariant")}
            yield case, us, earlier[tuple(case.get(name) for name in KEY)]


KEY = ("kind", "bits", "m", "n", "k")


def test_tiles_were_measured():
    """Of 110 products those of 16 bits take one of the fastest tiles, and numerics="invariant" loses nothing that others have."""
    slower = {"default": [], "invariant": []}
    for case, us, before in cases("matmul"):
        problem = MatmulProblem(1, case["m"], case["n"], case["k"], b_major="n" if case["turned"] else "k")
        for how, plan in (("default", plan_matmul(problem, H200)), ("invariant", invariant_matmul(problem, H200))):
            tiles = {name: time for name, time in us.items() if how == "default" or "shares" not in name}
            slower[how].append(us[products.named(plan)] / min(tiles.values()))
            # one row of 1024 columns: shares would pay
            few = case["m"] == 1 and case["n"] == 1024
            assert slower[how][-1] <= (1.18 if few else 1.08), (case, products.named(plan))
            assert us[products.named(plan)] <= (1.13 if few else 1.07) * before or case["turned"], (case, how)
    assert len(slower["default"]) == 110
    assert all(math.prod(each) ** (1 / 110) < 1.01 for each in slower.values())


def test_tiles_of_few_bits_were_measured():
    """The invariant plan takes one of the fastest tiles.  Plans with shares of K were timed before only."""
    slower = []
    for case, us, before in cases("lowbit"):
        problem = LowbitProblem(case["m"], case["n"], case["k"], case["bits"], 128, zeros="integer")
        plan, default = invariant_lowbit(problem, H200), plan_lowbit(problem, H200)
        slower.append(us[few_bits(plan)] / min(us.values()))
        assert slower[-1] <= 1.12, (case, plan)
        if case["m"] > MOST_FEW:
            assert min(*us.values(), before) >= (us[few_bits(default)] if default.splits == 1 else before) / 1.06, case
    assert len(slower) == 60 and math.prod(slower) ** (1 / 60) < 1.02


def few_bits(plan):
    return plan.path if plan.path == "dequantise" else f"{plan.path} {plan.block_n}x{plan.block_m}"


def test_few_tiles_share_the_sum():
    plan = plan_matmul(MatmulProblem(1, 512, 512, 16384), H200)
    assert plan.splits > 1 and plan.rule == "split-k" and plan.grid[0] <= H200.sms
    assert plan_matmul(MatmulProblem(1, 512, 512, 256), H200).splits == 1
    folded = plan_matmul(MatmulProblem(64, 512, 512, 256, fold=True), H200)
    assert folded.splits > 1 and folded.cost.flops == 2 * 64 * 512 * 512 * 256


def test_cost_and_bound():
    n = 4096
    plan = plan_matmul(MatmulProblem(1, n, n, n), H200)
    assert plan.cost.flops == 2 * n**3 and plan.cost.bytes == 3 * 2 * n**2
    assert plan.cost.l2_bytes == 32 * 16 * (128 + 256) * n * 2
    assert plan.bound.resource == "tensor pipe" and plan.bound.seconds == pytest.approx(2 * n**3 / 760e12)
    assert plan_matmul(MatmulProblem(1, 16, n, n), H200).bound.resource == "DRAM"
    eight = plan_matmul(MatmulProblem(1, n, n, n, dtype="float8_e4m3fn"), H200)
    assert dict(eight.bound.times)["tensor pipe"] == pytest.approx(plan.bound.seconds / 2)
    shared = MatmulProblem(16, 64, 64, 64, b_shared=True, saved=True).cost
    assert shared.bytes == 2 * (16 * 64 * 64 + 64 * 64 + 2 * 16 * 64 * 64)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"block_m": 48}, "block_m: must be a power of two from 16 to 256, got 48"),
        ({"block_m": 64}, "block_m: must be 128 with matmul_hopper, got 64"),
        ({"block_n": 64}, "block_n: must be 128 or 256 with matmul_hopper, got 64"),
        ({"num_stages": 8}, "num_stages: needs 417 KiB of shared memory, a program on h200 has 227 KiB"),
        ({"splits": 65}, "splits: must be at most 64, the tiles of the sum over k, got 65"),
        ({"splits": 0}, "splits: must be from 1 to 1024, got 0"),
        ({"kernel": "cublas"}, "kernel: must be 'matmul' or 'matmul_hopper', got 'cublas'"),
        (
            {"kernel": "matmul", "num_warps": 1},
            "num_warps: the accumulator needs 512 registers a thread, there are 255",
        ),
    ],
)
def test_overrides_are_exact_or_refused(changes, text):
    plan = plan_matmul(MatmulProblem(1, 4096, 4096, 4096), H200)
    with pytest.raises(PlanError) as caught:
        plan.with_tile(**changes)
    assert str(caught.value) == f"plan field {text}"
    chosen = plan.with_tile(block_n=128, num_stages=3, splits=4)
    assert (chosen.block_n, chosen.num_stages, chosen.splits, chosen.rule) == (128, 3, 4, "override")
    with pytest.raises(PlanError, match="group: must be 1 in plain order, got 4"):
        plan_matmul(plan.problem, H200, "plain").with_tile(group=4)


def test_it_says_what_it_does():
    text = str(plan_matmul(MatmulProblem(1, 4096, 4096, 4096, bias="columns", activation="gelu"), H200))
    for part in ("matmul_hopper on NVIDIA H200", "tile 128 x 256 x 64", "bound: tensor pipe", "not matmul:"):
        assert part in text
    refuses(PlanError, "order must be", plan_matmul, MatmulProblem(1, 4, 4, 4), H200, "best")
    refuses(PlanError, "problem field k must be an int of at least 0, got -1", MatmulProblem, 1, 4, 4, -1)


# ---------------------------------------------------------------- 8-bit products


def plan(m, n=8192, k=8192, kind="int8", **options):
    return plan_eight(EightProblem(m, n, k, kind, **options), H200)


@pytest.mark.parametrize("device", sorted(DEVICES))
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_every_shape_has_a_plan_within_the_limits_eight(device, kind):
    """A plan checks itself when it is made; every split has something to do, and all of K is somebody's."""
    record = device_named(device)
    if kind != "int8" and record.backend != "interpreter" and record.generation < 89:
        refuses(Unsupported, "float8_e4m3fn", plan_eight, EightProblem(1, 64, 64, kind), record)
        return
    for m in (1, 17, 64, 65, 1000, 70000):
        for n in (1, 100, 4096, 152064):
            for k in (1, 100, 4096, 18944):
                made = plan_eight(EightProblem(m, n, k, kind), record)
                assert (
                    1 <= made.parts <= made.splits
                    and (made.parts - 1) * made.each < made.steps <= made.parts * made.each
                )
                assert made.steps * made.block_k >= k
                if made.kernel != PORTABLE:
                    assert made.shared_bytes <= record.smem_per_block and record.arch == 90


def test_which_kernel_eight():
    assert [plan(m).kernel for m in (1, 16, 64, 512, 4096)] == [ROWS, ROWS, ROWS, HOPPER, HOPPER]
    assert plan(4096, 256).kernel == ROWS  # few tiles
    one = plan(1)
    assert one.parts == 1 and one.items == 128  # a program an SM, nothing to add up
    assert plan(1, 1024).parts > 1
    assert (plan(256).block_n, plan(4096).block_n) == (128, 256)
    for refused, why in (
        (plan(1, aligned=False), "multiples of 16 bytes"),
        (plan_eight(one.problem, H200, True), "asked for"),
    ):
        assert refused.kernel == PORTABLE and {r.what for r in refused.rejected} == {ROWS, HOPPER}
        assert all(why in r.why for r in refused.rejected)
    assert "written for sm_90" in plan_eight(one.problem, device_named("b200")).rejected[0].why
    assert {r.what for r in one.rejected} == {HOPPER, PORTABLE}
    text = str(one)
    assert ROWS in text and "not matmul_eight_hopper" in text and one.reason in text


def test_the_estimate_prefers_what_it_should():
    """More rows never cost less; the least of what is tried is taken."""
    times = [seconds(plan(m)) for m in (1, 16, 64, 128, 256, 512, 1024, 4096)]
    assert times == sorted(times) and 16e-6 < times[0] < 25e-6 and times[-1] < 600e-6
    assert all(seconds(plan(m)) <= seconds(replace(plan(m), splits=2)) for m in (1, 16, 64))


def test_fields_that_do_not_fit():
    one, many = plan(1), plan(4096)
    for made, changes, why in (
        (one, {"block_m": 8}, "block_m"),
        (one, {"block_n": 256}, "block_n"),
        (one, {"stages": 40}, "stages"),
        (many, {"splits": 2}, "splits"),
        (many, {"kernel": "other"}, "kernel"),
        (many, {"block_k": 100}, "power of two"),
        (many, {"device": device_named("a100")}, "written for sm_90"),
    ):
        refuses(PlanError, why, replace, made, **changes)
    assert isinstance(replace(many, stages=3), EightPlan)


def test_matmul_of_e4m3():
    """The kernel for sm_90 where k lies side by side in both, in steps of 128."""

    def made(**changes):
        fields = {"batch": 1, "m": 4096, "n": 4096, "k": 4096, "dtype": "float8_e4m3fn", "b_major": "k", "scaled": True}
        return plan_matmul(MatmulProblem(**{**fields, **changes}), H200)

    best = made()
    assert best.kernel == "matmul_hopper" and best.block_k == 128 and best.block_n == 256
    assert best.shared_bytes == plan_matmul(MatmulProblem(1, 4096, 4096, 4096), H200).shared_bytes
    for changes in ({"b_major": "n"}, {"a_major": "m"}):
        other = made(**changes)
        assert other.kernel == "matmul" and "k side by side" in other.rejected[0].why
    assert (
        made(batch=3).kernel == "matmul"
        and made(descriptors=False).kernel == "matmul"
        and made(m=16).kernel == "matmul"
    )
    refuses(PlanError, "block_k", best.with_tile, block_k=64)
    assert best.with_tile(splits=2).splits == 2

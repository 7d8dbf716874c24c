"""The plan of 8-bit products: which kernel for which rows, limits, refusals with their reasons."""

from dataclasses import replace

import pytest

from tilefold.errors import PlanError, Unsupported
from tilefold.plan.device import DEVICES, device_named
from tilefold.plan.matrix.eight import HOPPER, PORTABLE, ROWS, EightPlan, EightProblem, plan_eight, seconds
from tilefold.plan.matrix.matmul import MatmulProblem, plan_matmul

H200 = device_named("h200")


def plan(m, n=8192, k=8192, kind="int8", **options):
    return plan_eight(EightProblem(m, n, k, kind, **options), H200)


@pytest.mark.parametrize("device", sorted(DEVICES))
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_every_shape_has_a_plan_within_the_limits(device, kind):
    """A plan checks itself when it is made; every split has something to do, and all of K is somebody's."""
    record = device_named(device)
    if kind != "int8" and record.backend != "interpreter" and record.generation < 89:
        with pytest.raises(Unsupported, match="float8_e4m3fn"):
            plan_eight(EightProblem(1, 64, 64, kind), record)
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


def test_which_kernel():
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
        with pytest.raises(PlanError, match=why):
            replace(made, **changes)
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
    with pytest.raises(PlanError, match="block_k"):
        best.with_tile(block_k=64)
    assert best.with_tile(splits=2).splits == 2

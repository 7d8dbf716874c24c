"""The plan of a matrix product: rules, limits, JSON, overrides, and the cost that bounds it."""

import itertools

import pytest

from tilefold.errors import PlanError, Unsupported
from tilefold.plan.device import DEVICES, device_named
from tilefold.plan.matrix.matmul import MatmulPlan, MatmulProblem, plan_matmul

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
    assert MatmulPlan.from_json(plan.to_json()) == plan


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
            "num_warps: the accumulator needs 1024 registers a thread, there are 255",
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
    with pytest.raises(PlanError, match="order must be"):
        plan_matmul(MatmulProblem(1, 4, 4, 4), H200, "best")
    with pytest.raises(PlanError, match="problem field k must be an int of at least 0, got -1"):
        MatmulProblem(1, 4, 4, -1)

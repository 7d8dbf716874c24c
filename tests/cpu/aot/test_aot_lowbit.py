"""The kernels for weights of few bits, as planned for real devices, compile for their targets under two Tritons."""

from dataclasses import replace

import pytest

from aot_cases import DEVICES, Results, compiled, job
from tilefold.plan import device_named
from tilefold.plan.matrix.lowbit import LowbitPlan, LowbitProblem, plan_lowbit

SHAPES = {"m1": 1, "m16": 16, "m64": 64, "m256": 256}
PROBLEMS = {
    **{
        f"{name} {bits} bits": LowbitProblem(m, 8192, 8192, bits, 128, "integer")
        for name, m in SHAPES.items()
        for bits in (4, 3)
    },
    "m1 8 bits": LowbitProblem(1, 8192, 8192, 8, 128, "integer"),
    "m1 2 bits": LowbitProblem(1, 8192, 8192, 2, 128, "integer"),
    "m64 8 bits fp16": LowbitProblem(64, 8192, 8192, 8, 32, "none", "float16", "float16"),
    "m64 table": LowbitProblem(64, 8192, 8192, 4, 64, "table"),
    "m16 scales apart": LowbitProblem(16, 704, 2112, 4, 2112, "integer", "bfloat16", "float16", False),
    "dequantise 4 bits": LowbitProblem(65536, 8192, 8192, 4, 128, "integer"),
}
H200 = device_named("h200")
MORE = {
    "hopper 64": replace(plan_lowbit(PROBLEMS["m64 4 bits"], H200), path="hopper", block_n=128, block_m=64, num_warps=4,
                         stages=8, registers=0)
}  # fmt: skip  # as rows of the table may have them
# the most shared memory and registers that tiles of numerics="invariant" take
for bits, group, block_n in ((4, 256, 128), (8, 8192, 128), (3, 8192, 64), (2, 256, 64)):
    made = LowbitProblem(64, 8192, 8192, bits, group, "integer")
    MORE[f"tile {block_n}, {bits} bits"] = LowbitPlan(
        made, H200, "tile", "", block_n=block_n, block_m=64, stages=3 if bits < 4 else 4, scaled="before", join=True
    )
PORTABLE = ("m16 4 bits", "m64 3 bits", "m64 8 bits fp16", "dequantise 4 bits")
NEWEST = ("m1 4 bits", "m64 4 bits", "m64 table")
JOBS = {
    (name, target): job("matrix.lowbit_launch", target, plan=plan_lowbit(made, device_named(device)))
    for name, made in PROBLEMS.items()
    for target, device in DEVICES.items()
    if target == "sm_90" or name in PORTABLE
}
JOBS |= {(name, "sm_90"): job("matrix.lowbit_launch", "sm_90", plan=plan) for name, plan in MORE.items()}
results = compiled(__name__, JOBS, NEWEST)


@pytest.mark.parametrize(("name", "target"), JOBS)
def test_kernels(request: pytest.FixtureRequest, results: Results, name: str, target: str) -> None:
    """Nothing spilled in a loop, tensor instructions, wgmma where the plan says so."""
    plan = JOBS[name, target].kwargs["plan"]
    path = plan.path
    best = path == "hopper" or (path == "tile" and target == "sm_90")
    tensor = "best" if best else "none" if path == "dequantise" else "any"
    # Triton 3.9 keeps a register too many in each of four consumers: 3 of a loop's 250 instructions; 3.6 spills none.
    few = path == "hopper" and plan.block_n == 256 and request.node.callspec.params["results"] == "newest"
    report = results.clean(name, target, tensor=tensor, spills="any" if few else "outside loops")
    assert report.loop_spills <= 4 * few
    if path == "tile" and target == "sm_90" and plan.problem.exact and plan.problem.aligned:
        for loop in report.loops:  # scales come by asynchronous copies: nothing in the loop is waited for
            assert not loop.opcodes.get("LDG"), loop.opcodes
            assert loop.opcodes.get("LDGSTS"), loop.opcodes
    if path == "dequantise" and target == "sm_90":
        assert (
            sum(report.opcodes.get(op, 0) for op in ("LDG", "STG")) <= 64
        )  # 16 bytes each but for scales and zero points

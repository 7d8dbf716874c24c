"""The kernels for weights of few bits, as planned for real devices, compile for their targets under two Tritons."""

import pytest

from aot_cases import DEVICES, Results, compiled
from tilefold.aot import Job
from tilefold.plan import device_named
from tilefold.plan.matrix.lowbit import LowbitProblem, plan_lowbit

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
PORTABLE = ("m16 4 bits", "m64 3 bits", "m64 8 bits fp16", "dequantise 4 bits")
NEWEST = ("m1 4 bits", "m64 4 bits", "m64 table")
JOBS = {
    (name, target): Job(
        "tilefold.ops.matrix.lowbit_launch:example_launch", {"plan": plan_lowbit(made, device_named(device))}, target
    )
    for name, made in PROBLEMS.items()
    for target, device in DEVICES.items()
    if target == "sm_90" or name in PORTABLE
}
pytestmark = pytest.mark.xdist_group("test_aot_lowbit")  # one process compiles, the others would only repeat it


@pytest.fixture(scope="module", params=["installed", "newest"])
def results(request: pytest.FixtureRequest) -> Results:
    return compiled(JOBS, request.param, NEWEST)


@pytest.mark.parametrize(("name", "target"), JOBS)
def test_kernels(results: Results, name: str, target: str) -> None:
    """Nothing spilled in a loop, tensor instructions, wgmma where the plan says so."""
    found = results.of(name, target)
    path = JOBS[name, target].kwargs["plan"].path
    tensor = {"hopper": "best", "dequantise": "none"}.get(path, "any")
    assert found.problems(tensor=tensor, spills="outside loops") == ()  # type: ignore[arg-type]
    assert found.report is not None
    if path == "dequantise" and target == "sm_90":
        assert (
            sum(found.report.opcodes.get(op, 0) for op in ("LDG", "STG")) <= 64
        )  # 16 bytes each but for scales and zero points

"""The backward sparse kernels, as planned for real devices, compile for their targets under two Tritons."""

import pytest

from aot_cases import DEVICES, Results, compiled, problem
from tilefold.aot import Job
from tilefold.plan import device_named
from tilefold.plan.sparse import SparseProblem, plan_sparse
from tilefold.plan.sparse_backward import plan_sparse_backward

PROBLEMS = {
    "d128": SparseProblem(problem(128), 64, 64, 32),
    "d128 alone": SparseProblem(problem(128, kv_heads=16), 64, 64, 32),
    "d128 sizes causal": SparseProblem(problem(128, causal=True), 64, 64, 32, True),
    "d256": SparseProblem(problem(256), 64, 64, 32),
    "varlen d64": SparseProblem(problem(64, varlen=True), 64, 64, 32),
}
EVERYWHERE = ("d128 sizes causal", "d256")
BUILDER = "tilefold.ops.sparse_backward:example_launch"
JOBS = {
    (f"{part} {name}", target): Job(
        BUILDER,
        {
            "plan": plan_sparse(made, device_named(device), portable=True),
            "backward_plan": plan_sparse_backward(made, device_named(device), portable=True),
            "part": part,
        },
        target,
        label=f"{part} {name} for {target}",
    )
    for name, made in PROBLEMS.items()
    for target, device in DEVICES.items()
    for part in ("delta", "queries", "keys")
    if (target == "sm_90" or name in EVERYWHERE) and (part != "delta" or name == "d256")
}
pytestmark = pytest.mark.xdist_group(
    "test_aot_sparse_backward"
)  # one process compiles, the others would only repeat it


@pytest.fixture(scope="module", params=["installed", "newest"])
def results(request: pytest.FixtureRequest) -> Results:
    return compiled(JOBS, request.param)


@pytest.mark.parametrize(("name", "target"), JOBS)
def test_portable(results: Results, name: str, target: str) -> None:
    """dk and dv hold twice the accumulators of any other kernel: what lives across the loop may be spilled around it, and a few
    registers inside where that measured faster on an H200 than smaller tiles without (D=256: 1.4 times, D=128: 1.15 times)."""
    part = name.split()[0]
    found = results.of(name, target)
    rules = ("none", "none") if part == "delta" else ("best", "any" if part == "keys" else "none")
    assert found.problems(tensor=rules[0], spills=rules[1]) == ()  # type: ignore[arg-type]
    assert found.report is not None
    few = 0 if part != "keys" else 100 if name == "keys d256" else 8  # at D=256 Triton 3.6 has 5, 3.9 has 85
    assert sum(loop.spills for loop in found.report.loops) <= few

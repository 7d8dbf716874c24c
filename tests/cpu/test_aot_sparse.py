"""The sparse kernels and the merge of splits, as planned for real devices, compile for four targets under two Tritons."""

import pytest

from aot_cases import DEVICES, problem
from tilefold.aot import Job, JobResult, newest_triton, run_jobs
from tilefold.aot.jobs import NEWEST_VARIABLE
from tilefold.plan import device_named
from tilefold.plan.sparse import SparseProblem, plan_sparse
from tilefold.plan.sparse_backward import plan_sparse_backward
from tilefold.plan.sparse_hopper import KERNEL as HOPPER_KERNEL
from tilefold.plan.sparse_hopper import programs_per_sm, shared_bytes

PROBLEMS = {
    "d128": SparseProblem(problem(128), 64, 64, 32),
    "d128 sizes causal": SparseProblem(problem(128, causal=True), 64, 64, 32, True),
    "d64 one block": SparseProblem(problem(64, seq_q=64), 64, 64, 64),
    "one block causal": SparseProblem(problem(128, seq_q=64, causal=True), 64, 64, 64),
    "one block sizes": SparseProblem(problem(128, seq_q=64), 64, 64, 64, True),
    "d256": SparseProblem(problem(256), 64, 64, 32),
} | {  # the other layouts of K and V, forward
    "varlen d128 causal": SparseProblem(problem(128, varlen=True, causal=True), 64, 64, 32),
    "varlen d256 sizes": SparseProblem(problem(256, varlen=True), 64, 64, 32, True),
    "varlen one block": SparseProblem(problem(128, seq_q=64, varlen=True, causal=True), 64, 64, 64),
    "pages of 16 d128 causal": SparseProblem(problem(128, causal=True), 64, 64, 32, page_size=16),
    "pages of 256 d128 one block": SparseProblem(problem(128, seq_q=64), 64, 128, 64, page_size=256),
    "pages of 100 d256 sizes": SparseProblem(problem(256), 64, 64, 32, True, page_size=100),
}
BUILDER = "tilefold.ops.sparse:example_launch"
JOBS = {
    (name, target): Job(
        BUILDER, {"plan": plan_sparse(made, device_named(device))}, target, label=f"{name} for {target}"
    )
    for name, made in PROBLEMS.items()
    for target, device in DEVICES.items()
}
HOPPER = {
    "64 d128": SparseProblem(problem(128), 64, 64, 32),
    "64 d128 sizes": SparseProblem(problem(128), 64, 64, 32, True),
    "64 d64 fp16 sizes": SparseProblem(problem(64, dtype="float16"), 64, 64, 32, True),
    "64 d64": SparseProblem(problem(64), 64, 64, 32),
    "128 d128": SparseProblem(problem(128), 128, 128, 32),
    "128 d128 fp16 tail": SparseProblem(problem(128, dtype="float16", seq_k=4000), 128, 128, 32),
    "128 d64 sizes": SparseProblem(problem(64), 128, 128, 32, True),
    "64 x 128": SparseProblem(problem(128), 64, 128, 32),
    "128 x 64": SparseProblem(problem(128), 128, 64, 32),
}
JOBS |= {
    (f"hopper {name}", "sm_90"): Job(
        BUILDER, {"plan": plan_sparse(made, device_named("h200"))}, "sm_90", label=f"hopper {name}"
    )
    for name, made in HOPPER.items()
}
# The portable kernels serve this architecture too, where the Hopper kernel does not
JOBS |= {
    (name, "sm_90"): Job(
        BUILDER, {"plan": plan_sparse(made, device_named("h200"), portable=True)}, "sm_90", label=f"{name} for sm_90"
    )
    for name, made in PROBLEMS.items()
}
JOBS |= {
    ("merge", target): Job(
        BUILDER, {"plan": plan_sparse(PROBLEMS["d64 one block"], device_named(device)), "merge": True}, target
    )
    for target, device in DEVICES.items()
}
BACKWARD = "tilefold.ops.sparse_backward:example_launch"
JOBS |= {
    (f"{part} {name}", target): Job(
        BACKWARD,
        {
            "plan": plan_sparse(made, device_named(device)),
            "backward_plan": plan_sparse_backward(made, device_named(device)),
            "part": part,
        },
        target,
        label=f"{part} {name} for {target}",
    )
    for name, made in PROBLEMS.items()
    for target, device in DEVICES.items()
    for part in ("delta", "queries", "keys")
    if name.startswith("d") and name != "d64 one block" and (part != "delta" or name == "d128")
}
pytestmark = pytest.mark.xdist_group("test_aot_sparse")  # one process compiles, the others would only repeat it


@pytest.fixture(scope="module", params=["installed", "newest"])
def results(request: pytest.FixtureRequest) -> dict[tuple[str, str], JobResult]:
    folder = newest_triton() if request.param == "newest" else None
    if request.param == "newest" and folder is None:
        pytest.skip(f"no second Triton here: run scripts/fetch_triton.py (needs a network) or set {NEWEST_VARIABLE}")
    return dict(zip(JOBS, run_jobs(list(JOBS.values()), triton=folder), strict=True))


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("name", [*PROBLEMS, "merge"])
def test_planned_configuration(results: dict[tuple[str, str], JobResult], name: str, target: str) -> None:
    tensor = "none" if name == "merge" else "best"
    other_layout = name.startswith(("varlen", "pages"))  # a few registers of the prologue wait in memory on sm_80
    assert results[name, target].problems(tensor=tensor, spills="outside loops" if other_layout else "none") == ()


@pytest.mark.parametrize("name", HOPPER)
def test_hopper(results: dict[tuple[str, str], JobResult], name: str) -> None:
    """wgmma in loops without spills or registers in flight; Triton 3.9 spills a few outside of them."""
    found = results[f"hopper {name}", "sm_90"]
    assert found.problems(spills="outside loops") == ()
    assert found.report is not None
    assert found.report.spill_store_bytes <= 32
    made = HOPPER[name]
    plan = plan_sparse(made, device_named("h200"))
    assert plan.kernel == HOPPER_KERNEL
    assert 0 <= shared_bytes(made, plan.tile) - found.report.shared_bytes < 512
    assert found.report.occupancy.programs == programs_per_sm(made)


@pytest.mark.parametrize(("name", "target"), [key for key in JOBS if key[0].split()[0] in ("delta", "queries", "keys")])
def test_backward(results: dict[tuple[str, str], JobResult], name: str, target: str) -> None:
    """dk and dv hold twice the accumulators of any other kernel: what lives across the loop may be spilled around it, and a few
    registers inside where that measured faster on an H200 than smaller tiles without (D=256: 1.4 times, D=128: 1.15 times)."""
    part = name.split()[0]
    found = results[name, target]
    assert (
        found.problems(tensor="none" if part == "delta" else "best", spills="any" if part == "keys" else "none") == ()
    )
    assert found.report is not None
    few = 0 if part != "keys" else 100 if name == "keys d256" else 8  # at D=256 Triton 3.6 has 5, 3.9 has 85
    assert sum(loop.spills for loop in found.report.loops) <= few

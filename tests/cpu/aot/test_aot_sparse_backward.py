"""The backward sparse kernels, as planned for real devices, compile for their targets under two Tritons."""

import pytest

from aot_cases import DEVICES, Results, compiled, job, problem
from tilefold.plan import device_named
from tilefold.plan.backward.kept_backward import PROGRAMS_PER_SM, backward_shared
from tilefold.plan.sparse.sparse import SparseProblem, plan_sparse
from tilefold.plan.sparse.sparse_backward import plan_sparse_backward
from tilefold.plan.sparse.sparse_backward_hopper import KERNEL

PROBLEMS = {
    "d128": SparseProblem(problem(128), 64, 64, 32),
    "d128 alone": SparseProblem(problem(128, kv_heads=16), 64, 64, 32),
    "d128 sizes causal": SparseProblem(problem(128, causal=True), 64, 64, 32, True),
    "d256": SparseProblem(problem(256), 64, 64, 32),
    "varlen d64": SparseProblem(problem(64, varlen=True), 64, 64, 32),
}
EVERYWHERE = ("d128 sizes causal", "d256")
BUILDER = "tilefold.ops.sparse.sparse_backward:example_launch"
JOBS = {
    (f"{part} {name}", target): job(
        "sparse.sparse_backward",
        target,
        plan=plan_sparse(made, device_named(device), portable=True),
        backward_plan=plan_sparse_backward(made, device_named(device), portable=True),
        part=part,
    )
    for name, made in PROBLEMS.items()
    for target, device in DEVICES.items()
    for part in ("delta", "queries", "keys")
    if (target == "sm_90" or name in EVERYWHERE) and (part != "delta" or name == "d256")
}
HOPPER = {
    "64 d128": SparseProblem(problem(128), 64, 64, 32),
    "64 d128 sizes": SparseProblem(problem(128), 64, 64, 32, True),
    "64 d128 fp16 tail": SparseProblem(problem(128, dtype="float16", seq_k=4000), 64, 64, 32),
    "64 d64": SparseProblem(problem(64), 64, 64, 32),
    "64 d64 fp16 sizes": SparseProblem(problem(64, dtype="float16"), 64, 64, 32, True, query_masked=True),
    "128 d128": SparseProblem(problem(128), 128, 128, 32),
    "128 d64 sizes": SparseProblem(problem(64), 128, 128, 32, True),
    "64 x 128": SparseProblem(problem(128), 64, 128, 32),
    "128 x 64": SparseProblem(problem(128), 128, 64, 32),
    "64 d128 spans": SparseProblem(problem(128), 64, 64, 64),  # lists of all blocks are long enough for spans
    "64 d64 spans": SparseProblem(problem(64), 64, 64, 64, True),
}
JOBS_HOPPER = {
    (part, name): job(
        "sparse.sparse_backward",
        "sm_90",
        plan=plan_sparse(made, device_named("h200")),
        backward_plan=plan_sparse_backward(made, device_named("h200")),
        part=part,
    )
    for name, made in HOPPER.items()
    for part in ("statistics", "places", "main")
    if part == "main" or name == "64 d128"
}
NEWEST = (  # compiled under the newest Triton, too, for sm_90
    *("queries d128", "keys d128", "keys d128 sizes causal", "delta d256", "statistics 64 d128", "places 64 d128"),
    *(f"main {name}" for name in ("64 d128", "64 d128 sizes", "64 d64 fp16 sizes", "128 d128", "64 d128 spans")),
)
results = compiled(__name__, JOBS | {(" ".join(key), "sm_90"): job for key, job in JOBS_HOPPER.items()}, NEWEST)


@pytest.mark.parametrize(("name", "target"), JOBS)
def test_portable(results: Results, name: str, target: str) -> None:
    """dk and dv hold twice the accumulators of any other kernel: what lives across the loop may be spilled around it, and a few
    registers inside where that measured faster on an H200 than smaller tiles without (D=256: 1.4 times, D=128: 1.15 times)."""
    part = name.split()[0]
    rules = ("none", "none") if part == "delta" else ("best", "any" if part == "keys" else "none")
    report = results.clean(name, target, tensor=rules[0], spills=rules[1])
    few = 0 if part != "keys" else 100 if name == "keys d256" else 8  # at D=256 Triton 3.6 has 5, 3.9 has 85
    assert sum(loop.spills for loop in report.loops) <= few


@pytest.mark.parametrize(("part", "name"), JOBS_HOPPER)
def test_hopper(results: Results, part: str, name: str) -> None:
    """wgmma without registers in flight in the loop of either kind of work; two programs share an SM.  Triton 3.9 loads a few
    numbers that do not change from memory again in every round of a loop of two thousand cycles."""
    found = results.of(f"{part} {name}", "sm_90")
    if part != "main":
        assert found.problems(tensor="none") == ()
        return
    assert found.problems(spills="any") == ()
    assert found.report is not None
    assert len(found.report.loops) == 2
    assert found.report.loop_spills <= (10 if found.report.triton.startswith("3.9") else 0)
    assert found.report.spill_store_bytes <= 256  # before and after the loop over a list
    plan = plan_sparse_backward(HOPPER[name], device_named("h200"))
    assert plan.kernel == KERNEL
    n = HOPPER[name].attention
    assert 0 <= backward_shared(n.dim_qk, n.itemsize, plan.keys.num_stages) - found.report.shared_bytes < 512
    assert found.report.occupancy.programs == PROGRAMS_PER_SM

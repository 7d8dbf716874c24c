"""The forward sparse kernels and the merge, as planned for real devices, compile for their targets under two Tritons."""

import pytest

from aot_cases import DEVICES, Results, compiled, job, problem
from tilefold.plan import device_named
from tilefold.plan.sparse.sparse import SparseProblem, plan_sparse
from tilefold.plan.sparse.sparse_hopper import KERNEL as HOPPER_KERNEL
from tilefold.plan.sparse.sparse_hopper import box_rows, programs_per_sm, shared_bytes

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
EVERYWHERE = ("d128 sizes causal", "d64 one block", "d256", "varlen d128 causal", "pages of 16 d128 causal")
BUILDER = "tilefold.ops.sparse.sparse_example:example_launch"
JOBS = {
    (name, target): job("sparse.sparse_example", target, plan=plan_sparse(made, device_named(device), portable=True))
    for name, made in PROBLEMS.items()
    for target, device in DEVICES.items()
    if target == "sm_90" or name in EVERYWHERE
}
PORTABLE = [*JOBS]
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
    "64 d128 causal": SparseProblem(problem(128, causal=True), 64, 64, 32),
    "128 x 64 causal sizes": SparseProblem(problem(128, causal=True), 128, 64, 32, True),
    "packed 64 d128": SparseProblem(problem(128, varlen=True), 64, 64, 32),
    "packed 64 d64 causal": SparseProblem(problem(64, varlen=True, causal=True), 64, 64, 32),
    "pages of 16 64 d128 causal": SparseProblem(problem(128, causal=True), 64, 64, 32, page_size=16),
    "packed 128 x 64 d64 fp16 sizes": SparseProblem(problem(64, dtype="float16", varlen=True), 128, 64, 32, True),
    "packed 128 d128": SparseProblem(problem(128, varlen=True), 128, 128, 32),
    "pages of 16 64 d128 sizes": SparseProblem(problem(128), 64, 64, 32, True, page_size=16),
    "pages of 16 128 d128": SparseProblem(problem(128), 128, 128, 32, page_size=16),
    "pages of 32 64 d64": SparseProblem(problem(64), 64, 64, 32, page_size=32),
    "pages of 64 64 d128": SparseProblem(problem(128), 64, 64, 32, page_size=64),
    "pages of 256 64 x 128 fp16": SparseProblem(problem(128, dtype="float16"), 64, 128, 32, page_size=256),
}
JOBS |= {
    (f"hopper {name}", "sm_90"): job("sparse.sparse_example", "sm_90", plan=plan_sparse(made, device_named("h200")))
    for name, made in HOPPER.items()
}
MIXED = ("64 d128", "64 d64 fp16 sizes", "128 d128")
JOBS |= {
    (f"hopper mixed {name}", "sm_90"): job(
        "sparse.sparse_example", "sm_90", plan=plan_sparse(HOPPER[name], device_named("h200")), mixed=True
    )
    for name in MIXED
}
JOBS |= {
    ("merge", target): job(
        "sparse.sparse_example", target, plan=plan_sparse(PROBLEMS["d64 one block"], device_named(device)), merge=True
    )
    for target, device in DEVICES.items()
}
NEWEST = (  # compiled under the newest Triton, too, for sm_90
    *(
        f"hopper {name}"
        for name in ("64 d128", "64 d128 sizes", "64 d64 fp16 sizes", "128 d128", "128 d64 sizes", "mixed 64 d128")
    ),
    *(
        f"hopper {name}"
        for name in ("64 d128 causal", "packed 64 d128", "pages of 16 64 d128 sizes", "pages of 64 64 d128")
    ),
    *("d128 sizes causal", "d64 one block", "varlen d128 causal", "pages of 16 d128 causal", "merge"),
)
results = compiled(__name__, JOBS, NEWEST)


@pytest.mark.parametrize(("name", "target"), [*PORTABLE, *(("merge", target) for target in DEVICES)])
def test_planned_configuration(results: Results, name: str, target: str) -> None:
    tensor = "none" if name == "merge" else "best"
    other_layout = name.startswith(("varlen", "pages"))  # a few registers of the prologue wait in memory on sm_80
    results.clean(name, target, tensor=tensor, spills="outside loops" if other_layout else "none")


@pytest.mark.parametrize("name", MIXED)
def test_hopper_mixed(results: Results, name: str) -> None:
    """The other branch in the epilogue leaves the loops as they are."""
    alone, mixed = (results.of(f"hopper {kind}{name}", "sm_90") for kind in ("", "mixed "))
    assert mixed.problems(spills="outside loops") == ()
    assert alone.report is not None
    assert mixed.report is not None
    assert mixed.report.occupancy.programs == alone.report.occupancy.programs
    assert len(mixed.report.loops) == len(alone.report.loops)


@pytest.mark.parametrize("name", HOPPER)
def test_hopper(results: Results, name: str) -> None:
    """wgmma in loops without spills or registers in flight; Triton 3.9 spills a few outside of them, and where a unit takes many
    boxes the loading warp does, which has 24 registers."""
    report = results.clean(f"hopper {name}", "sm_90", spills="outside loops")
    made = HOPPER[name]
    assert report.spill_store_bytes <= (48 if box_rows(made) == made.block_k else 160)
    plan = plan_sparse(made, device_named("h200"))
    assert plan.kernel == HOPPER_KERNEL
    assert 0 <= shared_bytes(made, plan.tile) - report.shared_bytes < 512
    assert report.occupancy.programs == programs_per_sm(made)

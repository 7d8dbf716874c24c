"""The kernels of the coarse and fuse stages, as planned for real devices, compile for their targets under two Tritons."""

import pytest

from aot_cases import DEVICES, Results, compiled, job, problem
from tilefold.plan import device_named
from tilefold.plan.sparse.coarse import CoarseProblem, plan_coarse

PROBLEMS = {
    "d128 mean": CoarseProblem(problem(128, seq_k=364, seq_q=23296), 64),
    "d128 max": CoarseProblem(problem(128, seq_k=364), 64, "max"),
    "d128 each": CoarseProblem(problem(128, seq_q=364, seq_k=364), 1, "each"),
    "d128 sizes": CoarseProblem(problem(128, seq_k=364), 64, "mean", True, True),
    "d256 sizes": CoarseProblem(problem(256, seq_k=364), 64, "mean", True, True),
    "d128 pointers": CoarseProblem(problem(128, seq_k=364, descriptors=False), 64),
    "d80 blocks of 16": CoarseProblem(problem(80, seq_k=364), 16, "mean", True, True),
    "d128 blocks of 128": CoarseProblem(problem(128, seq_k=364), 128),
    "d128 fp32": CoarseProblem(problem(128, seq_k=364, dtype="float32"), 64, "mean", True, True),
}
EVERYWHERE = ("d128 sizes",)
FORWARD = ("d128 max", "d128 each", "d128 blocks of 128")  # whose gradients have no kernels of their own
NEWEST = (  # compiled under the newest Triton, too, for sm_90
    *(f"{part} d128 {kind}" for part, kind in (("forward", "sizes"), ("queries", "mean"), ("keys", "sizes"))),
    *(f"{part} bfloat16 d128" for part in ("gather", "spread", "weight")),
    "fuse forward bfloat16 False",
    "fuse backward bfloat16 False",
)
JOBS = {
    (f"{part} {name}", target): job("sparse.coarse", target, plan=plan_coarse(made, device_named(device)), part=part)
    for name, made in PROBLEMS.items()
    for target, device in DEVICES.items()
    for part in ("forward", "queries", "keys")
    if (target == "sm_90" and (part == "forward" or name not in FORWARD)) or (name in EVERYWHERE and part != "queries")
}
TENSOR = [*JOBS]
JOBS |= {
    (f"{part} {dtype} d{dim}", target): job("sparse.project", target, part=part, dtype=dtype, dim=dim, sized=True)
    for part in ("gather", "spread", "weight")
    for dtype, dim in (("bfloat16", 128), ("float32", 256))
    for target in DEVICES
    if target == "sm_90" or dim == 128
}
JOBS |= {
    (f"fuse {'backward' if backward else 'forward'} {dtype} {channels}", target): job(
        "sparse.fuse", target, backward=backward, dtype=dtype, dim=128, channels=channels
    )
    for backward in (False, True)
    for dtype, channels in (("bfloat16", False), ("float32", True))
    for target in DEVICES
    if target == "sm_90" or not channels
}
STREAMING = [key for key in JOBS if key not in TENSOR]
results = compiled(__name__, JOBS, NEWEST)


@pytest.mark.parametrize(("name", "target"), TENSOR)
def test_attention_over_rows(results: Results, name: str, target: str) -> None:
    """Tensor instructions, and no spilled register in a loop; blocks of 16 rows are too few for the newest kind.  dk and dv hold
    twice the accumulators of any other kernel: as in block-sparse attention a few registers may be spilled where the tile was
    faster than smaller ones without (Triton 3.9 spills one at D=128, 18 at D=256)."""
    tensor = "none" if "fp32" in name else "any" if "blocks of 16" in name else "best"
    keys = name.startswith("keys")
    report = results.clean(name, target, tensor=tensor, spills="any" if keys else "outside loops")
    assert report.loop_spills <= (20 if "d256" in name else 4 if keys else 0)


WIDE = 104  # of a program's warps, of 16 bytes with 16-bit elements; one by one they would be hundreds


@pytest.mark.parametrize(("name", "target"), STREAMING)
def test_streaming_kernels(results: Results, name: str, target: str) -> None:
    """Few, wide loads and stores, nothing spilled."""
    report = results.clean(name, target, tensor="none")
    if target == "sm_90" and "bfloat16" in name:
        assert sum(report.opcodes.get(op, 0) for op in ("LDG", "STG")) * report.num_warps <= WIDE

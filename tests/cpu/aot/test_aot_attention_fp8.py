"""The kernel of e4m3 attention and the transposition before it, as planned for an H200, compile under both Tritons."""

import pytest

from aot_cases import Results, compiled, job, problem
from tilefold.plan import AttentionFp8Plan, AttentionProblem, device_named, plan_attention_fp8
from tilefold.plan.dense.attention_hopper import consumers_of
from tilefold.plan.dense.fp8_hopper import KERNEL

MADE: dict[str, tuple[AttentionProblem, dict[str, object]]] = {
    "d128": (problem(128), {}),
    "d128 causal": (problem(128, causal=True), {}),
    "d128 window": (problem(128, window=(256, 0)), {}),
    "d64 causal": (problem(64, causal=True), {}),
    "d80 d128": (problem(80, 128), {}),
    "d64 d96 window": (problem(64, 96, window=(256, 0)), {}),
    "d128 direct": (problem(128, causal=True), {"options": ("direct", "fence", "turns")}),
    "d256 direct causal": (problem(256, causal=True), {"options": ("direct", "fence", "turns")}),
    "d64 three warpgroups": (problem(64), {"block_m": 192, "options": ("direct", "turns", "polynomial 2")}),
}
NEWEST = ("d128", "d128 causal", "d128 window", "d64 causal", "d256 direct causal", "transposition")


def plan_of(name: str) -> AttentionFp8Plan:
    made, changes = MADE[name]
    plan = plan_attention_fp8(made, device_named("h200"))
    return plan.with_tile(kernel=KERNEL, **changes)  # type: ignore[arg-type]


JOBS = {
    (name, "sm_90"): job("dense.attention_fp8", "sm_90", problem=made, plan=plan_of(name))
    for name, (made, _) in MADE.items()
}
JOBS["transposition", "sm_90"] = job(
    "dense.attention_fp8:example_transposition", "sm_90", problem=MADE["d128"][0], plan=plan_of("d128")
)
results = compiled(__name__, JOBS, NEWEST)


@pytest.mark.parametrize("name", MADE)
def test_kernel(results: Results, name: str) -> None:
    """Products of bytes, none of them made serial or its registers overwritten; one loop a folding warpgroup, without spills."""
    result = results.of(name, "sm_90")
    assert result.problems(tensor="best", spills="outside loops") == ()
    report, plan = result.report, plan_of(name)
    assert report is not None
    assert len(report.loops) == consumers_of(plan.tile)
    assert all(loop.opcodes["QGMMA"] and not loop.hazards for loop in report.loops)
    # weights become operands of the next product by one instruction for four, without shuffles or trips through shared memory
    assert all(loop.opcodes.get("SHFL", 0) <= 4 for loop in report.loops)
    assert not any({"STS", "STSM", "LDSM", "LDS"} & set(loop.opcodes) for loop in report.loops)
    assert all(loop.opcodes.get("PRMT", 0) <= 8 for loop in report.loops)
    assert report.spill_store_bytes <= 200
    assert report.occupancy.programs == 1
    assert 0 <= plan.shared_bytes - report.shared_bytes < 512


def test_transposition(results: Results) -> None:
    """No spills; 16 bytes a load and a store."""
    results.clean("transposition", "sm_90", tensor="none", spills="none")

"""The kernels for 8-bit products, as planned for an H200, compile for sm_90 under two Tritons."""

import pytest

from aot_cases import Results, compiled, job
from tilefold.plan.device import device_named
from tilefold.plan.matrix.eight import HOPPER, ROWS, EightProblem, plan_eight
from tilefold.plan.matrix.matmul import MatmulProblem, plan_matmul

H200 = device_named("h200")
E4M3 = "float8_e4m3fn"
PLANS = {
    "many rows e4m3": plan_eight(EightProblem(4096, 8192, 8192, E4M3), H200),
    "many rows int8": plan_eight(EightProblem(1000, 8191, 8192, "int8"), H200),
    "few rows e4m3": plan_eight(EightProblem(64, 4096, 4096, E4M3), H200),
    "few rows int8": plan_eight(EightProblem(1, 8192, 8192, "int8"), H200),
}
DENSE = plan_matmul(
    MatmulProblem(1, 4096, 4096, 4096, E4M3, b_major="k", bias="columns", activation="gelu", scaled=True), H200
)
NEWEST = ("many rows e4m3",)
JOBS = {
    (name, "sm_90"): job("matrix.eight", "sm_90", plan=plan, biased=name.startswith("few"))
    for name, plan in PLANS.items()
}
JOBS["quantise", "sm_90"] = job("matrix.eight", "sm_90", plan=PLANS["many rows e4m3"], part="quantise")
JOBS["dense", "sm_90"] = job("matrix.matmul", "sm_90", plan=DENSE)
results = compiled(__name__, JOBS, NEWEST)


@pytest.mark.parametrize("name", [*PLANS, "dense"])
def test_products(results: Results, name: str) -> None:
    """Products of bytes, none made serial, no memory access beside them, no spills; sums outside where they are e4m3."""
    direct = name == "many rows int8"  # an odd N: results are stored by threads
    report = results.clean(name, "sm_90", tensor="best", spills="outside loops" if direct else "none")
    assert report is not None
    kind = "IGMMA" if "int8" in name else "QGMMA"
    loops = [loop for loop in report.loops if loop.opcodes.get(kind)]
    plan = PLANS.get(name)
    assert len(loops) == (1 if plan is not None and plan.kernel == ROWS and plan.block_n == 64 else 2)
    for loop in loops:
        assert not loop.hazards and not {"LDS", "STS", "SHFL", "LDG", "I2F", "I2FP"} & set(loop.opcodes)
        assert bool(loop.opcodes.get("FADD")) == (kind == "QGMMA")
    if plan is not None and plan.kernel == HOPPER:
        assert 0 <= report.shared_bytes - plan.shared_bytes < 34000


def test_codes_of_rows(results: Results) -> None:
    """Numbers are loaded and stored 16 and 8 bytes or more at a time: 32 a thread."""
    report = results.clean("quantise", "sm_90", tensor="none", spills="none")
    assert report is not None and report.opcodes["LDG"] <= 4 and report.opcodes["STG"] <= 6

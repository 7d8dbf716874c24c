"""The kernels of matrix products, as planned, compile for the targets; the one for sm_90 under both Tritons."""

import pytest

from aot_cases import DEVICES, Results, compiled
from tilefold.aot import Job
from tilefold.plan.device import device_named
from tilefold.plan.matrix.matmul import MatmulProblem, plan_matmul

SQUARE = {"batch": 1, "m": 4096, "n": 4096, "k": 4096}
TRAINED = {"batch": 16, "m": 1024, "n": 4096, "k": 1024, "bias": "columns", "activation": "gelu", "saved": True}
HOPPER = {
    "plain": SQUARE,
    "turned": {**SQUARE, "a_major": "m", "b_major": "k"},
    "gelu": {**TRAINED, "saved": False, "b_shared": True},
    "saved": TRAINED,
    "small": {**SQUARE, "m": 512, "bias": "rows", "activation": "silu"},
    "shares": {**SQUARE, "fold": True, "batch": 4},
    "fp32 out": {**SQUARE, "out_dtype": "float32", "bias": "full", "activation": "gelu_tanh"},
    "odd columns": {**SQUARE, "n": 4095, "b_major": "k", "out_descriptors": False},
}
NEWEST = ("plain", "turned", "saved", "fp32 out")
PORTABLE = {
    "half": {**SQUARE, "bias": "columns", "activation": "gelu"},
    "skinny": {**SQUARE, "m": 16, "b_major": "k"},
    "float32": {**SQUARE, "dtype": "float32", "out_dtype": "float32"},
    "e4m3": {**SQUARE, "dtype": "float8_e4m3fn", "b_major": "k", "scaled": True},
    "unaligned": {**SQUARE, "k": 4095, "n": 4093, "descriptors": False},
}
TARGETS = {"half": ("sm_80", "sm_90", "gfx942"), "skinny": ("sm_80", "sm_90"), "float32": ("sm_80", "sm_90")}


def plan_of(name, target="sm_90"):
    device = device_named(DEVICES[target])
    if name in HOPPER:
        plan = plan_matmul(MatmulProblem(**HOPPER[name]), device)
        return plan.with_tile(splits=2) if name == "shares" else plan
    return plan_matmul(MatmulProblem(**PORTABLE[name]), device, portable=True)


def job(name, target, part="launch", **given):
    arguments = given or {"plan": plan_of(name, target)}
    return Job(f"tilefold.ops.matrix.matmul:example_{part}", arguments, target, label=f"{name} for {target}")


JOBS = {(name, "sm_90"): job(name, "sm_90") for name in HOPPER}
JOBS |= {(name, target): job(name, target) for name in PORTABLE for target in TARGETS.get(name, ("sm_90",))}
JOBS["finish", "sm_90"] = job("finish", "sm_90", "finish", plan=plan_of("shares"))
JOBS["gradient", "sm_90"] = job("gradient", "sm_90", "gradient", activation="gelu")
results = compiled(__name__, JOBS, NEWEST)


@pytest.mark.parametrize("name", HOPPER)
def test_hopper(results: Results, name: str) -> None:
    """One loop a warpgroup of four products, none made serial; no spills but a few bytes where results are stored by threads."""
    result = results.of(name, "sm_90")
    direct = name in ("fp32 out", "odd columns", "shares")
    assert result.problems(tensor="best", spills="outside loops" if direct else "none") == ()
    report, plan = result.report, plan_of(name)
    assert report is not None and plan.kernel == "matmul_hopper"
    loops = [loop for loop in report.loops if loop.opcodes.get("HGMMA")]
    assert len(loops) == 2
    for loop in loops:
        assert loop.opcodes["HGMMA"] == 4 and not loop.hazards
        assert not {"LDS", "STS", "SHFL", "LDG"} & set(loop.opcodes)
    assert report.occupancy.programs == 1
    assert report.spill_store_bytes <= 16
    assert 0 <= plan.shared_bytes - report.shared_bytes - (32768 if direct else 0) < 1024


@pytest.mark.parametrize(("name", "target"), [key for key in JOBS if key[0] in PORTABLE])
def test_portable(results: Results, name: str, target: str) -> None:
    """Tensor cores but for exact fp32, no spills, loads in flight beside products where they are aligned."""
    exact = name == "float32"
    report = results.clean(name, target, tensor="none" if exact else "best" if name == "half" else "any", spills="none")
    assert report is not None
    if target != "gfx942" and not exact and name != "unaligned":
        assert any(loop.opcodes.get("LDGSTS") for loop in report.loops)


@pytest.mark.parametrize("name", ["finish", "gradient"])
def test_second_launches(results: Results, name: str) -> None:
    results.clean(name, "sm_90", tensor="none", spills="none")

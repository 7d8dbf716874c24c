"""The kernels that measure roofs compile to loops of nothing but what they measure."""

import pytest

from aot_cases import Results, compiled
from tilefold.aot import Job

WHAT = "tilefold.profiling.roof_launches:example_launch"
PRODUCTS = ("bfloat16", "float8_e4m3fn", "tf32")
MOVING = ("read", "write", "copy", "read_l2", "exponentials", "nothing")
JOBS = {(dtype, "sm_90"): Job(WHAT, {"part": "multiply", "dtype": dtype}, "sm_90") for dtype in PRODUCTS}
JOBS |= {(part, "sm_90"): Job(WHAT, {"part": part}, "sm_90") for part in MOVING}
results = compiled(__name__, JOBS, ("bfloat16", "read_l2"))


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_products_stay_on_the_sm(results: Results, dtype: str) -> None:
    """wgmma in the loop, no loads and stores beside it: tiles and sums never move."""
    found = results.of(dtype, "sm_90")
    assert found.problems() == ()
    assert found.report is not None and found.report.loops
    for loop in found.report.loops:
        assert not {name for name in loop.opcodes if name.startswith(("LDG", "STG", "LDS", "STS", "LDL", "STL"))}, (
            loop.opcodes
        )
        assert sum(count for name, count in loop.opcodes.items() if name.startswith(("HGMMA", "QGMMA"))) >= 4


@pytest.mark.parametrize("part", MOVING)
def test_nothing_is_spilled_and_accesses_are_wide(results: Results, part: str) -> None:
    report = results.clean(part, "sm_90", tensor="none")
    counts = report.opcodes
    loads, stores = counts.get("LDG", 0), counts.get("STG", 0)
    # 16 bytes an access: 8192 elements over 256 threads are 8 of them; exponentials load theirs once
    assert loads == {"read": 8, "read_l2": 8, "copy": 4, "write": 0, "nothing": 0}.get(part, loads)
    assert stores == {"write": 4, "copy": 4, "nothing": 0}.get(part, stores)
    if part == "exponentials":
        assert counts["MUFU.EX2"] >= 64 and counts.get("FMUL", 0) == 0, "no scaling around the instruction"

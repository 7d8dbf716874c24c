"""V narrower than K, at dims whose rows go through registers: no machine code reads a register that nobody wrote.

Under Triton 3.6 (ptxas 12.8) it did, in kernels over pages, packed and dense ones, until V's tile had K's swizzle."""

import pytest

from aot_cases import Results, compiled, job, problem
from tilefold.aot import Job
from tilefold.plan import device_named, plan_attention

DIMS = [(40, 24), (33, 17), (100, 20), (20, 10)]
H200 = device_named("h200")


def dense(dim: int, dim_v: int, varlen: bool) -> Job:
    asked = problem(dim, dim_v, causal=varlen, varlen=varlen, descriptors=False)
    plan = plan_attention(asked, H200, portable=True)
    return job("dense.attention", "sm_90", problem=asked, plan=plan)


def cached(dim: int, dim_v: int, page: int) -> Job:
    kwargs = {"dtype": "bfloat16", "dim": dim, "dim_v": dim_v, "page": page, "seq_q": 65, "splits": 1, "device": "h200"}
    return job("cache.cached", "sm_90", **kwargs)


JOBS = {
    **{(f"dense {d} {v}", "sm_90"): dense(d, v, False) for d, v in DIMS},
    **{(f"packed {d} {v}", "sm_90"): dense(d, v, True) for d, v in DIMS},
    **{(f"pages of 16 {d} {v}", "sm_90"): cached(d, v, 16) for d, v in DIMS},
    **{(f"one piece {d} {v}", "sm_90"): cached(d, v, 0) for d, v in DIMS[:1]},
}
results = compiled(__name__, JOBS, everywhere=[next(iter(JOBS))[0]], whole=True)


@pytest.mark.parametrize("name", [name for name, _ in JOBS])
def test_kernels(results: Results, name: str) -> None:
    report = results.clean(name, "sm_90", tensor="any", spills="outside loops")
    assert report.undefined == ()

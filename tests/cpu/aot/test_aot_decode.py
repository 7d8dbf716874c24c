"""The decode kernel and its merge compile for their targets under two Tritons, without spills in loops."""

import pytest

from aot_cases import DEVICES, Results, compiled, job

BUILDER = "tilefold.ops.cache.decode:example_launch"
CASES = {
    "plain": {"dtype": "bfloat16", "dim": 128, "page": 0},
    "one sequence": {"dtype": "bfloat16", "dim": 128, "page": 0, "batch": 1},
    "pages of 16": {"dtype": "bfloat16", "dim": 128, "page": 16},
    "pages of 7, D=59": {"dtype": "float16", "dim": 59, "page": 7, "group": 7},
    "D=256": {"dtype": "bfloat16", "dim": 256, "page": 64},
    "32 rows": {"dtype": "bfloat16", "dim": 128, "page": 64, "seq_q": 4, "group": 8},
    "64 rows": {"dtype": "bfloat16", "dim": 128, "page": 16, "seq_q": 4, "group": 16},
    "fp32": {"dtype": "float32", "dim": 128, "page": 16},
    "e4m3": {"dtype": "bfloat16", "dim": 128, "page": 0, "storage": "float8_e4m3fn"},
    "e4m3, scales of pages": {"dtype": "float16", "dim": 128, "page": 64, "storage": "float8_e4m3fn", "per_page": True},
    "int8": {"dtype": "bfloat16", "dim": 128, "page": 64, "storage": "int8"},
    "mla": {"dtype": "bfloat16", "dim": 576, "dim_v": 512, "page": 64, "group": 16},
    "one share": {"dtype": "bfloat16", "dim": 128, "page": 0, "splits": 1},
    "pages of 256, splits": {"dtype": "float16", "dim": 128, "page": 256, "splits": 8},
    "merge": {"dtype": "bfloat16", "dim": 128, "page": 64, "merge": True},
    "pages of 16, watched": {"dtype": "bfloat16", "dim": 128, "page": 16, "watched": True},
    "plain, watched": {"dtype": "bfloat16", "dim": 128, "page": 0, "watched": True},
    "invariant": {"dtype": "bfloat16", "dim": 128, "page": 0, "fixed": True, "splits": 8},
    "invariant, prompts": {"dtype": "bfloat16", "dim": 128, "page": 0, "fixed": True, "seq_q": 1024},
    "invariant, D=64": {"dtype": "float16", "dim": 64, "page": 0, "fixed": True, "seq_q": 9, "score_mods": ("softcap", "alibi")},
    "invariant, D=256": {"dtype": "bfloat16", "dim": 256, "page": 64, "fixed": True, "seq_q": 1024},
    "invariant, pages of 16": {"dtype": "bfloat16", "dim": 128, "page": 16, "fixed": True, "seq_q": 1024},
    "invariant, int8": {"dtype": "bfloat16", "dim": 128, "page": 64, "storage": "int8", "fixed": True},
    "invariant, mla": {"dtype": "bfloat16", "dim": 576, "dim_v": 512, "page": 64, "group": 16, "fixed": True},
    "invariant, fp32": {"dtype": "float32", "dim": 128, "page": 16, "fixed": True},
    "invariant, merge": {"dtype": "bfloat16", "dim": 128, "page": 64, "fixed": True, "splits": 8, "merge": True},
}  # fmt: skip
ELSEWHERE = {  # beside sm_90: each target's products, each conversion of bytes that it does not share with another
    "plain": ("sm_80", "sm_100"),
    "pages of 16": ("sm_100", "gfx942"),
    "e4m3": ("sm_80", "gfx942"),
    "int8": ("gfx942",),
    "merge": ("gfx942",),
    "invariant, prompts": ("sm_80", "sm_100", "gfx942"),
}
JOBS = {
    (name, target): job("cache.decode", target, **kwargs, device=device)
    for name, kwargs in CASES.items()
    for target, device in DEVICES.items()
    if target == "sm_90" or target in ELSEWHERE.get(name, ())
}
CHECKS = {f"{what}, {full}": {"what": what, "full": full} for what in ("places", "lists") for full in (False, True)}
JOBS |= {(name, "sm_90"): job("checked", "sm_90", **kwargs) for name, kwargs in CHECKS.items()}
results = compiled(__name__, JOBS, ("pages of 16", "e4m3", "mla"))


@pytest.mark.parametrize(("name", "target"), list(JOBS))
def test_kernels(results: Results, name: str, target: str) -> None:
    """Tensor instructions where there are products of halves, and no spilled register in a loop."""
    tensor = "none" if name.endswith(("fp32", "merge")) or name in CHECKS else "any"
    report = results.clean(name, target, tensor=tensor, spills="outside loops")
    assert report.loop_spills == 0


def test_prompts_and_tokens_are_computed_alike(results: Results) -> None:
    """numerics="invariant": with 128 rows and 8 warps, with 64 and 4, at the mask's edge and inside, a thread makes the same
    products, sums and powers of a tile of keys."""
    reports = [results.clean(name, "sm_90", spills="outside loops") for name in ("invariant", "invariant, prompts")]
    families = ("FMUL", "FADD", "FFMA", "MUFU.EX2", "HGMMA")
    found = [[loop.opcodes.get(name, 0) for name in families] for report in reports for loop in report.loops]
    assert [report.num_warps for report in reports] == [4, 8]
    assert len(found) == 4
    assert all(found[0])
    assert found == [found[0]] * 4

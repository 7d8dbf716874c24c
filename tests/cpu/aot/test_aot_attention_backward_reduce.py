"""The dense backward kernel that adds dq in memory compiles for sm_90 under two Tritons, in each of its versions."""

from dataclasses import replace

import pytest

from aot_cases import Results, compiled, job, problem
from tilefold.plan import device_named, plan_attention
from tilefold.plan.backward.attention_backward import AttentionBackwardPlan, plan_attention_backward
from tilefold.plan.backward.attention_backward_reduce import KERNEL, ReduceOptions, reduce_shared

ORDERED = ReduceOptions(ordered=True)
LATE = ReduceOptions(ordered=True, late=True)
LISTS = ReduceOptions(ordered=True, late=True, lists=True)
STORED = ReduceOptions(ordered=True, late=True, stored=True)
USER = {"score_mods": ("user",), "mask_mods": ("user",)}
CASES = {
    "d128": (problem(128), ReduceOptions()),
    "d128 causal": (problem(128, causal=True), ReduceOptions()),
    "d128 window fp16": (problem(128, window=(256, 100), dtype="float16"), ReduceOptions()),
    "d128 ordered": (problem(128), ORDERED),
    "d128 causal fp16 ordered": (problem(128, causal=True, dtype="float16"), ORDERED),
    "d128 window ordered": (problem(128, window=(256, 100)), ORDERED),
    "d96": (problem(96), ReduceOptions()),
    "d96 causal ordered": (problem(96, causal=True), ORDERED),
    "d96 causal apart": (problem(96, causal=True), ReduceOptions(ordered=True, apart=True)),
    "d96 causal mods that load": (problem(96, causal=True, **USER), LATE),
    "d80 ordered": (problem(80), ORDERED),
    "d72 window fp16": (problem(72, window=(256, 100), dtype="float16"), ReduceOptions()),
    "d80 softcap": (problem(80, score_mods=("softcap",)), LATE),
    "d64": (problem(64), ReduceOptions()),
    "d64 causal fp16": (problem(64, causal=True, dtype="float16"), ReduceOptions()),
    "d64 window": (problem(64, window=(256, 100)), ReduceOptions()),
    "d64 ordered": (problem(64), ORDERED),
    "d64 causal ordered": (problem(64, causal=True), ORDERED),
    "d64 window fp16 ordered": (problem(64, window=(256, 100), dtype="float16"), ORDERED),
    "d128 softcap": (problem(128, score_mods=("softcap",)), LATE),
    "d128 causal softcap fp16": (problem(128, causal=True, score_mods=("softcap",), dtype="float16"), LATE),
    "d128 alibi": (problem(128, score_mods=("alibi",)), LATE),
    "d128 causal alibi": (problem(128, causal=True, score_mods=("alibi",)), ReduceOptions(late=True)),
    "d128 score_mod": (problem(128, score_mods=("user",)), LATE),
    "d128 causal mask_mod": (problem(128, causal=True, mask_mods=("user",)), LATE),
    "d128 mods that load": (problem(128, **USER), LATE),
    "d128 causal mods that load": (problem(128, causal=True, **USER), LATE),
    "d128 window all mods fp16": (
        problem(128, window=(256, 100), dtype="float16", score_mods=("softcap", "alibi", "user"), mask_mods=("user",)),
        ReduceOptions(late=True),
    ),
    "d128 bias": (problem(128, score_mods=("bias",)), LATE),
    "d64 causal bias": (problem(64, causal=True, score_mods=("bias",)), LATE),
    "d128 bias stored": (problem(128, score_mods=("bias",)), STORED),
    "d128 causal bias stored": (problem(128, causal=True, score_mods=("bias",)), STORED),
    "d64 bias stored": (problem(64, score_mods=("bias",)), STORED),
    "d80 bias stored": (problem(80, score_mods=("bias",)), STORED),
    "d64 bias and lists of a mask stored": (
        problem(64, score_mods=("bias",), mask_mods=("mask",), mask_descriptors="tiles", mask_by_place=True),
        replace(STORED, lists=True),
    ),
    "d128 odd mask": (problem(128, mask_mods=("mask",)), LATE),
    "d128 mask": (problem(128, mask_mods=("mask",), mask_descriptors="tiles"), ORDERED),
    "d128 causal mask of keys": (problem(128, causal=True, mask_mods=("mask",), mask_descriptors="keys"), ORDERED),
    "d64 mask": (problem(64, mask_mods=("mask",), mask_descriptors="tiles"), ORDERED),
    "d64 softcap": (problem(64, score_mods=("softcap",)), LATE),
    "d128 causal lists": (problem(128, causal=True, mask_mods=("user",), mask_by_place=True), LISTS),
    "d64 lists and mods": (problem(64, **USER, mask_by_place=True), LISTS),
    "d64 causal lists": (problem(64, causal=True, mask_mods=("user",), mask_by_place=True), LISTS),
    "d128 lists in any order": (
        problem(128, mask_mods=("user",), mask_by_place=True),
        ReduceOptions(late=True, lists=True),
    ),
    "d128 table of blocks that load": (problem(128, mask_mods=("user",), mask_by_place=True), LISTS),
    "d128 lists of a mask": (
        problem(128, mask_mods=("mask",), mask_descriptors="tiles", mask_by_place=True),
        ReduceOptions(ordered=True, lists=True),
    ),
    "d64 causal alibi": (problem(64, causal=True, score_mods=("alibi",)), LATE),
    "d64 score_mod fp16": (problem(64, score_mods=("user",), dtype="float16"), ReduceOptions(late=True)),
    "d64 mods that load": (problem(64, **USER), LATE),
    "packed d64": (problem(64, varlen=True), ReduceOptions()),
    "packed d64 causal ordered": (problem(64, varlen=True, causal=True), ORDERED),
    "packed d96 causal apart": (problem(96, varlen=True, causal=True), ReduceOptions(ordered=True, apart=True)),
    "packed d72 ordered": (problem(72, varlen=True), ORDERED),
    "packed d128 window fp16": (problem(128, varlen=True, window=(256, 100), dtype="float16"), ReduceOptions()),
    "d64 window all mods": (
        problem(64, window=(256, 100), score_mods=("softcap", "alibi", "user"), mask_mods=("user",)),
        LATE,
    ),
}


def plan_of(name: str) -> AttentionBackwardPlan:
    made, options = CASES[name]
    bias = (1, made.heads, made.seq_q) if options.stored else ()
    return plan_attention_backward(made, device_named("h200"), bias).with_tiles(kernel=KERNEL, options=options)


ALL = ("d128", "d96", "d64", "packed d64", "packed d72 ordered")
PARTS = {"statistics": ALL, "last": ALL, "sum": ("d128 bias stored", "d128 causal bias stored")}
JOBS = {
    (f"{part} {name}", "sm_90"): job(
        "backward.attention_backward",
        "sm_90",
        problem=made,
        plan=plan_attention(made, device_named("h200")),
        backward_plan=plan_of(name),
        part={"statistics": "first", "sum": "bias"}.get(part, part),
        **({"reads": True} if "load" in name else {}),
    )
    for name, (made, _) in CASES.items()
    for part in ("statistics", "main", "last", "sum")
    if part == "main" or name in PARTS[part]
}
D128 = ("ordered", "causal", "causal alibi", "softcap", "mask", "mods that load")
OTHERS = (
    "d64",
    "d64 ordered",
    "d64 causal ordered",
    "d64 score_mod fp16",
    "d80 ordered",
    "d96 causal ordered",
    "d128 bias stored",
)
NAMES = (*(f"d128 {name}" for name in D128), *OTHERS, "d128", "packed d64 causal ordered")
NEWEST = ("last d128", *(f"main {name}" for name in NAMES))
results = compiled(__name__, JOBS, NEWEST)


@pytest.mark.parametrize("name", [name for name, _ in JOBS])
def test_versions(results: Results, name: str) -> None:
    """wgmma, nothing in flight that is overwritten, no product made to wait for another; of D=128 a few loads in a round of 2500
    cycles and more of numbers that have no register, of D=64 none; with changes of scores 24 at most, 32 where dS
    is stored, and 72 where functions of scores load beside P in fp32 at D=64 (measured: 2 to 4 % of the time, all changes at once
    10 %)."""
    found = results.of(name, "sm_90")
    part, case = name.split(maxsplit=1)
    if part != "main":
        assert found.problems(tensor="none", spills="outside loops" if part == "sum" else "none") == ()
        return
    assert found.problems(spills="any") == ()
    assert found.report is not None
    plan = plan_of(case)
    assert len(found.report.loops) == 2  # a warpgroup each
    few = 0 if plan.problem.dim_qk == 64 else 12 if found.report.triton.startswith("3.9") else 4
    changed, table = not plan.problem.plain, "table" in name  # which partial tiles alone are asked about
    narrow = plan.problem.dim_qk == 64 and "user" in plan.problem.score_mods
    many = 112 if table else 72 if narrow else 32 if plan.stores_ds else 24 if changed else few
    assert max(loop.spills for loop in found.report.loops) <= many
    parts = 65 <= plan.problem.dim_qk <= 96  # values stay in registers
    parts = parts or plan.problem.varlen  # and the loading warp, of 24 registers, has more to know
    assert found.report.spill_store_bytes <= (
        512 if table else 352 if narrow else 192 if changed else 128 if parts else 64
    )
    shared = reduce_shared(plan.problem, plan.keys.num_stages)
    assert 0 <= shared - found.report.shared_bytes < 512
    assert found.report.occupancy.programs == 1

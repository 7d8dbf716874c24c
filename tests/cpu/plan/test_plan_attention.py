"""Plans: pure, within the limits on every device, exact in JSON, overridable, checked against the call."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.refusals import refuses
from examples import examples
from tilefold.errors import PlanError, TilefoldError, Unsupported
from tilefold.plan import DEVICES, AttentionPlan, AttentionProblem, Device, device_named, plan_attention, plan_forward
from tilefold.plan.backward.attention_backward import plan_attention_backward
from tilefold.plan.dense.attention_hopper import KERNEL as HOPPER
from tilefold.plan.dense.attention_hopper import hopper_programs, hopper_tile, hopper_violation
from tilefold.plan.limits import KERNELS, Tile, tile_violation
from tilefold.plan.rules import RULES
from tilefold.plan.tuned import TUNED

H200 = device_named("h200")
H100 = device_named("h100")
LONG = AttentionProblem(1, 16384, 16384, 16, 16, 128, 128)


def portable(problem: AttentionProblem, device: Device) -> AttentionPlan:
    """Of the kernels for every architecture: what most of these tests are about."""
    return plan_attention(problem, device, portable=True)


lengths = st.one_of(st.integers(0, 300), st.integers(0, 200_000), st.integers(0, 2**31))
dims = st.one_of(st.integers(1, 256), st.sampled_from([64, 128, 256, 257, 512, 513]))
problems = st.builds(
    lambda kv_heads, group, **rest: AttentionProblem(heads=kv_heads * group, kv_heads=kv_heads, **rest),
    kv_heads=st.integers(1, 16),
    group=st.sampled_from([1, 2, 4, 7, 8]),
    batch=st.one_of(st.integers(0, 8), st.integers(0, 100_000)),
    seq_q=lengths,
    seq_k=lengths,
    dim_qk=dims,
    dim_v=dims,
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 5000), st.integers(-1, 5000)),
    varlen=st.booleans(),
    score_mods=st.sampled_from([(), ("softcap",), ("softcap", "alibi", "bias", "user")]),
    mask_mods=st.sampled_from([(), ("mask",), ("mask", "user")]),
    sinks=st.booleans(),
    descriptors=st.booleans(),
)
devices = st.sampled_from(list(DEVICES.values()))


@examples(400)
@given(problems, devices)
def test_every_problem_gets_a_plan_within_the_limits_or_unsupported(problem: AttentionProblem, device: Device) -> None:
    try:
        plan = plan_attention(problem, device)
    except Unsupported as error:
        widest = max(problem.dim_qk, problem.dim_v)
        crowded = widest > 256 and device.smem_per_block < 128 << 10  # a device with little shared memory
        if not (
            widest > 512 or crowded or max(problem.seq_q, problem.seq_k) > 2**30
        ) and "batch, heads and seq_q" not in str(error):
            raise
        return
    if plan.kernel == HOPPER:
        assert hopper_violation(problem, device, plan.tile, plan.options) is None
    else:
        assert tile_violation(problem, device, plan.kernel, plan.tile) is None
        assert plan.kernel in KERNELS
    assert plan.shared_bytes <= device.smem_per_block
    assert plan.programs_per_sm >= 1
    assert plan.block_qk >= problem.dim_qk
    assert plan.block_v >= problem.dim_v
    pack = problem.group if "pack" in plan.options else 1
    assert plan.grid == (-(-problem.seq_q * pack // plan.block_m) * problem.batch * problem.heads // pack, 1, 1)
    assert plan.kernel != "attention_forward_box" or (problem.descriptors and not problem.varlen)
    assert plan.splits == 1
    plan.check(problem, device)
    again = plan_attention.__wrapped__(problem, device)
    assert again == plan
    assert str(again) == str(plan)
    assert AttentionPlan.from_json(plan.to_json()).to_json() == plan.to_json()
    assert all(len(line) <= 120 for line in str(plan).splitlines())


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "interpreter"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [1, 32, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("seq_q", [1, 40, 4096])
def test_every_head_dim_has_a_plan_everywhere(name: str, dtype: str, dim: int, seq_q: int) -> None:
    everything: dict[str, Any] = {
        "score_mods": ("softcap", "alibi", "bias", "user"),
        "mask_mods": ("mask", "user"),
        "sinks": True,
    }
    for extra in ({}, everything):
        plan = portable(AttentionProblem(4, seq_q, 4096, 32, 8, dim, dim, dtype, **extra), device_named(name))
        assert plan.block_m <= 128


@pytest.mark.parametrize("name", ["h200", "a100", "b200", "interpreter"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dims", [(320, 320), (512, 512), (512, 64), (16, 384)])
def test_head_dims_above_256_have_plans_where_tiles_fit(name: str, dtype: str, dims: tuple[int, int]) -> None:
    """Forward and backward; by portable kernels but for what two warpgroups of sm_90 fold."""
    rules = {"h200": "sm90up-d512", "b200": "sm90up-d512", "a100": "ampere", "interpreter": "interpreter"}
    for changes in ({}, {"varlen": True}, {"causal": True, "dropout": True}, {"score_mods": ("bias", "user")}):
        problem = AttentionProblem(4, 4096, 4096, 32, 8, *dims, dtype, **changes)  # type: ignore[arg-type]
        plan = plan_attention(problem, device_named(name))
        served = name == "h200" and dtype == "bfloat16" and not {"dropout", "score_mods"} & {*changes}
        assert ("hopper" in plan.kernel) == served
        assert "hopper" not in plan_attention_backward(problem, device_named(name)).kernel
        assert plan.rule == ("hopper" if served else rules[name]) or dtype == "float32"


@pytest.mark.parametrize("name", ["mi300x", "rtx4090"])
def test_head_dims_above_256_need_shared_memory(name: str) -> None:
    """64 and 99 KiB hold tiles of 16 bits forward; backward in fp32 they do not."""
    wide = AttentionProblem(4, 4096, 4096, 32, 8, 512, 512)
    assert plan_attention(wide, device_named(name)).block_n >= 16
    refuses(Unsupported, "no tile fits", plan_attention_backward, replace(wide, dtype="float32"), device_named(name))


FIRES = {
    "interpreter": (LONG, "interpreter"),
    "fp32": (replace(LONG, dtype="float32"), "a100"),
    "short-sequences": (replace(LONG, seq_q=49, seq_k=49), "a100"),
    "hopper": (LONG, "h100"),
    "short-queries": (replace(LONG, seq_q=17), "h200"),
    "few-programs": (replace(LONG, seq_q=300, heads=4, kv_heads=4), "a100"),
    "tuned": (replace(LONG, dropout=True), "h200"),
    "sm90up-d64": (replace(LONG, dim_v=24, dim_qk=24, score_mods=("alibi",)), "h100"),
    "sm90up-d128": (replace(LONG, dim_v=24, score_mods=("alibi",)), "h200"),
    "sm90up-d256": (replace(LONG, dim_qk=192), "b200"),
    "sm90up-d512": (replace(LONG, dim_v=320, dropout=True), "h100"),
    "ampere": (LONG, "rtx4090"),
    "cdna": (LONG, "mi300x"),
}


def test_narrow_heads_with_a_bias_share_an_sm() -> None:
    """The portable kernel, whose buffers of a bias else leave room for one program."""
    biased = replace(LONG, dim_qk=32, dim_v=32, score_mods=("bias",), bias_descriptors="tiles")
    for problem, tile in ((biased, Tile(64, 64, 4, 2)), (replace(biased, dim_v=64), Tile(128, 64, 8, 3))):
        assert plan_attention(problem, device_named("h200"), portable=True).tile == tile


def test_short_sequences_have_small_tiles() -> None:
    """Up to 64 tokens; narrow heads in a third tile of 64, too; and a bias that pointers read up to 256."""
    for tokens, dim, options, tile in [
        (16, 64, {}, Tile(16, 16, 1, 1)),
        (20, 64, {}, Tile(32, 32, 2, 1)),
        (49, 32, {}, Tile(64, 32, 4, 2)),
        (64, 128, {}, Tile(64, 64, 4, 1)),
        (64, 128, {"score_mods": ("bias",), "bias_descriptors": "tiles"}, Tile(64, 32, 4, 2)),
        (144, 32, {}, Tile(64, 32, 4, 2)),
        (196, 32, {"score_mods": ("bias",)}, Tile(64, 32, 4, 2)),
        (65, 64, {}, None),
        (128, 32, {}, None),
        (193, 32, {}, None),
        (196, 64, {"score_mods": ("bias",)}, None),
        (196, 32, {"score_mods": ("bias",), "bias_descriptors": "tiles"}, None),
    ]:
        plan = plan_attention(replace(LONG, seq_q=tokens, seq_k=tokens, dim_qk=dim, dim_v=dim, **options), H200)
        assert (plan.rule == "short-sequences") == (tile is not None), (tokens, dim, options)
        assert tile in (None, plan.tile), (tokens, dim, options)


def test_the_table_of_rules_is_complete() -> None:
    assert [rule.name for rule in RULES] == list(FIRES)
    for rule in RULES:
        assert rule.reason.endswith(".")
        assert rule.evidence.endswith(".")


@pytest.mark.parametrize("name", list(FIRES))
def test_each_rule_fires(name: str) -> None:
    problem, device = FIRES[name]
    plan = plan_attention(problem, device_named(device))
    assert plan.rule == name
    assert plan.reason
    assert plan.evidence
    assert f"{name}. " in str(plan)


def test_tuned_tiles_fit_their_architecture() -> None:
    for (dim, loads, features), (tile, measured) in TUNED.items():
        mods = {"mods": ("alibi",), "tensors": ("bias",)}.get(features, ())
        problem = replace(LONG, dim_qk=dim, dim_v=dim, score_mods=mods)
        plan = portable(replace(problem, descriptors=loads == "box", causal=features == "band"), H200)
        assert (plan.rule, plan.tile) == ("tuned", tile)
        assert plan.evidence.endswith(f": {measured}.")


@pytest.mark.parametrize(("queries", "rows"), [(1, 16), (16, 16), (17, 32), (33, 64), (63, 64)])
def test_short_queries_take_the_next_power_of_two(queries: int, rows: int) -> None:
    assert portable(replace(LONG, seq_q=queries), H200).block_m == rows


def test_short_queries_of_64_rows_use_the_full_rate_kernels() -> None:
    assert portable(replace(LONG, seq_q=40), H200).kernel == "attention_forward_box"
    assert portable(replace(LONG, seq_q=40, dim_qk=64, dim_v=64), H200).tile == Tile(64, 128, 4, 2)
    assert portable(replace(LONG, seq_q=1), H200).kernel == "attention_forward"


def test_the_interpreter_takes_64_by_64_or_less() -> None:
    device = device_named("interpreter")
    assert portable(LONG, device).tile == Tile(64, 64, 4, 1)
    assert portable(replace(LONG, seq_q=20, seq_k=5), device).tile == Tile(32, 16, 4, 1)
    assert portable(LONG, device).kernel == "attention_forward"
    assert portable(replace(LONG, varlen=True), device).kernel == "attention_forward_varlen"


def test_box_loads_are_taken_where_they_can_be() -> None:
    assert portable(LONG, H200).kernel == "attention_forward_box"
    unaligned = portable(replace(LONG, descriptors=False), H200)
    packed = portable(replace(LONG, varlen=True), H200)
    assert (unaligned.kernel, packed.kernel) == ("attention_forward", "attention_forward_varlen")
    assert "not multiples of 16 bytes" in str(unaligned)
    assert "box loads" in [entry.what for entry in packed.rejected]


def test_one_warpgroup_leaves_room_for_a_second_program() -> None:
    plan = plan_attention(LONG, H200)
    for tile, programs in (
        ({"block_m": 64, "block_n": 64, "num_stages": 3, "options": ("fence", "skip")}, 264),
        ({"block_m": 64, "block_n": 64, "num_stages": 4, "options": ("fence", "skip")}, 132),
        ({"block_n": 64}, 132),
    ):
        made = plan.with_tile(**tile)
        assert hopper_programs(made.problem, made.tile, H200) == programs
        assert f"{programs} programs, {'two' if programs == 264 else 'one'} per SM, draw" in str(made)


def test_the_kernel_for_sm_90_is_taken_where_it_can_be() -> None:
    plan = plan_attention(LONG, H200)
    assert (plan.kernel, plan.tile) == (HOPPER, Tile(128, 128, 4, 2))
    assert "two warpgroups fold" in str(plan)
    few = plan_attention(replace(LONG, seq_q=1024, heads=8, kv_heads=8), H200)
    assert few.kernel != HOPPER
    assert "It would have 64 blocks of 128 queries for 132 SMs" in str(few).replace("\n" + " " * 40, " ")
    for change, why in (
        ({"dim_v": 8}, "measured yet with head dims below 16"),
        ({"dim_v": 24, "score_mods": ("alibi",)}, "measured yet with changes of scores and head dims below 32"),
        ({"dim_v": 66}, "stores 4 columns at a time, V has 66"),
        (
            {"mask_mods": ("mask",)},
            "base or the strides of the mask are not multiples of 16 bytes, or its keys do not lie",
        ),
        (
            {"score_mods": ("bias",)},
            "base or the strides of the bias are not multiples of 16 bytes, or its keys do not lie",
        ),
        ({"query_descriptors": False}, "base or the strides of Q"),
        ({"descriptors": False}, "base or the strides of K or V"),
    ):
        refused = plan_attention(replace(LONG, **change), H200)  # type: ignore[arg-type]
        assert refused.kernel != HOPPER
        assert why in " ".join(entry.why for entry in refused.rejected if entry.what == HOPPER)
    for mods in (
        {"score_mods": ("user",)},
        {"mask_mods": ("user",)},
        {"score_mods": ("softcap", "user"), "varlen": True},
    ):
        made = plan_attention(replace(LONG, **mods), H200)  # type: ignore[arg-type]
        assert made.kernel == HOPPER
        assert "pack" not in made.options
        with pytest.raises(PlanError, match=r"pack needs sequences|a score_mod or mask_mod takes one head"):
            made.with_tile(options=("pack",))
        other = portable(made.problem, H200).refusing(HOPPER, "It is blue.")
        assert [entry.why for entry in other.rejected if entry.what == HOPPER] == ["It is blue."]
    for change, why in (
        ({"block_m": 256}, "plan field block_m: must be 64, 128 or 192"),
        ({"block_n": 32}, "plan field block_n: must be 64 or 128"),
        ({"block_m": 192}, "need 160 registers, of 160 a thread can spare 128"),
        ({"num_stages": 4}, "shared memory"),
        ({"maxnreg": 128}, "plan field maxnreg: must be None"),
        ({"options": ("quick",)}, "plan field options: must be among fence, late, turns"),
        ({"options": ("polynomial 2", "polynomial 4")}, "each version once"),
        ({"options": ("tanh",)}, "a version of softcap, which the problem does not have"),
    ):
        refuses(PlanError, why, plan.with_tile, **change)
    with pytest.raises(PlanError, match="options: attention_forward_box has no versions"):
        portable(LONG, H200).with_tile(options=("turns",))
    assert plan_attention(LONG, H200, portable=True).kernel == "attention_forward_box"


def forced(problem: AttentionProblem, **changes: object) -> AttentionPlan:
    tile = hopper_tile(problem, H200)
    asked = {"block_m": tile.block_m, "block_n": tile.block_n, "num_warps": 4, "num_stages": tile.num_stages, **changes}
    return portable(problem, H200).with_tile(kernel=HOPPER, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dims", "keys", "stages"),
    [
        ((80, 80), 128, 4),
        ((96, 96), 128, 4),
        ((128, 64), 128, 4),
        ((192, 128), 128, 2),
        ((192, 192), 64, 3),
        ((256, 64), 128, 2),
        ((256, 128), 64, 3),
        ((256, 256), 64, 2),
    ],
)
def test_tiles_for_sm_90(dims: tuple[int, int], keys: int, stages: int) -> None:
    problem = replace(LONG, dim_qk=dims[0], dim_v=dims[1])
    plan = plan_attention(problem, H200)
    assert plan.kernel == HOPPER
    assert plan.tile == Tile(128, keys, 4, stages)
    plan.check(problem, H200)


WIDE = replace(LONG, dim_qk=512, dim_v=512)


@pytest.mark.parametrize(("dims", "stages"), [((512, 512), 2), ((320, 320), 3), ((512, 128), 4), ((64, 264), 4)])
def test_wide_heads_for_sm_90(dims: tuple[int, int], stages: int) -> None:
    """Two warpgroups fold the same 64 rows."""
    problem = replace(LONG, dim_qk=dims[0], dim_v=dims[1])
    plan = plan_attention(problem, H200)
    pack = ("pack",) * (problem.group > 1)
    assert plan.kernel == "attention_forward_hopper"
    assert (plan.tile, plan.options) == (Tile(64, 32, 4, stages), ("fence", "turns", "skip", *pack))
    assert "two warpgroups fold" in str(plan)
    assert plan.grid == (-(-problem.seq_q // 64) * problem.batch * problem.heads, 1, 1)
    assert hopper_programs(problem, plan.tile, H200) == H200.sms
    assert forced(problem, block_n=64, num_stages=1).block_n == 64


def test_what_wide_heads_have_not() -> None:
    for change, why in (
        ({"block_m": 128}, "block_m: must be 64 with attention_forward_hopper and head dims above 256"),
        ({"block_n": 128}, "block_n: must be 32 or 64"),
        ({"num_stages": 3}, "shared memory"),
        ({"options": ("skip", "lazy")}, "lazy is not served with head dims above 256"),
        ({"options": ("prefetch",)}, "prefetch is not served"),
        ({"options": ("polynomial 2",)}, "polynomial 2 is not served"),
    ):
        refuses(PlanError, why, forced, WIDE, **change)
    for changes in ({"score_mods": ("bias",), "bias_descriptors": "keys"}, {"mask_mods": ("user",)}):
        refuses(PlanError, "with head dims above 256 it has no", forced, replace(WIDE, **changes))  # type: ignore[arg-type]


NARROW = replace(LONG, dim_qk=64, dim_v=64)


@pytest.mark.parametrize(
    ("problem", "rows"),
    [
        (NARROW, 192),
        (replace(NARROW, causal=True), 192),
        (replace(NARROW, causal=True, seq_q=2048, seq_k=2048), 64),
        (replace(NARROW, varlen=True, causal=True, seq_q=2048, seq_k=2048), 128),
        (replace(NARROW, seq_q=512, batch=4), 192),
        (replace(NARROW, seq_q=512, batch=2), 128),  # 96 blocks for 132 SMs
        (replace(NARROW, seq_q=256, batch=8), 128),  # two blocks of 128 or of 192
        (replace(NARROW, window=(4096, 0)), 192),
        (replace(NARROW, window=(1024, 1024)), 64),
        (replace(NARROW, varlen=True), 192),
        (replace(NARROW, varlen=True, causal=True), 128),
        (replace(NARROW, score_mods=("softcap",)), 128),
        (replace(NARROW, dim_v=128), 128),
    ],
    ids=str,
)
def test_three_warpgroups_where_little_is_in_vain(problem: AttentionProblem, rows: int) -> None:
    plan = plan_attention(problem, H200)
    assert (plan.kernel, plan.block_m) == (HOPPER, rows)


def short(dim: int, tokens: int, batch: int, kv_heads: int = 0, **options: Any) -> AttentionProblem:
    """Square, of 2048 channels in all."""
    heads = 2048 // dim
    return AttentionProblem(batch, tokens, tokens, heads, kv_heads or heads, dim, dim, **options)


@pytest.mark.parametrize(
    ("problem", "rows"),
    [
        (short(128, 256, 64, causal=True), 64),
        (short(128, 640, 24, causal=True), 64),
        (short(128, 768, 20, causal=True), 128),
        (short(128, 512, 32, 2, causal=True), 64),
        (short(128, 256, 64), 128),
        (short(128, 512, 2), 128),
        (short(128, 400, 32), 64),  # 448 queries and keys of 64, 512 of 128
        (short(64, 256, 64), 64),
        (short(64, 577, 16), 64),
        (short(64, 768, 20), 192),
        (short(64, 1280, 12), 192),
        (short(64, 1280, 12, causal=True), 64),
        (short(64, 3000, 5, causal=True), 64),
        (short(64, 4096, 4, causal=True), 192),
        (short(64, 512, 32, 4), 192),
        (short(64, 512, 32, 4, causal=True), 64),
        (short(64, 1024, 1), 64),  # 192 blocks of 192, 512 of 64 for twice the programs
        (short(64, 64, 64, causal=True), None),  # half of 128 rows, all of 64: not measured
        (short(64, 256, 64, window=(100, 0)), 64),
        (short(128, 256, 64, window=(100, 0)), 64),
        (short(128, 2048, 8, window=(511, 0)), 64),
        (short(128, 2048, 8, window=(512, 0)), 128),
        (short(128, 2048, 8, varlen=True, mean_q=512), 64),
        (short(128, 2048, 8, varlen=True, mean_q=1024), 128),
        (short(128, 2048, 8, varlen=True), 128),
        (short(64, 2048, 8, varlen=True, mean_q=512), 64),
        (short(64, 2048, 8, varlen=True, mean_q=1024), 192),
        (short(64, 4096, 8, varlen=True, causal=True, mean_q=2048), 64),
        (short(64, 8192, 8, varlen=True, causal=True, mean_q=4096), 192),
        (short(64, 256, 64, score_mods=("softcap",)), 128),
        (replace(short(64, 256, 64), dim_qk=40, dim_v=40), 128),
        (replace(short(64, 512, 32), dim_qk=40, dim_v=40), 192),
        (replace(short(64, 1024, 16, causal=True), dim_qk=56, dim_v=56), 128),
        (replace(short(64, 2048, 8, causal=True), dim_qk=56, dim_v=56), 192),
        (replace(short(128, 256, 64), dim_qk=72, dim_v=72), 128),
        (replace(short(128, 512, 32, causal=True), dim_qk=72, dim_v=72), 192),
        (replace(short(128, 512, 32), dim_qk=80, dim_v=80), 128),
        (replace(short(128, 512, 32, causal=True), dim_qk=104, dim_v=104), 128),
    ],
    ids=str,
)
def test_two_programs_an_sm_where_blocks_are_short(problem: AttentionProblem, rows: int | None) -> None:
    """As they were measured beside each other on an H200 (docs/performance/attention_hopper.md)."""
    plan = plan_attention(problem, H200)
    assert plan.block_m == (rows or plan.block_m)
    assert plan.block_m != 64 or plan.kernel != HOPPER or rows == 64
    if rows == 64:
        assert plan.kernel == HOPPER and plan.tile == Tile(64, 128 if problem.dim_qk == 64 else 64, 4, 3)
        assert hopper_programs(problem, plan.tile, H200) == 2 * H200.sms


LISTED = {"mask_mods": ("user",), "mask_by_place": True}
MASKED = {"mask_mods": ("mask",), "mask_by_place": True, "mask_descriptors": "tiles"}


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        (short(64, 1024, 16, **LISTED), (64, 64, 6)),
        (short(64, 2048, 8, **LISTED), (64, 128, 3)),
        (short(64, 16384, 1, **LISTED), (64, 128, 3)),
        (short(64, 16384, 1, window=(4096, 0), **LISTED), (64, 128, 3)),
        (short(64, 512, 32, **LISTED), (128, 128, 4)),  # too few scores for lists
        (short(64, 1024, 16, **MASKED), (64, 128, 2)),
        (short(128, 1024, 16, **LISTED), (64, 64, 2)),
        (short(128, 1024, 16, score_mods=("user",), **LISTED), (128, 128, 2)),
        (short(128, 4096, 4, **LISTED), (128, 128, 2)),
        (short(128, 1024, 16, **MASKED), (128, 128, 2)),
        (replace(short(64, 1024, 16, **LISTED), dim_v=128), (128, 128, 4)),
        (replace(short(64, 1024, 16, **LISTED), dim_qk=72, dim_v=72), (128, 128, 3)),
        (short(64, 1024, 16, score_mods=("user",)), (64, 128, 3)),
        (short(64, 4096, 4, causal=True, score_mods=("alibi",)), (64, 128, 3)),
        (short(64, 4096, 4, score_mods=("alibi", "user")), (64, 128, 3)),
        (short(64, 4096, 4, score_mods=("softcap", "user")), (128, 128, 4)),
        (short(64, 4096, 4, score_mods=("bias",), bias_descriptors="tiles"), (128, 128, 4)),
        (short(64, 4096, 4, varlen=True, score_mods=("user",)), (128, 128, 4)),
        (short(128, 1024, 16, score_mods=("user",)), (128, 128, 2)),
    ],
    ids=str,
)
def test_two_programs_an_sm_where_scores_change(problem: AttentionProblem, tile: tuple[int, int, int]) -> None:
    """As they were measured beside each other on an H100 (docs/performance/attention_hopper.md)."""
    plan = plan_attention(problem, H100)
    rows, keys, stages = tile
    assert plan.kernel == HOPPER
    assert plan.tile == Tile(rows, keys, 4, stages)
    assert hopper_programs(problem, plan.tile, H100, plan.options) == (2 if rows == 64 else 1) * H100.sms
    assert rows > 64 or "prefetch" in plan.options


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        (LONG, ("fence", "turns", "skip", "lazy", "prefetch")),
        (replace(LONG, dtype="float16"), ("fence", "turns", "skip", "prefetch")),
        (replace(LONG, causal=True, seq_q=4096, seq_k=4096), ("fence", "turns", "skip", "lazy", "prefetch")),
        (replace(LONG, causal=True, seq_q=4095, seq_k=4095), ("fence", "turns", "skip", "prefetch")),
        (replace(LONG, seq_k=2048), ("fence", "turns", "skip", "lazy", "prefetch")),
        (replace(LONG, seq_k=2047), ("fence", "turns", "skip", "prefetch")),
        (replace(LONG, window=(4095, 0)), ("fence", "turns", "skip", "lazy", "prefetch")),
        (replace(LONG, window=(2046, 0)), ("fence", "turns", "skip", "prefetch")),
        (short(128, 512, 32, causal=True), ("fence", "skip", "late")),
        (short(64, 512, 32, causal=True), ("skip", "prefetch")),
        (NARROW, ("turns", "skip", "lazy", "prefetch")),
        (replace(LONG, dim_qk=192, dim_v=128), ("fence", "turns", "skip", "late")),
        (replace(LONG, kv_heads=4), ("fence", "turns", "skip", "lazy", "prefetch", "pack")),
        (replace(LONG, heads=12, kv_heads=4), ("fence", "turns", "skip", "lazy", "prefetch")),
        (replace(LONG, dim_qk=256, dim_v=256, kv_heads=4), ("fence", "turns", "skip")),
        (replace(LONG, dim_qk=256, dim_v=256, seq_q=64, kv_heads=4, batch=16), ("fence", "turns", "skip", "pack")),
        (replace(LONG, kv_heads=4, varlen=True), ("fence", "turns", "skip")),
        (replace(LONG, varlen=True, mean_q=256), ("fence", "skip", "late")),
        (replace(NARROW, varlen=True, causal=True, mean_q=2048), ("skip", "prefetch")),
        (replace(NARROW, varlen=True, causal=True, mean_q=4096), ("turns", "skip", "prefetch")),
        (replace(LONG, score_mods=("alibi",)), ("fence", "turns", "skip")),
        (replace(LONG, score_mods=("softcap",)), ("fence", "turns", "skip", "prefetch", "tanh")),
        (replace(LONG, score_mods=("softcap",), dtype="float16"), ("fence", "turns", "skip", "prefetch")),
    ],
    ids=str,
)
def test_versions_that_are_taken(problem: AttentionProblem, options: tuple[str, ...]) -> None:
    plan = plan_attention(problem, H200)
    assert (plan.kernel, plan.options) == (HOPPER, options)
    assert plan.with_tile(num_stages=1).options == options
    alone = portable(problem, H200).with_tile(kernel=HOPPER, block_m=64, block_n=64, num_warps=4, num_stages=1)
    alike = {"turns", "late", "prefetch"}  # nobody to take turns with; late pays at 128, too; more room
    assert set(alone.options) - alike == set(options) - alike and "turns" not in alone.options


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({}, ("fence", "lazy"), "lazy is a version of skip"),
        ({}, ("skip", "lazy", "polynomial 2"), "lazy is a version of skip, without polynomials"),
        ({"score_mods": ("alibi",)}, ("skip", "lazy"), "which a bias"),
        ({"mask_mods": ("mask",), "mask_descriptors": "tiles"}, ("skip", "lazy"), "which a bias"),
    ],
)
def test_lazy_needs_a_first_tile_to_go_by(changes: dict[str, Any], options: tuple[str, ...], text: str) -> None:
    refuses(PlanError, text, forced, replace(LONG, **changes), options=options)


def test_versions_for_sm_90_may_be_asked_for() -> None:
    plan = forced(replace(LONG, dim_qk=64, dim_v=64), block_m=192, options=("turns", "skip", "polynomial 4"))
    assert "three warpgroups fold (turns, skip, polynomial 4)" in " ".join(str(plan).split())
    packed = forced(replace(LONG, varlen=True, sinks=True, score_mods=("softcap",)), options=("tanh",))
    assert packed.kernel == HOPPER
    few = forced(replace(LONG, batch=8, seq_q=16, kv_heads=2), options=("pack",))
    assert few.grid == (16, 1, 1)  # 8 heads x 16 queries are the rows of a block
    assert "16 blocks = 1 query tile x 8 sequences x 2 heads" in " ".join(str(few).split())
    refuses(PlanError, "turns need two warpgroups", forced, LONG, block_m=64, options=("turns",))
    refuses(PlanError, "pack needs sequences of one length", forced, replace(LONG, varlen=True), options=("pack",))
    refuses(PlanError, "divides 64, got 7", forced, replace(LONG, heads=28, kv_heads=4), options=("pack",))


def test_few_programs_halve_the_rows() -> None:
    problem = AttentionProblem(1, 1024, 1024, 8, 8, 128, 128)
    plan = portable(problem, device_named("a100"))
    assert (plan.rule, plan.block_m) == ("few-programs", 64)
    assert plan.grid[0] >= plan.device.sms


def test_buffers() -> None:
    out, lse = portable(AttentionProblem(2, 10, 20, 8, 2, 64, 32, "float16"), H200).buffers
    assert (out.name, out.shape, out.dtype) == ("out", (2, 10, 8, 32), "float16")
    assert (lse.name, lse.shape, lse.dtype) == ("lse", (2, 8, 10), "float32")
    packed = portable(AttentionProblem(2, 10, 20, 8, 2, 64, 32, varlen=True), H200).buffers
    assert [buffer.shape for buffer in packed] == [(-1, 8, 32), (8, -1)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dim_qk": 513}, "dim_qk must be at most 512, got 513"),
        ({"dim_v": 600}, "dim_v must be at most 512, got 600"),
        ({"seq_k": 2**30 + 1}, "seq_k must be at most 2**30"),
        ({"batch": 2**31}, "batch, heads and seq_q: grid needs"),
    ],
)
def test_what_no_kernel_serves_is_unsupported(change: dict[str, int], text: str) -> None:
    refuses(Unsupported, text, portable, replace(LONG, **change), H200)  # type: ignore[arg-type]


def test_old_and_unknown_devices_are_unsupported() -> None:
    with pytest.raises(Unsupported, match="device must be sm_80 or newer, got t4 \\(sm_75\\)"):
        portable(LONG, replace(H200, name="t4", arch=75))
    with pytest.raises(Unsupported, match="device must have backend cuda, hip or interpreter, got 'xpu'"):
        portable(LONG, replace(H200, backend="xpu", arch="pvc"))
    with pytest.raises(Unsupported, match="no tile fits tiny for dim_qk=128"):
        portable(LONG, replace(H200, name="tiny", smem_per_block=2048))


def test_with_tile_recomputes_what_follows() -> None:
    plan = portable(LONG, H200)
    other = plan.with_tile(block_m=128, num_warps=8, kernel="attention_forward")
    assert (other.rule, other.grid, other.kernel) == ("override", (128 * 16, 1, 1), "attention_forward")
    assert other.block_n == plan.block_n
    assert other.shared_bytes > plan.shared_bytes
    assert "rule tuned had chosen it" in other.rejected[0].why
    assert AttentionPlan.from_json(other.to_json()) == other
    assert plan.with_tile(maxnreg=168).maxnreg == 168


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"block_m": 48}, "block_m: block_m must be a power of two of at least 16, got 48"),
        ({"block_n": 8}, "block_n: block_n must be a power of two of at least 16, got 8"),
        ({"num_warps": 3}, "num_warps: num_warps must be a power of two from 1 to 32, got 3"),
        ({"num_stages": 0}, "num_stages: num_stages must be from 1 to 8, got 0"),
        ({"maxnreg": 300}, "maxnreg: maxnreg must be None or from 24 to 255, got 300"),
        ({"block_m": 256}, "num_warps: accumulators need 384 registers per thread, a thread has 255"),
        (
            {"block_n": 256, "num_warps": 8},
            "shared_bytes: needs 401 KiB of shared memory, a program on h200 has 227 KiB",
        ),
        ({"kernel": "fast"}, "kernel: kernel must be one of"),
        ({"kernel": "attention_forward_varlen"}, "kernel: kernel attention_forward_varlen does not serve"),
    ],
)
def test_with_tile_refuses_what_does_not_fit(change: dict[str, object], text: str) -> None:
    refuses(PlanError, f"plan field {text}", portable(LONG, H200).with_tile, **change)


def test_check_names_the_field_that_differs() -> None:
    plan = portable(LONG, H200)
    plan.check(LONG, device_named("h100"))
    with pytest.raises(PlanError, match="plan was made for seq_q=16384, the call has seq_q=100"):
        plan.check(replace(LONG, seq_q=100), H200)
    with pytest.raises(PlanError, match="plan was made for causal=False, the call has causal=True"):
        plan.check(replace(LONG, causal=True), H200)
    with pytest.raises(PlanError, match="plan was made for a device with arch=90, this device has arch=80"):
        plan.check(LONG, device_named("a100"))
    with pytest.raises(PlanError, match="kernel attention_forward_box cannot be used"):
        plan.check(replace(LONG, descriptors=False), H200)
    refuses(PlanError, "plan field shared_bytes", plan.check, LONG, replace(H200, smem_per_block=1000))
    plan.with_tile(kernel="attention_forward").check(replace(LONG, descriptors=False), H200)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("grid",), [1, 1, 1], "plan field grid must be (4096, 1, 1)"),
        (("block_m",), 63, "plan field block_m: block_m must be a power of two"),
        (("block_qk",), 64, "plan field block_qk must be 128"),
        (("splits",), 2, "plan field splits must be 1"),
        (("splits",), True, "AttentionPlan.splits must be int, got True"),
        (("maxnreg",), "many", "AttentionPlan.maxnreg must be int or null, got 'many'"),
        (("extra",), 1, "AttentionPlan has no field 'extra'"),
        (("problem", "window"), [1], "AttentionPlan.problem.window must have 2 entries, got 1"),
        (("problem", "score_mods"), "x", "AttentionPlan.problem.score_mods must be a list, got 'x'"),
        (("device",), 7, "AttentionPlan.device must be an object, got 7"),
    ],
)
def test_json_that_is_wrong_is_refused(path: tuple[str, ...], value: object, text: str) -> None:
    tree = json.loads(portable(LONG, H200).to_json())
    node = tree
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    refuses(PlanError, text, AttentionPlan.from_json, json.dumps(tree))


def test_json_that_is_incomplete_or_no_json_is_refused() -> None:
    tree = json.loads(portable(LONG, H200).to_json())
    del tree["rule"]
    refuses(PlanError, "AttentionPlan.rule is missing", AttentionPlan.from_json, json.dumps(tree))
    refuses(PlanError, "text is not JSON", AttentionPlan.from_json, "{")
    tree = json.loads(portable(LONG, H200).to_json())
    tree["problem"]["kv_heads"] = 3
    refuses(TilefoldError, "kv_heads must divide heads", AttentionPlan.from_json, json.dumps(tree))


def test_a_plan_reads_as_the_documentation_shows() -> None:
    page = Path(__file__).parents[3] / "docs" / "explanation" / "plan.md"
    shown = plan_forward(AttentionProblem(1, 4096, 4096, 28, 4, 128, 128, causal=True), H200)
    assert str(shown) in page.read_text(encoding="utf-8")
    plan = plan_attention(AttentionProblem(1, 1, 8192, 28, 4, 128, 128), H200)
    assert "split-KV" in str(plan)
    assert "28 of 132 SMs have work (21%)" in str(plan)


def test_an_empty_problem_launches_nothing_and_says_so() -> None:
    plan = portable(replace(LONG, batch=0), H200)
    assert plan.grid == (0, 1, 1)
    assert "nothing is launched" in str(plan)
    assert "none: there is no work." in str(portable(replace(LONG, seq_q=0), H200))
    assert "No key is live" in str(portable(replace(LONG, seq_k=0), H200))


def test_a_tile_that_may_spill_says_so() -> None:
    plan = portable(replace(LONG, descriptors=False), device_named("a100"))
    assert "may spill" not in str(plan)
    assert "may spill" in str(plan.with_tile(num_warps=4))

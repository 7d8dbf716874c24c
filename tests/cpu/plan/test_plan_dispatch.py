"""Split decisions: flash-attention's against a brute force and known cases, ours against the plans, whole generations."""

import ctypes
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.refusals import refuses
from examples import examples
from tilefold.errors import DtypeError, PlanError, ShapeError, Unsupported, ValueRangeError
from tilefold.plan import (
    DEVICES,
    POLICIES,
    AttentionProblem,
    Generation,
    SplitDecision,
    device_named,
    plan_attention,
    plan_splits,
    trace_generation,
)
from tilefold.plan.cache.cached import plan_cached
from tilefold.plan.cache.flash_split import flash_candidates, flash_plain_tile, flash_splits, flash_work

H200, A100, L4 = device_named("h200"), device_named("a100"), device_named("l4")
NVIDIA = [name for name in sorted(DEVICES) if DEVICES[name].backend == "cuda"]
QWEN = AttentionProblem(1, 1, 8192, 28, 4, 128, 128)


def f32(value):
    return ctypes.c_float(value).value


def brute_force(tiles, slots, blocks):
    """Every number of splits tried by dealing the blocks out: it counts if its longest part is shorter than with one fewer."""
    if tiles >= f32(f32(0.8) * slots):
        return 1
    scored = {}
    longest = math.inf
    for splits in range(1, min(128, slots, blocks) + 1):
        part = math.ceil(Fraction(blocks, splits))
        if part < longest:
            waves = f32(f32(tiles * splits) / slots)
            scored[splits] = f32(waves / math.ceil(waves))
        longest = part
    enough = 0.85 * max(scored.values(), default=0.0)
    return min((splits for splits, filled in scored.items() if filled >= enough), default=1)


@pytest.mark.parametrize("slots", [2, 40, 116, 216, 264, 296])
def test_the_heuristic_is_the_brute_force(slots):
    for tiles in [*range(1, 40), *range(40, 320, 7), math.ceil(0.8 * slots), math.ceil(0.8 * slots) - 1]:
        for blocks in (*range(70), 100, 127, 128, 129, 200, 1024):
            assert flash_splits(tiles, slots, blocks) == brute_force(tiles, slots, blocks), (tiles, blocks)


@examples(200)
@given(st.integers(1, 600), st.integers(1, 400), st.integers(1, 4096))
def test_it_is_so_anywhere(tiles, slots, blocks):
    assert flash_splits(tiles, slots, blocks) == brute_force(tiles, slots, blocks)


def test_known_cases():
    """flash-attention's own comments: 48 tiles on 108 SMs take 2 (0.89), not 3 (0.67); of 64 blocks 12 splits are 11."""
    assert flash_splits(48, 108, 1000) == 2
    assert [one.splits for one in flash_candidates(1, 1000, 64)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 22, 32, 64]
    assert flash_splits(4, 264, 1) == 1
    assert flash_splits(212, 264, 100) == 1  # 80.3 %
    assert flash_splits(211, 264, 100) > 1  # 79.9 %
    assert flash_splits(64, 80, 100) == 1  # exactly 80 %, in 32-bit floats, too
    for wrong in ({"tiles": 0}, {"slots": 0}, {"blocks": -1}):
        refuses(ValueRangeError, next(iter(wrong)), flash_splits, **{"tiles": 1, "slots": 1, "blocks": 1, **wrong})


@pytest.mark.parametrize(("keys", "splits"), [(1, 1), (128, 1), (129, 2), (256, 2), (257, 3), (551, 5), (8192, 64)])
def test_qwen_on_an_h200(keys, splits):
    """4 tiles of packed heads in 264 slots: a split a block of 128 keys, from the second block on."""
    made = plan_splits(replace(QWEN, seq_k=keys), H200, "flash-attn", call="dense")
    assert (made.splits, made.tiles, made.slots, made.programs) == (splits, 4, 264, 4 * splits)
    names = ("flash_fwd_splitkv_kernel", "flash_fwd_splitkv_combine_kernel") if splits > 1 else ("flash_fwd_kernel", "")
    assert (made.kernel, made.combine) == names


@pytest.mark.parametrize(("dim", "block"), [(32, 256), (64, 256), (72, 128), (128, 128), (136, 64), (256, 64)])
def test_keys_a_block_by_head_dim(dim, block):
    problem = AttentionProblem(1, 1, block + 1, 8, 8, dim, dim)
    assert flash_work(problem, H200, "dense", block + 1).blocks == 2
    assert flash_work(problem, H200, "dense", block).blocks == 1
    assert plan_splits(problem, H200, "flash-attn", call="dense").block_n == block


def test_query_heads_become_rows_where_nothing_forbids_it():
    def packed(call="dense", device=H200, **change):
        return flash_work(replace(QWEN, **change), device, call, change.get("seq_k", 8192)).packed

    assert packed()
    assert packed(causal=True)  # one query sees all keys
    assert not packed(seq_q=2)
    assert not packed(kv_heads=28)
    assert not packed(score_mods=("alibi",))
    assert packed(score_mods=("softcap",))
    assert not packed(dropout=True)
    assert not packed(window=(1023, 0), causal=True)
    assert packed(window=(8192, -1))  # as wide as the keys: dropped first by flash_attn_func, only by it
    assert not packed("kvcache", window=(8192, -1))
    assert packed(dim_qk=100, dim_v=100)  # padded before flash_attn_func looks, not by flash_attn_with_kvcache
    assert not packed("kvcache", dim_qk=100, dim_v=100)


def test_where_it_never_splits():
    def splits(call="dense", paged=False, **change):
        return plan_splits(replace(QWEN, **change), H200, "flash-attn", call=call, paged=paged)

    assert splits(dropout=True).splits == 1
    assert splits("varlen").splits == 64
    assert splits("varlen", seq_q=2).splits == 1
    assert splits("varlen", window=(4096, 0)).splits == 1
    assert splits(batch=64).splits == 1  # 256 tiles in 264 slots
    assert splits(batch=52).splits > 1
    assert splits(seq_k=128).splits == 1


def test_only_the_split_kernel_reads_pages_and_appends():
    short = replace(QWEN, seq_k=100)
    for options in (
        {"call": "kvcache", "paged": True},
        {"call": "kvcache", "append": True},
        {"call": "varlen", "paged": True},
    ):
        made = plan_splits(short, H200, "flash-attn", **options)
        assert (made.kernel, made.combine, made.splits) == ("flash_fwd_splitkv_kernel", "", 1)
        assert "Only the split kernel" in made.reason
    assert plan_splits(short, H200, "flash-attn").kernel == "flash_fwd_kernel"


def test_a_cache_is_cut_by_its_capacity():
    """100 keys in a cache of 8192: all splits but the first find nothing."""
    made = plan_splits(replace(QWEN, seq_k=100), H200, "flash-attn", capacity=8192)
    assert (made.splits, made.programs, made.working) == (64, 256, 4)
    full = plan_splits(QWEN, H200, "flash-attn", capacity=8192)
    assert full.working == full.programs
    last = plan_splits(replace(QWEN, window=(99, 0)), H200, "flash-attn", capacity=8192)
    assert last.working == last.tiles  # the window's keys lie in one of its blocks


@pytest.mark.parametrize(
    ("dim", "device", "causal", "tile"),
    [
        (32, H200, False, (128, 128)),
        (64, H200, False, (128, 128)),
        (96, L4, True, (64, 64)),
        (128, A100, True, (128, 64)),
        (128, L4, False, (128, 32)),
        (128, L4, True, (64, 64)),
        (192, H200, True, (128, 64)),
        (256, A100, False, (128, 64)),
        (256, H200, False, (64, 64)),
        (256, L4, False, (64, 64)),
    ],
)
def test_tiles_without_splits(dim, device, causal, tile):
    assert flash_plain_tile(dim, device, causal, False) == tile


@pytest.mark.parametrize(
    ("change", "device", "text"),
    [
        ({"dtype": "float32"}, "h200", "dtype must be float16 or bfloat16"),
        ({}, "mi300x", "device must be an NVIDIA GPU"),
        ({}, "interpreter", "device must be an NVIDIA GPU"),
        ({"dim_v": 64}, "h200", "dim_v must be dim, got 64 and 128"),
        ({"dim_qk": 264, "dim_v": 264}, "h200", "dim must be at most 256"),
        ({"score_mods": ("bias",)}, "h200", "softcap and alibi only, got bias"),
        ({"mask_mods": ("mask",)}, "h200", "softcap and alibi only, got mask"),
        ({"sinks": True}, "h200", "got sinks"),
        ({"dropout": True, "score_mods": ("softcap",)}, "h200", "softcap does not go with dropout"),
    ],
)
def test_what_flash_attention_refuses(change, device, text):
    refuses(Unsupported, text, plan_splits, replace(QWEN, **change), device_named(device), "flash-attn", call="dense")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"policy": "mine"}, ValueRangeError, "policy must be one of flash-attn, tilefold"),
        ({"call": "func"}, ValueRangeError, "call must be one of dense, varlen, kvcache"),
        ({"capacity": 8191}, ShapeError, "capacity must be at least the keys, 8192, got 8191"),
        ({"call": "dense", "capacity": 9000}, ShapeError, "which has no cache, 8192, got 9000"),
        ({"call": "dense", "paged": True}, Unsupported, "paged needs call"),
        ({"call": "varlen", "append": True}, Unsupported, "append needs call"),
        ({"splits": 129}, ValueRangeError, "splits must be 0 to 128, got 129"),
        ({"splits": -1}, ValueRangeError, "splits must be 0 to 128, got -1"),
        ({"call": "dense", "splits": 2}, Unsupported, "splits needs call 'kvcache'"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_wrong_arguments_are_named(options, kind, text, policy):
    refuses(kind, text, plan_splits, QWEN, H200, **{"policy": policy, **options})
    refuses(ShapeError, "seq_k must be at least 1", plan_splits, replace(QWEN, seq_k=0), H200, policy)
    refuses(Unsupported, "dropout needs call", plan_splits, replace(QWEN, dropout=True), H200, policy)


def test_ours_is_what_the_plans_say():
    for capacity in (100, 552, 8192, 1 << 20):
        for batch in (1, 3, 64):
            step = plan_splits(replace(QWEN, batch=batch, seq_k=min(capacity, 5000)), H200, capacity=capacity)
            # one sequence: a share an SM, down to a tile of 64 keys; several, whose lengths differ: two, down to 512 keys
            places, least = (132, 64) if batch == 1 else (264, 512)
            parts = min(places // (4 * batch), -(-capacity // least))
            assert (step.kernel, step.combine) == ("attention_decode", "decode_combine" if parts > 3 else "")
            few = batch * 4 * capacity * 512 / 4.27e12 < 40e-6  # bytes of a full cache, and what they take
            assert step.splits == (max(1, parts) if few or batch == 1 else 1) and step.working <= step.programs
            problem = replace(QWEN, batch=batch, seq_q=64, seq_k=min(capacity, 5000))
            made = plan_splits(problem, H200, capacity=capacity)
            tile, splits = plan_cached(replace(problem, seq_k=capacity), H200, 0)
            assert (made.block_m, made.block_n, made.splits) == (tile.block_m, tile.block_n, splits)
            assert made.programs == 28 * batch * splits
    dense = plan_splits(replace(QWEN, seq_q=4096, causal=True), H200, call="dense")
    assert (
        dense.kernel
        == plan_attention(replace(QWEN, seq_q=4096, causal=True), H200).kernel
        == "attention_forward_hopper"
    )
    assert plan_splits(QWEN, H200, call="dense") == plan_splits(QWEN, H200, call="dense", capacity=QWEN.seq_k)
    assert plan_splits(QWEN, H200, call="dense").kernel == "attention_decode"
    assert plan_splits(QWEN, H200, call="varlen", paged=True).kernel == "attention_decode"
    assert plan_splits(QWEN, H200, call="varlen", paged=True, splits=5).splits == 5
    refuses(Unsupported, "softcap and alibi only, got bias", plan_splits, replace(QWEN, score_mods=("bias",)), H200)


@pytest.mark.parametrize(
    ("change", "capacity", "text"),
    [
        ({}, 8192, "22 splits are the most that fit 132 SMs"),
        ({"batch": 64}, 8192, "more than one wave"),
        ({"seq_k": 400}, 400, "no 4 tiles of 64 for each of two splits"),
        ({}, 552, "leave room for 22 splits on 132 SMs, but a cache of 552 keys gives 2"),
    ],
)
def test_our_reasons_name_the_limit_that_decided(change, capacity, text):
    long = replace(QWEN, **{"heads": 2, "kv_heads": 2, "seq_q": 130, "seq_k": 552, **change})
    made = plan_splits(long, H200, capacity=capacity)
    assert text in made.reason


@pytest.mark.parametrize("policy", POLICIES)
def test_the_caller_decides_and_json_comes_back(policy):
    made = plan_splits(QWEN, H200, policy, splits=7)
    assert made.splits == 7
    assert "asked for 7" in made.reason
    for one in (made, plan_splits(QWEN, A100, policy), plan_splits(QWEN, L4, policy, call="dense")):
        assert SplitDecision.from_json(one.to_json()) == one
    with pytest.raises(PlanError, match="decision field working must be"):
        SplitDecision.from_json(made.to_json().replace(f'"working": {made.working}', '"working": 1'))


@examples(100)
@given(
    st.sampled_from(NVIDIA), st.sampled_from(POLICIES), st.sampled_from(["dense", "varlen", "kvcache"]), st.integers(1, 40),
    st.integers(1, 300), st.integers(1, 40000), st.sampled_from([(28, 4), (32, 8), (8, 8), (12, 1)]),
    st.sampled_from([16, 64, 80, 128, 192, 256]), st.booleans(), st.sampled_from([-1, 0, 100, 5000]), st.integers(0, 5000),
)  # fmt: skip
def test_properties_of_a_decision(name, policy, call, batch, seq_q, seq_k, heads, dim, causal, left, room):
    problem = AttentionProblem(batch, seq_q, seq_k, *heads, dim, dim, causal=causal, window=(left, -1))
    capacity = seq_k + room if call == "kvcache" else None
    made = plan_splits(problem, DEVICES[name], policy, call=call, capacity=capacity)
    assert made.programs == made.tiles * made.splits
    assert made.working <= made.programs
    assert made.tiles <= made.working or not made.working or made.kernel == "attention_decode"
    assert 1 <= made.splits <= 128
    assert bool(made.combine) == (made.splits > 1) or made.kernel == "attention_decode"
    assert made.predicted_s >= made.bound.seconds * (1 - 1e-12) or not made.working
    assert made.reason
    assert str(made)


# ---------------------------------------------------------------- generations


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("call", ["dense", "varlen", "kvcache"])
def test_a_trace_is_the_decision_of_every_step(policy, call):
    run = Generation(28, 4, 128, prompt=100, new=300, call=call)
    trace = trace_generation(run, H200, policy)
    assert trace.ranges[0].first.problem.seq_q == 100
    assert [part.first_step for part in trace.ranges] == [1, *(part.last_step + 1 for part in trace.ranges[:-1])]
    assert trace.ranges[-1].last_step == 300
    total = 0.0
    for step in range(1, 301):
        part = trace.at(step)
        problem = run.problem(step)
        made = plan_splits(problem, H200, policy, call=call, capacity=400 if call == "kvcache" else None)
        assert (made.kernel, made.combine, made.splits, made.programs) == (
            part.first.kernel, part.first.combine, part.first.splits, part.first.programs)  # fmt: skip
        assert part.first.bound.seconds <= made.bound.seconds <= part.last.bound.seconds
        assert part.least_s <= made.predicted_s <= part.most_s
        total += made.bound.seconds
    assert trace.bound_s == pytest.approx(total)
    refuses(ValueRangeError, "step must be 1 to 300, got 301", trace.at, 301)


def test_64_tokens_stay_under_the_threshold_and_512_cross_it():
    def steps_with_two_kernels(new, prompt=40, **options):
        trace = trace_generation(Generation(28, 4, 128, prompt, new, **options), H200, "flash-attn")
        return sum(part.steps for part in trace.ranges if part.first.combine)

    assert steps_with_two_kernels(64) == 0
    assert steps_with_two_kernels(512) == 512 - 89  # keys of step 90: 40 + 89 = 129
    assert steps_with_two_kernels(512, batch=64) == 0  # 256 tiles fill the slots
    assert steps_with_two_kernels(64, call="kvcache", capacity=552) == 64  # by capacity, from the first step on


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"prompt": 0}, ShapeError, "prompt must be at least 1, got 0"),
        ({"new": 0}, ShapeError, "new must be at least 1"),
        ({"new": 1 << 20}, ValueRangeError, "new must be at most 65536"),
        ({"new": 2.5}, DtypeError, "new must be an integer"),
        ({"call": "paged"}, ValueRangeError, "call must be one of"),
        ({"capacity": 100}, Unsupported, "capacity needs call 'kvcache'"),
        ({"capacity": 100, "call": "kvcache"}, ShapeError, "capacity must hold the 103 keys of the last step, got 100"),
        ({"kv_heads": 3}, ShapeError, "kv_heads must divide heads"),
    ],
)
def test_a_generation_names_what_is_wrong(change, kind, text):
    refuses(kind, text, lambda: trace_generation(replace(Generation(28, 4, 128, 40, 64), **change), H200))

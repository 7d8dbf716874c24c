"""How decoding and attention over a cache are planned, and that every tile of keys has one owner, whatever the lengths."""

import dataclasses
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.refusals import refuses
from tilefold.errors import PlanError, Unsupported, ValueRangeError
from tilefold.plan import AttentionProblem, DecodePlan, DecodeProblem, device_named, plan_decode
from tilefold.plan.cache.cached import LEAST_TILES, MAX_SPLITS, plan_cached
from tilefold.plan.cache.decode import decode_kernel_refusal, slice_shape, slices_of

H200 = device_named("h200")
DEVICES = ("h200", "h100", "a100", "b200", "l4", "mi300x", "interpreter")


def problem(batch=1, seq_q=1, seq_k=8192, heads=32, kv_heads=8, dim=128, dim_v=None, dtype="bfloat16", **more):
    return DecodeProblem(AttentionProblem(batch, seq_q, seq_k, heads, kv_heads, dim, dim_v or dim, dtype), **more)


@given(
    st.lists(st.integers(0, 60) | st.integers(0, 3000), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 300),
    st.integers(1, 8),
)  # fmt: skip
def test_every_tile_has_one_owner(tiles, each, programs, least):
    owned = slices_of(tiles, each, programs, least)
    counts = [max(1, n) for n in tiles for _ in range(each)]
    even = max(-(-sum(counts) // programs), least)
    most = even * 17 // 16 if len(set(counts)) == 1 else even  # whole items, or the same shares of each
    seen, slots = {}, []
    for program, pieces in enumerate(owned):
        assert sum(end - begin for _, begin, end, _ in pieces) <= most
        assert [item for item, *_ in pieces] == list(range(pieces[0][0], pieces[-1][0] + 1)) if pieces else True
        for number, (item, begin, end, slot) in enumerate(pieces):
            assert begin < end
            seen.setdefault(item, []).append((begin, end))
            if slot < 0:
                assert (begin, end) == (0, counts[item])
            else:
                slots.append(slot)
                assert slot // 2 == program and number in (0, len(pieces) - 1)
    assert len(slots) == len(set(slots))  # two places a program do
    for item, count in enumerate(counts):
        ends = sorted(seen[item])
        assert ends[0][0] == 0 and ends[-1][1] == count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 300), st.integers(1, 8)
)
def test_the_last_to_arrive_knows_how_many_there_are(tiles, each, programs, least):
    """By the formula of the kernel: from the item's first tile and its number of tiles alone."""
    counts = [max(1, n) for n in tiles for _ in range(each)]
    length, span = slice_shape(counts, programs, least)
    parts = {}
    for pieces in slices_of(tiles, each, programs, least):
        for item, *_ in pieces:
            parts[item] = parts.get(item, 0) + 1
    first = 0
    for item, count in enumerate(counts):
        assert parts[item] == (first + count - 1) // length - first // length + 1
        first += span or count


@pytest.mark.parametrize(
    ("tiles", "each", "programs", "pieces"),
    [
        ([128] * 32, 8, 264, 1),  # 256 items: a program each
        ([128], 8, 264, 32),  # 33 shares of 4 tiles would be one more than there are
        ([32] * 64, 8, 264, 1),  # two items a program
        ([128] * 20, 8, 264, None),  # whole items would make slices of 128 of 78
        ([128] * 31 + [127], 8, 264, None),
    ],
)
def test_equal_sequences_are_cut_alike(tiles, each, programs, pieces):
    owned = slices_of(tiles, each, programs, 4)
    parts = Counter(item for program in owned for item, *_ in program)
    cuts = {frozenset((b, e) for p in owned for item, b, e, _ in p if item == i) for i in parts}
    assert (len(cuts) == 1 and set(parts.values()) == {pieces}) == (pieces is not None)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dim", [8, 64, 128, 256])
@pytest.mark.parametrize("storage", ["plain", "float8_e4m3fn", "int8"])
def test_every_device_has_a_plan_that_fits(name, dim, storage):
    device = device_named(name)
    for seq_q in (1, 3, 16):
        for dtype in ("bfloat16", "float32"):
            made = plan_decode(problem(4, seq_q, dim=dim, dtype=dtype, storage=storage), device)
            assert made.blocks * made.block_m >= made.problem.rows
            assert made.programs % device.sms == 0 or name == "interpreter"
            assert "attention_decode" in str(made)


def test_heads_and_tokens_are_rows():
    assert plan_decode(problem(), H200).block_m == 16
    assert plan_decode(problem(seq_q=5), H200).block_m == 32
    assert plan_decode(problem(seq_q=16), H200).block_m == 64
    assert plan_decode(problem(seq_q=40), H200).blocks == 3
    assert not decode_kernel_refusal(problem(seq_q=32).attention)
    assert decode_kernel_refusal(problem(seq_q=33).attention).startswith("132 rows a KV head are more than the 128")


def test_the_plan_looks_at_capacity_alone():
    assert plan_decode(problem(), H200).programs == plan_decode(problem(seq_k=131072), H200).programs
    assert plan_decode(problem(batch=64), H200).splits == 0


@pytest.mark.parametrize(
    ("batch", "keys", "splits"),
    [
        (1, 8192, 16),
        (1, 700, 11),
        (1, 60, 1),
        (1, 131072, 16),
        (4, 2048, 4),
        (4, 5000, 8),
        (32, 512, 1),
        (33, 8192, 0),
        (4, 131072, 0),
    ],
)
def test_few_keys_and_one_sequence_are_cut_into_fixed_shares(batch, keys, splits):
    made = plan_decode(problem(batch=batch, seq_k=keys), H200)
    assert (made.splits, made.merge) == (splits, "kernel" if splits > 3 else made.merge)
    assert ("fixed splits" in str(made)) == (splits == 0)
    assert not splits or made.grid <= 2 * H200.sms


def test_sequences_of_one_length_get_a_share_an_sm():
    for batch, keys, splits in ((8, 2048, 2), (8, 100, 2), (4, 2048, 4), (16, 2048, 1), (2, 60, 1)):
        asked = dataclasses.replace(problem(batch=batch, seq_k=keys), equal=True)
        made = plan_decode(asked, H200)
        assert (made.splits, made.grid <= H200.sms or splits == 1) == (splits, True)


def test_one_long_sequence_in_small_pages_is_cut_into_even_slices():
    for page, splits in ((16, 0), (48, 0), (64, 16), (256, 16), (0, 16)):
        assert plan_decode(problem(seq_k=131072, page_size=page), H200).splits == splits
    assert plan_decode(problem(seq_k=32768, page_size=16), H200).splits == 16  # 31 us: few keys


def test_values_in_keys():
    mla = problem(32, 1, 8192, 16, 1, 576, 512, shared=True)
    made = plan_decode(mla, H200)
    assert (made.problem.block_k, made.problem.block_rest, made.block_m) == (512, 64, 16)
    assert made.cost.bytes < 1.01 * 32 * 8192 * 576 * 2
    refuses(Unsupported, "576", plan_decode, dataclasses.replace(mla, shared=False), H200)


def test_what_no_plan_can_be():
    made = plan_decode(problem(), H200)
    for change in ({"block_n": 48}, {"merge": "both"}, {"splits": 129}, {"programs": 0}, {"num_stages": 0}):
        refuses(PlanError, next(iter(change)), dataclasses.replace, made, **change)
    refuses(ValueRangeError, "num_splits", plan_decode, problem(), H200, 129)
    refuses(ValueRangeError, "storage", problem, storage="fp8")
    assert dataclasses.replace(made, splits=16).grid == 128


def test_a_plan_as_json():
    made = plan_decode(problem(2, storage="int8", page_size=16), H200)
    refuses(PlanError, "merge", DecodePlan.from_json, made.to_json().replace(f'"{made.merge}"', '"first"'))
    assert "2 sequences of 1 query, a cache" in str(made)


# ---------------------------------------------------------------- attention over a cache


def problem_cached(batch=1, seq_q=1, seq_k=8192, heads=28, kv_heads=4, dim=128):
    return AttentionProblem(batch, seq_q, seq_k, heads, kv_heads, dim, dim)


def test_splits_fill_the_device_once():
    tile, splits = plan_cached(problem_cached(), H200, 0)
    assert tile.block_m == 16
    assert splits * 28 <= H200.sms < (splits + 1) * 28
    assert plan_cached(problem_cached(batch=64), H200, 0)[1] == 1  # the query tiles fill it
    assert plan_cached(problem_cached(seq_q=4096), H200, 0)[1] == 1


def test_a_short_cache_is_not_split_to_crumbs():
    for rows in (0, 1, 64, 200, 512, 4096, 1 << 20):
        tile, splits = plan_cached(problem_cached(seq_k=rows, heads=1, kv_heads=1), H200, 0)
        assert 1 <= splits <= MAX_SPLITS
        assert splits == 1 or rows >= splits * LEAST_TILES * tile.block_n - LEAST_TILES * tile.block_n


def test_the_caller_decides():
    for splits in (1, 7, MAX_SPLITS):
        assert plan_cached(problem_cached(), H200, splits)[1] == splits
    for splits in (-1, MAX_SPLITS + 1):
        refuses(ValueRangeError, "num_splits", plan_cached, problem_cached(), H200, splits)


@pytest.mark.parametrize("name", ["a100", "h100", "b200", "l4", "mi300x", "interpreter"])
@pytest.mark.parametrize("dim", [8, 64, 128, 256])
def test_every_device_has_a_tile(name, dim):
    for dtype in ("bfloat16", "float32"):
        made = AttentionProblem(2, 3, 5000, 8, 2, dim, dim, dtype=dtype)
        assert plan_cached(made, device_named(name), 0)[1] >= 1

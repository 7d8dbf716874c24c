"""The benchmark's cases: published shapes, FLOPs as published, names and filters; the lists that sparse ones attend."""

import pytest
import torch

from cases.refusals import refuses
from tilefold.bench.attention import lists
from tilefold.bench.attention.cases import DENSE, SIZES, VIDEO, Case, cases_of, lognormal_lengths
from tilefold.bench.attention.lists import Pattern, density, kept_counts, listed_blocks, lists_of, touched_blocks
from tilefold.bench.choice import figures_in, select_cases
from tilefold.errors import DtypeError, ShapeError, ValueRangeError
from tilefold.plan.problem import AttentionProblem

# (D, H, N, B) of the published dense table.
LONG, MIDDLE = (16384, 1), (4096, 4)
PUBLISHED = {
    (128, 16, *LONG),
    (128, 16, *MIDDLE),
    (128, 16, 1024, 16),
    (64, 32, *LONG),
    (64, 32, *MIDDLE),
    (256, 8, *LONG),
}


def test_full_dense_cases_begin_with_the_published_shapes_causal_and_not():
    cases = cases_of("dense")[:12]
    shapes = {(c.problem.dim_qk, c.problem.heads, c.problem.seq_q, c.problem.batch, c.problem.causal) for c in cases}
    assert shapes == {(*shape, causal) for shape in PUBLISHED for causal in (False, True)}
    assert all(c.problem.seq_q == c.problem.seq_k and c.problem.heads == c.problem.kv_heads for c in cases)
    assert all(c.problem.heads * c.problem.dim_qk == 2048 and c.problem.batch * c.problem.seq_q == 16384 for c in cases)


def test_full_dense_cases_go_on_with_other_lengths_groups_windows_and_packed_batches():
    names = {case.name for case in cases_of("dense")[12:]}
    for dim, heads in ((128, 16), (64, 32)):
        for tokens in ("512x32", "2048x8", "8192x2", "65536x1"):
            assert {f"d{dim}_h{heads}_n{tokens}", f"d{dim}_h{heads}_n{tokens}_causal"} <= names
        assert {f"d{dim}_h{heads}_packed64", f"d{dim}_h{heads}_packed64_causal"} <= names
    assert {"d128_h32k4_n8192x2", "d128_h32k4_n8192x2_causal", "d128_h16_n16384x1_window4095_0"} <= names


def test_a_packed_batch_counts_its_own_pairs():
    packed = next(case for case in cases_of("dense") if case.lengths and case.problem.causal)
    assert len(packed.lengths) == packed.problem.batch == 64
    assert max(packed.lengths) == packed.problem.seq_q > 2048
    assert sum(packed.lengths) == pytest.approx(65536, abs=64)
    p = packed.problem
    assert packed.flops == 4 * p.heads * p.dim_qk * sum(n * (n + 1) // 2 for n in packed.lengths)
    assert packed.lengths == lognormal_lengths(64, 1024)  # the same in every process


@pytest.mark.parametrize("size", SIZES)
def test_flops_follow_the_published_convention(size):
    """Forward 4 B H N N D; the convention halves it when causal, where the exact count has the diagonal on top: N + 1 for N."""
    for case in cases_of("dense", size):
        p = case.problem
        if case.lengths or p.window != (-1, -1):
            continue
        full = 4 * p.batch * p.heads * p.seq_q * p.seq_k * p.dim_qk
        exact = full if not p.causal else full // 2 * (p.seq_q + 1) // p.seq_q
        assert case.flops == exact
        if p.causal and p.seq_q >= 1024:
            assert case.flops / (full / 2) == pytest.approx(1.0, rel=1e-3)


def test_names_are_distinct_and_say_the_shape():
    for size in SIZES:
        names = [case.name for case in cases_of("dense", size)]
        assert len(set(names)) == len(names)
    assert cases_of("dense")[1].name == "d128_h16_n16384x1_causal"


def test_tiny_cases_are_small_enough_for_the_interpreter():
    assert all(case.flops < 2e7 for case in cases_of("dense", "tiny"))
    assert set(DENSE) == set(SIZES)


def test_filters():
    cases = cases_of("dense")
    chosen = select_cases(cases, "d128, causal")
    assert {c.name for c in chosen} == {
        c.name for c in cases if c.name.startswith("d128") and c.name.endswith("causal")
    }
    assert select_cases(cases, None) == cases
    refuses(ValueRangeError, "case filter 'd96' matches none of: d128_h16_n16384x1, ", select_cases, cases, "d96")


def test_unknown_names_are_refused():
    refuses(ValueRangeError, "family must be one of dense, sparse, got 'paged'", cases_of, "paged")
    refuses(ValueRangeError, "size must be one of full, quick, tiny, got 'big'", cases_of, "dense", "big")
    refuses(DtypeError, "dtype must be one of", cases_of, "dense", "tiny", "int8")


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("1,10,20,...,99", (1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 99)),
        ("10,20,...,40", (10, 20, 30, 40)),
        ("10, 20, ..., 25, 80", (10, 20, 25, 80)),
        ("0.1,0.2,...,0.5", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("65.1", (65.1,)),
    ],
)
def test_dots_go_on_in_the_last_step(text, figures):
    assert figures_in(text, "--sparsity") == figures


@pytest.mark.parametrize(
    "text", ["", "a", "1,...,9", "1,2,...", "...,9", "9,5,...,1", "5,5,...,9", "1,2,...,inf", "1,2,...,nan"]
)
def test_a_list_of_numbers_that_is_none_is_named(text):
    with pytest.raises(ValueRangeError, match=f"--sparsity must be comma-separated numbers, .* got {text!r}"):
        figures_in(text, "--sparsity")


# ---------------------------------------------------------------- lists


SMALL = AttentionProblem(2, 1024, 2048, 4, 2, 32, 32)


def listed(index):
    """The lists as Python lists, in the order given."""
    return [
        row[:count].tolist()
        for row, count in zip(index.indices.flatten(0, 2), index.counts.flatten().tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("sparsity", "kept"), [(50, 182), (65.1, 128), (80, 73), (90, 37), (99, 4), (9.9, 328), (0, 364), (99.99, 1)]
)
def test_the_published_sparsities_keep_at_least_what_they_ask_for(sparsity, kept):
    pattern = Pattern("random", sparsity)
    assert pattern.kept(364) == kept
    assert kept_counts(pattern, VIDEO) == (kept, kept)
    assert Case("sparse", VIDEO, pattern).kept == f"{kept}/364"
    assert Case("dense", VIDEO).kept == ""


def test_random_lists_are_sorted_distinct_and_of_one_length():
    pattern = Pattern("random", 75)
    index = lists_of(pattern, SMALL)
    assert index.indices.shape == (2, 4, 16, 8)
    rows = listed(index)
    assert all(row == sorted(set(row)) and len(row) == 8 for row in rows)
    assert len({tuple(row) for row in rows}) == len(rows)  # of their own for every batch entry, head and query block
    assert density(pattern, SMALL) == 0.25
    assert listed_blocks(pattern, SMALL) == 2 * 4 * 16 * 8


def test_a_seed_gives_the_same_lists_everywhere():
    for pattern, problem in ((Pattern("random", 50), SMALL), (Pattern("uneven"), SMALL), (Pattern("video", 80), VIDEO)):
        first = lists_of(pattern, problem)
        lists_of.cache_clear()
        again, other = lists_of(pattern, problem), lists_of(pattern, problem, 1)
        assert first is not again
        assert torch.equal(first.to_map(), again.to_map())
        assert not torch.equal(first.to_map(), other.to_map())


def test_uneven_counts_climb_from_one_to_all_in_every_head():
    pattern = Pattern("uneven")
    index = lists_of(pattern, VIDEO)
    counts = index.counts.sort(-1).values
    assert (counts[..., 0] == 1).all()
    assert (counts[..., -1] == 364).all()
    assert Case("sparse", VIDEO, pattern).kept == "1-364/364"
    assert not torch.equal(index.counts[0, 0], index.counts[0, 1])  # in an order of their own
    assert 100 * (1 - density(pattern, VIDEO)) == pytest.approx(83.0, abs=0.05)
    # Zipf: as many counts from 4 to 16 as from 64 to 256.
    low, high = (int(((counts >= 4**n) & (counts < 4 ** (n + 1))).sum()) for n in (1, 3))
    assert low == pytest.approx(high, rel=0.15)


def overlap(index):
    """Mean share of a list that the next query block's list has too (of the shorter one)."""
    keep = index.to_map().float()
    first, second = keep[:, :, :-1], keep[:, :, 1:]
    shorter = first.sum(-1).minimum(second.sum(-1)).clamp_min(1)
    return float(((first * second).sum(-1) / shorter).mean())


@pytest.mark.parametrize(("sparsity", "least"), [(65.1, 0.75), (80, 0.65), (90, 0.55)])
def test_neighbours_in_a_video_share_most_blocks_and_random_ones_do_not(sparsity, least):
    video, random = lists_of(Pattern("video", sparsity), VIDEO), lists_of(Pattern("random", sparsity), VIDEO)
    assert torch.equal(video.counts, random.counts)
    assert overlap(video) > least
    assert overlap(random) == pytest.approx(1 - sparsity / 100, abs=0.01)


def test_half_a_video_list_are_the_nearest_cubes():
    index = lists_of(Pattern("video", 90), VIDEO)
    t, h, w = 2, 3, 6
    number = (t * 7 + h) * 13 + w
    near = {
        ((t + i) * 7 + h + j) * 13 + w + k
        for i in (-1, 0, 1)
        for j in (-1, 0, 1)
        for k in (-1, 0, 1)
        if abs(i) + abs(j) + abs(k) <= 1
    }
    assert index.to_map()[0, :, number, sorted(near)].all()


def test_a_video_has_some_blocks_that_nearly_every_query_sees():
    seen = lists_of(Pattern("video", 80), VIDEO).to_map().float().mean(2)[0, 0]
    assert seen.max() > 0.8
    assert seen.min() < 0.1


def test_touched_blocks_are_the_union_over_queries_and_group():
    problem = AttentionProblem(1, 64, 2048, 4, 2, 32, 32)
    pattern = Pattern("random", 75)
    keep = lists_of(pattern, problem).to_map()
    want = sum(int((keep[0, 2 * h, 0] | keep[0, 2 * h + 1, 0]).sum()) for h in range(2))
    assert touched_blocks(pattern, problem) == want


def test_names_and_titles():
    assert (Pattern("random", 65.1).name, Pattern("uneven").name) == ("b64_random_s65.1", "b64_uneven")
    assert Pattern("random", 80, 128, 128).title == "128 random 80 %"
    assert Pattern("random", 80, 64, 128).blocks == "64x128"


def test_what_makes_no_pattern_is_refused():
    refuses(ValueRangeError, "kind must be one of random, video, uneven, got 'zipf'", Pattern, "zipf")
    refuses(ValueRangeError, "sparsity must be from 0 to below 100 per cent, got 100", Pattern, "random", 100)
    with pytest.raises(ShapeError, match="has 23296 tokens in cubes of .* 1024 queries and 2048 keys"):
        lists_of(Pattern("video", 50), SMALL)
    with pytest.raises(ShapeError, match="a block of a video is a cube of 64 tokens, got blocks of 128"):
        lists_of(Pattern("video", 50, 128, 128), VIDEO)
    assert set(lists.KINDS) == {"random", "video", "uneven"}

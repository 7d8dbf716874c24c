"""The lists that the sparse benchmarks attend: counts, densities and overlaps as promised, the same from every seed."""

import pytest
import torch

from tilefold.bench.attention import lists
from tilefold.bench.attention.cases import VIDEO, Case
from tilefold.bench.attention.lists import (
    Pattern,
    density,
    kept_counts,
    listed_blocks,
    lists_of,
    overlap,
    touched_blocks,
)
from tilefold.errors import ShapeError, ValueRangeError
from tilefold.plan.problem import AttentionProblem

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
    with pytest.raises(ValueRangeError, match="kind must be one of random, video, uneven, got 'zipf'"):
        Pattern("zipf")
    with pytest.raises(ValueRangeError, match="sparsity must be from 0 to below 100 per cent, got 100"):
        Pattern("random", 100)
    with pytest.raises(ShapeError, match="has 23296 tokens in cubes of .* 1024 queries and 2048 keys"):
        lists_of(Pattern("video", 50), SMALL)
    with pytest.raises(ShapeError, match="a block of a video is a cube of 64 tokens, got blocks of 128"):
        lists_of(Pattern("video", 50, 128, 128), VIDEO)
    assert set(lists.KINDS) == {"random", "video", "uneven"}

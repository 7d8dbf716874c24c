"""Shards and bands: every token on one rank, and every pair of tokens that a mask leaves in exactly one piece."""

import itertools

import pytest

from cases.refusals import refuses
from tilefold.errors import DtypeError, ShapeError, ValueRangeError
from tilefold.plan.parallel.pieces import chains_of, pieces_of, turns_of
from tilefold.plan.parallel.sharding import ordered, shard, union

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(0, 13), min_size=1, max_size=4)


def work_of(pieces):
    """(query, key) pairs that the masks leave."""
    total = 0
    for q_low, q_high, k_low, k_high, left, right in pieces:
        n, m = q_high - q_low, k_high - k_low
        for i in range(n) if left >= 0 or right >= 0 else ():
            high = m - 1 if right < 0 else min(m - 1, i + m - n + right)
            low = 0 if left < 0 else max(0, i + m - n - left)
            total += max(0, high - low + 1)
        if left < 0 and right < 0:
            total += n * m
    return total


def offsets(lengths):
    return tuple(itertools.accumulate(lengths, initial=0))


@given(LENGTHS, st.integers(1, 5), st.sampled_from(["contiguous", "zigzag"]))
def test_every_token_is_on_one_rank(lengths, ranks, kind):
    sharding = shard(offsets(lengths), ranks, kind)
    every = [t for r in range(ranks) for span in sharding.spans(r) for t in range(*span)]
    assert sorted(every) == list(range(sharding.total))
    positions = [p + i for r in range(ranks) for p, n in sharding.positions(r) for i in range(n)]
    inside = [t - max(s for s in sharding.starts[:-1] if s <= t) for t in every]
    assert positions == inside
    assert sum(sharding.length(r) for r in range(ranks)) == sharding.total


def seen(q_token, k_token, q_starts, k_starts, window):
    """Whether the mask of the sequence of both lets the query see the key."""
    for i in range(len(q_starts) - 1):
        if q_starts[i] <= q_token < q_starts[i + 1] and k_starts[i] <= k_token < k_starts[i + 1]:
            distance = k_token - k_starts[i + 1] - (q_token - q_starts[i + 1])
            return (window[1] < 0 or distance <= window[1]) and (window[0] < 0 or distance >= -window[0])
    return False


def rows(spans):
    return [t for span in spans for t in range(*span)]


WINDOWS = st.tuples(st.integers(-1, 9), st.integers(-1, 4))


@given(LENGTHS, LENGTHS, st.integers(1, 4), st.sampled_from(["contiguous", "zigzag"]), WINDOWS, st.booleans())
def test_pieces_are_what_the_mask_leaves(lengths, others, ranks, kind, window, same):
    keys = lengths if same else [*others, *lengths][: len(lengths)]
    a, b = (shard(offsets(each), ranks, kind) for each in (lengths, keys))
    for i, j in itertools.product(range(ranks), repeat=2):
        mine, theirs = rows(a.spans(i)), rows(b.spans(j))
        want = {(q, k) for q in mine for k in theirs if seen(q, k, a.starts, b.starts, window)}
        pieces = pieces_of(a.spans(i), b.spans(j), a.starts, b.starts, window)
        got = []
        for q_low, q_high, k_low, k_high, left, right in pieces:
            assert left >= -1 and right >= -1 and q_low < q_high and k_low < k_high
            n, m = q_high - q_low, k_high - k_low
            for x, y in itertools.product(range(n), range(m)):
                at = x + m - n
                if (right < 0 or y <= at + right) and (left < 0 or y >= at - left):
                    got.append((mine[q_low + x], theirs[k_low + y]))
        assert len(got) == len(set(got)) == work_of(pieces)
        assert set(got) == want


@given(LENGTHS, st.integers(1, 4), st.sampled_from(["contiguous", "zigzag"]), WINDOWS)
def test_chains_hold_every_piece_once(lengths, ranks, kind, window):
    sharding = shard(offsets(lengths), ranks, kind)
    for i, j in itertools.product(range(ranks), repeat=2):
        pieces = pieces_of(sharding.spans(i), sharding.spans(j), sharding.starts, sharding.starts, window)
        chains = chains_of(pieces)
        assert sorted(p for chain in chains for p in chain.pieces) == sorted(pieces)
        for chain in chains:
            area, both = (
                chain.area,
                list(zip(itertools.pairwise(chain.cu_q), itertools.pairwise(chain.cu_k), strict=True)),
            )
            alive = [(q, k) for q, k in both if q[0] < q[1] and k[0] < k[1]]
            offset_q, offset_k = area.q_low, area.k_low
            assert [(q[0] + offset_q, q[1] + offset_q, k[0] + offset_k, k[1] + offset_k) for q, k in alive] == [
                p[:4] for p in chain.pieces
            ]


def test_causal_zigzag_is_balanced_and_takes_few_calls():
    sharding = shard(64, 4, "zigzag")
    steps = [
        [pieces_of(sharding.spans(i), sharding.spans(j), sharding.starts, sharding.starts, (-1, 0)) for j in range(4)]
        for i in range(4)
    ]
    assert len({sum(map(work_of, each)) for each in steps}) == 1
    assert all(
        len(pieces) == 1 for each in steps for pieces in each
    )  # own: causal; earlier: half the keys; later: half the rows


def test_causal_contiguous_is_full_diagonal_or_nothing():
    sharding = shard(12, 3)
    kinds = [
        [pieces_of(sharding.spans(i), sharding.spans(j), (0, 12), (0, 12), (-1, 0)) for j in range(3)] for i in range(3)
    ]
    assert kinds[0][1] == kinds[0][2] == kinds[1][2] == ()
    assert all(kinds[i][i][0][4:] == (-1, 0) for i in range(3))
    assert kinds[2][0][0].full


def turns(kind, window, ranks=4, tokens=40):
    sharding = shard(tokens, ranks, kind)
    spans = tuple(sharding.spans(r) for r in range(ranks))
    return turns_of(spans, spans, sharding.starts, sharding.starts, window)


def test_a_causal_window_needs_the_nearest_ranks_only():
    assert [turns("contiguous", (left, 0)) for left in (0, 1, 10, 11, 30, -1)] == [1, 2, 2, 3, 4, 4]
    assert turns("contiguous", (3, 1)) == turns("zigzag", (3, 0)) == 4  # keys of the next rank come last round the ring
    assert turns("contiguous", (-1, -1), ranks=1) == 1


def test_a_node_of_ranks_in_order():
    sharding = shard(17, 4, "zigzag")
    parts = [sharding.spans(0), sharding.spans(1)]
    tokens = [rows(spans) for spans in parts]
    joined = [t for part, row, count in ordered(parts) for t in tokens[part][row : row + count]]
    assert joined == sorted(joined) == rows(union([s for spans in parts for s in spans]))


def test_lengths_by_hand():
    sharding = shard(10, 3, lengths=[7, 0, 3])
    assert [sharding.spans(r) for r in range(3)] == [((0, 7),), (), ((7, 10),)]
    assert "0 to 7 each" in str(sharding)


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ((10, 2, "zigzag", [5, 5]), ValueRangeError, "lengths"),
        ((10, 2, "contiguous", [5, 4]), ShapeError, "lengths"),
        ((10, 2, "contiguous", [5]), ValueRangeError, "lengths"),
        ((10, 2, "striped"), ValueRangeError, "kind"),
        ((10, 0), ValueRangeError, "ranks"),
        (([0, 5, 3], 2), ValueRangeError, "offsets"),
        (([1, 5], 2), ValueRangeError, "offsets"),
        ((1.5, 2), DtypeError, "tokens"),
        (([0, 2.5], 2), DtypeError, "ints"),
        ((-1, 2), ValueRangeError, "tokens must be at least 0, got -1"),
        ((10, 2, "contiguous", 5), DtypeError, "lengths must be a sequence"),
    ],
)
def test_wrong_shardings_are_named(arguments, error, names):
    refuses(error, names, shard, *arguments)


def test_wrong_ranks_are_named():
    refuses(ValueRangeError, "rank must be 0 to 1, got 2", shard(4, 2).spans, 2)

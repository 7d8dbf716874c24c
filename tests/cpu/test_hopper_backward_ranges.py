"""Which tiles the dense backward kernel for sm_90 pairs, masks and keeps, and where: its own functions and the plan's, on plain
integers."""

import itertools
import random
import types

import pytest

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from tilefold.kernels.hopper import backward_ranges
from tilefold.ops.call import UNBOUNDED
from tilefold.plan import AttentionProblem
from tilefold.plan import attention_backward_hopper as rules

FULL, CAUSAL, WINDOW = 0, 1, 2
GL = types.SimpleNamespace(maximum=max, minimum=min, where=lambda c, a, b: a if c else b)
NAMES = {"gl": GL, "UNIT": 64, "FULL": FULL, "CAUSAL": CAUSAL, "WINDOW": WINDOW}
for name in ("keys_of_queries", "queries_of_keys", "stripe_of_queries", "lines_of_head", "line_of_keys", "whole_tiles"):
    NAMES[name] = types.FunctionType(getattr(backward_ranges, name).fn.__code__, NAMES)
R = types.SimpleNamespace(**NAMES)


def sees(kind, i, j, shift, left, right):
    own = i + shift
    return kind == FULL or (j <= own if kind == CAUSAL else own - left <= j <= own + right)


def draw(seed):
    pick = random.Random(seed)
    lengths = [pick.choice((1, 63, 64, 65, 128, 129, pick.randrange(1, 500))) for _ in range(2)]
    sides = [pick.choice((0, 1, 62, 63, 64, pick.randrange(300), UNBOUNDED)) for _ in range(2)]
    if seed % 8 == 0:  # many queries of few keys or the reverse, a window open on one side
        lengths[pick.randrange(2)] = pick.randrange(500, 900)
        sides[pick.randrange(2)] = UNBOUNDED
        return *lengths, WINDOW, *sides
    return *lengths, pick.choice((FULL, CAUSAL, WINDOW)), *sides


@pytest.mark.parametrize("seed", range(80))
def test_pairs(seed):
    """From queries and from keys: exactly the pairs where some query sees some key, masked unless every query sees every key."""
    seq_q, seq_k, kind, left, right = draw(seed)
    shift = seq_k - seq_q
    sizes = seq_q, seq_k, -(-seq_q // 64), -(-seq_k // 64)
    for n in range(sizes[3] + 2):
        first, tiles = R.queries_of_keys(n, sizes, (left, right), kind)
        begin, end = R.whole_tiles(n, sizes, (left, right), kind)
        if n >= sizes[3]:
            assert tiles == 0
            continue
        assert 0 <= first <= first + tiles <= sizes[2]
        for m in range(sizes[2]):
            queries = range(m * 64, min(m * 64 + 64, seq_q))
            seen = [
                sees(kind, i, j, shift, left, right) for i in queries for j in range(n * 64, min(n * 64 + 64, seq_k))
            ]
            low, high = R.keys_of_queries(m, sizes, (left, right), kind)
            assert (first <= m < first + tiles) == (low <= n < high) == any(seen)
            needed = m < begin if kind == CAUSAL else m >= end if kind == FULL else m < begin or m >= end
            # a causal mask leaves the end of the keys to queries past the end, which count for nothing
            whole = all(seen) and (kind == CAUSAL or n * 64 + 64 <= seq_k)
            assert needed or whole
            if m * 64 + 64 <= seq_q:  # and no mask too many
                assert needed != whole


@pytest.mark.parametrize("seed", range(80))
def test_stripes_and_places(seed):
    """Each pair is in one stripe, each tile of queries begins and ends once, and no two pairs of a stripe share a place; what the
    plan makes room for holds them."""
    seq_q, seq_k, kind, left, right = draw(seed)
    sizes, band = (seq_q, seq_k, -(-seq_q // 64), -(-seq_k // 64)), (left, right)
    window = (-1, -1) if kind != WINDOW else tuple(-1 if side == UNBOUNDED else side for side in band)
    causal = kind == CAUSAL
    if window == (-1, 0) or (kind == WINDOW and window == (-1, -1)):
        return  # which a call makes causal, or full
    problem = AttentionProblem(1, seq_q, seq_k, 1, 1, 64, 64, causal=causal, window=window)
    for stripe_units in {1, 2, 3, sizes[3]}:
        if stripe_units > sizes[3]:
            continue
        stripes = -(-sizes[3] // stripe_units)
        width, lines = rules.line_width(problem, stripe_units * 64), rules.lines(problem, stripe_units * 64)
        assert lines == R.lines_of_head(stripe_units, kind)
        begun, ended, pairs = {}, {}, set()
        for stripe in range(stripes):
            places = {}
            for m in range(sizes[2]):
                low, tiles, begins, ends = R.stripe_of_queries(m, stripe, stripe_units, sizes, band, kind, 1)
                begun[m], ended[m] = begun.get(m, 0) + begins, ended.get(m, 0) + ends
                assert not begins or m not in {q for q, _ in pairs}  # nothing comes before the first stripe
                for n in range(low, low + tiles):
                    assert begun[m] == 1
                    assert ended[m] == ends  # nothing comes after the last
                    pairs.add((m, n))
                    place, way = R.line_of_keys(n - stripe * stripe_units, stripe_units, width, kind)
                    place += way * (m - R.queries_of_keys(n, sizes, band, kind)[0])
                    assert 0 <= place < width * lines
                    assert places.setdefault(place, (m, n)) == (m, n)
        assert set(begun.values()) == set(ended.values()) == {1}
        assert pairs == {(m, n) for m in range(sizes[2]) for n in range(*R.keys_of_queries(m, sizes, band, kind))}


@pytest.mark.parametrize("seed", range(40))
def test_two_tiles_of_queries_together(seed):
    """What two tiles see, one after the other, is what they see together; they begin and end once."""
    seq_q, seq_k, kind, left, right = draw(seed)
    sizes, band = (seq_q, seq_k, -(-seq_q // 64), -(-seq_k // 64)), (left, right)
    for stripe_units, m in itertools.product((1, 3, sizes[3]), range(0, sizes[2], 2)):
        begun = ended = 0
        for stripe in range(-(-sizes[3] // stripe_units)):
            low, tiles, begins, ends = R.stripe_of_queries(m, stripe, stripe_units, sizes, band, kind, 2)
            alone = [
                R.stripe_of_queries(i, stripe, stripe_units, sizes, band, kind, 1)
                for i in range(m, min(m + 2, sizes[2]))
            ]
            assert set(range(low, low + tiles)) == {
                n for first, number, *_ in alone for n in range(first, first + number)
            }
            assert begins or begun or not tiles
            assert not (ended and tiles)
            begun, ended = begun + begins, ended + ends
        assert (begun, ended) == (1, 1)

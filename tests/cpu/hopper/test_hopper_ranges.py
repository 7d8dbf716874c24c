"""Which blocks, tiles and masks the kernels for sm_90 visit, and what the one for gradients keeps, where: their own functions
and the plan's, on plain integers."""

import itertools
import random
import types

import numpy as np
import pytest

from simulated.arrays import Array, Pointer, arrays, class_of, functions, integers
from tilefold.kernels.hopper import backward_mask, backward_scheduler, block_list, ds_ring, mask, parts, scheduler
from tilefold.ops.call import UNBOUNDED
from tilefold.plan import AttentionProblem
from tilefold.plan.backward import attention_backward_hopper as rules

FULL, CAUSAL, WINDOW = 0, 1, 2
(sequence_of_place,) = functions(integers(), (scheduler, "sequence_of_place"))
Mask = class_of(integers(), mask, "Mask")
Mask.cut = lambda *args: "cut"
Cutting = class_of(arrays(minimum=np.minimum), mask, "Mask", (parts, "columns_of"))
(rows_of_split, place_of_keys) = functions(integers(), (ds_ring, "rows_of_split"), (ds_ring, "place_of_keys"))
BackwardMask, Lengths = (class_of(integers(), backward_mask, name) for name in ("BackwardMask", "Lengths"))
SplitScheduler = class_of(integers(), backward_scheduler, "SplitScheduler")
LISTED = {"UNIT": 128, "sum": sum}
TileList = class_of({**integers(), **LISTED}, block_list, "TileList")
*_, whole_of, cut_unit = functions(
    {**arrays(minimum=np.minimum), **LISTED},
    *((parts, name) for name in ("columns_of", "cut_columns")),
    *((block_list, name) for name in ("_cut_causal", "whole_of", "cut_unit")),
)


def keys_of_split(q_tile, split, split_tiles, lengths, band, kind, query_tiles):
    """As a scheduler says them: first KV tile, how many, whether it is the first split, whether it is the last."""
    own = types.SimpleNamespace(split_tiles=split_tiles, QUERY_TILES=query_tiles)
    work = types.SimpleNamespace(tile=q_tile, split=split, lengths=lengths)
    return SplitScheduler.keys_of(own, work, BackwardMask(*band, kind))


def sees(kind, i, j, shift, left, right):
    own = i + shift
    return kind == FULL or (j <= own if kind == CAUSAL else own - left <= j <= own + right)


def tile_of(seq_q, seq_k, block=None):
    """A work tile: what a mask asks of it."""
    return types.SimpleNamespace(block=block, seq_q=seq_q, seq_k=seq_k, shift=seq_k - seq_q)


def draw(seed):
    pick = random.Random(seed)
    lengths = [pick.choice((1, 64, 127, 128, 129, pick.randrange(1, 700))) for _ in range(2)]
    sides = [pick.choice((0, 1, 63, 128, pick.randrange(400), UNBOUNDED)) for _ in range(2)]
    return *lengths, pick.choice((FULL, CAUSAL, WINDOW)), *sides


@pytest.mark.parametrize(
    ("rows", "keys", "pack"), [(128, 128, 1), (192, 128, 1), (128, 64, 1), (64, 64, 1), (128, 128, 8)]
)
@pytest.mark.parametrize("seed", range(30))
def test_every_pair_is_seen_once_and_masked_where_it_must_be(seed, rows, keys, pack):
    seq_q, seq_k, kind, left, right = draw(seed)
    seq_q = -(-seq_q // pack)
    shift = seq_k - seq_q
    made = Mask(left, right, kind, rows, keys, pack)
    for block in range(-(-seq_q * pack // rows)):
        work = tile_of(seq_q, seq_k, block)
        first, tiles = made.tiles(work)
        assert tiles >= 1
        assert first >= 0
        visited = range(first * keys, (first + tiles) * keys)
        for row in range(block * rows, (block + 1) * rows, 64):
            queries = range(row // pack, min((row + 64) // pack, seq_q))
            begin, end = made.own(work, row, types.SimpleNamespace(first=first, count=tiles))
            assert 0 <= begin < end <= tiles
            own = [j for i in queries for j in range(seq_k) if sees(kind, i, j, shift, left, right)]
            if own:  # what its rows see, and no tile more
                assert (first + begin, first + end) == (min(own) // keys, max(own) // keys + 1)
            for i in queries:
                seen = [j for j in range(seq_k) if sees(kind, i, j, shift, left, right)]
                assert not seen or (seen[0] in visited and seen[-1] in visited)
            for tile in range(first, first + tiles):
                whole = made.apply("whole", work, row, tile * keys) == "whole"
                columns = range(tile * keys, tile * keys + keys)
                if whole:
                    assert all(j < seq_k and sees(kind, i, j, shift, left, right) for i in queries for j in columns)
        needed = [j for i in range(block * rows // pack, min((block + 1) * rows // pack, seq_q)) for j in range(seq_k)
                  if sees(kind, i, j, shift, left, right)]  # fmt: skip
        if needed:  # no tile too many
            assert (first, first + tiles) == (min(needed) // keys, max(needed) // keys + 1)


@pytest.mark.parametrize(("keys", "pack"), [(128, 1), (64, 1), (128, 8), (64, 4)])
@pytest.mark.parametrize("seed", range(15))
def test_a_mask_leaves_what_is_seen(seed, keys, pack):
    seq_q, seq_k, kind, left, right = draw(seed)
    shift = seq_k - seq_q
    made = Cutting(left, right, kind, 64, keys, pack)
    for row in range(0, seq_q * pack, 64):
        for begin in range(0, seq_k, keys):
            left_over = made.cut(np.zeros((64, keys)).view(Array), tile_of(seq_q, seq_k), row, begin) == 0
            wanted = [[j < seq_k and sees(kind, (row + r) // pack, j, shift, left, right) for j in range(begin, begin + keys)]
                      for r in range(64)]  # fmt: skip
            assert (left_over == np.array(wanted)).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("seed", range(15))
def test_what_is_cut_off_a_unit_of_listed_blocks(seed, block, causal):
    """Keys past the sequence's end, and behind a row's query; blocks past the end, and missing ones, have none."""
    seq_q, seq_k, *_ = draw(seed)
    pick = random.Random(seed)
    shift, blocks = seq_k - seq_q, range(-(-seq_k // block) + 2)
    lists = types.SimpleNamespace(CAUSAL=causal, KV_BLOCK=block)
    listed = TileList(None, 0, 1, 0, None, None, tile_of(seq_q, seq_k), block, True, False, causal, True, 0)
    for row in range(0, seq_q, 64):
        named = [pick.choice((-1, *blocks)) for _ in range(128 // block)]
        lives = listed.lives(named[0], named[-1], row)
        left_over = cut_unit(np.zeros((64, 128)).view(Array), lives, lists) == 0
        keys = [-1 if b < 0 else b * block + i for b in named for i in range(block)]
        wanted = [[0 <= j < seq_k and (not causal or j <= row + r + shift) for j in keys] for r in range(64)]
        assert (left_over == np.array(wanted)).all()
        assert np.all(wanted) or lives != whole_of(block, causal)
    assert seq_k < block or listed.lives(0, 0, seq_q + block) == whole_of(block, causal)


@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("seed", range(40))
def test_every_block_of_a_packed_batch_has_one_place(seed, rows):
    """Sequences may be empty, and the first may begin later than at 0."""
    pick = random.Random(seed)
    lengths = [
        pick.choice((0, 1, rows - 1, rows, rows + 1, pick.randrange(5 * rows))) for _ in range(pick.randrange(1, 40))
    ]
    offsets = [pick.choice((0, 0, 3, 500))]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    total = offsets[-1] + pick.choice((0, 70))
    found = []
    for place in range(total // rows + len(lengths)):
        sequence, block = sequence_of_place(Pointer(offsets), place, len(lengths), rows)
        assert 0 <= sequence < len(lengths)
        if block >= 0 and block * rows < lengths[sequence]:
            found.append((sequence, block))
    assert found == [(b, i) for b, length in enumerate(lengths) for i in range(-(-length // rows))]


def draw_backward(seed):
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
    seq_q, seq_k, kind, left, right = draw_backward(seed)
    shift = seq_k - seq_q
    sizes = seq_q, seq_k, -(-seq_q // 64), -(-seq_k // 64)
    lengths, made = Lengths(*sizes), BackwardMask(left, right, kind)
    for n in range(sizes[3] + 2):
        first, tiles = made.queries_of(n, lengths)
        begin, end = made.whole(n, lengths)
        if n >= sizes[3]:
            assert tiles == 0
            continue
        assert 0 <= first <= first + tiles <= sizes[2]
        for m in range(sizes[2]):
            queries = range(m * 64, min(m * 64 + 64, seq_q))
            seen = [
                sees(kind, i, j, shift, left, right) for i in queries for j in range(n * 64, min(n * 64 + 64, seq_k))
            ]
            low, high = made.keys_of(m, lengths)
            assert (first <= m < first + tiles) == (low <= n < high) == any(seen)
            needed = m < begin if kind == CAUSAL else m >= end if kind == FULL else m < begin or m >= end
            # a causal mask leaves the end of the keys to queries past the end, which count for nothing
            whole = all(seen) and (kind == CAUSAL or n * 64 + 64 <= seq_k)
            assert needed or whole
            if m * 64 + 64 <= seq_q:  # and no mask too many
                assert needed != whole


@pytest.mark.parametrize("seed", range(80))
def test_splits_and_places(seed):
    """Each pair is in one KV split, each query tile begins and ends once, and no two pairs of a split share a place; what the
    plan makes room for holds them."""
    seq_q, seq_k, kind, left, right = draw_backward(seed)
    sizes, band = (seq_q, seq_k, -(-seq_q // 64), -(-seq_k // 64)), (left, right)
    lengths, made = Lengths(*sizes), BackwardMask(left, right, kind)
    window = (-1, -1) if kind != WINDOW else tuple(-1 if side == UNBOUNDED else side for side in band)
    causal = kind == CAUSAL
    if window == (-1, 0) or (kind == WINDOW and window == (-1, -1)):
        return  # which a call makes causal, or full
    problem = AttentionProblem(1, seq_q, seq_k, 1, 1, 64, 64, causal=causal, window=window)
    for split_tiles in {1, 2, 3, sizes[3]}:
        if split_tiles > sizes[3]:
            continue
        splits = -(-sizes[3] // split_tiles)
        width, lines = rules.line_width(problem, split_tiles * 64), rules.lines(problem, split_tiles * 64)
        assert lines == rows_of_split(split_tiles, kind)
        begun, ended, pairs = {}, {}, set()
        for split in range(splits):
            places = {}
            for m in range(sizes[2]):
                low, tiles, begins, ends = keys_of_split(m, split, split_tiles, lengths, band, kind, 1)
                begun[m], ended[m] = begun.get(m, 0) + begins, ended.get(m, 0) + ends
                assert not begins or m not in {q for q, _ in pairs}  # nothing comes before the first split
                for n in range(low, low + tiles):
                    assert begun[m] == 1
                    assert ended[m] == ends  # nothing comes after the last
                    pairs.add((m, n))
                    place, way = place_of_keys(n - split * split_tiles, split_tiles, width, kind)
                    place += way * (m - made.queries_of(n, lengths)[0])
                    assert 0 <= place < width * lines
                    assert places.setdefault(place, (m, n)) == (m, n)
        assert set(begun.values()) == set(ended.values()) == {1}
        assert pairs == {(m, n) for m in range(sizes[2]) for n in range(*made.keys_of(m, lengths))}


@pytest.mark.parametrize("seed", range(40))
def test_two_tiles_of_queries_together(seed):
    """What two tiles see, one after the other, is what they see together; they begin and end once."""
    seq_q, seq_k, kind, left, right = draw_backward(seed)
    sizes, band = (seq_q, seq_k, -(-seq_q // 64), -(-seq_k // 64)), (left, right)
    lengths = Lengths(*sizes)
    for split_tiles, m in itertools.product((1, 3, sizes[3]), range(0, sizes[2], 2)):
        begun = ended = 0
        for split in range(-(-sizes[3] // split_tiles)):
            low, tiles, begins, ends = keys_of_split(m, split, split_tiles, lengths, band, kind, 2)
            alone = [
                keys_of_split(i, split, split_tiles, lengths, band, kind, 1) for i in range(m, min(m + 2, sizes[2]))
            ]
            assert set(range(low, low + tiles)) == {
                n for first, number, *_ in alone for n in range(first, first + number)
            }
            assert begins or begun or not tiles
            assert not (ended and tiles)
            begun, ended = begun + begins, ended + ends
        assert (begun, ended) == (1, 1)

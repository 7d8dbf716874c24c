"""Which blocks, tiles and masks the dense kernel for sm_90 visits: its own functions, on plain integers."""

import random
import types

import numpy as np
import pytest

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from tilefold.kernels.hopper import forward_work as kernel
from tilefold.kernels.hopper import parts
from tilefold.ops.call import UNBOUNDED

FULL, CAUSAL, WINDOW = 0, 1, 2
NAMES = {
    "gl": types.SimpleNamespace(
        maximum=max, minimum=min, where=lambda c, a, b: a if c else b, load=lambda pointer: pointer.values[pointer.i]
    ),
    "FULL": FULL,
    "CAUSAL": CAUSAL,
    "WINDOW": WINDOW,
    "cut": lambda *args: "cut",
}
range_of_block, cut_if_needed, sequence_of_place, NAMES["is_cut"] = (
    types.FunctionType(getattr(kernel, name).fn.__code__, NAMES)
    for name in ("range_of_block", "cut_if_needed", "sequence_of_place", "is_cut")
)


class Pointer:
    """Into a list of integers."""

    def __init__(self, values, i=0):
        self.values, self.i = values, i

    def __add__(self, offset):
        return Pointer(self.values, self.i + offset)


def sees(kind, i, j, shift, left, right):
    own = i + shift
    return kind == FULL or (j <= own if kind == CAUSAL else own - left <= j <= own + right)


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
    for block in range(-(-seq_q * pack // rows)):
        first, tiles = range_of_block(block, seq_q, seq_k, left, right, kind, rows, keys, pack)
        assert tiles >= 1
        assert first >= 0
        visited = range(first * keys, (first + tiles) * keys)
        for row in range(block * rows, (block + 1) * rows, 64):
            queries = range(row // pack, min((row + 64) // pack, seq_q))
            for i in queries:
                seen = [j for j in range(seq_k) if sees(kind, i, j, shift, left, right)]
                assert not seen or (seen[0] in visited and seen[-1] in visited)
            for tile in range(first, first + tiles):
                whole = cut_if_needed("whole", row, tile * keys, shift, seq_k, left, right, kind, keys, pack) == "whole"
                columns = range(tile * keys, tile * keys + keys)
                if whole:
                    assert all(j < seq_k and sees(kind, i, j, shift, left, right) for i in queries for j in columns)
        needed = [j for i in range(block * rows // pack, min((block + 1) * rows // pack, seq_q)) for j in range(seq_k)
                  if sees(kind, i, j, shift, left, right)]  # fmt: skip
        if needed:  # no tile too many
            assert (first, first + tiles) == (min(needed) // keys, max(needed) // keys + 1)


class Scores(np.ndarray):
    """A tensor whose layout does not matter here."""

    type = types.SimpleNamespace(layout=None)


ARRAYS = {
    **NAMES, "opaque": lambda x: x,
    "gl": types.SimpleNamespace(
        where=lambda c, a, b: np.where(c, a, b).view(Scores), minimum=np.minimum, SliceLayout=lambda *args: None,
        arange=lambda begin, end, layout: np.arange(begin, end), expand_dims=np.expand_dims, constexpr=None,
        convert_layout=lambda x, layout: x,
    ),
}  # fmt: skip
ARRAYS["columns_of"] = types.FunctionType(parts.columns_of.fn.__code__, ARRAYS)
cut = types.FunctionType(kernel.cut.fn.__code__, ARRAYS)


@pytest.mark.parametrize(("keys", "pack"), [(128, 1), (64, 1), (128, 8), (64, 4)])
@pytest.mark.parametrize("seed", range(15))
def test_a_mask_leaves_what_is_seen(seed, keys, pack):
    seq_q, seq_k, kind, left, right = draw(seed)
    shift = seq_k - seq_q
    for row in range(0, seq_q * pack, 64):
        for begin in range(0, seq_k, keys):
            left_over = (
                cut(np.zeros((64, keys)).view(Scores), row, begin, shift, seq_k, left, right, kind, keys, pack) == 0
            )
            wanted = [[j < seq_k and sees(kind, (row + r) // pack, j, shift, left, right) for j in range(begin, begin + keys)]
                      for r in range(64)]  # fmt: skip
            assert (left_over == np.array(wanted)).all()


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

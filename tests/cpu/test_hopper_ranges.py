"""Which tiles the dense kernel for sm_90 visits and which it masks: its own functions, on plain integers."""

import random
import types

import pytest

pytest.importorskip("triton")
from tilefold.kernels import hopper

if not hopper.available():
    pytest.skip("this Triton has no Gluon", allow_module_level=True)
from tilefold.kernels.hopper import attention_forward as kernel
from tilefold.ops.call import UNBOUNDED

FULL, CAUSAL, WINDOW = 0, 1, 2
NAMES = {
    "gl": types.SimpleNamespace(maximum=max, minimum=min),
    "ROWS": 128,
    "KEYS": 128,
    "FULL": FULL,
    "CAUSAL": CAUSAL,
    "WINDOW": WINDOW,
    "_cut": lambda *args: "cut",
}
range_of_block, cut_if_needed = (
    types.FunctionType(getattr(kernel, name).fn.__code__, NAMES) for name in ("_range_of_block", "_cut_if_needed")
)


def sees(kind, i, j, shift, left, right):
    own = i + shift
    return kind == FULL or (j <= own if kind == CAUSAL else own - left <= j <= own + right)


def draw(seed):
    pick = random.Random(seed)
    lengths = [pick.choice((1, 64, 127, 128, 129, pick.randrange(1, 700))) for _ in range(2)]
    sides = [pick.choice((0, 1, 63, 128, pick.randrange(400), UNBOUNDED)) for _ in range(2)]
    return *lengths, pick.choice((FULL, CAUSAL, WINDOW)), *sides


@pytest.mark.parametrize("seed", range(60))
def test_every_pair_is_seen_once_and_masked_where_it_must_be(seed):
    seq_q, seq_k, kind, left, right = draw(seed)
    shift = seq_k - seq_q
    for block in range(-(-seq_q // 128)):
        first, tiles = range_of_block(block, seq_q, seq_k, left, right, kind)
        assert tiles >= 1
        assert first >= 0
        visited = range(first * 128, (first + tiles) * 128)
        for row in (block * 128, block * 128 + 64):
            queries = range(row, min(row + 64, seq_q))
            for i in queries:
                seen = [j for j in range(seq_k) if sees(kind, i, j, shift, left, right)]
                assert not seen or (seen[0] in visited and seen[-1] in visited)
            for tile in range(first, first + tiles):
                plain = cut_if_needed("plain", row, tile * 128, shift, seq_k, left, right, kind) == "plain"
                keys = range(tile * 128, tile * 128 + 128)
                if plain:
                    assert all(j < seq_k and sees(kind, i, j, shift, left, right) for i in queries for j in keys)
        needed = [j for i in range(block * 128, min(block * 128 + 128, seq_q)) for j in range(seq_k)
                  if sees(kind, i, j, shift, left, right)]  # fmt: skip
        if needed:  # no tile too many
            assert (first, first + tiles) == (min(needed) // 128, max(needed) // 128 + 1)

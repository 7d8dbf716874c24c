"""Packed sequences whose lengths only the device knows: places of their tiles, and what a launch before the gradients makes.

*Places.* Tile i of sequence b, of R rows, has place cu[b] // R + b + i: a sequence has at least as many places as tiles, and
nobody counts.
"""

import triton
import triton.language as tl

from .ranges import range_share
from .state import LOG2E
from .tile import load_rows, store_rows

# ---------------------------------------------------------------- places


@triton.jit
def place_of_sequence(Cu, i_b, ROWS: tl.constexpr):
    """-> the place of the sequence's first tile of ROWS rows, and how many places it has: at least 1."""
    first = tl.load(Cu + i_b) // ROWS + i_b
    return first, tl.load(Cu + i_b + 1) // ROWS + i_b + 1 - first


@triton.jit
def sequence_of_place(Cu, place, batch, steps, ROWS: tl.constexpr):
    """The sequence that a place (a number or a tile of them) belongs to; the first of what is before, the last of what is behind
    all.  steps: (batch - 1).bit_length()."""
    low = place * 0
    high = low + batch
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(Cu + middle) // ROWS + middle <= place
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def rows_of_sequence(Cu, i_b, most):
    """-> the first row of a sequence, and its length: of at most as many rows as the caller said."""
    first = tl.load(Cu + i_b)
    return first, tl.minimum(tl.load(Cu + i_b + 1) - first, most)


# ---------------------------------------------------------------- statistics and zeros


@triton.jit
def statistics_of_place(Out, DOut, Lse, DLse, CuQ, stats, place, i_h, batch, steps, max_q, total_q, stride_om, stride_oh,
                        stride_dm, stride_dh, WIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                        UNIT: tl.constexpr):  # fmt: skip
    """One row of statistics, of the tile of queries at a place."""
    i_b = sequence_of_place(CuQ, place, batch, steps, UNIT)
    first, n_q = rows_of_sequence(CuQ, i_b, max_q)
    at, _places = place_of_sequence(CuQ, i_b, UNIT)
    begin = (place - at) * UNIT
    end = tl.maximum(tl.where(begin < 0, begin, n_q), begin)  # nothing is read before the first sequence or behind one
    base = first.to(tl.int64)
    out = load_rows(Out + base * stride_om + i_h * stride_oh, begin, end, stride_om, WIDE, UNIT, DIM, BLOCK_D)
    do = load_rows(DOut + base * stride_dm + i_h * stride_dh, begin, end, stride_dm, WIDE, UNIT, DIM, BLOCK_D)
    o_r = tl.arange(0, UNIT)
    row = i_h * total_q + base + begin + o_r
    inside = o_r < end - begin
    lse = tl.load(Lse + row, mask=inside, other=float("-inf"))
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if DLse is not None:
        delta -= tl.load(DLse + row, mask=inside, other=0.0)
    nothing = lse == float("-inf")
    tl.store(stats + o_r, tl.where(nothing, float("inf"), lse * LOG2E))
    tl.store(stats + UNIT + o_r, tl.where(nothing, 0.0, delta))


@triton.jit
def clear_outside(
    D, Cu, tile, batch, total, heads, stride_m, stride_h, DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr
):
    """Zeros in those rows of a tile of UNIT rows that belong to no sequence.  D [total, heads, DIM]."""
    o_r = tile * UNIT + tl.arange(0, UNIT)
    outside = (o_r < total) & ((o_r < tl.load(Cu)) | (o_r >= tl.load(Cu + batch)))
    if tl.max(outside.to(tl.int32), 0) > 0:
        o_d = tl.arange(0, BLOCK_D)
        p = D + (o_r.to(tl.int64) * stride_m)[:, None] + o_d[None, :]
        for i_h in range(heads):
            zeros = tl.zeros([UNIT, BLOCK_D], D.dtype.element_ty)
            tl.store(p + tl.cast(i_h, tl.int64) * stride_h, zeros, mask=outside[:, None] & (o_d < DIM)[None, :])


@triton.jit
def clear_share(D, Cu, i_b, total, heads, stride, EMULATE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
                BLOCK_D: tl.constexpr):  # fmt: skip
    """Zeros in the share of sequence i_b of those of a head's `total` rows that belong to no sequence, ROWS at a time.  The grid
    is one program a sequence and one of `heads` heads."""
    batch = tl.num_programs(0) // heads
    begin, end = tl.load(Cu), tl.load(Cu + batch)
    lo, hi = range_share(begin + total - end, i_b, batch)
    for first in range(lo, hi, ROWS):
        o_r = first + tl.arange(0, ROWS)
        rows = tl.where(o_r < begin, o_r, o_r - begin + end).to(tl.int64)
        store_rows(D, rows, stride, o_r < hi, tl.zeros([ROWS, BLOCK_D], tl.float32), DIM, BLOCK_D, EMULATE)

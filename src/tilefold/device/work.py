"""Work over a KV cache, shared out by tiles of keys rather than by sequences: what one program of a fixed number owns.

An item is a sequence, a KV head and a block of rows; items are numbered in this order, row blocks fastest.  All items of a
sequence have the same tiles of keys (at least one, so that a sequence without keys is somebody's, too), and the tiles of all
items, one after the other, are cut into even slices.  Every program finds its slice by itself, from the lengths on the device.

lengths = (CuQ, CuK, Lengths, Pads, max_q, capacity, more, left, right), as the kernels take them.
"""

import triton
import triton.language as tl

from .cache import keys_of_sequence
from .grid import rows_of_sequence
from .ranges import range_of_queries


@triton.jit
def extent_of_sequence(lengths, i_b, PAGE: tl.constexpr):
    """-> first query row, queries, first key row, keys of sequence i_b: of one, or as vectors [B] of several.  A packed
    sequence of more than max_q queries is somebody else's: it has none here, and no keys."""
    CuQ, CuK, Lengths, Pads, max_q, capacity, more, _, _ = lengths
    first_q, seq_q = rows_of_sequence(CuQ, i_b, max_q)
    first_k, seq_k = keys_of_sequence(CuK, Lengths, Pads, i_b, capacity, more, PAGE)
    if CuQ is not None:
        ours = seq_q <= max_q
        seq_q = tl.where(ours, seq_q, 0)
        seq_k = tl.where(ours, seq_k, 0)
    return first_q, seq_q, first_k, seq_k


@triton.jit
def range_of_sequence(seq_q, seq_k, lengths, KIND: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles that the queries of a sequence see, as a range of device.ranges."""
    return range_of_queries(seq_k - seq_q, seq_k - 1, seq_k, lengths[7], lengths[8], KIND, BLOCK_N)


@triton.jit
def tiles_of_sequence(lengths, i_b, PAGE: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many tiles each item of a sequence counts."""
    _, seq_q, _, seq_k = extent_of_sequence(lengths, i_b, PAGE)
    lo, _, _, hi = range_of_sequence(seq_q, seq_k, lengths, KIND, BLOCK_N)
    return tl.maximum(hi - lo, 1)


@triton.jit
def tiles_of_chunk(
    lengths, first, batch, PAGE: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr
):
    """tiles_of_sequence [BLOCK_B] of sequences first and on, 0 past the last."""
    o_b = first + tl.arange(0, BLOCK_B)
    tiles = tiles_of_sequence(lengths, tl.minimum(o_b, batch - 1), PAGE, KIND, BLOCK_N)
    return tl.where(o_b < batch, tiles, 0)


@triton.jit
def total_tiles(lengths, batch, PAGE: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """-> tiles of all sequences, each counted once, and of the longest.  BLOCK_B = 1: there is one sequence."""
    if BLOCK_B == 1:
        total = tiles_of_sequence(lengths, 0, PAGE, KIND, BLOCK_N)
        return total, total
    else:
        total = 0
        most = 0
        for first in range(0, batch, BLOCK_B):
            tiles = tiles_of_chunk(lengths, first, batch, PAGE, KIND, BLOCK_N, BLOCK_B)
            total += tl.sum(tiles, 0)
            most = tl.maximum(most, tl.max(tiles, 0))
        return total, most


@triton.jit
def find_tiles(a, b, lengths, batch, each, span, PAGE: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr,
               BLOCK_B: tl.constexpr):  # fmt: skip
    """Whose tiles number a and b of all items are -> for each the sequence, and the tiles (counted once a sequence) of those
    before it; each: items of a sequence; span: of `slices`."""
    if BLOCK_B == 1:
        return 0, 0, 0, 0
    else:
        of_a = 0
        before_a = 0
        of_b = 0
        before_b = 0
        base = 0
        for first in range(0, batch, BLOCK_B):
            tiles = tiles_of_chunk(lengths, first, batch, PAGE, KIND, BLOCK_N, BLOCK_B)
            tiles = tl.where((tiles > 0) & (span > 0), span, tiles)
            ends = (base + tl.cumsum(tiles, 0)) * each
            past_a = (tiles > 0) & (ends <= a)
            past_b = (tiles > 0) & (ends <= b)
            of_a += tl.sum(past_a.to(tl.int32), 0)
            of_b += tl.sum(past_b.to(tl.int32), 0)
            before_a += tl.sum(tl.where(past_a, tiles, 0), 0)
            before_b += tl.sum(tl.where(past_b, tiles, 0), 0)
            base += tl.sum(tiles, 0)
        return of_a, before_a, of_b, before_b


@triton.jit
def slices(total, most, batch, each, programs, least):
    """-> tiles that a program owns, at least `least`; and how far apart the first tiles of items are among all, 0 for as many as
    the item has.

    Even slices of all tiles; the last ones may be shorter, or empty.  But where all sequences are alike (total = batch * most)
    and no slice grows by more than a sixteenth, items are cut into the same shares, or slices are whole items: programs side by
    side then read the heads of the same keys, which lie side by side in memory."""
    even = tl.maximum(tl.cdiv(total * each, programs), least)
    shares = programs // (batch * each)
    if shares > 0:
        length = tl.maximum(tl.cdiv(most, shares), least)
        span = tl.cdiv(most, length) * length
    else:
        length = tl.cdiv(even, most) * most
        span = most
    alike = (total == batch * most) & (16 * (length - even) <= even)
    return tl.where(alike, length, even), tl.where(alike, span, 0)


@triton.jit
def width_of_item(count, span):
    """From an item's first tile among all to the next one's."""
    return tl.where(span > 0, span, count)

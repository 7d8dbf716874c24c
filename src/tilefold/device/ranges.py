"""Tile ranges of a band: which KV tiles a tile of queries can see.

Every function returns (lo, full_lo, full_hi, hi) in tiles: [lo, full_lo) and [full_hi, hi) are edges, where some lane may be
masked; in [full_lo, full_hi) every query of the tile sees every key, so no mask is computed.  `q_first` and `q_last` are
positions among the keys: a query's index plus seq_k - seq_q (masks are aligned to the bottom right).

The kinds of bands are defined here alone: portable kernels, Hopper's and the host import them.
"""

import triton
import triton.language as tl

FULL = tl.constexpr(0)  # every key of the sequence
CAUSAL = tl.constexpr(1)  # key <= query
WINDOW = tl.constexpr(2)  # query - left <= key <= query + right
PREFIX = tl.constexpr(3)  # key < left or key <= query: `left` is the length of the prefix

UNBOUNDED = tl.constexpr((1 << 30) - 1)  # a side that never cuts; its sum with two positions fits int32


@triton.jit
def range_full(length, BLOCK_N: tl.constexpr):
    return 0, 0, length // BLOCK_N, tl.cdiv(length, BLOCK_N)


@triton.jit
def range_causal(q_first, q_last, length, BLOCK_N: tl.constexpr):
    hi = tl.cdiv(tl.maximum(tl.minimum(q_last + 1, length), 0), BLOCK_N)
    full_hi = tl.maximum(tl.minimum(q_first + 1, length), 0) // BLOCK_N
    return 0, 0, tl.minimum(full_hi, hi), hi


@triton.jit
def range_window(q_first, q_last, left, right, length, BLOCK_N: tl.constexpr):
    lo = tl.maximum(q_first - left, 0) // BLOCK_N
    hi = tl.cdiv(tl.maximum(tl.minimum(q_last + right + 1, length), 0), BLOCK_N)
    hi = tl.maximum(hi, lo)
    full_lo = tl.cdiv(tl.maximum(q_last - left, 0), BLOCK_N)
    full_hi = tl.maximum(tl.minimum(q_first + right + 1, length), 0) // BLOCK_N
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    return lo, full_lo, full_hi, hi


@triton.jit
def band_of_sequence(left, right, i_b, KIND: tl.constexpr):
    """(left, right) of sequence i_b.  The left of a PREFIX is a number, or a pointer to one int32 a sequence."""
    if KIND == PREFIX:
        if left.dtype.is_ptr():
            left = tl.load(left + i_b)
    return left, right


@triton.jit
def range_of_tile(i_m, seq_q, seq_k, left, right, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The range of query tile i_m of one sequence."""
    q_first = i_m * BLOCK_M + (seq_k - seq_q)
    q_last = tl.minimum(q_first + BLOCK_M, seq_k) - 1
    return range_of_queries(q_first, q_last, seq_k, left, right, KIND, BLOCK_N)


@triton.jit
def range_of_queries(q_first, q_last, seq_k, left, right, KIND: tl.constexpr, BLOCK_N: tl.constexpr):
    """The range of queries at positions q_first to q_last among the keys, of one sequence or, as vectors, of several."""
    if KIND == CAUSAL:
        return range_causal(q_first, q_last, seq_k, BLOCK_N)
    elif KIND == WINDOW:
        return range_window(q_first, q_last, left, right, seq_k, BLOCK_N)
    elif KIND == PREFIX:  # no query sees less than the one at the prefix's last key
        return range_causal(tl.maximum(q_first, left - 1), tl.maximum(q_last, left - 1), seq_k, BLOCK_N)
    else:
        return range_full(seq_k, BLOCK_N)


@triton.jit
def range_of_keys(i_n, seq_q, seq_k, left, right, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The other way round: the tiles of queries that see key tile i_n.  A query is at most `right` before its key and at most
    `left` after it, so this is the window turned around; a causal band comes as the window (unbounded, 0).  Keys of a prefix
    are seen from the first query on."""
    if KIND == PREFIX:
        k_first = i_n * BLOCK_N
        k_last = tl.minimum(k_first + BLOCK_N, seq_k) - 1
        first = tl.where(k_first < left, 0, k_first + (seq_q - seq_k))
        last = tl.where(k_last < left, 0, k_last + (seq_q - seq_k))
        return range_window(first, last, 0, UNBOUNDED, seq_q, BLOCK_M)
    return range_of_tile(i_n, seq_k, seq_q, right, left, FULL if KIND == FULL else WINDOW, BLOCK_N, BLOCK_M)


@triton.jit
def range_share(tiles, i_split, splits):
    """(lo, hi) of the i-th of `splits` even shares of 0..tiles; shares differ by at most one tile and may be empty."""
    n = tiles.to(tl.int64)
    return (n * i_split // splits).to(tl.int32), (n * (i_split + 1) // splits).to(tl.int32)


@triton.jit
def share_of_range(tiles, i_split, splits):
    """The i-th of `splits` even shares of a range, as a range."""
    lo, full_lo, full_hi, hi = tiles
    begin, end = range_share(tl.maximum(hi - lo, 0), i_split, splits)
    return part_of_range(tiles, begin, end)


@triton.jit
def part_of_range(tiles, begin, end):
    """Tiles begin to end of a range, counted from its first, as a range; what is past its end is none."""
    lo, full_lo, full_hi, hi = tiles
    begin = tl.minimum(lo + begin, hi)
    end = tl.minimum(lo + end, hi)
    full_lo = tl.minimum(tl.maximum(full_lo, begin), end)
    return begin, full_lo, tl.minimum(tl.maximum(full_hi, full_lo), end), end

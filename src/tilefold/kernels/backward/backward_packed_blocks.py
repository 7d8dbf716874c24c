"""What the Hopper kernel that adds dq in memory has to know of a packed batch, whose lengths only the device knows.

One launch makes the statistics (as kernels.backward_statistics), an entry for each block of keys, the sequences' last tiles with
zeros behind their ends, and zeros in the gradients of rows that belong to no sequence.  Places of tiles and of blocks are
device.sequences'.
"""

import triton
import triton.language as tl

from ...device.gradient import no_statistics
from ...device.sequences import (
    clear_outside,
    place_of_sequence,
    rows_of_sequence,
    sequence_of_place,
    statistics_of_place,
)
from ...device.tile import load_rows

RUNTIME = ["batch", "steps", "max_q", "max_k", "total_q", "total_k", "heads", "kv_heads", "q_tiles", "blocks",
           "counters"]  # fmt: skip

# An entry: int32 [8].
FIELDS = tl.constexpr(8)
LENGTHS = tl.constexpr(0)  # first row of the sequence in q, its queries, first row in k, its keys
TILE = tl.constexpr(4)  # of KEYS keys, in the sequence
PLACE = tl.constexpr(5)  # of the sequence's first tile of queries
SEQUENCE = tl.constexpr(6)


@triton.jit
def _position(CuK, n, i_b, first, places, batch, KEYS: tl.constexpr):
    """Where place n of sequence i_b comes, which has `places` from `first` on: the later half of a sequence's blocks takes turns
    with the earlier half of the next one's, in proportion.  Blocks of a sequence stay in order."""
    half = (places + 1) // 2
    before, places_before = place_of_sequence(CuK, tl.maximum(i_b - 1, 0), KEYS)
    _next, places_next = place_of_sequence(CuK, tl.minimum(i_b + 1, batch - 1), KEYS)
    late = tl.where(i_b == 0, 0, places_before // 2)  # of the sequence before
    early = tl.where(i_b == batch - 1, 0, (places_next + 1) // 2)  # of the next one
    k = n - first
    j = k - half
    rest = places - half
    among_late = tl.minimum(((2 * tl.maximum(k, 0) + 1) * late + half - 1) // (2 * half), late)
    among_early = tl.minimum(((2 * tl.maximum(j, 0) + 1) * early + rest) // tl.maximum(2 * rest, 1), early)
    return tl.where(k < half, first - late + k + among_late, first + half + j + among_early)


@triton.jit
def _entries(Blocks, CuQ, CuK, n, batch, steps, max_q, max_k, blocks, ROWS: tl.constexpr, KEYS: tl.constexpr,
             ALTERNATE: tl.constexpr):  # fmt: skip
    """Those of places n."""
    i_b = sequence_of_place(CuK, n, batch, steps, KEYS)
    first, places = place_of_sequence(CuK, i_b, KEYS)
    place, _places = place_of_sequence(CuQ, i_b, ROWS)
    first_q, n_q = rows_of_sequence(CuQ, i_b, max_q)
    first_k, n_k = rows_of_sequence(CuK, i_b, max_k)
    before = n < first  # of the first sequence: rows of none
    inside = ~before & (n < first + places)
    p = Blocks + (tl.where(inside, _position(CuK, n, i_b, first, places, batch, KEYS), n) if ALTERNATE else n) * FIELDS
    mask = n < blocks
    tl.store(p + LENGTHS, first_q, mask=mask)
    tl.store(p + LENGTHS + 1, n_q, mask=mask)
    tl.store(p + LENGTHS + 2, first_k, mask=mask)
    tl.store(p + LENGTHS + 3, tl.where(inside, n_k, 0), mask=mask)
    tl.store(p + TILE, tl.maximum(n - first, 0), mask=mask)
    tl.store(p + PLACE, place, mask=mask)
    tl.store(p + SEQUENCE, i_b, mask=mask)


@triton.jit
def _tail(X, Cu, Tails, i_b, i_h, most, number, stride_m, stride_h, WIDE: tl.constexpr, DIM: tl.constexpr, HELD: tl.constexpr,
          ROWS: tl.constexpr):  # fmt: skip
    """The last tile of ROWS rows of a head of a sequence, as number `number` of its kind in Tails, if an end is in it: panels
    [ROWS, 64] one after the other."""
    first, n = rows_of_sequence(Cu, i_b, most)
    begin = n // ROWS * ROWS
    if begin < n:
        base = X + first.to(tl.int64) * stride_m + i_h.to(tl.int64) * stride_h
        x = load_rows(base, begin, n, stride_m, WIDE, ROWS, DIM, HELD)
        o_r, o_d = tl.arange(0, ROWS), tl.arange(0, HELD)
        place = (o_d // 64 * (ROWS * 64) + o_d % 64)[None, :] + (o_r * 64)[:, None]
        tl.store(Tails + number.to(tl.int64) * (ROWS * HELD) + place, x)


@triton.jit
def _tails(X, Y, Cu, Tails, item, batch, heads, most, stride_xm, stride_xh, stride_ym, stride_yh, WIDE: tl.constexpr,
           DIM_X: tl.constexpr, DIM_Y: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Item number `item` of 2 * heads * batch: X's last tiles, then Y's."""
    i_h, i_b = item // batch % heads, item % batch
    if item < heads * batch:
        _tail(X, Cu, Tails, i_b, i_h, most, item, stride_xm, stride_xh, WIDE, DIM_X, HELD, ROWS)
    else:
        _tail(Y, Cu, Tails, i_b, i_h, most, item, stride_ym, stride_yh, WIDE, DIM_Y, HELD, ROWS)


@triton.jit(do_not_specialize=RUNTIME)
def backward_packed_blocks(
    Q, K, V, Out, DOut, Lse, DLse, CuQ, CuK, DQ, DK, DV, Statistics, Progress, Blocks, Tails,
    batch, steps, max_q, max_k, total_q, total_k, heads, kv_heads, q_tiles, blocks, counters,
    stride_qm, stride_qh, stride_km, stride_kh, stride_vm, stride_vh,
    stride_om, stride_oh, stride_dm, stride_dh, stride_gm, stride_gh, stride_xm, stride_xh, stride_ym, stride_yh,
    WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, ALTERNATE: tl.constexpr,
):  # fmt: skip
    """Q, DQ [total_q, heads, DIM_QK], Out, DOut [total_q, heads, DIM], K, DK [total_k, kv_heads, DIM_QK], V, DV [total_k,
    kv_heads, DIM]; Lse, DLse (or None) [heads, total_q] fp32 contiguous; CuQ, CuK [batch + 1] int32, ascending.  Makes Statistics
    [heads * q_tiles + 1, 2, ROWS] fp32 (q_tiles = total_q // ROWS + batch), Blocks [blocks, 8] int32 (blocks = total_k // KEYS +
    batch), Tails, of HELD columns (kernels.hopper.tails), zeros in Progress [counters] int32 and in rows of no sequence.

    ALTERNATE: blocks are not in the order of their places, but as `_position` says, so that short ones are not side by side,
    which wait for one another where additions have an order.  steps = (batch - 1).bit_length().  Grid (heads * q_tiles + 1 +
    cdiv(blocks, CHUNK) + 2 * batch * (heads + kv_heads) + cdiv(total_q, ROWS) + cdiv(total_k, ROWS),)."""
    item = tl.program_id(0)
    stats = Statistics + item.to(tl.int64) * (2 * ROWS)
    if item < heads * q_tiles:
        i_h = item // q_tiles
        statistics_of_place(Out, DOut, Lse, DLse, CuQ, stats, item - i_h * q_tiles, i_h.to(tl.int64), batch, steps, max_q,
                            total_q, stride_om, stride_oh, stride_dm, stride_dh, WIDE, DIM, HELD, ROWS)  # fmt: skip
        return
    item -= heads * q_tiles
    o_c = tl.arange(0, CHUNK)
    if item == 0:
        no_statistics(stats, Progress, counters, ROWS, CHUNK)
        return
    item -= 1
    if item < tl.cdiv(blocks, CHUNK):
        _entries(Blocks, CuQ, CuK, item * CHUNK + o_c, batch, steps, max_q, max_k, blocks, ROWS, KEYS, ALTERNATE)
        return
    item -= tl.cdiv(blocks, CHUNK)
    if item < 2 * batch * heads:
        _tails(Q, DOut, CuQ, Tails, item, batch, heads, max_q, stride_qm, stride_qh, stride_dm, stride_dh, WIDE, DIM_QK, DIM,
               HELD, ROWS)  # fmt: skip
        return
    Tails += (2 * batch * heads).to(tl.int64) * (ROWS * HELD)
    item -= 2 * batch * heads
    if item < 2 * batch * kv_heads:
        _tails(K, V, CuK, Tails, item, batch, kv_heads, max_k, stride_km, stride_kh, stride_vm, stride_vh, WIDE, DIM_QK, DIM,
               HELD, KEYS)  # fmt: skip
        return
    item -= 2 * batch * kv_heads
    if item < tl.cdiv(total_q, ROWS):
        clear_outside(DQ, CuQ, item, batch, total_q, heads, stride_gm, stride_gh, DIM_QK, HELD, ROWS)
        return
    item -= tl.cdiv(total_q, ROWS)
    clear_outside(DK, CuK, item, batch, total_k, kv_heads, stride_xm, stride_xh, DIM_QK, HELD, ROWS)
    clear_outside(DV, CuK, item, batch, total_k, kv_heads, stride_ym, stride_yh, DIM, HELD, ROWS)

"""What the Hopper kernel of the backward pass has to know of a packed batch, whose lengths only the device knows.

One launch makes the statistics (as kernels.backward_statistics), the order of the work with an entry for each piece of it, and
zeros in the gradients of rows that belong to no sequence.

*Places* of tiles are device.sequences'.  A KV head of a sequence is a *block*, number b * kv_heads + head, whose key items are
numbered through all blocks.

*Order.* Query item q of the `items` of a block that begins at key number `start` with `length` places comes before key item
max(start + length, start + shift + q * length // items): after all key items of its block, and before number start + slots, the
first that waits for it, if length + shift <= slots.  These times ascend from block to block, so the query items before a key
item are counted by one search and one division, and every entry finds its own position.
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

RUNTIME = ["batch", "steps", "max_q", "max_k", "total_q", "total_k", "heads", "kv_heads", "all_keys", "all_queries", "longest",
           "shift", "slots", "counters"]  # fmt: skip

# An entry: int32 [12].
FIELDS = tl.constexpr(12)
WHAT = tl.constexpr(0)  # KEYS, QUERIES or NOTHING
HEAD = tl.constexpr(1)  # KV head of a key item, head of a query item
TILE = tl.constexpr(2)  # of 64 keys, or the first of the item's tiles of 64 queries, in the sequence
LENGTHS = tl.constexpr(3)  # first row of the sequence in q, its queries, first row in k, its keys
PLACE = tl.constexpr(7)  # of the sequence's first tile of queries, among those of all: its row of statistics
SLOT = tl.constexpr(8)  # where the tile of keys, or the first of the sequence's, keeps dS
BLOCK = tl.constexpr(9)  # which counters count this item
BEFORE = tl.constexpr(10)  # of a key item: the block that had the slot before
WANTED = tl.constexpr(11)  # how many items of that block, or for a query item key items of its own, have to be done
NOTHING = tl.constexpr(-1)
QUERIES = tl.constexpr(0)
KEYS = tl.constexpr(1)


# ---------------------------------------------------------------- the order


@triton.jit
def keys_of_number(CuK, n, batch, steps, kv_heads, max_k, UNIT: tl.constexpr):
    """-> sequence, KV head and tile of a key number, and whether there are such keys."""
    i_b = sequence_of_place(CuK, n // kv_heads, batch, steps, UNIT)
    first, length = place_of_sequence(CuK, i_b, UNIT)
    local = n - first * kv_heads
    i_k = tl.maximum(local, 0) // length
    tile = local - i_k * length
    begin, number = rows_of_sequence(CuK, i_b, max_k)
    return i_b, i_k, tile, (local >= 0) & (i_k < kv_heads) & (tile * UNIT < number)


@triton.jit
def time_of_queries(CuK, i_b, i_k, q, items, kv_heads, all_keys, longest, shift, UNIT: tl.constexpr):
    """The key number before which query item q of the block comes."""
    first, length = place_of_sequence(CuK, i_b, UNIT)
    start = first * kv_heads + i_k * length
    length = tl.minimum(length, longest)
    spread = (q.to(tl.int64) * length // items).to(tl.int32)
    return tl.minimum(start + tl.maximum(length, shift + spread), all_keys)


@triton.jit
def queries_before(CuQ, CuK, n, batch, steps, kv_heads, group, longest, shift, UNIT: tl.constexpr, ROWS: tl.constexpr):
    """How many query items have a time of at most n."""
    low = n * 0
    high = low + batch
    found = low  # the last sequence whose first block has such an item, and whether there is one
    any_block = n < 0
    for _ in range(steps + 1):
        middle = tl.minimum((low + high) // 2, batch - 1)
        first, length = place_of_sequence(CuK, middle, UNIT)
        before = (first * kv_heads + tl.maximum(tl.minimum(length, longest), shift) <= n) & (low < high)
        found = tl.where(before, middle, found)
        any_block = any_block | before
        high = tl.where(before | (low >= high), high, middle)
        low = tl.where(before, middle + 1, low)
    first, length = place_of_sequence(CuK, found, UNIT)
    short = tl.minimum(length, longest)
    since = tl.maximum(n - first * kv_heads - tl.maximum(short, shift), 0)
    i_k = tl.minimum(since // length, kv_heads - 1)
    first_q, items = place_of_sequence(CuQ, found, ROWS)
    items = items * group
    steps_in = tl.minimum(tl.maximum(n - first * kv_heads - i_k * length - shift + 1, 0), short)
    inside = ((steps_in.to(tl.int64) * items + short - 1) // short).to(tl.int32)
    return tl.where(any_block, first_q * kv_heads * group + i_k * items + inside, first_q * kv_heads * group)


@triton.jit
def _write(Entries, position, mask, what, head, tile, first_q, n_q, first_k, n_k, place, slot, block, before, wanted):
    """One entry."""
    p = Entries + position.to(tl.int64) * FIELDS
    tl.store(p + WHAT, what, mask=mask)
    tl.store(p + HEAD, head, mask=mask)
    tl.store(p + TILE, tile, mask=mask)
    tl.store(p + LENGTHS, first_q, mask=mask)
    tl.store(p + LENGTHS + 1, n_q, mask=mask)
    tl.store(p + LENGTHS + 2, first_k, mask=mask)
    tl.store(p + LENGTHS + 3, n_k, mask=mask)
    tl.store(p + PLACE, place, mask=mask)
    tl.store(p + SLOT, slot, mask=mask)
    tl.store(p + BLOCK, block, mask=mask)
    tl.store(p + BEFORE, before, mask=mask)
    tl.store(p + WANTED, wanted, mask=mask)


@triton.jit
def _owner_of_line(CuQ, CuK, m, batch, steps, kv_heads, max_q, max_k, UNIT: tl.constexpr):
    """-> the block of key number m, and its queries: 0 if there is no such number, or no keys there."""
    i_b, i_k, _tile, live = keys_of_number(CuK, tl.maximum(m, 0), batch, steps, kv_heads, max_k, UNIT)
    _first, queries = rows_of_sequence(CuQ, i_b, max_q)
    return i_b * kv_heads + i_k, tl.where(live & (m >= 0), queries, 0)


@triton.jit
def _key_entries(Entries, CuQ, CuK, n, batch, steps, max_q, max_k, kv_heads, group, all_keys, longest, shift, slots,
                 UNIT: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The entries of key items n."""
    i_b, i_k, tile, live = keys_of_number(CuK, n, batch, steps, kv_heads, max_k, UNIT)
    first_q, n_q = rows_of_sequence(CuQ, i_b, max_q)
    first_k, n_k = rows_of_sequence(CuK, i_b, max_k)
    place, _places = place_of_sequence(CuQ, i_b, UNIT)
    m = n - slots  # who had the slot before: a place may be empty or have no queries, then it was an earlier one
    before, b_q = _owner_of_line(CuQ, CuK, m, batch, steps, kv_heads, max_q, max_k, UNIT)
    while tl.max(((b_q == 0) & (m >= slots)).to(tl.int32), 0) > 0:
        m = tl.where((b_q > 0) | (m < slots), m, m - slots)
        before, b_q = _owner_of_line(CuQ, CuK, m, batch, steps, kv_heads, max_q, max_k, UNIT)
    wanted = tl.cdiv(b_q, ROWS) * group
    position = n + queries_before(CuQ, CuK, n, batch, steps, kv_heads, group, longest, shift, UNIT, ROWS)
    _write(Entries, position, n < all_keys, tl.where(live, KEYS, NOTHING), i_k, tile, first_q, n_q, first_k, n_k, place,
           n % slots, i_b * kv_heads + i_k, before, wanted)  # fmt: skip


@triton.jit
def _query_entries(Entries, CuQ, CuK, r, batch, steps, max_q, max_k, kv_heads, group, all_keys, all_queries, longest, shift,
                   slots, UNIT: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The entries of query items r.  The last queries of a block come first: under a causal mask they see the most keys."""
    i_b = sequence_of_place(CuQ, r // (kv_heads * group), batch, steps, ROWS)
    first, places = place_of_sequence(CuQ, i_b, ROWS)
    items = places * group
    local = r - first * kv_heads * group
    i_k = tl.maximum(local, 0) // items
    q = tl.maximum(local, 0) - i_k * items
    inside = (local >= 0) & (i_k < kv_heads)
    time = time_of_queries(CuK, i_b, i_k, q, items, kv_heads, all_keys, longest, shift, UNIT)
    position = r + tl.where(inside, time, tl.where(local < 0, 0, all_keys))
    tile = (places - 1 - q // group) * (ROWS // UNIT)
    first_q, n_q = rows_of_sequence(CuQ, i_b, max_q)
    first_k, n_k = rows_of_sequence(CuK, i_b, max_k)
    place, _places = place_of_sequence(CuQ, i_b, UNIT)
    first_n, length = place_of_sequence(CuK, i_b, UNIT)
    block = i_b * kv_heads + i_k
    _write(Entries, position, r < all_queries, tl.where(inside & (tile * UNIT < n_q), QUERIES, NOTHING),
           i_k * group + q % group, tile, first_q, n_q, first_k, n_k, place, (first_n * kv_heads + i_k * length) % slots,
           block, block, tl.cdiv(n_k, UNIT))  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def backward_packed(
    Out, DOut, Lse, DLse, CuQ, CuK, DQ, DK, DV, Statistics, Progress, Entries,
    batch, steps, max_q, max_k, total_q, total_k, heads, kv_heads, all_keys, all_queries, longest, shift, slots, counters,
    stride_om, stride_oh, stride_dm, stride_dh, stride_gm, stride_gh, stride_xm, stride_xh, stride_ym, stride_yh,
    WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Out, DOut [total_q, heads, DIM], DV [total_k, kv_heads, DIM], DQ, DK of DIM_QK columns, none more than BLOCK_D; Lse,
    DLse (or None) [heads, total_q] fp32 contiguous; CuQ, CuK [batch + 1] int32, ascending.  Makes Statistics [heads * places + 1,
    2, UNIT] fp32 (places = total_q // UNIT + batch), Entries [all_keys + all_queries, 12] int32, zeros in Progress [counters]
    int32 and in rows of no sequence.

    steps = (batch - 1).bit_length(); all_keys = kv_heads * (total_k // UNIT + batch); all_queries = heads * (total_q // ROWS +
    batch), items of ROWS queries; longest: places of a sequence of max_k keys; longest + shift <= slots.
    Grid (heads * places + cdiv(all_keys, CHUNK) + cdiv(all_queries, CHUNK) + cdiv(total_q, UNIT) + cdiv(total_k, UNIT) + 1,)."""
    places = total_q // UNIT + batch
    item = tl.program_id(0)
    stats = Statistics + item.to(tl.int64) * (2 * UNIT)
    if item < heads * places:
        i_h = item // places
        statistics_of_place(Out, DOut, Lse, DLse, CuQ, stats, item - i_h * places, i_h.to(tl.int64), batch, steps, max_q,
                            total_q, stride_om, stride_oh, stride_dm, stride_dh, WIDE, DIM, BLOCK_D, UNIT)  # fmt: skip
        return
    item -= heads * places
    o_c = tl.arange(0, CHUNK)
    if item == 0:
        no_statistics(stats, Progress, counters, UNIT, CHUNK)
        return
    item -= 1
    if item < tl.cdiv(all_keys, CHUNK):
        _key_entries(Entries, CuQ, CuK, item * CHUNK + o_c, batch, steps, max_q, max_k, kv_heads, heads // kv_heads, all_keys,
                     longest, shift, slots, UNIT, ROWS)  # fmt: skip
        return
    item -= tl.cdiv(all_keys, CHUNK)
    if item < tl.cdiv(all_queries, CHUNK):
        _query_entries(Entries, CuQ, CuK, item * CHUNK + o_c, batch, steps, max_q, max_k, kv_heads, heads // kv_heads, all_keys,
                       all_queries, longest, shift, slots, UNIT, ROWS)  # fmt: skip
        return
    item -= tl.cdiv(all_queries, CHUNK)
    if item < tl.cdiv(total_q, UNIT):
        clear_outside(DQ, CuQ, item, batch, total_q, heads, stride_gm, stride_gh, DIM_QK, BLOCK_D, UNIT)
        return
    item -= tl.cdiv(total_q, UNIT)
    clear_outside(DK, CuK, item, batch, total_k, kv_heads, stride_xm, stride_xh, DIM_QK, BLOCK_D, UNIT)
    clear_outside(DV, CuK, item, batch, total_k, kv_heads, stride_ym, stride_yh, DIM, BLOCK_D, UNIT)

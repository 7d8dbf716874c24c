"""The items of the dense backward kernels for sm_90: which work a number is, what brings their tiles, where dq waits."""

from .backward_parts import UNIT, load_kept, load_keys, load_queries, next_slot
from .backward_ranges import line_of_keys, lines_of_head, queries_of_keys, stripe_of_queries
from .gluon import gl, jit

# ---------------------------------------------------------------- which work


@jit
def batch_of(batch, split):
    """-> the KV head with which the batch begins, and its stripe."""
    stripe_units, stripes, batch_heads = split
    heads_of = batch // stripes
    return heads_of * batch_heads, batch - heads_of * stripes


@jit
def key_item(batch, program, heads, split):
    """-> tile of keys, batch entry, KV head, number of the KV head within the batch.  Heads go fastest, then tiles: under a
    causal mask the first are the most work, and the last work of all is little."""
    head, stripe = batch_of(batch, split)
    tile = program // split[2]
    local = program - tile * split[2]
    return stripe * split[0] + tile, (head + local) // heads, (head + local) % heads, local


@jit
def query_item(batch, program, heads, group, q_units, split, SUM_TILES: gl.constexpr):
    """-> first tile of queries, batch entry, head, number of the head within the batch, stripe.  The last queries come first."""
    head, stripe = batch_of(batch, split)
    line = program // (split[2] * group)
    local = program - line * (split[2] * group)
    row = head * group + local
    return ((q_units + SUM_TILES - 1) // SUM_TILES - 1 - line) * SUM_TILES, row // heads, row % heads, local, stripe


# ---------------------------------------------------------------- dk and dv


@jit
def produce_keys(q_desc, do_desc, k_desc, v_desc, stat_desc, Progress, pool, stat_buf, kv_full, q_full, do_full, empty,
                 lengths, band, work, split, order, batch, query_items, program, KIND: gl.constexpr, D: gl.constexpr,
                 SLOTS: gl.constexpr, do_empty=None, stat_units=None):  # fmt: skip
    """Bring K and V, then q, dout and statistics of every tile of queries that sees them; do_empty: of load_queries.  stat_units:
    tiles of a head that the statistics have, if those are not all of this launch."""
    heads, group, no_unit = work
    batches, delay, rooms = order
    q_units = lengths[2]
    i_n, i_b, i_k, local = key_item(batch, program, heads // group, split)
    load_keys(k_desc, v_desc, pool, kv_full, i_b, i_k, i_n, D, SLOTS)
    first, tiles = queries_of_keys(i_n, lengths, band, KIND)
    slot = 0
    parity = 1  # of a fresh barrier: the first wait on `empty` returns at once
    for g in range(group):
        i_h = i_k * group + g
        row = (i_b * heads + i_h) * (q_units if stat_units is None else stat_units)
        for j in range(gl.maximum(tiles, 1)):
            # Keys that nobody sees meet a tile without queries, past the end, where the copy engine gives zeros.
            unit = gl.where(tiles > 0, first + j, q_units)
            statistics = gl.where(tiles > 0, row + unit, no_unit)
            load_queries(q_desc, do_desc, stat_desc, Progress, pool, stat_buf, q_full, do_full, empty, i_b, i_h, unit,
                         statistics, g, j, batch, rooms, query_items, batches, slot, parity, D, SLOTS, 0, do_empty)  # fmt: skip
            slot, parity = next_slot(slot, parity, SLOTS)


# ---------------------------------------------------------------- dq


@jit
def _kept_row(
    i_m, i_n, base, nowhere, stripe, split, width, lengths, band, KIND: gl.constexpr, SUM_TILES: gl.constexpr
):
    """Where dS of a pair is kept.  Of two tiles of queries one may not see the keys: past the end, where there are zeros."""
    first, seen = queries_of_keys(i_n, lengths, band, KIND)
    place, way = line_of_keys(i_n - stripe * split[0], split[0], width, KIND)
    row = base + (place + way * (i_m - first)) * UNIT
    if SUM_TILES > 1:
        row = gl.where((i_m >= first) & (i_m < first + seen), row, nowhere)
    return row


@jit
def produce_sums(k_desc, kept_desc, Progress, pool, full, empty, lengths, band, work, split, width, base, nowhere, batch,
                  key_items, program, KIND: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
                  SUM_TILES: gl.constexpr):  # fmt: skip
    """Bring K and dS of every pair that one or two tiles of queries have in the stripe.  base: row where its room begins."""
    heads, group, no_unit = work
    q_units = lengths[2]
    i_m, i_b, i_h, local, stripe = query_item(batch, program, heads, group, q_units, split, SUM_TILES)
    low, tiles, begins, ends = stripe_of_queries(i_m, stripe, split[0], lengths, band, KIND, SUM_TILES)
    base += local * (lines_of_head(split[0], KIND) * width * UNIT)
    slot = 0
    parity = 1
    for j in range(tiles):
        i_n = low + j
        row = _kept_row(i_m, i_n, base, nowhere, stripe, split, width, lengths, band, KIND, SUM_TILES)
        rows = (row,)
        if SUM_TILES > 1:
            rows = (row, _kept_row(i_m + 1, i_n, base, nowhere, stripe, split, width, lengths, band, KIND, SUM_TILES))
        load_kept(k_desc, kept_desc, Progress, pool, full, empty, i_b, i_h // group, i_n, rows, 0, j, batch, key_items, slot,
                  parity, D, SLOTS, SUM_TILES)  # fmt: skip
        slot, parity = next_slot(slot, parity, SLOTS)


@jit
def sum_so_far(Partial, i_m, row_of_head, q_units, LAYOUT: gl.constexpr, D: gl.constexpr, SUM_TILES: gl.constexpr):
    """Pointers to the fp32 sum of a tile of queries; Partial [B * H, tiles * 64, D], tiles: q_units or the next multiple of
    SUM_TILES."""
    q_units = (q_units + SUM_TILES - 1) // SUM_TILES * SUM_TILES
    o_r = gl.arange(0, UNIT, layout=gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    place = Partial + (row_of_head.to(gl.int64) * q_units + i_m) * (UNIT * D)
    return place + gl.expand_dims(o_r * D, 1) + gl.expand_dims(o_d, 0)

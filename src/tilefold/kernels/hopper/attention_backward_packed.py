"""Gradients of dense attention over packed sequences on sm_90: the work of `attention_backward`, in an order made on the device.

`kernels.backward_packed` has written what each piece of work is: an entry with a sequence, its lengths, a tile of it, the line
for dS, and whom to wait for.  Tiles are brought from the middle of packed tensors, so what lies past the end of a sequence is
the next one, and may be NaN: its rows are zeroed in shared memory, since neither a mask nor a probability of 0 takes a NaN out
of a product.

    K, V          the item's own, once: scores and dP of these keys are 0, their probabilities are masked
    q, dout       the last tile of the sequence; its statistics say that those queries count for nothing
    K             for dq, the last tile: dS is 0 there

A key item with number n keeps dS in line n % lines, `group` times `width` places: its own line until all query items of its
block, a KV head of a sequence, are done.
"""

from .backward_parts import (
    STATISTICS,
    UNIT,
    add_kept,
    clear_tile,
    finish_keys,
    first_products,
    key_tile,
    load_kept,
    load_keys,
    load_queries,
    next_slot,
    tiles_of,
)
from .backward_ranges import cut_if_needed, keys_of_queries, queries_of_keys, whole_tiles
from .backward_work import count_keys, count_queries
from .gluon import barriers, fence_async_shared, gl, jit, mbarrier, opaque, wgmma_wait
from .parts import LOG2E, PANEL, store_accumulator

RUNTIME = ["scale", "group", "total_q", "q_places", "left", "right", "lines", "width", "blocks", "no_unit", "nowhere",
           "stride_gm", "stride_gh", "stride_xn", "stride_xh", "stride_yn", "stride_yh"]  # fmt: skip
FIELDS = gl.constexpr(12)  # of an entry: kernels.backward_packed
QUERIES = gl.constexpr(0)
KEYS = gl.constexpr(1)


# ---------------------------------------------------------------- which work


@jit
def _read_entry(Entries, item):
    """-> what, head, tile, (first row in q, queries, first row in k, keys), place, line, (block, block before, how many of its
    items, or of the own block's key items, have to be done)."""
    p = Entries + item * FIELDS
    rows = (gl.load(p + 3), gl.load(p + 4), gl.load(p + 5), gl.load(p + 6))
    counts = (gl.load(p + 9), gl.load(p + 10), gl.load(p + 11))
    return gl.load(p), gl.load(p + 1), gl.load(p + 2), rows, gl.load(p + 7), gl.load(p + 8), counts


@jit
def _lengths_of(rows):
    """-> lengths as of backward_ranges."""
    return rows[1], rows[3], (rows[1] + UNIT - 1) // UNIT, (rows[3] + UNIT - 1) // UNIT


@jit
def _kept_row(i_m, i_n, line, g, room, nowhere, lengths, band, KIND: gl.constexpr, SUM_TILES: gl.constexpr):
    """Where dS of a pair is kept.  Of two tiles of queries one may not see the keys: past the end, where there are zeros.
    line: of the sequence's first tile of keys; room = (group, lines, width)."""
    group, lines, width = room
    line += i_n
    line = gl.where(line < lines, line, line - lines)
    first, seen = queries_of_keys(i_n, lengths, band, KIND)
    row = ((line * group + g) * width + i_m - first) * UNIT
    if SUM_TILES > 1:
        row = gl.where((i_m >= first) & (i_m < first + seen), row, nowhere)
    return row


# ---------------------------------------------------------------- the loading warp


@jit
def _produce_keys(q_desc, do_desc, k_desc, v_desc, stat_desc, Progress, pool, stat_buf, kv_full, q_full, do_full, empty, entry,
                  band, room, packed, KIND: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """Bring K and V, then q, dout and statistics of every tile of queries that sees them."""
    what, i_k, i_n, rows, place, line, counts = entry
    total_q, q_places, blocks, no_unit = packed
    group = room[0]
    lengths = _lengths_of(rows)
    load_keys(k_desc, v_desc, pool, kv_full, 0, i_k, i_n, D, SLOTS, rows[2])
    first, tiles = queries_of_keys(i_n, lengths, band, KIND)
    slot = 0
    parity = 1  # of a fresh barrier: the first wait on `empty` returns at once
    for g in range(group):
        i_h = i_k * group + g
        for j in range(gl.maximum(tiles, 1)):
            # Keys that nobody sees meet a tile without queries, behind all sequences, where the copy engine gives zeros.
            unit = gl.where(tiles > 0, first + j, 0)
            begin = gl.where(tiles > 0, rows[0], total_q)
            statistics = gl.where(tiles > 0, i_h * q_places + place + first + j, no_unit)
            load_queries(q_desc, do_desc, stat_desc, Progress, pool, stat_buf, q_full, do_full, empty, 0, i_h, unit, statistics,
                         g, j, counts[1], 0, counts[2], blocks, slot, parity, D, SLOTS, begin)  # fmt: skip
            slot, parity = next_slot(slot, parity, SLOTS)


@jit
def _produce_sums(k_desc, kept_desc, Progress, pool, full, empty, entry, band, room, nowhere, KIND: gl.constexpr,
                  D: gl.constexpr, SLOTS: gl.constexpr, SUM_TILES: gl.constexpr):  # fmt: skip
    """Bring K and dS of every pair that one or two tiles of queries have."""
    what, i_h, i_m, rows, place, line, counts = entry
    group = room[0]
    lengths = _lengths_of(rows)
    low, tiles = _keys_of_item(i_m, lengths, band, KIND, SUM_TILES)
    g = i_h % group
    slot = 0
    parity = 1
    for j in range(tiles):
        i_n = low + j
        row = _kept_row(i_m, i_n, line, g, room, nowhere, lengths, band, KIND, SUM_TILES)
        kept = (row,)
        if SUM_TILES > 1:
            kept = (row, _kept_row(i_m + 1, i_n, line, g, room, nowhere, lengths, band, KIND, SUM_TILES))
        load_kept(k_desc, kept_desc, Progress, pool, full, empty, 0, i_h // group, i_n, kept, 0, j, counts[0], counts[2], slot,
                  parity, D, SLOTS, SUM_TILES, rows[2])  # fmt: skip
        slot, parity = next_slot(slot, parity, SLOTS)


@jit
def _keys_of_item(i_m, lengths, band, KIND: gl.constexpr, SUM_TILES: gl.constexpr):
    """-> first tile of keys that query tile i_m, or one of SUM_TILES from it on, sees; how many."""
    first, end = keys_of_queries(i_m, lengths, band, KIND)
    if SUM_TILES > 1:
        others, end = keys_of_queries(gl.minimum(i_m + SUM_TILES, lengths[2]) - 1, lengths, band, KIND)
    return first, gl.maximum(end - first, 0)


@jit
def _produce(q_desc, do_desc, k_desc, v_desc, stat_desc, kept_desc, Progress, Entries, pool, stat_buf, kv_full, q_full, do_full,
             empty, done, band, room, packed, item, nowhere, KIND: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
             SUM_SLOTS: gl.constexpr, SUM_TILES: gl.constexpr):  # fmt: skip
    """Wait for what the item needs, bring its tiles, and count it as done while the results are written."""
    entry = _read_entry(Entries, item)
    if entry[0] == KEYS:
        _produce_keys(q_desc, do_desc, k_desc, v_desc, stat_desc, Progress, pool, stat_buf, kv_full, q_full, do_full, empty,
                      entry, band, room, packed, KIND, D, SLOTS)  # fmt: skip
        mbarrier.wait(done.index(0), 0)
        count_keys(Progress, entry[6][0])
    elif entry[0] == QUERIES:
        _produce_sums(k_desc, kept_desc, Progress, pool, q_full, empty, entry, band, room, nowhere, KIND, D, SUM_SLOTS,
                      SUM_TILES)  # fmt: skip
        mbarrier.wait(done.index(0), 0)
        count_queries(Progress, entry[6][0], packed[2])


# ---------------------------------------------------------------- dk and dv


@jit
def _consume_keys(DK, DV, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty, done, entry, band, room, outs,
                  nowhere, scale, KIND: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
                  FENCE: gl.constexpr, HOLD: gl.constexpr):  # fmt: skip
    """dk and dv of 64 keys, over all query heads of their KV head.  HOLD: keep K and V in registers, as left operands."""
    what, i_k, i_n, rows, place, line, counts = entry
    group, lines, width = room
    stride_xn, stride_xh, stride_yn, stride_yh = outs
    lengths = _lengths_of(rows)
    DTYPE: gl.constexpr = pool.dtype
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, UNIT, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, k_width=2)
    K_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, k_width=2)
    first, seen = queries_of_keys(i_n, lengths, band, KIND)
    last = first + gl.maximum(seen, 1) - 1
    whole = whole_tiles(i_n, lengths, band, KIND)
    dk = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))  # written before the first product, or all would wait
    dv = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))
    buffers = (pool, stat_buf, ds_buf)
    bars = (q_full, do_full, empty)
    base = (line * group * width - first) * UNIT  # dS of tile i_m of queries is kept UNIT * i_m rows behind it
    slot = 0
    parity = 0
    mbarrier.wait(kv_full.index(0), 0)
    if rows[3] - i_n * UNIT < UNIT:
        clear_tile(pool, 2 * SLOTS, rows[3] - i_n * UNIT, D)
        clear_tile(pool, 2 * SLOTS + 1, rows[3] - i_n * UNIT, D)
    tiles = tiles_of(pool, TILES, D)
    own = (tiles.index(2 * SLOTS), tiles.index(2 * SLOTS + 1))
    if HOLD:
        own = (own[0].load(K_LAYOUT), own[1].load(K_LAYOUT))
    for g in range(group):
        s, dp_flying = first_products(
            own, pool, bars, slot, parity, rows[1] - first * UNIT, D, TILES, SLOTS, True, S_LAYOUT
        )
        s = cut_if_needed(s, first, i_n, whole, lengths, band, KIND)
        # Only the last tile may have an end in it; who looks for it has to wait for all warps, so that is a loop of its own.
        for i_m in range(first + 1, last):  # the tile after the one whose S is there
            s, dp_flying, dk, dv, slot, parity = key_tile(
                s, dp_flying, dk, dv, own, buffers, bars, keep_desc, base + (i_m - 1) * UNIT, UNIT, UNIT, scale, slot,
                parity, False, D, TILES, SLOTS, False, False, FENCE, S_LAYOUT, A_LAYOUT)  # fmt: skip
            s = cut_if_needed(s, i_m, i_n, whole, lengths, band, KIND)
        for i_m in range(gl.maximum(first + 1, last), last + 1):
            s, dp_flying, dk, dv, slot, parity = key_tile(
                s, dp_flying, dk, dv, own, buffers, bars, keep_desc, base + (i_m - 1) * UNIT, UNIT, rows[1] - i_m * UNIT,
                scale, slot, parity, False, D, TILES, SLOTS, False, True, FENCE, S_LAYOUT, A_LAYOUT)  # fmt: skip
            s = cut_if_needed(s, i_m, i_n, whole, lengths, band, KIND)
        # Keys that nobody sees keep nothing: past the end, where the copy engine writes nothing.
        row = gl.where(seen > 0, base + last * UNIT, nowhere)
        s, dp_flying, dk, dv, slot, parity = key_tile(
            s, dp_flying, dk, dv, own, buffers, bars, keep_desc, row, UNIT, UNIT, scale, slot, parity,
            True, D, TILES, SLOTS, False, True, FENCE, S_LAYOUT, A_LAYOUT)  # fmt: skip
        base += width * UNIT
    begin = rows[2].to(gl.int64)
    outs = (0, stride_xn, stride_xh, 0, stride_yn, stride_yh)
    finish_keys(
        DK + begin * stride_xn, DV + begin * stride_yn, dk, dv, done, outs, i_n - i_n, i_k, i_n, scale, rows[3], DTYPE
    )


# ---------------------------------------------------------------- dq


@jit
def _consume_sums(DQ, pool, full, empty, done, entry, band, outs, scale, KIND: gl.constexpr, D: gl.constexpr,
                  TILES: gl.constexpr, SLOTS: gl.constexpr, SUM_TILES: gl.constexpr):  # fmt: skip
    """One or two tiles of dq = scale * sum of dS K, in the keys' order."""
    what, i_h, i_m, rows, place, line, counts = entry
    stride_gm, stride_gh = outs
    lengths = _lengths_of(rows)
    DTYPE: gl.constexpr = pool.dtype
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    k_tiles = tiles_of(pool, TILES, D)
    low, tiles = _keys_of_item(i_m, lengths, band, KIND, SUM_TILES)
    sums = (opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT)),)
    if SUM_TILES > 1:
        sums = (sums[0], opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT)))
    slot = 0
    parity = 0
    before = 0
    for j in range(tiles - 1):
        mbarrier.wait(full.index(slot), parity)
        sums = add_kept(sums, pool, k_tiles, empty, slot, before, j, D, SLOTS, SUM_TILES)
        before = slot
        slot, parity = next_slot(slot, parity, SLOTS)
    for j in range(gl.maximum(tiles - 1, 0), tiles):  # which may have the end of the sequence in it
        mbarrier.wait(full.index(slot), parity)
        if rows[3] - (low + j) * UNIT < UNIT:
            clear_tile(pool, slot, rows[3] - (low + j) * UNIT, D)
        sums = add_kept(sums, pool, k_tiles, empty, slot, before, j, D, SLOTS, SUM_TILES)
        before = slot
        slot, parity = next_slot(slot, parity, SLOTS)
    if SUM_TILES > 1:
        sums = wgmma_wait(0, deps=(sums[0], sums[1]))
    else:
        sums = (wgmma_wait(0, deps=(sums[0],)),)
    mbarrier.arrive(done.index(0), count=1)
    out = DQ + i_h.to(gl.int64) * stride_gh
    for t in gl.static_range(SUM_TILES):
        row = (i_m + t) * UNIT
        store_accumulator(
            out + (rows[0] + row).to(gl.int64) * stride_gm, sums[t] * scale, rows[1] - row, stride_gm, DTYPE
        )


@jit
def _consume(DQ, DK, DV, Entries, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty, done, band, room, item,
             q_outs, kv_outs, nowhere, scale, KIND: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
             SUM_SLOTS: gl.constexpr, SUM_TILES: gl.constexpr, FENCE: gl.constexpr, HOLD: gl.constexpr):  # fmt: skip
    """Make the item."""
    entry = _read_entry(Entries, item)
    if entry[0] == KEYS:
        _consume_keys(DK, DV, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty, done, entry, band, room,
                      kv_outs, nowhere, scale * LOG2E, KIND, D, TILES, SLOTS, FENCE, HOLD)  # fmt: skip
    elif entry[0] == QUERIES:
        _consume_sums(DQ, pool, q_full, empty, done, entry, band, q_outs, scale, KIND, D, TILES, SUM_SLOTS, SUM_TILES)


@jit(do_not_specialize=RUNTIME)
def attention_backward_packed(
    q_desc, do_desc, k_desc, v_desc, stat_desc, keep_desc, DQ, DK, DV, Entries, Progress,
    scale, group, total_q, q_places, left, right, lines, width, blocks, no_unit, nowhere,
    stride_gm, stride_gh, stride_xn, stride_xh, stride_yn, stride_yh,
    KIND: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, SUM_TILES: gl.constexpr, FENCE: gl.constexpr, HOLD: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc [1, H, total_q, D], k_desc, v_desc [1, H/group, total_k, D] with boxes [1, 1, 64, 64]; stat_desc:
    statistics as one dimension, box [128], a row for each of q_places places of each head, the last being number no_unit;
    keep_desc [nowhere, 64], box [64, 64]: `lines` lines for dS, each of group * width tiles.  DQ [total_q, H, D], DK, DV
    [total_k, H/group, D] by strides; Entries: the pieces of work, in order.  scale > 0.  KIND, left, right: as of
    attention_backward.  SUM_TILES: tiles of queries of an item for dq, as the entries have them.

    Progress [1 + 2 * blocks] int32: zeros.  Grid: a program for each entry; which one it makes, it draws."""
    DTYPE: gl.constexpr = q_desc.dtype
    PANELS: gl.constexpr = D // PANEL
    TILES: gl.constexpr = 2 * SLOTS + 2
    SUM_SLOTS: gl.constexpr = (TILES * PANELS) // (PANELS + SUM_TILES)  # a tile of K and SUM_TILES panels of dS each
    RING: gl.constexpr = max(SLOTS, SUM_SLOTS)
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([UNIT, PANEL], DTYPE)
    pool = gl.allocate_shared_memory(DTYPE, [TILES * PANELS, UNIT, PANEL], BOX)
    stat_buf = gl.allocate_shared_memory(gl.float32, [SLOTS, STATISTICS], stat_desc.layout)
    ds_buf = gl.allocate_shared_memory(DTYPE, [UNIT, UNIT], BOX)
    kv_full = barriers(1, 1)
    q_full = barriers(RING, 1)
    do_full = barriers(SLOTS, 1)
    empty = barriers(RING, 1)
    done = barriers(1, 1)
    fence_async_shared()
    item = gl.atomic_add(Progress, 1)
    gl.warp_specialize([
        (_consume, (DQ, DK, DV, Entries, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty, done, (left, right),
                    (group, lines, width), item, (stride_gm, stride_gh), (stride_xn, stride_xh, stride_yn, stride_yh),
                    nowhere, scale, KIND, D, TILES, SLOTS, SUM_SLOTS, SUM_TILES, FENCE, HOLD)),
        (_produce, (q_desc, do_desc, k_desc, v_desc, stat_desc, keep_desc, Progress, Entries, pool, stat_buf,
                    kv_full, q_full, do_full, empty, done, (left, right), (group, lines, width),
                    (total_q, q_places, blocks, no_unit), item, nowhere, KIND, D, SLOTS, SUM_SLOTS, SUM_TILES)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip

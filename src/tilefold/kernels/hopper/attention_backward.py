"""Gradients of dense attention on sm_90, in five products a pair of tiles and without an addition in memory.

The work, its order and its steps are those of the block-sparse kernel (`sparse_backward`, whose text says how a key item and a
query item go): a program makes either dk and dv of 64 keys, and keeps its dS, or dq of 64 queries from the dS that was kept.
Here the pairs come from ranges (`backward_ranges`) instead of lists, and the keys of long sequences in stripes:

    batch    some KV heads and one stripe of their keys: what has room for its dS at a time
    dq       of a query tile is made stripe by stripe; between two stripes the sum so far waits in memory in fp32

An item for queries reads the sum of the stripe before, which all query items of that batch have left there, after its own
products.  So each sum still has one order: the same bits in every run.

Source: the products are FlashAttention-2's (Dao 2023, arXiv:2307.08691, section 3.1.2).
"""

from .backward_items import batch_of, key_item, produce_keys, produce_sums, query_item, sum_so_far
from .backward_parts import (
    STATISTICS,
    UNIT,
    add_kept,
    finish_keys,
    first_products,
    key_tile,
    next_slot,
    tiles_of,
)
from .backward_ranges import (
    cut_if_needed,
    line_of_keys,
    lines_of_head,
    queries_of_keys,
    stripe_of_queries,
    whole_tiles,
)
from .backward_spans import finish_span
from .backward_work import await_queries, count_keys, count_queries, work_of_item
from .gluon import barriers, fence_async_shared, gl, jit, mbarrier, opaque, wgmma_wait
from .parts import LOG2E, PANEL, store_accumulator

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_units", "kv_units", "left", "right", "stripe_units", "stripes",
           "width", "batch_heads", "batches", "delay", "rooms", "no_unit", "nowhere",
           "stride_gb", "stride_gm", "stride_gh", "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn",
           "stride_yh", "written", "stat_units"]  # fmt: skip


# ---------------------------------------------------------------- the loading warp


@jit
def _produce(q_desc, do_desc, k_desc, v_desc, stat_desc, kept_desc, Progress, pool, stat_buf, kv_full, q_full, do_full, empty,
             done, lengths, band, work, split, width, order, room_rows, item, nowhere, KIND: gl.constexpr, D: gl.constexpr,
             SLOTS: gl.constexpr, SUM_SLOTS: gl.constexpr, SUM_TILES: gl.constexpr, stat_units=None):  # fmt: skip
    """Wait for what the item needs, bring its tiles, and count it as done while the results are written."""
    batches, delay, rooms = order
    key_items = split[2] * split[0]
    query_items = split[2] * work[1] * ((lengths[2] + SUM_TILES - 1) // SUM_TILES)
    keys, batch, program = work_of_item(item, key_items, query_items, batches, delay)
    if keys:
        produce_keys(q_desc, do_desc, k_desc, v_desc, stat_desc, Progress, pool, stat_buf, kv_full, q_full, do_full, empty,
                      lengths, band, work, split, order, batch, query_items, program, KIND, D, SLOTS, None,
                      stat_units)  # fmt: skip
        mbarrier.wait(done.index(0), 0)
        count_keys(Progress, batch)
    else:
        produce_sums(k_desc, kept_desc, Progress, pool, q_full, empty, lengths, band, work, split, width,
                      batch % rooms * room_rows, nowhere, batch, key_items, program, KIND, D, SUM_SLOTS, SUM_TILES)  # fmt: skip
        mbarrier.wait(done.index(0), 0)
        count_queries(Progress, batch, batches)


# ---------------------------------------------------------------- dk and dv


@jit
def _consume_keys(DK, DV, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty, done, lengths, band, work, split,
                  width, outs, base, nowhere, scale, batch, program, KIND: gl.constexpr, D: gl.constexpr,
                  COLUMNS_QK: gl.constexpr, COLUMNS_V: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
                  FENCE: gl.constexpr, HOLD: gl.constexpr, written=None):  # fmt: skip
    """dk and dv of 64 keys, over all query heads of their KV head.

    base: row of keep_desc where the batch's room begins.  written: of backward_spans, None where all queries are in one launch.
    HOLD: keep K and V in registers, as left operands of S and dP: shared
    memory is read half as often for them."""
    heads, group, no_unit = work
    seq_q, seq_k, q_units, kv_units = lengths
    room_of_head = lines_of_head(split[0], KIND) * width * UNIT
    DTYPE: gl.constexpr = pool.dtype
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, UNIT, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, k_width=2)
    K_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, k_width=2)
    i_n, i_b, i_k, local = key_item(batch, program, heads // group, split)
    head, stripe = batch_of(batch, split)
    first, seen = queries_of_keys(i_n, lengths, band, KIND)
    last = first + gl.maximum(seen, 1) - 1
    whole = whole_tiles(i_n, lengths, band, KIND)
    place, way = line_of_keys(i_n - stripe * split[0], split[0], width, KIND)
    dk = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))  # written before the first product, or all would wait
    dv = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))
    buffers = (pool, stat_buf, ds_buf)
    bars = (q_full, do_full, empty)
    base += local * group * room_of_head + place * UNIT
    slot = 0
    parity = 0
    mbarrier.wait(kv_full.index(0), 0)
    tiles = tiles_of(pool, TILES, D)
    own = (tiles.index(2 * SLOTS), tiles.index(2 * SLOTS + 1))
    if HOLD:
        own = (own[0].load(K_LAYOUT), own[1].load(K_LAYOUT))
    for g in range(group):
        s, dp_flying = first_products(own, pool, bars, slot, parity, UNIT, D, TILES, SLOTS, False, S_LAYOUT)
        s = cut_if_needed(s, first, i_n, whole, lengths, band, KIND)
        row = base
        for i_m in range(first + 1, last + 1):  # the tile after the one whose S is there
            s, dp_flying, dk, dv, slot, parity = key_tile(
                s, dp_flying, dk, dv, own, buffers, bars, keep_desc, row, UNIT, UNIT, scale, slot, parity,
                False, D, TILES, SLOTS, False, False, FENCE, S_LAYOUT, A_LAYOUT)  # fmt: skip
            row += way * UNIT
            s = cut_if_needed(s, i_m, i_n, whole, lengths, band, KIND)
        # Keys that nobody sees keep nothing: past the end, where the copy engine writes nothing.
        row = gl.where(seen > 0, row, nowhere)
        s, dp_flying, dk, dv, slot, parity = key_tile(
            s, dp_flying, dk, dv, own, buffers, bars, keep_desc, row, UNIT, UNIT, scale, slot, parity,
            True, D, TILES, SLOTS, False, False, FENCE, S_LAYOUT, A_LAYOUT)  # fmt: skip
        base += room_of_head
    if written is None:
        finish_keys(DK, DV, dk, dv, done, outs, i_b, i_k, i_n, scale, seq_k, DTYPE, COLUMNS_QK, COLUMNS_V)
    else:
        finish_span(DK, DV, dk, dv, done, outs, i_b, i_k, i_n, scale, seq_k, written, COLUMNS_QK, COLUMNS_V)


# ---------------------------------------------------------------- dq


@jit
def _consume_sums(DQ, Partial, Progress, pool, full, empty, done, lengths, band, work, split, outs, scale, batches, batch,
                  query_items, program, KIND: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr,
                  TILES: gl.constexpr, SLOTS: gl.constexpr, SUM_TILES: gl.constexpr, STRIPED: gl.constexpr):  # fmt: skip
    """One or two tiles of dq = scale * sum of dS K over the stripe, and of what the stripes before made: in the keys' order."""
    heads, group, no_unit = work
    stride_gb, stride_gm, stride_gh = outs
    q_units = lengths[2]
    DTYPE: gl.constexpr = pool.dtype
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    k_tiles = tiles_of(pool, TILES, D)
    i_m, i_b, i_h, local, stripe = query_item(batch, program, heads, group, q_units, split, SUM_TILES)
    low, tiles, begins, ends = stripe_of_queries(i_m, stripe, split[0], lengths, band, KIND, SUM_TILES)
    sums = (opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT)),)
    if SUM_TILES > 1:
        sums = (sums[0], opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT)))
    slot = 0
    parity = 0
    before = 0
    for j in range(tiles):
        mbarrier.wait(full.index(slot), parity)
        sums = add_kept(sums, pool, k_tiles, empty, slot, before, j, D, SLOTS, SUM_TILES)
        before = slot
        slot, parity = next_slot(slot, parity, SLOTS)
    if SUM_TILES > 1:
        sums = wgmma_wait(0, deps=(sums[0], sums[1]))
    else:
        sums = (wgmma_wait(0, deps=(sums[0],)),)
    goes_on = (tiles > 0) & ~begins
    if not STRIPED:
        mbarrier.arrive(done.index(0), count=1)
    out = DQ + i_b.to(gl.int64) * stride_gb + i_h.to(gl.int64) * stride_gh
    for t in gl.static_range(SUM_TILES):
        dq = sums[t]
        row = (i_m + t) * UNIT
        place = out + row.to(gl.int64) * stride_gm
        if STRIPED:
            kept = sum_so_far(Partial, i_m + t, i_b * heads + i_h, q_units, D_LAYOUT, D, SUM_TILES)
            if goes_on:
                await_queries(Progress, batch - 1, batches, query_items)
                dq += gl.load(kept)
            if ends:
                store_accumulator(place, dq * scale, lengths[0] - row, stride_gm, DTYPE, COLUMNS)
            elif tiles > 0:
                gl.store(kept, dq)
        else:
            store_accumulator(place, dq * scale, lengths[0] - row, stride_gm, DTYPE, COLUMNS)
    if STRIPED:
        mbarrier.arrive(done.index(0), count=1)  # the sum counts as much as the dS that was read


@jit
def _consume(DQ, DK, DV, Partial, Progress, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty, done, lengths,
             band, work, split, width, order, room_rows, item, q_outs, kv_outs, nowhere, scale, KIND: gl.constexpr,
             D: gl.constexpr, COLUMNS_QK: gl.constexpr, COLUMNS_V: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
             SUM_SLOTS: gl.constexpr, SUM_TILES: gl.constexpr, STRIPED: gl.constexpr, FENCE: gl.constexpr,
             HOLD: gl.constexpr, written=None):  # fmt: skip
    """Make the item."""
    batches, delay, rooms = order
    key_items = split[2] * split[0]
    query_items = split[2] * work[1] * ((lengths[2] + SUM_TILES - 1) // SUM_TILES)
    keys, batch, program = work_of_item(item, key_items, query_items, batches, delay)
    if keys:
        _consume_keys(DK, DV, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty, done, lengths, band, work,
                      split, width, kv_outs, batch % rooms * room_rows, nowhere, scale * LOG2E, batch, program,
                      KIND, D, COLUMNS_QK, COLUMNS_V, TILES, SLOTS, FENCE, HOLD, written)  # fmt: skip
    else:
        _consume_sums(DQ, Partial, Progress, pool, q_full, empty, done, lengths, band, work, split, q_outs, scale, batches, batch,
                      query_items, program, KIND, D, COLUMNS_QK, TILES, SUM_SLOTS, SUM_TILES, STRIPED)  # fmt: skip


@jit(do_not_specialize=RUNTIME)
def attention_backward_hopper(
    q_desc, do_desc, k_desc, v_desc, stat_desc, keep_desc, DQ, DK, DV, Partial, Progress,
    scale, seq_q, seq_k, heads, group, q_units, kv_units, left, right, stripe_units, stripes, width, batch_heads, batches, delay,
    rooms, no_unit, nowhere,
    stride_gb, stride_gm, stride_gh, stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh, written, stat_units,
    KIND: gl.constexpr, D: gl.constexpr, COLUMNS_QK: gl.constexpr, COLUMNS_V: gl.constexpr, SLOTS: gl.constexpr,
    SUM_TILES: gl.constexpr, STRIPED: gl.constexpr, FENCE: gl.constexpr, HOLD: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc [B, H, Sq, D], k_desc, v_desc [B, H/group, Sk, D] with boxes [1, 1, 64, 64]; stat_desc: statistics
    (kernels.backward_statistics) as one dimension, box [128], the last row being number no_unit; keep_desc [nowhere, 64], box
    [64, 64]: room for dS.  D: width of the tiles, of which COLUMNS_QK and COLUMNS_V are the head dims (None: all); the
    copy engine fills the rest with zeros.  DQ [B, Sq, H, D], DK, DV [B, Sk, H/group, D] by strides; Partial: sums of dq,
    fp32, if STRIPED (stripes > 1).  scale > 0.  q_units, kv_units: tiles of 64 queries and keys; KIND: FULL, CAUSAL or WINDOW
    (left, right: keys on either side of a query's own place).  SUM_TILES: tiles of queries of an item for dq, which share K: 1
    or 2.

    Batches of batch_heads KV heads and stripe_units tiles of keys, `stripes` of them one after the other for the same heads:
    batches = B * H/group / batch_heads * stripes.  keep_desc has `rooms` rooms, each for dS of one batch, with
    lines of `width` tiles for each query head (backward_work: rooms, delay; backward_ranges: lines).
    Progress [1 + 2 * batches] int32: zeros.  Grid: a program for each item; which one it makes, it draws.

    written, stat_units: None, or of one span of a longer call's queries (`backward_spans`): DK and DV are fp32 there, of whose
    first `written` rows earlier spans have left their sums, and the statistics have stat_units rows a head."""
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
    room_rows = batch_heads * group * lines_of_head(stripe_units, KIND) * width * UNIT
    gl.warp_specialize([
        (_consume, (DQ, DK, DV, Partial, Progress, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty, done,
                    (seq_q, seq_k, q_units, kv_units), (left, right), (heads, group, no_unit),
                    (stripe_units, stripes, batch_heads), width, (batches, delay, rooms), room_rows, item,
                    (stride_gb, stride_gm, stride_gh), (stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh),
                    nowhere, scale, KIND, D, COLUMNS_QK, COLUMNS_V, TILES, SLOTS, SUM_SLOTS, SUM_TILES, STRIPED, FENCE, HOLD,
                    written)),
        (_produce, (q_desc, do_desc, k_desc, v_desc, stat_desc, keep_desc, Progress, pool, stat_buf,
                    kv_full, q_full, do_full, empty, done,
                    (seq_q, seq_k, q_units, kv_units), (left, right), (heads, group, no_unit),
                    (stripe_units, stripes, batch_heads), width, (batches, delay, rooms), room_rows, item,
                    nowhere, KIND, D, SLOTS, SUM_SLOTS, SUM_TILES, stat_units)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip

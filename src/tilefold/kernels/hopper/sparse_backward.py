"""Gradients of block-sparse attention on sm_90, in five products a pair of blocks and without an addition in memory.

A program makes either dk and dv of 64 keys, over the query blocks that list them, or dq of 64 queries, over the list:

    keys      S = K q^T     dP = V dout^T     P = exp2(S - lse)     dS = P (dP - delta)     dV += P dout     dK += dS q
    queries   dQ += dS K

The first kind of work writes its dS (16 bits, a tile [64 keys, 64 queries] for each pair, 8 KB) to where the second kind looks
for it.  Each sum is made by one program in the order of one list, so the result is the same to the last bit in every run.  To
make S and dP again instead would be seven products; to add dQ in memory, 32 KB of fp32 a pair, in an order that changes.

The dS of all pairs is as large as the scores that are never stored otherwise.  So it is kept for a few heads at a time, in a few
rooms that are used in turn, all in one launch: every program draws its piece of work from a counter (`backward_work`: the order,
and who waits for whom), and the device is full from the first head to the last.

    producer   1 warp    brings tiles into a ring of buffers, each with two barriers: `full` and `empty`
    consumer   4 warps   the products of one tile after the other

In the programs for keys everything is transposed, so that P and dS leave one product as accumulators and enter the next as left
operands, without a way through shared memory.  The order in which products are issued, and what is in flight behind each line:

    P of this tile                                     dP
    wait for dP; issue dV; dS                          dV
    issue dK; hand dS to the copy engine               dV  dK
    wait for dV; issue the next tile's S               dK  S'
    wait for dK: the buffers are free; issue dP        S'  dP'
    wait for S                                         dP'

Source: the products are FlashAttention-2's (Dao 2023, arXiv:2307.08691, section 3.1.2).
"""

from .backward_parts import (
    STATISTICS,
    UNIT,
    consume_sums,
    finish_keys,
    first_products,
    key_tile,
    list_of_block,
    load_keys,
    load_queries,
    next_slot,
    produce_sums,
    tiles_of,
)
from .backward_work import count_keys, count_queries, work_of_item
from .gluon import barriers, fence_async_shared, gl, jit, mbarrier, opaque
from .parts import LOG2E, PANEL, list_of_item, place_of_item

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_units", "kv_units", "capacity", "batch_heads", "batches", "delay",
           "rooms", "no_unit", "nowhere",
           "stride_gb", "stride_gm", "stride_gh", "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn", "stride_yh",
           "stride_ib", "stride_ih", "stride_iq", "stride_cb", "stride_ch",
           "stride_tb", "stride_th", "stride_tk", "stride_ub", "stride_uh",
           "stride_sb", "stride_sh", "stride_pb", "stride_ph"]  # fmt: skip


@jit
def _produce_keys(q_desc, do_desc, k_desc, v_desc, stat_desc, Progress, pool, stat_buf, kv_full, q_full, do_full, empty, lists,
                  work, order, batch, program, D: gl.constexpr, SLOTS: gl.constexpr, Q_UNITS: gl.constexpr,
                  KV_UNITS: gl.constexpr):  # fmt: skip
    """Bring K and V, then q, dout and statistics of every unit of queries that lists them."""
    heads, group, q_units, kv_units, no_unit = work
    batch_heads, batches, delay, rooms = order
    i_n, i_b, i_k = place_of_item(batch * batch_heads * kv_units + program, kv_units, heads // group)
    load_keys(k_desc, v_desc, pool, kv_full, i_b, i_k, i_n, D, SLOTS)
    slot = 0
    parity = 1  # of a fresh barrier: the first wait on `empty` returns at once
    for g in range(group):
        i_h = i_k * group + g
        index, count = list_of_block(lists, i_n // KV_UNITS, i_b, i_h)
        row = (i_b * heads + i_h) * q_units
        ahead = gl.load(index)
        for j in range(gl.maximum(count, 1) * Q_UNITS):
            unit = ahead * Q_UNITS + j % Q_UNITS
            ahead = gl.load(index + gl.minimum((j + 1) // Q_UNITS, gl.maximum(count - 1, 0)))
            # An empty list is a unit without queries, past the end, where the copy engine gives zeros.
            unit = gl.where(count > 0, unit, q_units)
            statistics = gl.where(count > 0, row + unit, no_unit)
            load_queries(q_desc, do_desc, stat_desc, Progress, pool, stat_buf, q_full, do_full, empty, i_b, i_h, unit,
                         statistics, g, j, batch, rooms, batch_heads * group * q_units, batches, slot, parity,
                         D, SLOTS)  # fmt: skip
            slot, parity = next_slot(slot, parity, SLOTS)


@jit
def _valid_queries(sizes, index, j, count, Q_UNITS: gl.constexpr, Q_SIZED: gl.constexpr):
    """Valid queries of the list's unit j; sizes: where this head's query sizes begin (looked at if Q_SIZED)."""
    live = UNIT
    if Q_SIZED:
        block = gl.load(index + gl.minimum(j // Q_UNITS, gl.maximum(count - 1, 0)), mask=count > 0, other=0)
        live = gl.load(sizes + block) - j % Q_UNITS * UNIT
    return live


@jit
def _keep_row(places, j, count, base, capacity, nowhere, Q_UNITS: gl.constexpr, KV_UNITS: gl.constexpr):
    """The row that takes dS of the list's unit j: tiles lie as the lists of the units of queries name the units of keys.

    The units that stand for an empty list have no place: past the end, where the copy engine writes nothing."""
    place = gl.load(places + j // Q_UNITS, mask=count > 0, other=0)
    if Q_UNITS > 1:
        place += j % Q_UNITS * capacity
    return gl.where(count > 0, base + place * (KV_UNITS * UNIT), nowhere)


@jit
def _consume_keys(DK, DV, Places, Sizes, QuerySizes, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty, done,
                  lists, work, outs, size_strides, keep_at, nowhere, scale, seq_k, capacity, first_head, program,
                  D: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, Q_UNITS: gl.constexpr,
                  KV_UNITS: gl.constexpr, MASKED: gl.constexpr, SIZED: gl.constexpr, Q_SIZED: gl.constexpr):  # fmt: skip
    """dk and dv of 64 keys, over the lists of all query heads of their KV head.

    first_head: KV head with which the batch begins.  keep_at: row of keep_desc where its room does."""
    heads, group, q_units, kv_units, no_unit = work
    stride_sb, stride_sh, stride_pb, stride_ph = size_strides
    Index, Count, stride_tb, stride_th, stride_tk, stride_ub, stride_uh = lists
    DTYPE: gl.constexpr = pool.dtype
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, UNIT, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, k_width=2)
    i_n, i_b, i_k = place_of_item(program + first_head * kv_units, kv_units, heads // group)
    block = i_n // KV_UNITS
    part = i_n % KV_UNITS
    dk = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))  # written before the first product, or all would wait
    dv = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))
    slot = 0
    parity = 0
    mbarrier.wait(kv_full.index(0), 0)
    tiles = tiles_of(pool, TILES, D)
    own = (tiles.index(2 * SLOTS), tiles.index(2 * SLOTS + 1))
    for g in range(group):
        i_h = i_k * group + g
        index, count = list_of_block(lists, block, i_b, i_h)
        places = list_of_item((Places, Count, stride_tb, stride_th, stride_tk, stride_ub, stride_uh), block, i_b, i_h)
        live_k = seq_k - i_n * UNIT
        if SIZED:
            size = gl.load(Sizes + i_b.to(gl.int64) * stride_sb + i_h.to(gl.int64) * stride_sh + block)
            live_k = gl.minimum(live_k, size - part * UNIT)
        sizes = QuerySizes + i_b.to(gl.int64) * stride_pb + i_h.to(gl.int64) * stride_ph
        head = i_b * heads + i_h - first_head * group  # of this batch
        base = keep_at + head * (q_units * capacity * KV_UNITS * UNIT) + part * UNIT
        units = gl.maximum(count, 1) * Q_UNITS
        ahead = _keep_row(places, 0, count, base, capacity, nowhere, Q_UNITS, KV_UNITS)
        live_q = _valid_queries(sizes, index, 0, count, Q_UNITS, Q_SIZED)
        buffers = (pool, stat_buf, ds_buf)
        bars = (q_full, do_full, empty)
        s, dp_flying = first_products(own, pool, bars, slot, parity, live_q, D, TILES, SLOTS, Q_SIZED, S_LAYOUT)
        for j in range(1, units):
            live_q = _valid_queries(sizes, index, j, count, Q_UNITS, Q_SIZED)
            row = ahead
            ahead = _keep_row(places, j, count, base, capacity, nowhere, Q_UNITS, KV_UNITS)
            s, dp_flying, dk, dv, slot, parity = key_tile(
                s, dp_flying, dk, dv, own, buffers, bars, keep_desc, row, live_k, live_q, scale, slot, parity,
                False, D, TILES, SLOTS, MASKED, Q_SIZED, False, S_LAYOUT, A_LAYOUT)  # fmt: skip
        s, dp_flying, dk, dv, slot, parity = key_tile(
            s, dp_flying, dk, dv, own, buffers, bars, keep_desc, ahead, live_k, UNIT, scale, slot, parity,
            True, D, TILES, SLOTS, MASKED, Q_SIZED, False, S_LAYOUT, A_LAYOUT)  # fmt: skip
    finish_keys(DK, DV, dk, dv, done, outs, i_b, i_k, i_n, scale, seq_k, DTYPE)


@jit
def _produce(q_desc, do_desc, k_desc, v_desc, stat_desc, kept_desc, Progress, pool, stat_buf, kv_full, q_full, do_full, empty,
             done, lists, turned, work, capacity, order, room_rows, item, D: gl.constexpr, SLOTS: gl.constexpr,
             SUM_SLOTS: gl.constexpr, Q_UNITS: gl.constexpr, KV_UNITS: gl.constexpr):  # fmt: skip
    """Wait for what the item needs, bring its tiles, and count it as done while the results are written."""
    heads, group, q_units, kv_units, no_unit = work
    batch_heads, batches, delay, rooms = order
    key_items = batch_heads * kv_units
    query_items = batch_heads * group * q_units
    keys, batch, program = work_of_item(item, key_items, query_items, batches, delay)
    if keys:
        _produce_keys(q_desc, do_desc, k_desc, v_desc, stat_desc, Progress, pool, stat_buf, kv_full, q_full, do_full, empty,
                      turned, work, order, batch, program, D, SLOTS, Q_UNITS, KV_UNITS)  # fmt: skip
        mbarrier.wait(done.index(0), 0)
        count_keys(Progress, batch)
    else:
        produce_sums(k_desc, kept_desc, Progress, pool, q_full, empty, lists, work, capacity, batch % rooms * room_rows, batch,
                     key_items, query_items, program, D, SUM_SLOTS, Q_UNITS, KV_UNITS)  # fmt: skip
        mbarrier.wait(done.index(0), 0)
        count_queries(Progress, batch, batches)


@jit
def _consume(DQ, DK, DV, Places, Sizes, QuerySizes, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty, done,
             lists, turned, work, capacity, order, room_rows, item, q_outs, kv_outs, size_strides, nowhere, scale, seq_q, seq_k,
             D: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, SUM_SLOTS: gl.constexpr, Q_UNITS: gl.constexpr,
             KV_UNITS: gl.constexpr, MASKED: gl.constexpr, SIZED: gl.constexpr, Q_SIZED: gl.constexpr):  # fmt: skip
    """Make the item."""
    heads, group, q_units, kv_units, no_unit = work
    batch_heads, batches, delay, rooms = order
    key_items = batch_heads * kv_units
    query_items = batch_heads * group * q_units
    keys, batch, program = work_of_item(item, key_items, query_items, batches, delay)
    if keys:
        _consume_keys(DK, DV, Places, Sizes, QuerySizes, keep_desc, pool, stat_buf, ds_buf, kv_full, q_full, do_full, empty,
                      done, turned, work, kv_outs, size_strides, batch % rooms * room_rows, nowhere, scale * LOG2E, seq_k,
                      capacity, batch * batch_heads, program,
                      D, TILES, SLOTS, Q_UNITS, KV_UNITS, MASKED, SIZED, Q_SIZED)  # fmt: skip
    else:
        consume_sums(DQ, Sizes, pool, q_full, empty, done, lists, work, q_outs, size_strides[0], size_strides[1], scale, seq_q,
                     batch * query_items + program, D, TILES, SUM_SLOTS, Q_UNITS, KV_UNITS, SIZED)  # fmt: skip


@jit(do_not_specialize=RUNTIME)
def sparse_backward_hopper(
    q_desc, do_desc, k_desc, v_desc, stat_desc, keep_desc, DQ, DK, DV, Index, Count, TurnedIndex, TurnedCount, Places, Sizes,
    QuerySizes, Progress,
    scale, seq_q, seq_k, heads, group, q_units, kv_units, capacity, batch_heads, batches, delay, rooms, no_unit, nowhere,
    stride_gb, stride_gm, stride_gh, stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh,
    stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_tb, stride_th, stride_tk, stride_ub, stride_uh,
    stride_sb, stride_sh, stride_pb, stride_ph,
    D: gl.constexpr, SLOTS: gl.constexpr, Q_UNITS: gl.constexpr, KV_UNITS: gl.constexpr, MASKED: gl.constexpr,
    SIZED: gl.constexpr, Q_SIZED: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc [B, H, Sq, D], k_desc, v_desc [B, H/group, Sk, D] with boxes [1, 1, 64, 64]; stat_desc: statistics as one
    dimension, box [128], the last row being number no_unit; keep_desc [nowhere, 64], box [64, 64]: room for dS.
    DQ [B, Sq, H, D], DK, DV [B, Sk, H/group, D] by strides.  Index [B, H, Qb, cap], Count [B, H, Qb]: the lists;
    TurnedIndex [B, H, KVb, tcap], TurnedCount [B, H, KVb]: their transpose, Places likewise (kernels.list_places);
    Sizes [B, H, KVb] if SIZED, QuerySizes [B, H, Qb] if Q_SIZED; int32.  scale > 0.  Query blocks have 64 * Q_UNITS tokens,
    KV blocks 64 * KV_UNITS; q_units = Qb * Q_UNITS, kv_units = KVb * KV_UNITS.  MASKED: some key of a block is not live.

    B * H/group = batches * batch_heads; keep_desc has `rooms` rooms, each for dS of one batch (backward_work says how many and
    what delay is).
    Progress [1 + 2 * batches] int32: zeros.  Grid: a program for each item; which one it makes, it draws."""
    DTYPE: gl.constexpr = q_desc.dtype
    PANELS: gl.constexpr = D // PANEL
    TILES: gl.constexpr = 2 * SLOTS + 2
    SUM_SLOTS: gl.constexpr = (TILES * PANELS) // (PANELS + 1)  # a tile of K and a panel of dS each
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([UNIT, PANEL], DTYPE)
    pool = gl.allocate_shared_memory(DTYPE, [TILES * PANELS, UNIT, PANEL], BOX)
    stat_buf = gl.allocate_shared_memory(gl.float32, [SLOTS, STATISTICS], stat_desc.layout)
    ds_buf = gl.allocate_shared_memory(DTYPE, [UNIT, UNIT], BOX)
    kv_full = barriers(1, 1)
    q_full = barriers(SUM_SLOTS, 1)
    do_full = barriers(SLOTS, 1)
    empty = barriers(SUM_SLOTS, 1)
    done = barriers(1, 1)
    fence_async_shared()
    item = gl.atomic_add(Progress, 1)
    room_rows = batch_heads * group * q_units * capacity * (KV_UNITS * UNIT)
    gl.warp_specialize([
        (_consume, (DQ, DK, DV, Places, Sizes, QuerySizes, keep_desc, pool, stat_buf, ds_buf,
                    kv_full, q_full, do_full, empty, done,
                    (Index, Count, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch),
                    (TurnedIndex, TurnedCount, stride_tb, stride_th, stride_tk, stride_ub, stride_uh),
                    (heads, group, q_units, kv_units, no_unit), capacity, (batch_heads, batches, delay, rooms), room_rows, item,
                    (stride_gb, stride_gm, stride_gh),
                    (stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh),
                    (stride_sb, stride_sh, stride_pb, stride_ph), nowhere, scale, seq_q, seq_k,
                    D, TILES, SLOTS, SUM_SLOTS, Q_UNITS, KV_UNITS, MASKED, SIZED, Q_SIZED)),
        (_produce, (q_desc, do_desc, k_desc, v_desc, stat_desc, keep_desc, Progress, pool, stat_buf,
                    kv_full, q_full, do_full, empty, done,
                    (Index, Count, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch),
                    (TurnedIndex, TurnedCount, stride_tb, stride_th, stride_tk, stride_ub, stride_uh),
                    (heads, group, q_units, kv_units, no_unit), capacity, (batch_heads, batches, delay, rooms), room_rows, item,
                    D, SLOTS, SUM_SLOTS, Q_UNITS, KV_UNITS)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip

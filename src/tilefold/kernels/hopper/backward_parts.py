"""What the Hopper kernels of the backward pass are made of: tiles brought by panels, a ring, the step of each kind of work.

A unit is 64 tokens: a tile has the rows of one unit, and a block of 128 tokens is two.  Shared memory is one pool of tiles
[64, D], cut into panels of 64 columns, which each role divides up as it needs.

Statistics are one row of 128 fp32 a unit of queries: lse in base 2 of its 64 queries, then their delta
(kernels.backward_statistics makes them).  A query that counts for nothing has lse +inf there, so its probabilities are 0
without any mask.  One more row, the last, is that of a unit without queries: what an empty list is made of.
"""

from .backward_work import await_copies, await_keys, await_room
from .gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    opaque,
    reinterpret,
    schedule_fence_16,
    tma_load,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from .parts import LOG2E, PANEL, clear_rows, list_of_item, load_panels, place_of_item, store_accumulator

UNIT = gl.constexpr(64)  # tokens of a tile
STATISTICS = gl.constexpr(128)  # numbers of a unit of queries: 64 lse, 64 delta


# ---------------------------------------------------------------- tiles and rings


@jit
def next_slot(slot, parity, SLOTS: gl.constexpr):
    """One step on a ring: the parity flips each time around."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        parity ^= 1
    return slot, parity


@jit
def clear_tile(pool, tile, live, D: gl.constexpr):
    """Zero the rows of a tile from `live` on: they may hold NaN, and 0 * NaN is NaN."""
    for p in gl.static_range(D // PANEL):
        clear_rows(pool.index(tile * (D // PANEL) + p), live, UNIT, gl.num_warps())
    fence_async_shared()


@jit
def tiles_of(pool, TILES: gl.constexpr, D: gl.constexpr):
    """The pool's first tiles as [TILES, 64, D]."""
    return reinterpret(pool, pool.dtype, [TILES, UNIT, D], gl.NVMMASharedLayout.get_default_for([UNIT, D], pool.dtype))


@jit
def list_of_block(lists, block, i_b, i_h):
    """-> where the list of a block begins, and its count.  lists = (Index, Count, stride_ib, stride_ih, stride_iq, stride_cb,
    stride_ch)."""
    count = gl.load(lists[1] + i_b.to(gl.int64) * lists[5] + i_h.to(gl.int64) * lists[6] + block)
    return list_of_item(lists, block, i_b, i_h), count


# ---------------------------------------------------------------- dk and dv: K and V stay, q and dout pass by


@jit
def load_keys(k_desc, v_desc, pool, kv_full, i_b, i_k, i_n, D: gl.constexpr, SLOTS: gl.constexpr, first=0):
    """Have the item's own K and V brought behind the ring: tiles 2 * SLOTS and 2 * SLOTS + 1.  first: of the sequence's rows."""
    mbarrier.expect(kv_full.index(0), 2 * UNIT * D * 2)
    load_panels(k_desc, kv_full.index(0), pool, 2 * SLOTS, i_b, i_k, first + i_n * UNIT, D)
    load_panels(v_desc, kv_full.index(0), pool, 2 * SLOTS + 1, i_b, i_k, first + i_n * UNIT, D)


@jit
def load_queries(q_desc, do_desc, stat_desc, Progress, pool, stat_buf, q_full, do_full, empty, i_b, i_h, unit, statistics, g, j,
                 batch, rooms, query_items, batches, slot, parity, D: gl.constexpr, SLOTS: gl.constexpr,
                 first=0, do_empty=None):  # fmt: skip
    """Have q, dout and statistics of a unit of queries brought to a slot: tiles `slot` and SLOTS + `slot`.

    statistics: which row of them; first: of the sequence's rows; do_empty: dout's own barriers, where it does not go with q.
    Before the dS of the item's first unit (g, j = 0, 0) there has to be room."""
    mbarrier.wait(empty.index(slot), parity)
    mbarrier.expect(q_full.index(slot), UNIT * D * 2 + STATISTICS * 4)
    load_panels(q_desc, q_full.index(slot), pool, slot, i_b, i_h, first + unit * UNIT, D)
    tma_load(stat_desc, [statistics * STATISTICS], q_full.index(slot), stat_buf.index(slot))
    if (g == 0) & (j == 0):  # while K, V and q are on their way: there is no dS without dout
        await_room(Progress, batch, rooms, query_items, batches)
    if do_empty is not None:
        mbarrier.wait(do_empty.index(slot), parity)
    mbarrier.expect(do_full.index(slot), UNIT * D * 2)
    load_panels(do_desc, do_full.index(slot), pool, SLOTS + slot, i_b, i_h, first + unit * UNIT, D)


@jit
def wait_tile(bar, parity, pool, slot, tile, live, D: gl.constexpr, Q_SIZED: gl.constexpr):
    """Wait for a tile of q or dout, and clear what is no query."""
    mbarrier.wait(bar.index(slot), parity)
    if Q_SIZED:
        if live < UNIT:
            clear_tile(pool, tile, live, D)


@jit
def key_tile(s, dp_flying, dk, dv, own, buffers, bars, keep_desc, keep_row, live_k, live_q, scale, slot, parity,
              LAST: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, MASKED: gl.constexpr,
              Q_SIZED: gl.constexpr, FENCE: gl.constexpr, S_LAYOUT: gl.constexpr, A_LAYOUT: gl.constexpr):  # fmt: skip
    """One unit of queries.  On entry its S is there and its dP in flight; on exit so it is for the next unit, unless LAST.

    own: K and V, as tiles or as left operands in registers.  keep_row: the row of keep_desc that takes dS.  live_k: valid keys
    of this tile, looked at if MASKED.  live_q: valid queries of the next unit, looked at if Q_SIZED.  FENCE: keep the wait for
    dP behind the exponentials.

    -> s, dp_flying, dk, dv, slot, parity"""
    pool, stat_buf, ds_buf = buffers
    q_full, do_full, empty = bars
    tiles = tiles_of(pool, TILES, D)
    DTYPE: gl.constexpr = pool.dtype
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    nothing = gl.zeros([UNIT, UNIT], gl.float32, S_LAYOUT)  # use_acc=False: never read
    statistics = stat_buf.index(slot)
    p = gl.exp2(s * scale - gl.expand_dims(statistics.slice(0, UNIT).load(COLUMN), 0))
    if MASKED:
        dead = gl.expand_dims(gl.arange(0, UNIT, layout=gl.SliceLayout(1, S_LAYOUT)) >= live_k, 1)
        p = gl.where(dead, 0.0, p)
    p16 = p.to(DTYPE)
    if FENCE:
        schedule_fence_16(p16)
    p16 = gl.convert_layout(p16, A_LAYOUT)
    dp = wgmma_wait(0, deps=(dp_flying,))
    dv_flying = wgmma(p16, tiles.index(SLOTS + slot), dv, is_async=True)
    ds = p * (dp - gl.expand_dims(statistics.slice(UNIT, UNIT).load(COLUMN), 0))
    if MASKED:
        ds = gl.where(dead, 0.0, ds)
    ds16 = ds.to(DTYPE)
    dsa = gl.convert_layout(ds16, A_LAYOUT)
    dk_flying = wgmma(dsa, tiles.index(slot), dk, is_async=True)
    tma_store_wait(0)  # the copy that reads the tile before out of this buffer
    ds_buf.store(ds16)
    fence_async_shared()
    tma_store(keep_desc, [keep_row, 0], ds_buf)
    dv, p16 = wgmma_wait(1, deps=(dv_flying, p16))
    done = slot
    slot, parity = next_slot(slot, parity, SLOTS)
    if LAST:
        dk, dsa = wgmma_wait(0, deps=(dk_flying, dsa))
        mbarrier.arrive(empty.index(done), count=1)
        return s, dp_flying, dk, dv, slot, parity
    else:
        wait_tile(q_full, parity, pool, slot, slot, live_q, D, Q_SIZED)
        s_flying = wgmma(own[0], tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        dk, dsa = wgmma_wait(1, deps=(dk_flying, dsa))
        mbarrier.arrive(empty.index(done), count=1)
        wait_tile(do_full, parity, pool, slot, SLOTS + slot, live_q, D, Q_SIZED)
        dp_flying = wgmma(own[1], tiles.index(SLOTS + slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = wgmma_wait(1, deps=(s_flying,))
        return s, dp_flying, dk, dv, slot, parity


@jit
def first_products(own, pool, bars, slot, parity, live_q, D: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
                   Q_SIZED: gl.constexpr, S_LAYOUT: gl.constexpr):  # fmt: skip
    """-> S of the first unit of queries, and its dP, in flight: what `key_tile` begins with."""
    q_full, do_full, empty = bars
    tiles = tiles_of(pool, TILES, D)
    nothing = gl.zeros([UNIT, UNIT], gl.float32, S_LAYOUT)  # use_acc=False: never read
    wait_tile(q_full, parity, pool, slot, slot, live_q, D, Q_SIZED)
    s_flying = wgmma(own[0], tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    wait_tile(do_full, parity, pool, slot, SLOTS + slot, live_q, D, Q_SIZED)
    dp_flying = wgmma(own[1], tiles.index(SLOTS + slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    s = wgmma_wait(1, deps=(s_flying,))
    return s, dp_flying


@jit
def finish_keys(DK, DV, dk, dv, done, outs, i_b, i_k, i_n, scale, seq_k, DTYPE: gl.constexpr,
                COLUMNS_QK: gl.constexpr = None, COLUMNS_V: gl.constexpr = None):  # fmt: skip
    """Store dv and dk of 64 keys, and say in between that all dS has been written.  scale: of scores in base 2.

    outs: strides (batch, row, head) of DK, then of DV.  COLUMNS: how many there are of them, if not all."""
    stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh = outs
    b = i_b.to(gl.int64)
    h = i_k.to(gl.int64)
    n = i_n.to(gl.int64) * UNIT
    rows = seq_k - i_n * UNIT
    store_accumulator(DV + b * stride_yb + h * stride_yh + n * stride_yn, dv, rows, stride_yn, DTYPE, COLUMNS_V)
    await_copies()
    mbarrier.arrive(done.index(0), count=1)
    dk = dk * (scale * (1 / LOG2E))
    store_accumulator(DK + b * stride_xb + h * stride_xh + n * stride_xn, dk, rows, stride_xn, DTYPE, COLUMNS_QK)


# ---------------------------------------------------------------- dq from a dS that was kept


@jit
def load_kept(k_desc, kept_desc, Progress, pool, full, empty, i_b, i_k, unit, rows, step, j, batch, key_items, slot, parity,
              D: gl.constexpr, SLOTS: gl.constexpr, SUM_TILES: gl.constexpr, first=0):  # fmt: skip
    """Have K of a unit brought to tile `slot`, and to the panels of `slot` behind the tiles of K the kept dS from
    rows[t] + j * step on: of one tile of queries, or of SUM_TILES that share K.

    first: of the sequence's rows.  Before the first step all dS of the batch has to be there."""
    mbarrier.wait(empty.index(slot), parity)
    mbarrier.expect(full.index(slot), UNIT * (D + SUM_TILES * UNIT) * 2)
    load_panels(k_desc, full.index(slot), pool, slot, i_b, i_k, first + unit * UNIT, D)
    if j == 0:
        await_keys(Progress, batch, key_items)  # while K is on its way
    for t in gl.static_range(SUM_TILES):
        tma_load(kept_desc, [rows[t] + j * step, 0], full.index(slot),
                 pool.index(SLOTS * (D // PANEL) + slot * SUM_TILES + t))  # fmt: skip


@jit
def add_kept(
    sums, pool, k_tiles, empty, slot, before, j, D: gl.constexpr, SLOTS: gl.constexpr, SUM_TILES: gl.constexpr
):
    """sums, one or two, + dS K of a slot, in flight; the buffers of the product before (j > 0) are free."""
    ds = pool.index(SLOTS * (D // PANEL) + slot * SUM_TILES)  # [keys, queries]
    dq = wgmma(ds.permute((1, 0)), k_tiles.index(slot), sums[0], is_async=True)
    if SUM_TILES == 1:
        sums = (wgmma_wait(1, deps=(dq,)),)
    else:
        ds = pool.index(SLOTS * (D // PANEL) + slot * SUM_TILES + 1)
        others = wgmma(ds.permute((1, 0)), k_tiles.index(slot), sums[1], is_async=True)
        sums = wgmma_wait(2, deps=(dq, others))
    mbarrier.arrive(empty.index(before), count=1, pred=j > 0)
    return sums


@jit
def produce_sums(k_desc, kept_desc, Progress, pool, full, empty, lists, work, capacity, base, batch, key_items,
                 query_items, program, D: gl.constexpr, SLOTS: gl.constexpr, Q_UNITS: gl.constexpr,
                 KV_UNITS: gl.constexpr):  # fmt: skip
    """Bring K and dS of every pair that a unit of queries has.

    base: row of kept_desc where the batch's room begins."""
    heads, group, units, kv_units, no_unit = work
    i_m, i_b, i_h = place_of_item(batch * query_items + program, units, heads)
    index, count = list_of_block(lists, i_m // Q_UNITS, i_b, i_h)
    i_k = i_h // group
    row = base + program * (capacity * KV_UNITS * UNIT)
    slot = 0
    parity = 1  # of a fresh barrier: the first wait on `empty` returns at once
    ahead = gl.load(index)
    for j in range(count * KV_UNITS):
        unit = ahead * KV_UNITS + j % KV_UNITS
        ahead = gl.load(index + gl.minimum((j + 1) // KV_UNITS, count - 1))
        load_kept(k_desc, kept_desc, Progress, pool, full, empty, i_b, i_k, unit, (row,), UNIT, j, batch, key_items, slot,
                  parity, D, SLOTS, 1)  # fmt: skip
        slot, parity = next_slot(slot, parity, SLOTS)


@jit
def consume_sums(DQ, Sizes, pool, full, empty, done, lists, work, outs, stride_sb, stride_sh, scale, seq_q, item,
                 D: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, Q_UNITS: gl.constexpr, KV_UNITS: gl.constexpr,
                 SIZED: gl.constexpr):  # fmt: skip
    """64 rows of dq = scale * sum of dS K, in the order of the list: the same bits in every run.

    The buffers of a product are free when the next one has been issued and this one waited for.  item: among the query items of
    all batches."""
    heads, group, units, kv_units, no_unit = work
    stride_gb, stride_gm, stride_gh = outs
    DTYPE: gl.constexpr = pool.dtype
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    k_tiles = tiles_of(pool, TILES, D)
    i_m, i_b, i_h = place_of_item(item, units, heads)
    index, count = list_of_block(lists, i_m // Q_UNITS, i_b, i_h)
    sizes = Sizes + i_b.to(gl.int64) * stride_sb + i_h.to(gl.int64) * stride_sh
    dq = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))
    slot = 0
    parity = 0
    before = 0
    for j in range(count * KV_UNITS):
        mbarrier.wait(full.index(slot), parity)
        if SIZED:
            live = gl.load(sizes + gl.load(index + j // KV_UNITS)) - j % KV_UNITS * UNIT
            if live < UNIT:
                clear_tile(pool, slot, live, D)
        (dq,) = add_kept((dq,), pool, k_tiles, empty, slot, before, j, D, SLOTS, 1)
        before = slot
        slot, parity = next_slot(slot, parity, SLOTS)
    dq = wgmma_wait(0, deps=(dq,))
    mbarrier.arrive(done.index(0), count=1)
    row = i_m * UNIT
    out = DQ + i_b.to(gl.int64) * stride_gb + i_h.to(gl.int64) * stride_gh + row.to(gl.int64) * stride_gm
    store_accumulator(out, dq * scale, seq_q - row, stride_gm, DTYPE)

"""What the Hopper kernel of the backward pass is made of: tiles brought by panels, a ring, and the role that makes dq.

A unit is 64 tokens: a tile has the rows of one unit, and a block of 128 tokens is two.  Shared memory is one pool of tiles
[64, D], cut into panels of 64 columns, which each role divides up as it needs.

Statistics are one row of 128 fp32 a unit of queries: lse in base 2 of its 64 queries, then their delta
(kernels.backward_statistics makes them).  A query that counts for nothing has lse +inf there, so its probabilities are 0
without any mask.  One more row, the last, is that of a unit without queries: what an empty list is made of.
"""

from .backward_work import await_keys
from .gluon import fence_async_shared, gl, jit, mbarrier, opaque, reinterpret, tma_load, wgmma, wgmma_wait
from .parts import PANEL, clear_rows, list_of_item, load_panels, place_of_item, store_accumulator

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


# ---------------------------------------------------------------- dq from a dS that was kept


@jit
def produce_sums(k_desc, kept_desc, Progress, pool, full, empty, lists, work, capacity, base, batch, key_items,
                 query_items, program, D: gl.constexpr, SLOTS: gl.constexpr, Q_UNITS: gl.constexpr,
                 KV_UNITS: gl.constexpr):  # fmt: skip
    """Bring K and dS of every pair that a unit of queries has: K to tile `slot`, dS to panel `slot` behind the tiles of K.

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
        mbarrier.wait(empty.index(slot), parity)
        mbarrier.expect(full.index(slot), UNIT * (D + UNIT) * 2)
        load_panels(k_desc, full.index(slot), pool, slot, i_b, i_k, unit * UNIT, D)
        if j == 0:
            await_keys(Progress, batch, key_items)  # while K is on its way
        tma_load(kept_desc, [row + j * UNIT, 0], full.index(slot), pool.index(SLOTS * (D // PANEL) + slot))
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
        ds = pool.index(SLOTS * (D // PANEL) + slot)  # [keys, queries]
        dq = wgmma(ds.permute((1, 0)), k_tiles.index(slot), dq, is_async=True)
        dq = wgmma_wait(1, deps=(dq,))
        mbarrier.arrive(empty.index(before), count=1, pred=j > 0)
        before = slot
        slot, parity = next_slot(slot, parity, SLOTS)
    dq = wgmma_wait(0, deps=(dq,))
    mbarrier.arrive(done.index(0), count=1)
    row = i_m * UNIT
    out = DQ + i_b.to(gl.int64) * stride_gb + i_h.to(gl.int64) * stride_gh + row.to(gl.int64) * stride_gm
    store_accumulator(out, dq * scale, seq_q - row, stride_gm, DTYPE)

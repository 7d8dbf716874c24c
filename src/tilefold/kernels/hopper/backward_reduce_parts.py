"""What `attention_backward_reduce` is made of: the tiles of a walk, their loads, one step, and two ways to add dq to memory.

The sum of a tile of dq lies in memory in fp32 in the order of the registers of the two accumulators that make it, each [64, 64]:
8 groups of 8 columns, in each 4 warps, 8 rows, 4 threads, then two rows 8 apart of two columns.  So a warp adds 512 bytes that
lie together with one instruction, and a copy out of shared memory adds 16 KB.  `kernels.backward_reduced` undoes the order.
"""

from .backward_parts import UNIT
from .backward_ranges import FULL, cut_if_needed, tiles_of_block
from .gluon import (
    add_registers,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    meet,
    narrowed,
    reinterpret,
    schedule_fence_16,
    tma_load,
    tma_reduce_add,
    tma_store_wait,
    wgmma,
    wgmma_wait,
    widened,
)
from .parts import load_panels

KEYS = gl.constexpr(128)  # of a program: two warpgroups of 64
SUM_ROWS = gl.constexpr(128)  # of 32 fp32: one accumulator's part of a tile of dq, 16 KB
# Which product comes when in a step; the later ones run beside what follows.
KEYS_FIRST = gl.constexpr(0)  # dk, then dq
QUERIES_FIRST = gl.constexpr(1)  # dq, then dk
KEYS_LATE = gl.constexpr(2)  # dq; dk of this tile after dP of the next, from shared memory


# ---------------------------------------------------------------- which tiles, in which order


@jit
def walk_of_block(block, lengths, band, work, head, KIND: gl.constexpr, QUERIES: gl.constexpr, STAGGER: gl.constexpr):
    """-> first tile of queries, the one after the last, the one where the walk begins; what makes of a tile of query head `head`
    its row of statistics and sums, and how much more of the next head's.  work = (heads, group, q_tiles, no_tile); head: of all
    batch entries.

    Keys that nobody sees meet one tile past the end, where the copy engine gives zeros, with row no_tile.  Programs that run side
    by side begin STAGGER tiles apart, so that they do not all add to the same dq; where the mask has a diagonal, they begin at
    different tiles anyway."""
    heads, group, q_tiles, no_tile = work
    first, tiles = tiles_of_block(block, lengths, band, KIND, QUERIES)
    first = gl.where(tiles > 0, first, q_tiles)
    row = gl.where(tiles > 0, head * q_tiles, no_tile - q_tiles)
    step = gl.where(tiles > 0, q_tiles, 0)
    tiles = gl.maximum(tiles, 1)
    begin = first
    if KIND == FULL:
        begin += block * STAGGER % tiles
    return first, first + tiles, begin, row, step


@jit
def next_tile(tile, walk, KIND: gl.constexpr):
    """The tile after this one: after the last one the first."""
    tile += 1
    if KIND == FULL:
        tile = gl.where(tile == walk[1], walk[0], tile)
    return tile


# ---------------------------------------------------------------- the loading warp


@jit
def load_block(k_desc, v_desc, k_buf, v_buf, kv_full, i_b, i_k, block, D: gl.constexpr):
    """Have K and V of 128 keys brought."""
    mbarrier.expect(kv_full.index(0), 2 * KEYS * D * 2)
    load_panels(k_desc, kv_full.index(0), k_buf, 0, i_b, i_k, block * KEYS, D)
    load_panels(v_desc, kv_full.index(0), v_buf, 0, i_b, i_k, block * KEYS, D)


@jit
def load_tile(q_desc, do_desc, stat_desc, q_buf, do_buf, stat_buf, q_full, do_full, empty, i_b, i_h, tile, row, slot, parity,
              D: gl.constexpr, QUERIES: gl.constexpr):  # fmt: skip
    """Have q, dout and statistics of a tile of queries brought to a slot, when both warpgroups have left it."""
    mbarrier.wait(empty.index(slot), parity)
    mbarrier.expect(q_full.index(slot), QUERIES * D * 2 + 2 * QUERIES * 4)
    load_panels(q_desc, q_full.index(slot), q_buf, slot, i_b, i_h, tile * QUERIES, D)
    tma_load(stat_desc, [row * (2 * QUERIES)], q_full.index(slot), stat_buf.index(slot))
    mbarrier.expect(do_full.index(slot), QUERIES * D * 2)
    load_panels(do_desc, do_full.index(slot), do_buf, slot, i_b, i_h, tile * QUERIES, D)


# ---------------------------------------------------------------- dq to memory


@jit
def place_of_sum(Sums, CID: gl.constexpr, LAYOUT: gl.constexpr):
    """The address of each thread's first 16 bytes in the part of warpgroup CID of the first tile."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    offset = gl.expand_dims(row // 16 * 128 + row % 8 * 16, 1) + gl.expand_dims(column % 8 // 2 * 4, 0)
    return (Sums + (CID * (SUM_ROWS * 32) + offset)).to(gl.int64, bitcast=True)


@jit
def hand_over(dq, sum_buf, sum_full, sum_empty, turn, CID: gl.constexpr, SUM_SLOTS: gl.constexpr):
    """Part CID [64, 64] of a tile of dq to shared memory, for the storing warp.  turn: number of the tile."""
    slot = turn % SUM_SLOTS * 2 + CID
    mbarrier.wait(sum_empty.index(slot), (turn // SUM_SLOTS & 1) ^ 1)
    ordered = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([SUM_ROWS, 32])
    sum_buf.index(slot).store(ordered)
    fence_async_shared()
    mbarrier.arrive(sum_full.index(slot), count=1)


@jit
def add_parts(sum_desc, sum_buf, sum_full, sum_empty, row, turn, SUM_SLOTS: gl.constexpr, D: gl.constexpr,
              QUERIES: gl.constexpr):  # fmt: skip
    """Have both parts of a tile of dq added to memory; the part before is then out of its buffer."""
    for part in gl.static_range(2):
        slot = turn % SUM_SLOTS * 2 + part
        mbarrier.wait(sum_full.index(slot), turn // SUM_SLOTS & 1)
        tma_reduce_add(sum_desc, [row * (QUERIES * D // 32) + part * SUM_ROWS, 0], sum_buf.index(slot))
        tma_store_wait(1)
        if part == 1:
            mbarrier.arrive(sum_empty.index(slot - 1), count=1)
        else:
            before = gl.maximum(turn - 1, 0)
            mbarrier.arrive(sum_empty.index(before % SUM_SLOTS * 2 + 1), count=1, pred=turn > 0)


# ---------------------------------------------------------------- one step


@jit
def views(q_buf, do_buf, k_buf, v_buf, D: gl.constexpr, QUERIES: gl.constexpr, SLOTS: gl.constexpr):
    """The panels as tiles: q and dout [SLOTS, QUERIES, D], K and V [128, D]."""
    DTYPE: gl.constexpr = q_buf.dtype
    Q_BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, D], DTYPE)
    K_BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)
    q = reinterpret(q_buf, DTYPE, [SLOTS, QUERIES, D], Q_BOX)
    do = reinterpret(do_buf, DTYPE, [SLOTS, QUERIES, D], Q_BOX)
    k = reinterpret(k_buf, DTYPE, [1, KEYS, D], K_BOX).index(0)
    v = reinterpret(v_buf, DTYPE, [1, KEYS, D], K_BOX).index(0)
    return q, do, k, v


@jit
def dq_product(ds, k, CID: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """This warpgroup's part of dq, in flight: 64 columns of 64 rows, or 64 of 128 rows.  ds [128, queries], k [128, D]."""
    nothing = gl.zeros([64, 64], gl.float32, LAYOUT)  # use_acc=False: never read
    if D == 128:
        return wgmma(ds.permute((1, 0)), k.slice(CID * 64, 64, dim=1), nothing, use_acc=False, is_async=True)
    else:
        return wgmma(ds.slice(CID * 64, 64, dim=1).permute((1, 0)), k, nothing, use_acc=False, is_async=True)


@jit
def reduce_tile(s, dp_flying, dk, dv, tiles, stat_buf, ds_buf, bars, sums, tile, i_n, row, whole, lengths, band, scale, more,
                turn, CID: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr,
                SLOTS: gl.constexpr, SUM_SLOTS: gl.constexpr, ORDER: gl.constexpr, FENCE: gl.constexpr, ROUNDED: gl.constexpr,
                S_LAYOUT: gl.constexpr, A_LAYOUT: gl.constexpr, Q_LAYOUT: gl.constexpr):  # fmt: skip
    """One tile of queries and this warpgroup's 64 keys.  On entry its S is there and its dP (KEYS_LATE: and dk of the tile
    before) in flight; on exit so it is for the next tile.  After the last one (not more) what is multiplied lies there by
    chance, and nobody reads it.

    tiles: `views`.  sums: where dq goes: (buffer, full, empty) of the storing warp with SUM_SLOTS > 0, else addresses alone.
    whole: whole_tiles of i_n, the tile of keys.  turn: number of the tile, which decides its buffers.  ROUNDED: make dS of the
    probabilities in 16 bits, whose 32 bits then need not stay in registers.

    -> s, dp_flying, dk, dv"""
    q, do, k, v = tiles
    q_full, do_full, empty = bars
    DTYPE: gl.constexpr = q.dtype
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    nothing = gl.zeros([UNIT, QUERIES], gl.float32, S_LAYOUT)
    slot = turn % SLOTS
    ds = ds_buf.index(turn & 1)
    statistics = stat_buf.index(slot)
    s = cut_if_needed(s, tile * (QUERIES // UNIT), i_n, whole, lengths, band, KIND)
    p = gl.exp2(s * scale - gl.expand_dims(statistics.slice(0, QUERIES).load(COLUMN), 0))
    p16 = narrowed(p, DTYPE)
    if FENCE:
        schedule_fence_16(p16)
    if ROUNDED:
        short = p16
    p16 = gl.convert_layout(p16, A_LAYOUT)
    if ORDER == KEYS_LATE:
        dp, dk = wgmma_wait(0, deps=(dp_flying, dk))
    else:
        dp = wgmma_wait(0, deps=(dp_flying,))
    dv_flying = wgmma(p16, do.index(slot), dv, is_async=True)
    if ORDER == KEYS_LATE:  # dk was the last to read the tile before
        mbarrier.arrive(empty.index((slot + SLOTS - 1) % SLOTS), count=1, pred=turn > 0)
    if ROUNDED:
        p = widened(short)
    ds16 = narrowed(p * (dp - gl.expand_dims(statistics.slice(QUERIES, QUERIES).load(COLUMN), 0)), DTYPE)
    ds.slice(CID * UNIT, UNIT, dim=0).store(ds16)
    fence_async_shared()
    if ORDER != KEYS_LATE:
        dsa = gl.convert_layout(ds16, A_LAYOUT)
    if ORDER == KEYS_FIRST:
        dk_flying = wgmma(dsa, q.index(slot), dk, is_async=True)
    meet(CID, turn)
    dq_flying = dq_product(ds, k, CID, D, Q_LAYOUT)
    done = slot
    if ORDER == KEYS_FIRST:
        dv, dk, p16, dsa = wgmma_wait(1, deps=(dv_flying, dk_flying, p16, dsa))  # in flight: dq
        mbarrier.arrive(empty.index(done), count=1)
    elif ORDER == QUERIES_FIRST:
        dk_flying = wgmma(dsa, q.index(slot), dk, is_async=True)
        dv, p16 = wgmma_wait(2, deps=(dv_flying, p16))  # in flight: dq, dk
    else:
        dv, p16 = wgmma_wait(1, deps=(dv_flying, p16))  # in flight: dq
    slot = (turn + 1) % SLOTS
    parity = (turn + 1) // SLOTS & 1
    mbarrier.wait(q_full.index(slot), parity, pred=more)
    s_flying = wgmma(
        k.slice(CID * UNIT, UNIT, dim=0), q.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    if ORDER == QUERIES_FIRST:
        dq = wgmma_wait(2, deps=(dq_flying,))  # in flight: dk, S
    else:
        dq = wgmma_wait(1, deps=(dq_flying,))  # in flight: S
    if SUM_SLOTS > 0:
        hand_over(dq, *sums, turn, CID, SUM_SLOTS)
    else:
        add_registers(sums[0] + row.to(gl.int64) * (QUERIES * D * 4), dq)
    mbarrier.wait(do_full.index(slot), parity, pred=more)
    dp_flying = wgmma(
        v.slice(CID * UNIT, UNIT, dim=0), do.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    if ORDER == KEYS_LATE:
        dk = wgmma(ds.slice(CID * UNIT, UNIT, dim=0), q.index(done), dk, is_async=True)
        s = wgmma_wait(2, deps=(s_flying,))  # in flight: dP, dk
    elif ORDER == QUERIES_FIRST:
        s, dk, dsa = wgmma_wait(1, deps=(s_flying, dk_flying, dsa))  # in flight: dP
        mbarrier.arrive(empty.index(done), count=1)
    else:
        s = wgmma_wait(1, deps=(s_flying,))  # in flight: dP
    return s, dp_flying, dk, dv

"""Gradients of dense attention on sm_90 where head dims are wider than 128: dk and dv do not fit into one warpgroup's registers.

The work and its order are those of `attention_backward`.  One program an SM; two warpgroups make an item together:

    key item      one makes S, P = exp(S - lse) and dv = P^T dout; the other dP, dS = P (dP - delta), dk = dS^T q, and keeps dS.
                  P goes from one to the other through shared memory, in fp32: each product is made once
    query item    each makes dq of a tile of queries; they share K

Each warpgroup has one product in flight beside the one that it waits for, and the other's products beside its own arithmetic:

    dv      issue S'  | issue dv += P dout | wait for S' | P', to the other | wait for dv
    dk      issue dP' | issue dk += dS q   | wait for dP' | dS' of P', kept | wait for dk

Rings of q and of dout, with barriers of their own: dout is free when dP and dv are done, q when S and dk are.
"""

from .backward_items import batch_of, key_item, produce_keys, produce_sums, query_item, sum_so_far
from .backward_parts import STATISTICS, UNIT, next_slot, tiles_of
from .backward_ranges import (
    cut_if_needed,
    line_of_keys,
    lines_of_head,
    queries_of_keys,
    stripe_of_queries,
    whole_tiles,
)
from .backward_spans import add_rows
from .backward_work import await_copies, await_queries, count_keys, count_queries, work_of_item
from .gluon import (
    barriers,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    opaque,
    schedule_fence_16,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from .parts import LOG2E, PANEL, store_accumulator

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_units", "kv_units", "left", "right", "stripe_units", "stripes",
           "width", "batch_heads", "batches", "delay", "rooms", "no_unit", "nowhere",
           "stride_gb", "stride_gm", "stride_gh", "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn",
           "stride_yh", "written", "stat_units"]  # fmt: skip
TOGETHER = gl.constexpr(2)  # tiles of queries of an item for dq: one a warpgroup


# ---------------------------------------------------------------- the loading warp


@jit
def _produce(descs, Progress, pool, stat_buf, kv_full, bars, done, lengths, band, work, split, width, order, room_rows, item,
             nowhere, KIND: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, SUM_SLOTS: gl.constexpr,
             stat_units=None):  # fmt: skip
    """Wait for what the item needs, bring its tiles, and count it as done while the results are written."""
    batches, delay, rooms = order
    key_items = split[2] * split[0]
    query_items = split[2] * work[1] * ((lengths[2] + TOGETHER - 1) // TOGETHER)
    keys, batch, program = work_of_item(item, key_items, query_items, batches, delay)
    if keys:
        produce_keys(*descs[:5], Progress, pool, stat_buf, kv_full, bars[0], bars[2], bars[1], lengths, band, work, split,
                     order, batch, query_items, program, KIND, D, SLOTS, bars[3], stat_units)  # fmt: skip
        mbarrier.wait(done.index(0), 0)
        count_keys(Progress, batch)
    else:
        produce_sums(descs[2], descs[5], Progress, pool, bars[0], bars[1], lengths, band, work, split, width,
                     batch % rooms * room_rows, nowhere, batch, key_items, program, KIND, D, SUM_SLOTS, TOGETHER)  # fmt: skip
        mbarrier.wait(done.index(0), 0)
        count_queries(Progress, batch, batches)


# ---------------------------------------------------------------- dv, by the first warpgroup


@jit
def _give(s, stat_buf, p_buf, given, taken, q_empty, slot, turn, scale):
    """P of a tile whose S is there, also to the other warpgroup; q and lse are no longer needed here."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    p = gl.exp2(s * scale - gl.expand_dims(stat_buf.index(slot).slice(0, UNIT).load(COLUMN), 0))
    mbarrier.wait(taken.index(0), (turn & 1) ^ 1)
    p_buf.store(p)
    mbarrier.arrive(given.index(0), count=1)
    mbarrier.arrive(q_empty.index(slot), count=1)
    return p


@jit
def _consume_dv(DV, pool, stat_buf, p_buf, kv_full, bars, given, taken, done, lengths, band, work, split, outs, scale, batch,
                program, KIND: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
                FENCE: gl.constexpr, written=None):  # fmt: skip
    """dv of 64 keys, over all query heads of their KV head, and the probabilities on the way."""
    heads, group, no_unit = work
    q_full, q_empty, do_full, do_empty = bars
    DTYPE: gl.constexpr = pool.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, UNIT, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, k_width=2)
    i_n, i_b, i_k, local = key_item(batch, program, heads // group, split)
    first, seen = queries_of_keys(i_n, lengths, band, KIND)
    last = first + gl.maximum(seen, 1) - 1
    whole = whole_tiles(i_n, lengths, band, KIND)
    tiles = tiles_of(pool, TILES, D)
    k = tiles.index(2 * SLOTS)
    dv = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))  # written before the first product, or all would wait
    nothing = gl.zeros([UNIT, UNIT], gl.float32, S_LAYOUT)  # use_acc=False: never read
    slot = 0
    parity = 0
    turn = 0
    mbarrier.wait(kv_full.index(0), 0)
    for g in range(group):
        mbarrier.wait(q_full.index(slot), parity)
        s = wgmma_wait(0, deps=(wgmma(k, tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True),))
        s = cut_if_needed(s, first, i_n, whole, lengths, band, KIND)
        p = _give(s, stat_buf, p_buf, given, taken, q_empty, slot, turn, scale)
        p16 = gl.convert_layout(p.to(DTYPE), A_LAYOUT)
        turn += 1
        for i_m in range(first + 1, last + 1):  # the tile after the one whose P is there
            now = slot
            now_parity = parity
            slot, parity = next_slot(slot, parity, SLOTS)
            mbarrier.wait(q_full.index(slot), parity)
            s_flying = wgmma(k, tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(now), now_parity)
            dv_flying = wgmma(p16, tiles.index(SLOTS + now), dv, is_async=True)
            s = wgmma_wait(1, deps=(s_flying,))
            s = cut_if_needed(s, i_m, i_n, whole, lengths, band, KIND)
            p = _give(s, stat_buf, p_buf, given, taken, q_empty, slot, turn, scale)
            p_next = p.to(DTYPE)
            if FENCE:
                schedule_fence_16(p_next)
            p_next = gl.convert_layout(p_next, A_LAYOUT)
            turn += 1
            dv, p16 = wgmma_wait(0, deps=(dv_flying, p16))
            mbarrier.arrive(do_empty.index(now), count=1)
            p16 = p_next
        mbarrier.wait(do_full.index(slot), parity)
        dv = wgmma_wait(0, deps=(wgmma(p16, tiles.index(SLOTS + slot), dv, is_async=True),))
        mbarrier.arrive(do_empty.index(slot), count=1)
        slot, parity = next_slot(slot, parity, SLOTS)
    mbarrier.arrive(done.index(0), count=1)
    stride_yb, stride_yn, stride_yh = outs
    if written is None:
        out = DV + i_b.to(gl.int64) * stride_yb + i_k.to(gl.int64) * stride_yh + i_n.to(gl.int64) * UNIT * stride_yn
        store_accumulator(out, dv, lengths[1] - i_n * UNIT, stride_yn, DTYPE, COLUMNS)
    else:
        add_rows(DV, dv, outs, i_b, i_k, i_n, lengths[1], written, COLUMNS)


# ---------------------------------------------------------------- dk, by the second


@jit
def _take(dp, stat_buf, p_buf, ds_buf, given, taken, q_full, keep_desc, row, slot, parity, turn, DTYPE: gl.constexpr):
    """dS of a tile whose dP is there, in 16 bits; and to where it is kept."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, dp.type.layout)
    mbarrier.wait(given.index(0), turn & 1)
    p = p_buf.load(dp.type.layout)
    mbarrier.arrive(taken.index(0), count=1)
    mbarrier.wait(q_full.index(slot), parity)
    ds = p * (dp - gl.expand_dims(stat_buf.index(slot).slice(UNIT, UNIT).load(COLUMN), 0))
    ds16 = ds.to(DTYPE)
    tma_store_wait(0)  # the copy that reads the tile before out of this buffer
    ds_buf.store(ds16)
    fence_async_shared()
    tma_store(keep_desc, [row, 0], ds_buf)
    return ds16


@jit
def _consume_dk(DK, keep_desc, pool, stat_buf, p_buf, ds_buf, kv_full, bars, given, taken, done, lengths, band, work, split,
                width, outs, base, nowhere, scale, batch, program, KIND: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr,
                TILES: gl.constexpr, SLOTS: gl.constexpr, written=None):  # fmt: skip
    """dk of 64 keys, over all query heads of their KV head; base: row of keep_desc where the batch's room begins."""
    heads, group, no_unit = work
    q_full, q_empty, do_full, do_empty = bars
    room_of_head = lines_of_head(split[0], KIND) * width * UNIT
    DTYPE: gl.constexpr = pool.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, UNIT, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, k_width=2)
    i_n, i_b, i_k, local = key_item(batch, program, heads // group, split)
    head, stripe = batch_of(batch, split)
    first, seen = queries_of_keys(i_n, lengths, band, KIND)
    last = first + gl.maximum(seen, 1) - 1
    place, way = line_of_keys(i_n - stripe * split[0], split[0], width, KIND)
    tiles = tiles_of(pool, TILES, D)
    v = tiles.index(2 * SLOTS + 1)
    dk = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))
    nothing = gl.zeros([UNIT, UNIT], gl.float32, S_LAYOUT)
    base += local * group * room_of_head + place * UNIT
    slot = 0
    parity = 0
    turn = 0
    mbarrier.wait(kv_full.index(0), 0)
    for g in range(group):
        mbarrier.wait(do_full.index(slot), parity)
        dp = wgmma_wait(
            0, deps=(wgmma(v, tiles.index(SLOTS + slot).permute((1, 0)), nothing, use_acc=False, is_async=True),)
        )
        mbarrier.arrive(do_empty.index(slot), count=1)
        # Keys that nobody sees keep nothing: past the end, where the copy engine writes nothing.
        row = gl.where(seen > 0, base, nowhere)
        ds16 = _take(dp, stat_buf, p_buf, ds_buf, given, taken, q_full, keep_desc, row, slot, parity, turn, DTYPE)
        ds16 = gl.convert_layout(ds16, A_LAYOUT)
        turn += 1
        for i_m in range(first + 1, last + 1):  # the tile after the one whose dS is there
            now = slot
            slot, parity = next_slot(slot, parity, SLOTS)
            row += way * UNIT
            mbarrier.wait(do_full.index(slot), parity)
            dp_flying = wgmma(v, tiles.index(SLOTS + slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            dk_flying = wgmma(ds16, tiles.index(now), dk, is_async=True)
            dp = wgmma_wait(1, deps=(dp_flying,))
            mbarrier.arrive(do_empty.index(slot), count=1)
            ds_next = _take(
                dp, stat_buf, p_buf, ds_buf, given, taken, q_full, keep_desc, row, slot, parity, turn, DTYPE
            )
            ds_next = gl.convert_layout(ds_next, A_LAYOUT)
            turn += 1
            dk, ds16 = wgmma_wait(0, deps=(dk_flying, ds16))
            mbarrier.arrive(q_empty.index(now), count=1)
            ds16 = ds_next
        dk = wgmma_wait(0, deps=(wgmma(ds16, tiles.index(slot), dk, is_async=True),))
        mbarrier.arrive(q_empty.index(slot), count=1)
        slot, parity = next_slot(slot, parity, SLOTS)
        base += room_of_head
    await_copies()
    mbarrier.arrive(done.index(0), count=1)
    stride_xb, stride_xn, stride_xh = outs
    if written is None:
        out = DK + i_b.to(gl.int64) * stride_xb + i_k.to(gl.int64) * stride_xh + i_n.to(gl.int64) * UNIT * stride_xn
        store_accumulator(out, dk * scale, lengths[1] - i_n * UNIT, stride_xn, DTYPE, COLUMNS)
    else:
        add_rows(DK, dk * scale, outs, i_b, i_k, i_n, lengths[1], written, COLUMNS)


# ---------------------------------------------------------------- dq, a tile each


@jit
def _consume_sums(DQ, Partial, Progress, pool, full, empty, done, lengths, band, work, split, outs, scale, batches, batch,
                  query_items, program, CID: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr, COLUMNS: gl.constexpr,
                  TILES: gl.constexpr, SLOTS: gl.constexpr, STRIPED: gl.constexpr):  # fmt: skip
    """A tile of dq = scale * sum of dS K over the stripe, and of what the stripes before made: in the keys' order."""
    heads, group, no_unit = work
    stride_gb, stride_gm, stride_gh = outs
    q_units = lengths[2]
    DTYPE: gl.constexpr = pool.dtype
    PANELS: gl.constexpr = D // PANEL
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    k_tiles = tiles_of(pool, TILES, D)
    i_m, i_b, i_h, local, stripe = query_item(batch, program, heads, group, q_units, split, TOGETHER)
    low, tiles, begins, ends = stripe_of_queries(i_m, stripe, split[0], lengths, band, KIND, TOGETHER)
    dq = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))
    slot = 0
    parity = 0
    before = 0
    for j in range(tiles):
        mbarrier.wait(full.index(slot), parity)
        ds = pool.index(SLOTS * PANELS + slot * TOGETHER + CID)  # [keys, queries]
        flying = wgmma(ds.permute((1, 0)), k_tiles.index(slot), dq, is_async=True)
        dq = wgmma_wait(1, deps=(flying,))
        mbarrier.arrive(empty.index(before), count=1, pred=j > 0)
        before = slot
        slot, parity = next_slot(slot, parity, SLOTS)
    dq = wgmma_wait(0, deps=(dq,))
    if not STRIPED:
        mbarrier.arrive(done.index(0), count=1)
    row = (i_m + CID) * UNIT
    place = DQ + i_b.to(gl.int64) * stride_gb + i_h.to(gl.int64) * stride_gh + row.to(gl.int64) * stride_gm
    if STRIPED:
        kept = sum_so_far(Partial, i_m + CID, i_b * heads + i_h, q_units, D_LAYOUT, D, TOGETHER)
        if (tiles > 0) & ~begins:
            await_queries(Progress, batch - 1, batches, query_items)
            dq += gl.load(kept)
        if ends:
            store_accumulator(place, dq * scale, lengths[0] - row, stride_gm, DTYPE, COLUMNS)
        elif tiles > 0:
            gl.store(kept, dq)
        mbarrier.arrive(done.index(0), count=1)  # the sum counts as much as the dS that was read
    else:
        store_accumulator(place, dq * scale, lengths[0] - row, stride_gm, DTYPE, COLUMNS)


# ---------------------------------------------------------------- the kernel


@jit
def _consume(outs, Partial, Progress, keep_desc, pool, stat_buf, p_buf, ds_buf, kv_full, bars, given, taken, done, lengths, band,
             work, split, width, order, room_rows, item, strides, nowhere, scale, CID: gl.constexpr, KIND: gl.constexpr,
             D: gl.constexpr, COLUMNS_QK: gl.constexpr, COLUMNS_V: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
             SUM_SLOTS: gl.constexpr, STRIPED: gl.constexpr, FENCE: gl.constexpr, written=None):  # fmt: skip
    """Make this warpgroup's part of the item."""
    batches, delay, rooms = order
    key_items = split[2] * split[0]
    query_items = split[2] * work[1] * ((lengths[2] + TOGETHER - 1) // TOGETHER)
    keys, batch, program = work_of_item(item, key_items, query_items, batches, delay)
    if keys:
        if CID == 0:
            _consume_dv(outs[2], pool, stat_buf, p_buf, kv_full, bars, given, taken, done, lengths, band, work, split, strides[2],
                        scale * LOG2E, batch, program, KIND, D, COLUMNS_V, TILES, SLOTS, FENCE, written)  # fmt: skip
        else:
            _consume_dk(outs[1], keep_desc, pool, stat_buf, p_buf, ds_buf, kv_full, bars, given, taken, done, lengths, band, work,
                        split, width, strides[1], batch % rooms * room_rows, nowhere, scale, batch, program, KIND, D, COLUMNS_QK,
                        TILES, SLOTS, written)  # fmt: skip
    else:
        _consume_sums(outs[0], Partial, Progress, pool, bars[0], bars[1], done, lengths, band, work, split, strides[0], scale,
                      batches, batch, query_items, program, CID, KIND, D, COLUMNS_QK, TILES, SUM_SLOTS, STRIPED)  # fmt: skip


@jit(do_not_specialize=RUNTIME)
def attention_backward_hopper_wide(
    q_desc, do_desc, k_desc, v_desc, stat_desc, keep_desc, DQ, DK, DV, Partial, Progress,
    scale, seq_q, seq_k, heads, group, q_units, kv_units, left, right, stripe_units, stripes, width, batch_heads, batches, delay,
    rooms, no_unit, nowhere,
    stride_gb, stride_gm, stride_gh, stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh, written, stat_units,
    KIND: gl.constexpr, D: gl.constexpr, COLUMNS_QK: gl.constexpr, COLUMNS_V: gl.constexpr, SLOTS: gl.constexpr,
    STRIPED: gl.constexpr, FENCE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `attention_backward.attention_backward_hopper`, with D = 256, the width of all tiles, of which COLUMNS_QK and COLUMNS_V
    are the head dims (None: all); the copy engine fills the rest with zeros.  Partial [.., D]."""
    DTYPE: gl.constexpr = q_desc.dtype
    PANELS: gl.constexpr = D // PANEL
    TILES: gl.constexpr = 2 * SLOTS + 2
    SUM_SLOTS: gl.constexpr = (TILES * PANELS) // (PANELS + TOGETHER)  # a tile of K and a panel of dS each
    RING: gl.constexpr = max(SLOTS, SUM_SLOTS)
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([UNIT, PANEL], DTYPE)
    pool = gl.allocate_shared_memory(DTYPE, [TILES * PANELS, UNIT, PANEL], BOX)
    stat_buf = gl.allocate_shared_memory(gl.float32, [SLOTS, STATISTICS], stat_desc.layout)
    # rows of a quad's 8 columns, so that the 8 rows that a warp stores or loads at a time lie in different banks
    p_buf = gl.allocate_shared_memory(gl.float32, [UNIT, UNIT], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    ds_buf = gl.allocate_shared_memory(DTYPE, [UNIT, UNIT], BOX)
    kv_full = barriers(1, 1)
    bars = (barriers(RING, 1), barriers(RING, 2), barriers(SLOTS, 1), barriers(SLOTS, 2))
    given = barriers(1, 1)
    taken = barriers(1, 1)
    done = barriers(1, 2)
    fence_async_shared()
    item = gl.atomic_add(Progress, 1)
    room_rows = batch_heads * group * lines_of_head(stripe_units, KIND) * width * UNIT
    lengths = (seq_q, seq_k, q_units, kv_units)
    band = (left, right)
    work = (heads, group, no_unit)
    split = (stripe_units, stripes, batch_heads)
    order = (batches, delay, rooms)
    outs = (DQ, DK, DV)
    strides = ((stride_gb, stride_gm, stride_gh), (stride_xb, stride_xn, stride_xh), (stride_yb, stride_yn, stride_yh))
    descs = (q_desc, do_desc, k_desc, v_desc, stat_desc, keep_desc)
    gl.warp_specialize([
        (_consume, (outs, Partial, Progress, keep_desc, pool, stat_buf, p_buf, ds_buf, kv_full, bars, given, taken, done,
                    lengths, band, work, split, width, order, room_rows, item, strides, nowhere, scale, 0, KIND, D, COLUMNS_QK,
                    COLUMNS_V, TILES, SLOTS, SUM_SLOTS, STRIPED, FENCE, written)),
        (_consume, (outs, Partial, Progress, keep_desc, pool, stat_buf, p_buf, ds_buf, kv_full, bars, given, taken, done,
                    lengths, band, work, split, width, order, room_rows, item, strides, nowhere, scale, 1, KIND, D, COLUMNS_QK,
                    COLUMNS_V, TILES, SLOTS, SUM_SLOTS, STRIPED, FENCE, written)),
        (_produce, (descs, Progress, pool, stat_buf, kv_full, bars, done, lengths, band, work, split, width, order, room_rows,
                    item, nowhere, KIND, D, SLOTS, SUM_SLOTS, stat_units)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip

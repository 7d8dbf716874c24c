"""dk and dv of block-sparse attention on sm_90: a KV block of 64 keys, and the query blocks that list it.

    producer   1 warp    brings K and V of the next KV block, then q, dout and statistics of one listed query block after the other
    consumer   4 warps   the fold over them, with dk and dv in registers

Everything is transposed, so that probabilities and their gradients leave one product as accumulators and enter the next as left
operands, without a way through shared memory:

    S = K q^T     dP = V dout^T     P = exp2(S - lse)     dS = P (dP - delta)     dV += P dout     dK += dS q

The order in which a tile's products are issued, with what is in flight behind each line:

    P of tile i                                        dP_i
    wait for dP_i; issue dV; dS                        dV_i
    issue dK                                           dV_i  dK_i
    wait for dV; issue S of the next tile              dK_i  S_(i+1)
    wait for dK: the buffers are free; issue dP        S_(i+1)  dP_(i+1)
    wait for S                                         dP_(i+1)

Two programs share an SM, and what one leaves of the tensor cores the other takes.  With grouped heads a program folds the lists of
all query heads of its KV head, one after the other: no sum is left to memory, so the result is the same in every run.

KEEP: dS is also written out (16 bits, [64 keys, 64 queries] for each listed pair), and dq is then one product a pair instead of
three: sparse_backward_sums makes it.

Source: the products are FlashAttention-2's (Dao 2023, arXiv:2307.08691, section 3.1.2).
"""

from .backward_parts import BLOCK, PANEL, STATISTICS, load_tile, next_slot, wait_queries
from .gluon import (
    barriers,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    opaque,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from .parts import LOG2E, item_of_stream, items_of_stream, list_of_block, place_of_item, store_accumulator

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_blocks", "kv_blocks", "first_row", "items", "dead", "per_row", "keep_rows",
           "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn", "stride_yh",
           "stride_ib", "stride_ih", "stride_iq", "stride_cb", "stride_ch",
           "stride_sb", "stride_sh", "stride_pb", "stride_ph"]  # fmt: skip


@jit
def _produce(q_desc, do_desc, k_desc, v_desc, stat_desc, q_buf, do_buf, k_buf, v_buf, stat_buf, kv_full, kv_empty, q_full,
             do_full, empty, lists, work, D: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """The producer: every load of this program, in the order in which the consumer needs them."""
    heads, group, q_blocks, kv_blocks, first_row, items, dead = work
    stream = gl.program_id(0)
    streams = gl.num_programs(0)
    slot = 0
    parity = 1  # of a fresh barrier: the first wait on `empty` returns at once
    for i in range(items_of_stream(items, stream, streams)):
        item = item_of_stream(i, stream, streams) + first_row * kv_blocks
        i_n, i_b, i_k = place_of_item(item, kv_blocks, heads // group)
        mbarrier.wait(kv_empty.index(0), (i & 1) ^ 1)
        mbarrier.expect(kv_full.index(0), 2 * BLOCK * D * 2)
        load_tile(k_desc, kv_full.index(0), k_buf, 0, i_b, i_k, i_n * BLOCK, D)
        load_tile(v_desc, kv_full.index(0), v_buf, 0, i_b, i_k, i_n * BLOCK, D)
        for g in range(group):
            i_h = i_k * group + g
            index, count, units = list_of_block(lists, i_n, i_b, i_h, 1)
            ahead = gl.load(index)
            row = (i_b * heads + i_h) * q_blocks
            for j in range(units):
                block = ahead
                ahead = gl.load(index + gl.minimum(j + 1, units - 1))
                # an empty list is one block without queries: past the end, where the copy engine gives zeros
                block = gl.where(count > 0, block, q_blocks)
                statistics = gl.where(count > 0, row + block, dead)
                mbarrier.wait(empty.index(slot), parity)
                mbarrier.expect(q_full.index(slot), BLOCK * D * 2 + STATISTICS * 4)
                load_tile(q_desc, q_full.index(slot), q_buf, slot, i_b, i_h, block * BLOCK, D)
                tma_load(stat_desc, [statistics * STATISTICS], q_full.index(slot), stat_buf.index(slot))
                mbarrier.expect(do_full.index(slot), BLOCK * D * 2)
                load_tile(do_desc, do_full.index(slot), do_buf, slot, i_b, i_h, block * BLOCK, D)
                slot, parity = next_slot(slot, parity, SLOTS)


@jit
def _tile(s, dp_flying, dk, dv, tiles, bars, keep, kept, live_k, live_q, scale, slot, parity, final,
          LAST: gl.constexpr, MASKED: gl.constexpr, Q_SIZED: gl.constexpr, KEEP: gl.constexpr, D: gl.constexpr,
          SLOTS: gl.constexpr, S_LAYOUT: gl.constexpr, A_LAYOUT: gl.constexpr):  # fmt: skip
    """One query block.  On entry its S is there and its dP in flight; on exit so it is for the next one, unless LAST.

    kept: the row of `keep` that takes dS.  live_q: valid queries of the next query block.
    final: K and V are not needed again.  -> s, dp_flying, dk, dv, slot, parity"""
    k, v, q_tiles, do_tiles, stat_buf, q_buf, do_buf, ds_buf = tiles
    kv_empty, q_full, do_full, empty = bars
    DTYPE: gl.constexpr = k.dtype
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    nothing = gl.zeros([BLOCK, BLOCK], gl.float32, S_LAYOUT)  # use_acc=False: never read
    statistics = stat_buf.index(slot)
    p = gl.exp2(s * scale - gl.expand_dims(statistics.slice(0, BLOCK).load(COLUMN), 0))
    if MASKED:
        dead = gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(1, S_LAYOUT)) >= live_k, 1)
        p = gl.where(dead, 0.0, p)
    p16 = gl.convert_layout(p.to(DTYPE), A_LAYOUT)
    dp = wgmma_wait(0, deps=(dp_flying,))
    if LAST:
        mbarrier.arrive(kv_empty.index(0), count=1, pred=final)
    dv_flying = wgmma(p16, do_tiles.index(slot), dv, is_async=True)
    ds = p * (dp - gl.expand_dims(statistics.slice(BLOCK, BLOCK).load(COLUMN), 0))
    if MASKED:
        ds = gl.where(dead, 0.0, ds)
    ds16 = ds.to(DTYPE)
    dsa = gl.convert_layout(ds16, A_LAYOUT)
    dk_flying = wgmma(dsa, q_tiles.index(slot), dk, is_async=True)
    if KEEP:
        tma_store_wait(0)  # the copy that reads the tile before out of this buffer
        ds_buf.store(ds16)
        fence_async_shared()
        tma_store(keep, [kept, 0], ds_buf)
    dv, p16 = wgmma_wait(1, deps=(dv_flying, p16))
    done = slot
    slot, parity = next_slot(slot, parity, SLOTS)
    if LAST:
        dk, dsa = wgmma_wait(0, deps=(dk_flying, dsa))
        mbarrier.arrive(empty.index(done), count=1)
        return s, dp_flying, dk, dv, slot, parity
    else:
        wait_queries(q_full, parity, q_buf, slot, live_q, D, Q_SIZED)
        s_flying = wgmma(k, q_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        dk, dsa = wgmma_wait(1, deps=(dk_flying, dsa))
        mbarrier.arrive(empty.index(done), count=1)
        wait_queries(do_full, parity, do_buf, slot, live_q, D, Q_SIZED)
        dp_flying = wgmma(v, do_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = wgmma_wait(1, deps=(s_flying,))
        return s, dp_flying, dk, dv, slot, parity


@jit
def _valid_queries(sizes, index, j, count, Q_SIZED: gl.constexpr):
    """Valid queries of the list's entry j; sizes: where this head's query sizes begin (looked at if Q_SIZED)."""
    live = BLOCK
    if Q_SIZED:
        block = gl.load(index + gl.minimum(j, gl.maximum(count - 1, 0)), mask=count > 0, other=0)
        live = gl.load(sizes + block)
    return live


@jit
def _consume(DK, DV, Places, Sizes, QuerySizes, keep, q_buf, do_buf, k_buf, v_buf, stat_buf, ds_buf, kv_full, kv_empty, q_full,
             do_full, empty, lists, work, outs, size_strides, scale, seq_k, per_row, keep_rows, D: gl.constexpr,
             SLOTS: gl.constexpr, MASKED: gl.constexpr, SIZED: gl.constexpr, Q_SIZED: gl.constexpr,
             KEEP: gl.constexpr):  # fmt: skip
    """The consumer: dk and dv of one KV block after the other."""
    heads, group, q_blocks, kv_blocks, first_row, items, dead = work
    stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh = outs
    stride_sb, stride_sh, stride_pb, stride_ph = size_strides
    DTYPE: gl.constexpr = k_buf.dtype
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, k_width=2)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], DTYPE)
    k = reinterpret(k_buf, DTYPE, [1, BLOCK, D], TILE).index(0)
    v = reinterpret(v_buf, DTYPE, [1, BLOCK, D], TILE).index(0)
    q_tiles = reinterpret(q_buf, DTYPE, [SLOTS, BLOCK, D], TILE)
    do_tiles = reinterpret(do_buf, DTYPE, [SLOTS, BLOCK, D], TILE)
    nothing = gl.zeros([BLOCK, BLOCK], gl.float32, S_LAYOUT)
    stream = gl.program_id(0)
    streams = gl.num_programs(0)
    slot = 0
    parity = 0

    for i in range(items_of_stream(items, stream, streams)):
        item = item_of_stream(i, stream, streams) + first_row * kv_blocks
        i_n, i_b, i_k = place_of_item(item, kv_blocks, heads // group)
        dk = opaque(gl.zeros([BLOCK, D], gl.float32, D_LAYOUT))
        dv = opaque(gl.zeros([BLOCK, D], gl.float32, D_LAYOUT))
        mbarrier.wait(kv_full.index(0), i & 1)
        for g in range(group):
            i_h = i_k * group + g
            index, count, units = list_of_block(lists, i_n, i_b, i_h, 1)
            live_k = seq_k - i_n * BLOCK
            if SIZED:
                live_k = gl.minimum(live_k, gl.load(Sizes + i_b.to(gl.int64) * stride_sb + i_h.to(gl.int64) * stride_sh + i_n))
            sizes = QuerySizes + i_b.to(gl.int64) * stride_pb + i_h.to(gl.int64) * stride_ph
            kept = 0
            places, _, _ = list_of_block((Places, lists[1], lists[2], lists[3], lists[4], lists[5], lists[6]), i_n, i_b, i_h, 1)
            row = (i_b * heads + i_h - first_row * group) * per_row
            if KEEP:
                kept = gl.where(count > 0, (row + gl.load(places)) * BLOCK, keep_rows)
            live_q = _valid_queries(sizes, index, 0, count, Q_SIZED)
            wait_queries(q_full, parity, q_buf, slot, live_q, D, Q_SIZED)
            s_flying = wgmma(k, q_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            wait_queries(do_full, parity, do_buf, slot, live_q, D, Q_SIZED)
            dp_flying = wgmma(v, do_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            s = wgmma_wait(1, deps=(s_flying,))
            tiles = (k, v, q_tiles, do_tiles, stat_buf, q_buf, do_buf, ds_buf)
            bars = (kv_empty, q_full, do_full, empty)
            for j in range(units - 1):
                live_q = _valid_queries(sizes, index, j + 1, count, Q_SIZED)
                here = kept
                if KEEP:
                    kept = (row + gl.load(places + j + 1)) * BLOCK
                s, dp_flying, dk, dv, slot, parity = _tile(
                    s, dp_flying, dk, dv, tiles, bars, keep, here, live_k, live_q, scale, slot, parity, False,
                    False, MASKED, Q_SIZED, KEEP, D, SLOTS, S_LAYOUT, A_LAYOUT)  # fmt: skip
            s, dp_flying, dk, dv, slot, parity = _tile(
                s, dp_flying, dk, dv, tiles, bars, keep, kept, live_k, BLOCK, scale, slot, parity, g == group - 1,
                True, MASKED, Q_SIZED, KEEP, D, SLOTS, S_LAYOUT, A_LAYOUT)  # fmt: skip
        rows = seq_k - i_n * BLOCK
        b = i_b.to(gl.int64)
        h = i_k.to(gl.int64)
        n = i_n.to(gl.int64) * BLOCK
        store_accumulator(DV + b * stride_yb + h * stride_yh + n * stride_yn, dv, rows, stride_yn, DTYPE)
        store_accumulator(DK + b * stride_xb + h * stride_xh + n * stride_xn, dk * (scale * (1 / LOG2E)), rows, stride_xn, DTYPE)
    if KEEP:
        tma_store_wait(0)


@jit(do_not_specialize=RUNTIME)
def sparse_backward_keys_hopper(
    q_desc, do_desc, k_desc, v_desc, stat_desc, keep_desc, DK, DV, Index, Count, Places, Sizes, QuerySizes,
    scale, seq_q, seq_k, heads, group, q_blocks, kv_blocks, first_row, items, dead, per_row, keep_rows,
    stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh,
    stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_sb, stride_sh, stride_pb, stride_ph,
    D: gl.constexpr, SLOTS: gl.constexpr, MASKED: gl.constexpr, SIZED: gl.constexpr, Q_SIZED: gl.constexpr, KEEP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc [B, H, Sq, D], k_desc, v_desc [B, H/group, Sk, D] with boxes [1, 1, 64, 64]; stat_desc: statistics as one
    dimension, box [128]; DK, DV [B, Sk, H/group, D] by strides; Index [B, H, KVb, tcap], Count [B, H, KVb]: the transposed lists;
    Sizes [B, H, KVb] if SIZED, QuerySizes [B, H, Qb] if Q_SIZED, int32.  scale > 0.

    KEEP: keep_desc [keep_rows, 64], box [64, 64], takes dS; Places, like Index, says at which of the `per_row` places of its head.
    Heads are counted from KV head number `first_row` (of B * H/group) on: with few of them at a time, dS stays small.
    items = KV heads of this launch * KVb; MASKED: some key of a block is not live."""
    DTYPE: gl.constexpr = q_desc.dtype
    PANELS: gl.constexpr = D // PANEL
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, PANEL], DTYPE)
    q_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, BLOCK, PANEL], BOX)
    do_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, BLOCK, PANEL], BOX)
    k_buf = gl.allocate_shared_memory(DTYPE, [PANELS, BLOCK, PANEL], BOX)
    v_buf = gl.allocate_shared_memory(DTYPE, [PANELS, BLOCK, PANEL], BOX)
    if KEEP:
        ds_buf = gl.allocate_shared_memory(DTYPE, [BLOCK, BLOCK], BOX)
    else:
        ds_buf = k_buf.index(0)
    stat_buf = gl.allocate_shared_memory(gl.float32, [SLOTS, STATISTICS], stat_desc.layout)
    kv_full = barriers(1, 1)
    kv_empty = barriers(1, 1)
    q_full = barriers(SLOTS, 1)
    do_full = barriers(SLOTS, 1)
    empty = barriers(SLOTS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (DK, DV, Places, Sizes, QuerySizes, keep_desc, q_buf, do_buf, k_buf, v_buf, stat_buf, ds_buf, kv_full, kv_empty,
                    q_full, do_full, empty, (Index, Count, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch),
                    (heads, group, q_blocks, kv_blocks, first_row, items, dead),
                    (stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh),
                    (stride_sb, stride_sh, stride_pb, stride_ph), scale * LOG2E, seq_k, per_row, keep_rows,
                    D, SLOTS, MASKED, SIZED, Q_SIZED, KEEP)),
        (_produce, (q_desc, do_desc, k_desc, v_desc, stat_desc, q_buf, do_buf, k_buf, v_buf, stat_buf, kv_full, kv_empty,
                    q_full, do_full, empty, (Index, Count, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch),
                    (heads, group, q_blocks, kv_blocks, first_row, items, dead),
                    D, SLOTS)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip

"""Gradients of dense attention on sm_90, dq by additions in memory, whose order changes from run to run.

A program owns 128 keys, 64 for each of two warpgroups, whose dk and dv stay in registers, and walks the tiles of queries that
see them.  Each warpgroup makes S, dP, dv and dk of its own keys; dS of both goes through shared memory, and each makes one half
of the tile's share of dq over all 128 keys, which is added to fp32 sums in memory: by the warpgroup, straight from its registers,
or through shared memory by a copy that a warp of its own issues and waits for.

Against `attention_backward`, which keeps dS: each tile of q and dout comes once for 128 keys, and nothing goes to memory and back
but the sums, which stay in L2 while the programs of a few heads run (batch_heads).

Source: the division of work is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608; https://github.com/Dao-AILab/flash-attention).
"""

from .backward_items import key_item
from .backward_parts import UNIT, next_slot
from .backward_ranges import whole_tiles
from .backward_reduce_parts import (
    KEYS,
    KEYS_LATE,
    SUM_ROWS,
    add_parts,
    load_block,
    load_tile,
    next_tile,
    place_of_sum,
    reduce_tile,
    views,
    walk_of_block,
)
from .gluon import (
    barriers,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    opaque,
    tma_store_wait,
    wgmma,
    wgmma_init,
    wgmma_wait,
)
from .parts import LOG2E, PANEL, store_accumulator

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_units", "kv_units", "q_tiles", "blocks", "left", "right",
           "batch_heads", "no_tile", "stride_xb", "stride_xn", "stride_xh", "stride_yb", "stride_yn", "stride_yh"]  # fmt: skip


@jit
def _block_of_program(heads, group, blocks, batch_heads):
    """-> block of keys, batch entry, KV head: batch_heads of those at a time, their longest blocks first."""
    batch = gl.program_id(0) // (blocks * batch_heads)
    block, i_b, i_k, local = key_item(
        batch, gl.program_id(0) - batch * (blocks * batch_heads), heads // group, (blocks, 1, batch_heads)
    )
    return block, i_b, i_k


@jit
def _produce(q_desc, do_desc, k_desc, v_desc, stat_desc, q_buf, do_buf, k_buf, v_buf, stat_buf, kv_full, q_full, do_full, empty,
             lengths, band, work, order, KIND: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, SLOTS: gl.constexpr,
             STAGGER: gl.constexpr):  # fmt: skip
    """Bring K and V, then q, dout and statistics of every tile of queries, head after head of the group."""
    heads, group, q_tiles, no_tile = work
    block, i_b, i_k = _block_of_program(heads, group, order[0], order[1])
    load_block(k_desc, v_desc, k_buf, v_buf, kv_full, i_b, i_k, block, D)
    walk = walk_of_block(block, lengths, band, work, i_b * heads + i_k * group, KIND, QUERIES, STAGGER)
    slot = 0
    parity = 1  # of a fresh barrier: the first wait on `empty` returns at once
    row = walk[3]
    for g in range(group):
        tile = walk[2]
        for _ in range(walk[0], walk[1]):
            load_tile(q_desc, do_desc, stat_desc, q_buf, do_buf, stat_buf, q_full, do_full, empty, i_b, i_k * group + g, tile,
                      row + tile, slot, parity, D, QUERIES)  # fmt: skip
            slot, parity = next_slot(slot, parity, SLOTS)
            tile = next_tile(tile, walk, KIND)
        row += walk[4]


@jit
def _add(sum_desc, sum_buf, sum_full, sum_empty, lengths, band, work, order, KIND: gl.constexpr, D: gl.constexpr,
         QUERIES: gl.constexpr, SUM_SLOTS: gl.constexpr, STAGGER: gl.constexpr):  # fmt: skip
    """Have every tile of dq added to memory, in the order in which the warpgroups make them."""
    heads, group, q_tiles, no_tile = work
    block, i_b, i_k = _block_of_program(heads, group, order[0], order[1])
    walk = walk_of_block(block, lengths, band, work, i_b * heads + i_k * group, KIND, QUERIES, STAGGER)
    turn = 0
    row = walk[3]
    for _g in range(group):
        tile = walk[2]
        for _ in range(walk[0], walk[1]):
            add_parts(sum_desc, sum_buf, sum_full, sum_empty, row + tile, turn, SUM_SLOTS, D, QUERIES)
            turn += 1
            tile = next_tile(tile, walk, KIND)
        row += walk[4]
    tma_store_wait(0)  # shared memory stays until it has been read


@jit
def _consume(Sums, DK, DV, q_buf, do_buf, k_buf, v_buf, stat_buf, ds_buf, sums, kv_full, q_full, do_full, empty, lengths, band,
             work, order, outs, scale, CID: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr,
             SLOTS: gl.constexpr, SUM_SLOTS: gl.constexpr, ORDER: gl.constexpr, STAGGER: gl.constexpr,
             FENCE: gl.constexpr, ROUNDED: gl.constexpr):  # fmt: skip
    """dk and dv of 64 keys, over all query heads of their KV head, and half of every tile of dq."""
    heads, group, q_tiles, no_tile = work
    DTYPE: gl.constexpr = q_buf.dtype
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, QUERIES, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, k_width=2)
    block, i_b, i_k = _block_of_program(heads, group, order[0], order[1])
    walk = walk_of_block(block, lengths, band, work, i_b * heads + i_k * group, KIND, QUERIES, STAGGER)
    i_n = block * 2 + CID
    whole = whole_tiles(i_n, lengths, band, KIND)
    tiles = views(q_buf, do_buf, k_buf, v_buf, D, QUERIES, SLOTS)
    q, do, k, v = tiles
    bars = (q_full, do_full, empty)
    if SUM_SLOTS == 0:
        sums = (place_of_sum(Sums, CID, Q_LAYOUT),)
    nothing = gl.zeros([UNIT, QUERIES], gl.float32, S_LAYOUT)  # use_acc=False: never read
    dk = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))  # written before the first product, or all would wait
    dv = opaque(gl.zeros([UNIT, D], gl.float32, D_LAYOUT))
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s_flying = wgmma(
        k.slice(CID * UNIT, UNIT, dim=0), q.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    mbarrier.wait(do_full.index(0), 0)
    dp_flying = wgmma(
        v.slice(CID * UNIT, UNIT, dim=0), do.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    s = wgmma_wait(1, deps=(s_flying,))
    if ORDER == KEYS_LATE:
        dk = wgmma_init(dk)
    turn = 0
    row = walk[3]
    steps = (walk[1] - walk[0]) * group
    for _g in range(group):
        tile = walk[2]
        for _ in range(walk[0], walk[1]):
            s, dp_flying, dk, dv = reduce_tile(
                s, dp_flying, dk, dv, tiles, stat_buf, ds_buf, bars, sums, tile, i_n, row + tile, whole, lengths, band,
                scale * LOG2E, turn + 1 < steps, turn, CID, KIND, D, QUERIES, SLOTS, SUM_SLOTS, ORDER, FENCE, ROUNDED, S_LAYOUT,
                A_LAYOUT, Q_LAYOUT)  # fmt: skip
            turn += 1
            tile = next_tile(tile, walk, KIND)
        row += walk[4]
    dp, dk = wgmma_wait(0, deps=(dp_flying, dk))  # of no tile, and the last dk if it comes late
    stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh = outs
    b, h, n = i_b.to(gl.int64), i_k.to(gl.int64), i_n.to(gl.int64) * UNIT
    rows = lengths[1] - i_n * UNIT
    store_accumulator(DV + b * stride_yb + h * stride_yh + n * stride_yn, dv, rows, stride_yn, DTYPE)
    store_accumulator(DK + b * stride_xb + h * stride_xh + n * stride_xn, dk * scale, rows, stride_xn, DTYPE)


@jit(do_not_specialize=RUNTIME)
def attention_backward_reduce(
    q_desc, do_desc, k_desc, v_desc, stat_desc, sum_desc, Sums, DK, DV,
    scale, seq_q, seq_k, heads, group, q_units, kv_units, q_tiles, blocks, left, right, batch_heads, no_tile,
    stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh,
    KIND: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, SLOTS: gl.constexpr, SUM_SLOTS: gl.constexpr,
    ORDER: gl.constexpr, STAGGER: gl.constexpr, FENCE: gl.constexpr, ROUNDED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc, do_desc [B, H, Sq, D], boxes [1, 1, QUERIES, 64]; k_desc, v_desc [B, H/group, Sk, D], boxes [1, 1, 128, 64].  D is
    64 with QUERIES 128, or 128 with QUERIES 64.  stat_desc: statistics (kernels.backward_statistics, of units of QUERIES) as one
    dimension, box [2 * QUERIES], the last row being number no_tile = B * H * q_tiles, of a tile without queries.

    Sums [no_tile + 1, QUERIES * D] fp32: zeros, to which dq / scale is added; sum_desc: the same as [.., 32], box [128, 32].
    DK, DV [B, Sk, H/group, D] by strides.  scale > 0.  q_units, kv_units: tiles of 64 queries and keys; q_tiles, blocks: tiles of
    QUERIES queries, blocks of 128 keys of a head.  KIND: FULL, CAUSAL or WINDOW (left, right).

    SUM_SLOTS: buffers in shared memory for a tile of dq, from which copies add it; 0: the warpgroups add it from registers.
    ORDER, STAGGER: of the products of a step, of the walks (backward_reduce_parts).  FENCE: keep the wait for dP behind the
    exponentials.  ROUNDED: make dS of rounded probabilities.  Grid: B * H/group * blocks, batch_heads KV heads at a time."""
    DTYPE: gl.constexpr = q_desc.dtype
    PANELS: gl.constexpr = D // PANEL
    Q_PANEL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, PANEL], DTYPE)
    K_PANEL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, PANEL], DTYPE)
    q_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, QUERIES, PANEL], Q_PANEL)
    do_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, QUERIES, PANEL], Q_PANEL)
    k_buf = gl.allocate_shared_memory(DTYPE, [PANELS, KEYS, PANEL], K_PANEL)
    v_buf = gl.allocate_shared_memory(DTYPE, [PANELS, KEYS, PANEL], K_PANEL)
    ds_buf = gl.allocate_shared_memory(
        DTYPE, [2, KEYS, QUERIES], gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], DTYPE)
    )
    stat_buf = gl.allocate_shared_memory(gl.float32, [SLOTS, 2 * QUERIES], stat_desc.layout)
    kv_full = barriers(1, 1)
    q_full = barriers(SLOTS, 1)
    do_full = barriers(SLOTS, 1)
    empty = barriers(SLOTS, 2)
    if SUM_SLOTS > 0:
        sum_buf = gl.allocate_shared_memory(gl.float32, [2 * SUM_SLOTS, SUM_ROWS, 32], sum_desc.layout)
        sum_full = barriers(2 * SUM_SLOTS, 1)
        sum_empty = barriers(2 * SUM_SLOTS, 1)
    else:
        sum_buf = q_buf
        sum_full = q_full
        sum_empty = q_full
    fence_async_shared()
    if SUM_SLOTS > 0:
        gl.warp_specialize([
            (_consume, (Sums, DK, DV, q_buf, do_buf, k_buf, v_buf, stat_buf, ds_buf, (sum_buf, sum_full, sum_empty), kv_full,
                        q_full, do_full, empty, (seq_q, seq_k, q_units, kv_units), (left, right),
                        (heads, group, q_tiles, no_tile), (blocks, batch_heads),
                        (stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh), scale,
                        0, KIND, D, QUERIES, SLOTS, SUM_SLOTS, ORDER, STAGGER, FENCE, ROUNDED)),
            (_consume, (Sums, DK, DV, q_buf, do_buf, k_buf, v_buf, stat_buf, ds_buf, (sum_buf, sum_full, sum_empty), kv_full,
                        q_full, do_full, empty, (seq_q, seq_k, q_units, kv_units), (left, right),
                        (heads, group, q_tiles, no_tile), (blocks, batch_heads),
                        (stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh), scale,
                        1, KIND, D, QUERIES, SLOTS, SUM_SLOTS, ORDER, STAGGER, FENCE, ROUNDED)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, stat_desc, q_buf, do_buf, k_buf, v_buf, stat_buf, kv_full, q_full,
                        do_full, empty, (seq_q, seq_k, q_units, kv_units), (left, right), (heads, group, q_tiles, no_tile),
                        (blocks, batch_heads), KIND, D, QUERIES, SLOTS, STAGGER)),
            (_add, (sum_desc, sum_buf, sum_full, sum_empty, (seq_q, seq_k, q_units, kv_units), (left, right),
                    (heads, group, q_tiles, no_tile), (blocks, batch_heads), KIND, D, QUERIES, SUM_SLOTS, STAGGER)),
        ], [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (Sums, DK, DV, q_buf, do_buf, k_buf, v_buf, stat_buf, ds_buf, (sum_buf, sum_full, sum_empty), kv_full,
                        q_full, do_full, empty, (seq_q, seq_k, q_units, kv_units), (left, right),
                        (heads, group, q_tiles, no_tile), (blocks, batch_heads),
                        (stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh), scale,
                        0, KIND, D, QUERIES, SLOTS, SUM_SLOTS, ORDER, STAGGER, FENCE, ROUNDED)),
            (_consume, (Sums, DK, DV, q_buf, do_buf, k_buf, v_buf, stat_buf, ds_buf, (sum_buf, sum_full, sum_empty), kv_full,
                        q_full, do_full, empty, (seq_q, seq_k, q_units, kv_units), (left, right),
                        (heads, group, q_tiles, no_tile), (blocks, batch_heads),
                        (stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh), scale,
                        1, KIND, D, QUERIES, SLOTS, SUM_SLOTS, ORDER, STAGGER, FENCE, ROUNDED)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, stat_desc, q_buf, do_buf, k_buf, v_buf, stat_buf, kv_full, q_full,
                        do_full, empty, (seq_q, seq_k, q_units, kv_units), (left, right), (heads, group, q_tiles, no_tile),
                        (blocks, batch_heads), KIND, D, QUERIES, SLOTS, STAGGER)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip

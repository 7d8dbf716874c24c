"""Dense attention forward on sm_90: full, causal or within a window, any lengths, packed sequences, query heads in groups.

A block of 128 queries (192 with a third consumer) is folded by warpgroups, 64 rows each, over tiles of keys that all read:

    producer    1 warp     brings Q, and K and V tile by tile into rings of buffers, each with two barriers: `full` and `empty`
    consumers   4 warps    S = Q K^T, the softmax step, O += P V, of one tile after the other

What a consumer has in flight, tile by tile:   issue S'  |  issue O += P V  |  wait for S'  |  its softmax  |  wait for O

so that the exponentials of one tile run beside the products of the one before, and, as the warpgroups take turns (by
themselves, or with TURNS by barriers), beside the others' products.  As many programs as the device has SMs draw their blocks
from a counter, those with the most keys of a head first: the long ones begin early, and neighbours read the same K and V.

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), sections 3.1 and 3.2.
"""

from .forward_loads import produce
from .forward_mods import change_scores, load_slopes, tile_ring
from .forward_parts import (
    accumulators,
    begin_fold,
    clear_tail,
    finish_block,
    fold_lazily,
    fold_scores,
    follow,
    look,
    multiply_keys,
    multiply_values,
    outgrown,
    rescale_all,
    ring,
    soften,
    tile_of,
    tiles_of,
    wait_values,
    wide_of,
)
from .forward_work import (
    NOTHING,
    begin_telling,
    cut,
    cut_if_needed,
    is_cut,
    range_of_block,
    read_care,
    read_item,
    read_place,
    read_sequence,
    tell,
)
from .gluon import (
    barriers,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    opaque,
    schedule_fence,
    turn_pass,
    turn_wait,
    wgmma_wait,
)
from .parts import LOG2E

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_blocks", "items", "left", "right", "stride_ob", "stride_om",
           "stride_oh", "cap", "stride_sinks", "batch", "total_q", "bias_b", "bias_h", "mask_b", "mask_h", "slope_b",
           "slope_h"]  # fmt: skip


@jit
def _consume(note, told, rings, tile_rings, slopes, outs, sizes, scale, Sinks, stride_sinks, cap, total_q, CID: gl.constexpr,
             KIND: gl.constexpr, DIM_QK: gl.constexpr, DIM_V: gl.constexpr, COLUMNS: gl.constexpr, KEYS: gl.constexpr,
             SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, PACK: gl.constexpr, VARLEN: gl.constexpr, SOFTCAP: gl.constexpr,
             FENCE: gl.constexpr, LATE: gl.constexpr, TURNS: gl.constexpr, POLYNOMIAL: gl.constexpr, SKIP: gl.constexpr,
             LAZY: gl.constexpr, ALIBI: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr, BIAS_SLOTS: gl.constexpr,
             MASK_SLOTS: gl.constexpr):  # fmt: skip
    """Consumer number CID: rows CID * 64 on of each query block of this program."""
    q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    Out, Lse, stride_ob, stride_om, stride_oh = outs
    seq_q, seq_k, heads, q_blocks, left, right = sizes
    DTYPE: gl.constexpr = k_buf[0].dtype
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = wide_of(DIM_V)
    NARROW: gl.constexpr = WIDE if DIM_V == WIDE else DIM_V - WIDE
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDE, 16])
    O_REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, NARROW, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, k_width=2)
    P_REST: gl.constexpr = gl.DotOperandLayout(0, O_REST, k_width=2)
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    ROW_REST: gl.constexpr = gl.SliceLayout(1, O_REST)
    k_tiles = tiles_of(k_buf, SLOTS, KEYS, DIM_QK)
    v_tiles = tiles_of(v_buf, SLOTS, KEYS, DIM_V)
    q = tile_of(tiles_of(q_buf, CONSUMERS, 64, DIM_QK), CID)
    if SOFTCAP:
        inner = scale / cap
        scale = cap
    natural = scale
    if ALIBI or BIAS:
        scale = LOG2E  # what they are added to is scaled before
    else:
        scale = scale * LOG2E
    if not ALIBI:
        slope = None
    nothing = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)  # use_acc=False: never read
    i = 0  # query blocks that were begun
    t = 0  # the rings' position
    if TURNS and CID == CONSUMERS - 1:
        turn_pass(0)
    mbarrier.wait(q_full.index(CID), 0)
    item = read_item(note, VARLEN)
    while item >= 0:
        i_q, i_b, i_h, n_q, n_k, first_q = read_place(note, item, seq_q, seq_k, heads, q_blocks, VARLEN)
        shift = n_k - n_q
        first, tiles = range_of_block(i_q, n_q, n_k, left, right, KIND, CONSUMERS * 64, KEYS, PACK)
        row = i_q * (CONSUMERS * 64) + CID * 64
        if ALIBI:
            i_s = read_sequence(note, i_b, VARLEN)
            slope = load_slopes(nothing, slopes[0], slopes[1], slopes[2], i_s, i_h, PACK)
        m, l = begin_fold(nothing, Sinks, stride_sinks, i_h, ROW_S, PACK)
        acc = accumulators(DIM_V, WARPS)
        slot = t % SLOTS
        parity = (t // SLOTS) & 1
        mbarrier.wait(k_full.index(slot), parity)
        if TURNS:
            turn_wait(CID)
        s = multiply_keys(q, k_tiles, slot, nothing)
        if TURNS:
            turn_pass((CID + 1) % CONSUMERS)
        s = wgmma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        if SOFTCAP:
            s = soften(s, inner, SOFTCAP)
        if ALIBI or BIAS or MASK:
            s = change_scores(s, natural, tile_rings, t, slope, row, first * KEYS, shift, CID, KIND, PACK, ALIBI, BIAS, MASK,
                              BIAS_SLOTS, MASK_SLOTS)  # fmt: skip
        s = cut_if_needed(s, row, first * KEYS, shift, n_k, left, right, KIND, KEYS, PACK)
        p, m, l, alpha = fold_scores(s, m, l, scale, P_LAYOUT, DTYPE, POLYNOMIAL, SKIP)
        if LAZY:
            # m takes over m_next in the loop, which `look` there makes a value of its own (see gluon.py)
            care, m_next, worst = read_care(told), m, gl.zeros_like(m)
        for j in range(1, tiles):
            t += 1
            ahead = t % SLOTS
            ahead_parity = (t // SLOTS) & 1
            mbarrier.wait(k_full.index(ahead), ahead_parity)
            if TURNS or SKIP:  # before the turn, and before a product is in flight, which a branch would serialise
                acc = rescale_all(acc, alpha, ROW_O, ROW_REST, SKIP)
            if TURNS:
                turn_wait(CID)
            s_flying = multiply_keys(q, k_tiles, ahead, nothing)
            if not (TURNS or SKIP):
                acc = rescale_all(acc, alpha, ROW_O, ROW_REST, SKIP)
            mbarrier.wait(v_full.index(slot), parity)
            o_flying = multiply_values(p, v_tiles, slot, acc, P_REST)
            if TURNS:
                turn_pass((CID + 1) % CONSUMERS)
            s = wgmma_wait(len(acc), deps=(s_flying,))
            if not LATE:
                mbarrier.arrive(k_empty.index(ahead), count=1)
            if SOFTCAP:
                s = soften(s, inner, SOFTCAP)
            if ALIBI or BIAS or MASK:
                s = change_scores(s, natural, tile_rings, t, slope, row, (first + j) * KEYS, shift, CID, KIND, PACK, ALIBI,
                                  BIAS, MASK, BIAS_SLOTS, MASK_SLOTS)  # fmt: skip
            if LAZY:
                if (care > 0) | is_cut(row, (first + j) * KEYS, shift, n_k, left, right, KIND, KEYS, PACK):
                    s = cut(s, row, (first + j) * KEYS, shift, n_k, left, right, KIND, KEYS, PACK)
                    m_next = look(s, m_next, scale)
                p_next, m, l, alpha, part = fold_lazily(s, m, m_next, l, scale, P_LAYOUT, DTYPE)
            else:
                s = cut_if_needed(s, row, (first + j) * KEYS, shift, n_k, left, right, KIND, KEYS, PACK)
                p_next, m, l, alpha = fold_scores(s, m, l, scale, P_LAYOUT, DTYPE, POLYNOMIAL, SKIP)
            if FENCE:
                l = schedule_fence(l)
            acc = wait_values(o_flying)
            if LAZY:
                m_next, worst = follow(part, m, worst, DTYPE)
            if LATE:
                mbarrier.arrive(k_empty.index(ahead), count=1)
            mbarrier.arrive(v_empty.index(slot), count=1)
            p = p_next
            slot = ahead
            parity = ahead_parity
        # every product of this block with Q has been waited for
        mbarrier.arrive(q_empty.index(CID), count=1)
        acc = rescale_all(acc, alpha, ROW_O, ROW_REST, False)
        mbarrier.wait(v_full.index(slot), parity)
        if VARLEN:  # the next sequence's values lie behind the last key, and 0 * NaN is NaN
            live = n_k - (first + tiles - 1) * KEYS
            if live < KEYS:
                clear_tail(v_buf, slot, live, KEYS, DIM_V)
        acc = wait_values(multiply_values(p, v_tiles, slot, acc, P_REST))
        mbarrier.arrive(v_empty.index(slot), count=1)
        if (
            DIM_V > 128 and not VARLEN
        ):  # worked out again: numbers that live across the loop take registers that are not there
            i_q, i_b, i_h, n_q, n_k, first_q = read_place(note, opaque(item), seq_q, seq_k, heads, q_blocks, VARLEN)
            row = i_q * (CONSUMERS * 64) + CID * 64
        b, h = i_b.to(gl.int64), i_h.to(gl.int64)
        if VARLEN:
            lse = Lse + h * total_q + first_q + row
        else:
            lse = Lse + (b * heads + i_h) * (n_q * PACK) + row // PACK
        out = Out + b * stride_ob + h * (stride_oh * PACK) + (first_q + row // PACK).to(gl.int64) * stride_om
        strides = (stride_om, stride_oh, n_q)
        finish_block(out, lse, acc, m, l, n_q * PACK - row, strides, DTYPE, ROW_S, COLUMNS, PACK)
        if LAZY:
            tell(told, (i & 1) * CONSUMERS + CID, outgrown(worst, item, DTYPE))
        t += 1
        i += 1
        mbarrier.wait(q_full.index(CID), i & 1)
        item = read_item(note, VARLEN)
        if LAZY:
            if item == NOTHING:
                mbarrier.arrive(q_empty.index(CID), count=1)
                i += 1
                mbarrier.wait(q_full.index(CID), i & 1)
                item = read_item(note, VARLEN)
    if TURNS and CID == 0:
        turn_wait(0)  # the last one passed on


@jit(do_not_specialize=RUNTIME)
def attention_forward_hopper(
    q_desc, k_desc, v_desc, Out, Lse, Tickets,
    scale, seq_q, seq_k, heads, group, q_blocks, items, left, right, stride_ob, stride_om, stride_oh,
    Sinks, stride_sinks, cap, CuQ, CuK, batch, total_q,
    bias_desc, bias_b, bias_h, mask_desc, mask_b, mask_h, Slopes, slope_b, slope_h,
    KIND: gl.constexpr, DIM_QK: gl.constexpr, DIM_V: gl.constexpr, COLUMNS: gl.constexpr, KEYS: gl.constexpr,
    SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, PACK: gl.constexpr, VARLEN: gl.constexpr, SOFTCAP: gl.constexpr,
    FENCE: gl.constexpr, LATE: gl.constexpr, TURNS: gl.constexpr, POLYNOMIAL: gl.constexpr,
    SKIP: gl.constexpr, LAZY: gl.constexpr, BIAS: gl.constexpr, MASK: gl.constexpr, BIAS_SLOTS: gl.constexpr,
    MASK_SLOTS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc [B, H, Sq, D] with boxes [1, 1, 64, panel], k_desc, v_desc [B, H/group, Sk, D] with boxes [1, 1, KEYS, panel]; Out
    [B, Sq, H, COLUMNS] by strides, Lse [B, H, Sq]; Tickets [1] int32: 0.  scale > 0; items = B * H * q_blocks, q_blocks of
    CONSUMERS * 64 queries.  KIND: FULL, CAUSAL or WINDOW (left, right: keys on either side of a query's own place).  DIM_QK,
    DIM_V: widths of tiles, at least the head dims, of which COLUMNS is V's.  Sinks [H] by its stride, or None; SOFTCAP: see
    `soften`, with `cap`.  Grid (min(items, SMs),).

    PACK heads, a divisor of 64, make one: q_desc is [B, H/PACK, Sq, PACK, D] with boxes [1, 1, 64/PACK, PACK, panel], `heads` is
    H/PACK, `group` what is left of it, and q_blocks are of Sq * PACK rows.

    VARLEN: tensors [1, H, T, D], Out [T, H, COLUMNS], Lse [H, T]; sequence b is queries CuQ[b] to CuQ[b+1] and keys CuK[b] to
    CuK[b+1] (int32); q_blocks = T // ROWS + batch places, see `sequence_of_place`; seq_q and seq_k are not read; no PACK.

    BIAS, MASK: rows of a tile of the bias, of the mask: 64, 1 where one row serves all queries, or 0.  bias_desc (16 or 32 bits),
    mask_desc (8 bits, 0: not seen): [B or 1, H or 1, Sq or 1, Sk] with boxes [1, 1, rows, panel_of_tile]; bias_b, bias_h, mask_b,
    mask_h: 1, or 0 where there is one for all batch entries, heads; BIAS_SLOTS, MASK_SLOTS: buffers for each
    warpgroup.  Slopes [B, H] of ALiBi by its strides, or None.  With one of these and PACK, only Slopes may differ between heads.

    FENCE holds the wait for O behind the softmax; LATE gives K's buffer back with V's; with TURNS the consumers issue their
    products in turns; POLYNOMIAL, SKIP: see `fold_scores`; LAZY (with SKIP): see `fold_lazily`."""
    DTYPE: gl.constexpr = q_desc.dtype
    q_buf = ring(DTYPE, CONSUMERS, 64, DIM_QK)
    k_buf = ring(DTYPE, SLOTS, KEYS, DIM_QK)
    v_buf = ring(DTYPE, SLOTS, KEYS, DIM_V)
    ALIBI: gl.constexpr = Slopes is not None
    if VARLEN:
        note = gl.allocate_shared_memory(gl.int32, [6 if ALIBI else 5, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        note = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = ()
    if LAZY:
        told = begin_telling(CONSUMERS)
    q_full = barriers(CONSUMERS, 1)
    q_empty = barriers(CONSUMERS, 1)
    k_full = barriers(SLOTS, 1)
    k_empty = barriers(SLOTS, CONSUMERS)
    v_full = barriers(SLOTS, 1)
    v_empty = barriers(SLOTS, CONSUMERS)
    slopes = ()
    bias_in, mask_in = (), ()
    bias_ring, mask_ring = (), ()
    if ALIBI:
        slopes = (Slopes, slope_b, slope_h)
    if BIAS:
        bias_in = (bias_desc, bias_b, bias_h)
        bias_ring = tile_ring(bias_desc, BIAS, KEYS, BIAS_SLOTS, CONSUMERS)
    if MASK:
        mask_in = (mask_desc, mask_b, mask_h)
        mask_ring = tile_ring(mask_desc, MASK, KEYS, MASK_SLOTS, CONSUMERS)
    fence_async_shared()
    rings = (q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    tiles_in, tile_rings = (bias_in, mask_in), (bias_ring, mask_ring)
    outs = (Out, Lse, stride_ob, stride_om, stride_oh)
    sizes = (seq_q, seq_k, heads, q_blocks, left, right)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (note, told, rings, tile_rings, slopes, outs, sizes, scale, Sinks, stride_sinks, cap, total_q, 0, KIND,
                        DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS, PACK, VARLEN, SOFTCAP, FENCE, LATE, TURNS, POLYNOMIAL,
                        SKIP, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS, MASK_SLOTS)),
            (produce, (q_desc, k_desc, v_desc, Tickets, CuQ, CuK, batch, note, told, rings, tiles_in, tile_rings, sizes, group,
                       items, KIND, DIM_QK, DIM_V, KEYS, SLOTS, CONSUMERS, PACK, VARLEN, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS,
                       MASK_SLOTS)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (note, told, rings, tile_rings, slopes, outs, sizes, scale, Sinks, stride_sinks, cap, total_q, 0, KIND,
                        DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS, PACK, VARLEN, SOFTCAP, FENCE, LATE, TURNS, POLYNOMIAL,
                        SKIP, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS, MASK_SLOTS)),
            (_consume, (note, told, rings, tile_rings, slopes, outs, sizes, scale, Sinks, stride_sinks, cap, total_q, 1, KIND,
                        DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS, PACK, VARLEN, SOFTCAP, FENCE, LATE, TURNS, POLYNOMIAL,
                        SKIP, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS, MASK_SLOTS)),
            (produce, (q_desc, k_desc, v_desc, Tickets, CuQ, CuK, batch, note, told, rings, tiles_in, tile_rings, sizes, group,
                       items, KIND, DIM_QK, DIM_V, KEYS, SLOTS, CONSUMERS, PACK, VARLEN, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS,
                       MASK_SLOTS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (note, told, rings, tile_rings, slopes, outs, sizes, scale, Sinks, stride_sinks, cap, total_q, 0, KIND,
                        DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS, PACK, VARLEN, SOFTCAP, FENCE, LATE, TURNS, POLYNOMIAL,
                        SKIP, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS, MASK_SLOTS)),
            (_consume, (note, told, rings, tile_rings, slopes, outs, sizes, scale, Sinks, stride_sinks, cap, total_q, 1, KIND,
                        DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS, PACK, VARLEN, SOFTCAP, FENCE, LATE, TURNS, POLYNOMIAL,
                        SKIP, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS, MASK_SLOTS)),
            (_consume, (note, told, rings, tile_rings, slopes, outs, sizes, scale, Sinks, stride_sinks, cap, total_q, 2, KIND,
                        DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS, PACK, VARLEN, SOFTCAP, FENCE, LATE, TURNS, POLYNOMIAL,
                        SKIP, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS, MASK_SLOTS)),
            (produce, (q_desc, k_desc, v_desc, Tickets, CuQ, CuK, batch, note, told, rings, tiles_in, tile_rings, sizes, group,
                       items, KIND, DIM_QK, DIM_V, KEYS, SLOTS, CONSUMERS, PACK, VARLEN, LAZY, ALIBI, BIAS, MASK, BIAS_SLOTS,
                       MASK_SLOTS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip

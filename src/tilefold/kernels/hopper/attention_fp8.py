"""Dense attention forward on sm_90 with Q, K and V in e4m3: full, causal or within a window, any lengths.

The roles, rings and order of work are those of attention_forward.  What differs:

    V^T      both operands of a product of bytes lie in shared memory with the summed dimension contiguous, so V comes
             transposed (kernels.transpose_values), its keys in the order in which the weights lie in registers
    weights  2^8 times as large, so that e4m3 holds what is small beside the row's largest
    sums     a wgmma of bytes adds with about 14 bits; the products of each tile are therefore added to an accumulator of
             fp32 outside (DIRECT: they are not), which costs the multiply-adds that a new maximum's factor takes anyway

What a consumer has in flight:   issue S'  |  add PV  |  issue PV'  |  wait for S'  |  its softmax  |  wait for PV'

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 3.3; sums outside: DeepSeek-V3 (arXiv:2412.19437), 3.3.2.
"""

from .forward_work import cut_if_needed, find_place, range_of_block, read_item, read_place, write_note
from .fp8_parts import finish_block, load_keys_of_values, load_rows, operand, ring, tiles_of, weigh
from .gluon import (
    barriers,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    named_arrive,
    named_wait,
    opaque,
    schedule_fence,
    wgmma,
    wgmma_wait,
)
from .parts import LOG2E, LOWEST, draw_work, quad_sums, read_work
from .products import rescale_output

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_blocks", "items", "left", "right", "stride_ob", "stride_om",
           "stride_oh", "q_group", "stride_qb", "stride_qh", "stride_kb", "stride_kh", "stride_vb", "stride_vh"]  # fmt: skip


@jit
def _produce_block(q_desc, k_desc, v_desc, WorkCounter, note, rings, place, item, i, t, group, left, right, programs,
                   KIND: gl.constexpr, DIM_QK: gl.constexpr, DIM_V: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr,
                   CONSUMERS: gl.constexpr):  # fmt: skip
    """Make every load of one query block -> the item after it, and the position in the rings."""
    q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    i_q, i_b, i_h, seq_q, seq_k = place
    drawn = 0
    following = item
    first, tiles = range_of_block(i_q, seq_q, seq_k, left, right, KIND, CONSUMERS * 64, KEYS, 1)
    for c in gl.static_range(CONSUMERS):
        mbarrier.wait(q_empty.index(c), (i & 1) ^ 1)
    write_note(note, item, i_q, seq_q, seq_k, 0, 0, False, False)
    for c in gl.static_range(CONSUMERS):
        load_rows(q_desc, q_full.index(c), q_buf, c, i_b, i_h, i_q * (CONSUMERS * 64) + c * 64, 64, DIM_QK)
    i_k = i_h // group
    for j in range(tiles):
        slot = t % SLOTS
        parity = ((t // SLOTS) & 1) ^ 1
        key = (first + j) * KEYS
        mbarrier.wait(k_empty.index(slot), parity)
        load_rows(k_desc, k_full.index(slot), k_buf, slot, i_b, i_k, key, KEYS, DIM_QK)
        mbarrier.wait(v_empty.index(slot), parity)
        load_keys_of_values(v_desc, v_full.index(slot), v_buf, slot, i_b, i_k, key, DIM_V, KEYS)
        t += 1
        # As late as hides the answers: who draws early may hold two long blocks while others have none.
        if j == gl.maximum(tiles - 4, 0):
            drawn = draw_work(WorkCounter)
        if j == gl.maximum(tiles - 2, 0):
            following = programs + read_work(drawn)
    return following, t


@jit
def _produce(q_desc, k_desc, v_desc, WorkCounter, note, rings, sizes, group, items, KIND: gl.constexpr, DIM_QK: gl.constexpr,
             DIM_V: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr):  # fmt: skip
    """The producer: chooses the query blocks and makes every load, in the order in which the consumers need them."""
    q_full, q_empty = rings[3], rings[4]
    seq_q, seq_k, heads, q_blocks, left, right = sizes
    programs = gl.num_programs(0)
    item = gl.program_id(0)
    i = 0  # query blocks that were begun
    t = 0  # tiles that were loaded: position in the rings
    while item < items:
        place = find_place(None, None, 0, item, seq_q, seq_k, heads, q_blocks, False, CONSUMERS * 64)[:5]
        item, t = _produce_block(q_desc, k_desc, v_desc, WorkCounter, note, rings, place, item, i, t, group, left, right,
                                 programs, KIND, DIM_QK, DIM_V, KEYS, SLOTS, CONSUMERS)  # fmt: skip
        i += 1
    for c in gl.static_range(CONSUMERS):
        mbarrier.wait(q_empty.index(c), (i & 1) ^ 1)
    write_note(note, -1, 0, 0, 0, 0, 0, False, False)
    for c in gl.static_range(CONSUMERS):
        mbarrier.arrive(q_full.index(c), count=1)
    # a number was drawn for every block that was made; who drew the last one leaves the counter as it was
    if item == programs + items - 1:
        gl.store(WorkCounter, 0)


@jit
def _factor(Scale, i_b, i_h, stride_b, stride_h):
    """The number that a head's bytes are to be multiplied with, 1 where there is none."""
    if Scale is None:
        return 1.0
    else:
        return gl.load(Scale + i_b.to(gl.int64) * stride_b + i_h.to(gl.int64) * stride_h)


@jit
def _score_factor(scales, i_b, i_h, group):
    """Of a head's scores.  scales = (QScale, KScale, VScale, q_group, their strides by batch entry and head)."""
    q = _factor(scales[0], i_b, i_h // scales[3], scales[4], scales[5])
    return q * _factor(scales[1], i_b, i_h // group, scales[6], scales[7])


@jit
def _consume(note, rings, outs, sizes, scale, scales, group, CID: gl.constexpr, KIND: gl.constexpr, DIM_QK: gl.constexpr,
             DIM_V: gl.constexpr, COLUMNS: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr,
             DIRECT: gl.constexpr, FENCE: gl.constexpr, TURNS: gl.constexpr, POLYNOMIAL: gl.constexpr):  # fmt: skip
    """Consumer number CID: rows CID * 64 on of each query block of this program."""
    q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    Out, Lse, stride_ob, stride_om, stride_oh = outs
    seq_q, seq_k, heads, q_blocks, left, right = sizes
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM_V, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, k_width=4)
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    k_tiles = tiles_of(k_buf, SLOTS, KEYS, DIM_QK)
    v_tiles = tiles_of(v_buf, SLOTS, DIM_V, KEYS)
    q = tiles_of(q_buf, CONSUMERS, 64, DIM_QK).index(CID)
    scale = scale * LOG2E
    no_scores = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)  # use_acc=False: never read
    nothing = gl.zeros([64, DIM_V], gl.float32, O_LAYOUT)
    zero = seq_q >> 31
    i = 0  # query blocks that were begun
    t = 0  # the rings' position
    if TURNS and CID == CONSUMERS - 1:
        named_arrive(0)
    mbarrier.wait(q_full.index(CID), 0)
    item = read_item(note, False)
    while item >= 0:
        i_q, i_b, i_h, n_q, n_k, _ = read_place(note, item, seq_q, seq_k, heads, q_blocks, False)
        shift = n_k - n_q
        first, tiles = range_of_block(i_q, n_q, n_k, left, right, KIND, CONSUMERS * 64, KEYS, 1)
        row = i_q * (CONSUMERS * 64) + CID * 64
        by = scale * _score_factor(scales, i_b, i_h, group)
        m = gl.full([64], LOWEST, gl.float32, ROW_S)
        l = gl.zeros_like(quad_sums(no_scores))
        acc = gl.zeros([64, DIM_V], gl.float32, O_LAYOUT)
        slot = t % SLOTS
        parity = (t // SLOTS) & 1
        mbarrier.wait(k_full.index(slot), parity)
        if TURNS:
            named_wait(CID)
        s = wgmma(q, k_tiles.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if TURNS:
            named_arrive((CID + 1) % CONSUMERS)
        s = wgmma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        s = cut_if_needed(s, row, first * KEYS, shift, n_k, left, right, KIND, KEYS, 1)
        p, m, l, alpha = weigh(s, m, l, by, POLYNOMIAL)
        before = alpha  # its factor is the accumulator's when the product of those weights is added
        for j in range(1, tiles):
            t += 1
            ahead = t % SLOTS
            ahead_parity = (t // SLOTS) & 1
            mbarrier.wait(k_full.index(ahead), ahead_parity)
            if DIRECT:
                acc = rescale_output((acc,), alpha, True)[0]
            weights = operand(p, zero, P_LAYOUT)  # before a product is in flight: it would be made to wait for this
            if TURNS:
                named_wait(CID)
            s_flying = wgmma(q, k_tiles.index(ahead).permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(slot), parity)
            if DIRECT:
                o_flying = wgmma(weights, v_tiles.index(slot).permute((1, 0)), acc, is_async=True)
            else:
                o_flying = wgmma(weights, v_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            if TURNS:
                named_arrive((CID + 1) % CONSUMERS)
            s = wgmma_wait(1, deps=(s_flying,))
            mbarrier.arrive(k_empty.index(ahead), count=1)
            s = cut_if_needed(s, row, (first + j) * KEYS, shift, n_k, left, right, KIND, KEYS, 1)
            p_next, m, l, alpha = weigh(s, m, l, by, POLYNOMIAL)
            if FENCE:
                l = schedule_fence(l)
            if DIRECT:
                acc = wgmma_wait(0, deps=(o_flying,))
            else:
                acc = acc * gl.expand_dims(gl.convert_layout(before, ROW_O), 1) + wgmma_wait(0, deps=(o_flying,))
                before = alpha
            mbarrier.arrive(v_empty.index(slot), count=1)
            p = p_next
            slot = ahead
            parity = ahead_parity
        # every product of this block with Q has been waited for
        mbarrier.arrive(q_empty.index(CID), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, ROW_O), 1)
        mbarrier.wait(v_full.index(slot), parity)
        acc = wgmma_wait(
            0, deps=(wgmma(operand(p, zero, P_LAYOUT), v_tiles.index(slot).permute((1, 0)), acc, is_async=True),)
        )
        mbarrier.arrive(v_empty.index(slot), count=1)
        # worked out again: numbers that live across the loop take registers that are not there
        i_q, i_b, i_h, n_q, n_k, _ = read_place(note, opaque(item), seq_q, seq_k, heads, q_blocks, False)
        row = i_q * (CONSUMERS * 64) + CID * 64
        of_result = _factor(scales[2], i_b, i_h // group, scales[8], scales[9])
        b, h = i_b.to(gl.int64), i_h.to(gl.int64)
        lse = Lse + (b * heads + i_h) * n_q + row
        out = Out + b * stride_ob + h * stride_oh + row.to(gl.int64) * stride_om
        finish_block(out, lse, acc, m, l, of_result, n_q - row, stride_om, ROW_S, COLUMNS)
        t += 1
        i += 1
        mbarrier.wait(q_full.index(CID), i & 1)
        item = read_item(note, False)
    if TURNS and CID == 0:
        named_wait(0)  # the last one passed on


@jit(do_not_specialize=RUNTIME)
def attention_forward_fp8(
    q_desc, k_desc, v_desc, Out, Lse, WorkCounter,
    scale, seq_q, seq_k, heads, group, q_blocks, items, left, right, stride_ob, stride_om, stride_oh,
    QScale, KScale, VScale, q_group, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    KIND: gl.constexpr, DIM_QK: gl.constexpr, DIM_V: gl.constexpr, COLUMNS: gl.constexpr, KEYS: gl.constexpr,
    SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, DIRECT: gl.constexpr, FENCE: gl.constexpr, TURNS: gl.constexpr,
    POLYNOMIAL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """e4m3: q_desc [B, H, Sq, D] with boxes [1, 1, 64, panel], k_desc [B, H/group, Sk, D] with boxes [1, 1, KEYS, panel], v_desc
    [B, H/group, D, Sk or more] (what transpose_values makes) with boxes [1, 1, DIM_V, KEYS].  Out [B, Sq, H, COLUMNS] bf16 by
    strides, Lse [B, H, Sq]; WorkCounter [1] int32: 0.  scale > 0; items = B * H * q_blocks, q_blocks of CONSUMERS * 64 queries.
    KIND: FULL, CAUSAL or WINDOW (left, right: keys on either side of a query's own place).  DIM_QK, DIM_V: widths of tiles,
    at least the head dims, of which COLUMNS is V's.  QScale [B, H/q_group], KScale, VScale [B, H/group] fp32 by strides, each or
    None: what q, k and v are to be multiplied with, > 0.  Grid (min(items, SMs),).

    DIRECT leaves sums over tiles to wgmma; FENCE, TURNS as of attention_forward_hopper; POLYNOMIAL: see `exponentials`."""
    q_buf = ring(CONSUMERS, 64, DIM_QK)
    k_buf = ring(SLOTS, KEYS, DIM_QK)
    v_buf = ring(SLOTS, DIM_V, KEYS)
    note = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = barriers(CONSUMERS, 1)
    q_empty = barriers(CONSUMERS, 1)
    k_full = barriers(SLOTS, 1)
    k_empty = barriers(SLOTS, CONSUMERS)
    v_full = barriers(SLOTS, 1)
    v_empty = barriers(SLOTS, CONSUMERS)
    fence_async_shared()
    rings = (q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    outs = (Out, Lse, stride_ob, stride_om, stride_oh)
    sizes = (seq_q, seq_k, heads, q_blocks, left, right)
    scales = (QScale, KScale, VScale, q_group, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (note, rings, outs, sizes, scale, scales, group, 0, KIND, DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS,
                        DIRECT, FENCE, TURNS, POLYNOMIAL)),
            (_consume, (note, rings, outs, sizes, scale, scales, group, 1, KIND, DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS,
                        DIRECT, FENCE, TURNS, POLYNOMIAL)),
            (_produce, (q_desc, k_desc, v_desc, WorkCounter, note, rings, sizes, group, items, KIND, DIM_QK, DIM_V, KEYS, SLOTS,
                        CONSUMERS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (note, rings, outs, sizes, scale, scales, group, 0, KIND, DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS,
                        DIRECT, FENCE, TURNS, POLYNOMIAL)),
            (_consume, (note, rings, outs, sizes, scale, scales, group, 1, KIND, DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS,
                        DIRECT, FENCE, TURNS, POLYNOMIAL)),
            (_consume, (note, rings, outs, sizes, scale, scales, group, 2, KIND, DIM_QK, DIM_V, COLUMNS, KEYS, SLOTS, CONSUMERS,
                        DIRECT, FENCE, TURNS, POLYNOMIAL)),
            (_produce, (q_desc, k_desc, v_desc, WorkCounter, note, rings, sizes, group, items, KIND, DIM_QK, DIM_V, KEYS, SLOTS,
                        CONSUMERS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip

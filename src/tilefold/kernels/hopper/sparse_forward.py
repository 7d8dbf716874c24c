"""Block-sparse forward attention on sm_90: a warp that loads the blocks which a list names, and warpgroups that fold them.

    producer   1 warp    waits until a buffer is free, then has the copy engine fill it: Q of the next query block, K and V units
    consumer   4 warps   64 rows of a query block: S = Q K^T, softmax, O += P V, one unit after the other

A unit is 128 keys: one listed block of 128 or two of 64, the second beside the first in shared memory.  A query block of
64 rows has one consumer, and two programs share an SM; one of 128 rows has two consumers, which read the same units.  Q
lives in registers, so that shared memory is read for K and V alone.

In iteration j the products S_j and P_(j-1) V_(j-1) are issued together, and the softmax of S_j runs under the second.  Each
side has a ring of buffers with two barriers a buffer: `full` (the copy engine has written it) and `empty` (every consumer
has read it).  The parity that a side waits for flips each time it has gone round its ring.

There are as many programs as the device has places.  Each draws the number of its next query block from a counter while it
still loads for the one before: the next loads run under the end of the fold, and lists of different lengths share the
device evenly.  Which program makes a block changes no bit of it.

Source: the pipeline is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608, section 3.2).
"""

from .gluon import (
    barriers,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
    thread_barrier,
    tma_load,
    wgmma,
    wgmma_wait,
)
from .parts import (
    LOG2E,
    LOWEST,
    PANEL,
    clear_rows,
    count_of_item,
    cut_columns,
    draw_work,
    entry,
    list_of_item,
    live_keys,
    live_of_entry,
    load_rows,
    place_of_item,
    quad_sums,
    read_work,
    reciprocal,
    rescale,
    softmax_step,
    store_accumulator,
    store_lse,
    units_of_list,
)

UNIT = gl.constexpr(128)  # keys a step
RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_blocks", "items", "stride_ob", "stride_om", "stride_oh", "stride_ib",
           "stride_ih", "stride_iq", "stride_cb", "stride_ch", "stride_sb", "stride_sh", "stride_pb", "stride_ph",
           "stride_yb", "stride_ym", "stride_yh", "stride_zb", "stride_zm", "stride_zh"]  # fmt: skip
BRANCH = gl.constexpr(1)  # bits of MIXED: add another branch,
BRANCH_GATE = gl.constexpr(2)  # times a gate,
GATE = gl.constexpr(4)  # to this one's times a gate


@jit
def _load_unit(desc, bar, buffers, slot, i_b, i_h, row_0, row_1, D: gl.constexpr, KV_BLOCK: gl.constexpr):
    """Have one unit of K or V brought: buffers is [slots * panels * blocks, KV_BLOCK, 64], which is [slots, 128, D] swizzled."""
    PER: gl.constexpr = UNIT // KV_BLOCK
    PANELS: gl.constexpr = D // PANEL
    mbarrier.expect(bar, UNIT * D * 2)
    for p in gl.static_range(PANELS):
        place = (slot * PANELS + p) * PER
        tma_load(desc, [i_b, i_h, row_0, p * PANEL], bar, buffers.index(place))
        if PER == 2:
            tma_load(desc, [i_b, i_h, row_1, p * PANEL], bar, buffers.index(place + 1))


@jit
def _load_branch(branch_desc, v_full, v_empty, v_buf, tv, i_q, i_b, i_h, D: gl.constexpr, KV_BLOCK: gl.constexpr,
                 WARPGROUPS: gl.constexpr, V_SLOTS: gl.constexpr):  # fmt: skip
    """Have the other branch's rows of a query block brought as if they were one more unit of V, the tv-th."""
    PER: gl.constexpr = UNIT // KV_BLOCK
    PANELS: gl.constexpr = D // PANEL
    BOXES: gl.constexpr = WARPGROUPS if PER == 2 else 1  # of KV_BLOCK rows
    vs = tv % V_SLOTS
    mbarrier.wait(v_empty.index(vs), ((tv // V_SLOTS) & 1) ^ 1)
    mbarrier.expect(v_full.index(vs), BOXES * KV_BLOCK * D * 2)
    for p in gl.static_range(PANELS):
        for c in gl.static_range(BOXES):
            tma_load(branch_desc, [i_b, i_h, i_q * (64 * WARPGROUPS) + c * KV_BLOCK, p * PANEL], v_full.index(vs),
                     v_buf.index((vs * PANELS + p) * PER + c))  # fmt: skip


@jit
def _produce(q_desc, k_desc, v_desc, branch_desc, WorkCounter, note, rings, lists, sizes, group, items, D: gl.constexpr,
             KV_BLOCK: gl.constexpr, WARPGROUPS: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
             MIXED: gl.constexpr):  # fmt: skip
    """The producer: chooses the query blocks and makes every load, in the order in which the consumers need them."""
    q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    seq_q, seq_k, heads, q_blocks = sizes
    PER: gl.constexpr = UNIT // KV_BLOCK
    programs = gl.num_programs(0)
    item = gl.program_id(0)
    count = count_of_item(lists, item, q_blocks, heads)
    following = items
    count_following = count
    drawn = 0
    i = 0  # query blocks that were begun
    t = 0  # units that were loaded: position in the rings
    while item < items:
        i_q, i_b, i_h = place_of_item(item, q_blocks, heads)
        index = list_of_item(lists, i_q, i_b, i_h)
        units, missing = units_of_list(count, PER)
        block_0 = entry(index, 0 - missing, count)
        block_1 = entry(index, 1 - missing, count) if PER == 2 else block_0
        for c in gl.static_range(WARPGROUPS):
            mbarrier.wait(q_empty.index(c), (i & 1) ^ 1)
        _write_note(note, item, count)
        for c in gl.static_range(WARPGROUPS):
            load_rows(q_desc, q_full.index(c), q_buf, c, i_b, i_h, (i_q * WARPGROUPS + c) * 64, 64, D)
        i_k = i_h // group
        for j in range(units):
            # a missing block is read past the end, where the copy engine gives zeros
            row_0 = gl.where(block_0 >= 0, block_0 * KV_BLOCK, seq_k)
            row_1 = gl.where(block_1 >= 0, block_1 * KV_BLOCK, seq_k)
            block_0 = entry(index, (j + 1) * PER - missing, count)
            if PER == 2:
                block_1 = entry(index, (j + 1) * PER + 1 - missing, count)
            ks = t % K_SLOTS
            mbarrier.wait(k_empty.index(ks), ((t // K_SLOTS) & 1) ^ 1)
            _load_unit(k_desc, k_full.index(ks), k_buf, ks, i_b, i_k, row_0, row_1, D, KV_BLOCK)
            tv = t + i * (MIXED & BRANCH)
            vs = tv % V_SLOTS
            mbarrier.wait(v_empty.index(vs), ((tv // V_SLOTS) & 1) ^ 1)
            _load_unit(v_desc, v_full.index(vs), v_buf, vs, i_b, i_k, row_0, row_1, D, KV_BLOCK)
            t += 1
            # As late as hides the answers: who draws early may hold two long lists while others have none.
            if j == gl.maximum(units - 4, 0):
                drawn = draw_work(WorkCounter)
            if j == gl.maximum(units - 2, 0):
                following = programs + read_work(drawn)
                count_following = count_of_item(lists, gl.minimum(following, items - 1), q_blocks, heads)
        if MIXED & BRANCH:
            _load_branch(branch_desc, v_full, v_empty, v_buf, t + i, i_q, i_b, i_h, D, KV_BLOCK, WARPGROUPS, V_SLOTS)
        item = following
        count = count_following
        i += 1
    for c in gl.static_range(WARPGROUPS):
        mbarrier.wait(q_empty.index(c), (i & 1) ^ 1)
    _write_note(note, -1, 0)
    for c in gl.static_range(WARPGROUPS):
        mbarrier.arrive(q_full.index(c), count=1)
    # a number was drawn for every block that was made; who drew the last one leaves the counter as it was
    if item == programs + items - 1:
        gl.store(WorkCounter, 0)


@jit
def _write_note(note, item, count):
    """Tell the consumers which query block is next (-1: none) and its count; they read it once q_full is complete."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    note.store(gl.where(gl.arange(0, 2, layout=LAYOUT) == 0, item, count))
    thread_barrier()  # one thread of the warp announces what all of them wrote


@jit
def _read_note(note):
    """-> item, count"""
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    pair = note.load(LAYOUT)
    first = gl.arange(0, 2, layout=LAYOUT) == 0
    return gl.sum(gl.where(first, pair, 0), 0), gl.sum(gl.where(first, 0, pair), 0)


@jit
def _clear_unit(v_full, v_buf, slot, parity, live_0, live_1, D: gl.constexpr, KV_BLOCK: gl.constexpr):
    """Wait for a unit of V and zero its rows past the valid keys."""
    PER: gl.constexpr = UNIT // KV_BLOCK
    mbarrier.wait(v_full.index(slot), parity)
    for p in gl.static_range(D // PANEL):
        place = (slot * (D // PANEL) + p) * PER
        clear_rows(v_buf.index(place), live_0, KV_BLOCK, gl.num_warps())
        if PER == 2:
            clear_rows(v_buf.index(place + 1), live_1, KV_BLOCK, gl.num_warps())
    fence_async_shared()


@jit
def _gate_rows(gate, i_b, i_h, row, rows, strides, ROW: gl.constexpr):
    """A gate of 64 rows from `row` on; 0 past the end.  gate [B, rows, H] by strides."""
    o_r = gl.arange(0, 64, layout=ROW)
    begin = gate + i_b.to(gl.int64) * strides[0] + i_h.to(gl.int64) * strides[2] + row.to(gl.int64) * strides[1]
    return gl.load(begin + o_r.to(gl.int64) * strides[1], mask=o_r < rows, other=0.0).to(gl.float32)


@jit
def _finish(out, lse, acc, m, l, branch, gate_branch, gate, rows, live, stride_om, MIXED: gl.constexpr, DTYPE: gl.constexpr,
            ROW_S: gl.constexpr, ROW_O: gl.constexpr):  # fmt: skip
    """Divide, mix and store: rows of the sequence, of which the first `live` are real queries; the others give 0 and -inf."""
    factor = reciprocal(l, ROW_O)
    if MIXED & GATE:
        factor = factor * gate
    acc = acc * gl.expand_dims(factor, 1)
    if MIXED & BRANCH:
        if MIXED & BRANCH_GATE:
            branch = branch * gl.expand_dims(gate_branch, 1)
        acc = acc + branch
    acc = gl.where(gl.expand_dims(gl.arange(0, 64, layout=ROW_O) >= live, 1), 0.0, acc)
    store_lse(lse, m, l, rows, live, ROW_S)
    store_accumulator(out, acc, rows, stride_om, DTYPE)


@jit
def _consume(note, rings, outs, lists, block_sizes, mix, sizes, scale, CID: gl.constexpr, D: gl.constexpr,
             KV_BLOCK: gl.constexpr, WARPGROUPS: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
             MASKED: gl.constexpr, SIZED: gl.constexpr, Q_SIZED: gl.constexpr, MIXED: gl.constexpr):  # fmt: skip
    """Consumer number CID: rows CID * 64 on of each query block of this program."""
    q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    Out, Lse, stride_ob, stride_om, stride_oh = outs
    Sizes, QuerySizes, stride_sb, stride_sh, stride_pb, stride_ph = block_sizes
    seq_q, seq_k, heads, q_blocks = sizes
    PER: gl.constexpr = UNIT // KV_BLOCK
    DTYPE: gl.constexpr = k_buf.dtype
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, UNIT, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, k_width=2)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, k_width=2)
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([UNIT, D], DTYPE)
    k_tiles = reinterpret(k_buf, DTYPE, [K_SLOTS, UNIT, D], TILE)
    v_tiles = reinterpret(v_buf, DTYPE, [V_SLOTS, UNIT, D], TILE)
    q_tiles = reinterpret(q_buf, DTYPE, [WARPGROUPS, 64, D], gl.NVMMASharedLayout.get_default_for([64, D], DTYPE))
    WHOLE: gl.constexpr = KV_BLOCK * 257 if PER == 2 else KV_BLOCK  # sizes of a unit's blocks, 8 bits each
    scale = scale * LOG2E
    nothing = gl.zeros([64, UNIT], gl.float32, S_LAYOUT)  # use_acc=False: never read
    i = 0  # query blocks that were begun
    first = 0  # the rings' position of this block's first unit
    mbarrier.wait(q_full.index(CID), 0)
    item, count = _read_note(note)
    while item >= 0:
        i_q, i_b, i_h = place_of_item(item, q_blocks, heads)
        index = list_of_item(lists, i_q, i_b, i_h)
        units, missing = units_of_list(count, PER)
        own_sizes = Sizes + i_b.to(gl.int64) * stride_sb + i_h.to(gl.int64) * stride_sh
        live_0 = live_of_entry(index, 0 - missing, count, own_sizes, seq_k, KV_BLOCK, MASKED, SIZED)
        live_1 = live_of_entry(index, 1 - missing, count, own_sizes, seq_k, KV_BLOCK, MASKED, SIZED) if PER == 2 else 0
        if MASKED:  # sizes are looked up one unit ahead, block numbers two
            lives = live_0 + live_1 * 256
            lives_next = live_keys(entry(index, PER - missing, count), own_sizes, seq_k, KV_BLOCK, SIZED)
            ahead_0 = entry(index, 2 * PER - missing, count)
            ahead_1 = ahead_0
            if PER == 2:
                lives_next += 256 * live_keys(entry(index, 3 - missing, count), own_sizes, seq_k, KV_BLOCK, SIZED)
                ahead_1 = entry(index, 5 - missing, count)
        m = gl.full([64], LOWEST, gl.float32, ROW_S)
        l = gl.zeros_like(quad_sums(nothing))
        acc = gl.zeros([64, D], gl.float32, O_LAYOUT)

        q = q_tiles.index(CID).load(Q_LAYOUT)
        ks = first % K_SLOTS
        first_v = first + i * (MIXED & BRANCH)
        vs = first_v % V_SLOTS
        v_parity = (first_v // V_SLOTS) & 1
        mbarrier.wait(k_full.index(ks), (first // K_SLOTS) & 1)
        s = wgmma(q, k_tiles.index(ks).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = wgmma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(ks), count=1)
        # Not before: a load from shared memory may be on its way still when its warp has passed a barrier, beside a busy
        # wgmma for long enough to see the next block's Q.  The product had to wait for it.
        mbarrier.arrive(q_empty.index(CID), count=1)
        s = cut_columns(s, live_0, live_1, KV_BLOCK)
        p, m, l, alpha = softmax_step(s, m, l, scale, P_LAYOUT, DTYPE)

        for j in range(1, units):
            t = first + j
            ks = t % K_SLOTS
            tv = first_v + j
            vs_next = tv % V_SLOTS
            if MASKED:
                if lives != WHOLE:
                    _clear_unit(v_full, v_buf, vs, v_parity, lives & 255, lives >> 8, D, KV_BLOCK)
                lives = lives_next
                lives_next = live_keys(ahead_0, own_sizes, seq_k, KV_BLOCK, SIZED)
                ahead_0 = entry(index, (j + 2) * PER - missing, count)
                if PER == 2:
                    lives_next += 256 * live_keys(ahead_1, own_sizes, seq_k, KV_BLOCK, SIZED)
                    ahead_1 = entry(index, (j + 2) * PER + 1 - missing, count)
            mbarrier.wait(k_full.index(ks), (t // K_SLOTS) & 1)
            s_flying = wgmma(q, k_tiles.index(ks).permute((1, 0)), nothing, use_acc=False, is_async=True)
            acc = rescale(acc, alpha, ROW_O)
            mbarrier.wait(v_full.index(vs), v_parity)
            o_flying = wgmma(p, v_tiles.index(vs), acc, is_async=True)
            s = wgmma_wait(1, deps=(s_flying,))
            mbarrier.arrive(k_empty.index(ks), count=1)
            if MASKED:
                if lives != WHOLE:
                    s = cut_columns(s, lives & 255, lives >> 8, KV_BLOCK)
            p_next, m, l, alpha = softmax_step(s, m, l, scale, P_LAYOUT, DTYPE)
            acc = wgmma_wait(0, deps=(o_flying,))
            mbarrier.arrive(v_empty.index(vs), count=1)
            p = p_next
            vs = vs_next
            v_parity = (tv // V_SLOTS) & 1

        if MASKED:
            if lives != WHOLE:
                _clear_unit(v_full, v_buf, vs, v_parity, lives & 255, lives >> 8, D, KV_BLOCK)
        row = i_q * (64 * WARPGROUPS) + CID * 64
        rows = seq_q - row
        gate_branch = l
        gate = l
        if MIXED & BRANCH_GATE:
            gate_branch = _gate_rows(mix[0], i_b, i_h, row, rows, mix[2:5], ROW_O)
        if MIXED & GATE:
            gate = _gate_rows(mix[1], i_b, i_h, row, rows, mix[5:8], ROW_O)
        acc = rescale(acc, alpha, ROW_O)
        mbarrier.wait(v_full.index(vs), v_parity)
        acc = wgmma(p, v_tiles.index(vs), acc, is_async=True)
        acc = wgmma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(vs), count=1)
        branch = acc
        if MIXED & BRANCH:
            bs = (first_v + units) % V_SLOTS
            mbarrier.wait(v_full.index(bs), ((first_v + units) // V_SLOTS) & 1)
            branch = v_tiles.index(bs).slice(CID * 64, 64).load(O_LAYOUT).to(gl.float32)
        live = rows
        if Q_SIZED:
            place = i_b.to(gl.int64) * stride_pb + i_h.to(gl.int64) * stride_ph + i_q
            live = gl.minimum(rows, gl.load(QuerySizes + place) - CID * 64)
        out = Out + i_b.to(gl.int64) * stride_ob + i_h.to(gl.int64) * stride_oh + row.to(gl.int64) * stride_om
        lse = Lse + (i_b.to(gl.int64) * heads + i_h) * seq_q + row
        _finish(out, lse, acc, m, l, branch, gate_branch, gate, rows, live, stride_om, MIXED, DTYPE, ROW_S, ROW_O)
        if MIXED & BRANCH:  # not before its values have been used: as with Q, a load may be on its way for long
            mbarrier.arrive(v_empty.index(bs), count=1)
        first += units
        i += 1
        mbarrier.wait(q_full.index(CID), i & 1)
        item, count = _read_note(note)


@jit(do_not_specialize=RUNTIME)
def sparse_forward_hopper(
    q_desc,
    k_desc,
    v_desc,
    branch_desc,
    Out,
    Lse,
    Index,
    Count,
    Sizes,
    QuerySizes,
    WorkCounter,
    GateB,
    Gate,
    scale,
    seq_q,
    seq_k,
    heads,
    group,
    q_blocks,
    items,
    stride_ob,
    stride_om,
    stride_oh,
    stride_ib,
    stride_ih,
    stride_iq,
    stride_cb,
    stride_ch,
    stride_sb,
    stride_sh,
    stride_pb,
    stride_ph,
    stride_yb,
    stride_ym,
    stride_yh,
    stride_zb,
    stride_zm,
    stride_zh,
    D: gl.constexpr,
    KV_BLOCK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    K_SLOTS: gl.constexpr,
    V_SLOTS: gl.constexpr,
    MASKED: gl.constexpr,
    SIZED: gl.constexpr,
    Q_SIZED: gl.constexpr,
    MIXED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """q_desc [B, H, Sq, D], k_desc, v_desc [B, H/group, Sk, D] with boxes [1, 1, 64 or KV_BLOCK, 64]; Out [B, Sq, H, D] by
    strides, Lse [B, H, Sq]; Index [B, H, Qb, cap], Count [B, H, Qb], Sizes [B, H, KVb] if SIZED, QuerySizes [B, H, Qb] if
    Q_SIZED, int32 (a stride of 0 broadcasts).  scale > 0; items = B * H * Qb.  Query blocks have 64 * WARPGROUPS rows.

    MIXED, the sum of BRANCH, BRANCH_GATE and GATE: GateB * branch is added to Gate times the result, before rounding; GateB, Gate
    [B, Sq, H] by strides y and z, branch_desc [B, H, Sq, D] with boxes [1, 1, KV_BLOCK, 64]."""
    PER: gl.constexpr = UNIT // KV_BLOCK
    PANELS: gl.constexpr = D // PANEL
    DTYPE: gl.constexpr = q_desc.dtype
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KV_BLOCK, PANEL], DTYPE)
    Q_BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, PANEL], DTYPE)
    q_buf = gl.allocate_shared_memory(DTYPE, [WARPGROUPS * PANELS, 64, PANEL], Q_BOX)
    k_buf = gl.allocate_shared_memory(DTYPE, [K_SLOTS * PANELS * PER, KV_BLOCK, PANEL], BOX)
    v_buf = gl.allocate_shared_memory(DTYPE, [V_SLOTS * PANELS * PER, KV_BLOCK, PANEL], BOX)
    note = gl.allocate_shared_memory(gl.int32, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = barriers(WARPGROUPS, 1)
    q_empty = barriers(WARPGROUPS, 1)
    k_full = barriers(K_SLOTS, 1)
    k_empty = barriers(K_SLOTS, WARPGROUPS)
    v_full = barriers(V_SLOTS, 1)
    v_empty = barriers(V_SLOTS, WARPGROUPS)
    fence_async_shared()
    rings = (q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    lists = (Index, Count, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch)
    outs = (Out, Lse, stride_ob, stride_om, stride_oh)
    block_sizes = (Sizes, QuerySizes, stride_sb, stride_sh, stride_pb, stride_ph)
    mix = (GateB, Gate, stride_yb, stride_ym, stride_yh, stride_zb, stride_zm, stride_zh)
    sizes = (seq_q, seq_k, heads, q_blocks)
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (_consume, (note, rings, outs, lists, block_sizes, mix, sizes, scale,
                        0, D, KV_BLOCK, WARPGROUPS, K_SLOTS, V_SLOTS, MASKED, SIZED, Q_SIZED, MIXED)),
            (_produce, (q_desc, k_desc, v_desc, branch_desc, WorkCounter, note, rings, lists, sizes, group, items,
                        D, KV_BLOCK, WARPGROUPS, K_SLOTS, V_SLOTS, MIXED)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (note, rings, outs, lists, block_sizes, mix, sizes, scale,
                        0, D, KV_BLOCK, WARPGROUPS, K_SLOTS, V_SLOTS, MASKED, SIZED, Q_SIZED, MIXED)),
            (_consume, (note, rings, outs, lists, block_sizes, mix, sizes, scale,
                        1, D, KV_BLOCK, WARPGROUPS, K_SLOTS, V_SLOTS, MASKED, SIZED, Q_SIZED, MIXED)),
            (_produce, (q_desc, k_desc, v_desc, branch_desc, WorkCounter, note, rings, lists, sizes, group, items,
                        D, KV_BLOCK, WARPGROUPS, K_SLOTS, V_SLOTS, MIXED)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip

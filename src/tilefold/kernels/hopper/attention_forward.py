"""Dense attention forward on sm_90: full, causal or within a window, any lengths, query heads in groups.

A block of 128 queries is folded by two warpgroups, 64 rows each, over tiles of 128 keys that both read:

    producer    1 warp     brings Q, and K and V tile by tile into rings of buffers, each with two barriers: `full` and `empty`
    consumers   4 warps    S = Q K^T, the softmax step, O += P V, of one tile after the other

What a consumer has in flight, tile by tile:   issue S'  |  issue O += P V  |  wait for S'  |  its softmax  |  wait for O

so that the exponentials of one tile run beside the products of the one before, and, as the two warpgroups take turns by
themselves, beside the other's products.  As many programs as the device has SMs draw their blocks from a counter, those with the
most keys of a head first: the long ones begin early, and neighbours read the same K and V.

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), sections 3.1 and 3.2.
"""

from .gluon import (
    barriers,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    opaque,
    reinterpret,
    schedule_fence,
    wgmma,
    wgmma_wait,
)
from .parts import (
    LOG2E,
    LOWEST,
    PANEL,
    columns_of,
    draw_ticket,
    load_rows,
    place_of_item,
    quad_sums,
    read_ticket,
    reciprocal,
    rescale,
    softmax_step,
    store_accumulator,
    store_lse,
)

ROWS = gl.constexpr(128)  # queries of a block
KEYS = gl.constexpr(128)  # of a tile
FULL = gl.constexpr(0)
CAUSAL = gl.constexpr(1)
WINDOW = gl.constexpr(2)
RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_blocks", "items", "left", "right", "stride_ob", "stride_om",
           "stride_oh"]  # fmt: skip


@jit
def _block_of_item(item, q_blocks, heads):
    """-> query block, batch entry, head: the last query blocks of a head come first."""
    i_q, i_b, i_h = place_of_item(item, q_blocks, heads)
    return q_blocks - 1 - i_q, i_b, i_h


@jit
def _range_of_block(i_q, seq_q, seq_k, left, right, KIND: gl.constexpr):
    """-> first tile and number of tiles of keys that some query of the block sees; at least one, be it all masked."""
    shift = seq_k - seq_q
    end = seq_k
    begin = 0
    if KIND != FULL:
        last = gl.minimum((i_q + 1) * ROWS, seq_q) - 1
        end = gl.minimum(seq_k, last + shift + 1 + (right if KIND == WINDOW else 0))
    if KIND == WINDOW:
        begin = gl.maximum(i_q * ROWS + shift - left, 0)
    first = gl.minimum(begin, seq_k) // KEYS
    return first, gl.maximum((end + KEYS - 1) // KEYS - first, 1)


@jit
def _produce(q_desc, k_desc, v_desc, Tickets, note, rings, sizes, group, items, KIND: gl.constexpr, D: gl.constexpr,
             SLOTS: gl.constexpr):  # fmt: skip
    """The producer: chooses the query blocks and makes every load, in the order in which the consumers need them."""
    q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    seq_q, seq_k, heads, q_blocks, left, right = sizes
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    programs = gl.num_programs(0)
    item = gl.program_id(0)
    following = items
    drawn = 0
    i = 0  # query blocks that were begun
    t = 0  # tiles that were loaded: position in the rings
    while item < items:
        i_q, i_b, i_h = _block_of_item(item, q_blocks, heads)
        first, tiles = _range_of_block(i_q, seq_q, seq_k, left, right, KIND)
        for c in gl.static_range(2):
            mbarrier.wait(q_empty.index(c), (i & 1) ^ 1)
        note.store(gl.full([1], item, gl.int32, LAYOUT))
        for c in gl.static_range(2):
            load_rows(q_desc, q_full.index(c), q_buf, c, i_b, i_h, i_q * ROWS + c * 64, 64, D)
        i_k = i_h // group
        for j in range(tiles):
            slot = t % SLOTS
            parity = ((t // SLOTS) & 1) ^ 1
            row = (first + j) * KEYS
            mbarrier.wait(k_empty.index(slot), parity)
            load_rows(k_desc, k_full.index(slot), k_buf, slot, i_b, i_k, row, KEYS, D)
            mbarrier.wait(v_empty.index(slot), parity)
            load_rows(v_desc, v_full.index(slot), v_buf, slot, i_b, i_k, row, KEYS, D)
            t += 1
            # As late as hides the answers: who draws early may hold two long blocks while others have none.
            if j == gl.maximum(tiles - 4, 0):
                drawn = draw_ticket(Tickets)
            if j == gl.maximum(tiles - 2, 0):
                following = programs + read_ticket(drawn)
        item = following
        i += 1
    for c in gl.static_range(2):
        mbarrier.wait(q_empty.index(c), (i & 1) ^ 1)
    note.store(gl.full([1], -1, gl.int32, LAYOUT))
    for c in gl.static_range(2):
        mbarrier.arrive(q_full.index(c), count=1)
    # a number was drawn for every block that was made; who drew the last one leaves the counter as it was
    if item == programs + items - 1:
        gl.store(Tickets, 0)


@jit
def _cut(s, row, begin, shift, seq_k, left, right, KIND: gl.constexpr):
    """Scores [64, 128] of queries from `row` on and keys from `begin` on, -inf where the query does not see the key."""
    parts = s.reshape([64, 16, 4, 2])
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout)))
    query = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 64, layout=ROW), 1), 2), 3) + row
    group, rest = columns_of(parts)
    if KIND == FULL:
        live = group * 8 < opaque(seq_k - begin - rest)
    else:
        own = query + shift  # the key at the query's own place
        end = gl.minimum(own + (right + 1 if KIND == WINDOW else 1), seq_k)
        live = group * 8 < opaque(end - begin - rest)
        if KIND == WINDOW:
            live = live & (group * 8 >= opaque(own - left - begin - rest))
    return gl.convert_layout(gl.where(live, parts, float("-inf")).reshape(s.shape), s.type.layout)


@jit
def _cut_if_needed(s, row, begin, shift, seq_k, left, right, KIND: gl.constexpr):
    """_cut, where some of the 64 queries does not see some key of the tile."""
    end = seq_k
    if KIND != FULL:
        end = gl.minimum(seq_k, row + shift + 1 + (right if KIND == WINDOW else 0))
    needed = begin + KEYS > end
    if KIND == WINDOW:
        needed = needed | (begin < row + 63 + shift - left)
    if needed:
        s = _cut(s, row, begin, shift, seq_k, left, right, KIND)
    return s


@jit
def _consume(
    note, rings, outs, sizes, scale,
    CID: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    """Consumer number CID: rows CID * 64 on of each query block of this program."""
    q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    Out, Lse, stride_ob, stride_om, stride_oh = outs
    seq_q, seq_k, heads, q_blocks, left, right = sizes
    DTYPE: gl.constexpr = k_buf.dtype
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, k_width=2)
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    NOTE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)
    k_tiles = reinterpret(k_buf, DTYPE, [SLOTS, KEYS, D], TILE)
    v_tiles = reinterpret(v_buf, DTYPE, [SLOTS, KEYS, D], TILE)
    q = reinterpret(q_buf, DTYPE, [2, 64, D], gl.NVMMASharedLayout.get_default_for([64, D], DTYPE)).index(CID)
    scale = scale * LOG2E
    shift = seq_k - seq_q
    nothing = gl.zeros([64, KEYS], gl.float32, S_LAYOUT)  # use_acc=False: never read
    i = 0  # query blocks that were begun
    t = 0  # the rings' position
    mbarrier.wait(q_full.index(CID), 0)
    item = gl.sum(note.load(NOTE), 0)
    while item >= 0:
        i_q, i_b, i_h = _block_of_item(item, q_blocks, heads)
        first, tiles = _range_of_block(i_q, seq_q, seq_k, left, right, KIND)
        row = i_q * ROWS + CID * 64
        m = gl.full([64], LOWEST, gl.float32, ROW_S)
        l = gl.zeros_like(quad_sums(nothing))
        acc = gl.zeros([64, D], gl.float32, O_LAYOUT)
        slot = t % SLOTS
        parity = (t // SLOTS) & 1
        mbarrier.wait(k_full.index(slot), parity)
        s = wgmma(q, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = wgmma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        s = _cut_if_needed(s, row, first * KEYS, shift, seq_k, left, right, KIND)
        p, m, l, alpha = softmax_step(s, m, l, scale, P_LAYOUT, DTYPE)
        for j in range(1, tiles):
            t += 1
            ahead = t % SLOTS
            ahead_parity = (t // SLOTS) & 1
            mbarrier.wait(k_full.index(ahead), ahead_parity)
            s_flying = wgmma(q, k_tiles.index(ahead).permute((1, 0)), nothing, use_acc=False, is_async=True)
            acc = rescale(acc, alpha, ROW_O)
            mbarrier.wait(v_full.index(slot), parity)
            o_flying = wgmma(p, v_tiles.index(slot), acc, is_async=True)
            s = wgmma_wait(1, deps=(s_flying,))
            mbarrier.arrive(k_empty.index(ahead), count=1)
            s = _cut_if_needed(s, row, (first + j) * KEYS, shift, seq_k, left, right, KIND)
            p_next, m, l, alpha = softmax_step(s, m, l, scale, P_LAYOUT, DTYPE)
            if FENCE:
                l = schedule_fence(l)
            acc = wgmma_wait(0, deps=(o_flying,))
            mbarrier.arrive(v_empty.index(slot), count=1)
            p = p_next
            slot = ahead
            parity = ahead_parity
        # every product of this block with Q has been waited for
        mbarrier.arrive(q_empty.index(CID), count=1)
        acc = rescale(acc, alpha, ROW_O)
        mbarrier.wait(v_full.index(slot), parity)
        acc = wgmma(p, v_tiles.index(slot), acc, is_async=True)
        acc = wgmma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(slot), count=1)
        rows = seq_q - row
        b, h = i_b.to(gl.int64), i_h.to(gl.int64)
        store_lse(Lse + (b * heads + i_h) * seq_q + row, m, l, rows, rows, ROW_S)
        acc = acc * gl.expand_dims(reciprocal(l, ROW_O), 1)
        store_accumulator(
            Out + b * stride_ob + h * stride_oh + row.to(gl.int64) * stride_om, acc, rows, stride_om, DTYPE
        )
        t += 1
        i += 1
        mbarrier.wait(q_full.index(CID), i & 1)
        item = gl.sum(note.load(NOTE), 0)


@jit(do_not_specialize=RUNTIME)
def attention_forward_hopper(
    q_desc, k_desc, v_desc, Out, Lse, Tickets,
    scale, seq_q, seq_k, heads, group, q_blocks, items, left, right, stride_ob, stride_om, stride_oh,
    KIND: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, FENCE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_desc [B, H, Sq, D] with boxes [1, 1, 64, 64], k_desc, v_desc [B, H/group, Sk, D] with boxes [1, 1, 128, 64]; Out
    [B, Sq, H, D] by strides, Lse [B, H, Sq]; Tickets [1] int32: 0.  scale > 0; items = B * H * q_blocks, q_blocks of 128 queries.
    KIND: FULL, CAUSAL or WINDOW (left, right: keys on either side of a query's own place).  Grid (min(items, SMs),)."""
    PANELS: gl.constexpr = D // PANEL
    DTYPE: gl.constexpr = q_desc.dtype
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, PANEL], DTYPE)
    q_buf = gl.allocate_shared_memory(
        DTYPE, [2 * PANELS, 64, PANEL], gl.NVMMASharedLayout.get_default_for([64, PANEL], DTYPE)
    )
    k_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, KEYS, PANEL], BOX)
    v_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, KEYS, PANEL], BOX)
    note = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = barriers(2, 1)
    q_empty = barriers(2, 1)
    k_full = barriers(SLOTS, 1)
    k_empty = barriers(SLOTS, 2)
    v_full = barriers(SLOTS, 1)
    v_empty = barriers(SLOTS, 2)
    fence_async_shared()
    rings = (q_buf, k_buf, v_buf, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    outs = (Out, Lse, stride_ob, stride_om, stride_oh)
    sizes = (seq_q, seq_k, heads, q_blocks, left, right)
    gl.warp_specialize([
        (_consume, (note, rings, outs, sizes, scale, 0, KIND, D, SLOTS, FENCE)),
        (_consume, (note, rings, outs, sizes, scale, 1, KIND, D, SLOTS, FENCE)),
        (_produce, (q_desc, k_desc, v_desc, Tickets, note, rings, sizes, group, items, KIND, D, SLOTS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip

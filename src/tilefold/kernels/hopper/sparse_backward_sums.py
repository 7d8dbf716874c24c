"""dq of block-sparse attention on sm_90 from a dS that was kept: dq = scale * sum over the list of dS K.

    producer   1 warp    brings K and dS of one listed pair of blocks after the other
    consumer   4 warps   one product a pair, the next one issued before the last is waited for

sparse_backward_keys made dS while it made dk and dv, transposed and at the place in memory that the pair has in the query block's
list.  A pair moves 24 KB for a product of 1 MFLOP, so the way from L2 is the bound: what counts here is how much is in flight, and
several programs share an SM.  The order of the sum is the list's: the same bits in every run.
"""

from .backward_parts import BLOCK, PANEL, clear_tile, load_tile, next_slot
from .gluon import barriers, fence_async_shared, gl, jit, mbarrier, opaque, reinterpret, tma_load, wgmma, wgmma_wait
from .parts import list_of_block, place_of_item, store_accumulator

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "q_blocks", "first_row", "capacity", "stride_gb", "stride_gm",
           "stride_gh", "stride_ib", "stride_ih", "stride_iq", "stride_cb", "stride_ch", "stride_sb", "stride_sh"]  # fmt: skip


@jit
def _produce(k_desc, keep_desc, k_buf, ds_buf, full, empty, lists, work, D: gl.constexpr, SLOTS: gl.constexpr):
    """The producer: K and dS of every entry of the list."""
    heads, group, q_blocks, first_row, capacity = work
    item = gl.program_id(0)
    i_m, i_b, i_h = place_of_item(item + first_row * q_blocks, q_blocks, heads)
    index, count, _ = list_of_block(lists, i_m, i_b, i_h, 1)
    i_k = i_h // group
    slot = 0
    parity = 1
    ahead = gl.load(index)
    for j in range(count):
        block = ahead
        ahead = gl.load(index + gl.minimum(j + 1, count - 1))
        mbarrier.wait(empty.index(slot), parity)
        mbarrier.expect(full.index(slot), BLOCK * (D + BLOCK) * 2)
        tma_load(keep_desc, [(item * capacity + j) * BLOCK, 0], full.index(slot), ds_buf.index(slot))
        load_tile(k_desc, full.index(slot), k_buf, slot, i_b, i_k, block * BLOCK, D)
        slot, parity = next_slot(slot, parity, SLOTS)


@jit
def _consume(DQ, Sizes, k_buf, ds_buf, full, empty, lists, work, outs, size_strides, scale, seq_q,
             D: gl.constexpr, SLOTS: gl.constexpr, SIZED: gl.constexpr):  # fmt: skip
    """The consumer: 64 rows of dq.  The buffers of a product are free when the next one has been issued and this one waited for."""
    heads, group, q_blocks, first_row, capacity = work
    stride_gb, stride_gm, stride_gh = outs
    stride_sb, stride_sh = size_strides
    DTYPE: gl.constexpr = k_buf.dtype
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    k_tiles = reinterpret(k_buf, DTYPE, [SLOTS, BLOCK, D], gl.NVMMASharedLayout.get_default_for([BLOCK, D], DTYPE))
    i_m, i_b, i_h = place_of_item(gl.program_id(0) + first_row * q_blocks, q_blocks, heads)
    index, count, _ = list_of_block(lists, i_m, i_b, i_h, 1)
    sizes = Sizes + i_b.to(gl.int64) * stride_sb + i_h.to(gl.int64) * stride_sh
    dq = opaque(gl.zeros([BLOCK, D], gl.float32, D_LAYOUT))
    slot = 0
    parity = 0
    before = 0
    for j in range(count):
        mbarrier.wait(full.index(slot), parity)
        if SIZED:
            live = gl.load(sizes + gl.load(index + j))
            if live < BLOCK:
                clear_tile(k_buf, slot, live, D)
        dq = wgmma(ds_buf.index(slot).permute((1, 0)), k_tiles.index(slot), dq, is_async=True)
        dq = wgmma_wait(1, deps=(dq,))
        mbarrier.arrive(empty.index(before), count=1, pred=j > 0)
        before = slot
        slot, parity = next_slot(slot, parity, SLOTS)
    dq = wgmma_wait(0, deps=(dq,))
    row = i_m * BLOCK
    out = DQ + i_b.to(gl.int64) * stride_gb + i_h.to(gl.int64) * stride_gh + row.to(gl.int64) * stride_gm
    store_accumulator(out, dq * scale, seq_q - row, stride_gm, DTYPE)


@jit(do_not_specialize=RUNTIME)
def sparse_backward_sums_hopper(
    k_desc, keep_desc, DQ, Index, Count, Sizes,
    scale, seq_q, heads, group, q_blocks, first_row, capacity,
    stride_gb, stride_gm, stride_gh, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_sb, stride_sh,
    D: gl.constexpr, SLOTS: gl.constexpr, SIZED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """k_desc [B, H/group, Sk, D], box [1, 1, 64, 64]; keep_desc [heads of this launch * Qb * cap * 64, 64], box [64, 64]: dS, a
    tile [64 keys, 64 queries] for each place of a list; DQ [B, Sq, H, D] by strides; Index [B, H, Qb, cap], Count [B, H, Qb],
    Sizes [B, H, KVb] if SIZED, int32.  Grid (heads of this launch * Qb,), beginning with head number `first_row` (of B * H)."""
    DTYPE: gl.constexpr = k_desc.dtype
    PANELS: gl.constexpr = D // PANEL
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, PANEL], DTYPE)
    k_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, BLOCK, PANEL], BOX)
    ds_buf = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK, BLOCK], BOX)
    full = barriers(SLOTS, 1)
    empty = barriers(SLOTS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (DQ, Sizes, k_buf, ds_buf, full, empty, (Index, Count, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch),
                    (heads, group, q_blocks, first_row, capacity), (stride_gb, stride_gm, stride_gh), (stride_sb, stride_sh),
                    scale, seq_q, D, SLOTS, SIZED)),
        (_produce, (k_desc, keep_desc, k_buf, ds_buf, full, empty,
                    (Index, Count, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch),
                    (heads, group, q_blocks, first_row, capacity), D, SLOTS)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip

"""Products with weights of few bits on sm_90 for many rows: weights are dequantised in registers, the left operand of wgmma.

A program makes CONSUMERS * 64 rows of W times BLOCK_M rows of x, over `each` blocks of K:

    producer    1 warp     brings the planes' tiles, and panels of 64 columns of x that all consumers read, into two rings
    consumers   4 warps    64 rows of W: elements to registers, unpack, subtract, scale; products with the panels

A consumer unpacks the next panel's weights beside the product of the one before; the two of them fill the tensor cores in turn.
Values are those of the dequantised weight in x's dtype.
"""

from .gluon import barriers, begin_early, fence_async_shared, gl, jit, mbarrier, prefetch, tma_load, wgmma, wgmma_wait
from .lowbit_parts import joined_sum, middle, shift_high, unpack, zero_terms

RUNTIME = ["M", "N", "rows", "group", "groups", "blocks", "each"]


@jit
def _produce(w_desc, h_desc, x_desc, rings, row, token, first, end, rows, HIGH: gl.constexpr, PANELS: gl.constexpr,
             BLOCK_M: gl.constexpr, W_SLOTS: gl.constexpr, X_SLOTS: gl.constexpr, CONSUMERS: gl.constexpr):  # fmt: skip
    """Make every load, in the order in which the consumers need them."""
    w_buf, h_buf, x_buf, w_full, w_empty, x_full, x_empty = rings
    t = 0
    for block in range(first, end):
        i = block - first
        slot = i % W_SLOTS
        mbarrier.wait(w_empty.index(slot), ((i // W_SLOTS) & 1) ^ 1)
        mbarrier.expect(w_full.index(slot), CONSUMERS * 64 * 64 * (2 if HIGH else 1))
        for c in gl.static_range(CONSUMERS):
            tma_load(w_desc, [block * rows + row + c * 64, 0], w_full.index(slot), w_buf.index(slot * CONSUMERS + c))
            if HIGH:
                place = [(block // 2) * rows + row + c * 64, 0]
                tma_load(h_desc, place, w_full.index(slot), h_buf.index(slot * CONSUMERS + c))
        for p in gl.static_range(PANELS):
            slot = t % X_SLOTS
            mbarrier.wait(x_empty.index(slot), ((t // X_SLOTS) & 1) ^ 1)
            mbarrier.expect(x_full.index(slot), BLOCK_M * 128)
            tma_load(x_desc, [token, (block * PANELS + p) * 64], x_full.index(slot), x_buf.index(slot))
            t += 1


@jit
def _side_by_side(a, b, LAYOUT: gl.constexpr):
    """[R, 32] and [R, 32] -> [R, 64]."""
    both = gl.join(a, b).permute([0, 2, 1]).reshape([a.shape[0], 64])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@jit
def _load_terms(Scales, Zeros, o_n, m_n, block, group, groups, stride_sg, CHUNK: gl.constexpr, SLABS: gl.constexpr):
    """Scales, and zeros if any, of each chunk of a block: a tuple."""
    made = ()
    for c in gl.static_range(SLABS // CHUNK):
        i_g = gl.minimum((block * (SLABS * 32) + c * CHUNK * 32) // group, groups - 1).to(gl.int64)
        made = made + (gl.load(Scales + i_g * stride_sg + o_n, mask=m_n, other=0.0),)
        if Zeros is not None:
            made = made + (gl.load(Zeros + i_g * stride_sg + o_n, mask=m_n, other=0),)
    return made


@jit
def _panel(low, high, terms, P: gl.constexpr, BITS: gl.constexpr, CHUNK: gl.constexpr, ZEROS: gl.constexpr, LAYOUT: gl.constexpr,
           DTYPE: gl.constexpr):  # fmt: skip
    """Weights [64, 64] of panel P of a block."""
    EACH: gl.constexpr = 2 if ZEROS else 1
    parts = ()
    for j in gl.static_range(2):
        scales = gl.expand_dims(terms[EACH * ((2 * P + j) // CHUNK)], 1).broadcast_to(low.shape)
        if ZEROS:
            z = zero_terms(terms[EACH * ((2 * P + j) // CHUNK) + 1].to(gl.float32), BITS, DTYPE)
            zeros = gl.expand_dims(z, 1).broadcast_to(low.shape)
        else:
            zeros = gl.full(low.shape, middle(BITS, DTYPE), DTYPE, LAYOUT)
        parts = parts + (unpack(low, high, zeros, scales, 2 * P + j, BITS, True, DTYPE),)
    return _side_by_side(parts[0], parts[1], LAYOUT)


@jit
def _consume(rings, sources, outs, sizes, row, token, item, first, end, i_k, splits, CID: gl.constexpr, BITS: gl.constexpr,
             CHUNK: gl.constexpr, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, W_SLOTS: gl.constexpr, X_SLOTS: gl.constexpr,
             CONSUMERS: gl.constexpr):  # fmt: skip
    """Consumer number CID: rows CID * 64 on of this program's tile."""
    w_buf, h_buf, x_buf, w_full, w_empty, x_full, x_empty = rings
    Scales, Zeros, stride_sg, stride_sn, group, groups = sources
    Out, Bias, Part, Arrived, stride_om = outs
    M, N = sizes
    DTYPE: gl.constexpr = x_buf.dtype
    SLABS: gl.constexpr = 8 if BITS == 3 else 16 // BITS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, k_width=2)
    ROW_A: gl.constexpr = gl.SliceLayout(1, A)
    ZEROS: gl.constexpr = Zeros is not None
    o_n = row + CID * 64 + gl.arange(0, 64, ROW_A)
    m_n = o_n < N
    o_s = o_n.to(gl.int64) * stride_sn
    terms = _load_terms(Scales, Zeros, o_s, m_n, first, group, groups, stride_sg, CHUNK, SLABS)
    acc = gl.zeros([64, BLOCK_M], gl.float32, ACC)
    t = 0
    for block in range(first, end):
        i = block - first
        slot = i % W_SLOTS
        mbarrier.wait(w_full.index(slot), (i // W_SLOTS) & 1)
        low = w_buf.index(slot * CONSUMERS + CID).load(A)
        high = low
        if BITS == 3:
            high = h_buf.index(slot * CONSUMERS + CID).load(A)
            high = shift_high(high, gl.full([64, 32], 0, gl.int16, A) + (8 * (block & 1)).to(gl.int16))
        mbarrier.arrive(w_empty.index(slot), count=1)
        following = _load_terms(Scales, Zeros, o_s, m_n, block + 1, group, groups, stride_sg, CHUNK, SLABS)
        w = _panel(low, high, terms, 0, BITS, CHUNK, ZEROS, A, DTYPE)
        for p in gl.static_range(SLABS // 2):
            x_slot = t % X_SLOTS
            mbarrier.wait(x_full.index(x_slot), (t // X_SLOTS) & 1)
            flying = wgmma(w, x_buf.index(x_slot).permute((1, 0)), acc, is_async=True)
            if p + 1 < SLABS // 2:
                ahead = _panel(low, high, terms, p + 1, BITS, CHUNK, ZEROS, A, DTYPE)
            else:
                ahead = w
            acc = wgmma_wait(0, deps=(flying,))
            mbarrier.arrive(x_empty.index(x_slot), count=1)
            w = ahead
            t += 1
        terms = following
    o_n = row + CID * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    o_m = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, ACC))
    inside = (o_n < N)[:, None] & (o_m < M)[None, :]
    place = o_m[None, :].to(gl.int64) * N + o_n[:, None]
    size = M.to(gl.int64) * N
    acc, last = joined_sum(acc, Part, Arrived, item * CONSUMERS + CID, i_k, place, inside, size, SPLITS)
    if last:
        if Bias is not None:
            acc += gl.load(Bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
        gl.store(Out + o_m[None, :].to(gl.int64) * stride_om + o_n[:, None], acc.to(DTYPE), mask=inside)


@jit(do_not_specialize=RUNTIME)
def lowbit_matmul_hopper(
    x_desc, w_desc, h_desc, Packed, Scales, Zeros, Bias, Out, Part, Arrived, M, N, rows, group, groups, blocks, each, stride_sg,
    stride_sn, stride_om, BITS: gl.constexpr, CHUNK: gl.constexpr, SPLITS: gl.constexpr, EARLY: gl.constexpr,
    BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr, W_SLOTS: gl.constexpr, X_SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """x_desc [M, K] with boxes [BLOCK_M, 64], w_desc, h_desc (3 bits) planes as int16 [blocks * rows, 32] with boxes [64, 32],
    Packed the plane itself; Scales (in x's dtype), Zeros (uint8 or None) by strides g, n; Out [M, N].
    CHUNK: slabs that share a scale.  Grid (cdiv(M, BLOCK_M) * cdiv(N, CONSUMERS * 64), splits), rows of x fastest; a split makes
    `each` blocks.  Part [splits, M, N] fp32, Arrived int32 zeros, CONSUMERS an item.
    EARLY: a dependent launch.  AHEAD: blocks that a program asks for at once, into the L2 cache, at most 128."""
    DTYPE: gl.constexpr = x_desc.dtype
    SLABS: gl.constexpr = 8 if BITS == 3 else 16 // BITS
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    W_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    tiles_m = gl.cdiv(M, BLOCK_M)
    item, i_k = gl.program_id(0), gl.program_id(1)
    row = (item // tiles_m) * (CONSUMERS * 64)
    token = (item % tiles_m) * BLOCK_M
    first = i_k * each
    end = gl.minimum(first + each, blocks)
    if AHEAD:
        i_b = first + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        wanted = (i_b < gl.minimum(end, first + AHEAD)).to(gl.int32)
        last_row = gl.minimum(row, rows - 64)
        place = (Packed + (i_b.to(gl.int64) * rows + last_row) * 16).to(gl.int64, bitcast=True)
        prefetch(place, wanted, 64 * 64)
        if CONSUMERS == 2:
            place = (Packed + (i_b.to(gl.int64) * rows + gl.minimum(row + 64, rows - 64)) * 16).to(
                gl.int64, bitcast=True
            )
            prefetch(place, wanted, 64 * 64)
    begin_early(EARLY)
    w_buf = gl.allocate_shared_memory(gl.int16, [W_SLOTS * CONSUMERS, 64, 32], W_SHARED)
    h_buf = w_buf
    if BITS == 3:
        h_buf = gl.allocate_shared_memory(gl.int16, [W_SLOTS * CONSUMERS, 64, 32], W_SHARED)
    x_buf = gl.allocate_shared_memory(DTYPE, [X_SLOTS, BLOCK_M, 64], X_SHARED)
    w_full = barriers(W_SLOTS, 1)
    w_empty = barriers(W_SLOTS, CONSUMERS)
    x_full = barriers(X_SLOTS, 1)
    x_empty = barriers(X_SLOTS, CONSUMERS)
    fence_async_shared()
    rings = (w_buf, h_buf, x_buf, w_full, w_empty, x_full, x_empty)
    sources = (Scales, Zeros, stride_sg, stride_sn, group, groups)
    outs = (Out, Bias, Part, Arrived, stride_om)
    sizes = (M, N)
    splits = gl.num_programs(1)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (rings, sources, outs, sizes, row, token, item, first, end, i_k, splits, 0, BITS, CHUNK, SPLITS, BLOCK_M,
                        W_SLOTS, X_SLOTS, CONSUMERS)),
            (_consume, (rings, sources, outs, sizes, row, token, item, first, end, i_k, splits, 1, BITS, CHUNK, SPLITS, BLOCK_M,
                        W_SLOTS, X_SLOTS, CONSUMERS)),
            (_produce, (w_desc, h_desc, x_desc, rings, row, token, first, end, rows, BITS == 3, SLABS // 2, BLOCK_M, W_SLOTS,
                        X_SLOTS, CONSUMERS)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (rings, sources, outs, sizes, row, token, item, first, end, i_k, splits, 0, BITS, CHUNK, SPLITS, BLOCK_M,
                        W_SLOTS, X_SLOTS, CONSUMERS)),
            (_produce, (w_desc, h_desc, x_desc, rings, row, token, first, end, rows, BITS == 3, SLABS // 2, BLOCK_M, W_SLOTS,
                        X_SLOTS, CONSUMERS)),
        ], [1], [24])  # fmt: skip

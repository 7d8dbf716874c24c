"""Products with weights of few bits on sm_90 for many rows: weights are dequantised in registers, the left operand of wgmma.

A program makes CONSUMERS * 64 rows of W times BLOCK_M rows of x, over `each` blocks of K:

    producer    1 warp     brings blocks into a ring: the planes' tiles, and panels of 64 columns of x that all consumers
                           read
    consumers   4 warps    64 rows of W: elements to registers, unpack, subtract, scale; products with the panels

A consumer unpacks the next panel's weights beside the product of the one before; the others' products fill the tensor cores
meanwhile.  Values are those of the dequantised weight in x's dtype.
"""

from .gluon import (
    barriers,
    fence_async_shared,
    gl,
    jit,
    let_next_start,
    mbarrier,
    tma_load,
    wait_for_previous,
    wgmma,
    wgmma_wait,
)
from .lowbit_parts import joined_sum, middle, shift_high, unpack, zero_terms

RUNTIME = ["M", "group", "groups", "blocks", "each"]


@jit
def _produce(given, BITS: gl.constexpr, PANELS: gl.constexpr, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr,
             CONSUMERS: gl.constexpr):  # fmt: skip
    """Make every load.  A slot of the ring is a block; its panels have barriers of their own, the planes come with the first."""
    w_desc, h_desc, x_desc, rings, row, token, first, end, rows = given
    w_buf, h_buf, x_buf, full, empty = rings
    PLANES: gl.constexpr = 2 if BITS == 3 else 1
    for block in range(first, end):
        i = block - first
        slot = i % SLOTS
        for p in gl.static_range(PANELS):
            place = slot * PANELS + p
            mbarrier.wait(empty.index(place), ((i // SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(place), BLOCK_M * 128 + (CONSUMERS * 64 * 64 * PLANES if p == 0 else 0))
            if p == 0:
                for c in gl.static_range(CONSUMERS):
                    mine = row + c * 64
                    tma_load(w_desc, [block * rows + mine, 0], full.index(place), w_buf.index(slot * CONSUMERS + c))
                    if BITS == 3:
                        high = h_buf.index(slot * CONSUMERS + c)
                        tma_load(h_desc, [(block // 2) * rows + mine, 0], full.index(place), high)
            tma_load(x_desc, [token, (block * PANELS + p) * 64], full.index(place), x_buf.index(place))


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
def _consume(given, CID: gl.constexpr, BITS: gl.constexpr, CHUNK: gl.constexpr, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr,
             SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """Consumer number CID: rows CID * 64 on of this program's tile."""
    rings, sources, outs, sizes, row, token, item, first, end, i_k = given
    w_buf, h_buf, x_buf, full, empty = rings
    Scales, Zeros, stride_sg, stride_sn, group, groups = sources
    M, N = sizes
    DTYPE: gl.constexpr = x_buf.dtype
    SLABS: gl.constexpr = 8 if BITS == 3 else 16 // BITS
    PANELS: gl.constexpr = SLABS // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, k_width=2)
    ZEROS: gl.constexpr = Zeros is not None
    o_n = row + CID * 64 + gl.arange(0, 64, gl.SliceLayout(1, A))
    m_n = o_n < N
    o_s = o_n.to(gl.int64) * stride_sn
    terms = _load_terms(Scales, Zeros, o_s, m_n, first, group, groups, stride_sg, CHUNK, SLABS)
    acc = gl.zeros([64, BLOCK_M], gl.float32, ACC)
    for block in range(first, end):
        i = block - first
        slot = i % SLOTS
        if CONSUMERS == 4:
            terms = _load_terms(Scales, Zeros, o_s, m_n, block, group, groups, stride_sg, CHUNK, SLABS)
        mbarrier.wait(full.index(slot * PANELS), (i // SLOTS) & 1)
        low = w_buf.index(slot * CONSUMERS + CID).load(A)
        high = low
        if BITS == 3:
            high = h_buf.index(slot * CONSUMERS + CID).load(A)
            high = shift_high(high, gl.full([64, 32], 0, gl.int16, A) + (8 * (block & 1)).to(gl.int16))
        following = terms
        if CONSUMERS == 2:  # of four, the others hide that they are waited for; registers are scarcer
            following = _load_terms(Scales, Zeros, o_s, m_n, block + 1, group, groups, stride_sg, CHUNK, SLABS)
        w = _panel(low, high, terms, 0, BITS, CHUNK, ZEROS, A, DTYPE)
        for p in gl.static_range(PANELS):
            place = slot * PANELS + p
            if p:
                mbarrier.wait(full.index(place), (i // SLOTS) & 1)
            flying = wgmma(w, x_buf.index(place).permute((1, 0)), acc, is_async=True)
            ahead = w
            if p + 1 < PANELS:
                ahead = _panel(low, high, terms, p + 1, BITS, CHUNK, ZEROS, A, DTYPE)
            acc = wgmma_wait(0, deps=(flying,))
            mbarrier.arrive(empty.index(place), count=1)
            w = ahead
        terms = following
    let_next_start(EARLY)
    _finish(acc, outs, sizes, row + CID * 64, token, item * CONSUMERS + CID, i_k, SPLITS, BLOCK_M, DTYPE)


@jit
def _finish(acc, outs, sizes, row, token, tile, i_k, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, DTYPE: gl.constexpr):
    """Store 64 rows of W from `row` on; of several splits their sum, by the last to arrive."""
    Out, Bias, Part, Arrived, stride_om = outs
    M, N = sizes
    # four neighbouring rows of W a thread: they lie side by side in Out and in Part
    STORE: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    acc = gl.convert_layout(acc, STORE)
    o_n = row + gl.arange(0, 64, gl.SliceLayout(1, STORE))
    o_m = token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, STORE))
    inside = (o_n < N)[:, None] & (o_m < M)[None, :]
    place = o_m[None, :].to(gl.int64) * N + o_n[:, None]
    acc, last = joined_sum(acc, Part, Arrived, tile, i_k, place, inside, M.to(gl.int64) * N, SPLITS)
    if last:
        if Bias is not None:
            acc += gl.load(Bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
        gl.store(Out + o_m[None, :].to(gl.int64) * stride_om + o_n[:, None], acc.to(DTYPE), mask=inside)


@jit(do_not_specialize=RUNTIME)
def lowbit_matmul_hopper(
    x_desc, w_desc, h_desc, Scales, Zeros, Bias, Out, Part, Arrived, M, N, rows, group, groups, blocks, each, stride_sg,
    stride_sn, stride_om, BITS: gl.constexpr, CHUNK: gl.constexpr, SPLITS: gl.constexpr, EARLY: gl.constexpr,
    BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """x_desc [M, K] with boxes [BLOCK_M, 64], w_desc, h_desc (3 bits) planes as int16 [blocks * rows, 32] with boxes [64, 32];
    Scales (in x's dtype), Zeros (uint8 or None) by strides g, n; Out [M, N].
    CHUNK: slabs that share a scale.  Grid (cdiv(M, BLOCK_M) * cdiv(N, CONSUMERS * 64), splits), rows of x fastest; a split makes
    `each` blocks.  Part [splits, M, N] fp32, Arrived int32 zeros, CONSUMERS (2 or 4) an item.
    EARLY: a dependent launch.  SLOTS: blocks in the ring."""
    DTYPE: gl.constexpr = x_desc.dtype
    PANELS: gl.constexpr = 4 if BITS == 3 else 8 // BITS
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    W_SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    tiles_m = gl.cdiv(M, BLOCK_M)
    item, i_k = gl.program_id(0), gl.program_id(1)
    row = (item // tiles_m) * (CONSUMERS * 64)
    token = (item % tiles_m) * BLOCK_M
    first = i_k * each
    end = gl.minimum(first + each, blocks)
    wait_for_previous(EARLY)
    w_buf = gl.allocate_shared_memory(gl.int16, [SLOTS * CONSUMERS, 64, 32], W_SHARED)
    h_buf = w_buf
    if BITS == 3:
        h_buf = gl.allocate_shared_memory(gl.int16, [SLOTS * CONSUMERS, 64, 32], W_SHARED)
    x_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, BLOCK_M, 64], X_SHARED)
    full, empty = barriers(SLOTS * PANELS, 1), barriers(SLOTS * PANELS, CONSUMERS)
    fence_async_shared()
    rings = (w_buf, h_buf, x_buf, full, empty)
    sources = (Scales, Zeros, stride_sg, stride_sn, group, groups)
    outs = (Out, Bias, Part, Arrived, stride_om)
    sizes = (M, N)
    loads = (w_desc, h_desc, x_desc, rings, row, token, first, end, rows)
    given = (rings, sources, outs, sizes, row, token, item, first, end, i_k)
    if CONSUMERS == 4:
        gl.warp_specialize([
            (_consume, (given, 0, BITS, CHUNK, SPLITS, BLOCK_M, SLOTS, CONSUMERS, EARLY)),
            (_consume, (given, 1, BITS, CHUNK, SPLITS, BLOCK_M, SLOTS, CONSUMERS, EARLY)),
            (_consume, (given, 2, BITS, CHUNK, SPLITS, BLOCK_M, SLOTS, CONSUMERS, EARLY)),
            (_consume, (given, 3, BITS, CHUNK, SPLITS, BLOCK_M, SLOTS, CONSUMERS, EARLY)),
            (_produce, (loads, BITS, PANELS, BLOCK_M, SLOTS, CONSUMERS)),
        ], [4, 4, 4, 1], [120, 120, 120, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (given, 0, BITS, CHUNK, SPLITS, BLOCK_M, SLOTS, CONSUMERS, EARLY)),
            (_consume, (given, 1, BITS, CHUNK, SPLITS, BLOCK_M, SLOTS, CONSUMERS, EARLY)),
            (_produce, (loads, BITS, PANELS, BLOCK_M, SLOTS, CONSUMERS)),
        ], [4, 1], [240, 24])  # fmt: skip

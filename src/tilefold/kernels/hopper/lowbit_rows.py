"""Products of few rows with weights of few bits: each warp walks blocks of K of its own.

x [M, K] times W^T, M at most BLOCK_M = 8 or 16.  Memory-bound: what counts is bytes in flight, and instructions a word.  A warp
reads 16 bytes a thread, in the order in which they lie; that those are not the columns that mma.sync expects of that thread does
not matter, since x is read in the same order: thread c of a quad has elements 8 c to 8 c + 7 of each slab, of weights and of x.
So no element moves between threads: weights go through a ring of DEPTH tiles in shared memory, in which each thread reads what it
has copied itself (DEPTH 1: through registers, one step ahead, as x is).  At the end the warps' sums are added in order; splits
of K over programs are added by the last to arrive, in order.
"""

from .gluon import copies_commit, copies_wait, copy_async, gl, jit, let_next_start, mma, wait_for_previous
from .lowbit_parts import halves, joined_sum, middle, twice, unpack_words, zero_terms

RUNTIME = ["M", "N", "rows", "groups", "blocks", "each"]


@jit
def in_order(x):
    """Words [W, R, 16] as they lie -> with the columns that make them the operand of mma.sync that a thread has."""
    W: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1]
    return x.reshape([W, R, 4, 2, 2]).permute([0, 1, 3, 4, 2]).reshape([W, R, 16])


@jit
def load_step(planes, x, terms, block, end, K, rows, groups, EVEN: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr,
              CHUNK: gl.constexpr, SLABS: gl.constexpr, LOAD: gl.constexpr, ROW: gl.constexpr,
              DEPTH: gl.constexpr):  # fmt: skip
    """Everything of the blocks `block` + warp of x and scales -> tuple: SLABS of x, scales and zeros of each chunk."""
    W: gl.constexpr = planes[0].shape[0]
    i_w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))
    mine = block + i_w[:, None, None]
    live = mine < end
    made = ()
    if DEPTH == 1:
        made = (gl.load(planes[0] + mine.to(gl.int64) * (rows * 16), mask=live, other=0),)
        if BITS == 3:
            made = made + (gl.load(planes[1] + (mine // 2).to(gl.int64) * (rows * 16), mask=live, other=0),)
    for j in gl.static_range(SLABS):
        k = mine * (SLABS * 16) + j * 16
        m_here = x[1] & live
        if not EVEN:
            m_here = m_here & (k + x[2] < K // 2)
        made = made + (gl.load(x[0] + k, mask=m_here, other=0),)
    i_r = gl.arange(0, W, gl.SliceLayout(1, ROW))[:, None]
    for c in gl.static_range(SLABS // CHUNK):
        i_g = gl.minimum(((block + i_r) * (SLABS * 32) + c * CHUNK * 32) // GROUP, groups - 1)
        made = made + (gl.load(terms[0] + i_g.to(gl.int64) * terms[2], mask=terms[3], other=0.0),)
        if terms[1] is not None:
            made = made + (gl.load(terms[1] + i_g.to(gl.int64) * terms[2], mask=terms[3], other=0),)
    return made


@jit
def bring_step(ring, slot, planes, block, end, rows, BITS: gl.constexpr, LOAD: gl.constexpr):
    """Copy the weights of the blocks `block` + warp to a slot of the ring: each thread what it will read itself."""
    W: gl.constexpr = planes[0].shape[0]
    mine = block + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))[:, None, None]
    live = mine < end
    copy_async(ring[0].index(slot), planes[0] + mine.to(gl.int64) * (rows * 16), mask=live)
    if BITS == 3:
        copy_async(ring[1].index(slot), planes[1] + (mine // 2).to(gl.int64) * (rows * 16), mask=live)
    copies_commit()


@jit
def use_step(acc, ring, slot, block, step, BITS: gl.constexpr, CHUNK: gl.constexpr, SLABS: gl.constexpr, ZEROS: gl.constexpr,
             LOAD: gl.constexpr, ACC: gl.constexpr, DTYPE: gl.constexpr, DEPTH: gl.constexpr):  # fmt: skip
    """acc + the products of one step, each chunk's times its scales."""
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, k_width=2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, k_width=2)
    FIRST: gl.constexpr = 0 if DEPTH > 1 else 2 if BITS == 3 else 1
    EACH: gl.constexpr = 2 if ZEROS else 1
    low = in_order(step[0] if DEPTH == 1 else ring[0].index(slot).load(LOAD))
    high = low
    if BITS == 3:
        mine = block + gl.arange(0, acc.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))[:, None, None]
        words = step[1] if DEPTH == 1 else ring[1].index(slot).load(LOAD)
        high = in_order(words.to(gl.uint32, bitcast=True) >> (8 * (mine & 1)).to(gl.uint32)).to(gl.int32, bitcast=True)
    for c in gl.static_range(SLABS // CHUNK):
        if ZEROS:
            z = zero_terms(step[FIRST + SLABS + EACH * c + 1].to(gl.float32), BITS, DTYPE)
            z = gl.convert_layout(twice(z), gl.SliceLayout(2, low.type.layout), assert_trivial=True)
            zeros = gl.expand_dims(z, 2).broadcast_to(low.shape)
        else:
            zeros = twice(gl.full(low.shape, middle(BITS, DTYPE), DTYPE, low.type.layout))
        part = gl.zeros_like(acc)
        for j in gl.static_range(CHUNK):
            w = gl.convert_layout(unpack_words(low, high, zeros, c * CHUNK + j, BITS, DTYPE), A, assert_trivial=True)
            x = halves(in_order(step[FIRST + c * CHUNK + j]), DTYPE).permute([0, 2, 1])
            part = mma(w, gl.convert_layout(x, B, assert_trivial=True), part)
        acc = acc + part * gl.expand_dims(step[FIRST + SLABS + EACH * c].to(gl.float32), 2)
    return acc


@jit(do_not_specialize=RUNTIME)
def lowbit_rows(
    X, Packed, High, Scales, Zeros, Bias, Out, Part, Arrived, M, N, K, rows, groups, blocks, each, stride_xm, stride_sg,
    stride_sn, stride_om, BITS: gl.constexpr, GROUP: gl.constexpr, CHUNK: gl.constexpr, SPLITS: gl.constexpr, EARLY: gl.constexpr,
    EVEN: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """X [M, K], M at most BLOCK_M, rows 16-byte aligned; planes [blocks, rows, 16] int32; Scales, Zeros (uint8 or None) by
    strides g, n; Out [M, N].  GROUP: columns that share a scale; CHUNK: slabs.
    K a multiple of the block if EVEN, of 16 in any case.
    Grid (cdiv(N, BLOCK_N), SPLITS); a split makes `each` blocks.  Part [SPLITS, M, N] fp32, Arrived int32 zeros, one a tile.
    EARLY: a dependent launch."""
    W: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = X.dtype.element_ty
    SLABS: gl.constexpr = 8 if BITS == 3 else 16 // BITS
    LOAD: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [W, 1, 1], [2, 1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    ROW: gl.constexpr = gl.SliceLayout(2, ACC)
    ZEROS: gl.constexpr = Zeros is not None
    tile, i_k = gl.program_id(0), gl.program_id(1)
    first = i_k * each
    end = gl.minimum(first + each, blocks)
    wait_for_previous(EARLY)
    o_l = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, LOAD)))[None, None, :]
    o_w = (tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, LOAD))))[None, :, None] * 16 + o_l
    o_w = o_w + gl.full([W, BLOCK_N, 16], 0, gl.int32, LOAD)
    planes = (Packed + o_w, None)
    if BITS == 3:
        planes = (Packed + o_w, High + o_w)
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, LOAD)))[None, :, None]
    words = X.to(gl.pointer_type(gl.int32), bitcast=True)
    x = (words + o_m.to(gl.int64) * (stride_xm // 2) + o_l, o_m < M, o_l)
    o_n = (tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ROW)))[None, :]
    terms = (Scales + o_n * stride_sn, None, stride_sg, o_n < N)
    if ZEROS:
        terms = (Scales + o_n * stride_sn, Zeros + o_n * stride_sn, stride_sg, o_n < N)
    acc = gl.zeros([W, BLOCK_N, BLOCK_M], gl.float32, ACC)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    low_ring = gl.allocate_shared_memory(gl.int32, [DEPTH, W, BLOCK_N, 16], SHARED)
    ring = (low_ring, low_ring)
    if BITS == 3 and DEPTH > 1:
        ring = (low_ring, gl.allocate_shared_memory(gl.int32, [DEPTH, W, BLOCK_N, 16], SHARED))
    for d in gl.static_range(DEPTH - 1):
        bring_step(ring, d, planes, first + d * W, end, rows, BITS, LOAD)
    a = load_step(planes, x, terms, first, end, K, rows, groups, EVEN, BITS, GROUP, CHUNK, SLABS, LOAD, ROW, DEPTH)
    slot = 0
    # two names for what is held of x, in turn: nothing is moved from register to register
    for block in range(first, end, 2 * W):
        if DEPTH > 1:
            copies_wait(DEPTH - 2)
        b = load_step(
            planes, x, terms, block + W, end, K, rows, groups, EVEN, BITS, GROUP, CHUNK, SLABS, LOAD, ROW, DEPTH
        )
        if DEPTH > 1:
            bring_step(ring, (slot + DEPTH - 1) % DEPTH, planes, block + (DEPTH - 1) * W, end, rows, BITS, LOAD)
        acc = use_step(acc, ring, slot, block, a, BITS, CHUNK, SLABS, ZEROS, LOAD, ACC, DTYPE, DEPTH)
        slot = (slot + 1) % DEPTH
        if DEPTH > 1:
            copies_wait(DEPTH - 2)
        a = load_step(
            planes, x, terms, block + 2 * W, end, K, rows, groups, EVEN, BITS, GROUP, CHUNK, SLABS, LOAD, ROW, DEPTH
        )
        if DEPTH > 1:
            bring_step(ring, (slot + DEPTH - 1) % DEPTH, planes, block + DEPTH * W, end, rows, BITS, LOAD)
        acc = use_step(acc, ring, slot, block + W, b, BITS, CHUNK, SLABS, ZEROS, LOAD, ACC, DTYPE, DEPTH)
        slot = (slot + 1) % DEPTH
    if DEPTH > 1:
        copies_wait(0)
    let_next_start(EARLY)
    # [BLOCK_N, BLOCK_M]
    SUM: gl.constexpr = gl.SliceLayout(0, ACC)
    total = gl.sum(acc, 0)
    o_n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUM))
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUM))
    inside = (o_n < N)[:, None] & (o_m < M)[None, :]
    place = o_m[None, :].to(gl.int64) * N + o_n[:, None]
    total, last = joined_sum(total, Part, Arrived, tile, i_k, place, inside, M.to(gl.int64) * N, SPLITS)
    if last:
        if Bias is not None:
            total += gl.load(Bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
        gl.store(Out + o_m[None, :].to(gl.int64) * stride_om + o_n[:, None], total.to(DTYPE), mask=inside)

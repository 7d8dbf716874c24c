"""Products of 8-bit numbers on sm_90 for many rows: activation((A B^T) scales + bias), over tiles of 128 x 256 or 128 x 128.

Roles, ring and order of tiles are those of matmul_hopper, with 128 bytes of a row of A and of B at a time, here 128 numbers of
the sum.  wgmma takes bytes only with the sum's dimension side by side, so there is one layout.

    int8     sums are int32, exact; Triton has no product of int8 wider than 224 columns, so each is of 128
    e4m3     a wgmma of bytes adds with about 14 bits, so OUTSIDE: the products of 128 of the sum are added to fp32 registers.
             A consumer makes them for 128 columns at a time, since a second accumulator of 256 has no room; while it adds, the
             tensor cores have the other consumer's products

Bound: tensor cores; from L2 come 384 bytes of each 128 * 384 that are multiplied, 8 TB/s at 1400 TFLOP/s.

Source: sums outside: DeepSeek-V3 (arXiv:2412.19437), 3.3.2.
"""

from .gluon import (
    barriers,
    fence_async_shared,
    gl,
    jit,
    let_next_start,
    mbarrier,
    reinterpret,
    tma_load,
    wait_for_previous,
    wgmma,
    wgmma_wait,
)
from .matmul_parts import bytes_swizzled, finish_part, place_of_work, scaled_sums, swizzled, wait_for_stores

# not n and the strides: pairs of columns are loaded at once where they are known to be aligned
RUNTIME = ["m", "tiles_m", "tiles_n", "steps", "splits", "work", "stride_sa", "stride_sb", "stride_os"]


@jit
def _produce(a_desc, b_desc, rings, sizes, EARLY: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr,
             SLOTS: gl.constexpr):  # fmt: skip
    """Every load, in the order in which the consumers need them."""
    a_buf, b_buf, full, empty = rings
    m, n, tiles_m, tiles_n, steps, splits, work = sizes
    t = 0
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        i_m, i_n, i_b, i_s = place_of_work(item, tiles_m, tiles_n, splits, GROUP)
        for j in range(steps * i_s // splits, steps * (i_s + 1) // splits):
            slot = t % SLOTS
            mbarrier.wait(empty.index(slot), ((t // SLOTS) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (128 + BLOCK_N) * 128)
            for c in gl.static_range(2):
                tma_load(a_desc, [i_m * 128 + c * 64, j * 128], bar, a_buf.index(slot * 2 + c))
            tma_load(b_desc, [i_n * BLOCK_N, j * 128], bar, b_buf.index(slot))
            t += 1
    let_next_start(EARLY)


@jit
def _sum_inside(rings, first, last, t, CID: gl.constexpr, HALVES: gl.constexpr, SLOTS: gl.constexpr):
    """Products of one tile's share, summed by the tensor cores -> left and right [64, 128] int32 (e4m3: fp32; of one half the
    left alone), position in the ring."""
    a_tiles, b_tiles, full, empty = rings
    ACC: gl.constexpr = gl.int32 if a_tiles.dtype == gl.int8 else gl.float32
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    left = gl.zeros([64, 128], ACC, LAYOUT)
    right = gl.zeros([64, 128], ACC, LAYOUT)
    for j in range(first, last):
        slot = t % SLOTS
        mbarrier.wait(full.index(slot), (t // SLOTS) & 1)
        a = a_tiles.index(slot * 2 + CID)
        left = wgmma(a, b_tiles.index(slot * HALVES).permute((1, 0)), left, is_async=True)
        # of the step before this one every product is through: its buffers are free
        if HALVES == 1:
            left = wgmma_wait(1, deps=(left,))
        else:
            right = wgmma(a, b_tiles.index(slot * 2 + 1).permute((1, 0)), right, is_async=True)
            left, right = wgmma_wait(2, deps=(left, right))
        if j > first:
            mbarrier.arrive(empty.index((t - 1) % SLOTS), count=1)
        t += 1
    left, right = wgmma_wait(0, deps=(left, right))
    mbarrier.arrive(empty.index((t - 1) % SLOTS), count=1)
    return left, right, t


@jit
def _outside_product(a, b, nothing):
    """a b^T, waited for."""
    part = wgmma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return wgmma_wait(0, deps=(part,))


@jit
def _sum_outside(rings, first, last, t, CID: gl.constexpr, HALVES: gl.constexpr, SLOTS: gl.constexpr):
    """The same with sums of 128 added to fp32 registers."""
    a_tiles, b_tiles, full, empty = rings
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    nothing = gl.zeros([64, 128], gl.float32, LAYOUT)
    left = gl.zeros([64, 128], gl.float32, LAYOUT)
    right = gl.zeros([64, 128], gl.float32, LAYOUT)
    for j in range(first, last):
        slot = t % SLOTS
        mbarrier.wait(full.index(slot), (t // SLOTS) & 1)
        a = a_tiles.index(slot * 2 + CID)
        part = _outside_product(a, b_tiles.index(slot * HALVES), nothing)
        if HALVES == 1:
            mbarrier.arrive(empty.index(slot), count=1)
            left += part
        else:
            left += part
            part = _outside_product(a, b_tiles.index(slot * 2 + 1), nothing)
            mbarrier.arrive(empty.index(slot), count=1)
            right += part
        t += 1
    return left, right, t


@jit
def _consume(o_desc, p_desc, Out, Pre, Bias, scales, rings, staging, sizes, steps_of, CID: gl.constexpr, DTYPE: gl.constexpr,
             OUTSIDE: gl.constexpr, BOXES: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
             GROUP: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """Consumer number CID: rows CID * 64 on of each tile of this program."""
    a_buf, b_buf, full, empty = rings
    m, n, tiles_m, tiles_n, steps, splits, work = sizes
    HALVES: gl.constexpr = BLOCK_N // 128
    b_tiles = reinterpret(b_buf, DTYPE, [SLOTS * HALVES, 128, 128], bytes_swizzled())
    tiles = (a_buf, b_tiles, full, empty)
    t = 0
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        i_m, i_n, i_b, i_s = place_of_work(item, tiles_m, tiles_n, splits, GROUP)
        first = steps * i_s // splits
        last = steps * (i_s + 1) // splits
        if OUTSIDE:
            left, right, t = _sum_outside(tiles, first, last, t, CID, HALVES, SLOTS)
        else:
            left, right, t = _sum_inside(tiles, first, last, t, CID, HALVES, SLOTS)
        row = i_m * 128 + CID * 64
        column = i_n * BLOCK_N
        finish_part(scaled_sums(left, scales, row, column, m, n), o_desc, p_desc, Out, Pre, Bias, staging, CID, i_s, i_b, row,
                    column, m, n, steps_of, BOXES, BIAS, ACTIVATION)  # fmt: skip
        if HALVES == 2:
            finish_part(scaled_sums(right, scales, row, column + 128, m, n), o_desc, p_desc, Out, Pre, Bias, staging, CID, i_s,
                        i_b, row, column + 128, m, n, steps_of, BOXES, BIAS, ACTIVATION)  # fmt: skip
    if BOXES:
        wait_for_stores()


@jit(do_not_specialize=RUNTIME)
def matmul_eight_hopper(
    a_desc, b_desc, o_desc, p_desc, Out, Pre, Bias, ScaleA, ScaleB, m, n, tiles_m, tiles_n, steps, splits, work, stride_sa,
    stride_sb, stride_cb, stride_cm, stride_cn, stride_os, stride_ob, stride_om,
    OUTSIDE: gl.constexpr, BOXES: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    EARLY: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """a_desc [m, k] with boxes [64, 128], b_desc [n, k] with boxes [BLOCK_N, 128], int8 or e4m3.  ScaleA, ScaleB: fp32, a factor
    a row and a column by strides (sa, sb; 0: one for all), or None.  o_desc, p_desc, Out, Pre, Bias, BOXES, BIAS, splits and
    strides as of matmul_hopper, of one batch entry.  steps: tiles of 128 of the sum.  EARLY: a dependent launch.
    work = tiles_m * tiles_n * splits.  Grid (min(work, SMs),)."""
    DTYPE: gl.constexpr = a_desc.dtype
    wait_for_previous(EARLY)
    a_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * 2, 64, 128], bytes_swizzled())
    b_buf = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_N, 128], bytes_swizzled())
    staging = ()
    if BOXES:
        staging = (gl.allocate_shared_memory(o_desc.dtype, [4, 1, 64, 64], swizzled(3)),)
    full = barriers(SLOTS, 1)
    empty = barriers(SLOTS, 2)
    fence_async_shared()
    rings = (a_buf, b_buf, full, empty)
    sizes = (m, n, tiles_m, tiles_n, steps, splits, work)
    scales = (ScaleA, ScaleB, stride_sa, stride_sb)
    steps_of = (stride_cb, stride_cm, stride_cn, stride_os, stride_ob, stride_om)
    gl.warp_specialize([
        (_consume, (o_desc, p_desc, Out, Pre, Bias, scales, rings, staging, sizes, steps_of, 0, DTYPE, OUTSIDE, BOXES,
                    BIAS, ACTIVATION, GROUP, BLOCK_N, SLOTS)),
        (_consume, (o_desc, p_desc, Out, Pre, Bias, scales, rings, staging, sizes, steps_of, 1, DTYPE, OUTSIDE, BOXES,
                    BIAS, ACTIVATION, GROUP, BLOCK_N, SLOTS)),
        (_produce, (a_desc, b_desc, rings, sizes, EARLY, GROUP, BLOCK_N, SLOTS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip

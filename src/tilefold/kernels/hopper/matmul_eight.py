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
    descriptor,
    fence_async_shared,
    gl,
    jit,
    let_next_start,
    reinterpret,
    tma_load,
    wait_for_previous,
    wgmma,
    wgmma_wait,
)
from .matmul_epilogue import Epilogue, Scales
from .matmul_scheduler import TileScheduler
from .ring import Ring, make_ring, swizzled
from .structs import struct

# not n and the strides: pairs of columns are loaded at once where they are known to be aligned
RUNTIME = ["m", "tiles_m", "tiles_n", "steps", "splits", "work", "stride_sa", "stride_sb", "stride_os"]


@struct
class Operands:
    """The tiles of A, 128 x 128, and of B, BLOCK_N x 128, in shared memory, and what they are loaded from.  a_buf: 64 rows a
    consumer."""

    a_desc: descriptor
    b_desc: descriptor
    a_buf: gl.shared_memory_descriptor
    b_buf: gl.shared_memory_descriptor
    ring: Ring
    BLOCK_N: gl.constexpr

    @jit
    def load(self, t, row, column, k):
        """Issue the TMA loads of step t: from `row` of A, `column` of B and k on."""
        stage = self.ring.stage(t)
        self.ring.acquire(stage, self.ring.turn(t))
        bar = self.ring.expect(stage, (128 + self.BLOCK_N) * 128)
        for c in gl.static_range(2):
            tma_load(self.a_desc, [row + c * 64, k], bar, self.a_buf.index(stage * 2 + c))
        tma_load(self.b_desc, [column, k], bar, self.b_buf.index(stage))

    @jit
    def a(self, stage, CID: gl.constexpr):
        """Consumer CID's [64, 128] of A."""
        return self.a_buf.index(stage * 2 + CID)

    @jit
    def b(self, stage, HALF: gl.constexpr):
        """128 columns of B: [128, 128]."""
        HALVES: gl.constexpr = self.BLOCK_N // 128
        tiles = reinterpret(self.b_buf, self.b_buf.dtype, [self.ring.STAGES * HALVES, 128, 128], swizzled(2, 8))
        return tiles.index(stage * HALVES + HALF).permute((1, 0))


@jit
def _produce(operands, scheduler, EARLY: gl.constexpr):
    """Every load, in the order in which the consumers need them."""
    t = 0
    for item in range(gl.program_id(0), scheduler.work, gl.num_programs(0)):
        tile = scheduler.tile(item)
        for j in range(tile.first, tile.last):
            operands.load(t, tile.row, tile.column, j * 128)
            t += 1
    let_next_start(EARLY)


@jit
def _sum_inside(operands, tile, t, CID: gl.constexpr):
    """Products of one work tile, summed by the tensor cores -> left and right [64, 128] int32 (e4m3: fp32; of one half the
    left alone), the next step."""
    ring = operands.ring
    HALVES: gl.constexpr = operands.BLOCK_N // 128
    ACC: gl.constexpr = gl.int32 if operands.a_buf.dtype == gl.int8 else gl.float32
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    left = gl.zeros([64, 128], ACC, LAYOUT)
    right = gl.zeros([64, 128], ACC, LAYOUT)
    for j in range(tile.first, tile.last):
        stage = ring.stage(t)
        ring.wait(stage, ring.turn(t))
        a = operands.a(stage, CID)
        left = wgmma(a, operands.b(stage, 0), left, is_async=True)
        # of the step before this one every product is through: its stage is free
        if HALVES == 1:
            left = wgmma_wait(1, deps=(left,))
        else:
            right = wgmma(a, operands.b(stage, 1), right, is_async=True)
            left, right = wgmma_wait(2, deps=(left, right))
        if j > tile.first:
            ring.release(ring.stage(t - 1))
        t += 1
    left, right = wgmma_wait(0, deps=(left, right))
    ring.release(ring.stage(t - 1))
    return left, right, t


@jit
def _outside_product(a, b, nothing):
    """a b, waited for."""
    part = wgmma(a, b, nothing, use_acc=False, is_async=True)
    return wgmma_wait(0, deps=(part,))


@jit
def _sum_outside(operands, tile, t, CID: gl.constexpr):
    """The same with sums of 128 added to fp32 registers."""
    ring = operands.ring
    HALVES: gl.constexpr = operands.BLOCK_N // 128
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    nothing = gl.zeros([64, 128], gl.float32, LAYOUT)
    left = gl.zeros([64, 128], gl.float32, LAYOUT)
    right = gl.zeros([64, 128], gl.float32, LAYOUT)
    for j in range(tile.first, tile.last):
        stage = ring.stage(t)
        ring.wait(stage, ring.turn(t))
        a = operands.a(stage, CID)
        part = _outside_product(a, operands.b(stage, 0), nothing)
        if HALVES == 1:
            ring.release(stage)
            left += part
        else:
            left += part
            part = _outside_product(a, operands.b(stage, 1), nothing)
            ring.release(stage)
            right += part
        t += 1
    return left, right, t


@jit
def _consume(operands, scheduler, scales, epilogue, OUTSIDE: gl.constexpr, CID: gl.constexpr):
    """Consumer number CID: rows CID * 64 on of each tile of this program."""
    t = 0
    for item in range(gl.program_id(0), scheduler.work, gl.num_programs(0)):
        tile = scheduler.tile(item)
        if OUTSIDE:
            left, right, t = _sum_outside(operands, tile, t, CID)
        else:
            left, right, t = _sum_inside(operands, tile, t, CID)
        row = tile.row + CID * 64
        column = tile.column
        epilogue.finish(scales.apply(left, row, column, epilogue.m, epilogue.n), tile, row, column, CID)
        if operands.BLOCK_N == 256:
            column = column + 128
            epilogue.finish(scales.apply(right, row, column, epilogue.m, epilogue.n), tile, row, column, CID)
    epilogue.drain()


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
    a_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * 2, 64, 128], swizzled(2, 8))
    b_buf = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_N, 128], swizzled(2, 8))
    staging = None
    if BOXES:
        staging = gl.allocate_shared_memory(o_desc.dtype, [4, 1, 64, 64], swizzled(3))
    ring = make_ring(SLOTS, 2)
    fence_async_shared()
    operands = Operands(a_desc, b_desc, a_buf, b_buf, ring, BLOCK_N)
    scheduler = TileScheduler(tiles_m, tiles_n, steps, splits, work, GROUP, BLOCK_N)
    scales = Scales(ScaleA, ScaleB, stride_sa, stride_sb)
    epilogue = Epilogue(o_desc, p_desc, Out, Pre, Bias, staging, m, n, stride_cb, stride_cm, stride_cn, stride_os, stride_ob,
                        stride_om, BOXES, BIAS, ACTIVATION)  # fmt: skip
    gl.warp_specialize([
        (_consume, (operands, scheduler, scales, epilogue, OUTSIDE, 0)),
        (_consume, (operands, scheduler, scales, epilogue, OUTSIDE, 1)),
        (_produce, (operands, scheduler, EARLY)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip

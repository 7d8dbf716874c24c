"""Products of 8-bit numbers on sm_90 for few rows of x: weights are the left operand of wgmma, rows of x the right one.

A program makes CONSUMERS * 64 rows of W times BLOCK_M rows of x, over `each` steps of 128 * PANELS numbers of the sum:

    producer    1 warp     loads panels of W and of x by TMA into a ring of SLOTS stages
    consumers   4 warps    64 rows of W each

Memory-bound: what counts is that W never stops coming.  EARLY: the kernel before this one makes x's codes, and lets this one
start once all that came before it is through; so the ring is filled with W before this kernel waits for the codes.
Splits of the sum are added by the last to arrive, in their order.
"""

from .gluon import (
    descriptor,
    fence_async_shared,
    gl,
    jit,
    let_next_start,
    tma_load,
    wait_for_previous,
    wgmma,
    wgmma_wait,
)
from .ring import Ring, make_ring, swizzled
from .split_k import Factors, Output, Partials, tile_of_program
from .structs import struct

RUNTIME = ["M", "N", "steps", "each", "stride_sb"]


@struct
class Operands:
    """Panels of 128 numbers of the sum, PANELS a stage: ROWS rows of W, BLOCK_M rows of x."""

    w_desc: descriptor
    x_desc: descriptor
    w_buf: gl.shared_memory_descriptor
    x_buf: gl.shared_memory_descriptor
    ring: Ring
    ROWS: gl.constexpr
    BLOCK_M: gl.constexpr
    PANELS: gl.constexpr

    @jit
    def load_w(self, stage, row, j):
        """Issue the TMA loads of W of step j; the stage's barrier waits for those of x, too."""
        bar = self.ring.expect(stage, (self.ROWS + self.BLOCK_M) * 128 * self.PANELS)
        for p in gl.static_range(self.PANELS):
            tma_load(self.w_desc, [row, (j * self.PANELS + p) * 128], bar, self.w_buf.index(stage * self.PANELS + p))

    @jit
    def load_x(self, stage, token, j):
        """Issue those of x."""
        bar = self.ring.full.index(stage)
        for p in gl.static_range(self.PANELS):
            tma_load(self.x_desc, [token, (j * self.PANELS + p) * 128], bar, self.x_buf.index(stage * self.PANELS + p))


@jit
def _produce(operands, tile, EARLY: gl.constexpr):
    """Make every load; those of W that the ring has room for before x's codes are there."""
    ring = operands.ring
    ahead = gl.minimum(tile.first + ring.STAGES, tile.end)
    for j in range(tile.first, ahead):
        operands.load_w(j - tile.first, tile.row, j)
    wait_for_previous(EARLY)
    for j in range(tile.first, ahead):
        operands.load_x(j - tile.first, tile.token, j)
    for j in range(ahead, tile.end):
        stage = ring.stage(j - tile.first)
        ring.acquire(stage, ring.turn(j - tile.first))
        operands.load_w(stage, tile.row, j)
        operands.load_x(stage, tile.token, j)
    let_next_start(EARLY)


@jit
def _consume(operands, output, factors, tile, CID: gl.constexpr, CONSUMERS: gl.constexpr, EARLY: gl.constexpr):
    """Consumer number CID: rows CID * 64 on of this program's tile.  e4m3: sums of 128 are added to fp32 outside of wgmma."""
    ring = operands.ring
    INTEGER: gl.constexpr = operands.w_buf.dtype == gl.int8
    ACC: gl.constexpr = gl.int32 if INTEGER else gl.float32
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, operands.BLOCK_M, 32])
    acc = gl.zeros([64, operands.BLOCK_M], ACC, LAYOUT)
    nothing = gl.zeros([64, operands.BLOCK_M], ACC, LAYOUT)
    for j in range(tile.first, tile.end):
        stage = ring.stage(j - tile.first)
        ring.wait(stage, ring.turn(j - tile.first))
        for p in gl.static_range(operands.PANELS):
            w = operands.w_buf.index(stage * operands.PANELS + p).slice(CID * 64, 64, dim=0)
            x = operands.x_buf.index(stage * operands.PANELS + p).permute((1, 0))
            if INTEGER:
                acc = wgmma_wait(0, deps=(wgmma(w, x, acc, is_async=True),))
            else:
                acc += wgmma_wait(0, deps=(wgmma(w, x, nothing, use_acc=False, is_async=True),))
        ring.release(stage)
    wait_for_previous(EARLY)  # x's scales
    output.finish(acc, tile.row + CID * 64, tile.token, tile.item * CONSUMERS + CID, tile.split, factors)


@jit(do_not_specialize=RUNTIME)
def matmul_eight_rows(
    x_desc, w_desc, ScaleA, ScaleB, Bias, Out, Part, Arrived, M, N, steps, each, stride_sb, stride_om, SPLITS: gl.constexpr,
    EARLY: gl.constexpr, BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr, PANELS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """x_desc [M, K] with boxes [BLOCK_M, 128], w_desc [N, K] with boxes [CONSUMERS * 64, 128], int8 or e4m3; Out [M, N] =
    (x W^T) ScaleA[m] ScaleB[n] + Bias[n], scales fp32, ScaleB's stride 0 where one is for all.
    Grid (cdiv(M, BLOCK_M) * cdiv(N, CONSUMERS * 64), splits), rows of x fastest; a split makes `each` steps, at least one.
    Part [SPLITS, M, N] of the accumulator's type, Arrived int32 zeros, CONSUMERS an item.
    EARLY: a dependent launch, after a kernel that lets this one start only when it has waited for its own predecessor."""
    DTYPE: gl.constexpr = w_desc.dtype
    ROWS: gl.constexpr = CONSUMERS * 64
    tile = tile_of_program(M, steps, each, ROWS, BLOCK_M)
    w_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, ROWS, 128], swizzled(2, 8))
    x_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, BLOCK_M, 128], swizzled(2, 8))
    ring = make_ring(SLOTS, CONSUMERS)
    fence_async_shared()
    operands = Operands(w_desc, x_desc, w_buf, x_buf, ring, ROWS, BLOCK_M, PANELS)
    partials = Partials(Part, Arrived, M.to(gl.int64) * N, SPLITS)
    output = Output(Out, Bias, stride_om, M, N, partials)
    factors = Factors(ScaleA, ScaleB, stride_sb)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (operands, output, factors, tile, 0, CONSUMERS, EARLY)),
            (_consume, (operands, output, factors, tile, 1, CONSUMERS, EARLY)),
            (_produce, (operands, tile, EARLY)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (operands, output, factors, tile, 0, CONSUMERS, EARLY)),
            (_produce, (operands, tile, EARLY)),
        ], [1], [24])  # fmt: skip

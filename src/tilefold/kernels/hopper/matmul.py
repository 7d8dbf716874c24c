"""Matrix products on sm_90, 16-bit operands: activation(A B + bias), for batches and with the sum shared out, over tiles of
128 x 256 or 128 x 128.

    producer     one warp: loads 128 x 64 of A and 64 x BLOCK_N of B at a time by TMA into a ring of SLOTS stages, and goes on
                 with the next tile while the others still finish theirs
    consumers    two warpgroups, 64 rows of the tile each: products from shared memory, bias, activation, store by TMA

Programs stay: each makes the tiles pid, pid + programs, ... in grouped order.  The consumers meet only at the ring, so one may be
ahead by what the ring holds, and its epilogue then runs beside the other's products.

Bound: tensor cores; from L2 come 384 bytes of each 64 * 384 that are multiplied, 8 TB/s at 700 TFLOP/s.
"""

from .gluon import descriptor, fence_async_shared, gl, jit, reinterpret, tma_load, wgmma, wgmma_wait
from .matmul_epilogue import Epilogue
from .matmul_scheduler import TileScheduler
from .ring import Ring, make_ring, swizzled
from .structs import struct

# not n and the strides: pairs of columns are loaded at once where they are known to be aligned
RUNTIME = [
    "m",
    "tiles_m",
    "tiles_n",
    "tiles_k",
    "steps",
    "splits",
    "work",
    "step_a",
    "step_b",
    "stride_os",
    "stride_ob",
]


@struct
class Operands:
    """The tiles of A, 128 x 64, and of B, 64 x BLOCK_N, in shared memory, and what they are loaded from.

    a_buf: 64 rows a consumer.  b_buf: panels of 64 columns, or one tile where K lies side by side.  A_TRANSPOSED and
    B_TRANSPOSED as of matmul_hopper."""

    a_desc: descriptor
    b_desc: descriptor
    a_buf: gl.shared_memory_descriptor
    b_buf: gl.shared_memory_descriptor
    ring: Ring
    A_TRANSPOSED: gl.constexpr
    B_TRANSPOSED: gl.constexpr
    BLOCK_N: gl.constexpr

    @jit
    def load(self, t, a_batch, b_batch, row, column, k):
        """Issue the TMA loads of step t: from `row` of A, `column` of B and k on."""
        PANELS: gl.constexpr = 1 if self.B_TRANSPOSED else self.BLOCK_N // 64
        stage = self.ring.stage(t)
        self.ring.acquire(stage, self.ring.turn(t))
        bar = self.ring.expect(stage, (128 + self.BLOCK_N) * 64 * 2)
        for c in gl.static_range(2):
            if self.A_TRANSPOSED:
                tma_load(self.a_desc, [a_batch, k, row + c * 64], bar, self.a_buf.index(stage * 2 + c))
            else:
                tma_load(self.a_desc, [a_batch, row + c * 64, k], bar, self.a_buf.index(stage * 2 + c))
        for p in gl.static_range(PANELS):
            if self.B_TRANSPOSED:
                tma_load(self.b_desc, [b_batch, column, k], bar, self.b_buf.index(stage))
            else:
                tma_load(self.b_desc, [b_batch, k, column + p * 64], bar, self.b_buf.index(stage * PANELS + p))

    @jit
    def a(self, stage, CID: gl.constexpr):
        """Consumer CID's [64, 64] of A."""
        STAGES: gl.constexpr = self.ring.STAGES
        tile = reinterpret(self.a_buf, self.a_buf.dtype, [STAGES * 2, 64, 64], swizzled(2)).index(stage * 2 + CID)
        if self.A_TRANSPOSED:
            tile = tile.permute((1, 0))
        return tile

    @jit
    def b(self, stage):
        """[64, BLOCK_N] of B."""
        STAGES: gl.constexpr = self.ring.STAGES
        if self.B_TRANSPOSED:
            tiles = reinterpret(self.b_buf, self.b_buf.dtype, [STAGES, self.BLOCK_N, 64], swizzled(2))
            return tiles.index(stage).permute((1, 0))
        else:
            tiles = reinterpret(self.b_buf, self.b_buf.dtype, [STAGES, 64, self.BLOCK_N], swizzled(2))
            return tiles.index(stage)


@jit
def _produce(operands, scheduler, tiles_k, step_a, step_b, FOLD: gl.constexpr):
    """Every load, in the order in which the consumers need them.  step_a, step_b: 1, or 0 where one matrix serves the batch."""
    t = 0
    for item in range(gl.program_id(0), scheduler.work, gl.num_programs(0)):
        tile = scheduler.tile(item)
        for j in range(tile.first, tile.last):
            batch = tile.batch
            k = j
            if FOLD:
                batch = j // tiles_k
                k = j % tiles_k
            operands.load(t, batch * step_a, batch * step_b, tile.row, tile.column, k * 64)
            t += 1


@jit
def _consume(operands, scheduler, epilogue, CID: gl.constexpr):
    """Consumer number CID: rows CID * 64 on of each tile of this program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, operands.BLOCK_N, 16])
    ring = operands.ring
    t = 0
    for item in range(gl.program_id(0), scheduler.work, gl.num_programs(0)):
        tile = scheduler.tile(item)
        acc = gl.zeros([64, operands.BLOCK_N], gl.float32, LAYOUT)
        for j in range(tile.first, tile.last):
            stage = ring.stage(t)
            ring.wait(stage, ring.turn(t))
            acc = wgmma(operands.a(stage, CID), operands.b(stage), acc, is_async=True)
            acc = wgmma_wait(1, deps=(acc,))  # the product before this one is through: its stage is free
            if j > tile.first:
                ring.release(ring.stage(t - 1))
            t += 1
        acc = wgmma_wait(0, deps=(acc,))
        ring.release(ring.stage(t - 1))
        epilogue.finish(acc, tile, tile.row + CID * 64, tile.column, CID)
    epilogue.drain()


@jit(do_not_specialize=RUNTIME)
def matmul_hopper(
    a_desc, b_desc, o_desc, p_desc, Out, Pre, Bias, m, n, tiles_m, tiles_n, tiles_k, steps, splits, work, step_a, step_b,
    stride_cb, stride_cm, stride_cn, stride_os, stride_ob, stride_om,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, FOLD: gl.constexpr, BOXES: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """a_desc [batch or 1, m, k] with boxes [1, 64, 64], or [.., k, m] if A_TRANSPOSED; b_desc [batch or 1, k, n] with boxes
    [1, 64, 64], or [.., n, k] with boxes [1, BLOCK_N, 64] if B_TRANSPOSED.  BOXES: the result, and Pre, are stored by o_desc
    and p_desc [batch, m, n] with boxes [1, 64, 64]; else straight to Out and Pre by strides (o; columns side by side).  Pre:
    what the activation is applied to, or None.  Bias by strides (c) and BIAS as of device.epilogue.  steps: tiles of 64 of the
    sum, tiles_k of each batch entry with FOLD, which sums over the batch; splits > 1: Out is [splits, batch, m, n] fp32, a share
    of the steps each.  work = tiles_m * tiles_n * batch * splits.  Grid (min(work, SMs),)."""
    DTYPE: gl.constexpr = a_desc.dtype
    ROWS: gl.constexpr = BLOCK_N if B_TRANSPOSED else 64
    PANELS: gl.constexpr = 1 if B_TRANSPOSED else BLOCK_N // 64
    a_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * 2, 1, 64, 64], swizzled(3))
    b_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, 1, ROWS, 64], swizzled(3))
    staging = None
    if BOXES:
        staging = gl.allocate_shared_memory(o_desc.dtype, [4, 1, 64, 64], swizzled(3))
    ring = make_ring(SLOTS, 2)
    fence_async_shared()
    operands = Operands(a_desc, b_desc, a_buf, b_buf, ring, A_TRANSPOSED, B_TRANSPOSED, BLOCK_N)
    scheduler = TileScheduler(tiles_m, tiles_n, steps, splits, work, GROUP, BLOCK_N)
    epilogue = Epilogue(o_desc, p_desc, Out, Pre, Bias, staging, m, n, stride_cb, stride_cm, stride_cn, stride_os, stride_ob,
                        stride_om, BOXES, BIAS, ACTIVATION)  # fmt: skip
    gl.warp_specialize([
        (_consume, (operands, scheduler, epilogue, 0)),
        (_consume, (operands, scheduler, epilogue, 1)),
        (_produce, (operands, scheduler, tiles_k, step_a, step_b, FOLD)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip

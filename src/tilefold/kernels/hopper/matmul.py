"""Matrix products on sm_90, 16-bit operands: activation(A B + bias), for batches and with the sum shared out, over tiles of
128 x 256 or 128 x 128.

    producer     one warp: brings 128 x 64 of A and 64 x BLOCK_N of B at a time by the copy engine into a ring of SLOTS buffers,
                 and goes on with the next tile while the others still finish theirs
    consumers    two warpgroups, 64 rows of the tile each: products from shared memory, bias, activation, store by the copy engine

Programs stay: each makes the tiles pid, pid + programs, ... in grouped order.  The consumers meet only at the ring, so one may be
ahead by what the ring holds, and its epilogue then runs beside the other's products.

Bound: tensor cores; from L2 come 384 bytes of each 64 * 384 that are multiplied, 8 TB/s at 700 TFLOP/s.
"""

from .gluon import barriers, fence_async_shared, gl, jit, mbarrier, reinterpret, tma_load, wgmma, wgmma_wait
from .matmul_parts import finish_part, panels_of, place_of_work, swizzled, wait_for_stores

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


@jit
def _produce(a_desc, b_desc, rings, sizes, step_a, step_b, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, FOLD: gl.constexpr,
             GROUP: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """Every load, in the order in which the consumers need them.  step_a, step_b: 1, or 0 where one matrix serves the batch."""
    a_buf, b_buf, full, empty = rings
    m, n, tiles_m, tiles_n, tiles_k, steps, splits, work = sizes
    PANELS: gl.constexpr = panels_of(BLOCK_N, B_TURNED)
    t = 0
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        i_m, i_n, i_b, i_s = place_of_work(item, tiles_m, tiles_n, splits, GROUP)
        row = i_m * 128
        column = i_n * BLOCK_N
        first = steps * i_s // splits
        last = steps * (i_s + 1) // splits
        for j in range(first, last):
            slot = t % SLOTS
            a_batch = i_b * step_a
            b_batch = i_b * step_b
            i_k = j
            if FOLD:
                a_batch = j // tiles_k * step_a
                b_batch = j // tiles_k * step_b
                i_k = j % tiles_k
            i_k = i_k * 64
            mbarrier.wait(empty.index(slot), ((t // SLOTS) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (128 + BLOCK_N) * 64 * 2)
            for c in gl.static_range(2):
                if A_TURNED:
                    tma_load(a_desc, [a_batch, i_k, row + c * 64], bar, a_buf.index(slot * 2 + c))
                else:
                    tma_load(a_desc, [a_batch, row + c * 64, i_k], bar, a_buf.index(slot * 2 + c))
            for p in gl.static_range(PANELS):
                if B_TURNED:
                    tma_load(b_desc, [b_batch, column, i_k], bar, b_buf.index(slot))
                else:
                    tma_load(b_desc, [b_batch, i_k, column + p * 64], bar, b_buf.index(slot * PANELS + p))
            t += 1


@jit
def _consume(o_desc, p_desc, Out, Pre, Bias, rings, staging, sizes, steps_of, CID: gl.constexpr, DTYPE: gl.constexpr,
             A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, BOXES: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
             GROUP: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """Consumer number CID: rows CID * 64 on of each tile of this program."""
    a_buf, b_buf, full, empty = rings
    m, n, tiles_m, tiles_n, tiles_k, steps, splits, work = sizes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    a_tiles = reinterpret(a_buf, DTYPE, [SLOTS * 2, 64, 64], swizzled(2))
    if B_TURNED:
        b_tiles = reinterpret(b_buf, DTYPE, [SLOTS, BLOCK_N, 64], swizzled(2))
    else:
        b_tiles = reinterpret(b_buf, DTYPE, [SLOTS, 64, BLOCK_N], swizzled(2))
    t = 0
    for item in range(gl.program_id(0), work, gl.num_programs(0)):
        i_m, i_n, i_b, i_s = place_of_work(item, tiles_m, tiles_n, splits, GROUP)
        first = steps * i_s // splits
        last = steps * (i_s + 1) // splits
        acc = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
        for j in range(first, last):
            slot = t % SLOTS
            mbarrier.wait(full.index(slot), (t // SLOTS) & 1)
            a = a_tiles.index(slot * 2 + CID)
            b = b_tiles.index(slot)
            if A_TURNED:
                a = a.permute((1, 0))
            if B_TURNED:
                b = b.permute((1, 0))
            acc = wgmma(a, b, acc, is_async=True)
            acc = wgmma_wait(1, deps=(acc,))  # the product before this one is through: its buffers are free
            if j > first:
                mbarrier.arrive(empty.index((t - 1) % SLOTS), count=1)
            t += 1
        acc = wgmma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((t - 1) % SLOTS), count=1)
        row = i_m * 128 + CID * 64
        finish_part(acc, o_desc, p_desc, Out, Pre, Bias, staging, CID, i_s, i_b, row, i_n * BLOCK_N, m, n, steps_of, BOXES, BIAS,
                    ACTIVATION)  # fmt: skip
    if BOXES:
        wait_for_stores()


@jit(do_not_specialize=RUNTIME)
def matmul_hopper(
    a_desc, b_desc, o_desc, p_desc, Out, Pre, Bias, m, n, tiles_m, tiles_n, tiles_k, steps, splits, work, step_a, step_b,
    stride_cb, stride_cm, stride_cn, stride_os, stride_ob, stride_om,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, FOLD: gl.constexpr, BOXES: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """a_desc [batch or 1, m, k] with boxes [1, 64, 64], or [.., k, m] if A_TURNED; b_desc [batch or 1, k, n] with boxes
    [1, 64, 64], or [.., n, k] with boxes [1, BLOCK_N, 64] if B_TURNED.  BOXES: the result, and Pre, are stored through o_desc and
    p_desc [batch, m, n] with boxes [1, 64, 64]; else straight to Out and Pre by their strides (o; columns side by side).  Pre:
    what the activation is applied to, or None.  Bias by strides (c) and BIAS as of device.epilogue.  steps: tiles of 64 of the
    sum, tiles_k of each batch entry with FOLD, which sums over the batch; splits > 1: Out is [splits, batch, m, n] fp32, a share
    of the steps each.  work = tiles_m * tiles_n * batch * splits.  Grid (min(work, SMs),)."""
    DTYPE: gl.constexpr = a_desc.dtype
    PANELS: gl.constexpr = panels_of(BLOCK_N, B_TURNED)
    ROWS: gl.constexpr = BLOCK_N if B_TURNED else 64
    a_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * 2, 1, 64, 64], swizzled(3))
    b_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, 1, ROWS, 64], swizzled(3))
    staging = ()
    if BOXES:
        staging = (gl.allocate_shared_memory(o_desc.dtype, [4, 1, 64, 64], swizzled(3)),)
    full = barriers(SLOTS, 1)
    empty = barriers(SLOTS, 2)
    fence_async_shared()
    rings = (a_buf, b_buf, full, empty)
    sizes = (m, n, tiles_m, tiles_n, tiles_k, steps, splits, work)
    steps_of = (stride_cb, stride_cm, stride_cn, stride_os, stride_ob, stride_om)
    gl.warp_specialize([
        (_consume, (o_desc, p_desc, Out, Pre, Bias, rings, staging, sizes, steps_of, 0, DTYPE, A_TURNED, B_TURNED, BOXES, BIAS,
                    ACTIVATION, GROUP, BLOCK_N, SLOTS)),
        (_consume, (o_desc, p_desc, Out, Pre, Bias, rings, staging, sizes, steps_of, 1, DTYPE, A_TURNED, B_TURNED, BOXES, BIAS,
                    ACTIVATION, GROUP, BLOCK_N, SLOTS)),
        (_produce, (a_desc, b_desc, rings, sizes, step_a, step_b, A_TURNED, B_TURNED, FOLD, GROUP, BLOCK_N, SLOTS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip

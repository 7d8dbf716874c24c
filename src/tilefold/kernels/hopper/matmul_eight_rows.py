"""Products of 8-bit numbers on sm_90 for few rows of x: weights are the left operand of wgmma, rows of x the right one.

A program makes CONSUMERS * 64 rows of W times BLOCK_M rows of x, over `each` steps of 128 * PANELS numbers of the sum:

    producer    1 warp     brings panels of W and of x by the copy engine into a ring of SLOTS buffers
    consumers   4 warps    64 rows of W each

Memory-bound: what counts is that W never stops coming.  EARLY: the kernel before this one makes x's codes, and lets this one
start once all that came before it is through; so the ring is filled with W before this kernel waits for the codes.
Splits of the sum are added by the last to arrive, in their order.
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
from .lowbit_parts import joined_sum
from .matmul_parts import bytes_swizzled

RUNTIME = ["M", "N", "steps", "each", "stride_sb"]


@jit
def _bring_w(w_desc, rings, slot, row, j, BLOCK_M: gl.constexpr, PANELS: gl.constexpr, CONSUMERS: gl.constexpr):
    """Have the panels of W of step j brought to a slot; its barrier waits for x's, too."""
    w_buf, x_buf, full, empty = rings
    mbarrier.expect(full.index(slot), (CONSUMERS * 64 + BLOCK_M) * 128 * PANELS)
    for p in gl.static_range(PANELS):
        place = [row, (j * PANELS + p) * 128]
        tma_load(w_desc, place, full.index(slot), w_buf.index(slot * PANELS + p))


@jit
def _bring_x(x_desc, rings, slot, token, j, PANELS: gl.constexpr):
    """Have the panels of x of step j brought to a slot."""
    w_buf, x_buf, full, empty = rings
    for p in gl.static_range(PANELS):
        tma_load(x_desc, [token, (j * PANELS + p) * 128], full.index(slot), x_buf.index(slot * PANELS + p))


@jit
def _produce(w_desc, x_desc, rings, row, token, first, end, BLOCK_M: gl.constexpr, PANELS: gl.constexpr, CONSUMERS: gl.constexpr,
             SLOTS: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """Make every load; those of W that the ring has room for before x's codes are there."""
    empty = rings[3]
    ahead = gl.minimum(first + SLOTS, end)
    for j in range(first, ahead):
        _bring_w(w_desc, rings, j - first, row, j, BLOCK_M, PANELS, CONSUMERS)
    wait_for_previous(EARLY)
    for j in range(first, ahead):
        _bring_x(x_desc, rings, j - first, token, j, PANELS)
    for j in range(ahead, end):
        slot = (j - first) % SLOTS
        mbarrier.wait(empty.index(slot), (((j - first) // SLOTS) & 1) ^ 1)
        _bring_w(w_desc, rings, slot, row, j, BLOCK_M, PANELS, CONSUMERS)
        _bring_x(x_desc, rings, slot, token, j, PANELS)
    let_next_start(EARLY)


@jit
def _finish(acc, outs, M, N, row, token, number, i_k, SPLITS: gl.constexpr):
    """Add the splits' sums up, if this is the last to arrive, and store them scaled: acc [64 rows of W, BLOCK_M rows of x]."""
    Out, Bias, ScaleA, ScaleB, Part, Arrived, stride_sb, stride_om = outs
    o_n = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    o_m = token + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    inside = (o_n < N)[:, None] & (o_m < M)[None, :]
    place = o_m[None, :].to(gl.int64) * N + o_n[:, None]
    acc, last = joined_sum(acc, Part, Arrived, number, i_k, place, inside, M.to(gl.int64) * N, SPLITS)
    if last:
        out = acc.to(gl.float32) * gl.load(ScaleA + o_m, mask=o_m < M, other=0.0)[None, :]
        out = out * gl.load(ScaleB + o_n.to(gl.int64) * stride_sb, mask=o_n < N, other=0.0)[:, None]
        if Bias is not None:
            out += gl.load(Bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
        gl.store(Out + o_m[None, :].to(gl.int64) * stride_om + o_n[:, None], out.to(Out.dtype.element_ty), mask=inside)


@jit
def _consume(rings, outs, sizes, row, token, item, first, end, i_k, CID: gl.constexpr, SPLITS: gl.constexpr,
             BLOCK_M: gl.constexpr, PANELS: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr,
             EARLY: gl.constexpr):  # fmt: skip
    """Consumer number CID: rows CID * 64 on of this program's tile.  e4m3: sums of 128 are added to fp32 outside of wgmma."""
    w_buf, x_buf, full, empty = rings
    M, N = sizes
    INTEGER: gl.constexpr = w_buf.dtype == gl.int8
    ACC: gl.constexpr = gl.int32 if INTEGER else gl.float32
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    acc = gl.zeros([64, BLOCK_M], ACC, LAYOUT)
    nothing = gl.zeros([64, BLOCK_M], ACC, LAYOUT)
    for j in range(first, end):
        slot = (j - first) % SLOTS
        mbarrier.wait(full.index(slot), ((j - first) // SLOTS) & 1)
        for p in gl.static_range(PANELS):
            w = w_buf.index(slot * PANELS + p).slice(CID * 64, 64, dim=0)
            x = x_buf.index(slot * PANELS + p).permute((1, 0))
            if INTEGER:
                acc = wgmma_wait(0, deps=(wgmma(w, x, acc, is_async=True),))
            else:
                acc += wgmma_wait(0, deps=(wgmma(w, x, nothing, use_acc=False, is_async=True),))
        mbarrier.arrive(empty.index(slot), count=1)
    wait_for_previous(EARLY)  # x's scales
    _finish(acc, outs, M, N, row + CID * 64, token, item * CONSUMERS + CID, i_k, SPLITS)


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
    tiles_m = gl.cdiv(M, BLOCK_M)
    item, i_k = gl.program_id(0), gl.program_id(1)
    row = (item // tiles_m) * (CONSUMERS * 64)
    token = (item % tiles_m) * BLOCK_M
    first = i_k * each
    end = gl.minimum(first + each, steps)
    w_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, CONSUMERS * 64, 128], bytes_swizzled())
    x_buf = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, BLOCK_M, 128], bytes_swizzled())
    full = barriers(SLOTS, 1)
    empty = barriers(SLOTS, CONSUMERS)
    fence_async_shared()
    rings = (w_buf, x_buf, full, empty)
    outs = (Out, Bias, ScaleA, ScaleB, Part, Arrived, stride_sb, stride_om)
    sizes = (M, N)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (rings, outs, sizes, row, token, item, first, end, i_k, 0, SPLITS, BLOCK_M, PANELS, CONSUMERS, SLOTS,
                        EARLY)),
            (_consume, (rings, outs, sizes, row, token, item, first, end, i_k, 1, SPLITS, BLOCK_M, PANELS, CONSUMERS, SLOTS,
                        EARLY)),
            (_produce, (w_desc, x_desc, rings, row, token, first, end, BLOCK_M, PANELS, CONSUMERS, SLOTS, EARLY)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (rings, outs, sizes, row, token, item, first, end, i_k, 0, SPLITS, BLOCK_M, PANELS, CONSUMERS, SLOTS,
                        EARLY)),
            (_produce, (w_desc, x_desc, rings, row, token, first, end, BLOCK_M, PANELS, CONSUMERS, SLOTS, EARLY)),
        ], [1], [24])  # fmt: skip

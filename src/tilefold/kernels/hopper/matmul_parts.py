"""What the matrix product for sm_90 does beside its products: order of tiles, bias, activations, stores.

Epilogues of both warpgroups stand between the products of one tile and the next, so activations are made of few instructions.
"""

from .gluon import (
    KEEP_NAN,
    constexpr_function,
    fence_async_shared,
    gl,
    jit,
    narrowed,
    quick_reciprocal,
    reinterpret,
    thread_barrier,
    tma_store,
    tma_store_wait,
)

RELU, SILU, GELU, GELU_TANH = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3), gl.constexpr(4)  # device.activation
COLUMNS, ROWS, FULL = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)  # device.epilogue
LOG2E = gl.constexpr(1.4426950408889634)
SQRT_HALF = gl.constexpr(0.7071067811865476)
TANH_1 = gl.constexpr(-2.302208198144325)  # -2 sqrt(2 / pi) log2(e), and 0.044715 times that
TANH_3 = gl.constexpr(-0.10294323958002351)
# log2 of the normal distribution's tail beyond t, 0 <= t <= FAR, as a polynomial: right to 6e-5, by a fit of our own
FAR = gl.constexpr(6.0)
TAIL_0, TAIL_1, TAIL_2 = gl.constexpr(-1.0000647306), gl.constexpr(-1.1501742601), gl.constexpr(-0.4612719119)
TAIL_3, TAIL_4, TAIL_5 = gl.constexpr(-0.0511853434), gl.constexpr(0.0071955668), gl.constexpr(-0.0006111001)
TAIL_6 = gl.constexpr(0.0000229900597)


@constexpr_function
def swizzled(rank):
    """The layout of tiles in shared memory: 128 bytes of a row together, as the copy engine and wgmma take them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@constexpr_function
def bytes_swizzled():
    """The same of tiles of 8-bit numbers."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@constexpr_function
def panels_of(columns, turned):
    """Boxes that a tile of B is brought in: 64 columns each, or all at once where k lies side by side."""
    return 1 if turned else columns // 64


@jit
def place_of_work(item, tiles_m, tiles_n, splits, GROUP: gl.constexpr):
    """-> row and column of tiles, batch entry, share of the sum; the order of tiles is device.epilogue.grouped_place's."""
    tiles = tiles_m * tiles_n
    rest = item // tiles
    tile = item - rest * tiles
    i_b = rest // splits
    i_s = rest - i_b * splits
    width = GROUP * tiles_n
    first = tile // width * GROUP
    rows = gl.minimum(tiles_m - first, GROUP)
    inside = tile % width
    return first + inside % rows, inside // rows, i_b, i_s


@jit
def activate(x, ACTIVATION: gl.constexpr, EXACT: gl.constexpr):
    """The activation of x fp32; NaN stays NaN.  EXACT: right to fp32, else to a tenth of what rounding to fp16 costs.

    GELU is max(x, 0) - t tail(t), t = |x|, and the tail 2 to the power of a polynomial: one exponential and 9 multiply-adds, and
    relative to the result the error is the same for small and large -x."""
    if ACTIVATION == RELU:
        return gl.maximum(x, 0.0, propagate_nan=KEEP_NAN)
    elif ACTIVATION == SILU:
        return _share(x, gl.exp2(x * -LOG2E), EXACT)
    elif ACTIVATION == GELU_TANH:
        return _share(x, gl.exp2(x * (TANH_1 + x * x * TANH_3)), EXACT)
    elif ACTIVATION == GELU:
        if EXACT:
            return 0.5 * x * (1.0 + gl.erf(x * SQRT_HALF))
        else:
            t = gl.minimum(gl.abs(x), FAR)
            power = TAIL_3 + t * (TAIL_4 + t * (TAIL_5 + t * TAIL_6))
            tail = gl.exp2(TAIL_0 + t * (TAIL_1 + t * (TAIL_2 + t * power)))
            return gl.maximum(x, 0.0, propagate_nan=KEEP_NAN) - t * tail
    else:
        return x


@jit
def _share(x, e, EXACT: gl.constexpr):
    """x / (1 + e)."""
    if EXACT:
        return x / (1.0 + e)
    else:
        return x * quick_reciprocal(1.0 + e)


@jit
def _halves(x):
    """Left and right half of the columns; they stay in the registers in which they are."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@jit
def pieces_of(acc):
    """acc [64, 128 or 256] as a tuple of [64, 64]."""
    left, right = _halves(acc)
    if acc.shape[1] == 128:
        return (left, right)
    else:
        a, b = _halves(left)
        c, d = _halves(right)
        return (a, b, c, d)


@jit
def scaled_sums(acc, scales, row, column, m, n):
    """Sums of products of bytes from `row` and `column` on, times the factors of rows and columns, in fp32."""
    ScaleA, ScaleB, stride_sa, stride_sb = scales
    x = acc.to(gl.float32)
    if ScaleA is not None:
        rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
        factor = gl.load(ScaleA + rows.to(gl.int64) * stride_sa, mask=rows < m, other=0.0)
        x = x * gl.expand_dims(factor, 1)
    if ScaleB is not None:
        columns = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        factor = gl.load(ScaleB + columns.to(gl.int64) * stride_sb, mask=columns < n, other=0.0)
        x = x * gl.expand_dims(factor, 0)
    return x


@jit
def _add_bias(x, Bias, i_b, rows, columns, m, n, strides, BIAS: gl.constexpr):
    """x plus the bias of rows [64] and columns [64] (int64)."""
    if BIAS == 0:
        return x
    else:
        bias = Bias + i_b.to(gl.int64) * strides[0]
        if BIAS == COLUMNS:
            return x + gl.expand_dims(
                gl.load(bias + columns * strides[2], mask=columns < n, other=0.0).to(gl.float32), 0
            )
        elif BIAS == ROWS:
            return x + gl.expand_dims(gl.load(bias + rows * strides[1], mask=rows < m, other=0.0).to(gl.float32), 1)
        else:
            live = gl.expand_dims(rows < m, 1) & gl.expand_dims(columns < n, 0)
            place = gl.expand_dims(rows * strides[1], 1) + gl.expand_dims(columns * strides[2], 0)
            return x + gl.load(bias + place, mask=live, other=0.0).to(gl.float32)


@jit
def _put(x, desc, Target, views, i_s, i_b, row, column, rows, columns, m, n, strides, CID: gl.constexpr, TURN: gl.constexpr,
         BOXES: gl.constexpr):  # fmt: skip
    """Store x [64, 64] at row and column.  BOXES: through one of this warpgroup's two buffers, which has to be out already."""
    if BOXES:
        buffer = views[0].index(CID * 2 + TURN % 2)
        tma_store_wait(1)
        thread_barrier()
        reinterpret(buffer, buffer.dtype, [64, 64], swizzled(2)).store(narrowed(x, buffer.dtype))
        fence_async_shared()
        thread_barrier()
        tma_store(desc, [i_b, row, column], buffer)
    else:
        live = gl.expand_dims(rows < m, 1) & gl.expand_dims(columns < n, 0)
        place = i_s.to(gl.int64) * strides[3] + i_b.to(gl.int64) * strides[4]
        place = place + (gl.expand_dims(rows * strides[5], 1) + gl.expand_dims(columns, 0))
        gl.store(Target + place, x.to(Target.dtype.element_ty), mask=live)


@jit
def finish_part(acc, o_desc, p_desc, Out, Pre, Bias, staging, CID: gl.constexpr, i_s, i_b, row, column, m, n, strides,
                BOXES: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr):  # fmt: skip
    """Bias, activation and store of a warpgroup's part of a tile, 64 columns at a time."""
    pieces = pieces_of(acc)
    EXACT: gl.constexpr = Out.dtype.element_ty == gl.float32
    SAVED: gl.constexpr = Pre is not None
    for p in gl.static_range(acc.shape[1] // 64):
        x = pieces[p]
        first = column + p * 64
        rows = row.to(gl.int64) + gl.arange(0, 64, layout=gl.SliceLayout(1, x.type.layout))
        columns = first.to(gl.int64) + gl.arange(0, 64, layout=gl.SliceLayout(0, x.type.layout))
        x = _add_bias(x, Bias, i_b, rows, columns, m, n, strides, BIAS)
        if SAVED:
            _put(x, p_desc, Pre, staging, i_s, i_b, row, first, rows, columns, m, n, strides, CID, 0, BOXES)
            _put(activate(x, ACTIVATION, EXACT), o_desc, Out, staging, i_s, i_b, row, first, rows, columns, m, n, strides, CID, 1,
                 BOXES)  # fmt: skip
        else:
            _put(activate(x, ACTIVATION, EXACT), o_desc, Out, staging, i_s, i_b, row, first, rows, columns, m, n, strides, CID, p,
                 BOXES)  # fmt: skip


@jit
def wait_for_stores():
    """Shared memory stays until it has been read."""
    tma_store_wait(0)

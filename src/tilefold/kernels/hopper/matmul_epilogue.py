"""The epilogue of matrix products on sm_90: factors, bias, activation, stores.

Epilogues of both warpgroups stand between the products of one tile and the next, so activations are made of few instructions.
"""

from .gluon import (
    KEEP_NAN,
    descriptor,
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
from .ring import swizzled
from .structs import Buffer, Value, struct

Descriptor = descriptor | gl.constexpr

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


@struct
class Scales:
    """Factors of rows and columns, fp32 by strides, of products of 8-bit numbers; None for none."""

    ScaleA: Value
    ScaleB: Value
    stride_a: Value
    stride_b: Value

    @jit
    def apply(self, acc, row, column, m, n):
        """Sums from `row` and `column` on times their factors, in fp32."""
        x = acc.to(gl.float32)
        if self.ScaleA is not None:
            rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
            factor = gl.load(self.ScaleA + rows.to(gl.int64) * self.stride_a, mask=rows < m, other=0.0)
            x = x * gl.expand_dims(factor, 1)
        if self.ScaleB is not None:
            columns = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
            factor = gl.load(self.ScaleB + columns.to(gl.int64) * self.stride_b, mask=columns < n, other=0.0)
            x = x * gl.expand_dims(factor, 0)
        return x


@struct
class Epilogue:
    """activation(sums + bias), and its store.

    TMA: results go through two buffers of each consumer, staging [4, 1, 64, 64], and o_desc; else straight to Out by strides.
    Pre, p_desc: the same of what the activation is applied to, None where nobody keeps it.  Bias by strides (c), BIAS and
    ACTIVATION as of device.epilogue and device.activation."""

    o_desc: Descriptor
    p_desc: Descriptor
    Out: gl.tensor
    Pre: Value
    Bias: Value
    staging: Buffer
    m: Value
    n: Value
    stride_cb: Value
    stride_cm: Value
    stride_cn: Value
    stride_os: Value
    stride_ob: Value
    stride_om: Value
    TMA: gl.constexpr
    BIAS: gl.constexpr
    ACTIVATION: gl.constexpr

    @jit
    def finish(self, acc, tile, row, column, CID: gl.constexpr):
        """Of consumer CID's sums [64, columns] of a work tile, 64 columns at a time."""
        pieces = pieces_of(acc)
        EXACT: gl.constexpr = self.Out.dtype.element_ty == gl.float32
        for p in gl.static_range(acc.shape[1] // 64):
            x = pieces[p]
            first = column + p * 64
            rows = row.to(gl.int64) + gl.arange(0, 64, layout=gl.SliceLayout(1, x.type.layout))
            columns = first.to(gl.int64) + gl.arange(0, 64, layout=gl.SliceLayout(0, x.type.layout))
            x = self._add_bias(x, tile.batch, rows, columns)
            if self.Pre is not None:
                self._store(x, self.p_desc, self.Pre, tile, row, first, rows, columns, CID, 0)
                x = activate(x, self.ACTIVATION, EXACT)
                self._store(x, self.o_desc, self.Out, tile, row, first, rows, columns, CID, 1)
            else:
                x = activate(x, self.ACTIVATION, EXACT)
                self._store(x, self.o_desc, self.Out, tile, row, first, rows, columns, CID, p)

    @jit
    def drain(self):
        """Wait for the stores: shared memory stays until it has been read."""
        if self.TMA:
            tma_store_wait(0)

    @jit
    def _add_bias(self, x, batch, rows, columns):
        """x plus the bias of rows [64] and columns [64] (int64)."""
        if self.BIAS == 0:
            return x
        else:
            bias = self.Bias + batch.to(gl.int64) * self.stride_cb
            in_columns, in_rows = columns < self.n, rows < self.m
            if self.BIAS == COLUMNS:
                added = gl.load(bias + columns * self.stride_cn, mask=in_columns, other=0.0).to(gl.float32)
                return x + gl.expand_dims(added, 0)
            elif self.BIAS == ROWS:
                added = gl.load(bias + rows * self.stride_cm, mask=in_rows, other=0.0).to(gl.float32)
                return x + gl.expand_dims(added, 1)
            else:
                place = gl.expand_dims(rows * self.stride_cm, 1) + gl.expand_dims(columns * self.stride_cn, 0)
                live = gl.expand_dims(in_rows, 1) & gl.expand_dims(in_columns, 0)
                return x + gl.load(bias + place, mask=live, other=0.0).to(gl.float32)

    @jit
    def _store(self, x, desc, Target, tile, row, column, rows, columns, CID: gl.constexpr, TURN: gl.constexpr):
        """Store x [64, 64] at row and column; by TMA through buffer TURN % 2, whose store before has to be out already."""
        if self.TMA:
            buffer = self.staging.index(CID * 2 + TURN % 2)
            tma_store_wait(1)
            thread_barrier()
            reinterpret(buffer, buffer.dtype, [64, 64], swizzled(2)).store(narrowed(x, buffer.dtype))
            fence_async_shared()
            thread_barrier()
            tma_store(desc, [tile.batch, row, column], buffer)
        else:
            live = gl.expand_dims(rows < self.m, 1) & gl.expand_dims(columns < self.n, 0)
            place = tile.split.to(gl.int64) * self.stride_os + tile.batch.to(gl.int64) * self.stride_ob
            place = place + (gl.expand_dims(rows * self.stride_om, 1) + gl.expand_dims(columns, 0))
            gl.store(Target + place, x.to(Target.dtype.element_ty), mask=live)

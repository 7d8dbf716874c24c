"""x + y of vectors and matrices with any strides: one read of each, one write.  Memory-bound."""

import triton
import triton.language as tl

from ...device.tile import narrow, widen


@triton.jit
def sum_of(x, y, DTYPE: tl.constexpr, EMULATE: tl.constexpr):
    """Sixteen-bit numbers are added in fp32 and rounded once, everything else in its own dtype."""
    if DTYPE.is_fp16() or DTYPE.is_bf16():
        return narrow(widen(x, EMULATE).to(tl.float32) + widen(y, EMULATE).to(tl.float32), DTYPE, EMULATE)
    else:
        return x + y


@triton.jit(do_not_specialize=["elements"])
def add_flat(X, Y, Out, elements, EMULATE: tl.constexpr, BLOCK: tl.constexpr):
    """X, Y, Out: as many elements, one behind the other.  Grid (cdiv(elements, BLOCK),)."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    o = tl.arange(0, BLOCK)
    if first + BLOCK <= elements:  # no mask, which would have to be as aligned as the loads are wide
        x, y = tl.load(X + first + o), tl.load(Y + first + o)
        tl.store(Out + first + o, sum_of(x, y, Out.dtype.element_ty, EMULATE))
    else:
        m = o < elements - first
        x, y = tl.load(X + first + o, mask=m), tl.load(Y + first + o, mask=m)
        tl.store(Out + first + o, sum_of(x, y, Out.dtype.element_ty, EMULATE), mask=m)


@triton.jit(do_not_specialize=["rows"])
def add_strided(
    X, Y, Out, rows, columns, x_strides, y_strides, o_strides, EMULATE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """X, Y, Out [rows, columns], strides (row, column).  WIDE: the elements of a tile may lie 2^31 apart.
    Grid (cdiv(rows, ROWS) * cdiv(columns, COLUMNS),), columns fastest."""
    tiles = tl.cdiv(columns, COLUMNS)
    first_r = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    first_c = (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS
    o_r, o_c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    m = (o_r < rows - first_r)[:, None] & (o_c < columns - first_c)[None, :]
    if WIDE:
        o_r, o_c = o_r.to(tl.int64), o_c.to(tl.int64)
    p_x = X + (first_r * x_strides[0] + first_c * x_strides[1])
    p_y = Y + (first_r * y_strides[0] + first_c * y_strides[1])
    p_o = Out + (first_r * o_strides[0] + first_c * o_strides[1])
    x = tl.load(p_x + (o_r * x_strides[0])[:, None] + (o_c * x_strides[1])[None, :], mask=m)
    y = tl.load(p_y + (o_r * y_strides[0])[:, None] + (o_c * y_strides[1])[None, :], mask=m)
    out = sum_of(x, y, Out.dtype.element_ty, EMULATE)
    tl.store(p_o + (o_r * o_strides[0])[:, None] + (o_c * o_strides[1])[None, :], out, mask=m)

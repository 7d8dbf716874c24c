"""Loads and stores of whole tiles, and the casts between storage and arithmetic."""

import triton
import triton.language as tl


@triton.jit
def widen(x, EMULATE: tl.constexpr):
    """bf16 arithmetic is wrong in Triton's interpreter: there (EMULATE) tiles are computed in fp32."""
    if EMULATE:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def narrow(x, DTYPE: tl.constexpr, EMULATE: tl.constexpr):
    """fp32 -> storage type, to nearest even.  The interpreter truncates to bf16, so EMULATE rounds by hand first."""
    if EMULATE and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def load_rows(base, first, size, stride, WIDE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    """[ROWS, BLOCK_D] from row `first` of `size` rows of DIM elements; whatever lies outside reads as 0.
    WIDE: the rows of one tile lie 2^31 elements or more apart.

    Written with int32 offsets from a scalar base on purpose: if the query's load and store_rows shared an expression, the
    compiler would keep it alive across the fold, 30 to 40 registers a thread."""
    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    o_row = o_r.to(tl.int64) * stride if WIDE else o_r * stride
    p = base + tl.cast(first, tl.int64) * stride + (o_row[:, None] + o_d[None, :])
    inside = (o_r < size - first)[:, None]
    if DIM != BLOCK_D:
        inside = inside & (o_d < DIM)[None, :]
    return tl.load(p, mask=inside, other=0.0)


@triton.jit
def store_rows(base, rows, stride, inside, x, DIM: tl.constexpr, BLOCK_D: tl.constexpr, EMULATE: tl.constexpr):
    """Store x [ROWS, BLOCK_D] fp32 to the rows [ROWS] int64 where `inside` [ROWS] holds."""
    o_d = tl.arange(0, BLOCK_D)
    p = base + (rows * stride)[:, None] + o_d[None, :]
    m = inside[:, None]
    if DIM != BLOCK_D:
        m = m & (o_d < DIM)[None, :]
    tl.store(p, narrow(x, base.dtype.element_ty, EMULATE), mask=m)

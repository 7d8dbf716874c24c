"""What becomes of a product's accumulator: factors, bias, activation, store."""

import triton
import triton.language as tl

from .activation import store_activated
from .tile import widen

NO_BIAS = tl.constexpr(0)
COLUMNS = tl.constexpr(1)
ROWS = tl.constexpr(2)
FULL = tl.constexpr(3)


@triton.jit
def grouped_place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """-> row and column of tile number `tile`.  GROUP rows of tiles are made together, column by column, so that programs that
    run at the same time read few columns of B and few rows of A; GROUP 1 is the plain order, row by row."""
    if GROUP == 1:
        return tile // tiles_n, tile % tiles_n
    else:
        width = GROUP * tiles_n
        first = tile // width * GROUP
        rows = tl.minimum(tiles_m - first, GROUP)
        inside = tile % width
        return first + inside % rows, inside // rows


@triton.jit
def tile_offsets(rows: tl.constexpr, stride_r, columns: tl.constexpr, stride_c, WIDE: tl.constexpr):
    """[rows, columns] offsets from a tile's first element.  WIDE: they reach 2^31."""
    o_r = tl.arange(0, rows)
    o_c = tl.arange(0, columns)
    if WIDE:
        return o_r.to(tl.int64)[:, None] * stride_r + o_c.to(tl.int64)[None, :] * stride_c
    else:
        return o_r[:, None] * stride_r + o_c[None, :] * stride_c


@triton.jit
def finish_tile(acc, Out, Pre, o_tile, Bias, bias, stride_bm, stride_bn, rows, columns, m, n, BIAS: tl.constexpr,
                ACTIVATION: tl.constexpr, EMULATE: tl.constexpr):  # fmt: skip
    """Store the tile at rows [BLOCK_M], columns [BLOCK_N] (int64) of [m, n].  o_tile: offsets of its elements in Out and in Pre,
    which gets what the activation is applied to, or is None.  bias: offset (int64) of this batch entry's in Bias; BIAS: COLUMNS
    or ROWS where all rows or all columns have the same numbers, else FULL, or NO_BIAS."""
    m_tile = (rows < m)[:, None] & (columns < n)[None, :]
    if BIAS == COLUMNS:
        acc += widen(tl.load(Bias + bias + columns * stride_bn, mask=columns < n, other=0.0), EMULATE).to(tl.float32)[
            None, :
        ]
    elif BIAS == ROWS:
        acc += widen(tl.load(Bias + bias + rows * stride_bm, mask=rows < m, other=0.0), EMULATE).to(tl.float32)[:, None]
    elif BIAS == FULL:
        o_bias = bias + (rows * stride_bm)[:, None] + (columns * stride_bn)[None, :]
        acc += widen(tl.load(Bias + o_bias, mask=m_tile, other=0.0), EMULATE).to(tl.float32)
    store_activated(acc, Out, Pre, o_tile, m_tile, ACTIVATION, EMULATE)

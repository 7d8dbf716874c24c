"""[M, N] -> [N, M] in three ways: through registers, by strides, by tensor descriptors.  Memory-bound: one read, one write.

Elements are integers of their size: nothing is computed with them.  Grid (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),), N fastest."""

import triton
import triton.language as tl

RUNTIME = ["rows", "columns"]


@triton.jit
def tile_of_program(columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """-> first row and first column of this program's tile, int64."""
    tiles = tl.cdiv(columns, BLOCK_N)
    i = tl.program_id(0)
    return (i // tiles).to(tl.int64) * BLOCK_M, (i % tiles).to(tl.int64) * BLOCK_N


@triton.jit
def load_tile(
    X, rows, columns, strides, first_m, first_n, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """-> the tile [BLOCK_M, BLOCK_N] and its mask."""
    o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    m = (o_m < rows - first_m)[:, None] & (o_n < columns - first_n)[None, :]
    if WIDE:
        o_m, o_n = o_m.to(tl.int64), o_n.to(tl.int64)
    p = X + (first_m * strides[0] + first_n * strides[1]) + (o_m * strides[0])[:, None] + (o_n * strides[1])[None, :]
    return tl.load(p, mask=m), m


@triton.jit
def transpose_registers(
    X, Out, rows, columns, strides, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tile is turned where it is, and stored row by row of the result: Out [columns, rows], contiguous."""
    first_m, first_n = tile_of_program(columns, BLOCK_M, BLOCK_N)
    b, _ = load_tile(X, rows, columns, strides, first_m, first_n, WIDE, BLOCK_M, BLOCK_N)
    o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    m = (o_n < columns - first_n)[:, None] & (o_m < rows - first_m)[None, :]
    if WIDE:
        o_n = o_n.to(tl.int64)
    p = Out + (first_n * rows + first_m) + (o_n * rows)[:, None] + o_m[None, :]
    tl.store(p, tl.trans(b), mask=m)


@triton.jit
def transpose_strides(
    X, Out, rows, columns, strides, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tile is stored as it was loaded, to addresses whose two offsets are swapped: Out [columns, rows], contiguous."""
    first_m, first_n = tile_of_program(columns, BLOCK_M, BLOCK_N)
    b, m = load_tile(X, rows, columns, strides, first_m, first_n, WIDE, BLOCK_M, BLOCK_N)
    o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if WIDE:
        o_n = o_n.to(tl.int64)
    p = Out + (first_n * rows + first_m) + o_m[:, None] + (o_n * rows)[None, :]
    tl.store(p, b, mask=m)


@triton.jit(do_not_specialize=RUNTIME)
def transpose_descriptors(X, Out, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """X: descriptor of [rows, columns] with boxes [BLOCK_M, BLOCK_N]; Out: of [columns, rows] with boxes [BLOCK_N, BLOCK_M].
    What lies outside is neither read nor written."""
    tiles = tl.cdiv(columns, BLOCK_N)
    i_m = tl.program_id(0) // tiles * BLOCK_M
    i_n = tl.program_id(0) % tiles * BLOCK_N
    Out.store([i_n, i_m], tl.trans(X.load([i_m, i_n])))

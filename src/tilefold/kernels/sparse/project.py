"""Rows for blocks: a weighted sum over the valid tokens of each block, the map back, and the gradient of the weights.

    gather_blocks          rows[i] = sum of f_t x_t over the valid tokens t of block i
    spread_blocks          x_t = f_t rows[i] for the valid tokens t of block i, 0 for the others: the transpose, so each is the
                           other's gradient
    block_weight_gradient  what one block adds to the gradient of the weights

f_t is 1 / size (MEAN), w_t * BLOCK / size (WEIGHTED) or 1 (SUM), size being the block's number of valid tokens.  A program
makes one block of one head, heads fastest: where heads lie side by side, neighbours read neighbouring memory.  Nothing past a
block's size is read.  Grid (H * blocks * B,).
"""

import triton
import triton.language as tl

from ...device.tile import store_rows, widen

MEAN = tl.constexpr(0)
WEIGHTED = tl.constexpr(1)
SUM = tl.constexpr(2)

RUNTIME = ["seq", "heads", "blocks", "stride_sb", "stride_sh", "stride_wh"]


@triton.jit
def block_of_program(Sizes, seq, heads, blocks, stride_sb, stride_sh, BLOCK: tl.constexpr):
    """-> block, batch, head (int64), and how many of the block's tokens are valid."""
    pid = tl.program_id(0)
    i_h = (pid % heads).to(tl.int64)
    i_n = (pid // heads % blocks).to(tl.int64)
    i_b = (pid // heads // blocks).to(tl.int64)
    size = tl.minimum(seq - i_n * BLOCK, BLOCK).to(tl.int32)
    if Sizes is not None:
        given = tl.load(Sizes + i_b * stride_sb + i_h * stride_sh + i_n)
        size = tl.minimum(size, tl.maximum(given, 0))
    return i_n, i_b, i_h, size


@triton.jit
def load_tokens(x, first, size, stride, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[ROWS, BLOCK_D] tokens of a block from its row `first` on, 0 past its size."""
    o_t = first + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    inside = (o_t < size)[:, None]
    if DIM != BLOCK_D:
        inside = inside & (o_d < DIM)[None, :]
    return tl.load(x + (o_t.to(tl.int64) * stride)[:, None] + o_d[None, :], mask=inside, other=0.0)


@triton.jit
def common_factor(size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """What every f_t of a block has in common; BLOCK / size as BLOCK * (1 / size), so that weights of 1 / BLOCK give the bits
    of MEAN."""
    inverse = 1.0 / tl.maximum(size, 1).to(tl.float32)
    if KIND == MEAN:
        return inverse
    elif KIND == WEIGHTED:
        return inverse * BLOCK
    else:
        return inverse * 0.0 + 1.0


@triton.jit(do_not_specialize=RUNTIME)
def gather_blocks(
    X, Weight, Sizes, Rows, seq, heads, blocks,
    stride_xb, stride_xn, stride_xh, stride_rb, stride_rn, stride_rh, stride_wh, stride_sb, stride_sh,
    KIND: tl.constexpr, EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """X [B, seq, H, DIM], Weight [H, BLOCK] (WEIGHTED; stride 0: shared) or None, Sizes [B, H, blocks] int32 (stride 0: shared)
    or None -> Rows [B, blocks, H, DIM]; summed in fp32."""
    i_n, i_b, i_h, size = block_of_program(Sizes, seq, heads, blocks, stride_sb, stride_sh, BLOCK)
    x = X + i_b * stride_xb + i_n * BLOCK * stride_xn + i_h * stride_xh
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.static_range(0, BLOCK, ROWS):
        # [ROWS, D]
        tile = widen(load_tokens(x, first, size, stride_xn, ROWS, DIM, BLOCK_D), EMULATE).to(tl.float32)
        if KIND == WEIGHTED:
            w = tl.load(Weight + i_h * stride_wh + first + tl.arange(0, ROWS)).to(tl.float32)
            tile = tile * w[:, None]
        acc += tile
    row = tl.sum(acc, 0) * common_factor(size, KIND, BLOCK)
    one = tl.arange(0, 1)
    store_rows(
        Rows + i_b * stride_rb + i_h * stride_rh, i_n + one, stride_rn, one < 1, row[None, :], DIM, BLOCK_D, EMULATE
    )


@triton.jit(do_not_specialize=RUNTIME)
def spread_blocks(
    Rows, Weight, Sizes, X, seq, heads, blocks,
    stride_rb, stride_rn, stride_rh, stride_xb, stride_xn, stride_xh, stride_wh, stride_sb, stride_sh,
    KIND: tl.constexpr, EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows [B, blocks, H, DIM] -> X [B, seq, H, DIM]; Weight and Sizes as for gather_blocks."""
    i_n, i_b, i_h, size = block_of_program(Sizes, seq, heads, blocks, stride_sb, stride_sh, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    p_row = Rows + i_b * stride_rb + i_n * stride_rn + i_h * stride_rh + o_d
    row = widen(tl.load(p_row, mask=o_d < DIM, other=0.0), EMULATE).to(tl.float32)
    row = row * common_factor(size, KIND, BLOCK)
    x = X + i_b * stride_xb + i_n * BLOCK * stride_xn + i_h * stride_xh
    for first in tl.static_range(0, BLOCK, ROWS):
        o_t = first + tl.arange(0, ROWS)
        tile = tl.zeros([ROWS, 1], tl.float32) + row[None, :]
        if KIND == WEIGHTED:
            tile = tile * tl.load(Weight + i_h * stride_wh + o_t).to(tl.float32)[:, None]
        tile = tl.where((o_t < size)[:, None], tile, 0.0)
        store_rows(x, o_t.to(tl.int64), stride_xn, i_n * BLOCK + o_t < seq, tile, DIM, BLOCK_D, EMULATE)


@triton.jit(do_not_specialize=[name for name in RUNTIME if name != "stride_wh"])
def block_weight_gradient(
    X, DRows, Sizes, Part, seq, heads, blocks,
    stride_xb, stride_xn, stride_xh, stride_rb, stride_rn, stride_rh, stride_sb, stride_sh,
    EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """X [B, seq, H, DIM], DRows [B, blocks, H, DIM] -> Part [B, blocks, H, BLOCK] fp32 contiguous: x_t . drow * BLOCK / size for
    the valid tokens of each block, 0 for the others."""
    i_n, i_b, i_h, size = block_of_program(Sizes, seq, heads, blocks, stride_sb, stride_sh, BLOCK)
    o_d = tl.arange(0, BLOCK_D)
    p_row = DRows + i_b * stride_rb + i_n * stride_rn + i_h * stride_rh + o_d
    row = widen(tl.load(p_row, mask=o_d < DIM, other=0.0), EMULATE).to(tl.float32) * common_factor(
        size, WEIGHTED, BLOCK
    )
    x = X + i_b * stride_xb + i_n * BLOCK * stride_xn + i_h * stride_xh
    part = Part + tl.program_id(0).to(tl.int64) * BLOCK  # [B, blocks, H] is the order of the programs
    for first in tl.static_range(0, BLOCK, ROWS):
        o_t = first + tl.arange(0, ROWS)
        tile = widen(load_tokens(x, first, size, stride_xn, ROWS, DIM, BLOCK_D), EMULATE).to(tl.float32)
        tl.store(part + o_t, tl.where(o_t < size, tl.sum(tile * row[None, :], 1), 0.0))

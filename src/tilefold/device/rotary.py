"""Rotary position embedding of a tile of rows: pairs of channels turn by an angle that a table holds for each position.

Pair i is the channels (2i, 2i + 1) if interleaved, else (i, i + rotated / 2); source: RoPE (Su et al. 2021, arXiv:2104.09864).
"""

import triton
import triton.language as tl

from .encode import PLAIN, store_encoded


@triton.jit
def load_angles(Cos, Sin, position, live, seq_table, stride_c, stride_s, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr):
    """-> cos, sin [M, P] fp32 of the int64 positions [M]; positions past the table do not turn: 1 and 0."""
    o_p = tl.arange(0, BLOCK_P)
    inside = (live & (position >= 0) & (position < seq_table))[:, None] & (o_p < PAIRS)[None, :]
    cos = tl.load(Cos + (position * stride_c)[:, None] + o_p[None, :], mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(Sin + (position * stride_s)[:, None] + o_p[None, :], mask=inside, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def turn_rows(X, rows_x, inside, Out, rows_o, live, factor, cos, sin, INTERLEAVED: tl.constexpr, CODE: tl.constexpr,
              EMULATE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    """Write the first 2 * PAIRS channels of the rows, turned; rows_x, rows_o [M] int64: element offsets of the rows.

    Rows are read where `inside` [M] and written where `live` [M] holds: what is read need not wait for what says where to write.
    factor, CODE: see `store_encoded`.  Each thread writes the pairs that it has read, so Out may be X."""
    if INTERLEAVED:
        o_d = tl.arange(0, 2 * BLOCK_P)
        channel = (o_d < 2 * PAIRS)[None, :]
        # [M, P, 2]
        x = tl.load(X + rows_x[:, None] + o_d[None, :], mask=inside[:, None] & channel, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [x.shape[0], BLOCK_P, 2]))
        turned = tl.join(first * cos - second * sin, first * sin + second * cos)
        turned = tl.reshape(turned, [x.shape[0], 2 * BLOCK_P])
        store_encoded(Out, rows_o[:, None] + o_d[None, :], turned, factor, live[:, None] & channel, CODE, EMULATE)
    else:
        o_p = tl.arange(0, BLOCK_P)
        channel = (o_p < PAIRS)[None, :]
        p = X + rows_x[:, None] + o_p[None, :]
        first = tl.load(p, mask=inside[:, None] & channel, other=0.0).to(tl.float32)
        second = tl.load(p + PAIRS, mask=inside[:, None] & channel, other=0.0).to(tl.float32)
        o_out = rows_o[:, None] + o_p[None, :]
        m = live[:, None] & channel
        store_encoded(Out, o_out, first * cos - second * sin, factor, m, CODE, EMULATE)
        store_encoded(Out, o_out + PAIRS, first * sin + second * cos, factor, m, CODE, EMULATE)


@triton.jit
def copy_rows(X, rows_x, inside, Out, rows_o, live, factor, CODE: tl.constexpr, EMULATE: tl.constexpr, FIRST: tl.constexpr,
              DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Write the channels FIRST to DIM of the rows as they are, or, if CODE says so, encoded."""
    if FIRST < DIM:
        o_d = FIRST + tl.arange(0, BLOCK_D)
        channel = (o_d < DIM)[None, :]
        x = tl.load(X + rows_x[:, None] + o_d[None, :], mask=inside[:, None] & channel)
        m = live[:, None] & channel
        if CODE == PLAIN:
            tl.store(Out + rows_o[:, None] + o_d[None, :], x, mask=m)
        else:
            store_encoded(Out, rows_o[:, None] + o_d[None, :], x.to(tl.float32), factor, m, CODE, EMULATE)

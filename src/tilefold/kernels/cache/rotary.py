"""Rotary position embedding of x, into a new tensor or in place; its backward pass is the same with the angles negated.

Memory-bound: 2 * rotated channels * itemsize bytes a row and head, and the table once (L2 serves the other heads).
"""

import triton
import triton.language as tl

from ...device.encode import PLAIN
from ...device.grid import rows_of_sequence
from ...device.rotary import copy_rows, load_angles, turn_rows

RUNTIME = ["offset", "seq", "seq_table", "heads", "step"]


@triton.jit(do_not_specialize=RUNTIME)
def rotary(
    X, Out, Cos, Sin, Offsets, CuSeqlens, offset, seq, seq_table, heads, step,
    stride_xb, stride_xm, stride_xh, stride_ob, stride_om, stride_oh, stride_c, stride_s,
    INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr, COPY: tl.constexpr, EMULATE: tl.constexpr, DIM: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """X, Out [B, S, H, DIM], or [T, H, DIM] with CuSeqlens [B + 1] int32 and seq the longest sequence (then stride_xb and
    stride_ob are 0); Cos, Sin [seq_table, PAIRS].  Row i of sequence b has position offset + Offsets[b] + i * step, Offsets
    [B] int32 or int64 or None.  CONJUGATE: turn back.  COPY: Out is not X, and the channels that do not turn are copied.
    Grid (cdiv(S, BLOCK_M) * H * B,), head fastest: the heads share the table's rows in L2."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(seq, BLOCK_M)
    i_h = (pid % heads).to(tl.int64)
    i_m = pid // heads % tiles
    i_b = (pid // heads // tiles).to(tl.int64)
    first, length = rows_of_sequence(CuSeqlens, i_b, seq)
    if i_m * BLOCK_M >= length:
        return
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    live = o_m < length
    position = o_m.to(tl.int64) * step + offset
    if Offsets is not None:
        position += tl.load(Offsets + i_b).to(tl.int64)
    cos, sin = load_angles(Cos, Sin, position, live, seq_table, stride_c, stride_s, PAIRS, BLOCK_P)
    if CONJUGATE:
        sin = -sin
    rows_x = i_b * stride_xb + (first + o_m) * stride_xm + i_h * stride_xh
    rows_o = i_b * stride_ob + (first + o_m) * stride_om + i_h * stride_oh
    turn_rows(X, rows_x, live, Out, rows_o, live, None, cos, sin, INTERLEAVED, PLAIN, EMULATE, PAIRS, BLOCK_P)
    if COPY:
        copy_rows(X, rows_x, live, Out, rows_o, live, None, PLAIN, EMULATE, 2 * PAIRS, DIM, BLOCK_R)

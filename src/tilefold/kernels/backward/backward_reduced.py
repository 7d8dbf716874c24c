"""The last step of a backward pass that adds dq in memory: its fp32 sums, scaled, rounded, and in rows and columns."""

import triton
import triton.language as tl

from ...device.sequences import place_of_sequence, rows_of_sequence, sequence_of_place

RUNTIME = ["scale", "seq_q", "heads", "q_tiles", "batch", "steps", "max_q"]


@triton.jit(do_not_specialize=RUNTIME)
def backward_reduced(
    Sums, DQ, scale, seq_q, heads, q_tiles, CuQ, batch, steps, max_q, stride_gb, stride_gm, stride_gh,
    QUERIES: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums [B * H * q_tiles, QUERIES * D] fp32: of each tile of QUERIES queries two parts, each [64, 64] in the order of the
    registers of a warpgroup (kernels.hopper.dq_sums); DQ [B, Sq, H, COLUMNS] by strides, all rows of which are written.

    Parts are columns side by side (QUERIES = 64, D = 128; of 80 and 96 the second has what is left) or rows one after the other
    (128, 64).

    CuQ [batch + 1] int32 of packed sequences, or None: DQ is [total_q, H, COLUMNS], q_tiles are places of tiles
    (device.sequences) and stand for B = 1; steps = (batch - 1).bit_length().  Grid (B * H * q_tiles * 2,)."""
    item = tl.program_id(0)
    part = item % 2
    i_m = item // 2 % q_tiles
    i_bh = (item // 2 // q_tiles).to(tl.int64)
    place, inside = tl.arange(0, 4096), QUERIES * D - part * 4096
    x = tl.load(Sums + (item // 2).to(tl.int64) * (QUERIES * D) + part * 4096 + place, mask=place < inside, other=0.0)
    x = x.reshape(8, 4, 8, 4, 2, 2)  # group of 8 columns, warp, row of 8, thread of a quad, row half, column
    x = x.permute(1, 4, 2, 0, 3, 5).reshape(64, 64)
    o_r, o_d = tl.arange(0, 64), tl.arange(0, 64)
    row = i_m * QUERIES + o_r
    if QUERIES == 64:
        o_d += part * 64
    else:
        row += part * 64
    out = DQ + (i_bh % heads) * stride_gh
    if CuQ is None:
        out += (i_bh // heads) * stride_gb
    else:
        i_b = sequence_of_place(CuQ, i_m, batch, steps, QUERIES)
        before, _places = place_of_sequence(CuQ, i_b, QUERIES)
        first, seq_q = rows_of_sequence(CuQ, i_b, max_q)
        row -= before * QUERIES
        seq_q = tl.where(i_m < before, 0, seq_q)  # of no sequence
        out += first.to(tl.int64) * stride_gm
    place = row.to(tl.int64)[:, None] * stride_gm + o_d[None, :]
    tl.store(out + place, (x * scale).to(DQ.dtype.element_ty), mask=(row[:, None] < seq_q) & (o_d[None, :] < COLUMNS))

"""What every backward pass needs of a row before its products: delta = sum(out * dout) - dlse, and lse in base 2."""

import triton
import triton.language as tl

from ...device.gradient import statistics_of_rows
from ...device.tile import load_rows

RUNTIME = ["seq_q", "heads"]


@triton.jit(do_not_specialize=RUNTIME)
def backward_delta(
    Out, DOut, Lse, DLse, Lse2, Delta, seq_q, heads, stride_ob, stride_om, stride_oh, stride_db, stride_dm, stride_dh,
    WIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Out, DOut [B, Sq, H, D]; Lse, DLse (or None), Lse2, Delta [B, H, Sq] fp32 contiguous.  Grid (cdiv(Sq, BLOCK_M) * H * B,).

    A packed batch is one sequence here."""
    tiles = tl.cdiv(seq_q, BLOCK_M)
    pid = tl.program_id(0)
    i_m, i_bh = pid % tiles, (pid // tiles).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    out = load_rows(
        Out + i_b * stride_ob + i_h * stride_oh, i_m * BLOCK_M, seq_q, stride_om, WIDE, BLOCK_M, DIM, BLOCK_D
    )
    do = load_rows(
        DOut + i_b * stride_db + i_h * stride_dh, i_m * BLOCK_M, seq_q, stride_dm, WIDE, BLOCK_M, DIM, BLOCK_D
    )
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = i_bh * seq_q + o_m
    lse = tl.load(Lse + row, mask=o_m < seq_q, other=0.0)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if DLse is not None:
        delta -= tl.load(DLse + row, mask=o_m < seq_q, other=0.0)
    lse2, delta = statistics_of_rows(lse, delta)
    tl.store(Lse2 + row, lse2, mask=o_m < seq_q)
    tl.store(Delta + row, delta, mask=o_m < seq_q)

"""Statistics of units of 64 queries for the Hopper kernels of the backward pass: what is subtracted from scores and from dp.

As kernels.backward_delta, but unit by unit in the form that the copy engine brings to shared memory in one piece, and with
every reason why a query may count for nothing already in it: past the sequence, past its block's valid queries, no live key.
"""

import triton
import triton.language as tl

from ...device.gradient import no_statistics
from ...device.state import LOG2E
from ...device.tile import load_rows

RUNTIME = ["seq_q", "heads", "q_units", "counters", "stride_pb", "stride_ph"]


@triton.jit(do_not_specialize=RUNTIME)
def backward_statistics(
    Out, DOut, Lse, DLse, QuerySizes, Statistics, Progress,
    seq_q, heads, q_units, counters,
    stride_ob, stride_om, stride_oh, stride_db, stride_dm, stride_dh, stride_pb, stride_ph,
    WIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Out, DOut [B, Sq, H, D]; Lse, DLse (or None) [B, H, Sq] fp32 contiguous; QuerySizes [B, H, Qb] int32 or None, of
    query blocks of PER units; Statistics [B * H * q_units + 1, 2, UNIT] fp32: lse in base 2, or +inf; delta = sum(out * dout) -
    dlse, or 0.  Progress [counters] int32: becomes 0, for the kernel that follows.

    Grid (B * H * q_units + 1,), q_units = Qb * PER: the last program makes the row of a unit without queries."""
    item = tl.program_id(0)
    i_u, i_bh = item % q_units, (item // q_units).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    o_r = tl.arange(0, UNIT)
    stats = Statistics + item.to(tl.int64) * (2 * UNIT)
    if item == tl.num_programs(0) - 1:
        no_statistics(stats, Progress, counters, UNIT, UNIT)
        return
    end = seq_q
    if QuerySizes is not None:
        end = tl.minimum(
            end, (i_u // PER) * (PER * UNIT) + tl.load(QuerySizes + i_b * stride_pb + i_h * stride_ph + i_u // PER)
        )
    out = load_rows(Out + i_b * stride_ob + i_h * stride_oh, i_u * UNIT, end, stride_om, WIDE, UNIT, DIM, BLOCK_D)
    do = load_rows(DOut + i_b * stride_db + i_h * stride_dh, i_u * UNIT, end, stride_dm, WIDE, UNIT, DIM, BLOCK_D)
    rows = i_u * UNIT + o_r
    lse = tl.load(Lse + i_bh * seq_q + rows, mask=rows < end, other=float("-inf"))
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if DLse is not None:
        delta -= tl.load(DLse + i_bh * seq_q + rows, mask=rows < end, other=0.0)
    nothing = lse == float("-inf")
    tl.store(stats + o_r, tl.where(nothing, float("inf"), lse * LOG2E))
    tl.store(stats + UNIT + o_r, tl.where(nothing, 0.0, delta))

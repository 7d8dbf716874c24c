"""Merge the partial results of a split: out and lse over disjoint keys -> out and lse over all of them."""

import triton
import triton.language as tl

from ...device.grid import let_next_kernel_start, wait_for_previous_kernel
from ...device.state import LOG2E, state_finish, state_init, state_merge
from ...device.tile import narrow

RUNTIME = [
    "splits",
    "batch",
    "seq_q",
    "heads",
    "stride_ob",
    "stride_om",
    "stride_oh",
    "stride_ps",
    "stride_pb",
    "stride_pm",
]


@triton.jit(do_not_specialize=RUNTIME)
def combine(
    Part, PartLse, Out, Lse, splits, batch, seq_q, heads, stride_ps, stride_pb, stride_pm, stride_ph, stride_ob, stride_om,
    stride_oh,
    EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Part [S, B, Sq, H, D] fp32, PartLse [S, B, H, Sq] natural log -> Out [B, Sq, H, D], Lse [B, H, Sq].  One row a
    program, grid (Sq * H * B,).  EARLY: launched as a dependent kernel of the one that makes the
    partials.  An empty partial (lse -inf) is the identity, whatever its out holds."""
    pid = tl.program_id(0)
    i_m = (pid % seq_q).to(tl.int64)
    i_h = (pid // seq_q % heads).to(tl.int64)
    i_b = (pid // seq_q // heads).to(tl.int64)
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, BLOCK_D)
    row = (i_b * heads + i_h) * seq_q + i_m
    let_next_kernel_start(EARLY)
    wait_for_previous_kernel(EARLY)
    acc, m, l = state_init(1, BLOCK_D)
    for first in range(0, splits, BLOCK_S):
        i_s = (first + o_s).to(tl.int64)
        # [S]
        m_s = tl.load(PartLse + i_s * batch * heads * seq_q + row, mask=i_s < splits, other=float("-inf")) * LOG2E
        # [S, D], loaded without waiting for m_s
        p = Part + (i_s * stride_ps + i_b * stride_pb + i_m * stride_pm + i_h * stride_ph)[:, None] + o_d[None, :]
        part = tl.load(p, mask=(i_s < splits)[:, None] & (o_d < DIM)[None, :], other=0.0)
        part = tl.where((m_s > float("-inf"))[:, None], part, 0.0)
        m_t = tl.max(m_s, 0, keep_dims=True)
        w = tl.exp2(m_s - tl.where(m_t == float("-inf"), 0.0, m_t))
        acc, m, l = state_merge(
            acc, m, l, tl.sum(part * w[:, None], 0, keep_dims=True), m_t, tl.sum(w, 0, keep_dims=True)
        )
    out, lse = state_finish(acc, m, l)
    p_out = Out + i_b * stride_ob + i_m * stride_om + i_h * stride_oh + o_d[None, :]
    tl.store(p_out, narrow(out, Out.dtype.element_ty, EMULATE), mask=(o_d < DIM)[None, :])
    tl.store(Lse + row + tl.arange(0, 1), lse)

"""Merge two finished results over disjoint keys: out and lse of both -> out and lse over all keys.  Any strides.

Memory-bound: it reads both results and writes one.  An empty result (lse -inf) is the identity to the bit.
"""

import triton
import triton.language as tl

from ...device.state import LOG2E, state_finish, state_merge
from ...device.tile import narrow

RUNTIME = ["batch", "seq", "heads"]


@triton.jit
def load_result(Part, Lse, rows, place, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """-> out [M, D] fp32, 0 where there was no live key, and lse [M], natural log."""
    o_d = tl.arange(0, BLOCK_D)
    lse = tl.load(Lse + place, mask=live, other=float("-inf"))
    out = tl.load(Part + rows[:, None] + o_d[None, :], mask=live[:, None] & (o_d < DIM)[None, :], other=0.0).to(
        tl.float32
    )
    return tl.where((lse == float("-inf"))[:, None], 0.0, out), lse


@triton.jit(do_not_specialize=RUNTIME)
def merge_results(
    A, LseA, B, LseB, Out, Lse, batch, seq, heads, stride_ab, stride_am, stride_ah, stride_bb, stride_bm, stride_bh,
    stride_ob, stride_om, stride_oh, stride_eb, stride_eh, stride_em, stride_fb, stride_fh, stride_fm, stride_lb, stride_lh,
    stride_lm, EMULATE: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A, B, Out [batch, seq, heads, DIM]; LseA (strides e), LseB (f), Lse (l) [batch, heads, seq] fp32, natural log.
    Grid (cdiv(batch * seq * heads, BLOCK_M),), heads fastest."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < batch * seq * heads
    i_h = (row % heads).to(tl.int64)
    i_m = (row // heads % seq).to(tl.int64)
    i_b = (row // heads // seq).to(tl.int64)
    rows = i_b * stride_ab + i_m * stride_am + i_h * stride_ah
    a, lse_a = load_result(A, LseA, rows, i_b * stride_eb + i_h * stride_eh + i_m * stride_em, live, DIM, BLOCK_D)
    rows = i_b * stride_bb + i_m * stride_bm + i_h * stride_bh
    b, lse_b = load_result(B, LseB, rows, i_b * stride_fb + i_h * stride_fh + i_m * stride_fm, live, DIM, BLOCK_D)
    # Relative to the larger lse nothing is lost to the change of base, and the empty result changes no bit of the other.
    top = tl.maximum(lse_a, lse_b)
    top = tl.where(top == float("-inf"), 0.0, top)
    l_a, l_b = tl.where(lse_a == float("-inf"), 0.0, 1.0), tl.where(lse_b == float("-inf"), 0.0, 1.0)
    acc, m, l = state_merge(a, (lse_a - top) * LOG2E, l_a, b, (lse_b - top) * LOG2E, l_b)
    out, lse = state_finish(acc, m, l)
    o_d = tl.arange(0, BLOCK_D)
    o_out = i_b * stride_ob + i_m * stride_om + i_h * stride_oh
    m_out = live[:, None] & (o_d < DIM)[None, :]
    tl.store(Out + o_out[:, None] + o_d[None, :], narrow(out, Out.dtype.element_ty, EMULATE), mask=m_out)
    tl.store(Lse + i_b * stride_lb + i_h * stride_lh + i_m * stride_lm, top + lse, mask=live)

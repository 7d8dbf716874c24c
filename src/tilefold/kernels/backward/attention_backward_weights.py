"""What is left of each row's probabilities being 1 in sum when they are computed again from an lse that was rounded.

lse is as good as fp32 holds it, to eps times its size, and an error of lse is a factor upon every probability of its row.
For fp32 inputs that is the largest error of all gradients (|lse| is 5 to 10 where a rounding of a product is 1), and it grows
with the scores.  So their probabilities are divided by their sum, as those of the forward pass were: one more product upon
seven.  16-bit inputs round a probability a thousand times as coarsely and do without.
"""

import triton
import triton.language as tl

from ...device.gradient import fold_probabilities
from ...device.grid import place_of_program, rows_of_sequence
from ...device.ranges import band_of_sequence, range_of_tile
from ...device.source import side_of
from ...device.state import LOG2E
from ...device.tile import load_rows, widen

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "left", "right", "stride_sinks", "stride_lb", "stride_lh"]


@triton.jit(do_not_specialize=RUNTIME)
def attention_backward_weights(
    Q, K, Lse2, Weight, Sinks, CuQ, CuK,
    scale, seq_q, seq_k, heads, group, left, right, stride_sinks,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_lb, stride_lh,
    score_mods, mask_mods,
    KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr,
):  # fmt: skip
    """Q [B, Sq, H, D], K [B, Sk, H/group, D], Lse2 [B, H, Sq] fp32, Sinks [H] or None -> Weight like Lse2: 1 over the sum of
    exp2(score - lse) of each row's keys and sink, 1 for a row without any.  Packed, as attention_backward_queries; rows of no
    sequence are not written.  Grid (cdiv(Sq, BLOCK_M) * H * B,)."""
    i_m, i_b, i_h = place_of_program(seq_q, heads, True, BLOCK_M)
    first_q, seq_q = rows_of_sequence(CuQ, i_b, seq_q)
    first_k, seq_k = rows_of_sequence(CuK, i_b, seq_k)
    if i_m * BLOCK_M >= seq_q:
        return
    q = load_rows(Q + i_b * stride_qb + first_q * stride_qm + i_h * stride_qh, i_m * BLOCK_M, seq_q, stride_qm, WIDE,
                  BLOCK_M, DIM_QK, BLOCK_QK)  # fmt: skip
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = i_b * stride_lb + i_h * stride_lh + first_q
    lse = tl.load(Lse2 + row + o_m, mask=o_m < seq_q, other=float("inf"))
    place = (i_b.to(tl.int32), i_h.to(tl.int32), tl.minimum(o_m, seq_q - 1)[:, None], (seq_q, seq_k))
    k_side = side_of(K, i_b, i_h // group, first_k, stride_kb, stride_kn, stride_kh, False)
    left, right = band_of_sequence(left, right, i_b, KIND)
    lo, _, _, hi = range_of_tile(i_m, seq_q, seq_k, left, right, KIND, BLOCK_M, BLOCK_N)
    total = tl.zeros([BLOCK_M], tl.float32)
    if Sinks is not None:
        total = tl.exp2(tl.load(Sinks + i_h * stride_sinks).to(tl.float32) * LOG2E - lse)
    total = fold_probabilities(total, widen(q, EMULATE), lse[:, None], lo, hi, place, scale, (seq_k,), k_side, score_mods,
                               mask_mods, (left, right), KIND, EMULATE, BLOCK_N, DIM_QK, BLOCK_QK)  # fmt: skip
    tl.store(Weight + row + o_m, 1.0 / tl.where(total == 0.0, 1.0, total), mask=o_m < seq_q)

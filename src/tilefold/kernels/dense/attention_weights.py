"""The weights of attention written out, with what dropout does to them: for looking at, as flash_attn's S_dmask is.

Row i holds exp(score - the row's largest score), negative where the weight was dropped, 0 where the query does not see the key.
It reads the scores twice (the maximum, then the weights) and writes Sq * Sk numbers a head: for tests, not for training.
"""

import triton
import triton.language as tl

from ...device.dropout import dropout_factor
from ...device.grid import place_of_program, rows_of_sequence
from ...device.mods import mask_band, modify
from ...device.source import fetch_rows, locate_rows
from ...device.tile import load_rows, narrow, widen

RUNTIME = ["scale", "max_q", "max_k", "heads", "group", "left", "right", "smallest"]


@triton.jit
def scores_of_tile(q, i, place, scale, k_side, score_mods, band, KIND: tl.constexpr, EMULATE: tl.constexpr,
                   BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """-> scores [M, N] of key tile i in natural units, -inf where masked, the keys' indices [N] and which of them there are."""
    seq_k = place[3][1]
    rows, cols, live = locate_rows(i, (seq_k,), BLOCK_N)
    k = fetch_rows(k_side, rows, live, True, EMULATE, BLOCK_N, DIM, BLOCK_D)
    kv_index = tl.minimum(cols, seq_k - 1)[None, :]
    s = modify(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, place, kv_index, score_mods)
    s = tl.where(live[None, :], s, float("-inf"))
    return mask_band(s, place, kv_index, band, KIND), cols, live


@triton.jit(do_not_specialize=RUNTIME)
def attention_weights(
    Q, K, Weights, CuQ, CuK, scale, max_q, max_k, heads, group, left, right, smallest,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_wb, stride_wh, stride_wm, score_mods, dropout,
    KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Q [B, Sq, H, D], K [B, Sk, H/group, D], or packed with CuQ, CuK [B + 1] int32; Weights [B, H, >= Sq, >= Sk], of which what
    lies outside of the sequences is not written.  smallest: what a dropped weight is at least, so that its sign shows.
    Grid (cdiv(max_q, BLOCK_M) * H * B,)."""
    i_m, i_b, i_h = place_of_program(max_q, heads, False, BLOCK_M)
    first_q, seq_q = rows_of_sequence(CuQ, i_b, max_q)
    first_k, seq_k = rows_of_sequence(CuK, i_b, max_k)
    if i_m * BLOCK_M >= seq_q:
        return
    q = widen(load_rows(Q + i_b * stride_qb + first_q * stride_qm + i_h * stride_qh, i_m * BLOCK_M, seq_q, stride_qm, WIDE,
                        BLOCK_M, DIM, BLOCK_D), EMULATE)  # fmt: skip
    k_side = (K + i_b * stride_kb + first_k * stride_kn + i_h // group * stride_kh, stride_kn)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    place = (i_b.to(tl.int32), i_h.to(tl.int32), tl.minimum(o_m, seq_q - 1)[:, None], (seq_q, seq_k))
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for i in range(tl.cdiv(seq_k, BLOCK_N)):
        s, _, _ = scores_of_tile(
            q, i, place, scale, k_side, score_mods, (left, right), KIND, EMULATE, BLOCK_N, DIM, BLOCK_D
        )
        m = tl.maximum(m, tl.max(s, 1))
    anchor = tl.where(m == float("-inf"), 0.0, m)[:, None]
    out = Weights + i_b * stride_wb + i_h * stride_wh
    for i in range(tl.cdiv(seq_k, BLOCK_N)):
        s, cols, live = scores_of_tile(q, i, place, scale, k_side, score_mods, (left, right), KIND, EMULATE, BLOCK_N, DIM,
                                       BLOCK_D)  # fmt: skip
        w = tl.exp(s - anchor)
        if len(dropout) > 0:
            factor = dropout_factor(place, tl.minimum(cols, seq_k - 1)[None, :], dropout)
            w = tl.where((factor == 0.0) & (s > float("-inf")), -tl.maximum(w, smallest), w)
        p = out + o_m.to(tl.int64)[:, None] * stride_wm + cols[None, :]
        tl.store(p, narrow(w, Weights.dtype.element_ty, EMULATE), mask=(o_m < seq_q)[:, None] & live[None, :])

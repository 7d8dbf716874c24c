"""Attention backward: dq over the keys that each query sees, dk and dv over the queries that see each key.

    attention_backward_queries   one program makes BLOCK_M rows of dq of one head
    attention_backward_keys      one program makes BLOCK_N rows of dk and dv of one KV head, one query head of the group after
                                 the other

Nothing is added in memory, so the result is the same to the last bit in every run.  The price is that scores and dp are computed
twice: seven products for a pair of tiles instead of five.  A batch of packed sequences is the same with CuQ and CuK: then strides
over the batch are 0 and each sequence begins at its own row.  What streams by comes by pointers or by tensor descriptors.
"""

import triton
import triton.language as tl

from ...device.gradient import fold_key_gradient, fold_query_range, load_statistics
from ...device.grid import place_of_program, rows_of_sequence
from ...device.ranges import band_of_sequence, range_of_keys, range_of_tile
from ...device.source import fetch_box, fetch_rows, locate_box, locate_rows, side_of
from ...device.tile import load_rows, store_rows, widen

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "left", "right", "stride_lb", "stride_lh"]


@triton.jit(do_not_specialize=RUNTIME)
def attention_backward_queries(
    Q, K, V, DOut, Lse2, Delta, DQ, CuQ, CuK,
    scale, seq_q, seq_k, heads, group, left, right,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dm, stride_dh, stride_gb, stride_gm, stride_gh, stride_lb, stride_lh,
    score_mods, slopes, mask_mods, dropout,
    BOX: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Q, DQ [B, Sq, H, Dqk], K [B, Sk, H/group, Dqk], V [B, Sk, H/group, Dv], DOut [B, Sq, H, Dv], Lse2, Delta [B, H, Sq] fp32;
    or packed, with CuQ, CuK [B + 1] int32 and seq_q, seq_k the longest.  BOX: K and V are descriptors of [B, H/group, Sk, D], box
    [1, 1, BLOCK_N, padded D].  Grid (cdiv(Sq, BLOCK_M) * H * B,), the longest tiles of a causal band first."""
    i_m, i_b, i_h = place_of_program(seq_q, heads, True, BLOCK_M)
    first_q, seq_q = rows_of_sequence(CuQ, i_b, seq_q)
    first_k, seq_k = rows_of_sequence(CuK, i_b, seq_k)
    if i_m * BLOCK_M >= seq_q:
        return
    i_k = i_h // group
    q = load_rows(Q + i_b * stride_qb + first_q * stride_qm + i_h * stride_qh, i_m * BLOCK_M, seq_q, stride_qm, WIDE,
                  BLOCK_M, DIM_QK, BLOCK_QK)  # fmt: skip
    do = load_rows(DOut + i_b * stride_db + first_q * stride_dm + i_h * stride_dh, i_m * BLOCK_M, seq_q, stride_dm, WIDE,
                   BLOCK_M, DIM_V, BLOCK_V)  # fmt: skip
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = i_b * stride_lb + i_h * stride_lh + first_q
    lse, delta = load_statistics(Lse2 + row, Delta + row, o_m, o_m < seq_q, True)
    place = (i_b.to(tl.int32), i_h.to(tl.int32), tl.minimum(o_m, seq_q - 1)[:, None], (seq_q, seq_k))
    k_side = side_of(K, i_b, i_k, first_k, stride_kb, stride_kn, stride_kh, BOX)
    v_side = side_of(V, i_b, i_k, first_k, stride_vb, stride_vn, stride_vh, BOX)
    left, right = band_of_sequence(left, right, i_b, KIND)
    tiles = range_of_tile(i_m, seq_q, seq_k, left, right, KIND, BLOCK_M, BLOCK_N)
    dq = fold_query_range(widen(q, EMULATE), widen(do, EMULATE), lse[:, None], delta[:, None], tiles, place, scale, (seq_k,),
                          k_side, v_side, score_mods, slopes, mask_mods, (left, right), locate_box if BOX else locate_rows,
                          fetch_box if BOX else fetch_rows, KIND, EMULATE, BLOCK_M, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK,
                          BLOCK_V, dropout)  # fmt: skip
    store_rows(DQ + i_b * stride_gb + first_q * stride_gm + i_h * stride_gh, o_m.to(tl.int64), stride_gm, o_m < seq_q,
               dq * scale, DIM_QK, BLOCK_QK, EMULATE)  # fmt: skip


@triton.jit(do_not_specialize=[*RUNTIME, "kv_heads"])
def attention_backward_keys(
    Q, K, V, DOut, Lse2, Delta, DK, DV, CuQ, CuK,
    scale, seq_q, seq_k, kv_heads, group, left, right,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dm, stride_dh, stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh, stride_lb, stride_lh,
    score_mods, slopes, mask_mods, dropout,
    ALONE: tl.constexpr, BOX: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """As attention_backward_queries; DK like K, DV like V.  ALONE: the group is one head, and there is no loop over it (in the
    block-sparse kernel, of which this is the dense form, that was 20 % faster).  BOX: Q and DOut are descriptors of
    [B, H, Sq, D], box [1, 1, BLOCK_M, padded D].
    Grid (cdiv(Sk, BLOCK_N) * H/group * B,), the longest tiles of a causal band first.

    One loop for edges and interior: with a loop for each, as in attention_backward_queries, dk and dv pass from one to the next
    and 140 to 300 of their registers go to memory and back inside the loops at D=128; masks cost less."""
    i_n, i_b, i_k = place_of_program(seq_k, kv_heads, False, BLOCK_N)
    first_q, seq_q = rows_of_sequence(CuQ, i_b, seq_q)
    first_k, seq_k = rows_of_sequence(CuK, i_b, seq_k)
    if i_n * BLOCK_N >= seq_k:
        return
    k = widen(load_rows(K + i_b * stride_kb + first_k * stride_kn + i_k * stride_kh, i_n * BLOCK_N, seq_k, stride_kn, WIDE,
                        BLOCK_N, DIM_QK, BLOCK_QK), EMULATE)  # fmt: skip
    v = widen(load_rows(V + i_b * stride_vb + first_k * stride_vn + i_k * stride_vh, i_n * BLOCK_N, seq_k, stride_vn, WIDE,
                        BLOCK_N, DIM_V, BLOCK_V), EMULATE)  # fmt: skip
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    kv_index = tl.minimum(o_n, seq_k - 1)[:, None]
    dk = tl.zeros([BLOCK_N, BLOCK_QK], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    left, right = band_of_sequence(left, right, i_b, KIND)
    begin, _, _, end = range_of_keys(i_n, seq_q, seq_k, left, right, KIND, BLOCK_M, BLOCK_N)
    for i_g in range(1 if ALONE else group):
        i_h = i_k * group + i_g
        q_side = side_of(Q, i_b, i_h, first_q, stride_qb, stride_qm, stride_qh, BOX)
        do_side = side_of(DOut, i_b, i_h, first_q, stride_db, stride_dm, stride_dh, BOX)
        row = i_b * stride_lb + i_h * stride_lh + first_q
        dk, dv = fold_key_gradient(k, v, dk, dv, None, begin, end, i_h.to(tl.int32), kv_index, scale, (seq_q,), q_side, do_side,
                                   Lse2 + row, Delta + row, score_mods, slopes, mask_mods, i_b.to(tl.int32), (seq_q, seq_k),
                                   (left, right), locate_box if BOX else locate_rows, fetch_box if BOX else fetch_rows, KIND,
                                   True, False, EMULATE, BLOCK_M, DIM_QK, DIM_V, BLOCK_QK, BLOCK_V, dropout)  # fmt: skip
    rows = o_n.to(tl.int64)
    store_rows(DK + i_b * stride_xb + first_k * stride_xn + i_k * stride_xh, rows, stride_xn, o_n < seq_k, dk * scale,
               DIM_QK, BLOCK_QK, EMULATE)  # fmt: skip
    store_rows(DV + i_b * stride_yb + first_k * stride_yn + i_k * stride_yh, rows, stride_yn, o_n < seq_k, dv,
               DIM_V, BLOCK_V, EMULATE)  # fmt: skip

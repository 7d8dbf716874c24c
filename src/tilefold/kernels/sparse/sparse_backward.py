"""Block-sparse attention backward: dq over the lists, dk and dv over the transposed lists.

    sparse_backward_queries   one program makes BLOCK_M rows of dq of one head from the KV blocks of its query block's list
    sparse_backward_keys      one program makes BLOCK_N rows of dk and dv of one KV head from the query blocks that list its
                              KV block, one query head of the group after the other

Nothing is added in memory, so the result is the same to the last bit in every run.  The price is that scores and dp are computed
twice: seven products for a listed pair of blocks instead of five.  A batch of packed sequences is the same with CuQ and CuK: then
strides over the batch are 0 and each sequence begins at its own row.  What streams by comes by pointers or by tensor descriptors.
"""

import triton
import triton.language as tl

from ...device.gradient import fold_key_gradient, fold_query_gradient, load_statistics
from ...device.grid import place_of_program, rows_of_sequence
from ...device.ranges import FULL
from ...device.source import fetch_box, fetch_rows, locate_listed, locate_listed_box, side_of
from ...device.tile import load_rows, store_rows, widen

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "stride_lb", "stride_lh", "stride_ib", "stride_ih", "stride_iq",
           "stride_cb", "stride_ch", "stride_sb", "stride_sh", "stride_pb", "stride_ph"]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def sparse_backward_queries(
    Q, K, V, DOut, Lse2, Delta, DQ, Index, Count, Sizes, QuerySizes, CuQ, CuK,
    scale, seq_q, seq_k, heads, group,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dm, stride_dh, stride_gb, stride_gm, stride_gh, stride_lb, stride_lh,
    stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_sb, stride_sh, stride_pb, stride_ph,
    score_mods, slopes, mask_mods,
    BOX: tl.constexpr, EDGE: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Q, DQ [B, Sq, H, Dqk], K [B, Sk, H/group, Dqk], V [B, Sk, H/group, Dv], DOut [B, Sq, H, Dv], Lse2, Delta [B, H, Sq] fp32;
    Index [B, H, Qb, cap], Count [B, H, Qb], Sizes [B, H, KVb] or None, QuerySizes [B, H, Qb] or None, int32; or packed, with
    CuQ, CuK [B + 1] int32 and seq_q, seq_k the longest.  EDGE: some key of a listed block may not be live.  BOX: K and V are
    descriptors of [B, H/group, Sk, D], box [1, 1, BLOCK_N, padded D].
    Grid (cdiv(Sq, BLOCK_M) * H * B,)."""
    i_m, i_b, i_h = place_of_program(seq_q, heads, False, BLOCK_M)
    first_q, seq_q = rows_of_sequence(CuQ, i_b, seq_q)
    first_k, seq_k = rows_of_sequence(CuK, i_b, seq_k)
    if i_m * BLOCK_M >= seq_q:
        return
    i_k = i_h // group
    i_q = (i_m * BLOCK_M) // Q_BLOCK
    end = seq_q
    if QuerySizes is not None:
        end = tl.minimum(end, i_q * Q_BLOCK + tl.load(QuerySizes + i_b * stride_pb + i_h * stride_ph + i_q))
    # Without a key there is no index that the mods could be given.
    count = tl.where(seq_k > 0, tl.load(Count + i_b * stride_cb + i_h * stride_ch + i_q), 0)
    q = load_rows(Q + i_b * stride_qb + first_q * stride_qm + i_h * stride_qh, i_m * BLOCK_M, end, stride_qm, WIDE,
                  BLOCK_M, DIM_QK, BLOCK_QK)  # fmt: skip
    do = load_rows(DOut + i_b * stride_db + first_q * stride_dm + i_h * stride_dh, i_m * BLOCK_M, end, stride_dm, WIDE,
                   BLOCK_M, DIM_V, BLOCK_V)  # fmt: skip
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = i_b * stride_lb + i_h * stride_lh + first_q
    lse, delta = load_statistics(Lse2 + row, Delta + row, o_m, o_m < end, True)
    place = (i_b.to(tl.int32), i_h.to(tl.int32), tl.minimum(o_m, seq_q - 1)[:, None], (seq_q, seq_k))
    index = Index + i_b * stride_ib + i_h * stride_ih + i_q.to(tl.int64) * stride_iq
    source = (index, Sizes, seq_k, KV_BLOCK, i_b * stride_sb + i_h * stride_sh)
    k_side = side_of(K, i_b, i_k, first_k, stride_kb, stride_kn, stride_kh, BOX)
    v_side = side_of(V, i_b, i_k, first_k, stride_vb, stride_vn, stride_vh, BOX)
    tiles = count * (KV_BLOCK // BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_QK], tl.float32)
    dq = fold_query_gradient(dq, widen(q, EMULATE), widen(do, EMULATE), lse[:, None], delta[:, None], 0, tiles, place, scale,
                             source, k_side, v_side, score_mods, slopes, mask_mods, (),
                             locate_listed_box if BOX else locate_listed, fetch_box if BOX else fetch_rows, FULL, EDGE,
                             EMULATE, BLOCK_N, DIM_QK, DIM_V,
                             BLOCK_QK, BLOCK_V, ())  # fmt: skip
    store_rows(DQ + i_b * stride_gb + first_q * stride_gm + i_h * stride_gh, o_m.to(tl.int64), stride_gm, o_m < seq_q,
               dq * scale, DIM_QK, BLOCK_QK, EMULATE)  # fmt: skip


@triton.jit(do_not_specialize=[*RUNTIME, "kv_heads"])
def sparse_backward_keys(
    Q, K, V, DOut, Lse2, Delta, DK, DV, Index, Count, Sizes, QuerySizes, CuQ, CuK,
    scale, seq_q, seq_k, kv_heads, group,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dm, stride_dh, stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh, stride_lb, stride_lh,
    stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_sb, stride_sh, stride_pb, stride_ph,
    score_mods, slopes, mask_mods,
    ALONE: tl.constexpr, BOX: tl.constexpr, EDGE: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """As sparse_backward_queries, with the transposed lists: Index [B, H, KVb, Qb], Count [B, H, KVb]; DK like K, DV like V.
    ALONE: the group is one head, and there is no loop over it (20 % faster).  EDGE: some query of a listed block may not be
    live.  BOX: Q and DOut are descriptors of [B, H, Sq, D], box [1, 1, BLOCK_M, padded D].
    Grid (cdiv(Sk, BLOCK_N) * H/group * B,)."""
    i_n, i_b, i_k = place_of_program(seq_k, kv_heads, False, BLOCK_N)
    first_q, seq_q = rows_of_sequence(CuQ, i_b, seq_q)
    first_k, seq_k = rows_of_sequence(CuK, i_b, seq_k)
    if i_n * BLOCK_N >= seq_k:
        return
    block = (i_n * BLOCK_N) // KV_BLOCK
    k = widen(load_rows(K + i_b * stride_kb + first_k * stride_kn + i_k * stride_kh, i_n * BLOCK_N, seq_k, stride_kn, WIDE,
                        BLOCK_N, DIM_QK, BLOCK_QK), EMULATE)  # fmt: skip
    v = widen(load_rows(V + i_b * stride_vb + first_k * stride_vn + i_k * stride_vh, i_n * BLOCK_N, seq_k, stride_vn, WIDE,
                        BLOCK_N, DIM_V, BLOCK_V), EMULATE)  # fmt: skip
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    kv_index = tl.minimum(o_n, seq_k - 1)[:, None]
    dk = tl.zeros([BLOCK_N, BLOCK_QK], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for i_g in range(1 if ALONE else group):
        i_h = i_k * group + i_g
        live = o_n < seq_k
        if Sizes is not None:
            live = live & (o_n - block * KV_BLOCK < tl.load(Sizes + i_b * stride_sb + i_h * stride_sh + block))
        count = tl.where(seq_q > 0, tl.load(Count + i_b * stride_cb + i_h * stride_ch + block), 0)
        index = Index + i_b * stride_ib + i_h * stride_ih + block.to(tl.int64) * stride_iq
        source = (index, QuerySizes, seq_q, Q_BLOCK, i_b * stride_pb + i_h * stride_ph)
        q_side = side_of(Q, i_b, i_h, first_q, stride_qb, stride_qm, stride_qh, BOX)
        do_side = side_of(DOut, i_b, i_h, first_q, stride_db, stride_dm, stride_dh, BOX)
        row = i_b * stride_lb + i_h * stride_lh + first_q
        dk, dv = fold_key_gradient(k, v, dk, dv, live, 0, count * (Q_BLOCK // BLOCK_M), i_h.to(tl.int32), kv_index, scale,
                                   source, q_side, do_side, Lse2 + row, Delta + row, score_mods, slopes, mask_mods,
                                   i_b.to(tl.int32), (seq_q, seq_k), (), locate_listed_box if BOX else locate_listed,
                                   fetch_box if BOX else fetch_rows, FULL, EDGE, Sizes is not None, EMULATE, BLOCK_M, DIM_QK,
                                   DIM_V, BLOCK_QK, BLOCK_V, ())  # fmt: skip
    rows = o_n.to(tl.int64)
    store_rows(DK + i_b * stride_xb + first_k * stride_xn + i_k * stride_xh, rows, stride_xn, o_n < seq_k, dk * scale,
               DIM_QK, BLOCK_QK, EMULATE)  # fmt: skip
    store_rows(DV + i_b * stride_yb + first_k * stride_yn + i_k * stride_yh, rows, stride_yn, o_n < seq_k, dv,
               DIM_V, BLOCK_V, EMULATE)  # fmt: skip

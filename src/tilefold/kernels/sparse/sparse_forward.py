"""Block-sparse forward attention: the fold over the KV blocks that a list names for each query block.

    sparse_forward          K and V by pointers, any strides
    sparse_forward_box      by tensor descriptors; V rows past a block's size must be finite, since 0 * NaN is NaN
    sparse_forward_varlen   sequences packed along the first dimension, by pointers
    sparse_forward_paged    K and V in the pages that a table names, by pointers

One program makes BLOCK_M rows (a part of one query block) of one head from one share of its list.  With one share it writes the
result; with more, each writes a finished partial (out fp32, lse), which `combine` merges.  Grid
(cdiv(Sq, BLOCK_M) * H * B, splits): query tile fastest, so that neighbours, whose lists often agree, share K and V in L2.
"""

import triton
import triton.language as tl

from ...device.fold import fold_tiles
from ...device.grid import let_next_kernel_start, place_of_program, rows_of_sequence, wait_for_previous_kernel
from ...device.ranges import FULL, range_share
from ...device.source import (
    fetch_box,
    fetch_paged,
    fetch_rows,
    locate_listed,
    locate_listed_box,
    locate_listed_page,
    locate_listed_pages,
)
from ...device.state import state_finish, state_init
from ...device.tile import load_rows, store_rows, widen

# As in attention_forward: lengths, counts and the strides of lists never specialise a compilation.
RUNTIME = ["scale", "seq_q", "seq_k", "total_q", "heads", "group", "batch", "stride_ib", "stride_ih", "stride_iq",
           "stride_cb", "stride_ch", "stride_sb", "stride_sh", "stride_pb", "stride_ph", "stride_tb"]  # fmt: skip


@triton.jit
def attend_list(
    Q, Out, Lse, k_side, v_side, source, count, rows_live, i_m, i_b, i_h, seq_q, seq_k, scale, stride_q, stride_o,
    score_mods, mask_mods,
    LOCATE: tl.constexpr, FETCH: tl.constexpr, MASKED: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr,
    WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Query tile i_m of one sequence and head, whose row 0 Q, Out and Lse point at, over this program's share of its list.
    rows_live: rows of the sequence from here on that are real queries; the others give 0 and -inf.
    EARLY: what is stored are partials, and `combine`, launched already, waits for them."""
    q = load_rows(Q, i_m * BLOCK_M, seq_q, stride_q, WIDE, BLOCK_M, DIM_QK, BLOCK_QK)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    place = (i_b.to(tl.int32), i_h.to(tl.int32), tl.minimum(o_m, seq_q - 1)[:, None], (seq_q, seq_k))
    lo, hi = range_share(count * (KV_BLOCK // BLOCK_N), tl.program_id(1), tl.num_programs(1))
    state = state_init(BLOCK_M, BLOCK_V)
    acc, m, l = fold_tiles(widen(q, EMULATE), state, lo, hi, place, scale, source, k_side, v_side,
                           score_mods, mask_mods, (0, 0), LOCATE, FETCH, FULL, MASKED, EMULATE,
                           BLOCK_N, DIM_QK, DIM_V, BLOCK_QK, BLOCK_V, ())  # fmt: skip
    out, lse = state_finish(acc, m, l)
    live = o_m < rows_live
    out = tl.where(live[:, None], out, 0.0)
    lse = tl.where(live, lse, float("-inf"))
    store_rows(Out, o_m.to(tl.int64), stride_o, o_m < seq_q, out, DIM_V, BLOCK_V, EMULATE)
    tl.store(Lse + o_m, lse, mask=o_m < seq_q)


@triton.jit
def list_of_tile(Index, Count, QuerySizes, i_m, i_b, i_h, seq_q, stride_ib, stride_ih, stride_iq, stride_cb,
                 stride_ch, stride_sb, stride_sh, stride_pb, stride_ph, Q_BLOCK: tl.constexpr,
                 BLOCK_M: tl.constexpr):  # fmt: skip
    """-> this tile's list, its count, the end of the real queries of its block, and where this head's KV block sizes begin."""
    i_q = (i_m * BLOCK_M) // Q_BLOCK
    index = Index + i_b * stride_ib + i_h * stride_ih + i_q.to(tl.int64) * stride_iq
    count = tl.load(Count + i_b * stride_cb + i_h * stride_ch + i_q)
    if QuerySizes is None:
        end = seq_q
    else:
        end = i_q * Q_BLOCK + tl.load(QuerySizes + i_b * stride_pb + i_h * stride_ph + i_q)
    return index, count, end, i_b * stride_sb + i_h * stride_sh


@triton.jit(do_not_specialize=RUNTIME)
def sparse_forward(
    Q, K, V, Out, Lse, Index, Count, Sizes, QuerySizes, scale, seq_q, seq_k, heads, group, batch, stride_qb, stride_qm,
    stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_os, stride_ob, stride_om, stride_oh,
    stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_sb, stride_sh, stride_pb, stride_ph, score_mods,
    mask_mods,
    MASKED: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Q [B, Sq, H, Dqk], K [B, Sk, H/group, Dqk], V [B, Sk, H/group, Dv], Out [splits, B, Sq, H, Dv], Lse [splits, B, H, Sq];
    Index [B, H, Qb, cap], Count [B, H, Qb], Sizes [B, H, KVb] or None, QuerySizes [B, H, Qb] or None, int32 (0 broadcasts)."""
    let_next_kernel_start(EARLY)
    i_m, i_b, i_h = place_of_program(seq_q, heads, False, BLOCK_M)
    wait_for_previous_kernel(EARLY)
    i_k = i_h // group
    i_s = tl.program_id(1).to(tl.int64)
    index, count, end, offset = list_of_tile(Index, Count, QuerySizes, i_m, i_b, i_h, seq_q, stride_ib, stride_ih,
                                            stride_iq, stride_cb, stride_ch, stride_sb, stride_sh, stride_pb, stride_ph,
                                            Q_BLOCK, BLOCK_M)  # fmt: skip
    q = Q + i_b * stride_qb + i_h * stride_qh
    out = Out + i_s * stride_os + i_b * stride_ob + i_h * stride_oh
    lse = Lse + ((i_s * batch + i_b) * heads + i_h) * seq_q
    k_side = (K + i_b * stride_kb + i_k * stride_kh, stride_kn)
    v_side = (V + i_b * stride_vb + i_k * stride_vh, stride_vn)
    source = (index, Sizes, seq_k, KV_BLOCK, offset)
    attend_list(q, out, lse, k_side, v_side, source, count, end, i_m, i_b, i_h, seq_q, seq_k, scale, stride_qm, stride_om,
                score_mods, mask_mods, locate_listed, fetch_rows, MASKED, EMULATE, EARLY, WIDE, DIM_QK, DIM_V,
                KV_BLOCK, BLOCK_M, BLOCK_N, BLOCK_QK, BLOCK_V)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def sparse_forward_box(
    Q, K, V, Out, Lse, Index, Count, Sizes, QuerySizes, scale, seq_q, seq_k, heads, group, batch, stride_qb, stride_qm,
    stride_qh, stride_os, stride_ob, stride_om, stride_oh, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_sb,
    stride_sh, stride_pb, stride_ph, score_mods, mask_mods,
    MASKED: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """sparse_forward with K and V as host descriptors of [B, H/group, Sk, D], box [1, 1, BLOCK_N, padded D]."""
    let_next_kernel_start(EARLY)
    i_m, i_b, i_h = place_of_program(seq_q, heads, False, BLOCK_M)
    wait_for_previous_kernel(EARLY)
    i_k = (i_h // group).to(tl.int32)
    i_s = tl.program_id(1).to(tl.int64)
    index, count, end, offset = list_of_tile(Index, Count, QuerySizes, i_m, i_b, i_h, seq_q, stride_ib, stride_ih,
                                            stride_iq, stride_cb, stride_ch, stride_sb, stride_sh, stride_pb, stride_ph,
                                            Q_BLOCK, BLOCK_M)  # fmt: skip
    q = Q + i_b * stride_qb + i_h * stride_qh
    out = Out + i_s * stride_os + i_b * stride_ob + i_h * stride_oh
    lse = Lse + ((i_s * batch + i_b) * heads + i_h) * seq_q
    k_side = (K, i_b.to(tl.int32), i_k)
    v_side = (V, i_b.to(tl.int32), i_k)
    source = (index, Sizes, seq_k, KV_BLOCK, offset)
    attend_list(q, out, lse, k_side, v_side, source, count, end, i_m, i_b, i_h, seq_q, seq_k, scale, stride_qm, stride_om,
                score_mods, mask_mods, locate_listed_box, fetch_box, MASKED, EMULATE, EARLY, WIDE, DIM_QK, DIM_V,
                KV_BLOCK, BLOCK_M, BLOCK_N, BLOCK_QK, BLOCK_V)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def sparse_forward_varlen(
    Q, K, V, Out, Lse, Index, Count, Sizes, QuerySizes, CuQ, CuK, scale, seq_q, total_q, heads, group, batch,
    stride_qm, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_os, stride_om, stride_oh,
    stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_sb, stride_sh, stride_pb, stride_ph, score_mods, mask_mods,
    MASKED: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Q [Tq, H, Dqk], K [Tk, H/group, Dqk], V [Tk, H/group, Dv], Out [splits, Tq, H, Dv], Lse [splits, H, Tq]; sequence b is
    rows CuQ[b]..CuQ[b+1] of the queries, seq_q at most, and CuK[b]..CuK[b+1] of the keys (int32), and has the lists [b], counted
    from its own start.  Programs past a sequence's end leave; so does what is listed past it."""
    let_next_kernel_start(EARLY)
    i_m, i_b, i_h = place_of_program(seq_q, heads, False, BLOCK_M)
    wait_for_previous_kernel(EARLY)
    first_q, seq_q = rows_of_sequence(CuQ, i_b, seq_q)
    first_k, seq_k = rows_of_sequence(CuK, i_b, seq_q)
    if i_m * BLOCK_M >= seq_q:
        return
    i_k = i_h // group
    i_s = tl.program_id(1).to(tl.int64)
    index, count, end, offset = list_of_tile(Index, Count, QuerySizes, i_m, i_b, i_h, seq_q, stride_ib, stride_ih,
                                            stride_iq, stride_cb, stride_ch, stride_sb, stride_sh, stride_pb, stride_ph,
                                            Q_BLOCK, BLOCK_M)  # fmt: skip
    count = tl.where(seq_k > 0, count, 0)  # without a key there is no index that the mods could be given
    q = Q + first_q * stride_qm + i_h * stride_qh
    out = Out + i_s * stride_os + first_q * stride_om + i_h * stride_oh
    lse = Lse + (i_s * heads + i_h) * total_q + first_q
    k_side = (K + first_k * stride_kn + i_k * stride_kh, stride_kn)
    v_side = (V + first_k * stride_vn + i_k * stride_vh, stride_vn)
    source = (index, Sizes, seq_k, KV_BLOCK, offset)
    attend_list(q, out, lse, k_side, v_side, source, count, end, i_m, i_b, i_h, seq_q, seq_k, scale, stride_qm, stride_om,
                score_mods, mask_mods, locate_listed, fetch_rows, MASKED, EMULATE, EARLY, WIDE, DIM_QK, DIM_V,
                KV_BLOCK, BLOCK_M, BLOCK_N, BLOCK_QK, BLOCK_V)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def sparse_forward_paged(
    Q, K, V, Out, Lse, Index, Count, Sizes, QuerySizes, Table, Lengths, scale, seq_q, seq_k, heads, group, batch,
    stride_qb, stride_qm, stride_qh, stride_kp, stride_kn, stride_kh, stride_vp, stride_vn, stride_vh,
    stride_os, stride_ob, stride_om, stride_oh, stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_sb, stride_sh,
    stride_pb, stride_ph, stride_tb, score_mods, mask_mods,
    MASKED: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """sparse_forward with K [pages, PAGE, H/group, Dqk] and V [pages, PAGE, H/group, Dv]: key j of sequence b is row j % PAGE of
    page Table[b, j // PAGE], for j below Lengths[b] (int32), seq_k at most.  No page past that end is looked up.  WIDE: as for
    load_rows, or a page spans 2^31 elements or more."""
    let_next_kernel_start(EARLY)
    i_m, i_b, i_h = place_of_program(seq_q, heads, False, BLOCK_M)
    wait_for_previous_kernel(EARLY)
    i_k = i_h // group
    i_s = tl.program_id(1).to(tl.int64)
    index, count, end, offset = list_of_tile(Index, Count, QuerySizes, i_m, i_b, i_h, seq_q, stride_ib, stride_ih,
                                            stride_iq, stride_cb, stride_ch, stride_sb, stride_sh, stride_pb, stride_ph,
                                            Q_BLOCK, BLOCK_M)  # fmt: skip
    length = tl.minimum(tl.load(Lengths + i_b), seq_k)
    count = tl.where(length > 0, count, 0)  # as in sparse_forward_varlen
    q = Q + i_b * stride_qb + i_h * stride_qh
    out = Out + i_s * stride_os + i_b * stride_ob + i_h * stride_oh
    lse = Lse + ((i_s * batch + i_b) * heads + i_h) * seq_q
    k_side = (K + i_k * stride_kh, stride_kp, tl.cast(stride_kn, tl.int64) if WIDE else stride_kn)
    v_side = (V + i_k * stride_vh, stride_vp, tl.cast(stride_vn, tl.int64) if WIDE else stride_vn)
    source = (index, Sizes, length, KV_BLOCK, offset, Table + i_b * stride_tb, PAGE)
    attend_list(q, out, lse, k_side, v_side, source, count, end, i_m, i_b, i_h, seq_q, length, scale, stride_qm, stride_om,
                score_mods, mask_mods, locate_listed_page if PAGE % BLOCK_N == 0 else locate_listed_pages, fetch_paged,
                MASKED, EMULATE, EARLY, WIDE, DIM_QK, DIM_V, KV_BLOCK, BLOCK_M, BLOCK_N, BLOCK_QK, BLOCK_V)  # fmt: skip

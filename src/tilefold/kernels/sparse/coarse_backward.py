"""Gradient of coarse attention: dq over the rows; dk and dv of the rows over shares of the queries.

    coarse_backward_queries   one program makes BLOCK_M rows of dq of one head from all rows of K and V
    coarse_backward_keys      one program makes what one share of the queries adds to BLOCK_N rows of dk and dv of one KV head

There are few rows (one a KV block), so programs that own them alone would leave most of a GPU idle: the queries are cut in
shares, and each share of each head makes sums of its own, which are added in a fixed order afterwards.  Nothing is added in
memory by several programs: the same bits every run.
"""

import triton
import triton.language as tl

from ...device.gradient import fold_key_gradient, fold_query_gradient, load_statistics
from ...device.grid import place_of_program
from ...device.ranges import FULL, range_share
from ...device.source import (
    fetch_box,
    fetch_rows,
    locate_live,
    locate_live_box,
    locate_sized,
    locate_sized_box,
    side_of,
)
from ...device.tile import load_rows, store_rows, widen

RUNTIME = [
    "scale",
    "seq_q",
    "seq_k",
    "heads",
    "kv_heads",
    "group",
    "batch",
    "stride_sb",
    "stride_sh",
    "stride_pb",
    "stride_ph",
]


@triton.jit(do_not_specialize=RUNTIME)
def coarse_backward_queries(
    Q, K, V, DOut, Lse2, Delta, DQ, Sizes, QuerySizes, scale, seq_q, seq_k, heads, group,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dm, stride_dh, stride_gb, stride_gm, stride_gh, stride_sb, stride_sh, stride_pb, stride_ph,
    BOX: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    Q_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Q, DQ [B, Sq, H, Dqk], K [B, Sk, H/group, Dqk], V [B, Sk, H/group, Dv], DOut [B, Sq, H, Dv]; Lse2, Delta [B, H, Sq] fp32
    as backward_delta left them; Sizes, QuerySizes, BOX as for coarse_forward.  Grid (cdiv(Sq, BLOCK_M) * H * B,)."""
    i_m, i_b, i_h = place_of_program(seq_q, heads, False, BLOCK_M)
    i_k = i_h // group
    i_q = (i_m * BLOCK_M) // Q_BLOCK
    end = seq_q
    if QuerySizes is not None:
        end = tl.minimum(end, i_q * Q_BLOCK + tl.load(QuerySizes + i_b * stride_pb + i_h * stride_ph + i_q))
    q = load_rows(Q + i_b * stride_qb + i_h * stride_qh, i_m * BLOCK_M, end, stride_qm, WIDE, BLOCK_M, DIM_QK, BLOCK_QK)
    do = load_rows(
        DOut + i_b * stride_db + i_h * stride_dh, i_m * BLOCK_M, end, stride_dm, WIDE, BLOCK_M, DIM_V, BLOCK_V
    )
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (i_b * heads + i_h) * seq_q
    lse, delta = load_statistics(Lse2 + row, Delta + row, o_m, o_m < end, True)
    place = (0, 0, o_m[:, None], (seq_q, seq_k))
    source = (seq_k, Sizes, i_b * stride_sb + i_k * stride_sh)
    k_side = side_of(K, i_b, i_k, 0, stride_kb, stride_kn, stride_kh, BOX)
    v_side = side_of(V, i_b, i_k, 0, stride_vb, stride_vn, stride_vh, BOX)
    dq = tl.zeros([BLOCK_M, BLOCK_QK], tl.float32)
    dq = fold_query_gradient(dq, widen(q, EMULATE), widen(do, EMULATE), lse[:, None], delta[:, None], 0, tl.cdiv(seq_k, BLOCK_N),
                             place, scale, source, k_side, v_side, (), (), (), (), locate_live_box if BOX else locate_live,
                             fetch_box if BOX else fetch_rows, FULL, True, EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK,
                             BLOCK_V, ())  # fmt: skip
    store_rows(DQ + i_b * stride_gb + i_h * stride_gh, o_m.to(tl.int64), stride_gm, o_m < seq_q, dq * scale, DIM_QK,
               BLOCK_QK, EMULATE)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def coarse_backward_keys(
    Q, K, V, DOut, Lse2, Delta, DK, DV, Sizes, QuerySizes, scale, seq_q, seq_k, kv_heads, group, batch,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dm, stride_dh, stride_sb, stride_sh, stride_pb, stride_ph,
    BOX: tl.constexpr, EDGE: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, Q_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """As coarse_backward_queries; DK [shares, group, B, H/group, Sk, Dqk], DV [.., Dv] like it, fp32 contiguous, what
    each share of the query tiles of each head adds.  EDGE: some query may not be live, or the last tile is cut.  BOX: Q and
    DOut are descriptors of [B, H, Sq, D], box [1, 1, BLOCK_M, padded D].
    Grid (cdiv(Sk, BLOCK_N) * H/group * B, group, shares)."""
    i_n, i_b, i_k = place_of_program(seq_k, kv_heads, False, BLOCK_N)
    i_h = i_k * group + tl.program_id(1)
    lo, hi = range_share(tl.cdiv(seq_q, BLOCK_M), tl.program_id(2), tl.num_programs(2))
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = widen(load_rows(K + i_b * stride_kb + i_k * stride_kh, i_n * BLOCK_N, seq_k, stride_kn, WIDE, BLOCK_N, DIM_QK,
                        BLOCK_QK), EMULATE)  # fmt: skip
    v = widen(load_rows(V + i_b * stride_vb + i_k * stride_vh, i_n * BLOCK_N, seq_k, stride_vn, WIDE, BLOCK_N, DIM_V,
                        BLOCK_V), EMULATE)  # fmt: skip
    dk = tl.zeros([BLOCK_N, BLOCK_QK], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    source = (seq_q, QuerySizes, i_b * stride_pb + i_h * stride_ph, Q_BLOCK, lo)
    q_side = side_of(Q, i_b, i_h, 0, stride_qb, stride_qm, stride_qh, BOX)
    do_side = side_of(DOut, i_b, i_h, 0, stride_db, stride_dm, stride_dh, BOX)
    row = (i_b * kv_heads * group + i_h) * seq_q
    dk, dv = fold_key_gradient(k, v, dk, dv, o_n < seq_k, 0, hi - lo, 0, o_n[:, None], scale, source, q_side, do_side,
                               Lse2 + row, Delta + row, (), (), (), 0, (seq_q, seq_k), (),
                               locate_sized_box if BOX else locate_sized, fetch_box if BOX else fetch_rows, FULL, EDGE,
                               False, EMULATE, BLOCK_M, DIM_QK, DIM_V, BLOCK_QK,
                               BLOCK_V, ())  # fmt: skip
    # A dead row has a column of its own in every product: what came of it is dropped here, not in the loop.
    live = o_n < seq_k
    if Sizes is not None:
        live = live & (tl.load(Sizes + i_b * stride_sb + i_k * stride_sh + o_n, mask=live, other=0) > 0)
    dk = tl.where(live[:, None], dk * scale, 0.0)
    dv = tl.where(live[:, None], dv, 0.0)
    part = (tl.program_id(2) * group + tl.program_id(1)).to(tl.int64)
    first = ((part * batch + i_b) * kv_heads + i_k) * seq_k
    rows = o_n.to(tl.int64)
    store_rows(DK + first * DIM_QK, rows, DIM_QK, o_n < seq_k, dk, DIM_QK, BLOCK_QK, False)
    store_rows(DV + first * DIM_V, rows, DIM_V, o_n < seq_k, dv, DIM_V, BLOCK_V, False)

"""Gradients of the tensors that a user's score_mod reads, as device.loads says: one program gives what BLOCK_M rows of one head
give."""

import triton
import triton.language as tl

from ...device.gradient import load_statistics, score_gradient
from ...device.grid import place_of_program, rows_of_sequence
from ...device.loads import MEASURE, give_to_loads
from ...device.ranges import band_of_sequence, range_of_tile
from ...device.source import fetch_rows, locate_rows, side_of
from ...device.tile import load_rows, widen

RUNTIME = ["scale", "seq_q", "seq_k", "heads", "group", "left", "right", "stride_lb", "stride_lh"]


@triton.jit(do_not_specialize=RUNTIME)
def attention_backward_loads(
    Q, K, V, DOut, Lse2, Delta, Sizes, CuQ, CuK,
    scale, seq_q, seq_k, heads, group, left, right,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dm, stride_dh, stride_lb, stride_lh,
    score_mods, slopes, mask_mods, dropout, sites,
    PASS: tl.constexpr, SITES: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """As attention_backward_queries, by pointers; slopes: 1 for each score mod, of which the user's is the last.  PASS, sites: of
    device.loads, SITES a power of two that holds them.  Sizes [programs, SITES] fp32, written where PASS is MEASURE, zeros
    before.  Grid (cdiv(Sq, BLOCK_M) * H * B,)."""
    i_m, i_b, i_h = place_of_program(seq_q, heads, True, BLOCK_M)
    first_q, seq_q = rows_of_sequence(CuQ, i_b, seq_q)
    first_k, seq_k = rows_of_sequence(CuK, i_b, seq_k)
    if i_m * BLOCK_M >= seq_q:
        return
    q = widen(load_rows(Q + i_b * stride_qb + first_q * stride_qm + i_h * stride_qh, i_m * BLOCK_M, seq_q, stride_qm, WIDE,
                        BLOCK_M, DIM_QK, BLOCK_QK), EMULATE)  # fmt: skip
    do = widen(load_rows(DOut + i_b * stride_db + first_q * stride_dm + i_h * stride_dh, i_m * BLOCK_M, seq_q, stride_dm, WIDE,
                         BLOCK_M, DIM_V, BLOCK_V), EMULATE)  # fmt: skip
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row = i_b * stride_lb + i_h * stride_lh + first_q
    lse, delta = load_statistics(Lse2 + row, Delta + row, o_m, o_m < seq_q, True)
    place = (i_b.to(tl.int32), i_h.to(tl.int32), tl.minimum(o_m, seq_q - 1)[:, None], (seq_q, seq_k))
    k_side = side_of(K, i_b, i_h // group, first_k, stride_kb, stride_kn, stride_kh, False)
    v_side = side_of(V, i_b, i_h // group, first_k, stride_vb, stride_vn, stride_vh, False)
    left, right = band_of_sequence(left, right, i_b, KIND)
    lo, _, _, hi = range_of_tile(i_m, seq_q, seq_k, left, right, KIND, BLOCK_M, BLOCK_N)
    total = tl.zeros([SITES], tl.float32)
    for i in tl.range(lo, hi):
        rows, cols, live = locate_rows(i, (seq_k,), BLOCK_N)
        k = fetch_rows(k_side, rows, live, True, EMULATE, BLOCK_N, DIM_QK, BLOCK_QK)
        v = fetch_rows(v_side, rows, live, True, EMULATE, BLOCK_N, DIM_V, BLOCK_V)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        kv_index = tl.minimum(cols, seq_k - 1)[None, :]
        _p, ds = score_gradient(s, dp, lse[:, None], delta[:, None], place, kv_index, scale, score_mods, slopes, mask_mods,
                               (left, right), KIND, dropout)  # fmt: skip
        ds = tl.where((o_m < seq_q)[:, None] & live[None, :], ds, 0.0)
        score = s * scale
        for j in tl.static_range(len(score_mods) - 1):
            score = score_mods[j][0](score, place[0], place[1], place[2], kv_index, score_mods[j][1] + place[3])
        total = give_to_loads(total, ds, score, place, kv_index, score_mods, sites, PASS, SITES)
    if PASS == MEASURE:
        tl.store(Sizes + tl.program_id(0).to(tl.int64) * SITES + tl.arange(0, SITES), total)

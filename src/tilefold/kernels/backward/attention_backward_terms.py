"""Gradients of what joins the scores of dense attention: an additive bias and attention sinks.

    attention_backward_bias    one program makes the sum, over the heads, sequences and query tiles that share it, of the
                               gradients of the scores at one tile of the bias; or one share of that sum
    attention_backward_stored    the same sum, of gradients of the scores that another kernel has left in memory
    attention_backward_sinks   one program makes what the rows of one sequence and head give

Both add up in a fixed order, and nothing in memory: the same bits every run.  Shares are added by the host, in order.
"""

import triton
import triton.language as tl

from ...device.gradient import add_score_gradient, fold_score_gradient, load_statistics
from ...device.grid import rows_of_sequence
from ...device.mods import element_pointers, mask_band
from ...device.ranges import PREFIX, band_of_sequence, range_of_keys, range_share
from ...device.source import fetch_box, fetch_rows, locate_box, locate_rows, side_of
from ...device.state import LOG2E
from ...device.tile import load_rows, narrow, widen

RUNTIME = ["scale", "seq_q", "seq_k", "batch", "heads", "group", "left", "right", "bias_batch", "bias_heads", "stride_lb",
           "stride_lh"]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def attention_backward_bias(
    Q, K, V, DOut, Lse2, Delta, DBias, CuQ, CuK,
    scale, seq_q, seq_k, batch, heads, group, left, right, bias_batch, bias_heads,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dm, stride_dh, stride_lb, stride_lh,
    score_mods, bias, later_mods, slopes, mask_mods, dropout,
    ROWS: tl.constexpr, BOX: tl.constexpr, ROUND: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """As attention_backward_queries; DBias [shares, bias_batch, bias_heads, Sq, Sk] contiguous, or with 1 for Sq if
    not ROWS.  BOX, of dense calls with ROWS: Q, DOut, K and V are descriptors of [B, H, S, D], box [1, 1, BLOCK_M or BLOCK_N,
    padded D].  bias_batch is batch or 1, bias_heads heads or 1.  Scores that no call makes (past a packed sequence's end) get 0.
    bias: (device.mods.held_bias, (pointer, strides)), of which a program has one tile; score_mods, later_mods: those before and
    after it.  slopes: those of the mods after the bias, and 1 for the others, so that what comes out is the gradient at the bias.
    ROUND: as EMULATE of device.tile.narrow, for the bias's own dtype.  Shares are of the heads and sequences, or of the query
    tiles if not ROWS.  Grid (cdiv(Sk, BLOCK_N) * (cdiv(Sq, BLOCK_M) or 1) * bias_heads * bias_batch, shares)."""
    tiles_n = tl.cdiv(seq_k, BLOCK_N)
    tiles_m = tl.cdiv(seq_q, BLOCK_M) if ROWS else 1
    pid = tl.program_id(0)
    i_n, i_m, own = pid % tiles_n, (pid // tiles_n) % tiles_m, (pid // (tiles_n * tiles_m)).to(tl.int64)
    own_b, own_h = own // bias_heads, own % bias_heads
    share, shares = tl.program_id(1), tl.num_programs(1)
    per_batch = heads // bias_heads
    lo, hi = 0, per_batch * (batch // bias_batch)
    if ROWS:
        lo, hi = range_share(tl.zeros([], tl.int32) + hi, share, shares)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_b = tl.minimum(i_m * BLOCK_M + tl.arange(0, BLOCK_M) if ROWS else tl.zeros([1], tl.int32), seq_q - 1)
    where = element_pointers(own_b, own_h, o_b[:, None], tl.minimum(o_n, seq_k - 1)[None, :], bias[1] + (seq_q, seq_k))
    held = tl.load(where).to(tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if ROWS and CuQ is None:  # one tile of each head and sequence: a loop that streams
        if KIND != PREFIX:  # else each sequence has a band of its own
            begin, _, _, end = range_of_keys(i_n, seq_q, seq_k, left, right, KIND, BLOCK_M, BLOCK_N)
            hi = tl.where((i_m >= begin) & (i_m < end), hi, lo)
        LOCATE: tl.constexpr = locate_box if BOX else locate_rows
        FETCH: tl.constexpr = fetch_box if BOX else fetch_rows
        rows_m, o_m, live_m = LOCATE(i_m, (seq_q,), BLOCK_M)
        rows_n, o_k, live_k = LOCATE(i_n, (seq_k,), BLOCK_N)
        for pair in tl.range(lo, hi):
            i_b, i_h = own_b + pair // per_batch, own_h + pair % per_batch
            i_k = (i_h.to(tl.int32) // group).to(tl.int64)  # of int64 the division would be a hundred instructions
            band = band_of_sequence(left, right, i_b, KIND)
            q = FETCH(side_of(Q, i_b, i_h, 0, stride_qb, stride_qm, stride_qh, BOX), rows_m, live_m, True, EMULATE, BLOCK_M,
                      DIM_QK, BLOCK_QK)  # fmt: skip
            do = FETCH(side_of(DOut, i_b, i_h, 0, stride_db, stride_dm, stride_dh, BOX), rows_m, live_m, True, EMULATE, BLOCK_M,
                       DIM_V, BLOCK_V)  # fmt: skip
            k = FETCH(side_of(K, i_b, i_k, 0, stride_kb, stride_kn, stride_kh, BOX), rows_n, live_k, True, EMULATE,
                      BLOCK_N, DIM_QK, BLOCK_QK)  # fmt: skip
            v = FETCH(side_of(V, i_b, i_k, 0, stride_vb, stride_vn, stride_vh, BOX), rows_n, live_k, True, EMULATE,
                      BLOCK_N, DIM_V, BLOCK_V)  # fmt: skip
            row = i_b * stride_lb + i_h * stride_lh
            lse, delta = load_statistics(Lse2 + row, Delta + row, o_m, live_m, True)
            place = (i_b.to(tl.int32), i_h.to(tl.int32), tl.minimum(o_m, seq_q - 1)[:, None], (seq_q, seq_k))
            index = tl.minimum(o_k, seq_k - 1)[None, :]
            acc = add_score_gradient(acc, (q, do, lse, delta), k, v, live_k[None, :], place, index, scale,
                                     score_mods + ((bias[0], (held,)),) + later_mods, slopes, mask_mods, band, KIND,
                                     dropout)  # fmt: skip
    else:
        for pair in range(lo, hi):
            i_b, i_h = own_b + pair // per_batch, own_h + pair % per_batch
            i_k = i_h // group
            first_q, len_q = rows_of_sequence(CuQ, i_b, seq_q)
            first_k, len_k = rows_of_sequence(CuK, i_b, seq_k)
            band = band_of_sequence(left, right, i_b, KIND)
            begin, _, _, end = range_of_keys(i_n, len_q, len_k, band[0], band[1], KIND, BLOCK_M, BLOCK_N)
            end = tl.where(i_n * BLOCK_N < len_k, end, begin)
            if ROWS:
                begin, end = tl.maximum(begin, i_m), tl.minimum(end, i_m + 1)
            else:
                part_lo, part_hi = range_share(end - begin, share, shares)
                begin, end = begin + part_lo, begin + part_hi
            live_k = o_n < len_k
            k = load_rows(K + i_b * stride_kb + first_k * stride_kn + i_k * stride_kh, i_n * BLOCK_N, len_k, stride_kn, WIDE,
                          BLOCK_N, DIM_QK, BLOCK_QK)  # fmt: skip
            v = load_rows(V + i_b * stride_vb + first_k * stride_vn + i_k * stride_vh, i_n * BLOCK_N, len_k, stride_vn, WIDE,
                          BLOCK_N, DIM_V, BLOCK_V)  # fmt: skip
            q_side = side_of(Q, i_b, i_h, first_q, stride_qb, stride_qm, stride_qh, False)
            do_side = side_of(DOut, i_b, i_h, first_q, stride_db, stride_dm, stride_dh, False)
            row = i_b * stride_lb + i_h * stride_lh + first_q
            index = tl.minimum(o_n, len_k - 1)[None, :]
            acc = fold_score_gradient(acc, widen(k, EMULATE), widen(v, EMULATE), live_k, begin, end, i_h.to(tl.int32), index,
                                      scale, (len_q,), q_side, do_side, Lse2 + row, Delta + row,
                                      score_mods + ((bias[0], (held,)),) + later_mods, slopes, mask_mods, i_b.to(tl.int32),
                                      (len_q, len_k), band, KIND, EMULATE, BLOCK_M, DIM_QK, DIM_V, BLOCK_QK, BLOCK_V,
                                      dropout)  # fmt: skip
    entry = (share * bias_batch + own_b) * bias_heads + own_h
    if ROWS:
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
        p = DBias + (entry * seq_q + o_m.to(tl.int64))[:, None] * seq_k + o_n[None, :]
        inside = (o_m < seq_q)[:, None] & (o_n < seq_k)[None, :]
        tl.store(p, narrow(acc, DBias.dtype.element_ty, ROUND), mask=inside)
    else:
        total = narrow(tl.sum(acc, 0), DBias.dtype.element_ty, ROUND)
        tl.store(DBias + entry * seq_k + o_n, total, mask=o_n < seq_k)


@triton.jit(do_not_specialize=["seq_q", "seq_k", "batch", "heads", "left", "right", "bias_batch", "bias_heads"])
def attention_backward_stored(
    Stored, DBias, seq_q, seq_k, batch, heads, rows, pitch, left, right, bias_batch, bias_heads,
    KIND: tl.constexpr, ROUND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stored [B, H, rows, pitch]: dS of keys and queries, in whole tiles; those that the band hides are not read.  DBias and the
    grid: as of attention_backward_bias with ROWS."""
    tiles_n, tiles_m = tl.cdiv(seq_k, BLOCK_N), tl.cdiv(seq_q, BLOCK_M)
    pid = tl.program_id(0)
    i_m, i_n, own = pid % tiles_m, (pid // tiles_m) % tiles_n, (pid // (tiles_n * tiles_m)).to(tl.int64)
    own_b, own_h = own // bias_heads, own % bias_heads
    share, shares = tl.program_id(1), tl.num_programs(1)
    per_batch = heads // bias_heads
    lo, hi = range_share(tl.zeros([], tl.int32) + per_batch * (batch // bias_batch), share, shares)
    o_m, o_n = i_m * BLOCK_M + tl.arange(0, BLOCK_M), i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, _, _, end = range_of_keys(i_n, seq_q, seq_k, left, right, KIND, BLOCK_M, BLOCK_N)
    hi = tl.where((i_m >= begin) & (i_m < end), hi, lo)
    place = o_n.to(tl.int64)[:, None] * pitch + o_m[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for pair in range(lo, hi):
        head = (own_b + pair // per_batch) * heads + own_h + pair % per_batch
        acc += tl.load(Stored + head * rows * pitch + place).to(tl.float32)
    seen = mask_band(tl.zeros_like(acc), (0, 0, o_m[None, :], (seq_q, seq_k)), o_n[:, None], (left, right), KIND) == 0.0
    acc = tl.where(seen, acc, 0.0)
    p = (
        DBias
        + (((share * bias_batch + own_b) * bias_heads + own_h) * seq_q + o_m.to(tl.int64))[:, None] * seq_k
        + o_n[None, :]
    )
    inside = (o_m < seq_q)[:, None] & (o_n < seq_k)[None, :]
    tl.store(p, narrow(tl.trans(acc), DBias.dtype.element_ty, ROUND), mask=inside)


@triton.jit(do_not_specialize=["seq_q", "heads", "stride_sinks", "stride_lb", "stride_lh"])
def attention_backward_sinks(
    Sinks, Lse2, Delta, DSinks, CuQ, seq_q, heads, stride_sinks, stride_lb, stride_lh, BLOCK_M: tl.constexpr
):
    """Sinks [H], Lse2, Delta [B, H, Sq] fp32 (or packed, with CuQ) -> DSinks [B, H] fp32.  Grid (H * B,).

    A sink is a key without a value: dp = 0, so ds = -p * delta with p = exp(sink - lse)."""
    i_b, i_h = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    first, length = rows_of_sequence(CuQ, i_b, seq_q)
    sink = tl.load(Sinks + i_h * stride_sinks).to(tl.float32) * LOG2E
    row = i_b * stride_lb + i_h * stride_lh + first
    acc = tl.zeros([BLOCK_M], tl.float32)
    for begin in range(0, length, BLOCK_M):
        o_m = begin + tl.arange(0, BLOCK_M)
        lse, delta = load_statistics(Lse2 + row, Delta + row, o_m, o_m < length, True)
        acc += tl.exp2(sink - lse) * delta
    tl.store(DSinks + i_b * heads + i_h, -tl.sum(acc, 0))

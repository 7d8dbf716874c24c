"""Attention backward of short sequences: one program makes every gradient of a KV head.

All queries of a head have room in a program, SLICES tiles of BLOCK_M, and keys come BLOCK_N at a time.  So scores are made once:
five products a pair of tiles, where kernels whose programs own queries or keys make seven.  Each tensor is read once, delta is
made beside, and nothing is added in memory: the same bits every run.

Scores are made transposed, [BLOCK_N, BLOCK_M], as in `attention_backward_keys`: p^T and ds^T are left operands of dv and dk, and
ds alone is turned, for dq.

A batch of packed sequences is the same with CuQ and CuK, as in `attention_backward`; its lse lies [H, queries], so stride_lh is
the number of all queries.  Rows of no sequence get zeros, to which each sequence's programs give a share.
"""

import triton
import triton.language as tl

from ...device.gradient import score_gradient, statistics_of_rows
from ...device.grid import rows_of_sequence
from ...device.product import add_product
from ...device.ranges import band_of_sequence
from ...device.sequences import clear_share
from ...device.tile import load_rows, narrow, store_rows, widen

LENGTHS = ["seq_q", "seq_k", "total_k", "kv_heads", "group"]
RUNTIME = [*LENGTHS, "scale", "left", "right", "stride_lb", "stride_lh", "pitch", "stride_sh"]


@triton.jit
def _load_queries(
    Q, Out, DOut, Lse, DLse, seq_q, stride_qm, stride_om, stride_dm,
    SLICES: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A head's queries: (q, dout, lse in base 2, delta) of each slice; and as many dq, zero.  Pointers: to the head's rows."""
    slices, dqs = (), ()
    for i in tl.static_range(SLICES):
        first = i * BLOCK_M
        q = load_rows(Q, first, seq_q, stride_qm, WIDE, BLOCK_M, DIM_QK, BLOCK_QK)
        do = load_rows(DOut, first, seq_q, stride_dm, WIDE, BLOCK_M, DIM_V, BLOCK_V)
        out = load_rows(Out, first, seq_q, stride_om, WIDE, BLOCK_M, DIM_V, BLOCK_V)
        o_m = first + tl.arange(0, BLOCK_M)
        lse = tl.load(Lse + o_m, mask=o_m < seq_q, other=float("-inf"))
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
        if DLse is not None:
            delta -= tl.load(DLse + o_m, mask=o_m < seq_q, other=0.0)
        lse, delta = statistics_of_rows(lse, delta)
        slices = slices + ((widen(q, EMULATE), widen(do, EMULATE), lse, delta),)
        dqs = dqs + (tl.zeros([BLOCK_M, BLOCK_QK], tl.float32),)
    return slices, dqs


@triton.jit
def _load_keys(
    K, V, i_n, seq_k, stride_kn, stride_vn, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """k and v of tile i_n of keys; and dk and dv, zero."""
    k = widen(load_rows(K, i_n * BLOCK_N, seq_k, stride_kn, WIDE, BLOCK_N, DIM_QK, BLOCK_QK), EMULATE)
    v = widen(load_rows(V, i_n * BLOCK_N, seq_k, stride_vn, WIDE, BLOCK_N, DIM_V, BLOCK_V), EMULATE)
    return k, v, tl.zeros([BLOCK_N, BLOCK_QK], tl.float32), tl.zeros([BLOCK_N, BLOCK_V], tl.float32)


@triton.jit
def _fold_keys(
    dk, dv, dqs, slices, k, v, i_n, place, extent, scale, score_mods, slopes, mask_mods, dropout, band, Stored, pitch,
    KIND: tl.constexpr, EMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add to dk [BLOCK_N, BLOCK_QK] and dv [BLOCK_N, BLOCK_V] of tile i_n of keys, and to dqs, what all slices give; dk and dqs
    without `scale`.  place: batch, head; extent: seq_q, seq_k.  Stored: of the head, or None."""
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    kv_index = tl.minimum(o_n, extent[1] - 1)[:, None]
    made = ()
    for i in tl.static_range(len(slices)):
        q, do, lse, delta = slices[i]
        o_m = i * BLOCK_M + tl.arange(0, BLOCK_M)
        where = (place[0], place[1], tl.minimum(o_m, extent[0] - 1)[None, :], extent)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        p, ds = score_gradient(
            s, dp, lse[None, :], delta[None, :], where, kv_index, scale, score_mods, slopes, mask_mods, band, KIND, dropout
        )  # fmt: skip
        p, ds = p.to(do.dtype), tl.where((o_n < extent[1])[:, None], ds, 0.0).to(q.dtype)
        if Stored is not None:
            at = o_n.to(tl.int64)[:, None] * pitch + o_m[None, :]
            tl.store(Stored + at, narrow(ds, Stored.dtype.element_ty, EMULATE))
        dv = add_product(p, do, dv)
        dk = add_product(ds, q, dk)
        made = made + (add_product(tl.trans(ds), k, dqs[i]),)
    return dk, dv, made


@triton.jit
def _store_keys(
    DK, DV, dk, dv, i_n, seq_k, stride_xn, stride_yn, EMULATE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dk and dv of tile i_n of keys."""
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    store_rows(DK, o_n.to(tl.int64), stride_xn, o_n < seq_k, dk, DIM_QK, BLOCK_QK, EMULATE)
    store_rows(DV, o_n.to(tl.int64), stride_yn, o_n < seq_k, dv, DIM_V, BLOCK_V, EMULATE)


@triton.jit
def _store_queries(
    DQ, dqs, scale, seq_q, stride_gm, EMULATE: tl.constexpr, DIM_QK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_QK: tl.constexpr,
):  # fmt: skip
    """dq of all slices of a head."""
    for i in tl.static_range(len(dqs)):
        o_m = i * BLOCK_M + tl.arange(0, BLOCK_M)
        store_rows(DQ, o_m.to(tl.int64), stride_gm, o_m < seq_q, dqs[i] * scale, DIM_QK, BLOCK_QK, EMULATE)


@triton.jit(do_not_specialize=RUNTIME)
def attention_backward_short(
    Q, K, V, Out, DOut, Lse, DLse, DQ, DK, DV, Stored, CuQ, CuK,
    scale, seq_q, seq_k, total_k, kv_heads, group, left, right, pitch, stride_sh,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ob, stride_om, stride_oh, stride_db, stride_dm, stride_dh, stride_gb, stride_gm, stride_gh,
    stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh, stride_lb, stride_lh,
    score_mods, slopes, mask_mods, dropout,
    ALONE: tl.constexpr, SLICES: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Q, DQ [B, Sq, H, Dqk], K, DK [B, Sk, H/group, Dqk], V, DV [B, Sk, H/group, Dv], Out, DOut [B, Sq, H, Dv], Lse, DLse (or
    None) [B, H, Sq] fp32; or packed, of total_k keys, with CuQ, CuK [B + 1] int32 and seq_q, seq_k the longest.  seq_q is at
    most SLICES * BLOCK_M.  Stored [B * H, keys, pitch]: dS, in whole tiles, or None; not of a packed batch.
    ALONE: the group is one head; else seq_k is at most BLOCK_N.  Grid (H/group * B,)."""
    pid = tl.program_id(0)
    i_b, i_k = (pid // kv_heads).to(tl.int64), (pid % kv_heads).to(tl.int64)
    left, right = band_of_sequence(left, right, i_b, KIND)
    DK += i_k * stride_xh
    DV += i_k * stride_yh
    if CuK is not None:
        clear_share(DK, CuK, i_b, total_k, kv_heads, stride_xn, EMULATE, DIM_QK, BLOCK_N, BLOCK_QK)
        clear_share(DV, CuK, i_b, total_k, kv_heads, stride_yn, EMULATE, DIM_V, BLOCK_N, BLOCK_V)
    first_q, seq_q = rows_of_sequence(CuQ, i_b, seq_q)
    first_k, seq_k = rows_of_sequence(CuK, i_b, seq_k)
    extent, band = (seq_q if CuQ is None else tl.maximum(seq_q, 1), seq_k), (left, right)
    K += i_b * stride_kb + first_k * stride_kn + i_k * stride_kh
    V += i_b * stride_vb + first_k * stride_vn + i_k * stride_vh
    DK += i_b * stride_xb + first_k * stride_xn
    DV += i_b * stride_yb + first_k * stride_yn
    if not ALONE:  # one tile of keys, whose gradients all heads add to
        k, v, dk, dv = _load_keys(
            K, V, 0, seq_k, stride_kn, stride_vn, EMULATE, WIDE, DIM_QK, DIM_V, BLOCK_N, BLOCK_QK, BLOCK_V
        )
    for i_g in range(1 if ALONE else group):
        i_h = i_k if ALONE else i_k * group + i_g
        dq = DQ + i_h * stride_gh
        if CuQ is not None:
            clear_share(dq, CuQ, i_b, stride_lh, kv_heads, stride_gm, EMULATE, DIM_QK, BLOCK_M, BLOCK_QK)
        row = i_b * stride_lb + i_h * stride_lh + first_q
        slices, dqs = _load_queries(
            Q + i_b * stride_qb + first_q * stride_qm + i_h * stride_qh,
            Out + i_b * stride_ob + first_q * stride_om + i_h * stride_oh,
            DOut + i_b * stride_db + first_q * stride_dm + i_h * stride_dh, Lse + row, DLse if DLse is None else DLse + row,
            seq_q, stride_qm, stride_om, stride_dm, SLICES, EMULATE, WIDE, DIM_QK, DIM_V, BLOCK_M, BLOCK_QK,
            BLOCK_V)  # fmt: skip
        stored = (
            Stored if Stored is None else Stored + (i_b * (kv_heads if ALONE else kv_heads * group) + i_h) * stride_sh
        )
        place = (i_b.to(tl.int32), i_h.to(tl.int32))
        for i_n in range(tl.cdiv(seq_k, BLOCK_N) if ALONE or CuK is not None else 1):
            if ALONE:
                k, v, dk, dv = _load_keys(K, V, i_n, seq_k, stride_kn, stride_vn, EMULATE, WIDE, DIM_QK, DIM_V, BLOCK_N,
                                          BLOCK_QK, BLOCK_V)  # fmt: skip
            dk, dv, dqs = _fold_keys(
                dk, dv, dqs, slices, k, v, i_n, place, extent, scale, score_mods, slopes, mask_mods, dropout, band, stored,
                pitch, KIND, EMULATE, BLOCK_M, BLOCK_N)  # fmt: skip
            if ALONE:
                _store_keys(DK, DV, dk * scale, dv, i_n, seq_k, stride_xn, stride_yn, EMULATE, DIM_QK, DIM_V, BLOCK_N,
                            BLOCK_QK, BLOCK_V)  # fmt: skip
        _store_queries(dq + i_b * stride_gb + first_q * stride_gm, dqs, scale, seq_q, stride_gm, EMULATE, DIM_QK, BLOCK_M,
                       BLOCK_QK)  # fmt: skip
    if not ALONE:
        _store_keys(DK, DV, dk * scale, dv, 0, seq_k, stride_xn, stride_yn, EMULATE, DIM_QK, DIM_V, BLOCK_N, BLOCK_QK,
                    BLOCK_V)  # fmt: skip

"""Forward attention: three thin kernels around the fold, one per way of finding K and V.

    attention_forward          [B, Sk, Hkv, D] by pointers, any strides
    attention_forward_box      the same by tensor descriptors (the copy engine of Hopper and newer)
    attention_forward_varlen   sequences packed along the first dimension, by pointers

One program makes BLOCK_M rows of the output of one head.  The grid is one-dimensional (query tile fastest, then head, then
batch), so that programs that run together share the K and V of a head in the L2 cache; under a causal mask the longest
tiles of a head come first.
"""

import triton
import triton.language as tl

from ...device.fold import fold_range
from ...device.grid import place_of_program
from ...device.ranges import band_of_sequence, range_of_tile
from ...device.source import fetch_box, fetch_rows, locate_box, locate_rows
from ...device.state import state_finish, state_init, state_init_sink
from ...device.tile import load_rows, store_rows, widen

# Lengths and counts never specialise a compilation.  Row strides do: a multiple of 16 gives 16-byte loads.
RUNTIME = ["scale", "seq_q", "seq_k", "max_q", "total_q", "heads", "group", "left", "right", "stride_sinks"]


@triton.jit
def attend(
    Q, Out, Lse, Sinks, stride_sinks, k_side, v_side, i_m, i_b, i_h, seq_q, seq_k, scale, band, stride_q, stride_o,
    score_mods, mask_mods, LOCATE: tl.constexpr, FETCH: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr,
    WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr, dropout,
):  # fmt: skip
    """Query tile i_m of one sequence and head, whose row 0 Q, Out and Lse point at: load, fold, finish, store."""
    q = load_rows(Q, i_m * BLOCK_M, seq_q, stride_q, WIDE, BLOCK_M, DIM_QK, BLOCK_QK)
    if Sinks is None:
        state = state_init(BLOCK_M, BLOCK_V)
    else:
        state = state_init_sink(tl.load(Sinks + i_h * stride_sinks).to(tl.float32), BLOCK_M, BLOCK_V)
    # What the mods are told: batch, head, indices of the queries (inside the sequence), lengths.
    q_index = tl.minimum(i_m * BLOCK_M + tl.arange(0, BLOCK_M), seq_q - 1)[:, None]
    place = (i_b.to(tl.int32), i_h.to(tl.int32), q_index, (seq_q, seq_k))
    band = band_of_sequence(band[0], band[1], i_b, KIND)
    tiles = range_of_tile(i_m, seq_q, seq_k, band[0], band[1], KIND, BLOCK_M, BLOCK_N)
    acc, m, l = fold_range(widen(q, EMULATE), state, tiles, place, scale, (seq_k,), k_side, v_side, score_mods, mask_mods,
                           band, LOCATE, FETCH, KIND, EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK, BLOCK_V,
                           dropout)  # fmt: skip
    out, lse = state_finish(acc, m, l)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    store_rows(Out, o_m.to(tl.int64), stride_o, o_m < seq_q, out, DIM_V, BLOCK_V, EMULATE)
    tl.store(Lse + o_m, lse, mask=o_m < seq_q)


@triton.jit(do_not_specialize=RUNTIME)
def attention_forward(
    Q, K, V, Out, Lse, Sinks, scale, seq_q, seq_k, heads, group, left, right, stride_sinks, stride_qb, stride_qm, stride_qh,
    stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh, score_mods,
    mask_mods, dropout,
    KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Q [B, Sq, H, Dqk], K [B, Sk, H/group, Dqk], V [B, Sk, H/group, Dv], Out [B, Sq, H, Dv], Lse [B, H, Sq] fp32 contiguous,
    Sinks [H] or None.  Grid (cdiv(Sq, BLOCK_M) * B * H,)."""
    i_m, i_b, i_h = place_of_program(seq_q, heads, True, BLOCK_M)
    i_k = i_h // group
    q = Q + i_b * stride_qb + i_h * stride_qh
    out = Out + i_b * stride_ob + i_h * stride_oh
    lse = Lse + (i_b * heads + i_h) * seq_q
    k_side = (K + i_b * stride_kb + i_k * stride_kh, stride_kn)
    v_side = (V + i_b * stride_vb + i_k * stride_vh, stride_vn)
    attend(q, out, lse, Sinks, stride_sinks, k_side, v_side, i_m, i_b, i_h, seq_q, seq_k, scale, (left, right),
           stride_qm, stride_om, score_mods, mask_mods, locate_rows, fetch_rows,
           KIND, EMULATE, WIDE, DIM_QK, DIM_V, BLOCK_M, BLOCK_N, BLOCK_QK, BLOCK_V, dropout)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def attention_forward_box(
    Q, K, V, Out, Lse, Sinks, scale, seq_q, seq_k, heads, group, left, right, stride_sinks, stride_qb, stride_qm, stride_qh,
    stride_ob, stride_om, stride_oh, score_mods, mask_mods, dropout,
    KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """attention_forward with K and V as host descriptors of [B, H/group, Sk, D], box [1, 1, BLOCK_N, padded D]."""
    i_m, i_b, i_h = place_of_program(seq_q, heads, True, BLOCK_M)
    i_k = (i_h // group).to(tl.int32)
    q = Q + i_b * stride_qb + i_h * stride_qh
    out = Out + i_b * stride_ob + i_h * stride_oh
    lse = Lse + (i_b * heads + i_h) * seq_q
    k_side = (K, i_b.to(tl.int32), i_k)
    v_side = (V, i_b.to(tl.int32), i_k)
    attend(q, out, lse, Sinks, stride_sinks, k_side, v_side, i_m, i_b, i_h, seq_q, seq_k, scale, (left, right),
           stride_qm, stride_om, score_mods, mask_mods, locate_box, fetch_box,
           KIND, EMULATE, WIDE, DIM_QK, DIM_V, BLOCK_M, BLOCK_N, BLOCK_QK, BLOCK_V, dropout)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def attention_forward_varlen(
    Q, K, V, Out, Lse, Sinks, CuQ, CuK, scale, max_q, total_q, heads, group, left, right, stride_sinks, stride_qm,
    stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_om, stride_oh, score_mods, mask_mods, dropout,
    KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Q, Out [Tq, H, D], K, V [Tk, H/group, D], Lse [H, Tq] fp32 contiguous; sequence b is rows CuQ[b]..CuQ[b+1] of the queries
    and CuK[b]..CuK[b+1] of the keys (int32).  Grid (cdiv(max_q, BLOCK_M) * B * H,); programs past a sequence's end leave."""
    i_m, i_b, i_h = place_of_program(max_q, heads, True, BLOCK_M)
    first_q = tl.load(CuQ + i_b).to(tl.int64)
    first_k = tl.load(CuK + i_b).to(tl.int64)
    seq_q = (tl.load(CuQ + i_b + 1) - first_q).to(tl.int32)
    seq_k = (tl.load(CuK + i_b + 1) - first_k).to(tl.int32)
    if i_m * BLOCK_M >= seq_q:
        return
    i_k = i_h // group
    q = Q + first_q * stride_qm + i_h * stride_qh
    out = Out + first_q * stride_om + i_h * stride_oh
    lse = Lse + i_h * total_q + first_q
    k_side = (K + first_k * stride_kn + i_k * stride_kh, stride_kn)
    v_side = (V + first_k * stride_vn + i_k * stride_vh, stride_vn)
    attend(q, out, lse, Sinks, stride_sinks, k_side, v_side, i_m, i_b, i_h, seq_q, seq_k, scale, (left, right),
           stride_qm, stride_om, score_mods, mask_mods, locate_rows, fetch_rows,
           KIND, EMULATE, WIDE, DIM_QK, DIM_V, BLOCK_M, BLOCK_N, BLOCK_QK, BLOCK_V, dropout)  # fmt: skip

"""Forward attention over keys whose number and place each sequence has on the device: KV caches, in one piece or in pages.

The fold is attention_forward's; what differs is where a sequence's keys begin and end.  With splits, each program folds an even
share of its tiles and writes a finished partial (out fp32, lse), which `combine` merges; an empty share is the identity.
"""

import triton
import triton.language as tl

from ...device.cache import keys_of_sequence
from ...device.fold import fold_range
from ...device.grid import place_of_program, rows_of_sequence
from ...device.ranges import range_of_tile, share_of_range
from ...device.source import fetch_paged, fetch_rows, locate_page, locate_pages, locate_rows
from ...device.state import state_finish, state_init, state_init_sink
from ...device.tile import load_rows, store_rows, widen

RUNTIME = ["scale", "max_q", "least_q", "capacity", "more", "heads", "group", "left", "right", "stride_sinks", "stride_tb",
           "stride_ls", "stride_lb", "stride_lh"]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def attention_cached(
    Q, K, V, Out, Lse, Sinks, CuQ, CuK, Lengths, Pads, BatchIndex, Table,
    scale, max_q, least_q, capacity, more, heads, group, left, right, stride_sinks, stride_tb, stride_ls, stride_lb, stride_lh,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_os, stride_ob, stride_om, stride_oh, score_mods, mask_mods, dropout,
    PAGE: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Q, Out [B, Sq, H, D], or [Tq, H, D] with CuQ [B + 1] int32, strides over the batch 0 and max_q the longest sequence.

    PAGE = 0: K, V [B, capacity, H/group, D], those of sequence BatchIndex[b] (int32 [B], None: b), or packed [Tk, H/group, D]
    with CuK [B + 1] int32.  PAGE > 0: [pages, PAGE, H/group, D], key j of sequence b is row j % PAGE of page Table[b, j // PAGE]
    (int32 [B, pages a sequence]); CuK counts keys only.  Lengths, Pads [B] int32 or None: as for keys_of_sequence; PADDED: there
    are Pads.  Lse fp32, rows side by side.  Splits, along the grid's second axis, are stride_os and stride_ls apart.
    Grid (cdiv(max_q, BLOCK_M) * H * B, splits).  Sequences of fewer than least_q queries are somebody else's."""
    i_m, i_b, i_h = place_of_program(max_q, heads, True, BLOCK_M)
    i_s = tl.program_id(1)
    first_q, seq_q = rows_of_sequence(CuQ, i_b, max_q)
    if (i_m * BLOCK_M >= seq_q) | (seq_q < least_q):
        return
    first_k, seq_k = keys_of_sequence(CuK, Lengths, Pads, i_b, capacity, more, PAGE)
    i_k = i_h // group
    q = load_rows(Q + i_b * stride_qb + first_q * stride_qm + i_h * stride_qh, i_m * BLOCK_M, seq_q, stride_qm, WIDE, BLOCK_M,
                  DIM_QK, BLOCK_QK)  # fmt: skip
    if Sinks is None:
        state = state_init(BLOCK_M, BLOCK_V)
    else:
        sink = tl.load(Sinks + i_h * stride_sinks).to(tl.float32)  # one share's, not every one's
        state = state_init_sink(tl.where(i_s == 0, sink, float("-inf")), BLOCK_M, BLOCK_V)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    place = (i_b.to(tl.int32), i_h.to(tl.int32), tl.minimum(o_m, seq_q - 1)[:, None], (seq_q, seq_k))
    tiles = share_of_range(
        range_of_tile(i_m, seq_q, seq_k, left, right, KIND, BLOCK_M, BLOCK_N), i_s, tl.num_programs(1)
    )
    if PAGE == 0:
        i_c = i_b
        if BatchIndex is not None:
            i_c = tl.load(BatchIndex + i_b).to(tl.int64)
        k_side = (K + i_c * stride_kb + first_k * stride_kn + i_k * stride_kh, stride_kn)
        v_side = (V + i_c * stride_vb + first_k * stride_vn + i_k * stride_vh, stride_vn)
        acc, m, l = fold_range(widen(q, EMULATE), state, tiles, place, scale, (seq_k,), k_side, v_side, score_mods, mask_mods,
                               (left, right), locate_rows, fetch_rows, KIND, EMULATE, BLOCK_N, DIM_QK, DIM_V, BLOCK_QK, BLOCK_V,
                               dropout)  # fmt: skip
    else:
        ONE: tl.constexpr = PAGE % BLOCK_N == 0 and not PADDED
        k_side = (K + i_k * stride_kh, stride_kb, tl.cast(stride_kn, tl.int64) if WIDE else stride_kn)
        v_side = (V + i_k * stride_vh, stride_vb, tl.cast(stride_vn, tl.int64) if WIDE else stride_vn)
        first = 0
        if PADDED:
            first = tl.maximum(tl.load(Pads + i_b).to(tl.int32), 0)
        source = (seq_k, Table + i_b * stride_tb, first, PAGE)
        acc, m, l = fold_range(widen(q, EMULATE), state, tiles, place, scale, source, k_side, v_side, score_mods, mask_mods,
                               (left, right), locate_page if ONE else locate_pages, fetch_paged, KIND, EMULATE, BLOCK_N, DIM_QK,
                               DIM_V, BLOCK_QK, BLOCK_V, dropout)  # fmt: skip
    out, lse = state_finish(acc, m, l)
    o_out = Out + i_s.to(tl.int64) * stride_os + i_b * stride_ob + first_q * stride_om + i_h * stride_oh
    store_rows(o_out, o_m.to(tl.int64), stride_om, o_m < seq_q, out, DIM_V, BLOCK_V, EMULATE)
    tl.store(
        Lse + i_s.to(tl.int64) * stride_ls + i_b * stride_lb + i_h * stride_lh + first_q + o_m, lse, mask=o_m < seq_q
    )

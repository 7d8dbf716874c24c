"""Append new keys and values to a KV cache, in one piece or in pages, turning the keys on the way.

Memory-bound: it reads and writes the new tokens once.
"""

import triton
import triton.language as tl

from ..device.rotary import copy_rows, load_angles, turn_rows

RUNTIME = ["seq_new", "capacity", "seq_table", "kv_heads", "stride_tb"]


@triton.jit
def cache_rows(row, live, table, start, stride_p, stride_n, PAGE: tl.constexpr):
    """Element offsets [M] int64 of the rows [M] of one sequence's cache: from `start` on, or in the pages that `table` names."""
    if PAGE == 0:
        return start + row * stride_n
    else:
        page = tl.load(table + row // PAGE, mask=live, other=0).to(tl.int64)
        return start + page * stride_p + row % PAGE * stride_n


@triton.jit(do_not_specialize=RUNTIME)
def cache_append(
    K, V, KCache, VCache, Cos, Sin, Lengths, BatchIndex, Table, seq_new, capacity, seq_table, kv_heads, stride_tb,
    stride_kb, stride_km, stride_kh, stride_vb, stride_vm, stride_vh,
    stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh, stride_c, stride_s,
    INTERLEAVED: tl.constexpr, EMULATE: tl.constexpr, PAGE: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """K [B, S, Hkv, Dqk], V [B, S, Hkv, Dv]: row i of sequence b becomes row Lengths[b] + i of its cache: KCache, VCache
    [B, capacity, Hkv, D], that of sequence BatchIndex[b] (int32, None: b), or [pages, PAGE, Hkv, D] with Table [B, pages] int32.
    Rows past the capacity are not written.  PAIRS > 0: keys are turned by Cos, Sin [seq_table, PAIRS] at their row in the cache.
    Grid (cdiv(S, BLOCK_M) * Hkv * B,)."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(seq_new, BLOCK_M)
    i_h = (pid % kv_heads).to(tl.int64)
    i_m = pid // kv_heads % tiles
    i_b = (pid // kv_heads // tiles).to(tl.int64)
    o_m = (i_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = tl.load(Lengths + i_b).to(tl.int64) + o_m
    live = (o_m < seq_new) & (row >= 0) & (row < capacity)
    rows_k = i_b * stride_kb + o_m * stride_km + i_h * stride_kh
    rows_v = i_b * stride_vb + o_m * stride_vm + i_h * stride_vh
    start_x, start_y = i_h * stride_xh, i_h * stride_yh
    if PAGE == 0:
        i_c = i_b
        if BatchIndex is not None:
            i_c = tl.load(BatchIndex + i_b).to(tl.int64)
        start_x += i_c * stride_xb
        start_y += i_c * stride_yb
        table = None
    else:
        table = Table + i_b * stride_tb
    rows_x = cache_rows(row, live, table, start_x, stride_xb, stride_xn, PAGE)
    rows_y = cache_rows(row, live, table, start_y, stride_yb, stride_yn, PAGE)
    if PAIRS > 0:
        cos, sin = load_angles(Cos, Sin, row, live, seq_table, stride_c, stride_s, PAIRS, BLOCK_P)
        turn_rows(K, rows_k, KCache, rows_x, live, cos, sin, INTERLEAVED, EMULATE, PAIRS, BLOCK_P)
    copy_rows(K, rows_k, KCache, rows_x, live, 2 * PAIRS, DIM_QK, BLOCK_QK)
    copy_rows(V, rows_v, VCache, rows_y, live, 0, DIM_V, BLOCK_V)

"""Append new keys and values to a KV cache, in one piece or in pages, turning keys, and queries if there are any, on the way.

Memory-bound: it reads and writes the new tokens once.  A program takes some rows (token, head), head fastest, whatever sequences
they are of; what it reads does not depend on lengths and tables, so both are under way at the same time.
"""

import triton
import triton.language as tl

from ...device.encode import PLAIN
from ...device.fault import BATCH_INDEX, FAR, ROOM, TABLE, raise_fault
from ...device.rotary import copy_rows, load_angles, turn_rows

RUNTIME = [
    "tokens",
    "batch",
    "seq_new",
    "capacity",
    "pages",
    "seq_table",
    "kv_heads",
    "heads",
    "kv_programs",
    "stride_tb",
    "operation",
    "columns",
]


@triton.jit
def place_of_tokens(Cu, token, batch, seq_new, BLOCK_B: tl.constexpr):
    """-> the sequence of each token [M] int32 and the token's index in it; tokens of no sequence have the index -1."""
    if Cu is None:
        return token // seq_new, token % seq_new
    else:
        # The ends that are not behind the token are those of all sequences before its own, empty ones among them.
        i_b = tl.zeros_like(token)
        for first in range(0, batch, BLOCK_B):
            o_b = first + tl.arange(0, BLOCK_B)
            ends = tl.load(Cu + 1 + o_b, mask=o_b < batch, other=FAR)
            i_b += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
        start = tl.load(Cu + i_b, mask=i_b < batch, other=FAR)
        return i_b, tl.maximum(token - start, -1)


@triton.jit
def rows_of_program(pid, tokens, heads, BLOCK_M: tl.constexpr):
    """-> token [M] int32, head [M] int64, and whether there is such a row."""
    row = pid * BLOCK_M + tl.arange(0, BLOCK_M)
    return row // heads, (row % heads).to(tl.int64), row < tokens * heads


@triton.jit
def rows_of_cache(row, i_b, live, BatchIndex, Table, stride_tb, capacity, pages, PAGE: tl.constexpr):
    """-> the page (or cache) and the row in it of row `row` of each token's sequence, int64, and whether that may be written:
    what would lie past the capacity or in a page that does not exist may not."""
    live = live & (row >= 0) & (row < capacity)
    if PAGE > 0:
        page = tl.load(Table + i_b.to(tl.int64) * stride_tb + row // PAGE, mask=live, other=-1).to(tl.int64)
        row = row % PAGE
    elif BatchIndex is not None:
        page = tl.load(BatchIndex + i_b, mask=live, other=-1).to(tl.int64)
    else:
        page = i_b.to(tl.int64)
    return page, row, live & (page >= 0) & (page < pages)


@triton.jit
def inspect_tokens(Fault, operation, columns, Cu, Lengths, BatchIndex, Table, stride_tb, first, tokens, batch, seq_new,
                   capacity, pages, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr):  # fmt: skip
    """Of BLOCK_M tokens from `first` on note the first of those that are not written, for their rows lie nowhere."""
    token = first + tl.arange(0, BLOCK_M)
    i_b, i_n = place_of_tokens(Cu, token, batch, seq_new, BLOCK_B)
    meant = (token < tokens) & (i_n >= 0)
    position = tl.load(Lengths + i_b, mask=meant, other=0).to(tl.int64) + i_n
    _, _, live = rows_of_cache(position, i_b, meant, BatchIndex, Table, stride_tb, capacity, pages, PAGE)
    wrong = meant & (live == 0)
    count = tl.sum(wrong.to(tl.int32), 0)
    if count > 0:
        chosen = token == tl.min(tl.where(wrong, token, FAR), 0)
        b = tl.sum(tl.where(chosen, i_b, 0), 0).to(tl.int64)
        row = tl.sum(tl.where(chosen, position, 0), 0)
        new = seq_new
        if Cu is not None:
            new = tl.load(Cu + b + 1) - tl.load(Cu + b)
        if (row < 0) | (row >= capacity):
            raise_fault(Fault, operation, ROOM, count, (b, 0, 0, 0), tl.load(Lengths + b), 0, capacity, new)
        elif PAGE > 0:
            at = b * columns + row // PAGE
            number = tl.load(Table + b * stride_tb + row // PAGE)
            raise_fault(Fault, operation, TABLE, count, (at, 0, 0, columns), number, 0, pages - 1, 0)
        elif BatchIndex is not None:
            raise_fault(Fault, operation, BATCH_INDEX, count, (b, 0, 0, 0), tl.load(BatchIndex + b), 0, pages - 1, 0)


@triton.jit(do_not_specialize=RUNTIME)
def cache_append(
    K, V, Q, KCache, VCache, QOut, Cos, Sin, Cu, Lengths, BatchIndex, Table, KScale, VScale,
    Fault, operation, columns, tokens, batch, seq_new, capacity, pages, seq_table, kv_heads, heads, kv_programs, stride_tb,
    stride_kb, stride_km, stride_kh, stride_vb, stride_vm, stride_vh, stride_qb, stride_qm, stride_qh, stride_om, stride_oh,
    stride_xb, stride_xn, stride_xh, stride_yb, stride_yn, stride_yh, stride_c, stride_s,
    stride_kp, stride_kg, stride_vp, stride_vg,
    INTERLEAVED: tl.constexpr, CODE: tl.constexpr, EMULATE: tl.constexpr, PAGE: tl.constexpr, DIM_QK: tl.constexpr,
    DIM_V: tl.constexpr, PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """K [B, S, Hkv, Dqk], V [B, S, Hkv, Dv], or [T, Hkv, D] with Cu [B + 1] int32 and strides over the batch 0: token i of
    sequence b becomes row Lengths[b] + i of its cache: KCache, VCache [pages, capacity, Hkv, D], that of sequence
    BatchIndex[b] (int32, None: b), or [pages, PAGE, Hkv, D] with Table [B, max_pages] int32.  PAIRS > 0: keys are turned by
    Cos, Sin [seq_table, PAIRS] at their row in the cache, and so are Q [.., H, Dqk] into QOut.  CODE: how the caches hold
    numbers, KScale and VScale fp32 [pages, Hkv] (stride_kp and stride_vp may be 0).  Fault: a note of device.fault or None.
    Grid (kv_programs + cdiv(tokens * H, BLOCK_M),), and cdiv(tokens, BLOCK_M) more with Fault: these look, so that nobody who
    writes waits for it."""
    pid = tl.program_id(0)
    if Fault is not None:
        looking = pid - (tl.num_programs(0) - tl.cdiv(tokens, BLOCK_M))
        if looking >= 0:
            inspect_tokens(Fault, operation, columns, Cu, Lengths, BatchIndex, Table, stride_tb, looking * BLOCK_M, tokens, batch,
                           seq_new, capacity, pages, PAGE, BLOCK_M, BLOCK_B)  # fmt: skip
            return
    if Q is not None:
        if pid >= kv_programs:
            token, i_h, inside = rows_of_program(pid - kv_programs, tokens, heads, BLOCK_M)
            i_b, i_n = place_of_tokens(Cu, token, batch, seq_new, BLOCK_B)
            rows_q = token.to(tl.int64) * stride_qm + i_h * stride_qh
            if Cu is None:
                rows_q = i_b.to(tl.int64) * stride_qb + i_n.to(tl.int64) * stride_qm + i_h * stride_qh
            mine = inside & (i_n >= 0)
            position = tl.where(mine, tl.load(Lengths + i_b, mask=mine, other=0).to(tl.int64) + i_n, -1)
            cos, sin = load_angles(Cos, Sin, position, mine, seq_table, stride_c, stride_s, PAIRS, BLOCK_P)
            rows_o = token.to(tl.int64) * stride_om + i_h * stride_oh
            turn_rows(
                Q, rows_q, inside, QOut, rows_o, inside, None, cos, sin, INTERLEAVED, PLAIN, EMULATE, PAIRS, BLOCK_P
            )
            copy_rows(Q, rows_q, inside, QOut, rows_o, inside, None, PLAIN, EMULATE, 2 * PAIRS, DIM_QK, BLOCK_QK)
            return
    token, i_h, inside = rows_of_program(pid, tokens, kv_heads, BLOCK_M)
    i_b, i_n = place_of_tokens(Cu, token, batch, seq_new, BLOCK_B)
    if Cu is None:
        rows_k = i_b.to(tl.int64) * stride_kb + i_n.to(tl.int64) * stride_km + i_h * stride_kh
        rows_v = i_b.to(tl.int64) * stride_vb + i_n.to(tl.int64) * stride_vm + i_h * stride_vh
    else:
        rows_k = token.to(tl.int64) * stride_km + i_h * stride_kh
        rows_v = token.to(tl.int64) * stride_vm + i_h * stride_vh
    live = inside & (i_n >= 0)
    position = tl.load(Lengths + i_b, mask=live, other=0).to(tl.int64) + i_n
    page, row, live = rows_of_cache(position, i_b, live, BatchIndex, Table, stride_tb, capacity, pages, PAGE)
    rows_x = page * stride_xb + row * stride_xn + i_h * stride_xh
    rows_y = page * stride_yb + row * stride_yn + i_h * stride_yh
    factor_k, factor_v = None, None
    if CODE != PLAIN:
        factor_k = tl.load(KScale + page * stride_kp + i_h * stride_kg, mask=live, other=1.0)
        factor_v = tl.load(VScale + page * stride_vp + i_h * stride_vg, mask=live, other=1.0)
    if PAIRS > 0:
        cos, sin = load_angles(Cos, Sin, position, live, seq_table, stride_c, stride_s, PAIRS, BLOCK_P)
        turn_rows(
            K, rows_k, inside, KCache, rows_x, live, factor_k, cos, sin, INTERLEAVED, CODE, EMULATE, PAIRS, BLOCK_P
        )
    copy_rows(K, rows_k, inside, KCache, rows_x, live, factor_k, CODE, EMULATE, 2 * PAIRS, DIM_QK, BLOCK_QK)
    copy_rows(V, rows_v, inside, VCache, rows_y, live, factor_v, CODE, EMULATE, 0, DIM_V, BLOCK_V)

"""Attention of few queries over a KV cache: all query heads of a KV head and all query tokens are rows of one tile.

K and V come from memory once.  What the programs own is cut by tiles of keys (device.work), so that one long sequence among
short ones is everybody's work; nothing is read on the host, and a CUDA graph may replay with other lengths.  The fold is
device.fold_cache's.  Stream-K: Osama et al. 2023 (arXiv:2301.03598); splitting the keys: Flash-Decoding (Dao et al. 2023).
"""

import triton
import triton.language as tl

from ...device.cache import (
    PLAIN,
    fit_float16,
    locate_in_page,
    locate_in_pages,
    locate_run,
    next_none,
    next_page,
    next_pages,
)
from ...device.fault import BATCH_INDEX, LENGTHS, PADS, TABLE, existing, inspect_entries, inspect_value
from ...device.fold_cache import fold_cache_range
from ...device.grid import let_next_kernel_start, wait_for_previous_kernel
from ...device.partials import arrive, merge_parts, store_part
from ...device.queries import load_queries, rows_of_item, store_results
from ...device.ranges import part_of_range, range_share
from ...device.state import state_init, state_init_sink
from ...device.tile import widen
from ...device.work import (
    extent_of_sequence,
    find_tiles,
    range_of_sequence,
    slices,
    tiles_of_sequence,
    total_tiles,
    width_of_item,
)

RUNTIME = ["operation", "limit", "fewest", "shift", "columns", "scale", "batch", "max_q", "capacity", "more", "kv_heads", "group",
           "left", "right", "blocks", "splits", "least", "stride_sinks", "stride_tb", "stride_lb", "stride_lh", "stride_ksp",
           "stride_ksh", "stride_vsp", "stride_vsh"]  # fmt: skip

ENTRIES = tl.constexpr(256)  # of a table, looked at at a time


@triton.jit
def suit_queries(q, rest, QUANT: tl.constexpr, EMULATE: tl.constexpr, BLOCK_REST: tl.constexpr):
    """Both pieces as the keys' products take them, and the factor that was taken out of both: bytes are met in float16."""
    factor = 1.0
    if QUANT == PLAIN:
        q = widen(q, EMULATE)
        if BLOCK_REST > 0:
            rest = widen(rest, EMULATE)
    elif q.dtype == tl.bfloat16:
        q, factor = fit_float16(q)
        if BLOCK_REST > 0:
            rest, other = fit_float16(rest)
            most = tl.maximum(factor, other)
            q = (q.to(tl.float32) * (factor / most)).to(tl.float16)
            rest = (rest.to(tl.float32) * (other / most)).to(tl.float16)
            factor = most
    return q, rest, factor


@triton.jit
def share_of_item(first, count, begin, end, length, splits, EVEN: tl.constexpr):
    """Of an item with `count` tiles, the first of which is tile `first` of all: EVEN: what a slice from begin to end has of it,
    else this program's of `splits` shares.

    -> first (0 unless EVEN), tiles of the item from and to, the program or slot of its first part, the number of parts, our slot,
    whether ours is the first part"""
    pid = tl.program_id(0)
    if EVEN:
        t_0 = tl.maximum(begin - first, 0)
        t_1 = tl.minimum(end - first, count)
        origin = first // length
        parts = (first + count - 1) // length - origin + 1
        return first, t_0, t_1, origin, parts, 2 * pid + (begin < first).to(tl.int32), t_0 == 0
    else:
        t_0, t_1 = range_share(count, pid % splits, splits)
        # shares may be empty, so that several begin at tile 0
        return 0, t_0, t_1, pid // splits * splits, splits, pid, pid % splits == 0


@triton.jit
def inspect_item(Fault, operation, limit, fewest, shift, columns, lengths, BatchIndex, Table, stride_tb, i_b, opens, first_key,
                 end_key, PAGE: tl.constexpr):  # fmt: skip
    """Note what is wrong with the index tensors where keys first_key to end_key of sequence i_b lie; opens: with its length, too.

    For after the fold: the entries are in the caches by then, results are on their way, and no loop holds a register for it."""
    Lengths = lengths[2]
    Pads = lengths[3]
    if opens:
        if Lengths is not None:
            inspect_value(Fault, operation, LENGTHS, i_b, tl.load(Lengths + i_b), fewest, lengths[5], lengths[6])
        if Pads is not None:
            inspect_value(Fault, operation, PADS, i_b, tl.load(Pads + i_b), 0, 2147483647, 0)
        if BatchIndex is not None:
            inspect_value(Fault, operation, BATCH_INDEX, i_b, tl.load(BatchIndex + i_b), 0, limit - 1, 0)
    if PAGE > 0:
        pad = 0
        if Pads is not None:
            pad = tl.maximum(tl.load(Pads + i_b).to(tl.int32), 0)
        b = tl.cast(i_b, tl.int64)
        if first_key < end_key:
            inspect_entries(Fault, operation, TABLE, Table + b * stride_tb, (first_key + pad) // PAGE,
                            tl.cdiv(end_key + pad, PAGE), (b * columns + shift, 0, 0, columns), limit, ENTRIES)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def attention_decode(
    Q, K, V, Out, Lse, Sinks, CuQ, CuK, Lengths, Pads, BatchIndex, Table, KScale, VScale, Part, Stat, Arrived, Fault,
    operation, limit, fewest, shift, columns,
    scale, batch, max_q, capacity, more, kv_heads, group, left, right, blocks, splits, least, stride_sinks, stride_tb, stride_lb,
    stride_lh, stride_ksp, stride_ksh, stride_vsp, stride_vsh, stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh, score_mods, mask_mods,
    PAGE: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr,
    QUANT: tl.constexpr, PER_PAGE: tl.constexpr, SHARED: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr,
    FUSED: tl.constexpr, EARLY: tl.constexpr,
    DIM_K: tl.constexpr, DIM_REST: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Q, Out [B, Sq, H, D] or packed with CuQ, K, V and the index tensors as for attention_cached; Lse fp32.

    `blocks` row blocks hold the max_q * group rows of a KV head.  EVEN: a 1-d grid of any size, slices of at least `least` tiles;
    else a grid of items * splits, and each item is cut into `splits` shares.  Parts: Part, Stat of device.partials, with a
    counter an item in Arrived (0 before and after) if FUSED: the last who arrives merges; else another kernel does.
    KScale, VScale fp32 or None: what K and V are to be multiplied with, strides over page or cache, and head; PER_PAGE: over
    pages
    of the table.  DIM_REST: columns of K behind the first DIM_K.  PAIRS: V is int16, of two bytes each.  Kinds of storage
    (QUANT): device.cache.

    Fault: a note of device.fault, None where the index tensors are trusted; limit: pages, or caches; fewest: keys of a sequence,
    at least; shift, columns: where Table lies in the caller's."""
    wait_for_previous_kernel(EARLY)
    let_next_kernel_start(EARLY)  # after the wait: what comes next may read what came before
    pid = tl.program_id(0)
    CHECKED: tl.constexpr = Fault is not None
    lengths = (CuQ, CuK, Lengths, Pads, max_q, capacity, more, left, right)
    each = kv_heads * blocks
    if EVEN:
        total, most = total_tiles(lengths, batch, PAGE, KIND, BLOCK_N, BLOCK_B)
        length, span = slices(total, most, batch, each, tl.num_programs(0), least)
        begin = pid * length
        end = tl.minimum(begin + length, tl.where(span > 0, batch * span, total) * each)
        if begin >= end:
            return
        i_b, before, last_b, last_before = find_tiles(
            begin, end - 1, lengths, batch, each, span, PAGE, KIND, BLOCK_N, BLOCK_B
        )
        i_r = (begin - before * each) // width_of_item(tiles_of_sequence(lengths, i_b, PAGE, KIND, BLOCK_N), span)
        last_r = (end - 1 - last_before * each) // width_of_item(
            tiles_of_sequence(lengths, last_b, PAGE, KIND, BLOCK_N), span
        )
        items = (last_b - i_b) * each + last_r - i_r + 1
    else:
        length = 0
        span = 0
        begin = 0
        end = 0
        before = 0
        i_b = pid // splits // each
        i_r = pid // splits % each
        items = 1
    for _ in tl.range(0, items, num_stages=1):
        # ---- the item, and what of it is ours
        i_h = i_r // blocks
        first_row = (i_r - i_h * blocks) * BLOCK_M
        first_q, seq_q, first_k, seq_k = extent_of_sequence(lengths, i_b, PAGE)
        rows = tl.minimum(tl.minimum(seq_q, max_q) * group - first_row, BLOCK_M)
        tiles = range_of_sequence(seq_q, seq_k, lengths, KIND, BLOCK_N)
        count = tl.maximum(tiles[3] - tiles[0], 1)
        first, t_0, t_1, origin, parts, slot, opens = share_of_item(
            before * each + i_r * width_of_item(count, span), count, begin, end, length, splits, EVEN
        )
        b = tl.cast(i_b, tl.int64)
        # ---- queries
        o_m = first_row + tl.arange(0, BLOCK_M)
        inside = tl.arange(0, BLOCK_M) < rows
        token, head = rows_of_item(o_m, i_h, group)
        head = tl.where(inside, head, i_h * group)
        token = tl.where(inside, token, 0)
        p_q = Q + b * stride_qb + first_q * stride_qm
        q = load_queries(p_q, token, head, inside, stride_qm, stride_qh, 0, DIM_K, BLOCK_K, WIDE)
        rest = q  # where K is one piece, nobody reads it
        if BLOCK_REST > 0:
            rest = load_queries(p_q, token, head, inside, stride_qm, stride_qh, DIM_K, DIM_REST, BLOCK_REST, WIDE)
        q, rest, factor = suit_queries(q, rest, QUANT, EMULATE, BLOCK_REST)
        unit = scale * factor
        i_c = b
        if BatchIndex is not None:
            i_c = existing(tl.load(BatchIndex + i_b), limit if CHECKED else None).to(tl.int64)
        if KScale is not None and not PER_PAGE:
            unit = unit * tl.load(KScale + i_c * stride_ksp + i_h * stride_ksh)
        # ---- the fold
        WIDTH: tl.constexpr = BLOCK_V // 2 if PAIRS else BLOCK_V
        if Sinks is None:
            state = state_init(BLOCK_M, WIDTH)
        else:
            sink = tl.load(Sinks + head * stride_sinks).to(tl.float32)  # the first share's, not every one's
            state = state_init_sink(tl.where(opens, sink, float("-inf")), BLOCK_M, WIDTH)
        if PAIRS:
            state = (state[0], state[1], state[2], tl.zeros([BLOCK_M, WIDTH], tl.float32))
        place = (i_b, head[:, None], tl.minimum(token, tl.maximum(seq_q - 1, 0))[:, None], (seq_q, seq_k))
        mine = part_of_range(tiles, t_0, t_1)
        ONE: tl.constexpr = PAGE % BLOCK_N == 0 and not PADDED
        k_0 = K + i_h.to(tl.int64) * stride_kh
        v_0 = V + i_h.to(tl.int64) * stride_vh
        row_k = tl.cast(stride_kn, tl.int64) if WIDE else stride_kn
        row_v = tl.cast(stride_vn, tl.int64) if WIDE else stride_vn
        if PAGE == 0:
            k_0 += i_c * stride_kb + first_k * stride_kn
            v_0 += i_c * stride_vb + first_k * stride_vn
            source = (seq_k,)
        else:
            pad = 0
            if PADDED:
                pad = tl.maximum(tl.load(Pads + i_b).to(tl.int32), 0)
            source = (seq_k, Table + b * stride_tb, pad, PAGE, limit if CHECKED else None)
        outer_k = stride_kn if PAGE == 0 else stride_kb
        outer_v = stride_vn if PAGE == 0 else stride_vb
        if PER_PAGE:
            k_side = (k_0, outer_k, row_k, KScale + i_h * stride_ksh, stride_ksp)
            r_side = (k_0 + DIM_K, outer_k, row_k, KScale + i_h * stride_ksh, stride_ksp)
            v_side = (v_0, outer_v, row_v, VScale + i_h * stride_vsh, stride_vsp)
        else:
            k_side = (k_0, outer_k, row_k, None, 0)
            r_side = (k_0 + DIM_K, outer_k, row_k, None, 0)
            v_side = (v_0, outer_v, row_v, None, 0)
        state = fold_cache_range(
            q, rest, state, mine, place, unit, source, k_side, r_side, v_side, score_mods, mask_mods, (left, right),
            next_none if PAGE == 0 else (next_page if ONE else next_pages),
            locate_run if PAGE == 0 else (locate_in_page if ONE else locate_in_pages), KIND, EMULATE, QUANT, SHARED, PAIRS,
            BLOCK_N, DIM_K, DIM_REST, DIM_V, BLOCK_K, BLOCK_REST, BLOCK_V)  # fmt: skip
        acc = state[0]
        m = state[1]
        l = state[2]
        if PAIRS:
            acc = tl.interleave(acc, state[3])
        if VScale is not None and not PER_PAGE:
            acc = acc * tl.load(VScale + i_c * stride_vsp + i_h * stride_vsh)
        # ---- the result, or a part of it
        p_out = Out + b * stride_ob + first_q * stride_om
        p_lse = Lse + b * stride_lb + first_q
        if Part is None:  # one share of each item
            store_results(p_out, p_lse, acc, m, l, first_row, rows, i_h, group, stride_om, stride_oh, stride_lh, EMULATE, DIM_V,
                          BLOCK_M, BLOCK_V)  # fmt: skip
        elif parts == 1:
            store_results(p_out, p_lse, acc, m, l, first_row, rows, i_h, group, stride_om, stride_oh, stride_lh, EMULATE, DIM_V,
                          BLOCK_M, BLOCK_V)  # fmt: skip
        else:
            store_part(Part, Stat, slot, acc, m, l, rows, DIM_V, BLOCK_M, BLOCK_V)
            if FUSED:
                if arrive(Arrived, i_b * each + i_r, parts):
                    acc_a, m_a, l_a = merge_parts(Part, Stat, origin, length, first, parts, rows, EVEN, DIM_V, BLOCK_M, BLOCK_V,
                                                  ROWS, BLOCK_S)  # fmt: skip
                    store_results(p_out, p_lse, acc_a, m_a, l_a, first_row, rows, i_h, group, stride_om, stride_oh, stride_lh,
                                  EMULATE, DIM_V, ROWS, BLOCK_V)  # fmt: skip
        # ---- index tensors, when nobody waits for what they say
        if CHECKED:
            if i_r == 0:
                inspect_item(Fault, operation, limit, fewest, shift, columns, lengths, BatchIndex, Table, stride_tb, i_b, opens,
                             mine[0] * BLOCK_N, tl.minimum(mine[3] * BLOCK_N, seq_k), PAGE)  # fmt: skip
        # ---- the next item
        ended = i_r + 1 == each
        i_r = tl.where(ended, 0, i_r + 1)
        before += tl.where(ended, width_of_item(count, span), 0)
        i_b += ended.to(tl.int32)

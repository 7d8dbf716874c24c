"""Attention whose bits depend on a query's own sequence alone: one kernel for prompts and for decoding, over keys anywhere.

The keys of a sequence are cut at multiples of CHUNK tiles from its first key.  Each chunk is folded from nothing,
by device.fold_cache, and the states of the chunks are merged in their order.  So which program folds a chunk, and where it
is merged, moves no bit: in registers, one after the other, where a program has all keys of its rows; by `merge_chunks`, a second
kernel, where several programs share them.  docs/invariance.md says what else fixes the order of additions.
"""

import triton
import triton.language as tl

from ...device.cache import locate_in_page, locate_in_pages, locate_run, next_none, next_page, next_pages
from ...device.fold_cache import fold_cache_range
from ...device.grid import let_next_kernel_start, wait_for_previous_kernel
from ...device.queries import load_queries, rows_of_item, store_results
from ...device.ranges import band_of_sequence, part_of_range, range_of_queries
from ...device.state import LOG2E, merge_next, state_init, sum_of_quad
from ...device.tile import widen
from ...device.work import extent_of_sequence

RUNTIME = ["scale", "max_q", "capacity", "more", "kv_heads", "group", "left", "right", "blocks", "splits", "chunks",
           "stride_sinks", "stride_tb", "stride_lb", "stride_lh", "stride_ksp", "stride_ksh", "stride_vsp",
           "stride_vsh"]  # fmt: skip
UNROLLED = tl.constexpr(4)  # chunks of a step of merge_chunks: their loads wait for none of the sums


@triton.jit
def first_state(Sinks, stride_sinks, head, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Before the first chunk: nothing, or the sink of each row's head [ROWS]."""
    acc, m, l = state_init(ROWS, DIM)
    if Sinks is not None:
        m = tl.load(Sinks + head * stride_sinks).to(tl.float32) * LOG2E
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    return acc, m, l


@triton.jit
def chunks_of_rows(first_row, rows, group, seq_q, seq_k, left, right, KIND: tl.constexpr, BLOCK_N: tl.constexpr,
                   CHUNK: tl.constexpr):  # fmt: skip
    """-> the tiles that `rows` rows from first_row on see, as a range of device.ranges, and their chunks from and to."""
    shift = seq_k - seq_q
    q_last = tl.minimum((first_row + rows - 1) // group + shift, seq_k - 1)
    tiles = range_of_queries(first_row // group + shift, q_last, seq_k, left, right, KIND, BLOCK_N)
    return tiles, tiles[0] // CHUNK, tl.cdiv(tiles[3], CHUNK)


@triton.jit(do_not_specialize=RUNTIME)
def attention_invariant(
    Q, K, V, Out, Lse, Sinks, CuQ, CuK, Lengths, Pads, BatchIndex, Table, KScale, VScale, Part, Stat,
    scale, max_q, capacity, more, kv_heads, group, left, right, blocks, splits, chunks, stride_sinks, stride_tb, stride_lb,
    stride_lh, stride_ksp, stride_ksh, stride_vsp, stride_vsh, stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh, score_mods, mask_mods,
    PAGE: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, WIDE: tl.constexpr,
    QUANT: tl.constexpr, PER_PAGE: tl.constexpr, SHARED: tl.constexpr, PAIRS: tl.constexpr, PACK: tl.constexpr,
    EARLY: tl.constexpr, DIM_K: tl.constexpr, DIM_REST: tl.constexpr, DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Tensors, strides and kinds of storage as for attention_decode.  PACK: the query heads of a KV head are rows of one tile;
    else a tile has the rows of one query head, as the user's functions are told.  `blocks` row blocks, the last ones first.

    Grid (splits * blocks * heads * batch,), heads: of K, or of Q unless PACK.  Each program has an even share of its rows'
    chunks, of at most `chunks`.  Part [items * chunks, ROWS, DIM_V], Stat [items * chunks, 2, ROWS] fp32: acc, and m and l, of
    each chunk, by its number; None with one split, where the program merges and finishes."""
    wait_for_previous_kernel(EARLY)
    let_next_kernel_start(EARLY)
    pid = tl.program_id(0)
    item = pid // splits
    i_bh = item // blocks
    each = kv_heads if PACK else kv_heads * group
    i_b = i_bh // each
    i_h = i_bh % each
    i_k = i_h if PACK else i_h // group
    pack = group if PACK else 1
    lengths = (CuQ, CuK, Lengths, Pads, max_q, capacity, more, left, right)
    first_q, seq_q, first_k, seq_k = extent_of_sequence(lengths, i_b, PAGE)
    first_row = (blocks - 1 - item % blocks) * BLOCK_M
    rows = tl.minimum(seq_q * pack - first_row, BLOCK_M)
    if rows <= 0:
        return
    band = band_of_sequence(left, right, i_b, KIND)
    tiles, c_0, c_1 = chunks_of_rows(first_row, rows, pack, seq_q, seq_k, band[0], band[1], KIND, BLOCK_N, CHUNK)
    # ---- queries
    o_m = tl.arange(0, BLOCK_M)
    inside = o_m < rows
    token, head = rows_of_item(first_row + o_m, i_h, pack)
    head = tl.where(inside, head, i_h * pack)
    token = tl.where(inside, token, 0)
    b = tl.cast(i_b, tl.int64)
    p_q = Q + b * stride_qb + first_q * stride_qm
    q = load_queries(p_q, token, head, inside, stride_qm, stride_qh, 0, DIM_K, BLOCK_K, WIDE)
    rest = q  # where K is one piece, nobody reads it
    if BLOCK_REST > 0:
        rest = load_queries(p_q, token, head, inside, stride_qm, stride_qh, DIM_K, DIM_REST, BLOCK_REST, WIDE)
        rest = widen(rest, EMULATE)
    q = widen(q, EMULATE)  # bytes are met in its dtype, too: what scales a tile of queries would tie its rows together
    unit = scale
    i_c = b
    if BatchIndex is not None:
        i_c = tl.load(BatchIndex + i_b).to(tl.int64)
    if KScale is not None and not PER_PAGE:
        unit = unit * tl.load(KScale + i_c * stride_ksp + i_k * stride_ksh)
    place = (i_b, head[:, None] if PACK else i_h, token[:, None], (seq_q, seq_k))
    # ---- where the keys lie
    ONE: tl.constexpr = PAGE % BLOCK_N == 0 and not PADDED
    k_0 = K + i_k.to(tl.int64) * stride_kh
    v_0 = V + i_k.to(tl.int64) * stride_vh
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
        source = (seq_k, Table + b * stride_tb, pad, PAGE, None)
    outer_k = stride_kn if PAGE == 0 else stride_kb
    outer_v = stride_vn if PAGE == 0 else stride_vb
    if PER_PAGE:
        k_side = (k_0, outer_k, row_k, KScale + i_k * stride_ksh, stride_ksp)
        r_side = (k_0 + DIM_K, outer_k, row_k, KScale + i_k * stride_ksh, stride_ksp)
        v_side = (v_0, outer_v, row_v, VScale + i_k * stride_vsh, stride_vsp)
    else:
        k_side = (k_0, outer_k, row_k, None, 0)
        r_side = (k_0 + DIM_K, outer_k, row_k, None, 0)
        v_side = (v_0, outer_v, row_v, None, 0)
    # ---- the chunks
    WIDTH: tl.constexpr = BLOCK_V // 2 if PAIRS else BLOCK_V
    i_s = pid % splits  # a share of chunks: their number times that of splits fits 32 bits
    begin = (c_1 - c_0) * i_s // splits
    end = (c_1 - c_0) * (i_s + 1) // splits
    acc, m, l = first_state(Sinks, stride_sinks, head, BLOCK_M, BLOCK_V)
    for c in tl.range(c_0 + begin, c_0 + end, num_stages=1):
        acc_c, m_c, _ = state_init(BLOCK_M, WIDTH)
        l_c = tl.zeros([BLOCK_M, 4], tl.float32)
        state = (acc_c, m_c, l_c, acc_c) if PAIRS else (acc_c, m_c, l_c)
        mine = part_of_range(tiles, tl.maximum(c * CHUNK - tiles[0], 0), (c + 1) * CHUNK - tiles[0])
        state = fold_cache_range(
            q, rest, state, mine, place, unit, source, k_side, r_side, v_side, score_mods, mask_mods, band,
            next_none if PAGE == 0 else (next_page if ONE else next_pages),
            locate_run if PAGE == 0 else (locate_in_page if ONE else locate_in_pages), KIND, EMULATE, QUANT, SHARED, PAIRS,
            BLOCK_N, DIM_K, DIM_REST, DIM_V, BLOCK_K, BLOCK_REST, BLOCK_V, True)  # fmt: skip
        acc_c, m_c, l_c = state[0], state[1], sum_of_quad(state[2])
        if PAIRS:
            acc_c = tl.interleave(acc_c, state[3])
        if VScale is not None and not PER_PAGE:
            acc_c = acc_c * tl.load(VScale + i_c * stride_vsp + i_k * stride_vsh)
        if Part is None:
            acc, m, l = merge_next(acc, m, l, acc_c, m_c, l_c)
        else:
            o_d = tl.arange(0, BLOCK_V)
            row = (tl.cast(item, tl.int64) * chunks + c) * ROWS
            tl.store(
                Part + row * DIM_V + o_m[:, None] * DIM_V + o_d[None, :],
                acc_c,
                mask=inside[:, None] & (o_d < DIM_V)[None, :],
            )
            tl.store(Stat + 2 * row + o_m, m_c, mask=inside)
            tl.store(Stat + 2 * row + ROWS + o_m, l_c, mask=inside)
    if Part is None:
        p_out = Out + b * stride_ob + first_q * stride_om
        p_lse = Lse + b * stride_lb + first_q
        # + 0.0: a zero has one sign
        store_results(p_out, p_lse, acc + 0.0, m, l, first_row, rows, i_h, pack, stride_om, stride_oh, stride_lh, EMULATE, DIM_V,
                      BLOCK_M, BLOCK_V)  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def merge_chunks(
    Part, Stat, Out, Lse, Sinks, CuQ, CuK, Lengths, Pads, max_q, capacity, more, kv_heads, group, left, right, blocks, chunks,
    stride_sinks, stride_lb, stride_lh, stride_ob, stride_om, stride_oh,
    PAGE: tl.constexpr, KIND: tl.constexpr, EMULATE: tl.constexpr, PACK: tl.constexpr, EARLY: tl.constexpr,
    DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge what attention_invariant left, whose arguments these are, in the order of the chunks.  Grid (rows of a block, row
    blocks * heads, batch), a row a program."""
    let_next_kernel_start(EARLY)
    row = tl.program_id(0)
    i_b = tl.program_id(2)
    each = kv_heads if PACK else kv_heads * group
    pack = group if PACK else 1
    item = i_b * each * blocks + tl.program_id(1)
    i_h = tl.program_id(1) // blocks
    lengths = (CuQ, CuK, Lengths, Pads, max_q, capacity, more, left, right)
    first_q, seq_q, _, seq_k = extent_of_sequence(lengths, i_b, PAGE)
    first_row = (blocks - 1 - item % blocks) * BLOCK_M
    rows = tl.minimum(seq_q * pack - first_row, BLOCK_M)
    if row >= rows:
        wait_for_previous_kernel(EARLY)  # this kernel is through only when that one is
        return
    band = band_of_sequence(left, right, i_b, KIND)
    _, c_0, c_1 = chunks_of_rows(first_row, rows, pack, seq_q, seq_k, band[0], band[1], KIND, BLOCK_N, CHUNK)
    token, head = rows_of_item(first_row + row + tl.arange(0, 1), i_h, pack)
    o_d = tl.arange(0, BLOCK_V)[None, :]
    wait_for_previous_kernel(EARLY)
    acc, m, l = first_state(Sinks, stride_sinks, head, 1, BLOCK_V)
    for c in range(c_0, c_1, UNROLLED):
        for i in tl.static_range(UNROLLED):
            live = c + i < c_1
            at = (tl.cast(item, tl.int64) * chunks + c + i) * ROWS + row
            stat = Stat + at + (at - row) + tl.arange(0, 1)
            m_c = tl.load(stat, mask=live, other=float("-inf"))
            l_c = tl.load(stat + ROWS, mask=live, other=0.0)
            acc_c = tl.load(Part + at * DIM_V + o_d, mask=live & (o_d < DIM_V), other=0.0)
            acc, m, l = merge_next(acc, m, l, acc_c, m_c, l_c)
    p_out = Out + tl.cast(i_b, tl.int64) * stride_ob + first_q * stride_om
    p_lse = Lse + tl.cast(i_b, tl.int64) * stride_lb + first_q
    store_results(p_out, p_lse, acc + 0.0, m, l, first_row + row, 1, i_h, pack, stride_om, stride_oh, stride_lh, EMULATE, DIM_V,
                  1, BLOCK_V)  # fmt: skip

"""Which blocks of a mask are empty, partial or full, without the mask in memory."""

import triton
import triton.language as tl

from ...device.ranges import range_of_tile

RUNTIME = ["seq_q", "seq_k", "heads", "q_blocks", "kv_blocks", "left", "right"]
EMPTY, PARTIAL, FULL = (tl.constexpr(kind) for kind in range(3))


@triton.jit(do_not_specialize=RUNTIME)
def classify_blocks(
    Kinds, seq_q, seq_k, heads, q_blocks, kv_blocks, left, right, mask_mods,
    KIND: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Kinds [batch, heads, q_blocks, kv_blocks] uint8 contiguous: 0 no query of the block sees a key of it, 2 all see all, 1
    else.  Only queries and keys of the sequence count.  The band (device.ranges) makes the blocks outside of its range empty, and
    is otherwise left out.  Grid (q_blocks * kv_blocks * heads * batch,)."""
    i = tl.program_id(0).to(tl.int64)
    i_n = (i % kv_blocks).to(tl.int32)
    i_m = (i // kv_blocks % q_blocks).to(tl.int32)
    i_bh = i // kv_blocks // q_blocks
    i_b, i_h = (i_bh // heads).to(tl.int32), (i_bh % heads).to(tl.int32)
    first, _, _, end = range_of_tile(i_m, seq_q, seq_k, left, right, KIND, Q_BLOCK, KV_BLOCK)
    last_q = tl.where((i_n >= first) & (i_n < end), tl.minimum((i_m + 1) * Q_BLOCK, seq_q), 0)
    seen, looked = tl.zeros((BLOCK_M, BLOCK_N), tl.int32), 0
    for first_q in range(i_m * Q_BLOCK, last_q, BLOCK_M):
        # Lanes past the end look at the last query or key again, which changes nothing.
        q_index = tl.minimum(first_q + tl.arange(0, BLOCK_M), seq_q - 1)[:, None]
        for first_k in range(i_n * KV_BLOCK, tl.minimum((i_n + 1) * KV_BLOCK, seq_k), BLOCK_N):
            kv_index = tl.minimum(first_k + tl.arange(0, BLOCK_N), seq_k - 1)[None, :]
            seen += shown((i_b, i_h, q_index, (seq_q, seq_k)), kv_index, mask_mods, BLOCK_M, BLOCK_N)
            looked += BLOCK_M * BLOCK_N
    count = tl.sum(tl.sum(seen, 1), 0)
    kind = tl.where(count == 0, EMPTY, tl.where(count == looked, FULL, PARTIAL))
    tl.store(Kinds + i, kind.to(tl.uint8))


@triton.jit
def shown(place, kv_index, mods, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """int32 [BLOCK_M, BLOCK_N]: 1 where every mask_mod is true."""
    batch, head, q_index, extent = place
    score = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    found = tl.full((BLOCK_M, BLOCK_N), 1, tl.int1)
    for i in tl.static_range(len(mods)):
        keep = mods[i][0](score, batch, head, q_index, kv_index, mods[i][1] + extent)
        tl.static_assert(keep.dtype == tl.int1, "a mask_mod has to return booleans (a comparison), not scores")
        found = found & keep
    return found.to(tl.int32)


@triton.jit(do_not_specialize=["kv_blocks", "capacity", "stride_i", "stride_c"])
def list_blocks(
    Kinds, Index, Count, kv_blocks, capacity, stride_i, stride_c, MARKED: tl.constexpr, ENTRIES: tl.constexpr
):  # fmt: skip
    """Lists of Kinds [rows, kv_blocks], rows = batch * heads * q_blocks: Index [rows, capacity] by stride_i, ascending, of which
    Count [rows] by stride_c count, int32; the last block stands behind them.  Grid (rows,).

    MARKED: entries are twice a block's number, plus 1 if it is full, and a row without any gets block 0 as a partial one: a
    kernel folds at least one."""
    row = tl.program_id(0).to(tl.int64)
    kinds, entries = Kinds + row * kv_blocks, Index + row * stride_i
    count = 0
    for start in range(0, kv_blocks, ENTRIES):
        block = start + tl.arange(0, ENTRIES)
        kind = tl.load(kinds + block, mask=block < kv_blocks, other=EMPTY)
        seen = (kind != EMPTY).to(tl.int32)
        place = count + tl.cumsum(seen, 0) - seen
        entry = block * 2 + (kind == FULL).to(tl.int32) if MARKED else block
        tl.store(entries + place, entry, mask=(seen > 0) & (place < capacity))
        count += tl.sum(seen, 0)
    if MARKED:
        if count == 0:
            tl.store(entries, 0)
        count = tl.maximum(count, 1)
    else:
        for start in range(count, capacity, ENTRIES):
            place = start + tl.arange(0, ENTRIES)
            tl.store(entries + place, kv_blocks - 1, mask=place < capacity)
    tl.store(Count + row * stride_c, count)


@triton.jit(do_not_specialize=["q_blocks", "kv_blocks"])
def list_queries(Kinds, Counts, Lists, q_blocks, kv_blocks, ENTRIES: tl.constexpr):
    """The other way round: Lists [rows, 1 + 2 q_blocks] int32 contiguous, rows = batch * heads * kv_blocks, of Kinds [batch *
    heads, q_blocks, kv_blocks] and Counts, of these how many up to each are not empty: how many Q blocks see the KV block; which,
    as entries of MARKED `list_blocks`; and behind q_blocks of these, for each how many KV blocks before this one it sees.  A row
    without any has an entry behind the last Q block.  Grid (rows,).

    Q blocks ascend.  They descend where three in four of them are behind the last Q block of the KV blocks that follow: the keys
    are seen by all, like global tokens, and those that follow are not.  attention_backward_reduce walks a list from its end, and
    KV blocks add to a Q block one after the other: so such a block begins with the Q blocks that others wait for."""
    row = tl.program_id(0).to(tl.int64)
    column = row % kv_blocks
    begin = row // kv_blocks * q_blocks * kv_blocks
    entries = Lists + row * (1 + 2 * q_blocks) + 1
    last, _, _ = last_seen(Kinds + begin + column, q_blocks, kv_blocks, 0, ENTRIES)
    after, step = last, 1
    while (column + step < kv_blocks) & ((after < 0) | (after >= last)):
        after, _, _ = last_seen(Kinds + begin + column + step, q_blocks, kv_blocks, 0, ENTRIES)
        step *= 2
    _, seen_by, behind = last_seen(Kinds + begin + column, q_blocks, kv_blocks, after, ENTRIES)
    descends = (after >= 0) & (4 * behind > 3 * seen_by)
    count = 0
    for start in range(0, q_blocks, ENTRIES):
        block = start + tl.arange(0, ENTRIES)
        block = tl.where(descends, q_blocks - 1 - block, block)
        at = begin + column + block.to(tl.int64) * kv_blocks
        kind = tl.load(Kinds + at, mask=(block >= 0) & (block < q_blocks), other=EMPTY)
        seen = (kind != EMPTY).to(tl.int32)
        place = count + tl.cumsum(seen, 0) - seen
        tl.store(entries + place, block * 2 + (kind == FULL).to(tl.int32), mask=seen > 0)
        before = tl.load(Counts + at, mask=seen > 0, other=1) - 1
        tl.store(entries + q_blocks + place, before, mask=seen > 0)
        count += tl.sum(seen, 0)
    if count == 0:
        tl.store(entries, q_blocks * 2 + 1)
        tl.store(entries + q_blocks, 0)
    tl.store(entries - 1, count)


@triton.jit
def last_seen(kinds, q_blocks, kv_blocks, than, ENTRIES: tl.constexpr):
    """Of kinds [q_blocks] by kv_blocks -> the last Q block that is not empty, or -1; how many are not; how many of these are
    behind block `than`."""
    last, seen, behind = -1, 0, 0
    for start in range(0, q_blocks, ENTRIES):
        block = start + tl.arange(0, ENTRIES)
        kind = tl.load(kinds + block.to(tl.int64) * kv_blocks, mask=block < q_blocks, other=EMPTY)
        block = tl.where(kind != EMPTY, block, -1)
        last = tl.maximum(last, tl.max(block, 0))
        seen += tl.sum((block >= 0).to(tl.int32), 0)
        behind += tl.sum((block > than).to(tl.int32), 0)
    return last, seen, behind

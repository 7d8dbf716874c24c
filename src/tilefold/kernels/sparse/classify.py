"""Which blocks of a mask are empty, partial or full, without the mask in memory."""

import triton
import triton.language as tl

from ...device.mods import mask
from ...device.ranges import range_of_tile

RUNTIME = ["seq_q", "seq_k", "heads", "q_blocks", "kv_blocks"]
EMPTY, PARTIAL, FULL = (tl.constexpr(kind) for kind in range(3))


@triton.jit(do_not_specialize=RUNTIME)
def classify_blocks(
    Kinds, seq_q, seq_k, heads, q_blocks, kv_blocks, mask_mods,
    Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Kinds [batch, heads, q_blocks, kv_blocks] uint8 contiguous: 0 no query of the block sees a key of it, 2 all see all, 1
    else.  Only queries and keys of the sequence count.  Grid (q_blocks * kv_blocks * heads * batch,)."""
    i = tl.program_id(0).to(tl.int64)
    i_n = (i % kv_blocks).to(tl.int32)
    i_m = (i // kv_blocks % q_blocks).to(tl.int32)
    i_bh = i // kv_blocks // q_blocks
    i_b, i_h = (i_bh // heads).to(tl.int32), (i_bh % heads).to(tl.int32)
    some, whole = 0, 1
    for first_q in range(i_m * Q_BLOCK, tl.minimum((i_m + 1) * Q_BLOCK, seq_q), BLOCK_M):
        # Lanes past the end look at the last query or key again, which changes nothing.
        q_index = tl.minimum(first_q + tl.arange(0, BLOCK_M), seq_q - 1)[:, None]
        place = (i_b, i_h, q_index, (seq_q, seq_k))
        for first_k in range(i_n * KV_BLOCK, tl.minimum((i_n + 1) * KV_BLOCK, seq_k), BLOCK_N):
            kv_index = tl.minimum(first_k + tl.arange(0, BLOCK_N), seq_k - 1)[None, :]
            score = mask(tl.zeros((BLOCK_M, BLOCK_N), tl.float32), place, kv_index, mask_mods)
            seen = (score == 0.0).to(tl.int32)
            some = tl.maximum(some, tl.max(tl.max(seen, 1), 0))
            whole = tl.minimum(whole, tl.min(tl.min(seen, 1), 0))
    tl.store(Kinds + i, (some + (some & whole)).to(tl.uint8))


@triton.jit(do_not_specialize=["seq_q", "seq_k", "left", "right", "q_blocks", "kv_blocks"])
def list_tiles(
    Kinds, Lists, seq_q, seq_k, left, right, q_blocks, kv_blocks,
    KIND: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Lists [rows, 1 + kv_blocks] int32 contiguous of Kinds [rows, kv_blocks], rows = batch * heads * q_blocks: how many entries,
    and the entries in ascending order, twice a block's number, plus 1 if it is full.  Only blocks in the range of the band
    (device.ranges) count.  A row without any gets block 0 as a partial one: a kernel folds at least one.  Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    kinds = Kinds + row * kv_blocks
    entries = Lists + row * (kv_blocks + 1) + 1
    first, _, _, end = range_of_tile((row % q_blocks).to(tl.int32), seq_q, seq_k, left, right, KIND, Q_BLOCK, KV_BLOCK)
    count = 0
    for start in range(first, end, ENTRIES):
        block = start + tl.arange(0, ENTRIES)
        kind = tl.load(kinds + block, mask=block < end, other=EMPTY)
        seen = (kind != EMPTY).to(tl.int32)
        place = count + tl.cumsum(seen, 0) - seen
        tl.store(entries + place, block * 2 + (kind == FULL).to(tl.int32), mask=seen > 0)
        count += tl.sum(seen, 0)
    if count == 0:
        tl.store(entries, 0)
    tl.store(entries - 1, tl.maximum(count, 1))

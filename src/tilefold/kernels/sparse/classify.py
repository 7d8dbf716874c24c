"""Which blocks of a mask are empty, partial or full, without the mask in memory."""

import triton
import triton.language as tl

from ...device.mods import mask

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

"""Where each entry of a transposed list stands in the list it came from: the addresses of what is kept for a pair of blocks."""

import triton
import triton.language as tl

RUNTIME = ["heads", "q_blocks", "span_blocks", "per_block", "steps", "stride_ib", "stride_ih", "stride_iq", "stride_cb",
           "stride_ch", "stride_tb", "stride_th", "stride_tk", "stride_ub", "stride_uh"]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def list_places(
    Index, Count, TurnedIndex, TurnedCount, Places,
    heads, q_blocks, span_blocks, per_block, steps,
    stride_ib, stride_ih, stride_iq, stride_cb, stride_ch, stride_tb, stride_th, stride_tk, stride_ub, stride_uh,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Index [B, H, Qb, cap], Count [B, H, Qb]: lists; TurnedIndex [B, H, KVb, tcap] ascending, TurnedCount [B, H, KVb]: their
    transpose; Places, int32 with the strides of TurnedIndex: where query block i_q stands in the list of KV block n, goes
    i_q % span_blocks * per_block + its position in the list of i_q.  span_blocks: blocks of a span of queries, q_blocks where
    there is one.  steps: halvings of a list of tcap entries.  All int32.

    Grid (B * H * Qb,).  An entry looks itself up in the list of its KV block by binary search: no order of execution matters."""
    item = tl.program_id(0).to(tl.int64)
    i_q = item % q_blocks
    i_h = (item // q_blocks) % heads
    i_b = item // q_blocks // heads
    count = tl.load(Count + i_b * stride_cb + i_h * stride_ch + i_q)
    index = Index + i_b * stride_ib + i_h * stride_ih + i_q * stride_iq
    turned = i_b * stride_tb + i_h * stride_th
    for start in range(0, count, ENTRIES):
        o_i = start + tl.arange(0, ENTRIES)
        live = o_i < count
        block = tl.load(index + o_i, mask=live, other=0).to(tl.int64)
        low = tl.zeros([ENTRIES], tl.int32)
        high = tl.load(TurnedCount + i_b * stride_ub + i_h * stride_uh + block, mask=live, other=0)
        for _ in range(steps):
            middle = (low + high) // 2
            found = tl.load(TurnedIndex + turned + block * stride_tk + middle, mask=live & (low < high), other=0)
            below = found < i_q
            low = tl.where(live & (low < high) & below, middle + 1, low)
            high = tl.where(live & (low < high) & ~below, middle, high)
        place = i_q % span_blocks * per_block + o_i
        tl.store(Places + turned + block * stride_tk + low, place.to(tl.int32), mask=live)

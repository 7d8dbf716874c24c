"""What the lists of a BlockIndex say, looked at on the device before a kernel follows them: counts and sizes in range, and a note
of what was not.  Memory-bound: it reads the lists once and writes no list: one that names a block that does not exist ends before
it."""

import triton
import triton.language as tl

from ...device.fault import BLOCK_SIZES, COUNTS, FAR, INDICES, QUERY_SIZES, inspect_entries, raise_fault

RUNTIME = ["rows", "rows_k", "q_blocks", "kv_blocks", "heads", "capacity", "block_q", "block_k", "seq_q", "seq_k", "stride_ib",
           "stride_ih", "stride_iq", "stride_cb", "stride_ch", "heads_k", "heads_q", "size_k", "size_q",
           "operation"]  # fmt: skip


@triton.jit
def place_of_row(i_b, i_h, i_q, stride_b, stride_h, heads, q_blocks):
    """The flat place of a row in a tensor [B or 1, H or 1, Q blocks] of which the strides say what is shared."""
    b = tl.where(stride_b == 0, 0, i_b)
    h = tl.where(stride_h == 0, 0, i_h)
    return (b * tl.where(stride_h == 0, 1, heads) + h) * q_blocks + i_q, tl.where(stride_h == 0, 1, heads)


@triton.jit
def inspect_sizes(Fault, operation, argument, Sizes, New, chunk, size, blocks, heads, block, seq, CHUNK: tl.constexpr):
    """Elements of a contiguous tensor of sizes [..blocks] of `size` elements, from `chunk` on, into New."""
    o = chunk * CHUNK + tl.arange(0, CHUNK)
    there = o < size
    given = tl.load(Sizes + o, mask=there, other=0)
    most = tl.minimum(seq - o % blocks * block, block)
    kept = tl.minimum(tl.maximum(given, 0), most)
    tl.store(New + o, kept, mask=there)
    wrong = there & (given != kept)
    count = tl.sum(wrong.to(tl.int32), 0)
    if count > 0:
        at = tl.min(tl.where(wrong, o, FAR), 0)
        high = tl.minimum(seq - at % blocks * block, block)
        place = (at, 0, tl.maximum(heads, 0), tl.where(heads < 0, 0, blocks))
        raise_fault(Fault, operation, argument, count, place, tl.load(Sizes + at), 0, high, 0)


@triton.jit(do_not_specialize=RUNTIME)
def check_lists(
    Fault, Index, Count, Sizes, QuerySizes, NewCount, NewSizes, NewQuerySizes,
    rows, rows_k, q_blocks, kv_blocks, heads, capacity, block_q, block_k, seq_q, seq_k, stride_ib, stride_ih, stride_iq,
    stride_cb, stride_ch, heads_k, heads_q, size_k, size_q, operation,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Index [B, H, Q blocks, capacity], Count [B, H, Q blocks] (strides of 0 share), NewCount [B, H, Q blocks] contiguous: rows =
    B * H * Q blocks.  Sizes [.., KV blocks], QuerySizes [.., Q blocks] or None, contiguous, heads_k and heads_q their
    size [B, heads, ..], 0 of [B, ..], -1 of [..].
    Grid: a program a row, then rows_k = cdiv(size_k, CHUNK) for Sizes, then cdiv(size_q, CHUNK) for QuerySizes."""
    pid = tl.program_id(0)
    if pid >= rows:
        chunk = pid - rows
        if Sizes is not None:
            if chunk < rows_k:
                inspect_sizes(Fault, operation, BLOCK_SIZES, Sizes, NewSizes, chunk, size_k, kv_blocks, heads_k, block_k, seq_k,
                              CHUNK)  # fmt: skip
        if QuerySizes is not None:
            if chunk >= rows_k:
                inspect_sizes(Fault, operation, QUERY_SIZES, QuerySizes, NewQuerySizes, chunk - rows_k, size_q, q_blocks, heads_q,
                              block_q, seq_q, CHUNK)  # fmt: skip
        return
    i_q = (pid % q_blocks).to(tl.int64)
    i_h = (pid // q_blocks % heads).to(tl.int64)
    i_b = (pid // q_blocks // heads).to(tl.int64)
    given = tl.load(Count + i_b * stride_cb + i_h * stride_ch + i_q)
    count = tl.minimum(tl.maximum(given, 0), capacity)
    if count != given:
        row, some = place_of_row(i_b, i_h, i_q, stride_cb, stride_ch, heads, q_blocks)
        raise_fault(Fault, operation, COUNTS, 1, (row, 0, some, q_blocks), given, 0, capacity, 0)
    p = Index + i_b * stride_ib + i_h * stride_ih + i_q * stride_iq
    row, some = place_of_row(i_b, i_h, i_q, stride_ib, stride_ih, heads, q_blocks)
    good = inspect_entries(
        Fault, operation, INDICES, p, 0, count, (row * capacity, some, q_blocks, capacity), kv_blocks, CHUNK
    )
    tl.store(NewCount + pid, good)

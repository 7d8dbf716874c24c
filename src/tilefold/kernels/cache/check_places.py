"""What index tensors say, looked at on the device before a kernel follows it: copies in range, and a note of what was not.

For kernels that trust what they are given.  Small: a program a sequence, no result is read on the host.
"""

import triton
import triton.language as tl

from ...device.fault import (
    BATCH_INDEX,
    CU_K,
    CU_Q,
    LENGTHS,
    MAX_K,
    MAX_Q,
    PADS,
    TABLE,
    existing,
    inspect_entries,
    inspect_value,
    raise_fault,
)

RUNTIME = ["batch", "total_q", "total_k", "max_q", "max_k", "capacity", "more", "limit", "page_size", "stride_tb", "operation",
           "fewest", "shift", "columns"]  # fmt: skip


@triton.jit
def offset_before(Cu, i, total, CHUNK: tl.constexpr):
    """The largest of the offsets 0 to i - 1 that are in 0 to total, 0 if none is."""
    most = 0
    for first in range(0, i, CHUNK):
        o = first + tl.arange(0, CHUNK)
        offset = tl.load(Cu + o, mask=o < i, other=0)
        most = tl.maximum(most, tl.max(tl.where((offset >= 0) & (offset <= total), offset, 0), 0))
    return most


@triton.jit
def load_offsets(Cu, i, batch):
    """-> offsets i and i + 1 (i again of the last): asked for before anything is done, so that all is waited for once."""
    if Cu is None:
        return 0, 0
    else:
        return tl.load(Cu + i), tl.load(Cu + tl.minimum(i + 1, batch))


@triton.jit
def inspect_offset(
    Fault, operation, argument, of_longest, Cu, New, both, i, batch, total, longest, CHUNK: tl.constexpr
):
    """Offset i of batch + 1: ascending and in 0 to total, the one before it if it is not, into New -> first row and length of
    sequence i, as New has them.  both: of load_offsets."""
    offset, end = both
    before = offset_before(Cu, i, total, CHUNK)
    inside = (offset >= 0) & (offset <= total)
    first = tl.where(inside, tl.maximum(before, offset), before)
    tl.store(New + i, first)
    if first != offset:
        raise_fault(Fault, operation, argument, 1, (i, 0, 0, 0), offset, 0, total, 0)
    length = 0
    if i < batch:
        end = tl.where((end >= 0) & (end <= total), tl.maximum(first, end), first)
        length = end - first
        if length > longest:
            raise_fault(Fault, operation, of_longest, 1, (i, 0, 0, 0), length, 0, longest, 0)
    return first, length


@triton.jit(do_not_specialize=RUNTIME)
def check_places(
    Fault, CuQ, CuK, Lengths, Pads, BatchIndex, Table, NewQ, NewK, NewLengths, NewIndex,
    batch, total_q, total_k, max_q, max_k, capacity, more, limit, page_size, stride_tb, operation, fewest, shift, columns,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """CuQ, CuK [B + 1], Lengths, Pads, BatchIndex [B], Table [B, pages a sequence], int32 or None, as for attention_cached;
    New*: copies without what is out of range (None where there is nothing to copy).  A sequence ends before the first page that
    does not exist.  limit: pages, or caches.  fewest: keys that a sequence has, at least; shift, columns: where Table lies in the
    tensor that the note is to name.  Grid (B,), or (B + 1,) with offsets."""
    i_b = tl.program_id(0)
    first_k = 0
    end = tl.cast(capacity, tl.int64)
    room = tl.cast(capacity, tl.int64)
    both_q = load_offsets(CuQ, i_b, batch)
    both_k = load_offsets(CuK, i_b, batch)
    if CuQ is not None:
        inspect_offset(Fault, operation, CU_Q, MAX_Q, CuQ, NewQ, both_q, i_b, batch, total_q, max_q, CHUNK)
    if CuK is not None:
        first_k, length = inspect_offset(
            Fault, operation, CU_K, MAX_K, CuK, NewK, both_k, i_b, batch, total_k, max_k, CHUNK
        )
        end = length.to(tl.int64)
        if Table is None:
            room = (total_k - first_k).to(tl.int64)
    if i_b < batch:
        if BatchIndex is not None:
            number = tl.load(BatchIndex + i_b)
            inspect_value(Fault, operation, BATCH_INDEX, i_b, number, 0, limit - 1, 0)
            tl.store(NewIndex + i_b, existing(number, limit))
        if Pads is not None:
            inspect_value(Fault, operation, PADS, i_b, tl.load(Pads + i_b), 0, 2147483647, 0)
        if Lengths is not None:
            length = tl.load(Lengths + i_b)
            inspect_value(Fault, operation, LENGTHS, i_b, length, fewest, room, more)
            end = length.to(tl.int64) + more
        end = tl.minimum(tl.maximum(end, 0), room)
        if Table is not None:
            i = i_b.to(tl.int64)
            pages = ((end + page_size - 1) // page_size).to(tl.int32)
            place = (i * columns + shift, 0, 0, columns)
            good = inspect_entries(Fault, operation, TABLE, Table + i * stride_tb, 0, pages, place, limit, CHUNK)
            end = tl.minimum(end, good.to(tl.int64) * page_size)
        if NewLengths is not None:
            tl.store(NewLengths + i_b, (end - more).to(tl.int32))

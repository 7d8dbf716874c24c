"""Values of index tensors that lead nowhere: what a kernel does instead of following them, and the note that it leaves.

The note is int64 in memory (ops.faults reads it): [0] whose note it is, 0 for none; [1] how many wrong values there were since it
was cleared; then of the first of them the place in its tensor (flat, and the sizes of the last three dimensions, 0 for none), the
value, the least and the largest that are accepted, and what is added to the value before it is compared.
"""

import triton
import triton.language as tl

# Which argument: the last six bits of a note's [0], behind the operation's number.
LENGTHS = tl.constexpr(1)
PADS = tl.constexpr(2)
BATCH_INDEX = tl.constexpr(3)
TABLE = tl.constexpr(4)
CU_Q = tl.constexpr(5)
CU_K = tl.constexpr(6)
MAX_Q = tl.constexpr(7)
MAX_K = tl.constexpr(8)
COUNTS = tl.constexpr(9)
INDICES = tl.constexpr(10)
BLOCK_SIZES = tl.constexpr(11)
QUERY_SIZES = tl.constexpr(12)
ROOM = tl.constexpr(13)  # of new tokens behind a length
ARGUMENTS = tl.constexpr(64)
FAR = tl.constexpr(2147483647)


@triton.jit
def raise_fault(Fault, operation, argument, count, place, value, low, high, more):
    """Count `count` wrong values; the first to come notes its own.  All scalars, place = (flat, sizes of the last dimensions)."""
    tl.atomic_add(Fault + 1, tl.cast(count, tl.int64))
    code = tl.cast(operation, tl.int64) * ARGUMENTS + argument
    if tl.atomic_cas(Fault, tl.full((), 0, tl.int64), code) == 0:
        tl.store(Fault + 2, tl.cast(place[0], tl.int64))
        tl.store(Fault + 3, tl.cast(place[1], tl.int64))
        tl.store(Fault + 4, tl.cast(place[2], tl.int64))
        tl.store(Fault + 5, tl.cast(place[3], tl.int64))
        tl.store(Fault + 6, tl.cast(value, tl.int64))
        tl.store(Fault + 7, tl.cast(low, tl.int64))
        tl.store(Fault + 8, tl.cast(high, tl.int64))
        tl.store(Fault + 9, tl.cast(more, tl.int64))


@triton.jit
def inspect_value(Fault, operation, argument, i_b, value, low, high, more):
    """One value of a tensor [B]: value + more has to be from low to high."""
    there = tl.cast(value, tl.int64) + more
    if (there < low) | (there > high):
        raise_fault(Fault, operation, argument, 1, (i_b, 0, 0, 0), value, low, high, more)


@triton.jit
def inspect_entries(Fault, operation, argument, Entries, first, last, place, limit, CHUNK: tl.constexpr):
    """Entries first to last of an int32 list are numbers of something of which there are `limit`; place: of entry 0, as for
    raise_fault -> the first of them that is not, `last` if all are.

    Lanes keep what they find to themselves until the end: warps wait for one another once, however long the list is."""
    good = tl.maximum(last, first)
    found = tl.zeros([CHUNK], tl.int32)
    least = tl.full([CHUNK], FAR, tl.int32)
    for start in range(first, last, CHUNK):
        o = start + tl.arange(0, CHUNK)
        entry = tl.load(Entries + o, mask=o < last, other=0)
        wrong = (o < last) & (entry.to(tl.uint32) >= limit)
        found += wrong.to(tl.int32)
        least = tl.minimum(least, tl.where(wrong, o, FAR))
    count = tl.sum(found, 0)
    if count > 0:
        good = tl.min(least, 0)
        at = (tl.cast(place[0], tl.int64) + good, place[1], place[2], place[3])
        raise_fault(Fault, operation, argument, count, at, tl.load(Entries + good), 0, limit - 1, 0)
    return good


@triton.jit
def existing(number, limit):
    """An int32 number of something of which there are `limit`, 0 for one that nothing has; limit None: it is trusted."""
    if limit is None:
        return number
    else:
        return tl.where(number.to(tl.uint32) < limit, number, 0)

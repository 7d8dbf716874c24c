"""Results over parts of an item's keys, between the programs that made them: where they lie, how they are put together.

Part [slots, BLOCK_M, DIM] fp32 holds acc, Stat [slots, 2, BLOCK_M] fp32 m and l of device.state.  A program of an even slice has
two slots, as only its first and its last item can be somebody else's, too.
"""

import triton
import triton.language as tl

from .state import state_anchor, state_init, state_merge


@triton.jit
def slot_of_part(program, each, first):
    """The slot in which `program`, with slices of `each` tiles, keeps its part of the item that begins at tile `first`: its
    second if its slice begins before the item."""
    return 2 * program + (program * each < first).to(tl.int32)


@triton.jit
def store_part(Part, Stat, slot, acc, m, l, rows, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The first `rows` rows of a state."""
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    inside = o_m < rows
    base = Part + tl.cast(slot, tl.int64) * (BLOCK_M * DIM)
    tl.store(base + o_m[:, None] * DIM + o_d[None, :], acc, mask=inside[:, None] & (o_d < DIM)[None, :])
    stat = Stat + tl.cast(slot, tl.int64) * (2 * BLOCK_M) + o_m
    tl.store(stat, m, mask=inside)
    tl.store(stat + BLOCK_M, l, mask=inside)


@triton.jit
def merge_parts(Part, Stat, origin, each, first, count, rows, EVEN: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """The state [ROWS, BLOCK_D] of the union of `count` parts, in the order of their programs: the same bits whoever does it.
    EVEN: parts of programs `origin` and on, in the slots that slot_of_part says; else slots `origin` and on."""
    o_s = tl.arange(0, BLOCK_S)
    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    acc, m, l = state_init(ROWS, BLOCK_D)
    for s in range(0, count, BLOCK_S):
        slot = origin + s + o_s
        if EVEN:
            slot = slot_of_part(slot, each, first)
        slot = slot.to(tl.int64)
        # [S, R]
        inside = (s + o_s < count)[:, None] & (o_r < rows)[None, :]
        stat = Stat + slot[:, None] * (2 * BLOCK_M) + o_r[None, :]
        m_s = tl.load(stat, mask=inside, other=float("-inf"), cache_modifier=".cg")
        l_s = tl.load(stat + BLOCK_M, mask=inside, other=0.0, cache_modifier=".cg")
        # [S, R, D]
        p = Part + slot[:, None, None] * (BLOCK_M * DIM) + (o_r[:, None] * DIM + o_d[None, :])[None, :, :]
        part = tl.load(p, mask=inside[:, :, None] & (o_d < DIM)[None, None, :], other=0.0, cache_modifier=".cg")
        m_t = tl.max(m_s, 0)
        w = tl.exp2(m_s - state_anchor(m_t)[None, :])
        acc, m, l = state_merge(acc, m, l, tl.sum(part * w[:, :, None], 0), m_t, tl.sum(l_s * w, 0))
    return acc, m, l


@triton.jit
def arrive(Arrived, item, count):
    """Say that a part of `item` lies in memory -> whether it was the last of `count`; the counter is then 0 again, for the next
    launch.  What all threads of all who arrived have written can be read by the last."""
    tl.debug_barrier()  # the atomic is one thread's: it releases what the others wrote before the barrier
    last = tl.atomic_add(Arrived + item, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(Arrived + item, 0)
    tl.debug_barrier()
    return last

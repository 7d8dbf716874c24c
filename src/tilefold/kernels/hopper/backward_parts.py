"""What the Hopper kernels of the backward pass share: tiles loaded by panels, rings, the gradient of the scores.

Statistics are one row of 128 fp32 a query block: lse in base 2 of its 64 queries, then their delta (kernels.backward_statistics
makes them).  A query that counts for nothing has lse +inf there, so its probabilities are 0 without any mask.  One more row, the
last, is that of a block without queries: what an empty list is made of.
"""

from .gluon import fence_async_shared, gl, jit, mbarrier, tma_load
from .parts import clear_rows

PANEL = gl.constexpr(64)  # columns of a tile in shared memory that lie together: 128 bytes, the widest swizzle
BLOCK = gl.constexpr(64)  # tokens of a block
STATISTICS = gl.constexpr(128)  # numbers of a query block: 64 lse, 64 delta


@jit
def next_slot(slot, parity, SLOTS: gl.constexpr):
    """One step on a ring: the parity flips each time around."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        parity ^= 1
    return slot, parity


@jit
def load_tile(desc, bar, panels, slot, i_b, i_h, row, D: gl.constexpr):
    """Have [64, D] from `row` on brought to panels[slot * D / 64 ...], [., 64, 64]; `bar` must expect 128 * D bytes for it."""
    for p in gl.static_range(D // PANEL):
        tma_load(desc, [i_b, i_h, row, p * PANEL], bar, panels.index(slot * (D // PANEL) + p))


@jit
def clear_tile(panels, slot, live, D: gl.constexpr):
    """Zero the rows from `live` on of a tile in shared memory: they may hold NaN, and 0 * NaN is NaN."""
    for p in gl.static_range(D // PANEL):
        clear_rows(panels.index(slot * (D // PANEL) + p), live, BLOCK, gl.num_warps())
    fence_async_shared()


@jit
def wait_queries(bar, parity, panels, slot, live, D: gl.constexpr, Q_SIZED: gl.constexpr):
    """Wait for a tile of q or dout; without the rows that are no queries."""
    mbarrier.wait(bar.index(slot), parity)
    if Q_SIZED:
        if live < BLOCK:
            clear_tile(panels, slot, live, D)

"""dq as sums in memory, to which `attention_backward_reduce` adds in two ways.

The sum of a query tile lies there in fp32 in the order of the registers of the two accumulators that make it, each [64, 64]:
8 groups of 8 columns, in each 4 warps, 8 rows, 4 threads, then two rows 8 apart of two columns.  So a warp adds 512 bytes that
lie together with one instruction, and a TMA store out of shared memory adds 16 KB.  `kernels.backward_reduced` undoes the order.
"""

from .gluon import (
    add_registers,
    barriers,
    descriptor,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma_reduce_add,
    tma_store_wait,
)
from .structs import Buffer, Value, struct

ROWS = gl.constexpr(128)  # of 32 fp32: one consumer's part of a query tile, 16 KB


@struct
class DqSums:
    """place [.., QUERIES * D] fp32, desc the same as [.., 32] with boxes [ROWS, 32].

    SLOTS query tiles in shared memory, whose parts a warp of its own has added by TMA; 0: the consumers add from registers."""

    place: Value
    desc: descriptor | gl.constexpr
    buffers: Buffer
    full: Buffer
    empty: Buffer
    SLOTS: gl.constexpr
    NUMBERS: gl.constexpr  # of a query tile: QUERIES * D
    EAGER: gl.constexpr  # a part of the one slot is free as soon as it is read

    @jit
    def begin(self, CID: gl.constexpr, LAYOUT: gl.constexpr):
        """The address of each thread's first 16 bytes in consumer CID's part of the first query tile."""
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
        offset = gl.expand_dims(row // 16 * 128 + row % 8 * 16, 1) + gl.expand_dims(column % 8 // 2 * 4, 0)
        return (self.place + (CID * (ROWS * 32) + offset)).to(gl.int64, bitcast=True)

    @jit
    def add(self, dq, begin, row, i, CID: gl.constexpr):
        """Add part CID [64, 64] of the i-th query tile, which has number `row` in memory.  begin: as of `begin`."""
        if self.SLOTS == 0:
            add_registers(begin + row.to(gl.int64) * (self.NUMBERS * 4), dq)
        else:
            slot = i % self.SLOTS * 2 + CID
            mbarrier.wait(self.empty.index(slot), (i // self.SLOTS & 1) ^ 1)
            ordered = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([ROWS, 32])
            self.buffers.index(slot).store(ordered)
            fence_async_shared()
            mbarrier.arrive(self.full.index(slot), count=1)

    @jit
    def add_parts(self, row, i):
        """Have both parts of the i-th query tile added by TMA; the part before is then out of its buffer."""
        if self.EAGER:
            for part in gl.static_range(2):
                tma_store_wait(1 - part)
                mbarrier.arrive(self.empty.index(part), count=1, pred=i > 0)
        for part in gl.static_range(2):
            slot = i % self.SLOTS * 2 + part
            mbarrier.wait(self.full.index(slot), i // self.SLOTS & 1)
            tma_reduce_add(self.desc, [row * (self.NUMBERS // 32) + part * ROWS, 0], self.buffers.index(slot))
            if not self.EAGER:
                tma_store_wait(1)
                if part == 1:
                    mbarrier.arrive(self.empty.index(slot - 1), count=1)
                else:
                    before = gl.maximum(i - 1, 0)
                    mbarrier.arrive(self.empty.index(before % self.SLOTS * 2 + 1), count=1, pred=i > 0)


@jit
def make_dq_sums(place, desc, SLOTS: gl.constexpr, NUMBERS: gl.constexpr, EAGER: gl.constexpr):
    """With two barriers for each part of each slot."""
    if SLOTS == 0:
        return DqSums(place, None, None, None, None, SLOTS, NUMBERS, EAGER)
    else:
        buffers = gl.allocate_shared_memory(gl.float32, [2 * SLOTS, ROWS, 32], desc.layout)
        return DqSums(place, desc, buffers, barriers(2 * SLOTS, 1), barriers(2 * SLOTS, 1), SLOTS, NUMBERS, EAGER)

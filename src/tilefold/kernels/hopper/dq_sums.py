"""dq as sums in memory, to which a warp of `attention_backward_reduce` has TMA add the parts that its consumers make.

The sum of a query tile lies there in fp32 in the order of the registers of the two accumulators that make it, each [64, 64]:
8 groups of 8 columns, in each 4 warps, 8 rows, 4 threads, then two rows 8 apart of two columns.  So a warp writes 512 bytes that
lie together with one instruction.  `kernels.backward_reduced` undoes the order.
"""

from .backward_scheduler import _await as await_counter
from .backward_scheduler import _count as count
from .backward_scheduler import await_copies
from .gluon import barriers, descriptor, fence_async_shared, gl, jit, mbarrier, tma_reduce_add, tma_store_wait
from .structs import Value, struct

ROWS = gl.constexpr(128)  # of 32 fp32: one consumer's part of a query tile, 16 KB; of D = 80 and 96 the second is less


@struct
class DqSums:
    """desc: the sums [.., 32] fp32, boxes [BOX, 32]; buffers: a query tile's two parts in shared memory.  progress: how many
    blocks of keys have added to each query tile.  ADDERS: warps that add, each every ADDERS-th tile, so that one may wait for the
    end of an addition while another begins the next.  full: a barrier for each part and adder, empty: one for each part."""

    desc: descriptor
    progress: Value
    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    NUMBERS: gl.constexpr  # of a query tile: QUERIES * D
    BOX: gl.constexpr
    ORDERED: gl.constexpr
    ADDERS: gl.constexpr

    @jit
    def hand_over(self, dq, i, CID: gl.constexpr):
        """Consumer CID's part [64, 64] of the i-th query tile, or [64, BOX / 2]."""
        COLUMNS: gl.constexpr = dq.shape[1]
        mbarrier.wait(self.empty.index(CID), (i & 1) ^ 1)
        ordered = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([2 * COLUMNS, 32])
        if COLUMNS == 64:
            self.buffers.index(CID).store(ordered)
        else:
            self.buffers.index(CID).slice(0, 2 * COLUMNS, dim=0).store(ordered)
        fence_async_shared()
        mbarrier.arrive(self.full.index(CID * self.ADDERS + i % self.ADDERS), count=1)

    @jit
    def add_parts(self, number, i, before):
        """Have both parts of the i-th query tile, the one of that number in memory, added by TMA.

        ORDERED: when `before` blocks of keys have added theirs."""
        if self.ORDERED:
            await_counter(self.progress + number, before)
        for part in gl.static_range(2):
            mbarrier.wait(self.full.index(part * self.ADDERS + i % self.ADDERS), (i // self.ADDERS) & 1)
            first = number * (self.NUMBERS // 32) + part * ROWS
            if self.BOX == ROWS:
                tma_reduce_add(self.desc, [first, 0], self.buffers.index(part))
            else:
                for box in gl.static_range(1 if part else ROWS // self.BOX):
                    some = self.buffers.index(part).slice(box * self.BOX, self.BOX, dim=0)
                    tma_reduce_add(self.desc, [first + box * self.BOX, 0], some)
        for part in gl.static_range(2):
            tma_store_wait(1 - part)  # it has been read
            mbarrier.arrive(self.empty.index(part), count=1)
        if self.ORDERED:
            await_copies()
            count(self.progress + number)


@jit
def make_dq_sums(desc, progress, config, ORDERED: gl.constexpr, ADDERS: gl.constexpr):
    """With their barriers."""
    NUMBERS: gl.constexpr = config.QUERIES * config.D
    BOX: gl.constexpr = 2 * config.REST if config.REST else ROWS
    buffers = gl.allocate_shared_memory(gl.float32, [2, ROWS, 32], desc.layout)
    return DqSums(desc, progress, buffers, barriers(2 * ADDERS, 1), barriers(2, 1), NUMBERS, BOX, ORDERED, ADDERS)

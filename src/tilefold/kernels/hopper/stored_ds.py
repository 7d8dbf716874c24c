"""dS of every pair in memory, which `attention_backward_reduce` writes for the gradient of a bias.

TMA stores the tile that is in shared memory for dq's sake, in q's dtype.  A warp of its own (`store_ds`) issues the stores.
`kernels.backward.attention_backward_terms` sums up what shares a bias.
"""

from .gluon import barriers, descriptor, gl, jit, mbarrier, reinterpret, tma_store, tma_store_wait
from .parts import PANEL
from .structs import struct
from .tails import KEYS


@struct
class StoredDs:
    """desc [B * H * blocks * 128 keys, q_tiles * QUERIES], boxes [128, 64]; panels: those of two tiles of dS [128, QUERIES].
    full, empty: a barrier for each tile."""

    desc: descriptor
    panels: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    heads: gl.tensor
    blocks: gl.tensor
    QUERIES: gl.constexpr

    @jit
    def await_room(self, i):
        """Until the tile of two visits before the i-th has been read."""
        mbarrier.wait(self.empty.index(i & 1), ((i >> 1) & 1) ^ 1)

    @jit
    def publish(self, i):
        """A consumer's half of the i-th visit's tile is there."""
        mbarrier.arrive(self.full.index(i & 1), count=1)

    @jit
    def store(self, block, visit, i):
        """Have the i-th visit's tile stored.  Nothing lies past the last query."""
        mbarrier.wait(self.full.index(i & 1), (i >> 1) & 1)
        row = ((block.batch * self.heads + block.query_head + visit.head) * self.blocks + block.tile) * KEYS
        PANELS: gl.constexpr = self.QUERIES // PANEL
        for p in gl.static_range(PANELS):
            place = [row, visit.tile * self.QUERIES + p * PANEL]
            tma_store(self.desc, place, self.panels.index((i & 1) * PANELS + p))
        tma_store_wait(0)  # it has been read
        mbarrier.arrive(self.empty.index(i & 1), count=1)


@jit
def make_stored_ds(desc, ds, heads, blocks, QUERIES: gl.constexpr):
    """With their barriers.  ds: of the ReducePipeline."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, PANEL], ds.dtype)
    panels = reinterpret(ds, ds.dtype, [2 * (QUERIES // PANEL), KEYS, PANEL], LAYOUT)
    return StoredDs(desc, panels, barriers(2, 2), barriers(2, 1), heads, blocks, QUERIES)

"""Constants of `attention_backward_reduce`, its shared memory, and the products that read it."""

from .backward_config import UNIT
from .config import accumulator
from .gluon import (
    aggregate,
    barriers,
    constexpr_function,
    descriptor,
    gl,
    jit,
    mbarrier,
    reinterpret,
    tma_load,
    wgmma,
)
from .parts import PANEL, load_panels
from .pipeline import Stage
from .structs import struct

KEYS = gl.constexpr(128)  # of a program: two consumers of 64


@aggregate
class ReduceConfig:
    """Constants of a step, and the layouts of its tensors.  ROUNDED: make dS of the probabilities in 16 bits, as dv is, whose 32
    bits then need not stay in registers: at D=64 there are none for them."""

    DTYPE: gl.constexpr
    D: gl.constexpr
    QUERIES: gl.constexpr  # of a tile
    SLOTS: gl.constexpr  # of the rings of q and of dout
    ROUNDED: gl.constexpr
    LATE: gl.constexpr  # issue dP behind P
    SCORES: gl.constexpr  # layouts: of S, P, dP and dS [64, QUERIES],
    OUT: gl.constexpr  # of dk and dv [64, D],
    LEFT: gl.constexpr  # of P and dS as left operands,
    DQ: gl.constexpr  # and of a consumer's part of dq, [64, 64]

    @constexpr_function
    def __init__(self, DTYPE, D, QUERIES, SLOTS, LATE):
        self.DTYPE, self.D, self.QUERIES = gl.constexpr(DTYPE), gl.constexpr(D), gl.constexpr(QUERIES)
        self.SLOTS, self.ROUNDED = gl.constexpr(SLOTS), gl.constexpr(D == 64)
        self.LATE = gl.constexpr(LATE)
        self.SCORES, self.OUT = gl.constexpr(accumulator(QUERIES)), gl.constexpr(accumulator(D))
        self.LEFT = gl.constexpr(gl.DotOperandLayout(0, accumulator(D), k_width=2))
        self.DQ = gl.constexpr(accumulator(64))


@struct
class ReducePipeline:
    """Panels of rings of q and of dout [SLOTS, QUERIES, D], of K and V [128, D]; two tiles of dS [128, QUERIES].

    Both consumers release q and dout of a slot together."""

    q_desc: descriptor
    do_desc: descriptor
    k_desc: descriptor
    v_desc: descriptor
    stat_desc: descriptor
    q_panels: gl.shared_memory_descriptor
    do_panels: gl.shared_memory_descriptor
    k_panels: gl.shared_memory_descriptor
    v_panels: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    config: ReduceConfig

    @jit
    def load_keys(self, block):
        """Issue the TMA loads of K and V."""
        D: gl.constexpr = self.config.D
        bar = self.kv_full.index(0)
        mbarrier.expect(bar, 2 * KEYS * D * 2)
        load_panels(self.k_desc, bar, self.k_panels, 0, block.batch, block.head, block.tile * KEYS, D)
        load_panels(self.v_desc, bar, self.v_panels, 0, block.batch, block.head, block.tile * KEYS, D)

    @jit
    def load_queries(self, stage, block, head, tile, row, mods):
        """Issue those of q, dout, statistics and the mask of a query tile."""
        D: gl.constexpr = self.config.D
        QUERIES: gl.constexpr = self.config.QUERIES
        slot = stage.slot
        mbarrier.wait(self.empty.index(slot), stage.phase)
        mbarrier.expect(self.q_full.index(slot), QUERIES * D * 2 + 2 * QUERIES * 4 + mods.mask.BYTES)
        load_panels(self.q_desc, self.q_full.index(slot), self.q_panels, slot, block.batch, head, tile * QUERIES, D)
        tma_load(self.stat_desc, [row * (2 * QUERIES)], self.q_full.index(slot), self.statistics.index(slot))
        if mods.mask.ROWS:
            mods.mask.load(slot, self.q_full.index(slot), block.batch, head, tile * QUERIES, block.tile * KEYS)
        mbarrier.expect(self.do_full.index(slot), QUERIES * D * 2)
        load_panels(self.do_desc, self.do_full.index(slot), self.do_panels, slot, block.batch, head, tile * QUERIES, D)

    @jit
    def stage(self, i):
        """Where the i-th query tile is read."""
        return Stage(i % self.config.SLOTS, i // self.config.SLOTS & 1)

    @jit
    def tile(self, panels, slot, SLOTS: gl.constexpr, ROWS: gl.constexpr):
        """Panels as tiles [ROWS, D]: that of a slot."""
        D: gl.constexpr = self.config.D
        BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], self.config.DTYPE)
        return reinterpret(panels, self.config.DTYPE, [SLOTS, ROWS, D], BOX).index(slot)

    @jit
    def q(self, stage):
        return self.tile(self.q_panels, stage.slot, self.config.SLOTS, self.config.QUERIES)

    @jit
    def dout(self, stage):
        return self.tile(self.do_panels, stage.slot, self.config.SLOTS, self.config.QUERIES)

    @jit
    def k(self):
        return self.tile(self.k_panels, 0, 1, KEYS)

    @jit
    def v(self):
        return self.tile(self.v_panels, 0, 1, KEYS)

    @jit
    def release(self, stage):
        mbarrier.arrive(self.empty.index(stage.slot), count=1)

    # ------------------------------------------------------------ products of consumer CID

    @jit
    def issue_scores(self, stage, CID: gl.constexpr):
        """S of a query tile, when it has arrived."""
        nothing = gl.zeros([UNIT, self.config.QUERIES], gl.float32, self.config.SCORES)  # use_acc=False: never read
        mbarrier.wait(self.q_full.index(stage.slot), stage.phase)
        own = self.k().slice(CID * UNIT, UNIT, dim=0)
        return wgmma(own, self.q(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)

    @jit
    def issue_dp(self, stage, CID: gl.constexpr):
        """dP, likewise."""
        nothing = gl.zeros([UNIT, self.config.QUERIES], gl.float32, self.config.SCORES)
        mbarrier.wait(self.do_full.index(stage.slot), stage.phase)
        own = self.v().slice(CID * UNIT, UNIT, dim=0)
        return wgmma(own, self.dout(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)

    @jit
    def issue_dq(self, ds, CID: gl.constexpr):
        """This consumer's part of dq: 64 columns of 64 rows, or 64 of 128 rows.  ds [128, QUERIES]."""
        nothing = gl.zeros([64, 64], gl.float32, self.config.DQ)
        if self.config.D == 128:
            own = self.k().slice(CID * 64, 64, dim=1)
            return wgmma(ds.permute((1, 0)), own, nothing, use_acc=False, is_async=True)
        else:
            own = ds.slice(CID * 64, 64, dim=1).permute((1, 0))
            return wgmma(own, self.k(), nothing, use_acc=False, is_async=True)


@jit
def make_reduce_pipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, config):
    """Its memory and its barriers."""
    DTYPE: gl.constexpr = config.DTYPE
    QUERIES: gl.constexpr = config.QUERIES
    SLOTS: gl.constexpr = config.SLOTS
    PANELS: gl.constexpr = config.D // PANEL
    Q_PANEL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, PANEL], DTYPE)
    K_PANEL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, PANEL], DTYPE)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], DTYPE)
    q = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, QUERIES, PANEL], Q_PANEL)
    do = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, QUERIES, PANEL], Q_PANEL)
    k = gl.allocate_shared_memory(DTYPE, [PANELS, KEYS, PANEL], K_PANEL)
    v = gl.allocate_shared_memory(DTYPE, [PANELS, KEYS, PANEL], K_PANEL)
    ds = gl.allocate_shared_memory(DTYPE, [2, KEYS, QUERIES], DS)
    statistics = gl.allocate_shared_memory(gl.float32, [SLOTS, 2 * QUERIES], stat_desc.layout)
    return ReducePipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, q, do, k, v, ds, statistics, barriers(1, 1),
                          barriers(SLOTS, 1), barriers(SLOTS, 1), barriers(SLOTS, 2), config)  # fmt: skip

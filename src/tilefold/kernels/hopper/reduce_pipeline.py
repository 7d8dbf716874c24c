"""Constants of `attention_backward_reduce`, its shared memory, and the products that read it."""

from .backward_config import UNIT
from .config import accumulator, wide_of
from .gluon import (
    aggregate,
    barriers,
    constexpr_function,
    descriptor,
    gl,
    jit,
    mbarrier,
    opaque,
    reinterpret,
    tma_load,
    wgmma,
    wgmma_wait,
)
from .parts import PANEL, load_panels
from .pipeline import Stage
from .stored_ds import StoredDs, make_stored_ds
from .structs import struct
from .tails import KEYS, Tails


@aggregate
class ReduceConfig:
    """Constants of a step, and the layouts of its tensors."""

    DTYPE: gl.constexpr
    D: gl.constexpr  # columns of products: the head dims, or a few more
    WIDE: gl.constexpr  # columns of the first part of dk and dv
    REST: gl.constexpr  # of the second, 0 where there is none
    PARTS: gl.constexpr  # 1 or 2, and so many wgmma groups has each product but that of dq
    HELD: gl.constexpr  # columns of tiles in shared memory: whole panels
    QUERIES: gl.constexpr  # of a tile
    SLOTS: gl.constexpr  # of the rings of q and of dout
    LATE: gl.constexpr  # issue dP behind P
    HOLD_K: gl.constexpr  # keep own keys in registers, where there are some: shared memory is the bound
    HOLD_V: gl.constexpr  # and values
    SCORES: gl.constexpr  # layouts: of S, P, dP and dS [64, QUERIES],
    OUT: gl.constexpr  # of the first part of dk and dv [64, WIDE],
    OUT_REST: gl.constexpr  # of the second,
    LEFT: gl.constexpr  # of P and dS as left operands of either,
    LEFT_REST: gl.constexpr
    OWN: gl.constexpr  # of K and V in registers,
    DQ: gl.constexpr  # and of the consumers' parts of dq, [64, 64] or [64, REST]
    DQ_REST: gl.constexpr

    @constexpr_function
    def __init__(self, DTYPE, D, QUERIES, SLOTS, LATE):
        self.DTYPE, self.D, self.QUERIES = gl.constexpr(DTYPE), gl.constexpr(D), gl.constexpr(QUERIES)
        self.SLOTS, self.LATE = gl.constexpr(SLOTS), gl.constexpr(LATE)
        wide = wide_of(D)
        out, rest = accumulator(wide), accumulator(D - wide or wide)
        self.WIDE, self.REST, self.PARTS = gl.constexpr(wide), gl.constexpr(D - wide), gl.constexpr(1 + (D > wide))
        self.HELD = gl.constexpr((D + 63) // 64 * 64)
        self.SCORES, self.OUT, self.OUT_REST = gl.constexpr(accumulator(QUERIES)), gl.constexpr(out), gl.constexpr(rest)
        self.LEFT = gl.constexpr(gl.DotOperandLayout(0, out, k_width=2))
        self.LEFT_REST = gl.constexpr(gl.DotOperandLayout(0, rest, k_width=2))
        self.OWN = gl.constexpr(gl.DotOperandLayout(0, accumulator(QUERIES), k_width=2))
        self.HOLD_K, self.HOLD_V = gl.constexpr(D == 80), gl.constexpr(D in (80, 96))
        self.DQ, self.DQ_REST = gl.constexpr(accumulator(64)), gl.constexpr(rest)


@struct
class ReducePipeline:
    """Panels of rings of q and of dout [SLOTS, QUERIES, HELD], of K and V [128, HELD]; two tiles of dS [128, QUERIES].

    Both consumers release q and dout of a slot together.

    tails: of a packed batch.  stored: None where dS does not go to memory."""

    q_desc: descriptor
    do_desc: descriptor
    k_desc: descriptor
    v_desc: descriptor
    stat_desc: descriptor
    tails: Tails
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
    stored: StoredDs | gl.constexpr
    config: ReduceConfig

    @jit
    def load_keys(self, block):
        """Issue the TMA loads of K and V."""
        D: gl.constexpr = self.config.HELD
        bar = self.kv_full.index(0)
        mbarrier.expect(bar, 2 * KEYS * D * 2)
        row = block.key_row(block.tile, KEYS)
        if self.tails.desc is None:
            load_panels(self.k_desc, bar, self.k_panels, 0, block.batch, block.head, row, D)
            load_panels(self.v_desc, bar, self.v_panels, 0, block.batch, block.head, row, D)
        else:
            if (block.tile + 1) * KEYS > block.lengths.seq_k:
                self.tails.load_keys(0, bar, self.k_panels, block.head, block.sequence)
                self.tails.load_keys(1, bar, self.v_panels, block.head, block.sequence)
            else:
                load_panels(self.k_desc, bar, self.k_panels, 0, block.batch, block.head, row, D)
                load_panels(self.v_desc, bar, self.v_panels, 0, block.batch, block.head, row, D)

    @jit
    def load_queries(self, stage, block, head, tile, row, mods):
        """Issue those of q, dout, statistics and the mask of a query tile."""
        D: gl.constexpr = self.config.HELD
        QUERIES: gl.constexpr = self.config.QUERIES
        slot = stage.slot
        mbarrier.wait(self.empty.index(slot), stage.phase)
        mbarrier.expect(self.q_full.index(slot), QUERIES * D * 2 + 2 * QUERIES * 4 + mods.mask.BYTES)
        self.load_rows(0, self.q_desc, self.q_full.index(slot), self.q_panels, slot, block, head, tile)
        tma_load(self.stat_desc, [row * (2 * QUERIES)], self.q_full.index(slot), self.statistics.index(slot))
        if mods.mask.ROWS:
            mods.mask.load(slot, self.q_full.index(slot), block.batch, head, tile * QUERIES, block.tile * KEYS)
        mbarrier.expect(self.do_full.index(slot), QUERIES * D * 2)
        self.load_rows(1, self.do_desc, self.do_full.index(slot), self.do_panels, slot, block, head, tile)

    @jit
    def load_rows(self, WHICH: gl.constexpr, desc, bar, panels, slot, block, head, tile):
        """Issue those of a query tile of q (WHICH = 0) or dout (1)."""
        D: gl.constexpr = self.config.HELD
        QUERIES: gl.constexpr = self.config.QUERIES
        row = block.query_row(tile, QUERIES)
        if self.tails.desc is None:
            load_panels(desc, bar, panels, slot, block.batch, head, row, D)
        else:
            if (tile + 1) * QUERIES > block.lengths.seq_q:
                self.tails.load_queries(WHICH, bar, panels, slot, head, block.sequence)
            else:
                load_panels(desc, bar, panels, slot, block.batch, head, row, D)

    @jit
    def stage(self, i):
        """Where the i-th query tile is read."""
        return Stage(i % self.config.SLOTS, i // self.config.SLOTS & 1)

    @jit
    def tile(self, panels, slot, SLOTS: gl.constexpr, ROWS: gl.constexpr):
        """Panels as tiles [ROWS, HELD]: that of a slot."""
        D: gl.constexpr = self.config.HELD
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
    def issue_scores(self, own, stage):
        """S of a query tile, when it has arrived.  own: as of own_rows, of K."""
        mbarrier.wait(self.q_full.index(stage.slot), stage.phase)
        return self.issue_over_columns(own, self.q(stage))

    @jit
    def issue_dp(self, own, stage):
        """dP, likewise.  own: of V."""
        mbarrier.wait(self.do_full.index(stage.slot), stage.phase)
        return self.issue_over_columns(own, self.dout(stage))

    @jit
    def own_rows(self, tile, CID: gl.constexpr, HOLD: gl.constexpr):
        """This consumer's 64 rows of K or V, in parts of the head dim.  HOLD: in registers."""
        WIDE: gl.constexpr = self.config.WIDE
        REST: gl.constexpr = self.config.REST
        rows = tile.slice(CID * UNIT, UNIT, dim=0)
        if REST == 0:
            return (rows,)
        elif HOLD:
            return (
                rows.slice(0, WIDE, dim=1).load(self.config.OWN),
                rows.slice(WIDE, REST, dim=1).load(self.config.OWN),
            )
        else:
            return (rows.slice(0, WIDE, dim=1), rows.slice(WIDE, REST, dim=1))

    @jit
    def issue_over_columns(self, own, tile):
        """own times tile [QUERIES, HELD], turned, over D of their columns."""
        WIDE: gl.constexpr = self.config.WIDE
        REST: gl.constexpr = self.config.REST
        nothing = gl.zeros([UNIT, self.config.QUERIES], gl.float32, self.config.SCORES)  # use_acc=False: never read
        if REST == 0:
            return wgmma(own[0], tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        else:
            turned = tile.slice(0, WIDE, dim=1).permute((1, 0))
            made = wgmma(own[0], turned, nothing, use_acc=False, is_async=True)
            return wgmma(own[1], tile.slice(WIDE, REST, dim=1).permute((1, 0)), made, is_async=True)

    @jit
    def issue_sums(self, left, tile, sums):
        """dk or dv [64, D], in their parts, + left [64, QUERIES] times tile [QUERIES, HELD]."""
        WIDE: gl.constexpr = self.config.WIDE
        REST: gl.constexpr = self.config.REST
        if REST == 0:
            return (wgmma(left, tile, sums[0], is_async=True),)
        else:
            first = wgmma(left, tile.slice(0, WIDE, dim=1), sums[0], is_async=True)
            left = gl.convert_layout(left, self.config.LEFT_REST)
            return (first, wgmma(left, tile.slice(WIDE, REST, dim=1), sums[1], is_async=True))

    @jit
    def issue_dq(self, ds, CID: gl.constexpr):
        """This consumer's part of dq: of 64 rows 64 columns, or the rest, or 64 of 128 rows.  ds [128, QUERIES]."""
        REST: gl.constexpr = self.config.REST
        if self.config.QUERIES == 128:
            nothing = gl.zeros([64, 64], gl.float32, self.config.DQ)
            own = ds.slice(CID * 64, 64, dim=1).permute((1, 0))
            return wgmma(own, self.k(), nothing, use_acc=False, is_async=True)
        elif REST and CID == 1:
            nothing = gl.zeros([64, REST], gl.float32, self.config.DQ_REST)
            return wgmma(ds.permute((1, 0)), self.k().slice(64, REST, dim=1), nothing, use_acc=False, is_async=True)
        else:
            nothing = gl.zeros([64, 64], gl.float32, self.config.DQ)
            return wgmma(ds.permute((1, 0)), self.k().slice(CID * 64, 64, dim=1), nothing, use_acc=False, is_async=True)


@jit
def zero_sums(config):
    """dk or dv [64, D] in one part or two, written before the first product, or all would wait."""
    first = opaque(gl.zeros([UNIT, config.WIDE], gl.float32, config.OUT))
    if config.REST == 0:
        return (first,)
    else:
        return (first, opaque(gl.zeros([UNIT, config.REST], gl.float32, config.OUT_REST)))


@jit
def wait_sums(PENDING: gl.constexpr, flying, left):
    """Wait for all but PENDING wgmma groups, among them those of dk or dv and of their left operand."""
    if len(flying) == 1:
        first, left = wgmma_wait(PENDING, deps=(flying[0], left))
        return (first,), left
    else:
        first, rest, left = wgmma_wait(PENDING, deps=(flying[0], flying[1], left))
        return (first, rest), left


@jit
def make_reduce_pipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, tails, stored_desc, heads, blocks, config):
    """Its memory and its barriers."""
    DTYPE: gl.constexpr = config.DTYPE
    QUERIES: gl.constexpr = config.QUERIES
    SLOTS: gl.constexpr = config.SLOTS
    PANELS: gl.constexpr = config.HELD // PANEL
    Q_PANEL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, PANEL], DTYPE)
    K_PANEL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, PANEL], DTYPE)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], DTYPE)
    q = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, QUERIES, PANEL], Q_PANEL)
    do = gl.allocate_shared_memory(DTYPE, [SLOTS * PANELS, QUERIES, PANEL], Q_PANEL)
    k = gl.allocate_shared_memory(DTYPE, [PANELS, KEYS, PANEL], K_PANEL)
    v = gl.allocate_shared_memory(DTYPE, [PANELS, KEYS, PANEL], K_PANEL)
    ds = gl.allocate_shared_memory(DTYPE, [2, KEYS, QUERIES], DS)
    statistics = gl.allocate_shared_memory(gl.float32, [SLOTS, 2 * QUERIES], stat_desc.layout)
    stored = None
    if stored_desc is not None:
        stored = make_stored_ds(stored_desc, ds, heads, blocks, QUERIES)
    return ReducePipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, tails, q, do, k, v, ds, statistics, barriers(1, 1),
                          barriers(SLOTS, 1), barriers(SLOTS, 1), barriers(SLOTS, 2), stored, config)  # fmt: skip

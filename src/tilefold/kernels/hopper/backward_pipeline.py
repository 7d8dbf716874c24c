"""Shared memory of a backward program: one pool of tiles [64, D], statistics, and the barriers between producer and consumers.

KV tile      rings of q and of dout, SLOTS tiles each, then the work tile's own K and V
query tile   a ring of DQ_SLOTS tiles of K, then as many panels [64 keys, 64 queries] of dS, QUERY_TILES a slot
"""

from .backward_config import STATISTICS, UNIT, BackwardConfig
from .gluon import barriers, descriptor, fence_async_shared, gl, jit, mbarrier, reinterpret, tma_load, wgmma
from .parts import PANEL, clear_rows
from .pipeline import Stage
from .structs import Buffer, struct


@jit
def first_stage(PHASE: gl.constexpr):
    """The first stage of a ring, for a consumer (phase 0) or the producer (1: every slot is free)."""
    slot = 0
    phase = PHASE
    return Stage(slot, phase)


@jit
def next_stage(stage, SLOTS: gl.constexpr):
    """The phase flips each time around."""
    slot = stage.slot + 1
    phase = stage.phase
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return Stage(slot, phase)


@struct
class BackwardPipeline:
    """do_empty: None where dout is released with q.  done: the consumers have published what the work tile makes for others."""

    q_desc: descriptor
    do_desc: descriptor
    k_desc: descriptor
    v_desc: descriptor
    stat_desc: descriptor
    pool: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor  # of the ring of K and dS, too
    do_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    do_empty: Buffer
    done: gl.shared_memory_descriptor
    cleared: Buffer  # of two consumers: one has zeroed the rows of a tile that both read
    config: BackwardConfig

    @jit
    def _tile(self, i):
        return self.part(i, 0, self.config.D // PANEL)

    @jit
    def _place(self, i, PANEL_OF_TILE: gl.constexpr):
        """A panel of the i-th tile.  The first two of three lie side by side, all third ones behind them: a product of two reads
        them as one."""
        if self.config.D // PANEL != 3:
            return i * (self.config.D // PANEL) + PANEL_OF_TILE
        elif PANEL_OF_TILE == 2:
            return 2 * self.config.TILES + i
        else:
            return 2 * i + PANEL_OF_TILE

    @jit
    def part(self, i, FIRST: gl.constexpr, PANELS: gl.constexpr):
        """PANELS panels of the i-th tile, a power of two, from panel FIRST on, a multiple of it."""
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([UNIT, PANELS * PANEL], self.config.DTYPE)
        PARTS: gl.constexpr = self.config.TILES * (self.config.D // PANEL) // PANELS
        shape: gl.constexpr = [PARTS, UNIT, PANELS * PANEL]
        return reinterpret(self.pool, self.config.DTYPE, shape, layout).index(self._place(i, FIRST) // PANELS)

    @jit
    def _load(self, desc, bar, i, work, head, row, PANELS: gl.constexpr):
        """Have the i-th tile brought."""
        for p in gl.static_range(PANELS):
            tma_load(desc, [work.batch, head, row, p * PANEL], bar, self.pool.index(self._place(i, p)))

    # ------------------------------------------------------------ of a KV tile

    @jit
    def issue_scores(self, stage):
        """Issue S [keys, queries], over the panels that the head dim fills."""
        return self._issue_product(2 * self.config.SLOTS, stage.slot, self.config.PANELS_QK)

    @jit
    def issue_dp(self, stage):
        return self._issue_product(2 * self.config.SLOTS + 1, self.config.SLOTS + stage.slot, self.config.PANELS_V)

    @jit
    def _issue_product(self, own, tile, PANELS: gl.constexpr):
        """Tile `own` times a transposed one: of three panels a product of two, and one of the third."""
        nothing = gl.zeros([UNIT, UNIT], gl.float32, self.config.SCORES)  # use_acc=False: never read
        FIRST: gl.constexpr = PANELS if PANELS != 3 else 2
        other = self.part(tile, 0, FIRST).permute((1, 0))
        made = wgmma(self.part(own, 0, FIRST), other, nothing, use_acc=False, is_async=True)
        if PANELS == 3:
            made = wgmma(self.part(own, 2, 1), self.part(tile, 2, 1).permute((1, 0)), made, is_async=True)
        return made

    @jit
    def q(self, stage):
        return self._tile(stage.slot)

    @jit
    def dout(self, stage):
        return self._tile(self.config.SLOTS + stage.slot)

    @jit
    def k(self):
        return self._tile(2 * self.config.SLOTS)

    @jit
    def v(self):
        return self._tile(2 * self.config.SLOTS + 1)

    @jit
    def load_keys(self, work):
        """Issue the TMA loads of the work tile's own K and V."""
        QK: gl.constexpr = self.config.PANELS_QK
        V: gl.constexpr = self.config.PANELS_V
        bar = self.kv_full.index(0)
        row = work.first_k + work.tile * UNIT
        mbarrier.expect(bar, (QK + V) * PANEL * UNIT * 2)
        self._load(self.k_desc, bar, 2 * self.config.SLOTS, work, work.head, row, QK)
        self._load(self.v_desc, bar, 2 * self.config.SLOTS + 1, work, work.head, row, V)

    @jit
    def load_queries(self, stage, work, head, row, statistics, first, counters):
        """Issue those of q, dout and statistics of the query tile at `row`; first: it is the first of the work tile."""
        bar = self.q_full.index(stage.slot)
        mbarrier.wait(self.q_empty.index(stage.slot), stage.phase)
        mbarrier.expect(bar, self.config.PANELS_QK * PANEL * UNIT * 2 + STATISTICS * 4)
        self._load(self.q_desc, bar, stage.slot, work, head, row, self.config.PANELS_QK)
        tma_load(self.stat_desc, [statistics * STATISTICS], bar, self.statistics.index(stage.slot))
        if first:  # while K, V and q are on their way: there is no dS without dout
            counters.await_slot(work)
        if self.do_empty is not None:
            mbarrier.wait(self.do_empty.index(stage.slot), stage.phase)
        bar = self.do_full.index(stage.slot)
        mbarrier.expect(bar, self.config.PANELS_V * PANEL * UNIT * 2)
        self._load(self.do_desc, bar, self.config.SLOTS + stage.slot, work, head, row, self.config.PANELS_V)

    @jit
    def wait_keys(self):
        mbarrier.wait(self.kv_full.index(0), 0)

    @jit
    def wait_q(self, stage, live=None):
        """Wait for q, and zero its rows from `live` on."""
        mbarrier.wait(self.q_full.index(stage.slot), stage.phase)
        if live is not None:
            if live < UNIT:
                self.clear(stage.slot, live)

    @jit
    def wait_dout(self, stage, live=None):
        mbarrier.wait(self.do_full.index(stage.slot), stage.phase)
        if live is not None:
            if live < UNIT:
                self.clear(self.config.SLOTS + stage.slot, live)

    @jit
    def release_q(self, stage):
        mbarrier.arrive(self.q_empty.index(stage.slot), count=1)

    @jit
    def release_dout(self, stage):
        mbarrier.arrive(self.do_empty.index(stage.slot), count=1)

    @jit
    def clear(self, tile, live):
        """Zero the rows of a tile from `live` on: they may hold NaN, and 0 * NaN is NaN."""
        for p in gl.static_range(self.config.D // PANEL):
            clear_rows(self.pool.index(self._place(tile, p)), live, UNIT, gl.num_warps())
        fence_async_shared()

    @jit
    def publish_clear(self, i):
        """For the other consumer; i: how many times before.  It is at most SLOTS tiles behind."""
        mbarrier.arrive(self.cleared.index(i % self.config.SLOTS), count=1)

    @jit
    def await_clear(self, i):
        mbarrier.wait(self.cleared.index(i % self.config.SLOTS), (i // self.config.SLOTS) & 1)

    # ------------------------------------------------------------ of a query tile

    @jit
    def load_pair(self, stage, work, kv_head, kv_tile, rows, ds, first, counters):
        """Issue those of K and of the dS at each of `rows`; first: they are the first of the work tile."""
        QUERY_TILES: gl.constexpr = self.config.QUERY_TILES
        bar = self.q_full.index(stage.slot)
        mbarrier.wait(self.q_empty.index(stage.slot), stage.phase)
        QK: gl.constexpr = self.config.PANELS_QK
        mbarrier.expect(bar, UNIT * (QK * PANEL + QUERY_TILES * UNIT) * 2)
        row = work.first_k + kv_tile * UNIT
        self._load(self.k_desc, bar, stage.slot, work, kv_head, row, QK)
        if first:  # while K is on its way
            counters.await_keys(work)
        for t in gl.static_range(QUERY_TILES):
            ds.load(rows[t], bar, self._panel_of_ds(stage, t))

    @jit
    def _panel_of_ds(self, stage, t):
        """Behind the tiles of K; of three panels those lie in two places, and so do the panels behind them."""
        SLOTS: gl.constexpr = self.config.DQ_SLOTS
        BEHIND: gl.constexpr = 2 * (self.config.TILES - SLOTS)  # two of three
        i = stage.slot * self.config.QUERY_TILES + t
        if self.config.D // PANEL != 3:
            i += SLOTS * (self.config.D // PANEL)
        elif SLOTS * self.config.QUERY_TILES <= BEHIND:
            i += 2 * SLOTS
        else:
            i += gl.where(i < BEHIND, 2 * SLOTS, 3 * SLOTS)
        return self.pool.index(i)

    @jit
    def issue_dq(self, stage, t, acc, COLUMN: gl.constexpr):
        """Issue dq += dS K of a slot, for its t-th query tile: of the first columns of K, or the rest from COLUMN on."""
        COLUMNS: gl.constexpr = self.config.COLUMNS if COLUMN == 0 else self.config.REST
        keys = self.part(stage.slot, COLUMN // PANEL, COLUMNS // PANEL)
        return wgmma(self._panel_of_ds(stage, t).permute((1, 0)), keys, acc, is_async=True)

    @jit
    def release_pair(self, slot, j):
        """After the j-th product, the slot of the one before; after the first, none."""
        mbarrier.arrive(self.q_empty.index(slot), count=1, pred=j > 0)

    @jit
    def arrive_done(self):
        mbarrier.arrive(self.done.index(0), count=1)

    @jit
    def wait_done(self):
        mbarrier.wait(self.done.index(0), 0)


@jit
def allocate_pool(stat_desc, config):
    """-> the pool, and the statistics of SLOTS query tiles."""
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([UNIT, PANEL], config.DTYPE)
    pool = gl.allocate_shared_memory(config.DTYPE, [config.TILES * (config.D // PANEL), UNIT, PANEL], BOX)
    return pool, gl.allocate_shared_memory(gl.float32, [config.SLOTS, STATISTICS], stat_desc.layout)


@jit
def allocate_ds(config):
    """The tile of dS on its way to memory."""
    BOX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([UNIT, PANEL], config.DTYPE)
    return gl.allocate_shared_memory(config.DTYPE, [UNIT, UNIT], BOX)


@jit
def make_backward_pipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, memory, config, CONSUMERS: gl.constexpr):
    """memory: as of `allocate_pool`.  Of two consumers, each releases q and dout by itself."""
    RING: gl.constexpr = max(config.SLOTS, config.DQ_SLOTS)
    kv_full, q_full = barriers(1, 1), barriers(RING, 1)
    if CONSUMERS == 1:
        do_full, q_empty, do_empty, cleared = barriers(config.SLOTS, 1), barriers(RING, 1), None, None
    else:
        q_empty = barriers(RING, 2)
        do_full, do_empty = barriers(config.SLOTS, 1), barriers(config.SLOTS, 2)
        cleared = barriers(config.SLOTS, 1) if config.VARLEN else None
    done = barriers(1, CONSUMERS)
    return BackwardPipeline(q_desc, do_desc, k_desc, v_desc, stat_desc, memory[0], memory[1], kv_full, q_full, do_full, q_empty,
                            do_empty, done, cleared, config)  # fmt: skip

"""The rings of tiles in shared memory between the producer, which issues TMA loads, and the consumers, which issue wgmma.

A head dim that is no power of two is two tiles side by side (`config.wide_of`).  Buffers and accumulators of a head dim are
therefore tuples of one or two parts.
"""

from .config import wide_of
from .gluon import (
    aggregate,
    barriers,
    constexpr_function,
    descriptor,
    fence_async_shared,
    field,
    gl,
    jit,
    mbarrier,
    opaque,
    reinterpret,
    tma_load,
)
from .parts import clear_rows


@constexpr_function
def panel_of(dim, dtype):
    """Columns of a tile that lie together in shared memory: 128 bytes, the widest swizzle, where they divide it, else 64."""
    bits = dtype.primitive_bitwidth
    return (1024 if dim * bits % 1024 == 0 else 512) // bits


@constexpr_function
def swizzled(dim, dtype):
    """The layout of a tile of a head dim in shared memory, or of a panel of it."""
    bits = dtype.primitive_bitwidth
    return gl.NVMMASharedLayout(swizzle_byte_width=128 if dim * bits % 1024 == 0 else 64, element_bitwidth=bits, rank=2)


@aggregate
class Stage:
    """A place in a ring: the slot, and the phase of its barrier that is waited for."""

    slot: gl.tensor | gl.constexpr
    phase: gl.tensor | gl.constexpr

    @constexpr_function
    def __init__(self, slot, phase):
        self.slot, self.phase = field(slot), field(phase)


@aggregate
class Pipeline:
    """A ring of SLOTS tiles [ROWS, DIM], rows being tokens.  A slot has two barriers: `full`, which its TMA loads complete, and
    `empty`, at which every consumer that reads it arrives.  A slot of Q is read by the consumers of its rows.  They have one, or
    two, so that the next query tile is loaded while the present one is folded.

    The producer acquires a stage and loads; a consumer waits for it, reads the tile and releases it."""

    desc: descriptor
    panels: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr
    ROWS: gl.constexpr
    DIM: gl.constexpr
    PACK: gl.constexpr  # a row is one of PACK heads of a query
    TRANSPOSED: gl.constexpr  # tokens are columns: ROWS counts channels, DIM tokens
    BOX: gl.constexpr  # rows that a TMA load brings

    @constexpr_function
    def __init__(self, desc, panels, full, empty, SLOTS, ROWS, DIM, PACK=1, TRANSPOSED=False, BOX=None):
        self.desc, self.panels, self.full, self.empty = desc, panels, full, empty
        self.SLOTS, self.ROWS = gl.constexpr(SLOTS), gl.constexpr(ROWS)
        self.DIM, self.PACK, self.TRANSPOSED = gl.constexpr(DIM), gl.constexpr(PACK), gl.constexpr(TRANSPOSED)
        self.BOX = gl.constexpr(BOX or ROWS)

    @jit
    def stage(self, t):
        """Where tile number t of those that pass through the ring is read."""
        return Stage(self._hidden(t % self.SLOTS, t), (t // self.SLOTS) & 1)

    @jit
    def _hidden(self, slot, t):
        """The slot, not to be seen through where a tile is wide and there is one: else the compiler holds the addresses of all
        operands of products throughout the loop, in memory."""
        if self.SLOTS == 1 and self.DIM > 256:
            return slot + opaque(t - t)
        else:
            return slot

    @jit
    def write_stage(self, t):
        """Where it is written.  Its phase is the other one: at first every slot is free."""
        return Stage(t % self.SLOTS, ((t // self.SLOTS) & 1) ^ 1)

    @jit
    def query_stage(self, c: gl.constexpr, i, CONSUMERS: gl.constexpr):
        """Of Q: where consumer c reads its rows of the i-th query tile."""
        if self.SLOTS == CONSUMERS:
            return Stage(self._hidden(c, i), i & 1)
        else:
            return Stage((i & 1) * CONSUMERS + c, (i >> 1) & 1)

    @jit
    def share(self, stage, c: gl.constexpr, SPLIT: gl.constexpr):
        """Of V: where those columns of a tile lie that consumer c of SPLIT folds.  stage: of the ring of K, which has a tile for
        SPLIT of this one."""
        if SPLIT == 1:
            return stage
        else:
            return Stage(stage.slot * SPLIT + c % SPLIT, stage.phase)

    @jit
    def acquire(self, stage):
        """Wait until the consumers have released the slot."""
        mbarrier.wait(self.empty.index(stage.slot), stage.phase)

    @jit
    def load(self, stage, batch, head, token, FIRST: gl.constexpr = 0):
        """Issue the TMA loads of the tile whose first token is `token`, and column FIRST.  Columns past the tensor's own become
        zeros."""
        DTYPE: gl.constexpr = self.panels[0].dtype
        PANEL: gl.constexpr = panel_of(self.DIM, DTYPE)
        WIDE: gl.constexpr = wide_of(self.DIM)
        bar = self.full.index(stage.slot)
        mbarrier.expect(bar, self.ROWS * self.DIM * DTYPE.primitive_bitwidth // 8)
        for p in gl.static_range(WIDE // PANEL):
            panel = self.panels[0].index(stage.slot * (WIDE // PANEL) + p)
            self._load_panel(batch, head, token, FIRST + p * PANEL, bar, panel)
        for p in gl.static_range((self.DIM - WIDE) // PANEL):
            panel = self.panels[1].index(stage.slot * ((self.DIM - WIDE) // PANEL) + p)
            self._load_panel(batch, head, token, FIRST + WIDE + p * PANEL, bar, panel)

    @jit
    def _load_panel(self, batch, head, token, column, bar, panel):
        if self.TRANSPOSED:
            tma_load(self.desc, [batch, head, 0, token + column], bar, panel)
        elif self.PACK == 1:
            tma_load(self.desc, [batch, head, token, column], bar, panel)
        else:
            tma_load(self.desc, [batch, head, token // self.PACK, 0, column], bar, panel)

    @jit
    def load_blocks(self, stage, batch, head, row_0, row_1):
        """Issue the TMA loads of a tile of one block of rows, or of two, each of BOX rows of 16-bit elements."""
        BLOCKS: gl.constexpr = self.ROWS // self.BOX
        bar = self.full.index(stage.slot)
        mbarrier.expect(bar, self.ROWS * self.DIM * 2)
        for p in gl.static_range(self.DIM // 64):
            place = (stage.slot * (self.DIM // 64) + p) * BLOCKS
            tma_load(self.desc, [batch, head, row_0, p * 64], bar, self.panels[0].index(place))
            if BLOCKS == 2:
                tma_load(self.desc, [batch, head, row_1, p * 64], bar, self.panels[0].index(place + 1))

    @jit
    def wait(self, stage):
        """Wait until the tile has arrived."""
        mbarrier.wait(self.full.index(stage.slot), stage.phase)

    @jit
    def signal(self, stage):
        """Complete `full` without a tile."""
        mbarrier.arrive(self.full.index(stage.slot), count=1)

    @jit
    def release(self, stage):
        """The calling consumer has read the tile."""
        mbarrier.arrive(self.empty.index(stage.slot), count=1)

    @jit
    def part(self, stage, PART: gl.constexpr):
        """Part 0 or 1 of the slot's tile: [ROWS, width]."""
        WIDE: gl.constexpr = wide_of(self.DIM)
        COLUMNS: gl.constexpr = WIDE if PART == 0 else self.DIM - WIDE
        panels = self.panels[PART]
        tiles = reinterpret(panels, panels.dtype, [self.SLOTS, self.ROWS, COLUMNS], swizzled(self.DIM, panels.dtype))
        return tiles.index(stage.slot)

    @jit
    def parts(self, stage):
        """All parts of the slot's tile, a tuple."""
        if wide_of(self.DIM) == self.DIM:
            return (self.part(stage, 0),)
        else:
            return (self.part(stage, 0), self.part(stage, 1))

    @jit
    def clear_tail(self, stage, live):
        """Zero the tile's rows from `live` on.  Every consumer does, with the same values, so none waits for another."""
        PANEL: gl.constexpr = panel_of(self.DIM, self.panels[0].dtype)
        WIDE: gl.constexpr = wide_of(self.DIM)
        for p in gl.static_range(WIDE // PANEL):
            clear_rows(self.panels[0].index(stage.slot * (WIDE // PANEL) + p), live, self.ROWS, gl.num_warps())
        for p in gl.static_range((self.DIM - WIDE) // PANEL):
            panel = self.panels[1].index(stage.slot * ((self.DIM - WIDE) // PANEL) + p)
            clear_rows(panel, live, self.ROWS, gl.num_warps())
        fence_async_shared()

    @jit
    def clear_blocks(self, stage, live_0, live_1):
        """Zero the rows of a tile's blocks past the live ones."""
        BLOCKS: gl.constexpr = self.ROWS // self.BOX
        for p in gl.static_range(self.DIM // 64):
            place = (stage.slot * (self.DIM // 64) + p) * BLOCKS
            clear_rows(self.panels[0].index(place), live_0, self.BOX, gl.num_warps())
            if BLOCKS == 2:
                clear_rows(self.panels[0].index(place + 1), live_1, self.BOX, gl.num_warps())
        fence_async_shared()


@jit
def allocate_panels(DTYPE: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Memory of SLOTS tiles [ROWS, DIM], panel by panel: a tuple of [SLOTS * panels, ROWS, panel]."""
    PANEL: gl.constexpr = panel_of(DIM, DTYPE)
    WIDE: gl.constexpr = wide_of(DIM)
    first = gl.allocate_shared_memory(DTYPE, [SLOTS * (WIDE // PANEL), ROWS, PANEL], swizzled(DIM, DTYPE))
    if WIDE == DIM:
        return (first,)
    else:
        return (
            first,
            gl.allocate_shared_memory(DTYPE, [SLOTS * ((DIM - WIDE) // PANEL), ROWS, PANEL], swizzled(DIM, DTYPE)),
        )


@jit
def make_pipeline(desc, SLOTS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, READERS: gl.constexpr,
                  PACK: gl.constexpr = 1, TRANSPOSED: gl.constexpr = False, BOX: gl.constexpr = None):  # fmt: skip
    """A ring whose slots are released by READERS consumers each."""
    if BOX is None:
        panels = allocate_panels(desc.dtype, SLOTS, ROWS, DIM)
    else:
        panels = allocate_panels(desc.dtype, SLOTS * (ROWS // BOX), BOX, DIM)
    full, empty = barriers(SLOTS, 1), barriers(SLOTS, READERS)
    return Pipeline(desc, panels, full, empty, SLOTS, ROWS, DIM, PACK, TRANSPOSED, BOX)

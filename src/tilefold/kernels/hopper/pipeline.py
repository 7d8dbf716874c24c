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
    reinterpret,
    tma_load,
)
from .parts import clear_rows


@constexpr_function
def panel_of(dim):
    """Columns of a tile that lie together in shared memory: 64 (128 bytes, the widest swizzle) where they divide it, else 32."""
    return 64 if dim % 64 == 0 else 32


@constexpr_function
def swizzled(dim):
    """The layout of a tile of a head dim in shared memory, or of a panel of it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128 if dim % 64 == 0 else 64, element_bitwidth=16, rank=2)


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
    """A ring of SLOTS tiles [ROWS, DIM].  A slot has two barriers: `full`, which its TMA loads complete, and `empty`, at which
    every consumer arrives.

    The producer acquires a stage and loads; a consumer waits for it, reads the tile and releases it."""

    desc: descriptor
    panels: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr
    ROWS: gl.constexpr
    DIM: gl.constexpr
    PACK: gl.constexpr  # a row is one of PACK heads of a query

    @constexpr_function
    def __init__(self, desc, panels, full, empty, SLOTS, ROWS, DIM, PACK):
        self.desc, self.panels, self.full, self.empty = desc, panels, full, empty
        self.SLOTS, self.ROWS = gl.constexpr(SLOTS), gl.constexpr(ROWS)
        self.DIM, self.PACK = gl.constexpr(DIM), gl.constexpr(PACK)

    @jit
    def stage(self, t):
        """Where tile number t of those that pass through the ring is read."""
        return Stage(t % self.SLOTS, (t // self.SLOTS) & 1)

    @jit
    def free_stage(self, t):
        """Where it is written.  Its phase is the other one: at first every slot is free."""
        return Stage(t % self.SLOTS, ((t // self.SLOTS) & 1) ^ 1)

    @jit
    def acquire(self, stage):
        """Wait until the consumers have released the slot."""
        mbarrier.wait(self.empty.index(stage.slot), stage.phase)

    @jit
    def load(self, stage, batch, head, row):
        """Issue the TMA loads of ROWS rows from `row` on.  Columns past the tensor's own become zeros."""
        PANEL: gl.constexpr = panel_of(self.DIM)
        WIDE: gl.constexpr = wide_of(self.DIM)
        bar = self.full.index(stage.slot)
        mbarrier.expect(bar, self.ROWS * self.DIM * 2)
        for p in gl.static_range(WIDE // PANEL):
            panel = self.panels[0].index(stage.slot * (WIDE // PANEL) + p)
            _load_panel(self.desc, batch, head, row, p * PANEL, bar, panel, self.PACK)
        for p in gl.static_range((self.DIM - WIDE) // PANEL):
            panel = self.panels[1].index(stage.slot * ((self.DIM - WIDE) // PANEL) + p)
            _load_panel(self.desc, batch, head, row, WIDE + p * PANEL, bar, panel, self.PACK)

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
        tiles = reinterpret(panels, panels.dtype, [self.SLOTS, self.ROWS, COLUMNS], swizzled(self.DIM))
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
        PANEL: gl.constexpr = panel_of(self.DIM)
        WIDE: gl.constexpr = wide_of(self.DIM)
        for p in gl.static_range(WIDE // PANEL):
            clear_rows(self.panels[0].index(stage.slot * (WIDE // PANEL) + p), live, self.ROWS, gl.num_warps())
        for p in gl.static_range((self.DIM - WIDE) // PANEL):
            panel = self.panels[1].index(stage.slot * ((self.DIM - WIDE) // PANEL) + p)
            clear_rows(panel, live, self.ROWS, gl.num_warps())
        fence_async_shared()


@jit
def _load_panel(desc, batch, head, row, column, bar, panel, PACK: gl.constexpr):
    if PACK == 1:
        tma_load(desc, [batch, head, row, column], bar, panel)
    else:
        tma_load(desc, [batch, head, row // PACK, 0, column], bar, panel)


@jit
def allocate_panels(DTYPE: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Memory of SLOTS tiles [ROWS, DIM], panel by panel: a tuple of [SLOTS * panels, ROWS, panel]."""
    PANEL: gl.constexpr = panel_of(DIM)
    WIDE: gl.constexpr = wide_of(DIM)
    first = gl.allocate_shared_memory(DTYPE, [SLOTS * (WIDE // PANEL), ROWS, PANEL], swizzled(DIM))
    if WIDE == DIM:
        return (first,)
    else:
        return (first, gl.allocate_shared_memory(DTYPE, [SLOTS * ((DIM - WIDE) // PANEL), ROWS, PANEL], swizzled(DIM)))


@jit
def make_pipeline(desc, SLOTS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, READERS: gl.constexpr,
                  PACK: gl.constexpr = 1):  # fmt: skip
    """A ring whose slots are released by READERS consumers each."""
    panels = allocate_panels(desc.dtype, SLOTS, ROWS, DIM)
    return Pipeline(desc, panels, barriers(SLOTS, 1), barriers(SLOTS, READERS), SLOTS, ROWS, DIM, PACK)

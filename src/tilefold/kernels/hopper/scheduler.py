"""The dynamic persistent tile scheduler: which query tile a program folds next.

As many programs as fit on the device draw work tiles from a counter in memory.  Within a head the order is LPT (longest
processing time first): under a causal mask its last query tiles see the most keys and come first.  Neighbours in the order share
K and V in L2.  The producer draws, and posts what it drew in a mailbox in shared memory.  The consumers read it when Q has
arrived: Q's `full` barrier covers the mailbox, too.
"""

from .config import Problem
from .gluon import aggregate, constexpr_function, field, gl, jit, thread_barrier
from .parts import draw_work, place_of_item, read_work

LEAVE = gl.constexpr(-1)  # posted instead of a work tile: there are no more
IDLE = gl.constexpr(-2)  # there may be more; only the overflow flags of the one before are asked for


@aggregate
class WorkTile:
    """One query tile: `block` of a sequence's query tiles, for one (packed) query head."""

    block: gl.tensor
    batch: gl.tensor | gl.constexpr  # 0 in a packed batch
    head: gl.tensor
    seq_q: gl.tensor
    seq_k: gl.tensor
    shift: gl.tensor  # seq_k - seq_q: a query's own place among the keys, less its index
    first_q: gl.tensor | gl.constexpr  # row of the sequence's first query,
    first_k: gl.tensor | gl.constexpr  # and of its first key
    sequence: gl.tensor  # the batch entry, or which sequence of a packed batch (for consumers only where NUMBERED)
    live: gl.tensor | gl.constexpr  # is there anything to do?

    @constexpr_function
    def __init__(self, block, batch, head, seq_q, seq_k, shift, first_q, first_k, sequence, live):
        self.block, self.batch, self.head = block, field(batch), head
        self.seq_q, self.seq_k, self.shift = seq_q, seq_k, shift
        self.first_q, self.first_k = field(first_q), field(first_k)
        self.sequence, self.live = sequence, field(live)


@aggregate
class WorkCounter:
    """Hands out `items` work tiles by number.  place [1] int32, 0 before the launch and after it."""

    address: gl.tensor
    items: gl.tensor

    @constexpr_function
    def __init__(self, address, items):
        self.address, self.items = address, items

    @jit
    def draw(self):
        """Draw a number.  It arrives later, in one thread of the warp; `drawn` waits for it."""
        return draw_work(self.address)

    @jit
    def drawn(self, number, programs):
        """The work tile of a number.  The first ones of the `programs` programs are not drawn."""
        return programs + read_work(number)

    @jit
    def end(self, item, programs):
        """A number was drawn for every work tile, live or not, once.  Who drew the last one sets the counter back."""
        if item == programs + self.items - 1:
            gl.store(self.address, 0)


@jit
def block_of_item(item, q_blocks, heads):
    """-> query tile, batch entry, head: the last query tiles of a head come first."""
    block, batch, head = place_of_item(item, q_blocks, heads)
    return q_blocks - 1 - block, batch, head


@jit
def sequence_of_place(CuQ, place, batch, ROWS: gl.constexpr):
    """-> sequence, query tile in it: of `place` among the total // ROWS + batch places of a packed batch.

    Sequence b begins at place CuQ[b] // ROWS + b and has at least as many places as query tiles, whatever the offsets; nobody
    counts tiles.  Places behind its last tile, or before the first sequence, hold no work."""
    low = place - place
    high = low + batch
    while high - low > 1:
        middle = (low + high) // 2
        before = gl.load(CuQ + middle) // ROWS + middle <= place
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle)
    return low, place - gl.load(CuQ + low) // ROWS - low


@aggregate
class OverflowFlags:
    """LAZY: how the last TILES query tiles came out, and whether the present one is folded with its maxima checked.

    Consumers write the flags of query tile i at its end.  The producer reads them before it posts tile i + TILES: its slot of Q
    was released by every consumer, which all had ended tile i.  It has a tile that overflowed folded again next, checked, over
    what it stored.  Only that tile: which tiles share a program varies between runs, and bits must not.  Behind the last tile the
    producer posts IDLE until every flag has come.  An IDLE tile writes none; what lies in its place was just found to be 0.

    TILES: one more than Q has tiles.  flags [TILES * CONSUMERS, 4]: of each consumer's warps, item + 1 if the tile has to be
    folded again, else 0.  checked [TILES - 1, 1]: more than 0 if so."""

    flags: gl.shared_memory_descriptor | gl.constexpr
    checked: gl.shared_memory_descriptor | gl.constexpr
    CONSUMERS: gl.constexpr
    LAZY: gl.constexpr
    TILES: gl.constexpr

    @constexpr_function
    def __init__(self, flags, checked, CONSUMERS, LAZY, TILES=2):
        self.flags, self.checked = field(flags), field(checked)
        self.CONSUMERS, self.LAZY, self.TILES = gl.constexpr(CONSUMERS), gl.constexpr(LAZY), gl.constexpr(TILES)

    @jit
    def write(self, i, CID: gl.constexpr, rows):
        """Of query tile i: rows [64] int32, each warp its own 16."""
        self.flags.index(i % self.TILES * self.CONSUMERS + CID).store(gl.max(rows.reshape([4, 16]), 1))

    @jit
    def read(self, i):
        """Item + 1 of query tile i - TILES if it has to be folded again, else 0."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        first = i % self.TILES * self.CONSUMERS
        found = self.flags.index(first).load(LAYOUT)
        for c in gl.static_range(self.CONSUMERS - 1):
            found = gl.maximum(found, self.flags.index(first + c + 1).load(LAYOUT))
        return gl.max(found, 0)

    @jit
    def set_checked(self, again, i):
        """Of query tile i: was it folded before?"""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self._checked(i).store(gl.full([1], again, gl.int32, LAYOUT))

    @jit
    def is_checked(self, i):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.sum(self._checked(i).load(LAYOUT), 0) > 0

    @jit
    def _checked(self, i):
        if self.TILES == 2:
            return self.checked
        else:
            return self.checked.index(i & 1)


@aggregate
class TileScheduler:
    """Work tiles by number: q_blocks for each (batch entry, head) or, packed, for each head.

    NUMBERED: consumers of a packed batch ask which sequence it is.  PREFETCH: the mailbox holds two work tiles."""

    problem: Problem
    counter: WorkCounter
    mailbox: gl.shared_memory_descriptor
    overflow: OverflowFlags
    q_blocks: gl.tensor
    ROWS: gl.constexpr
    VARLEN: gl.constexpr
    NUMBERED: gl.constexpr
    PREFETCH: gl.constexpr

    @constexpr_function
    def __init__(self, problem, counter, mailbox, overflow, q_blocks, ROWS, VARLEN, NUMBERED, PREFETCH=False):
        self.problem, self.counter, self.mailbox = problem, counter, mailbox
        self.overflow, self.q_blocks = overflow, q_blocks
        self.ROWS, self.VARLEN, self.NUMBERED = gl.constexpr(ROWS), gl.constexpr(VARLEN), gl.constexpr(NUMBERED)
        self.PREFETCH = gl.constexpr(PREFETCH)

    @jit
    def locate(self, item):
        """The work tile, for the producer."""
        seq_q, seq_k, heads = self.problem.seq_q, self.problem.seq_k, self.problem.heads
        if self.VARLEN:
            CuQ, CuK = self.problem.CuQ, self.problem.CuK
            head = item // self.q_blocks
            place = self.q_blocks - 1 - (item - head * self.q_blocks)
            sequence, block = sequence_of_place(CuQ, place, self.problem.batch, self.ROWS)
            first_q, first_k = gl.load(CuQ + sequence), gl.load(CuK + sequence)
            n_q = gl.load(CuQ + sequence + 1) - first_q
            n_k = gl.load(CuK + sequence + 1) - first_k
            live = (block >= 0) & (block * self.ROWS < n_q)
            return WorkTile(block, item - item, head, n_q, n_k, n_k - n_q, first_q, first_k, sequence, live)
        else:
            block, batch, head = block_of_item(item, self.q_blocks, heads)
            return WorkTile(block, batch, head, seq_q, seq_k, seq_k - seq_q, 0, 0, batch, True)

    @jit
    def post(self, item, work, i):
        """Tell the consumers what to fold as the i-th query tile; of a packed batch they cannot locate it themselves."""
        self._put(0, item, i)
        if self.VARLEN:
            self._put(1, work.block, i)
            self._put(2, work.seq_q, i)
            self._put(3, work.seq_k, i)
            self._put(4, work.first_q, i)
            if self.NUMBERED:
                self._put(5, work.sequence, i)
        thread_barrier()  # one thread of the warp signals what all of them wrote

    @jit
    def post_none(self, reason, i):
        """LEAVE or IDLE instead of a work tile."""
        self._put(0, reason, i)
        if self.VARLEN:
            for field in gl.static_range(5 if self.NUMBERED else 4):
                self._put(field + 1, 0, i)
        thread_barrier()

    @jit
    def item(self, i):
        """The number that was posted as the i-th."""
        return self._get(0, i)

    @jit
    def work(self, item, i):
        """The work tile that was posted as the i-th, for a consumer."""
        seq_q, seq_k, heads = self.problem.seq_q, self.problem.seq_k, self.problem.heads
        if self.VARLEN:
            n_q, n_k, first_q = self._get(2, i), self._get(3, i), self._get(4, i)
            sequence = self._get(5, i) if self.NUMBERED else item
            block, head = self._get(1, i), item // self.q_blocks
            return WorkTile(block, item - item, head, n_q, n_k, n_k - n_q, first_q, 0, sequence, True)
        else:
            block, batch, head = block_of_item(item, self.q_blocks, heads)
            return WorkTile(block, batch, head, seq_q, seq_k, seq_k - seq_q, 0, 0, batch, True)

    @jit
    def _put(self, FIELD: gl.constexpr, value, i):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self._field(FIELD, i).store(gl.full([1], value, gl.int32, LAYOUT))

    @jit
    def _get(self, FIELD: gl.constexpr, i):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.sum(self._field(FIELD, i).load(LAYOUT), 0)

    @jit
    def _field(self, FIELD: gl.constexpr, i):
        if self.PREFETCH:
            return self.mailbox.index((i & 1) * fields_of(self.VARLEN, self.NUMBERED) + FIELD)
        elif self.VARLEN:
            return self.mailbox.index(FIELD)
        else:
            return self.mailbox


@constexpr_function
def fields_of(VARLEN, NUMBERED):
    """Numbers by which a work tile is posted."""
    return (6 if NUMBERED else 5) if VARLEN else 1


@jit
def make_mailbox(VARLEN: gl.constexpr, NUMBERED: gl.constexpr, PREFETCH: gl.constexpr = False):
    """Room for what `TileScheduler.post` writes, of one work tile or of two."""
    FIELDS: gl.constexpr = fields_of(VARLEN, NUMBERED)
    SHAPE: gl.constexpr = [2 * FIELDS, 1] if PREFETCH else [FIELDS, 1] if VARLEN else [1]
    return gl.allocate_shared_memory(gl.int32, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@jit
def make_overflow_flags(CONSUMERS: gl.constexpr, LAZY: gl.constexpr, PREFETCH: gl.constexpr = False):
    """Flags that are all 0; none without LAZY."""
    TILES: gl.constexpr = 3 if PREFETCH else 2
    if not LAZY:
        return OverflowFlags(None, None, CONSUMERS, False)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        flags = gl.allocate_shared_memory(gl.int32, [TILES * CONSUMERS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        for c in gl.static_range(TILES * CONSUMERS):
            flags.index(c).store(gl.zeros([4], gl.int32, LAYOUT))
        if PREFETCH:
            checked = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            for parity in gl.static_range(2):
                checked.index(parity).store(gl.zeros([1], gl.int32, LAYOUT))
        else:
            checked = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            checked.store(gl.zeros([1], gl.int32, LAYOUT))
        return OverflowFlags(flags, checked, CONSUMERS, True, TILES)

"""The KV blocks that a list names for each query tile, and the scheduler that goes with them.

A unit is one listed block of UNIT keys, or two of half as many, the second beside the first in shared memory.  Blocks that are
missing to fill the units are missing from the first, which is always masked.
"""

from .config import Problem
from .gluon import aggregate, constexpr_function, gl, jit, thread_barrier
from .parts import entry, list_of_item, place_of_item
from .scheduler import WorkCounter, WorkTile

UNIT = gl.constexpr(128)  # keys a step


@aggregate
class TileList:
    """The list of one query tile: `count` entries, in `units` units of which the first lacks `missing` blocks.

    sizes: where this head's block sizes begin, looked at if SIZED.  Without MASKED every block is whole."""

    index: gl.tensor
    count: gl.tensor
    units: gl.tensor
    missing: gl.tensor
    sizes: gl.tensor
    seq_k: gl.tensor
    KV_BLOCK: gl.constexpr
    MASKED: gl.constexpr
    SIZED: gl.constexpr

    @constexpr_function
    def __init__(self, index, count, units, missing, sizes, seq_k, KV_BLOCK, MASKED, SIZED):
        self.index, self.count, self.units, self.missing = index, count, units, missing
        self.sizes, self.seq_k, self.KV_BLOCK = sizes, seq_k, gl.constexpr(KV_BLOCK)
        self.MASKED, self.SIZED = gl.constexpr(MASKED), gl.constexpr(SIZED)

    @jit
    def blocks(self, unit):
        """-> the unit's two blocks, the same one twice where a unit is one; -1 for what is missing."""
        PER: gl.constexpr = UNIT // self.KV_BLOCK
        first = entry(self.index, unit * PER - self.missing, self.count)
        if PER == 1:
            return first, first
        else:
            return first, entry(self.index, unit * PER + 1 - self.missing, self.count)

    @jit
    def row(self, block):
        """Of the block's first key; past the end for one that is missing, where TMA gives zeros."""
        return gl.where(block >= 0, block * self.KV_BLOCK, self.seq_k)

    @jit
    def first_live(self, i):
        """Valid keys of block i of the first unit."""
        if self.MASKED:
            return self._live(entry(self.index, i - self.missing, self.count))
        else:
            return gl.where((i - self.missing >= 0) & (i - self.missing < self.count), self.KV_BLOCK, 0)

    @jit
    def lives(self, block_0, block_1):
        """Valid keys of a unit's blocks, 8 bits each."""
        if self.KV_BLOCK == UNIT:
            return self._live(block_0)
        else:
            return self._live(block_0) + 256 * self._live(block_1)

    @jit
    def _live(self, block):
        live = gl.minimum(gl.where(block >= 0, self.KV_BLOCK, 0), self.seq_k - block * self.KV_BLOCK)
        if self.SIZED:
            live = gl.minimum(live, gl.load(self.sizes + gl.maximum(block, 0)))
        return live


@aggregate
class BlockLists:
    """Index [B, H, Qb, cap] and Count [B, H, Qb]; Sizes [B, H, KVb] if SIZED, QuerySizes [B, H, Qb] if Q_SIZED: by strides."""

    Index: gl.tensor
    Count: gl.tensor
    strides: gl.tuple  # of Index: batch entry, head, query tile; of Count: batch entry, head
    Sizes: gl.tensor
    QuerySizes: gl.tensor
    size_strides: gl.tuple  # of Sizes and of QuerySizes: batch entry, head
    KV_BLOCK: gl.constexpr
    MASKED: gl.constexpr
    SIZED: gl.constexpr
    Q_SIZED: gl.constexpr

    @constexpr_function
    def __init__(self, Index, Count, strides, Sizes, QuerySizes, size_strides, KV_BLOCK, MASKED, SIZED, Q_SIZED):
        self.Index, self.Count, self.strides = Index, Count, strides
        self.Sizes, self.QuerySizes, self.size_strides = Sizes, QuerySizes, size_strides
        self.KV_BLOCK, self.MASKED = gl.constexpr(KV_BLOCK), gl.constexpr(MASKED)
        self.SIZED, self.Q_SIZED = gl.constexpr(SIZED), gl.constexpr(Q_SIZED)

    @jit
    def count(self, work):
        """How many blocks the work tile's list names."""
        begin = self.Count + work.batch.to(gl.int64) * self.strides[3] + work.head.to(gl.int64) * self.strides[4]
        return gl.load(begin + work.block)

    @jit
    def of(self, work, count):
        """The work tile's list."""
        PER: gl.constexpr = UNIT // self.KV_BLOCK
        lists = (self.Index, self.Count, self.strides[0], self.strides[1], self.strides[2])
        index = list_of_item(lists, work.block, work.batch, work.head)
        units = gl.maximum((count + PER - 1) // PER, 1)
        missing = units * PER - count
        b, h = work.batch.to(gl.int64), work.head.to(gl.int64)
        sizes = self.Sizes + b * self.size_strides[0] + h * self.size_strides[1]
        return TileList(index, count, units, missing, sizes, work.seq_k, self.KV_BLOCK, self.MASKED, self.SIZED)

    @jit
    def live_queries(self, work, rows, CID: gl.constexpr):
        """How many of consumer CID's rows are real queries; rows: how many the sequence has."""
        live = rows
        if self.Q_SIZED:
            b, h = work.batch.to(gl.int64), work.head.to(gl.int64)
            place = b * self.size_strides[2] + h * self.size_strides[3] + work.block
            live = gl.minimum(rows, gl.load(self.QuerySizes + place) - CID * 64)
        return live


@aggregate
class ListScheduler:
    """Work tiles by number, query tiles fastest: neighbours, whose lists often agree, share K and V in L2.

    Its mailbox holds the number and the list's count."""

    problem: Problem
    counter: WorkCounter
    mailbox: gl.shared_memory_descriptor
    q_blocks: gl.tensor

    @constexpr_function
    def __init__(self, problem, counter, mailbox, q_blocks):
        self.problem, self.counter, self.mailbox, self.q_blocks = problem, counter, mailbox, q_blocks

    @jit
    def work(self, item):
        """The work tile."""
        seq_q, seq_k = self.problem.seq_q, self.problem.seq_k
        block, batch, head = place_of_item(item, self.q_blocks, self.problem.heads)
        return WorkTile(block, batch, head, seq_q, seq_k, seq_k - seq_q, 0, 0, batch, True)

    @jit
    def post(self, item, count):
        """Tell the consumers what to fold next; item -1: nothing."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
        self.mailbox.store(gl.where(gl.arange(0, 2, layout=LAYOUT) == 0, item, count))
        thread_barrier()  # one thread of the warp signals what all of them wrote

    @jit
    def read(self):
        """-> item, count"""
        LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
        pair = self.mailbox.load(LAYOUT)
        first = gl.arange(0, 2, layout=LAYOUT) == 0
        return gl.sum(gl.where(first, pair, 0), 0), gl.sum(gl.where(first, 0, pair), 0)

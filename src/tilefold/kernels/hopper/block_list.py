"""The KV blocks that a list names for each query tile, where they lie, and the scheduler that goes with them.

A unit is one listed block of UNIT keys, or two of half as many, the second beside the first in shared memory.  Blocks that are
missing to fill the units are missing from the first, which is always masked.

A block's keys lie together in one tensor, in that of a packed batch behind the sequence's first key, or in pages: a block is then
brought by one TMA box, or by one for each page of fewer keys.
"""

from .config import Problem
from .gluon import constexpr_function, gl, jit, mbarrier, opaque, reinterpret, thread_barrier, tma_load
from .parts import columns_of, cut_columns, entry, list_of_item, place_of_item
from .pipeline import swizzled
from .scheduler import WorkCounter, WorkTile, sequence_of_place
from .structs import Buffer, Value, struct

UNIT = gl.constexpr(128)  # keys a step
OUTSIDE = gl.constexpr(1 << 30)  # a row of no tensor: TMA gives zeros
POSTED = gl.constexpr(6)  # what consumers are told of a work tile that they cannot locate themselves


@struct
class Pages:
    """Key j of sequence b is row j % PAGE of page Table[b, j // PAGE], for j < Lengths[b] (int32).  PAGE 0: there are none."""

    Table: Value
    Lengths: Value
    stride: Value
    PAGE: gl.constexpr


@struct
class TileList:
    """The list of one query tile: `count` entries, in `units` units of which the first lacks `missing` blocks.

    sizes: where this head's block sizes begin, looked at if SIZED.  Without MASKED every block is whole.  table: where the
    sequence's page numbers begin, if there are PAGEs.  EDGE: keys end at the sequence's own length, which blocks may lie past.
    CAUSAL, with MASKED: query i sees keys up to i + work.shift."""

    index: gl.tensor
    count: gl.tensor
    units: gl.tensor
    missing: gl.tensor
    sizes: gl.tensor
    table: Value
    work: WorkTile
    KV_BLOCK: gl.constexpr
    MASKED: gl.constexpr
    SIZED: gl.constexpr
    CAUSAL: gl.constexpr
    EDGE: gl.constexpr
    PAGE: gl.constexpr

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
    def begin(self):
        """What is looked up ahead of unit 0, see `take`."""
        if self.PAGE == 0:
            return self.blocks(0)
        else:
            return self._boxes(self._lanes(0)), self._lanes(1)

    @jit
    def take(self, ahead, unit):
        """-> where the unit's blocks lie, for `load`, and what is looked up ahead of the next one: answers take their time.

        Blocks are looked up a unit ahead; with pages two, and their pages one."""
        if self.PAGE == 0:
            return (self._row(ahead[0]), self._row(ahead[1])), self.blocks(unit + 1)
        else:
            return (ahead[0],), (self._boxes(ahead[1]), self._lanes(unit + 2))

    @jit
    def load(self, ring, stage, head, places):
        """Issue the TMA loads of a unit's blocks.  What is missing, or lies past the sequence's pages, is zeros."""
        if self.PAGE == 0:
            ring.load_blocks(stage, self.work.batch, head, places[0], places[1])
        else:
            BOX: gl.constexpr = min(self.PAGE, self.KV_BLOCK)
            BOXES: gl.constexpr = UNIT // BOX
            PANELS: gl.constexpr = ring.DIM // 64
            dtype: gl.constexpr = ring.panels[0].dtype
            tiles = reinterpret(ring.panels[0], dtype, [ring.SLOTS * PANELS * BOXES, BOX, 64], swizzled(64, dtype))
            bar = ring.full.index(stage.slot)
            mbarrier.expect(bar, UNIT * ring.DIM * 2)
            for i in gl.static_range(BOXES):
                page, row = self._place(places[0], i)
                for p in gl.static_range(PANELS):
                    tile = tiles.index((stage.slot * PANELS + p) * BOXES + i)
                    tma_load(ring.desc, [page, head, row, p * 64], bar, tile)

    @jit
    def _row(self, block):
        """Of the block's first key; past the end for one that is missing, where TMA gives zeros."""
        outside = OUTSIDE if self.EDGE else self.work.seq_k
        return gl.where(block >= 0, self.work.first_k + block * self.KV_BLOCK, outside)

    @jit
    def _lanes(self, unit):
        """Each lane's block of a unit: lane i is of the unit's i-th box.  -1 for what is missing."""
        BOX: gl.constexpr = min(self.PAGE, self.KV_BLOCK)
        lane = lane_numbers()
        i = unit * (UNIT // self.KV_BLOCK) - self.missing + lane // (self.KV_BLOCK // BOX)
        return gl.load(self.index + i, mask=(i >= 0) & (i < self.count) & (lane < UNIT // BOX), other=-1)

    @jit
    def _boxes(self, blocks):
        """The number, in steps of boxes, of the place where each lane's box begins.  -1 for what is missing, or past the end."""
        BOX: gl.constexpr = min(self.PAGE, self.KV_BLOCK)
        first = blocks * self.KV_BLOCK + lane_numbers() % (self.KV_BLOCK // BOX) * BOX
        live = (blocks >= 0) & (first < self.work.seq_k)  # the table says nothing of pages past the end
        page = gl.load(self.table + first // self.PAGE, mask=live, other=-1)
        return gl.where(live, page * (self.PAGE // BOX) + first % self.PAGE // BOX, -1)

    @jit
    def _place(self, boxes, i: gl.constexpr):
        """-> page and row of the unit's i-th box; page -1 is outside of every tensor."""
        PER: gl.constexpr = max(self.PAGE // self.KV_BLOCK, 1)  # boxes of a page, a power of two
        number = gl.max(gl.where(lane_numbers() == i, boxes, -1), 0)
        if PER == 1:
            return number, 0
        else:
            return number >> (PER.bit_length() - 1), (number & (PER - 1)) * self.KV_BLOCK

    @jit
    def first_live(self, i):
        """Valid keys of block i of the first unit."""
        if self.MASKED:
            return self._live(entry(self.index, i - self.missing, self.count))
        else:
            return gl.where((i - self.missing >= 0) & (i - self.missing < self.count), self.KV_BLOCK, 0)

    @jit
    def lives(self, block_0, block_1, row):
        """Valid keys of a unit's blocks, 8 bits each.  CAUSAL: and in 8 more each, plus 63, how many keys of it the query at
        `row` sees: fewer than none where only queries behind it see some."""
        if self.KV_BLOCK == UNIT:
            found = self._live(block_0)
        else:
            found = self._live(block_0) + 256 * self._live(block_1)
        if self.CAUSAL:
            found += self._seen(block_0, row) << 16
            if self.KV_BLOCK < UNIT:
                found += self._seen(block_1, row) << 24
        return found

    @jit
    def _seen(self, block, row):
        seen = row + 1 + self.work.shift - block * self.KV_BLOCK
        return gl.minimum(gl.maximum(seen, -63), self.KV_BLOCK) + 63

    @jit
    def _live(self, block):
        live = gl.minimum(gl.where(block >= 0, self.KV_BLOCK, 0), self.work.seq_k - block * self.KV_BLOCK)
        if self.EDGE:
            live = gl.maximum(live, 0)
        if self.SIZED:
            live = gl.minimum(live, gl.load(self.sizes + gl.maximum(block, 0)))
        return live


@struct
class BlockLists:
    """Index [B, H, Qb, cap] and Count [B, H, Qb]; Sizes [B, H, KVb] if SIZED, QuerySizes [B, H, Qb] if Q_SIZED: by strides."""

    Index: gl.tensor
    Count: gl.tensor
    strides: gl.tuple  # of Index: batch entry, head, query tile; of Count: batch entry, head
    Sizes: gl.tensor
    QuerySizes: gl.tensor
    size_strides: gl.tuple  # of Sizes and of QuerySizes: batch entry, head
    pages: Pages
    KV_BLOCK: gl.constexpr
    MASKED: gl.constexpr
    SIZED: gl.constexpr
    Q_SIZED: gl.constexpr
    CAUSAL: gl.constexpr
    EDGE: gl.constexpr

    @jit
    def count(self, work):
        """How many blocks the work tile's list names; a place of a packed batch that holds no work has no list."""
        begin = self.Count + work.sequence.to(gl.int64) * self.strides[3] + work.head.to(gl.int64) * self.strides[4]
        if self.EDGE and self.pages.PAGE == 0:
            return gl.load(begin + work.block, mask=work.live, other=0)
        else:
            return gl.load(begin + work.block)

    @jit
    def of(self, work, count):
        """The work tile's list."""
        PER: gl.constexpr = UNIT // self.KV_BLOCK
        lists = (self.Index, self.Count, self.strides[0], self.strides[1], self.strides[2])
        index = list_of_item(lists, work.block, work.sequence, work.head)
        units = gl.maximum((count + PER - 1) // PER, 1)
        missing = units * PER - count
        b, h = work.sequence.to(gl.int64), work.head.to(gl.int64)
        sizes = self.Sizes + b * self.size_strides[0] + h * self.size_strides[1]
        table = None if self.pages.PAGE == 0 else self.pages.Table + b * self.pages.stride
        return TileList(index, count, units, missing, sizes, table, work, self.KV_BLOCK, self.MASKED, self.SIZED, self.CAUSAL,
                        self.EDGE, self.pages.PAGE)  # fmt: skip

    @jit
    def live_queries(self, work, rows, CID: gl.constexpr):
        """How many of consumer CID's rows are real queries; rows: how many the sequence has."""
        live = rows
        if self.Q_SIZED:
            b, h = work.sequence.to(gl.int64), work.head.to(gl.int64)
            place = b * self.size_strides[2] + h * self.size_strides[3] + work.block
            live = gl.minimum(rows, gl.load(self.QuerySizes + place) - CID * 64)
        return live


@struct
class ListScheduler:
    """Work tiles by number, query tiles fastest: neighbours, whose lists often agree, share K and V in L2.

    q_blocks for each (batch entry, head) or, packed, for each head: see `sequence_of_place`, ROWS being a query tile's.
    Its mailbox holds the number and the list's count; `facts` the work tile, where keys end is known on the device alone."""

    problem: Problem
    counter: WorkCounter
    mailbox: gl.shared_memory_descriptor
    facts: Buffer
    q_blocks: gl.tensor
    pages: Pages
    ROWS: gl.constexpr

    @jit
    def locate(self, item):
        """The work tile, for the producer."""
        seq_q, seq_k = self.problem.seq_q, self.problem.seq_k
        if self.problem.CuQ is not None:
            CuQ, CuK = self.problem.CuQ, self.problem.CuK
            head = item // self.q_blocks
            sequence, block = sequence_of_place(CuQ, item - head * self.q_blocks, self.problem.batch, self.ROWS)
            first_q, first_k = gl.load(CuQ + sequence), gl.load(CuK + sequence)
            n_q = gl.minimum(gl.load(CuQ + sequence + 1) - first_q, seq_q)  # there are no lists of later rows
            n_k = gl.load(CuK + sequence + 1) - first_k
            live = (block >= 0) & (block * self.ROWS < n_q)
            return WorkTile(block, item - item, head, n_q, n_k, n_k - n_q, first_q, first_k, sequence, live)
        else:
            block, batch, head = place_of_item(item, self.q_blocks, self.problem.heads)
            if self.pages.PAGE > 0:
                seq_k = gl.minimum(gl.load(self.pages.Lengths + batch), seq_k)
            return WorkTile(block, batch, head, seq_q, seq_k, seq_k - seq_q, 0, 0, batch, True)

    @jit
    def work(self, item):
        """The work tile that was posted, for a consumer."""
        if self.facts is None:
            return self.locate(item)
        else:
            block, sequence, head = self._fact(0), self._fact(1), self._fact(2)
            seq_q, seq_k, first_q = self._fact(3), self._fact(4), self._fact(5)
            return WorkTile(block, sequence, head, seq_q, seq_k, seq_k - seq_q, first_q, 0, sequence, True)

    @jit
    def post(self, item, count, work):
        """Tell the consumers what to fold next."""
        if self.facts is not None:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            facts = (work.block, work.sequence, work.head, work.seq_q, work.seq_k, work.first_q)
            for i in gl.static_range(POSTED):
                self.facts.index(i).store(gl.full([1], facts[i], gl.int32, LAYOUT))
        self._post(item, count)

    @jit
    def post_end(self):
        """Tell the consumers that there is no more: item -1."""
        self._post(-1, 0)

    @jit
    def _post(self, item, count):
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

    @jit
    def _fact(self, i: gl.constexpr):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.sum(self.facts.index(i).load(LAYOUT), 0)


@jit
def lane_numbers():
    """0 to 31, one in each lane of the producer's warp."""
    return gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@constexpr_function
def whole_of(KV_BLOCK, CAUSAL):
    """What `TileList.lives` says of a unit of which nothing is cut off."""
    blocks = UNIT // KV_BLOCK
    return sum((KV_BLOCK << 8 * i) + ((KV_BLOCK + 63) << 8 * i + 16) * CAUSAL for i in range(blocks))


@jit
def cut_unit(s, lives, lists):
    """Scores [64, UNIT] with -inf where a key is not valid, or its row's query does not see it."""
    if lists.CAUSAL:
        return _cut_causal(s, lives, lists.KV_BLOCK)
    else:
        return cut_columns(s, lives & 255, lives >> 8, lists.KV_BLOCK)


@jit
def clear_unit(ring, stage, lives, lists):
    """Zero V's rows of keys that are not valid, when the unit has come: 0 * NaN is NaN."""
    WHOLE: gl.constexpr = whole_of(lists.KV_BLOCK, False)
    if lists.CAUSAL:
        lives = lives & 65535
    if lives != WHOLE:
        ring.wait(stage)
        ring.clear_blocks(stage, lives & 255, lives >> 8)


@jit
def _cut_causal(s, lives, KV_BLOCK: gl.constexpr):
    parts = s.reshape([64, UNIT // 8, 4, 2])
    LAYOUT: gl.constexpr = parts.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    group, rest = columns_of(parts)
    row = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 64, layout=ROW), 1), 2), 3) - 63
    end_0 = gl.minimum(row + (lives >> 16 & 255), lives & 255)
    if KV_BLOCK == UNIT:
        live = group * 8 < opaque(end_0 - rest)
    else:
        end_1 = gl.minimum(row + (lives >> 24 & 255), lives >> 8 & 255) + KV_BLOCK
        live = gl.where(group * 8 < KV_BLOCK, group * 8 < opaque(end_0 - rest), group * 8 < opaque(end_1 - rest))
    return gl.convert_layout(gl.where(live, parts, float("-inf")).reshape(s.shape), s.type.layout)

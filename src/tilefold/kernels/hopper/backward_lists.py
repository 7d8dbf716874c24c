"""What lists of blocks say to the backward pass: which tiles meet, which tokens are live, where dS of a pair lies."""

from .backward_config import UNIT, BackwardConfig
from .backward_mask import Lengths
from .backward_scheduler import BackwardTile, Counters, Drawn, work_of_number
from .ds_ring import DsTiles
from .gluon import gl, jit
from .parts import list_of_item, place_of_item
from .structs import Value, struct


@struct
class ListScheduler:
    """A segment is heads_at_once KV heads; with spans, one span of their queries, the first span first.

    spans, span_tiles: how many, and query tiles of each, of which the last may have some behind the last query; or None."""

    counters: Counters
    lengths: Lengths
    heads: gl.tensor
    group: gl.tensor
    heads_at_once: gl.tensor
    delay: gl.tensor
    slots: gl.tensor
    no_tile: gl.tensor
    spans: Value
    span_tiles: Value

    @jit
    def kv_tiles(self):
        return self.heads_at_once * self.lengths.kv_tiles

    @jit
    def head_tiles(self):
        """Query tiles that a head has in a segment."""
        return self.lengths.q_tiles if self.spans is None else self.span_tiles

    @jit
    def query_tiles(self):
        return self.heads_at_once * self.group * self.head_tiles()

    @jit
    def span_of(self, segment):
        """-> the number of the segment's heads, and its span."""
        if self.spans is None:
            return segment, 0
        else:
            heads = segment // self.spans
            return heads, segment - heads * self.spans

    @jit
    def locate(self, number):
        """Which kind of work tile a number is, its segment, its number there."""
        keys, segment, i = work_of_number(
            number, self.kv_tiles(), self.query_tiles(), self.counters.segments, self.delay
        )
        return Drawn(keys, True, (segment, i))

    @jit
    def kv_tile(self, drawn):
        segment, i = drawn.of
        of_heads, span = self.span_of(segment)
        tile, batch, head = place_of_item(
            of_heads * self.kv_tiles() + i, self.lengths.kv_tiles, self.heads // self.group
        )
        return BackwardTile(tile, batch, head, self.lengths, segment, segment - self.slots, self.query_tiles(), i, span)

    @jit
    def query_tile(self, drawn):
        segment, i = drawn.of
        of_heads, span = self.span_of(segment)
        tile, batch, head = place_of_item(of_heads * self.query_tiles() + i, self.head_tiles(), self.heads)
        if self.spans is not None:
            tile += span * self.span_tiles
        return BackwardTile(tile, batch, head, self.lengths, segment, segment - self.slots, self.kv_tiles(), i, span)

    @jit
    def keys_of(self, work, lists):
        """The list of a query tile, as of Lists.of; a tile behind the last query has none."""
        if self.spans is None:
            return lists.of(work.tile, work.batch, work.head)
        else:
            last = self.lengths.q_tiles - 1
            index, count = lists.of(gl.minimum(work.tile, last), work.batch, work.head)
            return index, gl.where(work.tile > last, 0, count)


@struct
class Lists:
    """Index [B, H, blocks, cap] and Count [B, H, blocks]; strides: (batch, head, block) of one, (batch, head) of the other.

    Blocks have TILES tiles of 64 tokens, those that are listed LISTED."""

    Index: gl.tensor
    Count: gl.tensor
    strides: gl.tuple
    TILES: gl.constexpr
    LISTED: gl.constexpr

    @jit
    def of(self, tile, batch, head):
        """-> where the list of a tile's block begins, and its count."""
        block = tile // self.TILES
        begin = self.Count + batch.to(gl.int64) * self.strides[3] + head.to(gl.int64) * self.strides[4]
        return self.begin(self.Index, block, batch, head), gl.load(begin + block)

    @jit
    def begin(self, place, block, batch, head):
        """Where the block's list begins in numbers that lie as Index does."""
        return list_of_item((place, place, self.strides[0], self.strides[1], self.strides[2]), block, batch, head)


@struct
class Spans:
    """Of queries, where there are several: number, how many; else None, and so is the rest.

    Edges [number + 1, B, H, KV blocks] by strides of the first three: how many entries of each transposed list come before each
    span.  Sums [KV tiles of a segment, 2, 64, D] fp32: dk and dv between two spans."""

    number: Value
    Edges: Value
    span: Value
    batch: Value
    head: Value
    Sums: Value
    config: BackwardConfig

    @jit
    def cut(self, work, block, head, count):
        """-> the first entry of the work tile's span in the list of a KV block, and how many of `count` it has; of none, 0."""
        if self.number is None:
            return 0, count
        else:
            place = (
                self.Edges + work.split.to(gl.int64) * self.span + work.batch * self.batch + head * self.head + block
            )
            first = gl.load(place)
            count = gl.load(place + self.span) - first
            return gl.where(count > 0, first, 0), count

    @jit
    def add(self, WHICH: gl.constexpr, acc, work):
        """acc, of dk (WHICH = 0) or dv (1) of a KV tile, and what the spans before left.  It is left for the next span."""
        LAYOUT: gl.constexpr = self.config.OUT
        D: gl.constexpr = self.config.D
        o_r = gl.expand_dims(gl.arange(0, UNIT, layout=gl.SliceLayout(1, LAYOUT)), 1)
        o_d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT)), 0)
        place = self.Sums + (work.local * 2 + WHICH).to(gl.int64) * (UNIT * D) + (o_r * D + o_d)
        acc += gl.load(place, mask=(o_r + o_d >= 0) & (work.split > 0), other=0.0)
        gl.store(place, acc, mask=(o_r + o_d >= 0) & (work.split < self.number - 1))
        return acc


@struct
class BlockSizes:
    """Sizes [B, H, KV blocks] if SIZED, QuerySizes [B, H, query blocks] if Q_SIZED, by strides (batch, head) of each.  MASKED:
    some key of a block is not live."""

    Sizes: gl.tensor
    QuerySizes: gl.tensor
    strides: gl.tuple
    MASKED: gl.constexpr
    SIZED: gl.constexpr
    Q_SIZED: gl.constexpr

    @jit
    def of_keys(self, batch, head):
        return self.Sizes + batch.to(gl.int64) * self.strides[0] + head.to(gl.int64) * self.strides[1]

    @jit
    def live_keys(self, work, head, block, part):
        """Valid keys of a KV tile, part `part` of a block."""
        live = work.lengths.seq_k - work.tile * UNIT
        if self.SIZED:
            size = gl.load(self.of_keys(work.batch, head) + block)
            live = gl.minimum(live, size - part * UNIT)
        return live

    @jit
    def live_queries(self, batch, head, index, j, count, Q_TILES: gl.constexpr):
        """Valid queries of the j-th query tile of a list."""
        live = UNIT
        if self.Q_SIZED:
            begin = self.QuerySizes + batch.to(gl.int64) * self.strides[2] + head.to(gl.int64) * self.strides[3]
            block = gl.load(index + gl.minimum(j // Q_TILES, gl.maximum(count - 1, 0)), mask=count > 0, other=0)
            live = gl.load(begin + block) - j % Q_TILES * UNIT
        return live


@struct
class ListDsRing:
    """`slots` slots of slot_rows rows, each for head_tiles query tiles of some heads.  A query tile's dS lies as its list names
    the KV tiles: a row of `capacity` blocks.

    Places: of each entry of the transposed lists, the place of the pair in its head's slot, in blocks (kernels.list_places)."""

    tiles: DsTiles
    Places: gl.tensor
    slots: gl.tensor
    slot_rows: gl.tensor
    head_tiles: gl.tensor
    capacity: gl.tensor
    Q_TILES: gl.constexpr
    KV_TILES: gl.constexpr

    @jit
    def slot(self, work):
        """The first row of the segment's slot."""
        return work.segment % self.slots * self.slot_rows

    @jit
    def of_queries(self, work):
        """The row of a query tile's first dS."""
        return self.slot(work) + work.local * (self.capacity * self.KV_TILES * UNIT)

    @jit
    def of_keys(self, slot, work, head, part):
        """Where a head of the segment begins for part `part` of a KV block."""
        return slot + head * (self.head_tiles * self.capacity * self.KV_TILES * UNIT) + part * UNIT

    @jit
    def row(self, begin, places, j, count):
        """Of the j-th query tile of a KV tile's list.  Those that stand for an empty list publish nothing."""
        place = gl.load(places + j // self.Q_TILES, mask=count > 0, other=0)
        if self.Q_TILES > 1:
            place += j % self.Q_TILES * self.capacity
        return gl.where(count > 0, begin + place * (self.KV_TILES * UNIT), self.tiles.nowhere)

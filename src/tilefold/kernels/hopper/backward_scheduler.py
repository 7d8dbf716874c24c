"""The scheduler of the backward kernels that keep dS: which work tile a program makes, in which order, and who waits for whom.

A work tile is a *KV tile*, dk and dv of 64 keys, which publishes the dS of its pairs; or a *query tile*, dq of 64 to 256 queries,
which consumes them.  KV tiles are bound by the tensor cores, query tiles by the way from L2, so both kinds should run at any
time.  Work comes in segments: a KV split of some KV heads, or a KV head of a packed sequence.  Each program draws one number:

    KV tiles 0 ... delay - 1 | KV tiles delay ... and query tiles 0 ..., in the ratio of their numbers | the last query tiles

A query tile waits for all KV tiles of its segment: with a delay of a segment and of one tile for each running program, those are
done.  dS lies in a ring of slots, each for one segment: a KV tile waits for all query tiles of the segment that had its slot
before.  With a delay of one to slots - 1 segments, whatever a work tile waits for has a smaller number, so a running program has
drawn it: nothing can lock up, in whatever order programs run.
"""

from .backward_config import UNIT
from .backward_mask import Lengths
from .gluon import gl, jit
from .structs import Value, struct

FIELDS = gl.constexpr(12)  # of an entry of packed sequences: kernels.backward_packed
QUERIES = gl.constexpr(0)
KEYS = gl.constexpr(1)


@struct
class BackwardTile:
    """A work tile: a KV tile of a KV head, or one, two or four query tiles of a head."""

    tile: gl.tensor
    batch: Value  # 0 of packed sequences
    head: gl.tensor
    lengths: Lengths
    segment: gl.tensor
    before: gl.tensor  # the segment that had its slot of dS, negative if none
    wanted: gl.tensor  # how many work tiles of that segment, or KV tiles of its own, have to be done
    local: Value = None  # the number of the (KV) head in the segment; of lists, of the work tile
    split: Value = None  # dense: the KV split; of lists: the span of queries
    first_q: Value = 0  # packed: row of the sequence's first query,
    first_k: Value = 0  # of its first key,
    slot: Value = None  # the slot of dS,
    statistics: Value = None  # and the first row of the head's statistics


@struct
class Drawn:
    """What a number stands for; of packed sequences `queries` is no constant, and `of` the work tile."""

    keys: gl.tensor
    queries: Value
    of: gl.tuple | BackwardTile


@struct
class Counters:
    """Counters in memory, 0 at launch: numbers that were drawn; done KV tiles of each segment; done query tiles of each; where
    sums over spans wait in memory, how many segments each KV tile of one has been through."""

    address: Value
    segments: gl.tensor

    @jit
    def draw(self):
        """The number of this program's work tile."""
        return gl.atomic_add(self.address, 1)

    @jit
    def await_slot(self, work):
        """Before a KV tile publishes: until the query tiles of the segment that had its slot are done."""
        wanted = gl.where(work.before < 0, 0, work.wanted)
        _await(self.address + 1 + self.segments + gl.maximum(work.before, 0), wanted)

    @jit
    def await_keys(self, work):
        """Before a query tile consumes: until all dS of its segment has been published."""
        _await(self.address + 1 + work.segment, work.wanted)

    @jit
    def await_keys_without_ds(self, work, tiles):
        """Of a query tile that consumes so many tiles of dS, if that is none: where all query tiles of a segment are done, its KV
        tiles are, and so are the query tiles that had its slot before."""
        if tiles == 0:
            _await(self.address + 1 + work.segment, work.wanted)

    @jit
    def await_queries(self, segment, wanted):
        """Before a sum goes on that the query tiles of a segment have begun: until all are done."""
        _await(self.address + 1 + self.segments + segment, wanted)

    @jit
    def await_sums(self, work):
        """Before a KV tile goes on from its sums: until all segments before have."""
        _await(self.address + 1 + 2 * self.segments + work.local, work.segment)

    @jit
    def publish_sums(self, work):
        """A KV tile has left its sums, or taken the last ones."""
        _count(self.address + 1 + 2 * self.segments + work.local)

    @jit
    def publish_keys(self, work):
        """A KV tile's dS has been written."""
        _count(self.address + 1 + work.segment)

    @jit
    def publish_queries(self, work):
        """A query tile's dS has been read, and what it left for another one has been written."""
        _count(self.address + 1 + self.segments + work.segment)


@struct
class SplitScheduler:
    """Dense: a segment is one of `splits` KV splits of split_tiles KV tiles, of heads_at_once KV heads.

    no_tile: the row of statistics of no query; stat_tiles: rows of a head, if not q_tiles."""

    counters: Counters
    lengths: Lengths
    heads: gl.tensor
    group: gl.tensor
    split_tiles: gl.tensor
    splits: gl.tensor
    heads_at_once: gl.tensor
    delay: gl.tensor
    slots: gl.tensor
    no_tile: gl.tensor
    stat_tiles: Value
    QUERY_TILES: gl.constexpr

    @jit
    def query_tiles(self):
        """Work tiles for dq of a segment."""
        rows = (self.lengths.q_tiles + self.QUERY_TILES - 1) // self.QUERY_TILES
        return self.heads_at_once * self.group * rows

    @jit
    def locate(self, number):
        """Which kind of work tile a number is, its segment, its number there."""
        kv_tiles = self.heads_at_once * self.split_tiles
        keys, segment, i = work_of_number(number, kv_tiles, self.query_tiles(), self.counters.segments, self.delay)
        return Drawn(keys, True, (segment, i))

    @jit
    def kv_tile(self, drawn):
        """Heads go fastest, then tiles: under a causal mask the first are the most work, and the last work of all is little."""
        segment, i = drawn.of
        head, split = self._segment(segment)
        kv_heads = self.heads // self.group
        tile = i // self.heads_at_once
        local = i - tile * self.heads_at_once
        return BackwardTile(split * self.split_tiles + tile, (head + local) // kv_heads, (head + local) % kv_heads, self.lengths,
                            segment, segment - self.slots, self.query_tiles(), local, split)  # fmt: skip

    @jit
    def query_tile(self, drawn):
        """The last queries come first."""
        segment, i = drawn.of
        head, split = self._segment(segment)
        row = i // (self.heads_at_once * self.group)
        local = i - row * (self.heads_at_once * self.group)
        first = (self.lengths.q_tiles + self.QUERY_TILES - 1) // self.QUERY_TILES - 1 - row
        of_all = head * self.group + local
        kv_tiles = self.heads_at_once * self.split_tiles
        return BackwardTile(first * self.QUERY_TILES, of_all // self.heads, of_all % self.heads, self.lengths, segment,
                            segment - self.slots, kv_tiles, local, split)  # fmt: skip

    @jit
    def _segment(self, segment):
        """-> its first KV head, among those of all batch entries, and its split."""
        row = segment // self.splits
        return row * self.heads_at_once, segment - row * self.splits

    @jit
    def statistics(self, work, head):
        """The first row of a head's statistics."""
        return (work.batch * self.heads + head) * (self.lengths.q_tiles if self.stat_tiles is None else self.stat_tiles)

    @jit
    def past_queries(self):
        """A row behind all queries, where TMA gives zeros."""
        return self.lengths.q_tiles * UNIT

    @jit
    def keys_of(self, work, mask):
        """Of a query tile -> its first KV tile in the split, how many; whether it is its first split; whether it is its last.
        Query tiles that see no key at all belong to one split, too."""
        first, end = mask.keys_of_several(work.tile, work.lengths, self.QUERY_TILES)
        low = gl.maximum(first, work.split * self.split_tiles)
        high = gl.minimum(end, (work.split + 1) * self.split_tiles)
        begins = work.split == first // self.split_tiles
        ends = work.split == gl.maximum(end - 1, first) // self.split_tiles
        return low, gl.maximum(high - low, 0), begins, ends


@struct
class PackedScheduler:
    """Packed: a segment is a KV head of a sequence.  Entries: the work tiles in order, which kernels.backward_packed makes, with
    q_places query tiles of statistics a head."""

    counters: Counters
    Entries: Value
    group: gl.tensor
    total_q: gl.tensor
    q_places: gl.tensor
    no_tile: gl.tensor
    QUERY_TILES: gl.constexpr

    @jit
    def locate(self, number):
        """An entry is what, head, tile, first row in q, queries, first row in k, keys, place, slot, segment, segment before, how
        many of its work tiles, or of the own segment's KV tiles, have to be done."""
        p = self.Entries + number * FIELDS
        seq_q, seq_k = gl.load(p + 4), gl.load(p + 6)
        lengths = Lengths(seq_q, seq_k, (seq_q + UNIT - 1) // UNIT, (seq_k + UNIT - 1) // UNIT)
        work = BackwardTile(gl.load(p + 2), 0, gl.load(p + 1), lengths, gl.load(p + 9), gl.load(p + 10), gl.load(p + 11),
                            first_q=gl.load(p + 3), first_k=gl.load(p + 5), slot=gl.load(p + 8),
                            statistics=gl.load(p + 7))  # fmt: skip
        what = gl.load(p)
        return Drawn(what == KEYS, what == QUERIES, work)

    @jit
    def kv_tile(self, drawn):
        return drawn.of

    @jit
    def query_tile(self, drawn):
        return drawn.of

    @jit
    def statistics(self, work, head):
        """The first row of a head's statistics of the sequence."""
        return head * self.q_places + work.statistics

    @jit
    def past_queries(self):
        """A row behind all sequences, where TMA gives zeros."""
        return self.total_q

    @jit
    def keys_of(self, work, mask):
        """Of a query tile -> its first KV tile, how many; there are no splits."""
        first, end = mask.keys_of_several(work.tile, work.lengths, self.QUERY_TILES)
        return first, gl.maximum(end - first, 0), True, True


@jit
def work_of_number(drawn, kv_tiles, query_tiles, segments, delay):
    """-> whether it is a KV tile, its segment, its number there.  kv_tiles, query_tiles: work tiles of a segment; kv_tiles *
    (kv_tiles + query_tiles) < 2**31."""
    first = gl.minimum(delay, segments * kv_tiles)
    rest = segments * kv_tiles - first
    later = drawn - first
    whole = later // (kv_tiles + query_tiles)
    part = later - whole * (kv_tiles + query_tiles)
    before = gl.minimum(whole * kv_tiles + part * kv_tiles // (kv_tiles + query_tiles), rest)
    after = gl.minimum(whole * kv_tiles + (part + 1) * kv_tiles // (kv_tiles + query_tiles), rest)
    keys = (later < 0) | (before < after)
    number = gl.where(later < 0, drawn, gl.where(keys, first + before, later - before))
    segment = number // gl.where(keys, kv_tiles, query_tiles)
    return keys, segment, number - segment * gl.where(keys, kv_tiles, query_tiles)


@jit
def _await(counter, wanted):
    """Wait until a counter has come so far; what was written before it was counted is then there for TMA, too."""
    gl.inline_asm_elementwise(
        "{ .reg .pred less; .reg .b32 seen; again: ld.acquire.gpu.global.s32 seen, [$1]; setp.lt.s32 less, seen, $2; "
        "@less nanosleep.u32 64; @less bra again; fence.proxy.async.global; mov.b32 $0, seen; }",
        "=r,l,r",
        [counter.to(gl.int64, bitcast=True), wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def await_copies():
    """Until what this partition had TMA store is written where others see it."""
    gl.inline_asm_elementwise("{ cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0; }", "=r", [],
                              dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@jit
def _count(counter):
    """Add 1, by one thread of the one warp that calls this, after all that it knows to be done."""
    gl.inline_asm_elementwise(
        "{ .reg .pred one; elect.sync _|one, 0xffffffff; @one red.release.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l",
        [counter.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )

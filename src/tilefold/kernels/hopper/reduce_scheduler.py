"""Which keys a program of `attention_backward_reduce` has, and over which query tiles it walks, in which order."""

from ...device.ranges import FULL, WINDOW
from .backward_config import UNIT
from .backward_mask import BackwardMask, Lengths
from .gluon import gl, jit
from .structs import Value, struct


@struct
class KeyBlock:
    """A program's work tile: 128 keys of a KV head, and the query tiles of heads of its group that it walks over.

    head: the KV head; query_head: the program's first query head; part: how many programs have heads of the group before it.
    first, end: the first tile and the one after the last; begin: where the walk begins; visits: how many.  row: what makes of a
    tile of the first query head its number among statistics and sums; step: how much more of the next head's.  number: the
    block's among those of the KV head.

    With lists, first, end and begin are places in the block's list, whose entries begin at `entries`.

    Of a packed batch, where tile, first and end are of a sequence: its first rows in the tensors, and its number; else None."""

    tile: gl.tensor
    number: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    query_head: gl.tensor
    part: gl.tensor
    lengths: Lengths
    first: gl.tensor
    end: gl.tensor
    begin: gl.tensor
    visits: gl.tensor
    row: gl.tensor
    step: gl.tensor
    entries: Value
    first_q: Value = None
    first_k: Value = None
    sequence: Value = None

    @jit
    def query_row(self, tile, QUERIES: gl.constexpr):
        """The first row of a query tile in the tensors."""
        if self.first_q is None:
            return tile * QUERIES
        else:
            return self.first_q + tile * QUERIES

    @jit
    def key_row(self, tile, KEYS: gl.constexpr):
        """The first row of a KV tile of KEYS keys."""
        if self.first_k is None:
            return tile * KEYS
        else:
            return self.first_k + tile * KEYS


@struct
class Visit:
    """A place of a walk: a query tile of one of the program's query heads, and its number among statistics and sums.

    With lists: its place `at` in the block's list; before: how many blocks of keys add to the tile before this one.  partial: may
    a mask_mod hide some of the tile from the block?"""

    tile: gl.tensor
    head: gl.tensor
    number: gl.tensor
    at: Value
    before: Value
    partial: Value


@struct
class OwnKeys:
    """A consumer's KV tile; whole, end: of BackwardMask.whole."""

    tile: gl.tensor
    whole: Value
    end: gl.tensor
    mask: BackwardMask
    lengths: Lengths
    PER: gl.constexpr  # query tiles of 64 of one of QUERIES

    @jit
    def cut(self, s, tile):
        """Scores of a query tile, masked."""
        return self.mask.apply(s, tile * self.PER, self.tile, (self.whole, self.end), self.lengths)


@jit
def own_keys(tile, block, scheduler):
    whole, end = scheduler.mask.whole(tile, block.lengths)
    return OwnKeys(tile, whole, end, scheduler.mask, block.lengths, scheduler.QUERIES // UNIT)


STAGGER = gl.constexpr(2)  # tiles of queries between the beginnings of two neighbours' walks


@struct
class BlockScheduler:
    """A program has 128 keys of a KV head, and `members` query heads of its group: all of them, or one.  heads_at_once of those
    at a time, a segment, their longest blocks first.  The first heads of all groups come first, then the second ones: those of a
    group, which add to the same dk and dv, end apart.  q_tiles: of QUERIES queries; no_tile: the row of statistics and sums of no
    query.

    Where the mask has a diagonal, all walks go down from the last tile that sees the block: side by side they share q and dout in
    L2.  Else they begin STAGGER tiles apart and go around, so that they do not add to one tile at a time.  A walk ends a query
    head before it begins the next.

    Lists [B or 1, KV heads or 1, blocks, 1 + 2 q_tiles] int32 by strides of batch entry and KV head, or None: for each block of
    keys how many query tiles see it, and which, the walk's last first: entries, twice a tile's number, plus 1 where no mask_mod
    hides any of it; behind q_tiles of these, for each how many blocks add to it before (kernels.sparse.classify.list_queries).

    ORDERED: the blocks of keys that see a query tile add to it one after the other, the first block first.  All walks go down
    from the last tile that sees the block (or up, if its list says so), so under any mask each follows the one before it: its own
    last tile is never before that one's.  Short blocks that come together wait for one another at their first tile; so where
    the mask has a diagonal, the later half of a segment's blocks alternates with the earlier half of the next one's.  A walk
    meets a tile of each of its query heads before the next tile: else a shorter block would be ahead of the longer one before
    it, at the next head, and wait.

    Blocks [blocks, 8] int32 of a packed batch, or None: what kernels.backward.backward_packed_blocks has written of each block of
    keys of all sequences; q_tiles are then places of query tiles of a head, and `lengths` are nobody's."""

    lengths: Lengths
    heads: gl.tensor
    group: gl.tensor
    members: gl.tensor
    q_tiles: gl.tensor
    blocks: gl.tensor
    heads_at_once: gl.tensor
    no_tile: gl.tensor
    mask: BackwardMask
    Lists: Value
    lists_b: Value
    lists_h: Value
    Blocks: Value
    QUERIES: gl.constexpr
    ORDERED: gl.constexpr

    @jit
    def block(self):
        """This program's.  Keys that nobody sees meet one tile past the end, where TMA gives zeros, with row no_tile."""
        program = gl.program_id(0)
        i = program // self.heads_at_once
        segment = i // self.blocks
        block = i - segment * self.blocks
        if self.ORDERED and (self.mask.KIND != FULL or self.Lists is not None) and self.Blocks is None:
            segment, block = self.alternating(i)
        of_all = segment * self.heads_at_once + program % self.heads_at_once
        kv_heads = self.heads // self.group
        groups = gl.num_programs(0) // (self.blocks * (self.group // self.members))  # of all batch entries
        part = of_all // groups
        of_groups = of_all - part * groups
        batch, head = of_groups // kv_heads, of_groups % kv_heads
        query_head = head * self.group + part * self.members
        if self.Blocks is not None:
            return self.block_of_sequence(block, head, query_head, part)
        else:
            return self.block_of_head(block, batch, head, query_head, part)

    @jit
    def block_of_sequence(self, number, head, query_head, part):
        """That of a place in a packed batch, which may have no keys; what is not seen has no visits."""
        entry = self.Blocks + number * 8
        first_q, n_q = gl.load(entry), gl.load(entry + 1)
        first_k, n_k = gl.load(entry + 2), gl.load(entry + 3)
        tile, place, sequence = gl.load(entry + 4), gl.load(entry + 5), gl.load(entry + 6)
        lengths = Lengths(n_q, n_k, (n_q + UNIT - 1) // UNIT, (n_k + UNIT - 1) // UNIT)
        first, tiles = self.mask.queries_of_block(tile, lengths, self.QUERIES)
        tiles = gl.where(tile * (2 * UNIT) < n_k, tiles, 0)
        begin = first
        if self.ORDERED or self.mask.KIND != FULL:
            begin += gl.maximum(tiles, 1) - 1
        else:
            begin += tile * STAGGER % gl.maximum(tiles, 1)
        row = query_head * self.q_tiles + place
        return KeyBlock(tile, number, head * 0, head, query_head, part, lengths, first, first + tiles, begin,
                        tiles * self.members, row, self.q_tiles, None, first_q, first_k, sequence)  # fmt: skip

    @jit
    def block_of_head(self, block, batch, head, query_head, part):
        """That of a head of a batch entry."""
        entries = None
        if self.Lists is None:
            first, tiles = self.mask.queries_of_block(block, self.lengths, self.QUERIES)
            first = gl.where(tiles > 0, first, self.q_tiles)
        else:
            begin = self.Lists + batch.to(gl.int64) * self.lists_b + head.to(gl.int64) * self.lists_h
            begin += block.to(gl.int64) * (1 + 2 * self.q_tiles)
            first, tiles = block * 0, gl.load(begin)
            entries = begin + 1
        row = gl.where(tiles > 0, (batch * self.heads + query_head) * self.q_tiles, self.no_tile - self.q_tiles)
        step = gl.where(tiles > 0, self.q_tiles, 0)
        tiles = gl.maximum(tiles, 1)
        begin = first
        if self.ORDERED or self.mask.KIND != FULL:
            begin += tiles - 1
        else:
            begin += block * STAGGER % tiles
        visits = tiles * self.members
        return KeyBlock(
            block,
            block,
            batch,
            head,
            query_head,
            part,
            self.lengths,
            first,
            first + tiles,
            begin,
            visits,
            row,
            step,
            entries,
        )

    @jit
    def alternating(self, i):
        """-> the segment, and the block, of the i-th heads_at_once programs."""
        early = (self.blocks + 1) // 2
        segments = gl.num_programs(0) // (self.blocks * self.heads_at_once)
        j = i - early
        segment = j // self.blocks
        k = j - segment * self.blocks
        last = segment == segments - 1
        late = last | (k % 2 == 1)
        block = gl.where(late, early + gl.where(last, k, k // 2), k // 2)
        first = i < early
        return gl.where(first, 0, gl.where(late, segment, segment + 1)), gl.where(first, i, block)

    @jit
    def first_visit(self, block):
        return self.visit(block, block.begin, block.begin * 0)

    @jit
    def visit(self, block, at, head):
        """Of a tile, or of a place in the block's list, for one of its query heads."""
        row = block.row + head * block.step
        if self.Lists is None:
            return Visit(at, head, row + at, None, None, True)
        else:
            inside = gl.maximum(at, 0)  # behind the last visit nothing is read
            entry = gl.load(block.entries + inside)
            before = gl.load(block.entries + self.q_tiles + inside)
            tile = entry >> 1
            return Visit(tile, head, row + tile, at, before, (entry & 1) == 0)

    @jit
    def next_visit(self, visit, block):
        head = visit.head
        at = visit.tile if self.Lists is None else visit.at
        if self.ORDERED:
            head += 1
            through = head == self.members
            head = gl.where(through, 0, head)
            at = at - gl.where(through, 1, 0)
        else:
            if self.mask.KIND == FULL:
                at = at + 1
                at = gl.where(at == block.end, block.first, at)
                through = at == block.begin
            else:
                at = at - 1
                through = at < block.first
            at = gl.where(through, block.begin, at)
            head += gl.where(through, 1, 0)
        return self.visit(block, at, head)

    @jit
    def blocks_before(self, visit, block):
        """How many blocks of keys add to a query tile before this one; 0 for the tile past the end."""
        tile = visit.tile
        if self.Lists is not None:
            return visit.before
        elif self.mask.KIND != WINDOW:
            return gl.where(tile < self.q_tiles, block.tile, 0)
        else:
            PER: gl.constexpr = self.QUERIES // UNIT
            first = self.mask.keys_of_several(tile * PER, block.lengths, PER)[0] // 2
            return gl.where(tile < self.q_tiles, block.tile - first, 0)

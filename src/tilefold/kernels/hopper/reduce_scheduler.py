"""Which keys a program of `attention_backward_reduce` has, and over which query tiles it walks, in which order."""

from ...device.ranges import FULL, WINDOW
from .backward_config import UNIT
from .backward_mask import BackwardMask, Lengths
from .gluon import gl, jit
from .structs import Value, struct


@struct
class KeyBlock:
    """A program's work tile: 128 keys of a KV head, and the query tiles that it walks over.

    first, end: the first tile and the one after the last; begin: where the walk begins.  row: what makes of a tile of the group's
    first head its number among statistics and sums; step: how much more of the next head's."""

    tile: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    lengths: Lengths
    first: gl.tensor
    end: gl.tensor
    begin: gl.tensor
    row: gl.tensor
    step: gl.tensor


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
def own_keys(tile, scheduler):
    whole, end = scheduler.mask.whole(tile, scheduler.lengths)
    return OwnKeys(tile, whole, end, scheduler.mask, scheduler.lengths, scheduler.QUERIES // UNIT)


STAGGER = gl.constexpr(2)  # tiles of queries between the beginnings of two neighbours' walks


@struct
class BlockScheduler:
    """heads_at_once KV heads at a time, their longest blocks first.  q_tiles: of QUERIES queries; no_tile: the row of statistics
    and sums of no query.

    Programs that run side by side do not add to one query tile at a time.  Where the mask has a diagonal, their walks begin
    there.  Else they begin STAGGER tiles apart and go around.

    ORDERED: the blocks of keys that see a query tile add to it one after the other, the first block first.  All walks go down from
    the last tile that sees the block, so under any mask each follows the one before it: its own last tile is never before that
    one's."""

    lengths: Lengths
    heads: gl.tensor
    group: gl.tensor
    q_tiles: gl.tensor
    blocks: gl.tensor
    heads_at_once: gl.tensor
    no_tile: gl.tensor
    mask: BackwardMask
    QUERIES: gl.constexpr
    ORDERED: gl.constexpr

    @jit
    def block(self):
        """This program's.  Keys that nobody sees meet one tile past the end, where TMA gives zeros, with row no_tile."""
        program, kv_heads = gl.program_id(0), self.heads // self.group
        segment = program // (self.blocks * self.heads_at_once)
        i = program - segment * (self.blocks * self.heads_at_once)
        block = i // self.heads_at_once
        of_all = segment * self.heads_at_once + (i - block * self.heads_at_once)
        batch, head = of_all // kv_heads, of_all % kv_heads
        first, tiles = self.mask.queries_of_block(block, self.lengths, self.QUERIES)
        first = gl.where(tiles > 0, first, self.q_tiles)
        row = gl.where(tiles > 0, (batch * self.heads + head * self.group) * self.q_tiles, self.no_tile - self.q_tiles)
        step = gl.where(tiles > 0, self.q_tiles, 0)
        tiles = gl.maximum(tiles, 1)
        begin = first
        if self.ORDERED:
            begin += tiles - 1
        elif self.mask.KIND == FULL:
            begin += block * STAGGER % tiles
        return KeyBlock(block, batch, head, self.lengths, first, first + tiles, begin, row, step)

    @jit
    def after(self, tile, block):
        """The query tile after this one; in any order: after the last one the first."""
        if self.ORDERED:
            tile -= 1
        else:
            tile += 1
            if self.mask.KIND == FULL:
                tile = gl.where(tile == block.end, block.first, tile)
        return tile

    @jit
    def place(self, tile, block):
        """How many blocks of keys add to a query tile before this one; 0 for the tile past the end."""
        if self.mask.KIND != WINDOW:
            return gl.where(tile < self.q_tiles, block.tile, 0)
        else:
            PER: gl.constexpr = self.QUERIES // UNIT
            first = self.mask.keys_of_several(tile * PER, self.lengths, PER)[0] // 2
            return gl.where(tile < self.q_tiles, block.tile - first, 0)

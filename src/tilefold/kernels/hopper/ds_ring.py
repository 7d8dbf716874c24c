"""Where dS of each pair lies between the KV tile that publishes it and the query tile that consumes it: a ring in memory.

A segment's dS has a slot of a ring.  In it each KV tile of a head has a row of `width` tiles, for the queries that see it.  Under
a causal mask two KV tiles share a row, the i-th from the left of a split and the i-th from its right: one has many queries where
the other has few.
"""

from ...device.ranges import CAUSAL
from .backward_config import UNIT
from .gluon import descriptor, fence_async_shared, gl, jit, tma_load, tma_store, tma_store_wait
from .structs import struct


@struct
class DsTiles:
    """desc [nowhere, 64] with boxes [64, 64]; buffer: the tile on its way there."""

    desc: descriptor
    buffer: gl.shared_memory_descriptor
    nowhere: gl.tensor

    @jit
    def publish(self, ds, row):
        """Have dS [64 keys, 64 queries] written to `row`; nothing is at `nowhere`."""
        tma_store_wait(0)  # the store that reads the tile before out of the buffer
        self.buffer.store(ds)
        fence_async_shared()
        tma_store(self.desc, [row, 0], self.buffer)

    @jit
    def load(self, row, bar, panel):
        """Issue the TMA load of a tile; zeros at `nowhere`."""
        tma_load(self.desc, [row, 0], bar, panel)


@jit
def rows_of_split(split_tiles, KIND: gl.constexpr):
    """How many rows of tiles a head has in a slot."""
    return (split_tiles + 1) // 2 if KIND == CAUSAL else split_tiles


@jit
def place_of_keys(local, split_tiles, width, KIND: gl.constexpr):
    """-> the tile of a head's slot where KV tile number `local` of its split has the first dS of its queries, and the way from
    there to the next: 1 or -1.  width: tiles of a row."""
    if KIND != CAUSAL:
        return local * width, 1
    else:
        partner = split_tiles - 1 - local
        row = gl.minimum(local, partner) * width
        return gl.where(local <= partner, row, row + width - 1), gl.where(local <= partner, 1, -1)


@struct
class DsRing:
    """Dense: `slots` slots of slot_rows rows."""

    tiles: DsTiles
    slots: gl.tensor
    slot_rows: gl.tensor
    group: gl.tensor
    split_tiles: gl.tensor
    width: gl.tensor
    KIND: gl.constexpr

    @jit
    def _head(self):
        """Rows of a head."""
        return rows_of_split(self.split_tiles, self.KIND) * self.width * UNIT

    @jit
    def of_keys(self, work):
        """Of a KV tile -> the row of its first dS, the step to the next, the step to the next head."""
        place, way = place_of_keys(work.tile - work.split * self.split_tiles, self.split_tiles, self.width, self.KIND)
        row = work.segment % self.slots * self.slot_rows + (work.local * self.group * self._head() + place * UNIT)
        return row, way * UNIT, self._head()

    @jit
    def of_queries(self, work):
        """Of a query tile: where its head begins."""
        return work.segment % self.slots * self.slot_rows + work.local * self._head()

    @jit
    def row(self, begin, work, q_tile, kv_tile, first):
        """Of a pair; first: the first query tile that sees the KV tile."""
        place, way = place_of_keys(kv_tile - work.split * self.split_tiles, self.split_tiles, self.width, self.KIND)
        return begin + (place + way * (q_tile - first)) * UNIT


@jit
def make_ds_ring(tiles, slots, heads_at_once, group, split_tiles, width, KIND: gl.constexpr):
    """A slot has room for heads_at_once KV heads."""
    slot_rows = heads_at_once * group * rows_of_split(split_tiles, KIND) * width * UNIT
    return DsRing(tiles, slots, slot_rows, group, split_tiles, width, KIND)


@struct
class PackedDsRing:
    """Packed: `slots` slots of `group` rows, one for each KV tile: slot number n % slots is its own until all query tiles of its
    segment are done."""

    tiles: DsTiles
    group: gl.tensor
    slots: gl.tensor
    width: gl.tensor

    @jit
    def of_keys(self, work):
        """As of DsRing."""
        return work.slot * self.group * self.width * UNIT, UNIT, self.width * UNIT

    @jit
    def of_queries(self, work):
        """The number of the head in its group; the work tile's slot is the one of the sequence's first KV tile."""
        return work.head % self.group

    @jit
    def row(self, begin, work, q_tile, kv_tile, first):
        """As of DsRing."""
        slot = work.slot + kv_tile
        slot = gl.where(slot < self.slots, slot, slot - self.slots)
        return ((slot * self.group + begin) * self.width + q_tile - first) * UNIT


@jit
def row_of_pair(ds, begin, work, q_tile, kv_tile, mask, SEVERAL: gl.constexpr):
    """The row of a pair.  Of SEVERAL query tiles one may not see the keys: `nowhere`."""
    first, seen = mask.queries_of(kv_tile, work.lengths)
    row = ds.row(begin, work, q_tile, kv_tile, first)
    if SEVERAL:
        row = gl.where((q_tile >= first) & (q_tile < first + seen), row, ds.tiles.nowhere)
    return row

"""Which query tiles and KV tiles of 64 tokens see each other in the dense backward pass, and the cut through those in part.

Ranges are computed, from queries and from keys, and name the same pairs: those where some query sees some key.  Masks are
aligned to the bottom right: query 0 stands at key seq_k - seq_q.

The kinds are those of device.ranges, but for PREFIX, which these kernels do not have.
"""

from ...device.ranges import CAUSAL, FULL, WINDOW
from .backward_config import UNIT
from .gluon import gl, jit, opaque
from .parts import columns_of
from .structs import Value, struct


@struct
class Lengths:
    """Of a sequence: its queries and keys, and their tiles."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    q_tiles: gl.tensor
    kv_tiles: gl.tensor


@struct
class BackwardMask:
    """KIND is FULL, CAUSAL, or WINDOW: `left` and `right` keys on either side of a query's own place."""

    left: Value
    right: Value
    KIND: gl.constexpr

    @jit
    def keys_of(self, q_tile, lengths):
        """-> the first KV tile that a query tile sees, and the one after its last."""
        seq_q, seq_k = lengths.seq_q, lengths.seq_k
        begin = 0
        end = seq_k
        if self.KIND != FULL:
            own = gl.minimum((q_tile + 1) * UNIT, seq_q) - 1 + seq_k - seq_q  # of the last query
            end = gl.maximum(gl.minimum(seq_k, own + 1 + (self.right if self.KIND == WINDOW else 0)), 0)
        if self.KIND == WINDOW:
            begin = gl.maximum(q_tile * UNIT + seq_k - seq_q - self.left, 0)
        first = begin // UNIT
        return first, gl.maximum((end + UNIT - 1) // UNIT, first)

    @jit
    def keys_of_several(self, q_tile, lengths, QUERY_TILES: gl.constexpr):
        """The same of QUERY_TILES query tiles from q_tile on, together."""
        first, end = self.keys_of(q_tile, lengths)
        if QUERY_TILES > 1:
            others, end = self.keys_of(gl.minimum(q_tile + QUERY_TILES, lengths.q_tiles) - 1, lengths)
        return first, end

    @jit
    def queries_of(self, kv_tile, lengths):
        """-> the first query tile that sees a KV tile, and how many see it: 0 past the end."""
        seq_q, seq_k = lengths.seq_q, lengths.seq_k
        begin = 0
        end = seq_q
        if self.KIND != FULL:
            begin = gl.maximum(kv_tile * UNIT - seq_k + seq_q - (self.right if self.KIND == WINDOW else 0), 0)
        if self.KIND == WINDOW:
            own = gl.minimum((kv_tile + 1) * UNIT, seq_k) - 1 - seq_k + seq_q  # the query at the last key's place
            end = gl.maximum(gl.minimum(seq_q, own + 1 + self.left), 0)
        first = begin // UNIT
        tiles = gl.maximum((end + UNIT - 1) // UNIT - first, 0)
        return first, gl.where(kv_tile < lengths.kv_tiles, tiles, 0)

    @jit
    def queries_of_block(self, block, lengths, QUERIES: gl.constexpr):
        """-> the first tile of QUERIES queries that see one of the 128 keys of a block, and how many from it on, or 0."""
        PER: gl.constexpr = QUERIES // UNIT
        first, seen = self.queries_of(block * 2, lengths)
        other, more = self.queries_of(gl.minimum(block * 2 + 1, lengths.kv_tiles - 1), lengths)
        begin = first // PER
        end = gl.minimum(gl.maximum(first + seen, other + more), lengths.q_tiles)
        return begin, gl.maximum((end + PER - 1) // PER - begin, 0)

    @jit
    def whole(self, kv_tile, lengths):
        """-> the first query tile of which every query sees every key of a KV tile, and the first behind it of which that does
        not hold.  Queries past the end count for nothing anyway."""
        seq_q, seq_k = lengths.seq_q, lengths.seq_k
        begin = 0
        end = lengths.q_tiles
        if self.KIND != FULL:  # the first query sees the last key
            begin = kv_tile * UNIT + UNIT - 1 - seq_k + seq_q - (self.right if self.KIND == WINDOW else 0)
            begin = (gl.maximum(begin, 0) + UNIT - 1) // UNIT
        if self.KIND == WINDOW:  # the last query sees the first key
            end = (gl.maximum(kv_tile * UNIT - seq_k + seq_q + self.left + 1, 0)) // UNIT
        if self.KIND != CAUSAL:  # which needs no mask at the end of the keys: only queries past the end stand there
            end = gl.where((kv_tile + 1) * UNIT > seq_k, 0, end)
        return begin, end

    @jit
    def apply(self, s, q_tile, kv_tile, whole, lengths):
        """`cut`, where some of the queries does not see some of the keys; whole: of the KV tile."""
        needed = q_tile >= whole[1] - (s.shape[1] // UNIT - 1)
        if self.KIND == CAUSAL:
            needed = q_tile < whole[0]
        elif self.KIND == WINDOW:
            needed = needed | (q_tile < whole[0])
        if needed:
            s = self.cut(s, q_tile, kv_tile, lengths)
        return s

    @jit
    def cut(self, s, q_tile, kv_tile, lengths):
        """S [64 keys, 64 or 128 queries], -inf where the query does not see the key.

        What is made of the keys is made here: kept throughout the loop, it would push others out of their registers."""
        seq_q, seq_k = lengths.seq_q, lengths.seq_k
        QUERIES: gl.constexpr = s.shape[1]
        parts = s.reshape([UNIT, QUERIES // 8, 4, 2])
        ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout)))
        key = (
            gl.expand_dims(gl.expand_dims(gl.expand_dims(opaque(gl.arange(0, UNIT, layout=ROW)), 1), 2), 3)
            + kv_tile * UNIT
        )
        group, column = columns_of(parts)
        if self.KIND == FULL:
            live = (group >= 0) & ((key < seq_k) & (column >= 0))
        else:
            own = key - seq_k + seq_q - q_tile * UNIT  # the column of the query at the key's own place
            first = own - (self.right if self.KIND == WINDOW else 0)
            if self.KIND == WINDOW:
                first = gl.where(key < seq_k, first, QUERIES)
            live = group * 8 >= opaque(first - column)
            if self.KIND == WINDOW:
                live = live & (group * 8 <= opaque(own + self.left - column))
        return gl.convert_layout(gl.where(live, parts, float("-inf")).reshape(s.shape), s.type.layout)

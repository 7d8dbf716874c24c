"""Which keys a query tile sees: its KV tiles, a range or a list, and the cut through those that it sees in part.

The kinds are those of device.ranges, but for PREFIX, which the kernels for sm_90 do not have."""

from ...device.ranges import FULL, WINDOW
from .gluon import aggregate, constexpr_function, field, gl, jit, opaque
from .parts import columns_of
from .structs import Value, struct


@struct
class TileWalk:
    """The KV tiles of a query tile in the order in which they are folded: `count` from `first` on, or those that a list names.

    entries: a list's (kernels.sparse.classify.list_blocks), twice a tile's number, plus 1 where no mask_mod hides any of it."""

    first: Value
    count: gl.tensor
    entries: Value

    @jit
    def entry(self, j):
        """What stands for the j-th of them."""
        if self.entries is None:
            return self.first + j
        else:
            return gl.load(self.entries + j)

    @jit
    def tile(self, entry):
        """Its number among the sequence's KV tiles."""
        if self.entries is None:
            return entry
        else:
            return entry >> 1

    @jit
    def partial(self, entry):
        """May a mask_mod hide some of it?"""
        if self.entries is None:
            return True
        else:
            return (entry & 1) == 0


@aggregate
class Mask:
    """KIND is FULL, CAUSAL, or WINDOW: `left` and `right` keys on either side of a query's own place.

    A query tile has ROWS rows, PACK heads of each of its queries; a warpgroup folds 64 of them.  A KV tile has KEYS keys.  The
    range of KV tiles is the whole query tile's.  Each warpgroup decides for its own rows which of them are cut, and, where OWN
    says that there may be such, which it passes over because all are.

    Lists [B or 1, H or 1, query tiles, 1 + capacity] int32, by strides of batch entry, head and query tile: how many entries, and
    the entries (TileWalk); None: every KV tile of the range."""

    left: gl.tensor
    right: gl.tensor
    Lists: Value
    lists_b: Value
    lists_h: Value
    lists_q: Value
    KIND: gl.constexpr
    ROWS: gl.constexpr
    KEYS: gl.constexpr
    PACK: gl.constexpr
    OWN: gl.constexpr

    @constexpr_function
    def __init__(self, left, right, KIND, ROWS, KEYS, PACK, Lists=None, lists_b=None, lists_h=None, lists_q=None):
        self.left, self.right = left, right
        self.Lists, self.lists_b, self.lists_h, self.lists_q = (
            field(Lists),
            field(lists_b),
            field(lists_h),
            field(lists_q),
        )
        self.KIND, self.ROWS = gl.constexpr(KIND), gl.constexpr(ROWS)
        self.KEYS, self.PACK = gl.constexpr(KEYS), gl.constexpr(PACK)
        self.OWN = gl.constexpr(KIND != FULL and max(KEYS, 64) < ROWS and Lists is None)

    @jit
    def tiles(self, work):
        """-> the first KV tile of which some query of the tile sees a key, and the number of such tiles, at least 1."""
        return self.tiles_of(work, work.block * (self.ROWS // self.PACK), self.ROWS // self.PACK)

    @jit
    def tiles_of(self, work, query, QUERIES: gl.constexpr):
        """The same for QUERIES queries from `query` on."""
        end = work.seq_k
        begin = 0
        if self.KIND != FULL:
            last = gl.minimum(query + QUERIES, work.seq_q) - 1
            end = gl.minimum(work.seq_k, last + work.shift + 1 + (self.right if self.KIND == WINDOW else 0))
        if self.KIND == WINDOW:
            begin = gl.maximum(query + work.shift - self.left, 0)
        first = gl.minimum(begin, work.seq_k) // self.KEYS
        return first, gl.maximum((end + self.KEYS - 1) // self.KEYS - first, 1)

    @jit
    def own(self, work, row, walk):
        """-> the first of a walk's KV tiles that 64 rows from `row` on see, and the end of those that they see."""
        first, count = self.tiles_of(work, row // self.PACK, 64 // self.PACK)
        first = gl.minimum(first - walk.first, walk.count - 1)  # rows behind the last query may see nothing
        return first, gl.minimum(first + count, walk.count)

    @jit
    def walk(self, work):
        """-> the KV tiles that the query tile folds."""
        if self.Lists is None:
            first, count = self.tiles(work)
            return TileWalk(first, count, None)
        else:
            begin = self.Lists + work.sequence.to(gl.int64) * self.lists_b + work.head.to(gl.int64) * self.lists_h
            begin += work.block.to(gl.int64) * self.lists_q
            return TileWalk(None, gl.load(begin), begin + 1)

    @jit
    def cuts(self, work, row, key, FIRST: gl.constexpr = False):
        """Is any of the scores of 64 rows from `row` on and KEYS keys from `key` on masked?  FIRST: or the first of its row?"""
        end = work.seq_k
        if self.KIND != FULL:
            end = gl.minimum(work.seq_k, row // self.PACK + work.shift + 1 + (self.right if self.KIND == WINDOW else 0))
        needed = key + self.KEYS > end
        if self.KIND == WINDOW:
            first = row // self.PACK + (64 // self.PACK - 1) + work.shift - self.left  # the last row's
            needed = needed | (key < first + (1 if FIRST else 0))
        return needed

    @jit
    def cut(self, s, work, row, key):
        """Scores [64, KEYS], -inf where the key is not seen."""
        parts = s.reshape([64, self.KEYS // 8, 4, 2])
        ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, parts.type.layout)))
        query = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 64, layout=ROW), 1), 2), 3) + row
        if self.PACK > 1:
            query = query // self.PACK
        group, rest = columns_of(parts)
        if self.KIND == FULL:
            live = group * 8 < opaque(work.seq_k - key - rest)
        else:
            own = query + work.shift  # the key at the query's own place
            end = gl.minimum(own + (self.right + 1 if self.KIND == WINDOW else 1), work.seq_k)
            live = group * 8 < opaque(end - key - rest)
            if self.KIND == WINDOW:
                live = live & (group * 8 >= opaque(own - self.left - key - rest))
        return gl.convert_layout(gl.where(live, parts, float("-inf")).reshape(s.shape), s.type.layout)

    @jit
    def apply(self, s, work, row, key):
        """`cut`, where it changes something."""
        if self.cuts(work, row, key):
            s = self.cut(s, work, row, key)
        return s

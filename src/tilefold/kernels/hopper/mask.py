"""Which keys a query tile sees: the range of its KV tiles, and the cut through those that it sees in part.

The kinds are those of device.ranges, but for PREFIX, which the kernels for sm_90 do not have."""

from ...device.ranges import FULL, WINDOW
from .gluon import aggregate, constexpr_function, gl, jit, opaque
from .parts import columns_of


@aggregate
class Mask:
    """KIND is FULL, CAUSAL, or WINDOW: `left` and `right` keys on either side of a query's own place.

    A query tile has ROWS rows, PACK heads of each of its queries; a warpgroup folds 64 of them.  A KV tile has KEYS keys.  The
    range of KV tiles is the whole query tile's.  Each warpgroup decides for its own rows which of them are cut."""

    left: gl.tensor
    right: gl.tensor
    KIND: gl.constexpr
    ROWS: gl.constexpr
    KEYS: gl.constexpr
    PACK: gl.constexpr

    @constexpr_function
    def __init__(self, left, right, KIND, ROWS, KEYS, PACK):
        self.left, self.right = left, right
        self.KIND, self.ROWS = gl.constexpr(KIND), gl.constexpr(ROWS)
        self.KEYS, self.PACK = gl.constexpr(KEYS), gl.constexpr(PACK)

    @jit
    def tiles(self, work):
        """-> the first KV tile of which some query of the tile sees a key, and the number of such tiles, at least 1."""
        end = work.seq_k
        begin = 0
        if self.KIND != FULL:
            last = gl.minimum((work.block + 1) * (self.ROWS // self.PACK), work.seq_q) - 1
            end = gl.minimum(work.seq_k, last + work.shift + 1 + (self.right if self.KIND == WINDOW else 0))
        if self.KIND == WINDOW:
            begin = gl.maximum(work.block * (self.ROWS // self.PACK) + work.shift - self.left, 0)
        first = gl.minimum(begin, work.seq_k) // self.KEYS
        return first, gl.maximum((end + self.KEYS - 1) // self.KEYS - first, 1)

    @jit
    def cuts(self, work, row, key):
        """Is any of the scores of 64 rows from `row` on and KEYS keys from `key` on masked?"""
        end = work.seq_k
        if self.KIND != FULL:
            end = gl.minimum(work.seq_k, row // self.PACK + work.shift + 1 + (self.right if self.KIND == WINDOW else 0))
        needed = key + self.KEYS > end
        if self.KIND == WINDOW:
            needed = needed | (key < row // self.PACK + (64 // self.PACK - 1) + work.shift - self.left)
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

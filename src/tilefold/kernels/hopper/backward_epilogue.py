"""Where dq, dk and dv of a work tile go: to the gradients, or to sums in memory that another work tile or launch goes on from.

Between two KV splits the sum of a dq so far waits in memory in fp32; so do those of dk and dv between two spans of queries of
lists, in one launch.  Where the queries of a call are made in *spans*, a launch
for each, dk and dv are sums over spans, in fp32 in memory: each KV tile adds to what the spans before left for its keys, which no
other one of the launch has.  A launch sees the queries of its span and the keys that these see: its ranges and masks are those of
a call of its own.  So each sum has one order, and is rounded once.
"""

from .backward_config import UNIT, BackwardConfig
from .gluon import gl, jit, opaque
from .parts import store_accumulator
from .structs import Value, struct


@struct
class Gradient:
    """out [B, rows, H, ..] by strides that are multiples of 4; stride_b None: [rows, H, ..].  columns of D, of the device or a
    constant; None: all.

    written: None, or of spans: `out` is fp32, and spans before have left sums in its first `written` rows."""

    out: Value
    stride_b: Value
    stride_n: gl.tensor
    stride_h: gl.tensor
    DTYPE: gl.constexpr
    columns: Value = None
    written: Value = None

    @jit
    def store(self, acc, work, row, rows, FIRST: gl.constexpr = 0):
        """64 rows from `row` on, of which there are so many.  FIRST: the first of acc's columns."""
        out = self.out + work.head.to(gl.int64) * self.stride_h + row.to(gl.int64) * self.stride_n
        if self.stride_b is not None:
            out += work.batch.to(gl.int64) * self.stride_b
        if self.columns is None:
            store_accumulator(out + FIRST, acc, rows, self.stride_n, self.DTYPE)
        else:
            store_accumulator(out + FIRST, acc, rows, self.stride_n, self.DTYPE, self.columns - FIRST)

    @jit
    def add(self, acc, work, FIRST: gl.constexpr = 0):
        """Store the rows of a KV tile; to rows before `written` add them.

        A quad of threads has 8 neighbouring columns of a row: each 32-byte sector is read and written whole."""
        LAYOUT: gl.constexpr = acc.type.layout
        row = gl.expand_dims(gl.arange(0, UNIT, layout=gl.SliceLayout(1, LAYOUT)), 1) + work.tile * UNIT
        column = gl.expand_dims(gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0) + FIRST
        # in steps of 4, so that two columns are known to be one access
        place = work.batch.to(gl.int64) * (self.stride_b // 4) + work.head.to(gl.int64) * (self.stride_h // 4)
        place = self.out + (place + row.to(gl.int64) * (self.stride_n // 4)) * 4 + column
        live = (row < work.lengths.seq_k) & (column >= 0)
        if self.columns is not None:
            live = live & (opaque(column) < self.columns)  # as in parts.store_accumulator
        acc += gl.load(place, mask=live & (row < self.written), other=0.0)
        gl.store(place, acc, mask=live)

    @jit
    def store_keys(self, acc, work, FIRST: gl.constexpr = 0):
        """The rows of a KV tile.  FIRST: as of `store`."""
        if self.written is None:
            rows = work.lengths.seq_k - work.tile * UNIT
            self.store(acc, work, work.first_k + work.tile.to(gl.int64) * UNIT, rows, FIRST)
        else:
            self.add(acc, work, FIRST)


@struct
class SplitSums:
    """Sums of dq between two KV splits: place [B * H, tiles * 64, D] fp32, tiles a multiple of QUERY_TILES; without ON none."""

    place: Value
    heads: gl.tensor
    config: BackwardConfig
    ON: gl.constexpr

    @jit
    def of(self, work, query_tile, acc, COLUMN: gl.constexpr):
        """Pointers to the sum of a query tile, of the columns from COLUMN on that acc has."""
        LAYOUT: gl.constexpr = acc.type.layout
        D: gl.constexpr = self.config.D
        QUERY_TILES: gl.constexpr = self.config.QUERY_TILES
        tiles = (work.lengths.q_tiles + QUERY_TILES - 1) // QUERY_TILES * QUERY_TILES
        o_r = gl.arange(0, UNIT, layout=gl.SliceLayout(1, LAYOUT))
        o_d = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT)) + COLUMN
        row = (work.batch * self.heads + work.head).to(gl.int64)
        place = self.place + (row * tiles + query_tile) * (UNIT * D)
        return place + gl.expand_dims(o_r * D, 1) + gl.expand_dims(o_d, 0)

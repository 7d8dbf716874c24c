"""Constants of the backward kernels that keep dS, and the layouts of their tensors."""

from .config import accumulator
from .gluon import aggregate, constexpr_function, gl

UNIT = gl.constexpr(64)  # tokens of a tile
STATISTICS = gl.constexpr(128)  # numbers of a query tile: 64 lse, 64 delta


@aggregate
class BackwardConfig:
    """Shared memory is one pool of 2 * SLOTS + 2 tiles [64, D], which each kind of work tile divides as it needs.

    PANELS_QK, PANELS_V: of 64 columns that hold the head dims; the rest of a tile is neither loaded nor multiplied."""

    DTYPE: gl.constexpr
    D: gl.constexpr  # columns of a tile, at least the head dims
    SLOTS: gl.constexpr  # of the rings of q and of dout
    QUERY_TILES: gl.constexpr  # of a work tile for dq, which share K: 1, 2 or 4
    DQ_SLOTS: gl.constexpr  # of the ring of K and of dS for dq
    TILES: gl.constexpr  # of the pool
    HOLD: gl.constexpr  # keep K and V in registers: shared memory is read half as often for S and dP
    PANELS_QK: gl.constexpr
    PANELS_V: gl.constexpr
    VARLEN: gl.constexpr  # packed sequences: rows behind the end of one are the next one's
    SCORES: gl.constexpr  # layouts: of S, P, dP and dS [64 keys, 64 queries],
    OUT: gl.constexpr  # of dq and dk [64, COLUMNS],
    COLUMNS: gl.constexpr
    OUT_REST: gl.constexpr  # of the last 64 columns of three panels, which are no power of two
    REST: gl.constexpr  # 64 then, else 0
    OUT_V: gl.constexpr  # of dv [64, COLUMNS_V],
    COLUMNS_V: gl.constexpr
    REST_V: gl.constexpr
    LEFT: gl.constexpr  # of P and dS as left operands for dk,
    LEFT_V: gl.constexpr  # for dv,
    LEFT_REST: gl.constexpr  # for the last columns of either,
    OWN: gl.constexpr  # and of K and V

    @constexpr_function
    def __init__(self, DTYPE, D, SLOTS, QUERY_TILES, HOLD=False, VARLEN=False, PANELS_QK=None, PANELS_V=None):
        self.DTYPE, self.D, self.SLOTS = gl.constexpr(DTYPE), gl.constexpr(D), gl.constexpr(SLOTS)
        self.QUERY_TILES, self.HOLD = gl.constexpr(QUERY_TILES), gl.constexpr(HOLD)
        self.VARLEN = gl.constexpr(VARLEN)
        panels, tiles = D // 64, 2 * SLOTS + 2
        panels_qk, panels_v = PANELS_QK or panels, PANELS_V or panels
        self.TILES = gl.constexpr(tiles)
        self.DQ_SLOTS = gl.constexpr(tiles * panels // (panels + QUERY_TILES))
        columns, columns_v = (64 * (each if each != 3 else 2) for each in (panels_qk, panels_v))
        self.PANELS_QK, self.PANELS_V = gl.constexpr(panels_qk), gl.constexpr(panels_v)
        self.COLUMNS, self.COLUMNS_V = gl.constexpr(columns), gl.constexpr(columns_v)
        self.REST = gl.constexpr(64 if panels_qk == 3 else 0)
        self.REST_V = gl.constexpr(64 if panels_v == 3 else 0)
        scores, out, out_v = accumulator(64), accumulator(columns), accumulator(columns_v)
        self.SCORES, self.OUT, self.OUT_V = gl.constexpr(scores), gl.constexpr(out), gl.constexpr(out_v)
        self.OUT_REST = gl.constexpr(accumulator(64))
        self.LEFT = gl.constexpr(gl.DotOperandLayout(0, out, k_width=2))
        self.LEFT_REST = gl.constexpr(gl.DotOperandLayout(0, accumulator(64), k_width=2))
        self.LEFT_V = gl.constexpr(gl.DotOperandLayout(0, out_v, k_width=2))
        self.OWN = gl.constexpr(gl.DotOperandLayout(0, scores, k_width=2))

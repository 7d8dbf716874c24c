"""Constants of the backward kernels that keep dS, and the layouts of their tensors."""

from .config import accumulator
from .gluon import aggregate, constexpr_function, gl

UNIT = gl.constexpr(64)  # tokens of a tile
STATISTICS = gl.constexpr(128)  # numbers of a query tile: 64 lse, 64 delta


@aggregate
class BackwardConfig:
    """Shared memory is one pool of 2 * SLOTS + 2 tiles [64, D], which each kind of work tile divides as it needs."""

    DTYPE: gl.constexpr
    D: gl.constexpr  # columns of a tile, at least the head dims
    SLOTS: gl.constexpr  # of the rings of q and of dout
    QUERY_TILES: gl.constexpr  # of a work tile for dq, which share K: 1 or 2
    DQ_SLOTS: gl.constexpr  # of the ring of K and of dS for dq
    TILES: gl.constexpr  # of the pool
    HOLD: gl.constexpr  # keep K and V in registers: shared memory is read half as often for S and dP
    VARLEN: gl.constexpr  # packed sequences: rows behind the end of one are the next one's
    SCORES: gl.constexpr  # layouts: of S, P, dP and dS [64 keys, 64 queries],
    OUT: gl.constexpr  # of dq, dk and dv [64, D],
    LEFT: gl.constexpr  # of P and dS as left operands,
    OWN: gl.constexpr  # and of K and V

    @constexpr_function
    def __init__(self, DTYPE, D, SLOTS, QUERY_TILES, HOLD=False, VARLEN=False):
        self.DTYPE, self.D, self.SLOTS = gl.constexpr(DTYPE), gl.constexpr(D), gl.constexpr(SLOTS)
        self.QUERY_TILES, self.HOLD = gl.constexpr(QUERY_TILES), gl.constexpr(HOLD)
        self.VARLEN = gl.constexpr(VARLEN)
        panels, tiles = D // 64, 2 * SLOTS + 2
        self.TILES = gl.constexpr(tiles)
        self.DQ_SLOTS = gl.constexpr(tiles * panels // (panels + QUERY_TILES))
        scores, out = accumulator(64), accumulator(D)
        self.SCORES, self.OUT = gl.constexpr(scores), gl.constexpr(out)
        self.LEFT = gl.constexpr(gl.DotOperandLayout(0, out, k_width=2))
        self.OWN = gl.constexpr(gl.DotOperandLayout(0, scores, k_width=2))

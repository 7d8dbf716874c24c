"""The last tiles of the sequences of a packed batch, with zeros behind their ends.

In the tensors the next sequence follows, which may be NaN: neither a mask nor a probability of 0 takes a NaN out of a product.
`kernels.backward.backward_packed_blocks` copies these tiles, so whoever multiplies need not look for an end.
"""

from .backward_config import UNIT
from .gluon import descriptor, gl, jit, tma_load
from .parts import PANEL
from .structs import struct

KEYS = gl.constexpr(128)  # of a program and so of a tile of K and V: two consumers of 64


@struct
class Tails:
    """desc: tiles [64, 64] of a scratch tensor, box [64, 64], or None where sequences are not packed; of q [H, sequences], dout
    [H, sequences], K and V [H/group, sequences] a tile of QUERIES or 128 rows, panel by panel."""

    desc: descriptor | gl.constexpr
    sequences: gl.tensor
    heads: gl.tensor
    kv_heads: gl.tensor
    QUERIES: gl.constexpr
    HELD: gl.constexpr  # columns

    @jit
    def load_queries(self, WHICH: gl.constexpr, bar, panels, slot, head, sequence):
        """Issue the TMA loads of q's last tile (WHICH = 0) or dout's (1)."""
        number = (WHICH * self.heads + head) * self.sequences + sequence
        self.load(bar, panels, slot, number * (self.HELD * self.QUERIES // (PANEL * UNIT)), self.QUERIES)

    @jit
    def load_keys(self, WHICH: gl.constexpr, bar, panels, head, sequence):
        """Of K's (0) or V's (1)."""
        before = 2 * self.heads * self.sequences * (self.HELD * self.QUERIES // (PANEL * UNIT))
        number = (WHICH * self.kv_heads + head) * self.sequences + sequence
        self.load(bar, panels, 0, before + number * (self.HELD * KEYS // (PANEL * UNIT)), KEYS)

    @jit
    def load(self, bar, panels, slot, first, ROWS: gl.constexpr):
        """Tiles from number `first` on."""
        PANELS: gl.constexpr = self.HELD // PANEL
        PER: gl.constexpr = ROWS // UNIT
        for p in gl.static_range(PANELS):
            for u in gl.static_range(PER):
                to = panels.index(slot * PANELS + p).slice(u * UNIT, UNIT, dim=0)
                tma_load(self.desc, [(first + p * PER + u) * UNIT, 0], bar, to)

"""P and dS of a tile, made again from its scores and from what is kept of each query.

Statistics are one row of fp32 numbers a query tile: lse in base 2 of its queries, then their delta
(kernels.backward_statistics).  A query that counts for nothing has lse +inf, so its probabilities are 0 without a mask.  The last
row is that of a tile without queries: what KV tiles meet that nobody sees.
"""

from .gluon import gl, jit
from .structs import Value, struct


@struct
class Recompute:
    """statistics [slots, 2 * QUERIES] in shared memory; scale: of the scores, to base 2; SCORES: layout of [keys, QUERIES]."""

    statistics: gl.shared_memory_descriptor
    scale: Value
    SCORES: gl.constexpr
    QUERIES: gl.constexpr

    @jit
    def row(self, slot):
        """The statistics of a slot's query tile."""
        return self.statistics.index(slot)

    @jit
    def lse(self, row):
        """That of each column of the scores."""
        return row.slice(0, self.QUERIES).load(gl.SliceLayout(0, self.SCORES))

    @jit
    def probabilities(self, s, lse):
        """P = exp2(S * scale - lse)."""
        return gl.exp2(s * self.scale - gl.expand_dims(lse, 0))

    @jit
    def gradient(self, p, dp, row):
        """dS = P (dP - delta)."""
        delta = row.slice(self.QUERIES, self.QUERIES).load(gl.SliceLayout(0, self.SCORES))
        return p * (dp - gl.expand_dims(delta, 0))

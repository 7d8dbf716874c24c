"""The end of a query tile: where its rows of the result and of the logarithms of the sums lie, and their stores."""

from ...device.state import state_finish
from .config import Config, Problem
from .gluon import aggregate, constexpr_function, gl, jit
from .parts import reciprocal, store_accumulator, store_each, store_lse


@aggregate
class Epilogue:
    """Out [B, Sq, H, COLUMNS] by strides and Lse [B, H, Sq]; of a packed batch Out [T, H, COLUMNS] and Lse [H, T]."""

    Out: gl.tensor
    Lse: gl.tensor
    stride_b: gl.tensor
    stride_m: gl.tensor
    stride_h: gl.tensor
    problem: Problem
    config: Config
    COLUMNS: gl.constexpr

    @constexpr_function
    def __init__(self, Out, Lse, stride_b, stride_m, stride_h, problem, config, COLUMNS):
        self.Out, self.Lse = Out, Lse
        self.stride_b, self.stride_m, self.stride_h = stride_b, stride_m, stride_h
        self.problem, self.config, self.COLUMNS = problem, config, gl.constexpr(COLUMNS)

    @jit
    def store(self, acc, m, l, work, row, FIRST: gl.constexpr = 0, factor=None):
        """64 rows from `row` on, columns from FIRST on: acc / l, times a factor, and the natural lse, (m + log2 l) ln 2.

        Consumers of the same rows have the same m and l: who has the first columns stores the lse."""
        PACK: gl.constexpr = self.config.PACK
        WIDE: gl.constexpr = acc[0].shape[1]
        ROW: gl.constexpr = gl.SliceLayout(1, self.config.SCORES)
        lse, out, rows = self._lse(work, row), self._out(work, row), work.seq_q * PACK - row
        if FIRST == 0:
            store_lse(lse, m, l, rows, rows, ROW, PACK, work.seq_q)
        self._store_columns(out + FIRST, acc[0], l, factor, rows, self.COLUMNS - FIRST)
        if len(acc) == 2:
            self._store_columns(out + FIRST + WIDE, acc[1], l, factor, rows, self.COLUMNS - FIRST - WIDE)

    @jit
    def store_total(self, acc, m, l, work, row):
        """The same of numerics="invariant", by attention_invariant's own division; m, l [64] in acc[0]'s layout."""
        PACK: gl.constexpr = self.config.PACK
        WIDE: gl.constexpr = acc[0].shape[1]
        out, rows = self._out(work, row), work.seq_q * PACK - row
        first, lse = state_finish(acc[0] + 0.0, m, l)  # + 0.0: a zero has one sign
        store_each(self._lse(work, row), lse, rows, rows, PACK, work.seq_q)
        self._store_left(out, first, rows, self.COLUMNS)
        if len(acc) == 2:
            ROW: gl.constexpr = gl.SliceLayout(1, acc[1].type.layout)
            rest, _ = state_finish(acc[1] + 0.0, gl.convert_layout(m, ROW), gl.convert_layout(l, ROW))
            self._store_left(out + WIDE, rest, rows, self.COLUMNS - WIDE)

    @jit
    def store_live(self, made, m, l, work, row, live):
        """64 rows from `row` on as they are, of which the first `live` are real queries; the others give 0 and -inf."""
        ROW: gl.constexpr = gl.SliceLayout(1, self.config.SCORES)
        out, lse, rows = self._out(work, row), self._lse(work, row), work.seq_q - row
        dead = gl.arange(0, 64, layout=gl.SliceLayout(1, made.type.layout)) >= live
        made = gl.where(gl.expand_dims(dead, 1), 0.0, made)
        store_lse(lse, m, l, rows, live, ROW)
        store_accumulator(out, made, rows, self.stride_m, self.config.DTYPE)

    @jit
    def _lse(self, work, row):
        """Where the logarithm of a row lies."""
        PACK: gl.constexpr = self.config.PACK
        b, h = work.batch.to(gl.int64), work.head.to(gl.int64)
        if self.config.VARLEN:
            return self.Lse + h * self.problem.total_q + work.first_q + row
        else:
            return self.Lse + (b * self.problem.heads + work.head) * (work.seq_q * PACK) + row // PACK

    @jit
    def _out(self, work, row):
        """Where its result lies."""
        PACK: gl.constexpr = self.config.PACK
        b, h = work.batch.to(gl.int64), work.head.to(gl.int64)
        first = (work.first_q + row // PACK).to(gl.int64)
        return self.Out + b * self.stride_b + h * (self.stride_h * PACK) + first * self.stride_m

    @jit
    def _store_columns(self, out, acc, l, factor, rows, LEFT: gl.constexpr):
        by = reciprocal(l, gl.SliceLayout(1, acc.type.layout))
        if factor is not None:
            by = by * factor
        self._store_left(out, acc * gl.expand_dims(by, 1), rows, LEFT)

    @jit
    def _store_left(self, out, made, rows, LEFT: gl.constexpr):
        COLUMNS: gl.constexpr = None if LEFT >= made.shape[1] else LEFT
        store_accumulator(out, made, rows, self.stride_m, self.config.DTYPE, COLUMNS, self.config.PACK, self.stride_h)

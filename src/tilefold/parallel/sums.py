"""What pieces give for a rank's rows, put together: outputs that are merged, gradients that are added.

It is known beforehand which rows each piece has.  So the first result of a row is kept as it came, nothing is filled with zeros
to be read again, and the last one is written in the dtype that is asked for; fp32 is between them.  What comes first for all
rows is where the result is made."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ..ops.cache.merge import merge_into

Tensors = tuple[torch.Tensor, ...]
Area = tuple[int, int]  # rows low to high


class _Held(NamedTuple):
    """What rows low to high come to so far: rows of a piece whose first row is `first`, or of the fp32 sum where part is None."""

    low: int
    high: int
    part: Tensors | None
    first: int


class _Rows:
    """Rows and the pieces that come for them; areas: of all pieces, in their order."""

    def __init__(self, rows: int, areas: Iterable[Area]) -> None:
        self.rows, self.finishes = rows, True
        self.later = [(low, high) for low, high in areas if low < high]
        self.gaps = _without([(0, rows)], self.later)  # rows of no piece
        self.held: list[_Held] = []

    def take(self, part: Tensors, low: int, high: int) -> None:
        """The next piece, of rows low to high."""
        if low == high:
            return
        self.later.remove((low, high))
        if (low, high) == (0, self.rows):
            self.adopt(part)
        for a, b, held, last in self._runs(low, high):
            one = _Held(a, b, part, low)
            kept = self.join(held, one, last)
            self.held = [rest for other in self.held for rest in _outside(other, a, b)]
            if kept is not None:
                self.held.append(kept)

    def _runs(self, low: int, high: int) -> list[tuple[int, int, _Held | None, bool]]:
        """Rows low to high cut where something else is held, or more is to come: (low, high, what is held, nothing comes)."""
        bounds = [*self.later, *((one.low, one.high) for one in self.held)]
        marks = {low, high, *(m for pair in bounds for m in pair if low < m < high)}
        found: list[tuple[int, int, _Held | None, bool]] = []
        for a, b in pairwise(sorted(marks)):
            held = next((one for one in self.held if one.low <= a < one.high), None)
            last = self.finishes and all(stop <= a or b <= start for start, stop in self.later)
            before = found[-1] if found else None
            if before and before[3] == last and _same(before[2], held):
                found[-1] = before[0], b, held, last
            else:
                found.append((a, b, held, last))
        return found

    def adopt(self, part: Tensors) -> None:
        """Make the result in the memory of a piece of all rows, if it can be and nothing of it is made yet."""
        raise NotImplementedError

    def join(self, held: _Held | None, one: _Held, last: bool) -> _Held | None:
        """Put the rows of a piece to what is held for them: what is held from now on, None if they are done."""
        raise NotImplementedError


def _fits(t: torch.Tensor, dtype: torch.dtype) -> bool:
    return t.dtype == dtype and t.is_contiguous()


def _same(a: _Held | None, b: _Held | None) -> bool:
    return a is b or (a is not None and b is not None and a.part is b.part and a.first == b.first)


def _outside(one: _Held, low: int, high: int) -> list[_Held]:
    sides = one._replace(high=min(one.high, low)), one._replace(low=max(one.low, high))
    return [side for side in sides if side.low < side.high]


def _without(areas: Sequence[Area], taken: Iterable[Area]) -> list[Area]:
    left = list(areas)
    for low, high in taken:
        left = [s for a, b in left for s in ((a, min(b, low)), (max(a, high), b)) if s[0] < s[1]]
    return left


class State(_Rows):
    """(out, lse) of queries over the keys seen so far: out [batch, seq, heads, dim_v], lse [batch, heads, seq], merged in fp32
    (fp64 for fp64 queries); without keys 0 and -inf.  A piece is such a pair."""

    def __init__(self, q: torch.Tensor, dim_v: int, areas: Iterable[Area]) -> None:
        super().__init__(q.shape[1], areas)
        self.exact = torch.promote_types(q.dtype, torch.float32)
        self.like, self.shape = q, (*q.shape[:3], dim_v)
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None
        self.work: torch.Tensor | None = None
        self.first = 0  # row of `work`

    def adopt(self, part: Tensors) -> None:
        out, lse = part
        if self.out is None and _fits(out, self.like.dtype):
            self.out = out
        if self.lse is None and _fits(lse, self.exact):
            self.lse = lse

    def join(self, held: _Held | None, one: _Held, last: bool) -> _Held | None:
        if held is None and not last:
            return one
        there = self._made(one, last)
        if held is None:
            assert one.part is not None
            for to, of, own, part in zip(there, self._rows(one), (self.out, self.lse), one.part, strict=True):
                if own is not part:
                    to.copy_(of)
            return None
        merge_into(*self._rows(held._replace(low=one.low, high=one.high)), *self._rows(one), *there)
        return None if last else one._replace(part=None, first=0)

    def _made(self, one: _Held, last: bool) -> Tensors:
        """Where the merge of these rows goes; what it lies in is made when it is first needed."""
        if last and self.out is None:
            self.out = self.like.new_empty(self.shape)
        if not last and self.work is None:  # as many rows as are not done yet
            self.first = min(low for low, _ in self.later)
            rows = max(high for _, high in self.later) - self.first
            self.work = self.like.new_empty((self.shape[0], rows, *self.shape[2:]), dtype=self.exact)
        if self.lse is None:
            self.lse = self.like.new_empty((self.shape[0], self.shape[2], self.shape[1]), dtype=self.exact)
        out, first = (self.out, 0) if last else (self.work, self.first)
        assert out is not None
        return out[:, one.low - first : one.high - first], self.lse[:, :, one.low : one.high]

    def _rows(self, one: _Held) -> Tensors:
        if one.part is None:
            return self._made(one, False)
        low, high = one.low - one.first, one.high - one.first
        return one.part[0][:, low:high], one.part[1][:, :, low:high]

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out in the queries' dtype and lse, once all pieces have come."""
        assert not self.held, "a piece has not come"
        self.work = None
        for low, high in self.gaps:
            out, lse = self._made(_Held(low, high, None, 0), True)
            out.zero_()
            lse.fill_(float("-inf"))
        if self.out is None or self.lse is None:  # there are no rows
            self._made(_Held(0, 0, None, 0), True)
        assert self.out is not None
        assert self.lse is not None
        return self.out.to(self.like.dtype), self.lse


class Sum(_Rows):
    """The gradient of some rows [batch, rows, heads, dim], the sum over pieces.  Where a row has more than two it is made in fp32
    (fp64 for fp64).

    into: makes it there, in the dtype of that; started: which has a summand already."""

    def __init__(
        self, like: torch.Tensor, areas: Iterable[Area], into: torch.Tensor | None = None, started: bool = False
    ) -> None:
        super().__init__(like.shape[1], areas)
        self.like, self.into, self.work = like, into, into
        self.out: torch.Tensor | None = None
        self.exact = into is not None or _deepest(self.later) > 2
        self.finishes = not self.exact  # a sum in fp32 stays open until `result`
        if started:
            self.held, self.gaps = [_Held(0, self.rows, None, 0)], []

    def adopt(self, part: Tensors) -> None:
        if not self.exact and self.out is None and _fits(part[0], self.like.dtype):
            self.out = part[0]

    def join(self, held: _Held | None, one: _Held, last: bool) -> _Held | None:
        assert one.part is not None
        part = one.part[0][:, one.low - one.first : one.high - one.first]
        if self.exact:
            there = self._work()[:, one.low : one.high]
            _ = there.copy_(part) if held is None else there.add_(part)
            return one._replace(part=None, first=0)
        if held is None and not last:
            return one
        there = self._out()[:, one.low : one.high]
        if held is None:
            if self.out is not one.part[0]:
                there.copy_(part)
        else:
            assert held.part is not None
            first = held.part[0][:, one.low - held.first : one.high - held.first]
            torch.add(first, part, out=there)  # in fp32, rounded once; `first` may lie there
        return None

    def _work(self) -> torch.Tensor:
        if self.work is None:
            exact = torch.promote_types(self.like.dtype, torch.float32)
            self.work = self.like.new_empty(self.like.shape, dtype=exact)
        return self.work

    def _out(self) -> torch.Tensor:
        if self.out is None:
            self.out = self.like.new_empty(self.like.shape)
        return self.out

    def result(self) -> torch.Tensor:
        """The sum, in the dtype of `like`, or `into`, once all pieces have come."""
        made = self._work() if self.exact else self._out() if self.gaps or self.out is None else self.out
        for low, high in self.gaps:
            made[:, low:high].zero_()
        return made if made is self.into else made.to(self.like.dtype)


def _deepest(areas: Sequence[Area]) -> int:
    """The most areas that have a row in common."""
    found = depth = 0
    for _, step in sorted((m, s) for low, high in areas for m, s in ((low, 1), (high, -1))):
        depth += step
        found = max(found, depth)
    return found

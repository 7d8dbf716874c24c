"""Tensors of several ranks as one in ascending order of tokens: what travels goes from and to where it belongs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..plan.parallel.sharding import Spans, ordered
from .exchange import Transfer, begin
from .tokens import take

MOST = 32  # messages between two ranks for one tensor; where rows lie in more parts, they travel as one and are copied

Tensors = Sequence[torch.Tensor]


class Arriving(NamedTuple):
    """Joint tensors that are under way.  staged: what is to be copied to where it belongs: (to, from)."""

    transfer: Transfer
    joint: list[torch.Tensor]
    staged: list[tuple[list[torch.Tensor], list[torch.Tensor]]]

    def wait(self) -> list[torch.Tensor]:
        """The joint tensors, once they are there."""
        self.transfer.wait()
        for places, parts in self.staged:
            for to, of in zip(places, parts, strict=True):
                to.copy_(of)
        self.staged.clear()
        return self.joint


class Places:
    """Where the rows of each rank of a group lie in joint tensors [batch, rows, ...] of all of them, or of all but this one's.

    spans: the tokens of each rank; own: whether this one's are among the joint rows."""

    def __init__(self, group: Any, spans: Sequence[Spans], own: bool = True) -> None:
        self.group, self.spans, self.own = group, spans, own
        self.rank = dist.get_rank(group)
        self.rows: list[list[tuple[int, int]]] = [[] for _ in spans]  # of a rank: (first joint row, count)
        self.total = 0
        for part, _, count in ordered([one if own or r != self.rank else () for r, one in enumerate(spans)]):
            self.rows[part].append((self.total, count))
            self.total += count

    def length(self, part: int) -> int:
        """Rows of a rank."""
        return sum(stop - start for start, stop in self.spans[part])

    def _direct(self, part: int, batch: int) -> bool:
        """Do the rows of a rank travel one by one?  Both sides go by this."""
        return batch * len(self.spans[part]) <= MOST

    def _parts(self, t: torch.Tensor, part: int) -> list[torch.Tensor]:
        """The rows of a rank's own tensor, part after part."""
        at, found = 0, []
        for start, stop in self.spans[part]:
            found.append((at, stop - start))
            at += stop - start
        return _cut(t, found)

    def _messages(self, t: torch.Tensor, part: int) -> list[torch.Tensor]:
        """A rank's own tensor as it travels."""
        return self._parts(t, part) if self._direct(part, t.shape[0]) else [t]

    def gather(self, mine: Sequence[Tensors], what: str) -> Arriving:
        """Begin to make joint tensors.  mine: this rank's rows, contiguous, as each rank gets them; its own entry, any strides,
        is copied, if own rows are among the joint ones."""
        joint = [t.new_empty(t.shape[0], self.total, *t.shape[2:]) for t in mine[self.rank]]
        receives: list[list[torch.Tensor]] = []
        staged = []
        for part in range(len(self.spans)):
            arriving: list[torch.Tensor] = []
            for t in joint if part != self.rank else ():
                places = _cut(t, self.rows[part])
                if self._direct(part, t.shape[0]):
                    arriving += places
                else:
                    arriving.append(t.new_empty(t.shape[0], self.length(part), *t.shape[2:]))
                    staged.append((places, self._parts(arriving[-1], part)))
            receives.append(arriving)
        others = [() if part == self.rank else one for part, one in enumerate(mine)]
        sends = [[m for t in one for m in self._messages(t, self.rank)] for one in others]
        transfer = begin(sends, receives, self.group, what)
        for t, whole in zip(mine[self.rank], joint, strict=True):
            for to, of in zip(_cut(whole, self.rows[self.rank]), self._parts(t, self.rank), strict=False):
                to.copy_(of)
        return Arriving(transfer, joint, staged)

    def scatter(self, joint: Tensors, what: str) -> list[list[torch.Tensor]]:
        """Joint tensors, contiguous, back to the ranks of their rows: from each other rank what it has for this one's rows, []
        from itself."""
        sends: list[list[torch.Tensor]] = []
        for part, rows in enumerate(self.rows):
            leaving: list[torch.Tensor] = []
            for t in joint if part != self.rank else ():
                direct = self._direct(part, t.shape[0])
                leaving += _cut(t, rows) if direct else [take(t, tuple((at, at + n) for at, n in rows), 1)]
            sends.append([m.contiguous() for m in leaving])
        got = [
            [t.new_empty(t.shape[0], self.length(self.rank), *t.shape[2:]) for t in joint] if part != self.rank else []
            for part in range(len(self.spans))
        ]
        receives = [[m for t in one for m in self._messages(t, self.rank)] for one in got]
        begin(sends, receives, self.group, what).wait()
        return got

    def keep(self, t: torch.Tensor, to: torch.Tensor) -> None:
        """Copy this rank's rows of a joint tensor to where they belong, [batch, own rows, ...]."""
        for into, of in zip(self._parts(to, self.rank), _cut(t, self.rows[self.rank]), strict=True):
            into.copy_(of)


def _cut(t: torch.Tensor, rows: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Ranges (first, count) of rows of [batch, rows, ...], of one batch entry after the other."""
    return [one[at : at + count] for one in t.unbind(0) for at, count in rows]

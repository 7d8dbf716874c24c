"""Which tokens lie on which rank: contiguous and zigzag shards of one sequence or of many packed ones, as values."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from tilefold.errors import DtypeError, ShapeError, ValueRangeError

Spans = tuple[tuple[int, int], ...]
"""Ascending, disjoint ranges (start, stop) of global token numbers: how tokens lie in a rank's tensors, one after the other."""

KINDS = ("contiguous", "zigzag")


@dataclass(frozen=True, slots=True)
class Sharding:
    """The tokens of every rank; made by `shard`.

    starts: where each sequence starts, and the end: (0, total) for one sequence.  ranks: how many hold tokens.
    kind: "contiguous", each rank holds one range of all tokens; or "zigzag", each sequence is cut into 2 * ranks chunks and rank
    r holds chunks r and 2 * ranks - 1 - r, so that under a causal mask all ranks have the same work.
    lengths: tokens of each rank, given by hand ("contiguous" only); () for shares as even as possible.
    """

    starts: tuple[int, ...]
    ranks: int
    kind: str = "contiguous"
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueRangeError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}")
        if type(self.ranks) is not int or self.ranks < 1:
            raise ValueRangeError(f"ranks must be an int, at least 1, got {self.ranks!r}")
        if len(self.starts) < 2 or self.starts[0] != 0 or any(a > b for a, b in pairwise(self.starts)):
            raise ValueRangeError(f"the offsets of the sequences must ascend from 0, got {_short(self.starts)}")
        if self.lengths and self.kind != "contiguous":
            raise ValueRangeError(f"lengths go with kind 'contiguous', got kind {self.kind!r}")
        if self.lengths and (len(self.lengths) != self.ranks or min(self.lengths) < 0):
            raise ValueRangeError(f"lengths must be {self.ranks} numbers, one a rank, at least 0; got {self.lengths}")
        if self.lengths and sum(self.lengths) != self.total:
            raise ShapeError(f"lengths add up to {sum(self.lengths)} tokens, but there are {self.total}")

    @property
    def total(self) -> int:
        """Tokens on all ranks."""
        return self.starts[-1]

    @property
    def sequences(self) -> int:
        """Sequences, empty ones too."""
        return len(self.starts) - 1

    def spans(self, rank: int) -> Spans:
        """The global token numbers of a rank, as ranges, in the order in which its tensors hold them."""
        if not 0 <= rank < self.ranks:
            raise ValueRangeError(f"rank must be 0 to {self.ranks - 1}, got {rank}")
        return _spans(self, rank)

    def length(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(stop - start for start, stop in self.spans(rank))

    def positions(self, rank: int) -> tuple[tuple[int, int], ...]:
        """For rotary embedding: (first position within its sequence, tokens) of each piece of a rank's tokens, in order."""
        found = []
        for start, stop in self.spans(rank):
            for low, high in pairwise(self.starts):
                a, b = max(start, low), min(stop, high)
                if a < b:
                    found.append((a - low, b - a))
        return tuple(found)

    def __str__(self) -> str:
        what = "one sequence" if self.sequences == 1 else f"{self.sequences} sequences"
        lengths = [self.length(r) for r in range(self.ranks)]
        return (
            f"{self.kind}: {self.total} tokens in {what} over {self.ranks} ranks, {min(lengths)} to {max(lengths)} each"
        )


def shard(
    tokens: int | Sequence[int], ranks: int, kind: str = "contiguous", lengths: Sequence[int] | None = None
) -> Sharding:
    """The sharding of one sequence, or of packed ones, over ranks.

    tokens: the sequence's length; or the offsets of packed sequences, [sequences + 1] from 0 (cu_seqlens as a list).
    kind: "contiguous" or "zigzag"; any length works, shares differ by a few tokens.  lengths: of each rank, "contiguous" only.
    Raises DtypeError, ShapeError, ValueRangeError, naming the argument."""
    if isinstance(tokens, bool) or not isinstance(tokens, int | Sequence):
        raise DtypeError(f"tokens must be an int or a sequence of offsets, got {type(tokens).__name__}")
    if isinstance(tokens, int) and tokens < 0:
        raise ValueRangeError(f"tokens must be at least 0, got {tokens}")
    if lengths is not None and not isinstance(lengths, Sequence):
        raise DtypeError(f"lengths must be a sequence of ints, one a rank, or None, got {type(lengths).__name__}")
    starts = (0, tokens) if isinstance(tokens, int) else tuple(tokens)
    if not all(type(one) is int for one in (*starts, *(lengths or ()))):
        raise DtypeError(f"offsets and lengths must be ints (a tensor's .tolist()), got {_short(starts)}, {lengths}")
    return Sharding(starts, ranks, kind, tuple(lengths or ()))


@lru_cache(maxsize=4096)
def _spans(sharding: Sharding, rank: int) -> Spans:
    n = sharding.ranks
    if sharding.lengths:
        ends = (0, *accumulate(sharding.lengths))
        return union([(ends[rank], ends[rank + 1])])
    if sharding.kind == "contiguous":
        return union([(sharding.total * rank // n, sharding.total * (rank + 1) // n)])
    found = []
    for low, high in pairwise(sharding.starts):
        length = high - low
        for chunk in (rank, 2 * n - 1 - rank):
            found.append((low + length * chunk // (2 * n), low + length * (chunk + 1) // (2 * n)))
    return union(found)


def union(spans: Sequence[tuple[int, int]]) -> Spans:
    """Disjoint spans in ascending order, neighbours joined, empty ones left out."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def ordered(parts: Sequence[Spans]) -> tuple[tuple[int, int, int], ...]:
    """How the tokens of several ranks become one tensor in ascending order: (part, first row in it, rows), in that order."""
    found = []
    for part, spans in enumerate(parts):
        row = 0
        for start, stop in spans:
            found.append((start, part, row, stop - start))
            row += stop - start
    return tuple((part, row, rows) for _, part, row, rows in sorted(found))


def _short(values: Sequence[object]) -> str:
    text = ", ".join(map(str, values[:8]))
    return f"({text}{', ...' if len(values) > 8 else ''})"

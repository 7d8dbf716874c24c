"""Which rectangles of (queries of one rank) x (keys of another) a causal or window mask leaves, and the mask of each.

Masks of the library are aligned to the bottom right of what a call is given.  A rectangle out of a longer sequence has its own
corner, so its window is shifted, and queries and keys that see nothing are cut off first: then no side of a window is negative.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from tilefold.plan.parallel.sharding import Spans

Window = tuple[int, int]  # (left, right), -1 for unbounded


class Piece(NamedTuple):
    """Rows q_low to q_high of the local queries see keys k_low to k_high of the local keys, within (left, right) aligned to the
    bottom right of this rectangle; -1: unbounded."""

    q_low: int
    q_high: int
    k_low: int
    k_high: int
    left: int = -1
    right: int = -1

    @property
    def full(self) -> bool:
        """Every query sees every key."""
        return self.left < 0 and self.right < 0


class Chain(NamedTuple):
    """Pieces of one window that can be one packed call: they ascend in queries and in keys.  cu_q and cu_k count from the first
    piece's first row; gaps between pieces are sequences without keys, or without queries."""

    pieces: tuple[Piece, ...]
    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]

    @property
    def area(self) -> Piece:
        """The rectangle around all pieces, with their window."""
        first, last = self.pieces[0], self.pieces[-1]
        return Piece(first.q_low, last.q_high, first.k_low, last.k_high, first.left, first.right)

    @property
    def longest(self) -> tuple[int, int]:
        """The most rows of queries and of keys of one sequence."""
        return max(b - a for a, b in pairwise(self.cu_q)), max(b - a for a, b in pairwise(self.cu_k))


@lru_cache(maxsize=4096)
def pieces_of(
    q_spans: Spans, k_spans: Spans, q_starts: tuple[int, ...], k_starts: tuple[int, ...], window: Window
) -> tuple[Piece, ...]:
    """The rectangles that a rank's queries and another's keys have in common, () if the mask leaves nothing.

    q_spans, k_spans: global token numbers.  q_starts, k_starts: offsets of the sequences (as many), whose masks are aligned to
    the bottom right of each."""
    found: list[Piece] = []
    queries, keys = _by_sequence(q_spans, q_starts), _by_sequence(k_spans, k_starts)
    for i, (mine, theirs) in enumerate(zip(queries, keys, strict=True)):
        if mine and theirs:
            shift = k_starts[i + 1] - q_starts[i + 1]  # query t sits at key t + shift
            found += _joined(_one_sequence(mine, theirs, shift, window))
    return tuple(found)


def _by_sequence(spans: Spans, starts: tuple[int, ...]) -> list[list[tuple[int, int, int]]]:
    """(first token, last + 1, local row of the first) of each part of a span, by sequence."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in starts[1:]]
    row = at = 0
    for start, stop in spans:
        while at > 0 and starts[at] > start:
            at -= 1
        while start < stop:
            while starts[at + 1] <= start:
                at += 1
            end = min(stop, starts[at + 1])
            found[at].append((start, end, row))
            row += end - start
            start = end
    return found


def _one_sequence(
    mine: Sequence[tuple[int, int, int]], theirs: Sequence[tuple[int, int, int]], shift: int, window: Window
) -> list[Piece]:
    if window == (-1, 0) and shift == 0 and mine == [(a, b, row + mine[0][2] - theirs[0][2]) for a, b, row in theirs]:
        # The same tokens: their order is all that a causal mask asks for, gaps or not.
        rows = sum(b - a for a, b, _ in mine)
        return [Piece(mine[0][2], mine[0][2] + rows, theirs[0][2], theirs[0][2] + rows, -1, 0)]
    found = []
    for a, b, row in mine:
        for c, d, key in theirs:
            piece = _rectangle(a + shift, b - a, row, c, d - c, key, window)
            if piece is not None:
                found.append(piece)
    return found


def _rectangle(a: int, n: int, row: int, c: int, m: int, key: int, window: Window) -> Piece | None:
    """Queries at positions a to a + n, in rows from `row`; keys at c to c + m, in rows from `key`."""
    left, right = window
    if right >= 0:
        m = min(m, n + a + right - c)  # keys behind what the last query sees
        skip = max(0, c - right - a)  # queries before those that see the first key
        a, n, row = a + skip, n - skip, row + skip
    if n <= 0 or m <= 0:
        return None
    if left >= 0:
        n = min(n, m + c + left - a)  # queries behind those that see the last key
        skip = max(0, a - left - c)  # keys before what the first query sees
        c, m, key = c + skip, m - skip, key + skip
    if n <= 0 or m <= 0:
        return None
    if left >= 0 and right >= 0:
        m = min(m, n + a + right - c)  # the last query may be another now
    corner = (a + n) - (c + m)  # how far the rectangle's corner lies from the diagonal
    wide_left = left < 0 or a + n - 1 - left <= c
    wide_right = right < 0 or a + right >= c + m - 1
    return Piece(
        row,
        row + n,
        key,
        key + m,
        -1 if wide_left else left - corner,
        -1 if wide_right else right + corner,
    )


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours that are folded without a mask become one: first along the keys, then along the queries."""
    by_keys: list[Piece] = []
    for one in sorted(pieces):
        last = by_keys[-1] if by_keys else None
        if last and one.full and last.full and last[:2] == one[:2] and last.k_high == one.k_low:
            by_keys[-1] = last._replace(k_high=one.k_high)
        else:
            by_keys.append(one)
    found: list[Piece] = []
    for one in by_keys:
        above = next(
            (i for i, p in enumerate(found) if p.full and one.full and p.q_high == one.q_low and p[2:4] == one[2:4]),
            None,
        )
        if above is None:
            found.append(one)
        else:
            found[above] = found[above]._replace(q_high=one.q_high)
    return found


@lru_cache(maxsize=4096)
def chains_of(pieces: tuple[Piece, ...]) -> tuple[Chain, ...]:
    """The calls that fold these pieces: those of one window that ascend in queries and keys become one packed call."""
    open_chains: list[list[Piece]] = []
    for one in sorted(pieces):
        for chain in open_chains:
            last = chain[-1]
            if last[4:] == one[4:] and last.q_high <= one.q_low and last.k_high <= one.k_low:
                chain.append(one)
                break
        else:
            open_chains.append([one])
    return tuple(_chain(chain) for chain in open_chains)


def _chain(pieces: list[Piece]) -> Chain:
    cu_q, cu_k = [0], [0]
    q, k = pieces[0].q_low, pieces[0].k_low
    for one in pieces:
        if one.q_low - q > cu_q[-1]:  # queries of no piece: a sequence without keys
            cu_q.append(one.q_low - q)
            cu_k.append(cu_k[-1])
        if one.k_low - k > cu_k[-1]:  # keys of no piece: a sequence without queries
            cu_q.append(cu_q[-1])
            cu_k.append(one.k_low - k)
        cu_q.append(one.q_high - q)
        cu_k.append(one.k_high - k)
    return Chain(tuple(pieces), tuple(cu_q), tuple(cu_k))


@lru_cache(maxsize=256)
def turns_of(
    queries: tuple[Spans, ...],
    keys: tuple[Spans, ...],
    q_starts: tuple[int, ...],
    k_starts: tuple[int, ...],
    window: Window,
) -> int:
    """How many steps of a ring any rank needs, its own keys' included: in step t, rank r meets the keys of rank r - t.  All of
    them, unless a causal window over contiguous shards leaves only the nearest."""
    ranks = len(queries)
    for step in range(ranks - 1, 0, -1):
        if any(pieces_of(queries[r], keys[(r - step) % ranks], q_starts, k_starts, window) for r in range(ranks)):
            return step + 1
    return 1

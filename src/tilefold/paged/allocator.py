"""Who owns which page: the host's half of a paged cache, plain Python without tensors, so that it can be tested by itself.

A page is free, or owned by as many sequences as its reference count says.  Rows are written only into pages with one owner:
`reserve` says which pages must be copied first.  Which page is taken depends on the calls alone: the one given back last, else
the lowest never used.  Taking and giving back cost O(1) a page.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from ..check import check_whole
from ..errors import OutOfPages, ValueRangeError
from .statistics import CacheStatistics

Pairs = list[tuple[int, int]]
"""(from, to) ids of pages."""


@dataclass(slots=True, eq=False)
class Sequence:
    """The host's record of one sequence, for batches over it, too.  Row j is row j % page_size of page pages[j // page_size].

    pages: page ids, ceil(length / page_size) of them; negative ones name pages in host memory.
    writable: rows up to here can be written as things are: neither a page nor a copy is needed.  -1 once freed or swapped out,
        so that the comparison that every step makes anyway finds those, too.
    edits: places of `pages` that have changed, in order; a batch remembers how many of them its table has.
    moved: how often rows that were there before have come to lie elsewhere, or were given up.
    state: "resident", "swapped" or "freed"."""

    id: int
    pages: list[int]
    length: int
    writable: int = 0
    edits: list[int] = field(default_factory=list)
    moved: int = 0
    state: str = "resident"


class PageAllocator:
    """Pages 0 to num_pages - 1 of page_size rows for up to max_sequences sequences of up to max_tokens rows.

    Every method either does all of what it says or raises and has changed nothing."""

    def __init__(self, num_pages: int, page_size: int, max_sequences: int, max_tokens: int) -> None:
        self.num_pages = check_whole("num_pages", num_pages, 1)
        self.page_size = check_whole("page_size", page_size, 1)
        self.max_sequences = check_whole("max_sequences", max_sequences, 1)
        self.max_tokens = check_whole("max_tokens", max_tokens, 1)
        self.max_pages = -(-max_tokens // page_size)  # of one sequence
        self.edited = 0  # goes up whenever any sequence's `edits` grow
        self.moved = 0  # goes up whenever any sequence's `moved` does
        self._owners = array("i", bytes(4 * num_pages))
        self._returned: list[int] = []  # free pages, the last one next
        self._unused = 0  # pages from here on were never taken
        self._sequences: dict[int, Sequence] = {}
        self._host_owners: dict[int, int] = {}  # ids of pages in host memory, all negative
        self._next_id = 0
        self._next_host = -1

    # ---------------------------------------------------------------- what there is

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._returned) + self.num_pages - self._unused

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of all sequences, those swapped out included, oldest first."""
        return tuple(self._sequences)

    def owners(self, page: int) -> int:
        """How many sequences own a page (of either memory)."""
        return self._owners[page] if page >= 0 else self._host_owners.get(page, 0)

    def find(self, id: int, doing: str | None = None) -> Sequence:
        """The record of a sequence; ValueRangeError for an unknown id, and, if `doing` is given, for one swapped out."""
        found = self._sequences.get(id) if type(id) is int else None
        if found is None:
            check_whole("sequence", id)
            raise ValueRangeError(f"sequence {id} is not in the cache: it was freed, or never added ({self._known()})")
        if doing and found.state == "swapped":
            raise ValueRangeError(f"sequence {id} is swapped out: call swap_in({id}) before you {doing} it")
        return found

    def members(self, ids: Iterable[int]) -> list[Sequence]:
        """Records of distinct, resident sequences."""
        given = list(ids)
        found = [self.find(id, "batch") for id in given]
        if len(set(given)) < len(given):
            twice = next(id for id, times in Counter(given).items() if times > 1)
            raise ValueRangeError(f"sequences has {twice} more than once: a sequence grows once in a batch")
        return found

    # ---------------------------------------------------------------- sequences come and go

    def add(self, id: int | None = None) -> int:
        """A new empty sequence; its id, the one given or one never used before."""
        if id is not None and check_whole("sequence", id) in self._sequences:
            raise ValueRangeError(f"sequence {id} is in the cache already: free it, or choose another id")
        return self._admit([], 0, id).id

    def share(self, id: int, tokens: int | None = None) -> int:
        """A new sequence whose rows are the first `tokens` (None: all) of another one's, in the same pages."""
        source = self.find(id, "share")
        length = source.length if tokens is None else check_whole("tokens", tokens)
        if length > source.length:
            raise ValueRangeError(f"tokens must be at most {source.length}, the length of sequence {id}, got {tokens}")
        made = self._admit(source.pages[: -(-length // self.page_size)], length, None)
        for page in made.pages:
            self._owners[page] += 1
        self._settle(made)
        if made.pages and len(made.pages) == len(source.pages):
            self._settle(source)
        return made.id

    def free_sequence(self, id: int) -> list[int]:
        """Forget a sequence; the pages in host memory that nobody owns any more."""
        gone = self.find(id)
        del self._sequences[id]
        dropped = self._drop(gone.pages)
        gone.pages, gone.length, gone.writable, gone.state = [], 0, -1, "freed"
        self._moved(gone)
        return dropped

    def truncate(self, id: int, length: int) -> None:
        """Forget rows from `length` on."""
        short = self.find(id, "truncate")
        if check_whole("length", length) > short.length:
            raise ValueRangeError(f"length must be at most {short.length}, that of sequence {id}, got {length}")
        keep = -(-length // self.page_size)
        if keep < len(short.pages):
            self._drop(short.pages[keep:])
            del short.pages[keep:]
        if length < short.length:
            short.length = length
            self._moved(short)
        self._settle(short)

    # ---------------------------------------------------------------- growth

    def reserve(self, members: SequenceOf[Sequence], counts: SequenceOf[int]) -> Pairs:
        """Lengthen members[i] by counts[i] rows; (from, to) of the pages to copy, all layers, before those rows are written.

        members: distinct, from `members`.  Raises OutOfPages, and ValueRangeError past max_tokens or for one that was freed or
        swapped out since."""
        ends = [one.length + n for one, n in zip(members, counts, strict=True)]
        late = [i for i, one in enumerate(members) if ends[i] > one.writable]
        copies = self._extend(members, ends, late) if late else []
        for one, end in zip(members, ends, strict=True):
            one.length = end
        return copies

    def _extend(self, members: SequenceOf[Sequence], ends: list[int], late: list[int]) -> Pairs:
        """Pages for members[i], i in late, up to ends[i] rows."""
        shared = self._to_copy(members, ends, late)
        size = self.page_size
        new = {i: -(-ends[i] // size) - len(members[i].pages) for i in late}
        needed = len(shared) + sum(new.values())
        if needed > self.free:
            raise self._exhausted(needed, {members[i].id for i in range(len(members))})
        copies: Pairs = []
        for i in late:
            one = members[i]
            if i in shared:
                (page,) = self._take(1)
                old = one.pages[-1]
                self._owners[old] -= 1
                one.pages[-1] = page
                one.edits.append(len(one.pages) - 1)
                copies.append((old, page))
                self._moved(one)
            if new[i]:
                one.edits.extend(range(len(one.pages), len(one.pages) + new[i]))
                one.pages.extend(self._take(new[i]))
            one.writable = min(len(one.pages) * size, self.max_tokens)
        self.edited += 1
        return copies

    def _to_copy(self, members: SequenceOf[Sequence], ends: list[int], late: list[int]) -> set[int]:
        """Which of `late` would write into a page that others own; the last owner of a page among them keeps it."""
        found, leaving = set(), Counter[int]()
        for i in late:
            one = members[i]
            if one.state != "resident":
                state = "swapped out" if one.state == "swapped" else "freed"
                raise ValueRangeError(f"sequence {one.id} of this batch was {state} since the batch was made")
            if ends[i] > self.max_tokens:
                raise ValueRangeError(
                    f"counts[{i}] is {ends[i] - one.length}: sequence {one.id} has {one.length} tokens, and max_tokens is "
                    f"{self.max_tokens}"
                )
            if one.length % self.page_size:  # else the next row begins a page of its own
                page = one.pages[-1]
                if self._owners[page] - leaving[page] > 1:
                    leaving[page] += 1
                    found.add(i)
        return found

    def _exhausted(self, needed: int, members: set[int]) -> OutOfPages:
        """Says what there is, and what could be had from sequences that are not asking."""
        others = Counter(p for s in self._sequences.values() if s.id not in members for p in s.pages if p >= 0)
        reclaimable = sum(1 for page, times in others.items() if times == self._owners[page])
        holders = sum(1 for s in self._sequences.values() if s.id not in members and any(p >= 0 for p in s.pages))
        return OutOfPages(needed, self.free, reclaimable, self.num_pages, holders)

    # ---------------------------------------------------------------- moving pages

    def defragment(self) -> Pairs:
        """Give the owned pages the lowest ids; (from, to) of those that have to move, ascending."""
        used = self.num_pages - self.free
        holes = [page for page in range(used) if not self._owners[page]]
        above = [page for page in range(used, self._unused) if self._owners[page]]
        moves = dict(zip(above, holes, strict=True))
        for old, new in moves.items():
            self._owners[new], self._owners[old] = self._owners[old], 0
        self._rename(moves)
        self._returned, self._unused = [], used
        return list(moves.items())

    def swappable(self, id: int) -> list[int]:
        """The pages that `swap_out` would free: those that no other resident sequence owns."""
        leaving = self.find(id)
        away = Counter(p for s in self._sequences.values() if s.state == "swapped" or s is leaving for p in s.pages)
        pages = [page for page in leaving.pages if page >= 0 and away[page] == self._owners[page]]
        if leaving.state == "swapped" and not pages:
            raise ValueRangeError(f"sequence {id} is swapped out already")
        return pages

    def swap_out(self, id: int) -> Pairs:
        """Mark a sequence as swapped out; (page, host page) of its `swappable` pages: they are free now.

        A page that a resident sequence owns stays, and the sequence keeps its share of it."""
        pages, leaving = self.swappable(id), self.find(id)
        moves = {}
        for page in pages:
            moves[page] = self._next_host
            self._host_owners[self._next_host] = self._owners[page]
            self._owners[page] = 0
            self._next_host -= 1
        leaving.state, leaving.writable = "swapped", -1
        self._moved(leaving)
        self._rename(moves)
        self._returned.extend(reversed(pages))
        return list(moves.items())

    def swap_in(self, id: int) -> Pairs:
        """Make a sequence resident again; (host page, page) of what has to be copied.  Raises OutOfPages."""
        back = self.find(id)
        if back.state != "swapped":
            raise ValueRangeError(f"sequence {id} is not swapped out")
        absent = [page for page in back.pages if page < 0]
        if len(absent) > self.free:
            raise self._exhausted(len(absent), {id})
        moves = dict(zip(absent, self._take(len(absent)), strict=True))
        for host, page in moves.items():
            self._owners[page] = self._host_owners.pop(host)
        self._rename(moves)
        back.state = "resident"
        self._settle(back)
        return list(moves.items())

    def _rename(self, moves: dict[int, int]) -> None:
        """Page ids in every sequence that has them."""
        if not moves:
            return
        for one in self._sequences.values():
            places = [j for j, page in enumerate(one.pages) if page in moves]
            for j in places:
                one.pages[j] = moves[one.pages[j]]
            if places:
                one.edits.extend(places)
                self._moved(one)
        self.edited += 1

    # ---------------------------------------------------------------- single pages

    def _admit(self, pages: list[int], length: int, id: int | None) -> Sequence:
        if len(self._sequences) >= self.max_sequences:
            raise ValueRangeError(f"max_sequences={self.max_sequences} sequences are in the cache: free one first")
        while id is None or id in self._sequences:
            id = self._next_id
            self._next_id += 1
        made = self._sequences[id] = Sequence(id, pages, length)
        return made

    def _take(self, count: int) -> list[int]:
        """So many free pages, owned by one sequence now; there are enough."""
        old = self._returned[: -count - 1 : -1]
        if old:
            del self._returned[-len(old) :]
        first = self._unused
        self._unused += count - len(old)
        for page in old:
            self._owners[page] = 1
        self._owners[first : self._unused] = array("i", [1]) * (self._unused - first)
        return [*old, *range(first, self._unused)]

    def _drop(self, pages: list[int]) -> list[int]:
        """One owner less for each; the pages of host memory that have none left."""
        gone = []
        for page in reversed(pages):
            if page < 0:
                self._host_owners[page] -= 1
                if not self._host_owners[page]:
                    del self._host_owners[page]
                    gone.append(page)
            else:
                self._owners[page] -= 1
                if not self._owners[page]:
                    self._returned.append(page)
        return gone

    def _settle(self, one: Sequence) -> None:
        """How far it may be written after its pages, or their owners, changed."""
        inside = one.length % self.page_size and self._owners[one.pages[-1]] == 1
        one.writable = min(len(one.pages) * self.page_size, self.max_tokens) if inside else one.length

    def _moved(self, one: Sequence) -> None:
        one.moved += 1
        self.moved += 1

    def _known(self) -> str:
        if not self._sequences:
            return "it is empty"
        ids = [str(id) for id in list(self._sequences)[:8]]
        return f"it holds {', '.join(ids)}{', ...' if len(self._sequences) > 8 else ''}"

    # ---------------------------------------------------------------- figures

    def statistics(self, row_bytes: int = 1) -> CacheStatistics:
        """What is used and what is wasted, in pages and in bytes of row_bytes a token, all layers."""
        rows: dict[int, int] = {}
        size = self.page_size
        for one in self._sequences.values():
            for j, page in enumerate(one.pages):
                if page >= 0:
                    rows[page] = max(rows.get(page, 0), min(size, one.length - j * size))
        return CacheStatistics(
            page_size=size,
            pages_total=self.num_pages,
            pages_used=len(rows),
            pages_shared=sum(1 for page in rows if self._owners[page] > 1),
            highest_page=max(rows, default=-1),
            sequences=len(self._sequences),
            sequences_swapped=sum(one.state == "swapped" for one in self._sequences.values()),
            tokens=sum(one.length for one in self._sequences.values()),
            rows_used=sum(rows.values()),
            max_tokens=self.max_tokens,
            pages_swapped=len(self._host_owners),
            row_bytes=row_bytes,
        )

"""One sequence of a paged cache: which pages hold its rows, and what a batch over it has to hear of."""


class Sequence:
    """The host's record of one sequence.  Row j is row j % page_size of page pages[j // page_size].

    pages: page ids, ceil(length / page_size) of them; negative ones name pages in host memory.
    writable: rows up to here can be written as things are: neither a page nor a copy is needed.  -1 once freed or swapped out,
        so that the comparison that every step makes anyway finds those, too.
    edits: places of `pages` that have changed, in order; a batch remembers how many of them its table has.
    moved: how often rows that were there before have come to lie elsewhere, or were given up.
    state: "resident", "swapped" or "freed"."""

    __slots__ = ("edits", "id", "length", "moved", "pages", "state", "writable")

    def __init__(self, id: int, pages: list[int], length: int) -> None:
        self.id = id
        self.pages = pages
        self.length = length
        self.writable = 0
        self.edits: list[int] = []
        self.moved = 0
        self.state = "resident"

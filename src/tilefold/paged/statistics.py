"""What a paged cache holds, in pages and bytes, beside a cache that keeps max_tokens rows for every sequence."""

from dataclasses import dataclass


def readable_bytes(count: int) -> str:
    """ "1.50 GiB", in the largest unit of which there is at least one."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """The figures of one moment; `print` shows them as a table.

    tokens: sum of the lengths of all sequences.  rows_used: rows of pages in device memory that hold a token, shared ones once.
    highest_page: the highest id of a used page, -1 if none is.  row_bytes: bytes of a token's keys and values in all layers.
    scale_bytes: of the factors of a cache in 8 bits, however many tokens it holds."""

    page_size: int
    pages_total: int
    pages_used: int
    pages_shared: int
    highest_page: int
    sequences: int
    sequences_swapped: int
    tokens: int
    rows_used: int
    max_tokens: int
    pages_swapped: int
    row_bytes: int
    scale_bytes: int = 0

    @property
    def pages_free(self) -> int:
        """Pages that nobody owns."""
        return self.pages_total - self.pages_used

    @property
    def page_bytes(self) -> int:
        """Of one page, keys and values of all layers."""
        return self.page_size * self.row_bytes

    @property
    def bytes_allocated(self) -> int:
        """All pages, used or not, and factors."""
        return self.pages_total * self.page_bytes + self.scale_bytes

    @property
    def bytes_in_pages(self) -> int:
        """The pages that somebody owns."""
        return self.pages_used * self.page_bytes

    @property
    def bytes_free(self) -> int:
        """The pages that nobody owns: memory that waits for tokens, and is no fragmentation."""
        return self.pages_free * self.page_bytes

    @property
    def bytes_used(self) -> int:
        """Rows that hold a token, shared ones once."""
        return self.rows_used * self.row_bytes

    @property
    def bytes_wasted(self) -> int:
        """Rows of owned pages that hold none: internal fragmentation.  With bytes_used, bytes_free and scale_bytes it is
        bytes_allocated."""
        return self.bytes_in_pages - self.bytes_used

    @property
    def bytes_contiguous(self) -> int:
        """What the resident sequences would take with max_tokens rows each, and factors."""
        return (self.sequences - self.sequences_swapped) * self.max_tokens * self.row_bytes + self.scale_bytes

    @property
    def bytes_swapped(self) -> int:
        """In host memory."""
        return self.pages_swapped * self.page_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the owned pages' rows that hold no token, 0 to 1."""
        return self.bytes_wasted / self.bytes_in_pages if self.pages_used else 0.0

    @property
    def holes(self) -> int:
        """Free pages below the highest used one: what `defragment` closes."""
        return self.highest_page + 1 - self.pages_used

    def __str__(self) -> str:
        resident = self.sequences - self.sequences_swapped
        rows = (
            ("sequences", f"{resident} resident, {self.sequences_swapped} swapped out, {self.tokens} tokens"),
            ("pages", f"{self.pages_used} used ({self.pages_shared} shared), {self.pages_free} free, {self.holes} holes, "
                      f"{self.pages_total} in all, {self.page_size} tokens each"),
            ("allocated", readable_bytes(self.bytes_allocated)
                          + (f", {readable_bytes(self.scale_bytes)} of them factors" if self.scale_bytes else "")),
            ("used by tokens", readable_bytes(self.bytes_used)),
            ("wasted in pages", f"{readable_bytes(self.bytes_wasted)} ({self.fragmentation:.1%} of the used pages)"),
            ("unused pool", f"{readable_bytes(self.bytes_free)} ({self.pages_free} free pages)"),
            ("contiguous", f"{readable_bytes(self.bytes_contiguous)} at {self.max_tokens} tokens a sequence"),
            ("swapped out", readable_bytes(self.bytes_swapped)),
        )  # fmt: skip
        return "\n".join(f"{name:<16} {value}" for name, value in rows)

"""A batch over a paged cache: the sequences that grow together, and the tensors on the device that say where their rows lie."""

from collections.abc import Iterable
from ctypes import c_int32, c_int64
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ..check import check_whole
from ..errors import DtypeError, LayoutError, ShapeError, ValueRangeError
from .allocator import Sequence

if TYPE_CHECKING:
    from .cache import PagedKVCache


class CacheBatch:
    """counts[i] new rows of sequences[i], reserved and ready to be written; made by `PagedKVCache.batch`.

    block_table: [B, pages of max_tokens] int32; entries past a sequence's pages mean nothing.
    lengths_before, cache_seqlens: [B] int32: rows without and with the new ones.
    cu_seqlens_q: [B + 1] int32: where the new tokens of each sequence begin if they are packed.
    positions: [T] int64: the row of each new token in its sequence, packed.
    slot_mapping: [T] int64: the same row as page * page_size + row in the page.
    total, max_seqlen_q: T and the longest of counts, on the host.
    count: what all counts are, None if they differ.

    `next` changes these tensors in place: their addresses stay, so a CUDA graph captured over them stays right as long as
    counts do."""

    def __init__(
        self, cache: "PagedKVCache", sequences: Iterable[int], counts: int | Iterable[int], max_new: int | None
    ) -> None:
        self.cache = cache
        if not isinstance(sequences, Iterable):
            raise DtypeError(f"sequences must be ids of sequences, got {sequences!r}: give [{sequences!r}] for one")
        self.sequences = tuple(sequences)
        self._members: list[Sequence] = cache.allocator.members(self.sequences)
        size = len(self._members)
        each = self._counts(counts)
        self.max_new = max(sum(each), size) if max_new is None else check_whole("max_new", max_new, sum(each))
        self._make_tensors(size)
        self._seen = [0] * size
        self._edited = self._moved = -1
        self._places: list[int] = []
        cache.copy_pages(cache.allocator.reserve(self._members, each))
        self._publish(each)
        self._fill_table()

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return f"CacheBatch(sequences={self.sequences}, counts={self.counts})"

    def next(self, counts: int | Iterable[int] = 1) -> "CacheBatch":
        """Reserve counts more rows of the same sequences, as `PagedKVCache.batch` does, in the same tensors; returns itself.

        Rows that the sequences got, lost or moved meanwhile are taken up.  Raises what `PagedKVCache.batch` does, and
        ValueRangeError for more tokens than max_new; the batch is then as it was."""
        each = self._counts(counts)
        if sum(each) > self.max_new:
            raise ValueRangeError(
                f"counts are {sum(each)} tokens, the tensors of this batch have room for {self.max_new}: make it with max_new="
            )
        copies = self.cache.allocator.reserve(self._members, each)
        if copies:
            self.cache.copy_pages(copies)
        self._publish(each)
        allocator = self.cache.allocator
        if self._edited != allocator.edited or self._moved != allocator.moved:
            self._update_table()
        return self

    # ---------------------------------------------------------------- for the cache

    def check_current(self) -> None:
        """ValueRangeError if a sequence's rows were moved or given up since the table was written."""
        if self._moved == self.cache.allocator.moved:
            return
        for one, moved in zip(self._members, self._moves, strict=True):
            if one.moved != moved:
                raise ValueRangeError(
                    f"the batch is out of date: sequence {one.id} was freed, truncated, swapped, defragmented or copied since; "
                    f"call next() or make a new batch"
                )
        self._moved = self.cache.allocator.moved

    def as_rows(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x, [B, S, heads, dim] or packed [T, heads, dim], as [B, S, heads, dim] if all counts are S, else packed; a view."""
        if not isinstance(x, torch.Tensor):
            raise DtypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise LayoutError(f"{name} must be a dense strided tensor, got layout {x.layout}")
        packed = f"[{self.total}, heads, dim]"
        wanted = packed if self.count is None else f"[{len(self)}, {self.count}, heads, dim] or {packed}"
        if x.dim() == 4 and self.count is not None and x.shape[:2] == (len(self), self.count):
            return x
        if x.dim() == 3 and x.shape[0] == self.total:
            return x if self.count is None else x.unflatten(0, (len(self), self.count))
        raise ShapeError(f"{name} has shape {tuple(x.shape)}, this batch takes {wanted}")

    # ---------------------------------------------------------------- tensors

    def _counts(self, counts: int | Iterable[int]) -> list[int]:
        if isinstance(counts, int):
            each = [check_whole("counts", counts)] * len(self._members)
        else:
            if not isinstance(counts, Iterable):
                raise DtypeError(f"counts must be an int or one for each sequence, got {counts!r}")
            each = list(counts)
            if len(each) != len(self._members):
                raise ShapeError(f"counts has {len(each)} numbers for {len(self._members)} sequences")
            for i, n in enumerate(each):
                if type(n) is not int or n < 0:
                    check_whole(f"counts[{i}]", n)
        return each

    def _make_tensors(self, size: int) -> None:
        """One block of memory for all but the table, so that a step is one copy; int64 first, for the alignment."""
        device, most = self.cache.device, self.max_new
        self._wide = 16 * most
        self._block = torch.zeros(self._wide + 4 * (3 * size + 1), dtype=torch.uint8, device=device)
        wide, narrow = self._block[: self._wide].view(torch.int64), self._block[self._wide :].view(torch.int32)
        self._all_positions, self._all_slots = wide[:most], wide[most:]
        self.lengths_before, self.cache_seqlens = narrow[:size], narrow[size : 2 * size]
        self.cu_seqlens_q = narrow[2 * size :]
        self.block_table = torch.zeros((size, self.cache.allocator.max_pages), dtype=torch.int32, device=device)
        self._shape: list[int] | None = None

    def _set_shape(self, each: list[int]) -> None:
        """What follows from counts alone."""
        self._shape = each
        self.counts = tuple(each)
        self.total = sum(each)
        self.max_seqlen_q = max(each, default=0)
        self.count = self.max_seqlen_q if min(each, default=0) == self.max_seqlen_q else None
        self._cu = [0, *accumulate(each)]
        self.positions = self._all_positions[: self.total]
        self.slot_mapping = self._all_slots[: self.total]

    def _publish(self, each: list[int]) -> None:
        """Lengths, positions and slots of the rows just reserved, in one copy."""
        if each != self._shape:
            self._set_shape(each)
        page = self.cache.page_size
        after = [one.length for one in self._members]
        self.longest = max((n for n, new in zip(after, each, strict=True) if new), default=0)  # of those that get rows
        if self.count == 1:
            before = positions = [n - 1 for n in after]
            slots = [one.pages[-1] * page + at % page for one, at in zip(self._members, before, strict=True)]
        else:
            before = [n - new for n, new in zip(after, each, strict=True)]
            positions, slots = [], []
            for one, first, end in zip(self._members, before, after, strict=True):
                positions += range(first, end)
                for at in range(first // page, -(-end // page)) if end > first else ():
                    base = (one.pages[at] - at) * page
                    slots += range(base + max(first, at * page), base + min(end, at * page + page))
        buffer = self.cache.staging.lend(self._block.numel())
        buffer.write(c_int64, 0, positions)
        buffer.write(c_int64, self._wide // 2, slots)
        buffer.write(c_int32, self._wide, [*before, *after, *self._cu])
        buffer.send(self._block)

    def _fill_table(self) -> None:
        """All entries, in a rectangle as wide as the longest sequence."""
        width = max((len(one.pages) for one in self._members), default=0)
        if width:
            buffer = self.cache.staging.lend(4 * width * len(self))
            for i, one in enumerate(self._members):
                buffer.write(c_int32, 4 * width * i, one.pages)
            fresh = torch.empty(4 * width * len(self), dtype=torch.uint8, device=self.cache.device)
            buffer.send(fresh)
            self.block_table[:, :width].copy_(fresh.view(torch.int32).view(len(self), width))
        self._seen = [len(one.edits) for one in self._members]
        self._remember()

    def _update_table(self) -> None:
        """The entries that have changed since."""
        at: dict[int, int] = {}
        across = self.block_table.shape[1]
        for i, one in enumerate(self._members):
            if len(one.edits) != self._seen[i]:
                for j in one.edits[self._seen[i] :]:
                    if j < len(one.pages):
                        at[i * across + j] = one.pages[j]
                self._seen[i] = len(one.edits)
        if at:
            places, pages = self.cache.staging.int64s(list(at), list(at.values()))
            self.block_table.view(-1).index_copy_(0, places, pages.int())
        self._remember()

    def _remember(self) -> None:
        """How far the table is up to date."""
        allocator = self.cache.allocator
        self._edited = allocator.edited
        if self._moved != allocator.moved:
            self._moved = allocator.moved
            self._moves = [one.moved for one in self._members]

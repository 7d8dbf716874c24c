"""The tensors of a paged cache, and copies of whole pages: on the device, to host memory and back; none is waited for."""

from collections.abc import Callable, Iterable

import torch

from .staging import Staging

AT_ONCE = 1 << 28  # bytes: what a copy may take as temporary memory, however many pages it moves


Chunk = tuple[torch.Tensor, torch.Tensor]
"""Pages in host memory: keys and values [layers, pages, page_size, kv_heads, dim]."""


class PagePool:
    """k, v: [layers, num_pages, page_size, kv_heads, dim]; and the pages that were swapped out, by their negative ids."""

    def __init__(
        self, shape: tuple[int, int, int, int], dim_k: int, dim_v: int, dtype: torch.dtype, staging: Staging
    ) -> None:
        """shape: (layers, num_pages, page_size, kv_heads)."""
        self.k = torch.empty((*shape, dim_k), dtype=dtype, device=staging.device)
        self.v = torch.empty((*shape, dim_v), dtype=dtype, device=staging.device)
        self.both = self.k, self.v
        self.page_bytes = (self.k[:, 0].numel() + self.v[:, 0].numel()) * dtype.itemsize
        self._staging = staging
        self._host: dict[int, tuple[Chunk, int]] = {}

    def _cut(self, pairs: list[tuple[int, int]]) -> Iterable[list[tuple[int, int]]]:
        """Parts that fit into temporary memory."""
        most = max(1, AT_ONCE // self.page_bytes)
        return (pairs[i : i + most] for i in range(0, len(pairs), most))

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Pages (from, to), no `to` of which is a `from`: in all layers, one gather and one scatter each for keys and values;
        or page by page where there is no memory for that."""
        for part in self._cut(pairs):
            try:
                source, target = self._staging.int64s(*map(list, zip(*part, strict=True)))
                for x in self.both:
                    x.index_copy_(1, target, x.index_select(1, source))
            except torch.OutOfMemoryError:
                for x in self.both:
                    for old, new in part:
                        x[:, new].copy_(x[:, old])

    def host_memory(self, pages: int) -> list[Chunk]:
        """Fresh memory for so many pages, pinned if they come from a GPU; what `to_host` takes."""
        pinned = self.k.device.type == "cuda"

        def empty(x: torch.Tensor, size: int) -> torch.Tensor:
            return torch.empty((x.shape[0], size, *x.shape[2:]), dtype=x.dtype, pin_memory=pinned)

        sizes = [len(part) for part in self._cut([(0, 0)] * pages)]
        return [(empty(self.k, size), empty(self.v, size)) for size in sizes]

    def to_host(self, pairs: list[tuple[int, int]], room: list[Chunk]) -> None:
        """Pages (from, host id) to host memory, read in the order of the current stream; room: `host_memory` of as many."""
        for part, chunk in zip(self._cut(pairs), room, strict=True):
            pages = [page for page, _ in part]
            try:
                (source,) = self._staging.int64s(pages)
                for x, away in zip(self.both, chunk, strict=True):
                    away.copy_(x.index_select(1, source), non_blocking=True)
            except torch.OutOfMemoryError:
                self._each(chunk, [(page, row) for row, page in enumerate(pages)], lambda x, away: away.copy_(x))
            for row, (_, host) in enumerate(part):
                self._host[host] = chunk, row

    def from_host(self, pairs: list[tuple[int, int]]) -> None:
        """Pages (host id, to) back to the device; their host memory is given back when its last page is."""
        rows: dict[int, tuple[Chunk, list[int], list[int]]] = {}
        for host, page in pairs:
            chunk, row = self._host.pop(host)
            _, taken, targets = rows.setdefault(id(chunk), (chunk, [], []))
            taken.append(row)
            targets.append(page)
        for chunk, taken, targets in rows.values():
            try:
                source, target = self._staging.int64s(taken, targets)
                for x, away in zip(self.both, chunk, strict=True):
                    back = away.to(x.device, non_blocking=True)
                    whole = taken == list(range(away.shape[1]))
                    x.index_copy_(1, target, back if whole else back.index_select(1, source))
            except torch.OutOfMemoryError:
                self._each(chunk, list(zip(targets, taken, strict=True)), lambda x, away: x.copy_(away))

    def _each(self, chunk: Chunk, pairs: list[tuple[int, int]], move: Callable[..., object]) -> None:
        """move(page, its row in host memory) a layer at a time: contiguous both, so that it takes no memory on the device."""
        for x, away in zip(self.both, chunk, strict=True):
            for page, row in pairs:
                for layer in range(x.shape[0]):
                    move(x[layer, page], away[layer, row])

    def drop(self, hosts: Iterable[int]) -> None:
        """Forget pages in host memory."""
        for host in hosts:
            del self._host[host]

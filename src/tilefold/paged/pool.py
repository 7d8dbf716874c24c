"""The tensors of a paged cache, and copies of whole pages: on the device, to host memory and back; none is waited for."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .staging import Staging

__all__ = ["PagePool"]

AT_ONCE = 1 << 28  # bytes: what a copy may take as temporary memory, however many pages it moves


class _Chunk(NamedTuple):
    """Pages in host memory: keys and values [layers, pages, page_size, kv_heads, dim]."""

    k: torch.Tensor
    v: torch.Tensor


class PagePool:
    """k, v: [layers, num_pages, page_size, kv_heads, dim]; and the pages that were swapped out, by their negative ids."""

    def __init__(
        self, shape: tuple[int, int, int, int], dim_k: int, dim_v: int, dtype: torch.dtype, staging: Staging
    ) -> None:
        """shape: (layers, num_pages, page_size, kv_heads)."""
        self.k = torch.empty((*shape, dim_k), dtype=dtype, device=staging.device)
        self.v = torch.empty((*shape, dim_v), dtype=dtype, device=staging.device)
        self.page_bytes = (self.k[:, 0].numel() + self.v[:, 0].numel()) * dtype.itemsize
        self._staging = staging
        self._host: dict[int, tuple[_Chunk, int]] = {}

    def _cut(self, pairs: list[tuple[int, int]]) -> Iterable[list[tuple[int, int]]]:
        """Parts that fit into temporary memory."""
        most = max(1, AT_ONCE // self.page_bytes)
        return (pairs[i : i + most] for i in range(0, len(pairs), most))

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Pages (from, to), no `to` of which is a `from`: in all layers, one gather and one scatter each for keys and values."""
        for part in self._cut(pairs):
            source, target = self._staging.int64s(*map(list, zip(*part, strict=True)))
            for x in (self.k, self.v):
                x.index_copy_(1, target, x.index_select(1, source))

    def to_host(self, pairs: list[tuple[int, int]]) -> None:
        """Pages (from, host id) to fresh pinned memory, read in the order of the current stream."""
        pinned = self.k.device.type == "cuda"
        for part in self._cut(pairs):
            (source,) = self._staging.int64s([page for page, _ in part])
            copies = []
            for x in (self.k, self.v):
                taken = x.index_select(1, source)
                away = torch.empty(taken.shape, dtype=x.dtype, pin_memory=pinned)
                copies.append(away.copy_(taken, non_blocking=True))
            chunk = _Chunk(*copies)
            for row, (_, host) in enumerate(part):
                self._host[host] = chunk, row

    def from_host(self, pairs: list[tuple[int, int]]) -> None:
        """Pages (host id, to) back to the device; their host memory is given back when its last page is."""
        rows: dict[int, tuple[_Chunk, list[int], list[int]]] = {}
        for host, page in pairs:
            chunk, row = self._host.pop(host)
            _, taken, targets = rows.setdefault(id(chunk), (chunk, [], []))
            taken.append(row)
            targets.append(page)
        for chunk, taken, targets in rows.values():
            source, target = self._staging.int64s(taken, targets)
            for x, away in ((self.k, chunk.k), (self.v, chunk.v)):
                back = away.to(x.device, non_blocking=True)
                whole = taken == list(range(away.shape[1]))
                x.index_copy_(1, target, back if whole else back.index_select(1, source))

    def drop(self, hosts: Iterable[int]) -> None:
        """Forget pages in host memory."""
        for host in hosts:
            del self._host[host]

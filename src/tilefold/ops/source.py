"""Where the keys of a call lie, and which of them a query block sees: the parts of a `Call` that kernels differ by.

Nothing of a tensor is read on the host."""

from typing import Any, NamedTuple

import torch

from .records import facts_of

__all__ = ["Lists", "Packed", "Paged", "Source"]


class Packed(NamedTuple):
    """Where the sequences of a varlen call lie: int32 offsets [batch + 1] and the longest lengths."""

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self[:2]

    def facts(self) -> Any:
        """What of it decides checks, plan and compilation."""
        return facts_of(self[0]), facts_of(self[1]), self[2:], *map(type, self[2:])


class Paged(NamedTuple):
    """Where the keys of a paged call lie: int32 page numbers [batch, max_pages] and numbers of keys [batch]."""

    block_table: torch.Tensor
    cache_seqlens: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self

    def facts(self) -> Any:
        """What of it decides checks, plan and compilation."""
        return facts_of(self[0]), facts_of(self[1])


Source = Packed | Paged


class Lists(NamedTuple):
    """What the kernels need of a BlockIndex: its tensors and its geometry (ops does not import the record)."""

    indices: torch.Tensor
    counts: torch.Tensor
    block_sizes: torch.Tensor | None
    query_sizes: torch.Tensor | None
    block_q: int
    block_k: int
    seq_q: int
    seq_k: int
    kept: Any = None  # `facts()`, where somebody keeps them

    @classmethod
    def of(cls, index: Any) -> "Lists":
        """Those of a `BlockIndex`."""
        return cls(*index.tensors(), *index.geometry)

    def facts(self) -> Any:
        """What of the lists decides checks, plan and compilation."""
        return self.kept or (tuple([None if t is None else facts_of(t) for t in self[:4]]), self[4:8])

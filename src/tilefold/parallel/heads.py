"""Head exchange (Ulysses): from all heads of a rank's tokens to a share of the heads of all the node's tokens, and back."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..plan.sharding import Spans, ordered, union
from .exchange import all_to_all, unpack
from .tokens import assemble, take

__all__ = ["HeadExchange", "spread", "spread_of", "unspread"]


class HeadExchange(NamedTuple):
    """The exchange within one node.  spans: the tokens of each of its ranks.

    Tensors are [batch, seq, heads, dim], several of one dtype and with the same tokens to a message; afterwards tokens are in
    ascending order.  Heads are a multiple of the ranks: `spread` sees to that for KV heads.

    Source: DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509)."""

    group: Any
    spans: tuple[Spans, ...]

    @property
    def joint(self) -> Spans:
        """The tokens of the node."""
        return union([span for spans in self.spans for span in spans])

    def lengths(self) -> list[int]:
        """Tokens of each rank."""
        return [sum(stop - start for start, stop in spans) for spans in self.spans]

    def gather(self, tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
        """[batch, own tokens, heads, dim] to [batch, the node's tokens, heads / ranks, dim]."""
        size = len(self.spans)
        shares = [t.unflatten(2, (size, t.shape[2] // size)) for t in tensors]
        parts = (s[:, :, r] for r in range(size) for s in shares)
        counts = [sum(t.numel() for t in tensors) // size] * size
        shapes = [
            [(s.shape[0], length, s.shape[3], s.shape[4]) for s in shares] for length in self.lengths()
        ]  # of each rank's message
        sizes = [sum(map(prod, each)) for each in shapes]
        got = all_to_all(parts, counts, sizes, self.group, f"gathering {what} for its share of the heads")
        views = [unpack(flat, each) for flat, each in zip(got, shapes, strict=True)]
        return [assemble([view[i] for view in views], self.spans, 1) for i in range(len(tensors))]

    def scatter(self, tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
        """Back: [batch, the node's tokens, heads / ranks, dim] to [batch, own tokens, heads, dim]."""
        size, rank = len(self.spans), dist.get_rank(self.group)
        rows: list[list[tuple[int, int]]] = [[] for _ in self.spans]
        at = 0
        for part, _, count in ordered(self.spans):
            rows[part].append((at, at + count))
            at += count
        parts = (take(t, tuple(spans), 1) for spans in rows for t in tensors)
        widths = sum(t.shape[0] * t.shape[2] * t.shape[3] for t in tensors)
        counts = [length * widths for length in self.lengths()]
        shapes = [(t.shape[0], self.lengths()[rank], t.shape[2], t.shape[3]) for t in tensors]
        got = all_to_all(
            parts, counts, [sum(map(prod, shapes))] * size, self.group, f"returning {what} to the tokens' ranks"
        )
        views = [unpack(flat, shapes) for flat in got]
        return [torch.cat([view[i] for view in views], 2) for i in range(len(tensors))]


def spread_of(kv_heads: int, ranks: int) -> int:
    """How often KV heads are repeated so that every rank gets the one that its query heads share."""
    return 1 if kv_heads % ranks == 0 else ranks // kv_heads


def spread(t: torch.Tensor, ranks: int) -> torch.Tensor:
    """KV heads repeated, if there are fewer than ranks."""
    times = spread_of(t.shape[2], ranks)
    return t if times == 1 else t.repeat_interleave(times, 2)


def unspread(t: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The gradient of `spread`: sums over the repeats."""
    return t if t.shape[2] == kv_heads else t.unflatten(2, (kv_heads, -1)).sum(3)

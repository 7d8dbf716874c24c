"""Head exchange (Ulysses): from all heads of a rank's tokens to a share of the heads of all the node's tokens, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..plan.parallel.sharding import Spans
from .places import Places


@dataclass(frozen=True)
class HeadExchange:
    """The exchange within one node.  spans: the tokens of each of its ranks.

    Tensors are [batch, seq, heads, dim], several of one dtype and with the same tokens to a message; afterwards tokens are in
    ascending order.  Heads are a multiple of the ranks: `spread` sees to that for KV heads.

    Source: DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509)."""

    group: Any
    spans: tuple[Spans, ...]

    @cached_property
    def places(self) -> Places:
        """Where the rows of each rank lie among the node's."""
        return Places(self.group, self.spans)

    def gather(self, tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
        """[batch, own tokens, heads, dim] to [batch, the node's tokens, heads / ranks, dim]."""
        places, size, rank = self.places, len(self.spans), self.places.rank
        shares = [t.unflatten(2, (size, t.shape[2] // size)) for t in tensors]
        mine = [[s[:, :, r] if r == rank else s[:, :, r].contiguous() for s in shares] for r in range(size)]
        return places.gather(mine, f"gathering {what} for its share of the heads").wait()

    def scatter(self, tensors: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
        """Back: [batch, the node's tokens, heads / ranks, dim] to [batch, own tokens, heads, dim]."""
        places = self.places
        joint = [t.contiguous() for t in tensors]
        got = places.scatter(joint, f"returning {what} to the tokens' ranks")
        found = []
        for t in joint:
            whole = t.new_empty(t.shape[0], places.length(places.rank), t.shape[2] * len(got), *t.shape[3:])
            for to, one in zip(whole.split(t.shape[2], 2), got, strict=True):
                if one:
                    to.copy_(one.pop(0))
                else:
                    places.keep(t, to)
            found.append(whole)
        return found


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

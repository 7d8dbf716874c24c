"""What is measured: dense attention, or attention over lists of blocks as video models have them, of so many tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilefold.api import attention
from tilefold.plan.parallel.problem import BACKWARD_FLOPS, ParallelProblem
from tilefold.sparse import BlockIndex
from tilefold.sparse_api import sparse_attention

SCHEMES = ("ring", "all_gather", "heads", "two_level")

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Work:
    """What all ranks do.  tokens: of the whole sequence; heads: of Q and of K and V; ways: of SCHEMES, "sparse" and PEERS.

    rounds: timed calls; budget: seconds after which no line begins; per_node: ranks of a node, for two_level; trace: a file's
    stem, or ""; density: share of the KV blocks that a block of queries attends, for sparse; block: tokens of one.
    deterministic: the library's gradients of dense attention have the same bits every run, as they have if nobody says otherwise;
    torch's have not."""

    tokens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = True
    backward: tuple[bool, ...] = (False, True)
    ways: tuple[str, ...] = (*SCHEMES[:3], "torch", "torch-alltoall")
    rounds: int = 3
    budget: float | None = None
    per_node: int = 1
    trace: str = ""
    density: float = 0.1
    block: int = 128
    deterministic: bool = True

    def problem(self, tokens: int, backward: bool) -> ParallelProblem:
        window = (-1, 0) if self.causal else (-1, -1)
        return ParallelProblem(
            1, tokens, tokens, *self.heads, self.dim, self.dim, self.dtype, window, "zigzag", backward,
            deterministic=self.deterministic,
        )  # fmt: skip


class Load(NamedTuple):
    """One pass of attention over all tokens.  flops: of all ranks; seen: which keys queries see, from their numbers that are
    broadcast, None if all; alone: the call of a rank that has all tokens."""

    flops: float
    seen: Mask | None
    alone: Call


def dense(work: Work, tokens: int, backward: bool) -> Load:
    """Causal, or full."""
    n = work.problem(tokens, backward)
    seen: Mask | None = (lambda queries, keys: keys <= queries) if work.causal else None
    flops = n.flops * (BACKWARD_FLOPS if backward else 1.0)
    options: dict[str, Any] = {"causal": work.causal, "deterministic": work.deterministic}
    return Load(flops, seen, lambda q, k, v: attention(q, k, v, **options))


def lists_of(work: Work, tokens: int, device: torch.device) -> torch.Tensor:
    """Bool [blocks, blocks]: which KV blocks each block of queries attends.  Four fifths are its nearest ones, as in video where
    neighbours lie together; the others lie at equal distances all over the sequence and are the same for all."""
    blocks = -(-tokens // work.block)
    many = max(1, round(work.density * blocks))
    apart, reach = max(1, 5 * blocks // many), (many * 4 // 5) // 2
    number = torch.arange(blocks, device=device)
    return ((number[:, None] - number).abs() <= reach) | (number % apart == 0)


def index_of(work: Work, keep: torch.Tensor, tokens: int) -> BlockIndex:
    """The same for all heads."""
    return BlockIndex.from_map(keep[None, None], block_q=work.block, block_k=work.block, seq_q=tokens, seq_k=tokens)


def sparse(work: Work, tokens: int, backward: bool, device: torch.device) -> Load:
    """Over `lists_of`."""
    keep, block = lists_of(work, tokens, device), work.block
    sizes = torch.full((len(keep),), float(block), dtype=torch.float64, device=device)
    sizes[-1] = tokens - block * (len(keep) - 1)
    pairs = float(sizes @ (keep.double() @ sizes))
    index = index_of(work, keep, tokens)
    flops = 4.0 * pairs * work.heads[0] * work.dim * (BACKWARD_FLOPS if backward else 1.0)
    return Load(
        flops,
        lambda queries, keys: keep[queries // block, keys // block],
        lambda q, k, v: sparse_attention(q, k, v, index),
    )

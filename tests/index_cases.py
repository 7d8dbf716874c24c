"""Shared by the tests of BlockIndex: random maps, and lists as Python sees them."""

import torch

from tilefold import BlockIndex
from tilefold.ops import sparse as sparse_ops


def random_map(*shape: int, density: float = 0.4, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def lists_of(index: BlockIndex) -> list[list[int]]:
    """Every list up to its count, rows of all batches and heads one after the other."""
    shape = torch.broadcast_shapes(index.indices.shape[:3], index.counts.shape)
    rows = index.indices.expand(*shape, -1).flatten(0, 2).tolist()
    return [row[:n] for row, n in zip(rows, index.counts.expand(shape).flatten().tolist(), strict=True)]


def map_lists(keep: torch.Tensor) -> list[list[int]]:
    return [[c for c, one in enumerate(row) if one] for row in keep.flatten(0, -2).tolist()]


def lists(b, h, sq, sk, block=16, density=0.5, block_q=None, device="cpu", **sizes):
    """Random maps whose rows include none, one and all blocks."""
    block_q = block_q or block
    shape = (b, h, -(-sq // block_q), -(-sk // block))
    chosen = torch.rand(shape) < density
    chosen[..., 0, :] = False
    chosen[..., -1, :] = True
    return BlockIndex.from_map(chosen.to(device), block_q=block_q, block_k=block, seq_q=sq, seq_k=sk, **sizes)


def plan_of(q, k, v, index, **options):
    call = sparse_ops.SparseCall(sparse_ops.Lists(*index.tensors(), *index.geometry), **options)
    return sparse_ops.prepare(q, k, v, call).plan


def top(sq, sk, keep, heads=4, batch=1, device="cuda", block=64, **sizes):
    """The `keep` KV blocks of highest random score for each query block."""
    scores = torch.rand(batch, heads, -(-sq // block), -(-sk // block), device=device)
    return BlockIndex.from_topk(scores, keep, block_q=block, block_k=block, seq_q=sq, seq_k=sk, **sizes)

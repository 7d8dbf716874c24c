"""Shared by the tests of BlockIndex: random maps, and lists as Python sees them."""

import torch

from tilefold import BlockIndex


def random_map(*shape: int, density: float = 0.4, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < density


def lists_of(index: BlockIndex) -> list[list[int]]:
    """Every list up to its count, rows of all batches and heads one after the other."""
    shape = torch.broadcast_shapes(index.indices.shape[:3], index.counts.shape)
    rows = index.indices.expand(*shape, -1).flatten(0, 2).tolist()
    return [row[:n] for row, n in zip(rows, index.counts.expand(shape).flatten().tolist(), strict=True)]


def map_lists(keep: torch.Tensor) -> list[list[int]]:
    return [[c for c, one in enumerate(row) if one] for row in keep.flatten(0, -2).tolist()]

"""BlockIndex and Selection as pytree nodes: torch.utils._pytree, and what builds on it, sees their tensors and can put others in
their place."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch.utils import _pytree

from .index import BlockIndex
from .select import Selection


def _flatten(index: BlockIndex) -> tuple[list[Any], tuple[int, int, int, int, bool]]:
    return list(index.tensors()), (*index.geometry, index.masked)


def _unflatten(leaves: Iterable[Any], facts: tuple[int, int, int, int, bool]) -> BlockIndex:
    """Without checks: a tree may be rebuilt over anything."""
    index = object.__new__(BlockIndex)
    indices, counts, block_sizes, query_sizes = leaves
    *geometry, masked = facts
    values = (indices, counts, *geometry, block_sizes, query_sizes, masked, {"captured": False})
    for field, value in zip(fields(BlockIndex), values, strict=True):
        object.__setattr__(index, field.name, value)
    return index


def register() -> None:
    """Once, when `tilefold.sparse` is imported."""
    _pytree.register_pytree_node(BlockIndex, _flatten, _unflatten)
    _pytree.register_pytree_node(
        Selection, lambda one: ([one.index, one.gini, one.tau, one.mass], None), lambda leaves, _: Selection(*leaves)
    )

"""BlockIndex and Selection as pytree nodes: torch.utils._pytree, and what builds on it, sees their tensors and can put others in
their place."""

from collections.abc import Iterable
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
    values = (indices, counts, *facts, block_sizes, query_sizes, {"captured": False})
    names = (
        "indices",
        "counts",
        "block_q",
        "block_k",
        "seq_q",
        "seq_k",
        "masked",
        "block_sizes",
        "query_sizes",
        "_kept",
    )
    for name, value in zip(names, values, strict=True):
        object.__setattr__(index, name, value)
    return index


def _flatten_selection(selection: Selection) -> tuple[list[Any], None]:
    return [selection.index, selection.gini, selection.tau, selection.mass], None


def _unflatten_selection(leaves: Iterable[Any], _: None) -> Selection:
    return Selection(*leaves)


def register() -> None:
    """Once, when `tilefold.sparse` is imported."""
    _pytree.register_pytree_node(BlockIndex, _flatten, _unflatten)
    _pytree.register_pytree_node(Selection, _flatten_selection, _unflatten_selection)

"""What launches of block-sparse attention have in common: the record of a call, strides of its lists, its mods."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..dense.attention_parts import mods_of
from .sparse_call import Lists, SparseCall, dense_call

if TYPE_CHECKING:
    from ...plan.sparse import SparsePlan
    from ..launch import Box

__all__ = ["HOPPER_KERNEL", "Prepared", "list_strides", "mods_of_call"]

HOPPER_KERNEL = "sparse_forward_hopper"


@dataclass(slots=True)
class Prepared:
    """All that follows from a call's key."""

    plan: "SparsePlan | None"  # None: nothing to compute
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    scalars: tuple[Any, ...] = ()
    strides: tuple[int, ...] = ()
    boxes: "tuple[Box, ...]" = ()
    mods: Any = None
    launch: Any = None
    merge: Any = None
    merge_args: tuple[int, ...] = ()
    keep: tuple[Any, ...] = field(default=())
    backward: dict[Any, Any] = field(default_factory=dict)  # bound backward passes of this call
    mixed: dict[Any, Any] = field(default_factory=dict)  # launches that also mix in another branch


def list_strides(index: Lists) -> tuple[int, ...]:
    """Strides of indices (b, h, q), counts, block_sizes and query_sizes (b, h), 0 where broadcast."""
    found: list[int] = list(_broadcast(index.indices, 3))
    found += _broadcast(index.counts, 2)
    for t in (index.block_sizes, index.query_sizes):
        if t is not None and t.dim() < 3:  # [blocks] or [batch, blocks]: never per head
            t = t[None, None] if t.dim() == 1 else t[:, None]
        found += (0, 0) if t is None else _broadcast(t, 2)
    return tuple(found)


def _broadcast(t: torch.Tensor, dims: int) -> tuple[int, ...]:
    return tuple(0 if t.shape[d] == 1 and d < 2 else t.stride(d) for d in range(dims))


def mods_of_call(p: Prepared, q: torch.Tensor, call: SparseCall) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Score mods and mask mods, in the order applied."""
    score, masks = mods_of(p.mods, float(call.softcap), dense_call(call), q.dtype == torch.float32)
    return score, ((p.mods.causal, ()), *masks) if call.causal else masks

"""What launches of block-sparse attention have in common: strides of its lists, its mods."""

from typing import Any, NamedTuple

import torch

from ..bound import Bound, Slot, attribute, strides_named
from ..call import Call
from ..dense.attention_parts import mask_mods_of, score_mods_of
from ..integers import runtime_ints
from ..source import Lists

HOPPER_KERNEL = "sparse_forward_hopper"


class Launches(NamedTuple):
    """The portable kernels of a backward pass, of listed or of coarse attention; None for an empty grid."""

    delta: Bound
    queries: Bound
    keys: Bound | None


LISTED = ("ib", "ih", "iq", "cb", "ch", "sb", "sh", "pb", "ph")  # as `list_strides` gives them


def list_values(call: Call, turned: Lists | None = None) -> dict[str, Any]:
    """The lists by the kernels' names; turned: the transposed ones, of a kernel that goes by KV blocks."""
    lists = call.lists if turned is None else call.lists._replace(indices=turned.indices, counts=turned.counts)
    of, path = ("call", "lists.") if turned is None else ("turned", "")
    return {
        "Index": attribute(of, f"{path}indices", lists.indices),
        "Count": attribute(of, f"{path}counts", lists.counts),
        "Sizes": attribute("call", "lists.block_sizes", lists.block_sizes),
        "QuerySizes": attribute("call", "lists.query_sizes", lists.query_sizes),
        **strides_named("", list_strides(lists), LISTED),
    }


def mod_values(mods: Any, call: Call, dtype: torch.dtype) -> dict[str, Any]:
    """Score and mask mods by the kernels' names; a user's function may have other arguments in each call."""
    exact = dtype == torch.float32
    bare = call._replace(score_mod=None, mask_mod=None)
    score, masks = score_mods_of(mods, float(call.softcap), bare, exact), mask_mods_of(mods, bare)
    masks = ((mods.causal, ()), *masks) if call.causal else masks
    made: dict[str, Any] = {"score_mods": score, "mask_mods": masks}
    if call.score_mod is not None:
        made["score_mods"] = Slot("call", lambda given: (*score, (given.score_mod, runtime_ints(given.score_args))))
    if call.mask_mod is not None:
        made["mask_mods"] = Slot("call", lambda given: (*masks, *mask_mods_of(mods, given)))
    return made


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

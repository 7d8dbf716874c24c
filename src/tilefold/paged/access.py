"""The only two places where a paged cache meets kernels: writing new rows, and attention over all of them."""

from typing import TYPE_CHECKING, Any

import torch

from ..errors import DtypeError, ShapeError, ValueRangeError

if TYPE_CHECKING:
    from .batch import CacheBatch

__all__ = ["append_packed", "append_rows", "attend"]


def append_rows(
    caches: tuple[torch.Tensor, torch.Tensor], k: torch.Tensor, v: torch.Tensor, batch: "CacheBatch",
    cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool,
) -> None:  # fmt: skip
    """k, v [B, S, kv_heads, dim]: as many new rows for every sequence, in one launch."""
    from ..ops.cache_append import cache_append

    cache_append(*caches, k, v, batch.lengths_before, None, batch.block_table, cos, sin, interleaved)


def append_packed(
    caches: tuple[torch.Tensor, torch.Tensor], k: torch.Tensor, v: torch.Tensor, batch: "CacheBatch",
    cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool,
) -> None:  # fmt: skip
    """k, v [T, kv_heads, dim], packed: each row to its slot."""
    from ..ops.rotary import apply_rotary

    for name, x, pages in (("k", k, caches[0]), ("v", v, caches[1])):
        if x.dtype != pages.dtype:
            raise DtypeError(f"{name} has dtype {x.dtype}, the cache {pages.dtype}: they must be the same")
        if x.shape[1:] != pages.shape[2:]:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, the cache takes [tokens, {pages.shape[2]}, {pages.shape[3]}]"
            )
    if (cos is None) != (sin is None):
        raise ValueRangeError("rotary_cos and rotary_sin come together")
    k, v = k.detach(), v.detach()
    if cos is not None and sin is not None:
        k = apply_rotary(k, cos, sin, interleaved=interleaved, offsets=batch.lengths_before,
                         cu_seqlens=batch.cu_seqlens_q, max_seqlen=batch.max_seqlen_q)  # fmt: skip
    for x, pages in ((k, caches[0]), (v, caches[1])):
        pages.view(-1, *pages.shape[2:]).index_copy_(0, batch.slot_mapping, x)


def attend(
    caches: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    batch: "CacheBatch",
    causal: bool,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of q [B, S, heads, dim], or packed [T, heads, dim], over each sequence's rows, the new ones included."""
    from ..ops.cached import attention_cached
    from ..ops.cached_call import Cache
    from ..ops.call import Call

    splits = options.pop("num_splits", 0)
    packed = q.dim() == 3
    cache = Cache(
        batch.cache_seqlens, None, None, batch.block_table, batch.cu_seqlens_q if packed else None, None,
        batch.max_seqlen_q if packed else 0, 0, 0, splits,
    )  # fmt: skip
    return attention_cached(q, *caches, Call(causal, **options), cache)

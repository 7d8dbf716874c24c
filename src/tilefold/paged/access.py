"""The only two places where a paged cache meets kernels: writing new rows, and attention over all of them."""

from typing import TYPE_CHECKING, Any

import torch

from .scales import Scales

if TYPE_CHECKING:
    from .batch import CacheBatch


def append_rows(
    caches: tuple[torch.Tensor, torch.Tensor], scales: Scales, k: torch.Tensor, v: torch.Tensor, batch: "CacheBatch",
    cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool,
) -> None:  # fmt: skip
    """k, v [B, S, kv_heads, dim], as many new rows for every sequence, or packed [T, kv_heads, dim]; in one launch."""
    from ..ops.cache.cache_append import Append, cache_append
    from ..ops.faults import asked

    # That they fit is known: the batch has reserved them.  So no longest is given, which would be a record for each.
    offsets = batch.cu_seqlens_q if batch.count is None else None
    check = asked(None, "kvcache_append")
    call = Append(*caches, k, v, batch.lengths_before, None, batch.block_table, cos, sin, interleaved, offsets, *scales)
    cache_append(call, check)


def attend(
    caches: tuple[torch.Tensor, torch.Tensor],
    scales: Scales,
    q: torch.Tensor,
    batch: "CacheBatch",
    causal: bool,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of q [B, S, heads, dim], or packed [T, heads, dim], over each sequence's rows, the new ones included."""
    from ..ops.cache.kvcache import ATTENTION_KVCACHE
    from ..ops.call import Call
    from ..ops.faults import asked
    from ..ops.numerics import check_numerics
    from ..ops.source import Cache
    from ..ops.source import Scales as Factors

    splits, numerics = options.pop("num_splits", 0), check_numerics(options.pop("numerics", None))
    packed = q.dim() == 3
    cache = Cache(
        batch.cache_seqlens, None, None, batch.block_table, batch.cu_seqlens_q if packed else None, None,
        batch.max_seqlen_q if packed else 0, 0, 0, splits,
    )  # fmt: skip
    call = Call(causal, **options, source=cache, scales=Factors(None, *scales), numerics=numerics)
    return ATTENTION_KVCACHE(q, *caches, call, asked(None, "attention_kvcache"))  # type: ignore[no-any-return]

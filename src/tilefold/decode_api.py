"""What users call of attention over a KV cache: sign, document, delegate."""

from typing import TYPE_CHECKING, Any

import torch

from .errors import DtypeError
from .ops.call import Call, check_kinds
from .types import Window

if TYPE_CHECKING:
    from .plan.decode import DecodePlan

__all__ = ["attention_kvcache", "attention_kvcache_plan"]


def attention_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    plan: "DecodePlan | None" = None,
    check: bool = False,
) -> Any:
    """Attention of few queries a sequence over the keys of a cache: decoding, speculative decoding, short chunks.

    Args:
        q: [batch, seq_q, heads, dim] fp16, bf16 or fp32; or [total_q, heads, dim] with cu_seqlens_q and max_seqlen_q.
        k_cache: [caches, capacity, kv_heads, dim]; with block_table [pages, page size, kv_heads, dim], pages of any size.  dtype
        of
            q, or float8_e4m3fn or int8 (see k_scale).  dim 1 to 256.
        v_cache: the same with dim_v, 1 to 256.  Where it is k_cache[..., :dim_v], its bytes are read once, and dims may be larger
            (MLA: 576 and 512).
        cache_seqlens: [batch] int32: keys in each cache, those of the queries' own tokens included: query i of a causal call
        sits at
            key cache_seqlens - seq_q + i.  None: all rows.
        block_table: [batch, pages] int32: key j of sequence b is row j % size of page block_table[b, j // size].  Entries behind
        a
            sequence's last key are not read.
        cache_batch_idx: [batch] int32: whose cache a sequence uses (not with block_table).
        cache_leftpad: [batch] int32: the first rows of a cache that are no keys; cache_seqlens counts them.
        cu_seqlens_q: [batch + 1] int32: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q; max_seqlen_q: at least
        the longest.
        causal, window, scale, softcap, alibi_slopes, sinks: as for `attention`, of each sequence with its keys.
        k_scale, v_scale: fp32, greater than 0: what stored elements are multiplied with: [kv_heads], or [caches, kv_heads], or
        with
            block_table [pages, kv_heads].  Needed for int8, 1 by default for e4m3.  bfloat16 queries meet such keys in float16,
            scaled by a power of two so that none is out of range.
        num_splits: 0: the keys of all sequences are shared out evenly over the device; 1 to 128: each sequence and head is
            cut into so many equal parts instead.
        return_lse: also return lse, [batch, heads, seq_q] or [heads, total_q] fp32, natural log.
        plan: a `DecodePlan` to follow exactly, made by `attention_kvcache_plan` and perhaps changed by dataclasses.replace.
        check: read the index tensors and scales first, and raise ValueRangeError naming the entry that is out of range.  Off,
        nothing
            is read on the host; lengths past the cache's room count as the room, page numbers have to be right.

    Returns:
        out like q with dim_v; with return_lse (out, lse).  A row without keys is 0 with lse -inf (the sink, if there are
        sinks).  The same bits every run.  Rows of q that belong to no sequence are not written.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, ValueRangeError, PlanError, Unsupported: before anything is launched,
        naming the argument.  There are no gradients: a backward pass raises Unsupported.

    Source: Flash-Decoding (Dao et al. 2023), Stream-K (Osama et al. 2023, arXiv:2301.03598), PagedAttention (Kwon et al. 2023,
    arXiv:2309.06180)."""
    from .ops import kvcache  # here: `import tilefold` stays light
    from .ops.cached_call import Cache

    check_kinds(return_lse)
    if check is not True and check is not False:
        raise DtypeError(f"check must be a bool, got {check!r}")
    call = Call(causal, window, scale, softcap, alibi_slopes=alibi_slopes, sinks=sinks)
    cache = Cache(
        cache_seqlens, cache_leftpad, cache_batch_idx, block_table, cu_seqlens_q, None, max_seqlen_q, 0, 0, num_splits
    )
    out, lse = kvcache.attention_kvcache(q, k_cache, v_cache, call, cache, (k_scale, v_scale), plan, check)
    return (out, lse) if return_lse else out


def attention_kvcache_plan(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any
) -> "DecodePlan":
    """The DecodePlan that `attention_kvcache(q, k_cache, v_cache, **options)` follows, without running it; `print` it.

    Raises what the call would raise, and Unsupported for a call without queries."""
    from .ops import kvcache  # here: `import tilefold` stays light
    from .ops.cached_call import Cache

    given = dict(options)
    for name in ("return_lse", "plan", "check"):
        given.pop(name, None)
    scales = given.pop("k_scale", None), given.pop("v_scale", None)
    places = ("cache_seqlens", "cache_leftpad", "cache_batch_idx", "block_table", "cu_seqlens_q")
    lengths, pads, index, table, cu_q = (given.pop(name, None) for name in places)
    cache = Cache(
        lengths, pads, index, table, cu_q, None, given.pop("max_seqlen_q", 0), 0, 0, given.pop("num_splits", 0)
    )
    unknown = set(given) - {"causal", "window", "scale", "softcap", "alibi_slopes", "sinks"}
    if unknown:
        raise TypeError(f"attention_kvcache_plan() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    return kvcache.plan_of(q, k_cache, v_cache, Call(**given), cache, scales)

"""flash_attn_with_kvcache: append to a cache, turn by rotary embedding, attend; no length and no table is read on the host."""

from typing import Any

import torch

from ...errors import ShapeError, Unsupported, ValueRangeError
from ...ops.cache.cache_append import Append, cache_append
from ...ops.cache.cached import attention_cached, check_cached
from ...ops.cache.rotary import apply_rotary, checked_offsets
from ...ops.call import Call
from ...ops.faults import asked, mode_of
from ...ops.source import Cache
from .arguments import (
    check_flags,
    check_tensor,
    contiguous_last,
    flash_errors,
    flash_lse,
    host_int,
    refuse,
    scale_of,
    sinks_of,
    window_of,
)


@flash_errors(cos="rotary_cos", sin="rotary_sin")
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, block_table: torch.Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False, *,
    sinks: torch.Tensor | None = None, learnable_sink: torch.Tensor | None = None, s_aux: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None,
    qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None, scheduler_metadata: torch.Tensor | None = None, attention_chunk: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Any:  # fmt: skip
    """Attention of q [batch, seqlen_q, heads, head dim] over a cache, after k and v, if given, were written into it in place.

    Args:
        k_cache, v_cache: [caches, capacity, kv heads, head dim]; with block_table [pages, page size, kv heads, head dim].
        k, v: [batch, seqlen_new, kv heads, head dim]: become rows cache_seqlens[b] and on of the cache.
        rotary_cos, rotary_sin: [positions, rotated / 2] float: turn k by its row in the cache, and q by cache_seqlens + i if
            causal or with a window, else by cache_seqlens.  Only with k.
        cache_seqlens: keys that a cache holds before this call: an int or [batch] int32; None: all.
        cache_batch_idx: [batch] int32: which cache a sequence uses.
        cache_leftpad: [batch] int32: the first rows of a cache that are no keys.
        block_table, page_table: two names of one argument, [batch, pages] int32, pages of any size.
        softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, learnable_sink, s_aux: as for flash_attn_func.
        rotary_interleaved: pairs are channels (2i, 2i + 1), else (i, i + rotated / 2).
        num_splits: parts of the keys that are folded apart, 1 to 128; 0: the plan decides.
        return_softmax_lse: also return lse.
        cu_seqlens_q, max_seqlen_q: q is packed, [total_q, heads, head dim].
        The rest is refused by name unless it is at its default, see docs/reference/flash_attn.md.

    Returns:
        out like q; with return_softmax_lse (out, lse [batch, heads, seqlen_q] fp32, [heads, total_q] packed, +inf where no key
        is seen).  There are no gradients: a backward pass through out raises Unsupported.

    No index tensor is read on the host: lengths have to fit the cache (rows that do not are not written).  The environment
    variable TILEFOLD_CHECK asks for more, as for `tilefold.attention_kvcache`."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, cu_seqlens_k_new=cu_seqlens_k_new,
           rotary_seqlens=rotary_seqlens, scheduler_metadata=scheduler_metadata, attention_chunk=attention_chunk)  # fmt: skip
    if pack_gqa is not None and pack_gqa is not False:
        raise Unsupported(f"pack_gqa must be None or False, got {pack_gqa!r}: the plan decides whether heads are rows")
    if host_int("sm_margin", sm_margin) != 0:
        raise Unsupported(f"sm_margin must be 0, got {sm_margin!r}: kernels take all SMs")
    check_flags(rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    if block_table is not None and page_table is not None:
        raise ValueRangeError("block_table and page_table are names of one argument, of which one may be given")
    window = window_of(window_size, causal)
    (table,) = contiguous_last(page_table if block_table is None else block_table)
    q, k, v, cache_batch_idx = contiguous_last(q, k, v, cache_batch_idx)
    _check_tensors(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens)
    packed = _packed_queries(cu_seqlens_q, max_seqlen_q)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if k is not None and k.shape[0] != batch:
        raise ShapeError(f"k has shape {tuple(k.shape)}, expected a batch of {batch}, that of the queries")
    if table is not None:
        check_tensor("block_table", table, (2,), "[batch, pages]")
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[-1])
    new = 0 if k is None else k.shape[1]
    lengths = _lengths(cache_seqlens, batch, capacity - new, q.device)
    sink = sinks_of(sinks=sinks, learnable_sink=learnable_sink, s_aux=s_aux)
    cache = Cache(lengths, cache_leftpad, cache_batch_idx, table, cu_seqlens_q, None, packed, 0, new,
                  host_int("num_splits", num_splits))  # fmt: skip
    call = Call(
        causal, window, scale_of(softmax_scale, q), softcap, alibi_slopes=alibi_slopes, sinks=sink, source=cache
    )
    # A side of the window that reaches past the cache cuts nothing, and does not make a window of it.
    local = causal or any(0 <= side < capacity for side in window)
    turned, mode = None, mode_of(None)
    check = asked(mode, "flash_attn_with_kvcache")
    if k is not None and lengths is not None:
        check_cached(q, k_cache, v_cache, call, check)  # a call that is refused has not changed the cache
        # Queries at the positions of the new keys turn in the same launch, unless someone waits for their gradient to be refused.
        same = (
            q.dim() == 4
            and q.shape[1] == new
            and (local or new == 1)
            and not (torch.is_grad_enabled() and q.requires_grad)
        )
        appended = Append(k_cache, v_cache, k, v, lengths, cache_batch_idx, table, rotary_cos, rotary_sin, rotary_interleaved,
                          q=q if same and rotary_cos is not None else None)  # fmt: skip
        turned = cache_append(appended, check)
    if turned is not None:
        q = turned
    elif rotary_cos is not None and rotary_sin is not None and lengths is not None:
        rows = cu_seqlens_q if not mode or cu_seqlens_q is None else checked_offsets(q, cu_seqlens_q, packed, mode)
        q = apply_rotary(q, rotary_cos, rotary_sin, interleaved=rotary_interleaved, offsets=lengths, step=int(local),
                         cu_seqlens=rows, max_seqlen=max_seqlen_q)  # fmt: skip
    out, lse = attention_cached(q, k_cache, v_cache, call, check)
    return (out, flash_lse(lse)) if return_softmax_lse else out


def _check_tensors(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cos: Any, sin: Any, cache_seqlens: Any) -> None:
    """What belongs together, and that nobody waits for a gradient that will not come."""
    for name, t, dims in (("q", q, (3, 4)), ("k_cache", k_cache, (4,)), ("v_cache", v_cache, (4,))):
        check_tensor(name, t, dims)
    for pair in ({"k": k, "v": v}, {"rotary_cos": cos, "rotary_sin": sin}):
        absent = [name for name, t in pair.items() if t is None]
        if len(absent) == 1:
            raise ValueRangeError(f"{' and '.join(pair)} come together, got {absent[0]}=None")
    if k is not None and cache_seqlens is None:
        raise ValueRangeError("cache_seqlens must be given with k: it says where the new keys go")
    if k is None and cos is not None:
        raise ValueRangeError("rotary_cos was given without k: new keys and queries are turned together")
    for name, t in (("k", k), ("v", v)):
        if t is not None:
            check_tensor(name, t, (4,), "[batch, seqlen_new, kv heads, head dim]")
    if torch.is_grad_enabled():
        new = () if k is None or q.requires_grad else (("k", k), ("v", v))
        for name, t in (("k_cache", k_cache), ("v_cache", v_cache), *new):
            if t.requires_grad:
                raise Unsupported(f"{name} requires a gradient, but flash_attn_with_kvcache has none: detach() it")


def _packed_queries(cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int | None) -> int:
    if (cu_seqlens_q is None) != (max_seqlen_q is None):
        raise ValueRangeError(f"cu_seqlens_q and max_seqlen_q come together, got max_seqlen_q={max_seqlen_q!r}")
    if cu_seqlens_q is not None:
        check_tensor("cu_seqlens_q", cu_seqlens_q, (1,), "[batch + 1]")
    return 0 if max_seqlen_q is None else int(host_int("max_seqlen_q", max_seqlen_q))


def _lengths(cache_seqlens: Any, batch: int, room: int, device: torch.device) -> torch.Tensor | None:
    """[batch] int32 on the device; an int is looked at, a tensor is not."""
    if cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    length = host_int("cache_seqlens", cache_seqlens)
    if isinstance(length, int) and not 0 <= length <= room:
        raise ValueRangeError(f"cache_seqlens must be 0 to {room}, for which the cache has room, got {length}")
    return torch.full((batch,), length, dtype=torch.int32, device=device)

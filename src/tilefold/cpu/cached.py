"""Attention over a KV cache, sequence by sequence: rows, pages, factors of 8-bit elements; and new tokens written into it."""

from typing import Any, NamedTuple

import torch

from ..cache_formats import FORMATS
from ..plan.torch_cpu import cut_of
from .dense import forward as attend
from .rotary import turned
from .terms import Terms

Scales = tuple[torch.Tensor | None, torch.Tensor | None]
LIMITS = {getattr(torch, each.name): each.limits for each in FORMATS}


class Sequence(NamedTuple):
    """One sequence: number, rows of packed queries or None, and where its keys lie: rows begin to end of its cache (of all keys,
    where these are packed), or of the pages of its table."""

    number: int
    queries: slice | None
    begin: int
    end: int
    cache: int
    pages: torch.Tensor | None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: Scales,
    terms: Terms,
    cache: Any,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write out like q and lse [batch, heads, seq_q] or [heads, total_q] fp32.

    q: [batch, seq_q, heads, dim], or [total_q, heads, dim]; k, v: caches, pages or packed; cache: which, as `ops`' Cache."""
    batch = cache.cu_q.shape[0] - 1 if cache.cu_q is not None else q.shape[0]
    for b in range(batch):
        one = _sequence(k, cache, b)
        own_q = q[one.queries] if one.queries is not None else q[b]
        if not own_q.shape[0]:
            continue
        own_k, own_v = (_keys(t, scale, one, cache) for t, scale in zip((k, v), scales, strict=True))
        target = (out[one.queries], lse[:, one.queries]) if one.queries is not None else (out[b], lse[b])
        kv_heads = own_k.shape[1]
        cut = cut_of(1, kv_heads, own_q.shape[1] // kv_heads, own_q.shape[0], own_k.shape[0])
        own = terms.sequence(b, own_q.shape[0], own_k.shape[0])
        one_q, one_k, one_v, one_out = (t[None].transpose(1, 2) for t in (own_q, own_k, own_v, target[0]))
        attend(one_q, one_k, one_v, own, cut, one_out, target[1][None])


def _sequence(k: torch.Tensor, cache: Any, b: int) -> Sequence:
    queries = None if cache.cu_q is None else slice(int(cache.cu_q[b]), int(cache.cu_q[b + 1]))
    pages = None if cache.block_table is None else cache.block_table[b]
    base, room = 0, k.shape[1] if pages is None else pages.shape[0] * k.shape[1]
    if cache.cu_k is not None and pages is None:
        base = int(cache.cu_k[b])
        room = int(cache.cu_k[b + 1]) - base
    elif cache.cu_k is not None:
        room = int(cache.cu_k[b + 1]) - int(cache.cu_k[b])
    length = room if cache.lengths is None else int(cache.lengths[b]) + cache.more
    pad = 0 if cache.pads is None else max(0, int(cache.pads[b]))
    own = b if cache.batch_index is None else int(cache.batch_index[b])
    return Sequence(b, queries, base + min(pad, length), base + length, own, pages)


def _keys(t: torch.Tensor, scale: torch.Tensor | None, one: Sequence, cache: Any) -> torch.Tensor:
    """[keys, kv_heads, dim]: those of one sequence, in fp32 where they are stored in 8 bits."""
    if one.pages is not None:
        page = t.shape[1]
        first = one.begin // page
        numbers = one.pages[first : -(-one.end // page)].long()
        rows = _widened(
            _bytes(t)[numbers].view(t.dtype), scale if scale is None or scale.dim() == 1 else scale[numbers][:, None]
        )
        return rows.flatten(0, 1)[one.begin - first * page : one.end - first * page]
    if cache.cu_k is not None:
        return t[one.begin : one.end]
    rows = t[one.cache, one.begin : one.end]
    return _widened(rows, scale if scale is None or scale.dim() == 1 else scale[one.cache])


def _widened(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """rows [.., kv_heads, dim] as numbers; scale [.., kv_heads]: what stored elements are multiplied with."""
    if rows.dtype not in LIMITS:
        return rows
    return rows.float() if scale is None else rows.float() * scale[..., None]


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """torch indexes bytes, but not every 8-bit float."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


# ---------------------------------------------------------------- appending


def append(
    k: torch.Tensor, v: torch.Tensor, q: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
    out: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None, cu: torch.Tensor | None, lengths: torch.Tensor,
    batch_index: torch.Tensor | None, table: torch.Tensor | None, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None,
    fault: None, interleaved: bool,
) -> None:  # fmt: skip
    """Write the rows of new tokens behind those that each sequence has, keys turned and both encoded as the cache holds numbers;
    out: the queries q, turned.  Tensors as `ops/cache/cache_append.py` has them; nobody notes faults here."""
    if q is not None and out is not None:
        out.copy_(q)
    for b, length in enumerate(lengths.tolist()):
        tokens: Any = b if cu is None else slice(int(cu[b]), int(cu[b + 1]))
        new_k, new_v = k[tokens], v[tokens]
        at = length + torch.arange(new_k.shape[0])
        if cos is not None and sin is not None:
            new_k = turned(new_k, cos, sin, at, interleaved)
            if q is not None and out is not None:
                out[tokens] = turned(q[tokens], cos, sin, at, interleaved).to(out.dtype)
        page = k_cache.shape[1]
        if table is not None:
            caches, rows = table[b].long()[at // page], at % page
        else:
            caches, rows = torch.full_like(at, b if batch_index is None else int(batch_index[b])), at
        for held, new, scale in ((k_cache, new_k, k_scale), (v_cache, new_v, v_scale)):
            own = scale if scale is None or scale.dim() == 1 else scale[caches]
            _bytes(held)[caches, rows] = _bytes(_encoded(new, own, held.dtype))


def _encoded(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [tokens, kv_heads, dim] as a cache stores it: divided by its factor [.., kv_heads] and rounded to nearest even; what lies
    outside becomes the last number, NaN is 0 in int8."""
    if scale is None or dtype not in LIMITS:
        return x.to(dtype)
    wide = (x.float() / scale[..., None]).clamp(*LIMITS[dtype])
    return (wide.round().nan_to_num() if dtype == torch.int8 else wide).to(dtype)

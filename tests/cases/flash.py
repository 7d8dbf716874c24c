"""Shared by the tests of the flash_attn functions: a KV cache in one piece or in pages, and what a call over it has to give."""

from typing import Any

import torch

from cases import rand
from tilefold import reference
from tilefold.reference.rounding import in_dtype


def angles(positions: int, pairs: int, dtype: torch.dtype = torch.float32, device: Any = "cpu"):
    """(cos, sin) [positions, pairs] of random angles."""
    angle = torch.rand(positions, pairs) * 6.28
    return angle.cos().to(device=device, dtype=dtype), angle.sin().to(device=device, dtype=dtype)


@in_dtype
def turned(x, cos, sin, interleaved: bool, position, dtype: torch.dtype = torch.float64):
    """x [..., S, H, D] with its first channels turned, position [S]; positions past the table do not turn."""
    pairs = cos.shape[1]
    inside = (position >= 0) & (position < cos.shape[0])
    place = position.clamp(0, cos.shape[0] - 1)
    c = torch.where(inside[:, None], cos.to(dtype)[place], 1.0)[:, None]
    s = torch.where(inside[:, None], sin.to(dtype)[place], 0.0)[:, None]
    x = x.to(dtype)
    t = x[..., : 2 * pairs]
    a, b = (t[..., 0::2], t[..., 1::2]) if interleaved else (t[..., :pairs], t[..., pairs:])
    new = a * c - b * s, a * s + b * c
    return torch.cat([torch.stack(new, -1).flatten(-2) if interleaved else torch.cat(new, -1), x[..., 2 * pairs :]], -1)


def in_pages(cache: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache [B, N, H, D] in shuffled pages among pages of nobody -> (pages [P, page, H, D], table [B, n] int32)."""
    batch, rows = cache.shape[:2]
    each = -(-rows // page)
    pages = torch.full((2 * batch * each, page, *cache.shape[2:]), float("nan"), dtype=cache.dtype, device=cache.device)
    table = torch.randperm(len(pages), device=cache.device)[: batch * each].view(batch, each)
    whole = torch.zeros(batch, each * page, *cache.shape[2:], dtype=cache.dtype, device=cache.device)
    whole[:, :rows] = cache
    pages[table.flatten()] = whole.view(batch * each, page, *cache.shape[2:])
    return pages, table.int()


def out_of_pages(pages: torch.Tensor, table: torch.Tensor, rows: int) -> torch.Tensor:
    """The reverse."""
    return pages[table.long()].flatten(1, 2)[:, :rows]


def kvcache_oracle(q, k_cache, v_cache, lengths, pads=None, k=None, v=None, cos=None, sin=None, interleaved=True,
                   dtype: torch.dtype = torch.float64, **options: Any):  # fmt: skip
    """(out, lse (+inf without keys), k_cache, v_cache as they should be), sequence by sequence, of caches [B, N, H, D]."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    outs, lses = [], []
    left, right = options.get("window", (-1, -1))
    step = int(bool(options.get("causal")) or left >= 0 or right >= 0)
    for b, n in enumerate(lengths.tolist()):
        end, query = n, q[b]
        new = k is not None and k.shape[1]
        if new:
            end = n + new
            k_new = k[b]
            if cos is not None:
                index = torch.arange(max(new, q.shape[1]), device=q.device)
                k_new = turned(k[b], cos, sin, interleaved, n + index[:new])
                query = turned(q[b], cos, sin, interleaved, n + step * index[: q.shape[1]]).to(q.dtype)
            k_cache[b, n:end], v_cache[b, n:end] = k_new.to(k_cache.dtype), v[b]
        first = int(pads[b]) if pads is not None else 0
        mine = dict(options)
        if mine.get("alibi_slopes") is not None and mine["alibi_slopes"].dim() == 2:
            mine["alibi_slopes"] = mine["alibi_slopes"][b]
        out, lse = reference.attention(query[None], k_cache[b : b + 1, first:end], v_cache[b : b + 1, first:end], dtype=dtype,
                                       **mine)  # fmt: skip
        outs.append(out)
        lses.append(lse.masked_fill(lse == float("-inf"), float("inf")))
    return torch.cat(outs), torch.cat(lses), k_cache, v_cache


def a_cache(batch=3, rows=40, heads=1, dim=24, dim_v=None, dtype=torch.float32, device: Any = "cpu"):
    """(k_cache, v_cache) [B, N, H, D]."""
    return (
        rand(batch, rows, heads, dim, dtype=dtype, device=device),
        rand(batch, rows, heads, dim_v or dim, dtype=dtype, device=device),
    )

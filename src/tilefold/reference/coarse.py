"""fp64 oracle of the coarse stage: the projections and all probabilities written out."""

import math
from typing import Any, NamedTuple

import torch

from .rounding import attended, in_dtype, stored


class CoarseOracle(NamedTuple):
    """As `tilefold.sparse.CoarseResult`."""

    out: torch.Tensor
    scores: torch.Tensor
    lse: torch.Tensor | None = None


@in_dtype
def project(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    kind: str = "block",
    block_sizes: torch.Tensor | None = None,
    block: int = 64,
    layout: str = "bshd",
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Rows as `tilefold.sparse.project` defines them, computed in `dtype`; differentiable in x and weight."""
    x = (x.transpose(1, 2) if layout == "bshd" else x).to(dtype)  # [B, H, N, D]
    seq = x.shape[2]
    valid = valid_tokens(block_sizes, seq, block, x.device)
    x = torch.where(valid[..., None], x, 0)
    if kind == "dense":
        assert weight is not None
        rows = stored(weight.to(dtype)).expand(x.shape[1], -1, -1) @ x
    else:
        blocks = -(-seq // block)
        tokens = in_blocks(x, block)
        count = in_blocks(valid[..., None], block)[..., 0].sum(-1)  # [B or 1, H or 1, blocks]
        if weight is None:
            w = torch.ones(1, block, dtype=dtype, device=x.device) / block
        else:
            w = weight.to(dtype).reshape(-1, block)
        factor = (block / count.clamp(min=1).to(dtype))[..., None]
        rows = (tokens * w[None, :, None, :, None]).sum(3).reshape(*x.shape[:2], blocks, x.shape[3]) * factor
    return rows.transpose(1, 2) if layout == "bshd" else rows


@in_dtype
def coarse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    weight_k: torch.Tensor | None = None,
    weight_v: torch.Tensor | None = None,
    kind: str = "block",
    reduction: str = "mean",
    scale: float | None = None,
    block: int = 64,
    block_sizes: torch.Tensor | None = None,
    query_sizes: torch.Tensor | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    dtype: torch.dtype = torch.float64,
) -> CoarseOracle:
    """(out, scores, lse) as `tilefold.sparse.coarse` defines them, computed in `dtype`; differentiable in q, k, v and weights."""
    options: dict[str, Any] = {"block": block, "layout": layout, "dtype": dtype}
    own = "dense" if kind == "dense" else "block"
    rows_k, rows_v = (
        stored(project(x, weight, kind=own, block_sizes=block_sizes, **options))
        for x, weight in ((k, weight_k), (v, weight_v))
    )
    options |= {"reduction": reduction, "scale": scale, "block_sizes": block_sizes, "return_lse": True}
    if kind != "pooled":
        result = attend_rows(q, rows_k, rows_v, query_sizes=query_sizes, **options)
        return result if return_lse else result._replace(lse=None)
    seq = q.shape[1 if layout == "bshd" else 2]
    pooled = stored(project(q, block_sizes=query_sizes, block=block, layout=layout, dtype=dtype))
    live = valid_tokens(query_sizes, seq, block, q.device)
    first = live[..., ::block]  # a block is live if its first token is
    options["block"] = 1
    out, scores, lse = attend_rows(pooled, rows_k, rows_v, live=first, **options)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    out = torch.where(live[..., None], out.repeat_interleave(block, 2)[:, :, :seq], 0)
    return CoarseOracle(out if layout == "bhsd" else out.transpose(1, 2), scores, lse if return_lse else None)


@in_dtype
def attend_rows(
    q: torch.Tensor,
    rows_k: torch.Tensor,
    rows_v: torch.Tensor,
    *,
    reduction: str = "mean",
    scale: float | None = None,
    block: int = 64,
    block_sizes: torch.Tensor | None = None,
    query_sizes: torch.Tensor | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    live: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> CoarseOracle:
    """As `tilefold.sparse.attend_rows`; live: bool [B or 1, H or 1, seq_q], which queries count, instead of query_sizes."""
    q, rows_k, rows_v = ((t.transpose(1, 2) if layout == "bshd" else t).to(dtype) for t in (q, rows_k, rows_v))
    seq, rows, group = q.shape[2], rows_k.shape[2], q.shape[1] // max(1, rows_k.shape[1])
    live = valid_tokens(query_sizes, seq, block, q.device) if live is None else live
    every = torch.ones(1, 1, rows, dtype=torch.bool, device=q.device)
    alive = every if block_sizes is None else by_head(block_sizes) > 0
    keep = alive if alive.shape[1] == 1 else alive.repeat_interleave(group, 1)
    q = torch.where(live[..., None], q, 0)
    rows_k, rows_v = (torch.where(alive[..., None], t, 0).repeat_interleave(group, 1) for t in (rows_k, rows_v))
    s = (q @ rows_k.mT) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    s = s.masked_fill(~(keep[:, :, None, :] & live[..., None]), -math.inf)
    lse = torch.logsumexp(s, 3) if rows else s.new_full(s.shape[:3], -math.inf)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    out = attended(p, rows_v, lse)
    per_block = in_blocks(p.detach(), block)  # [B, H, Qb, block, rows]
    if reduction == "max":
        scores = per_block.amax(3)
    else:
        count = in_blocks(live[..., None], block)[..., 0].sum(-1).clamp(min=1)
        scores = per_block.sum(3) / count[..., None]
    return CoarseOracle(out.transpose(1, 2) if layout == "bshd" else out, scores, lse if return_lse else None)


def in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """[B, H, N, D] as [B, H, blocks, block, D], 0 (or false) past the end."""
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))
    return x.reshape(*x.shape[:2], x.shape[2] // block, block, x.shape[3])


def by_head(sizes: torch.Tensor) -> torch.Tensor:
    """[blocks], [B or 1, blocks] or [B or 1, H or 1, blocks] as [B or 1, H or 1, blocks]."""
    return sizes[:, None] if sizes.dim() == 2 else sizes[(None,) * (3 - sizes.dim())]


def valid_tokens(sizes: torch.Tensor | None, seq: int, block: int, device: torch.device) -> torch.Tensor:
    """bool [B or 1, H or 1, seq]: true before the block's number of valid tokens."""
    token = torch.arange(seq, device=device)
    if sizes is None:
        return torch.ones(1, 1, seq, dtype=torch.bool, device=device)
    return token % block < by_head(sizes)[..., token // block]

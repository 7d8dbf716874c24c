"""fp64 oracle of block-sparse attention: the lists written out as an element mask of the dense oracle."""

from typing import TYPE_CHECKING, Any

import torch

from .attention import attention, attention_varlen
from .coarse import valid_tokens

if TYPE_CHECKING:
    from ..sparse import BlockIndex


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: "BlockIndex",
    *,
    mask: torch.Tensor | None = None,
    layout: str = "bshd",
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of every query over the keys of the KV blocks that `index` lists for its block, computed in `dtype`.

    q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]; out [B, Sq, H, Dv], lse [B, H, Sq] natural log, of `dtype`.
     The other options (scale, softcap, bias, mask, sinks, causal, window, score_mod, mask_mod, ...) are those of
    `reference.attention` and narrow or change what is listed.  Reads the lists on the host; differentiable in q, k, v,
    bias and sinks.

    Raises ValueError if the lengths, batch or heads of q and k are not those of the index."""
    rows = 1 if layout == "bshd" else 2
    batch, heads = q.shape[0], q.shape[3 - rows]
    if (q.shape[rows], k.shape[rows]) != (index.seq_q, index.seq_k):
        raise ValueError(
            f"q and k have {q.shape[rows]} and {k.shape[rows]} tokens, the index is for {index.seq_q} and {index.seq_k}"
        )
    keep = element_mask(index, batch, heads).to(q.device)
    keep = keep if mask is None else keep & mask
    return attention(q, k, v, mask=keep, layout=layout, dtype=dtype, **options)


def sparse_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: "BlockIndex",
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as `tilefold.sparse_attention_varlen(..., return_lse=True)`: the packed dense oracle under the lists' masks.

    q [Tq, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], index with seq_q and seq_k of at least the longest sequences; out [Tq, H, Dv],
    lse [H, Tq]; mask [B or 1, H or 1, seq_q, seq_k].  Options as for `sparse_attention`; rows of no sequence are 0 and -inf."""
    keep = element_mask(index, cu_seqlens_q.shape[0] - 1, q.shape[1]).to(q.device)
    keep = keep if mask is None else keep & mask
    return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, index.seq_q, index.seq_k, mask=keep, **options)


def sparse_attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    index: "BlockIndex",
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    layout: str = "bshd",
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) as `tilefold.sparse_attention_paged(..., return_lse=True)`: the pages of each sequence laid one after the other
    and cut at its length, so that no key past it is ever read.

    q [B, Sq, H, D], k_pages [P, page, Hkv, D], v_pages [P, page, Hkv, Dv]; out [B, Sq, H, Dv], lse [B, H, Sq].  Options as for
    `sparse_attention`."""
    if layout == "bhsd":
        q, k_pages, v_pages = (t.transpose(1, 2) for t in (q, k_pages, v_pages))
    batch, page = q.shape[0], k_pages.shape[1]
    sides: list[list[torch.Tensor]] = [[], []]
    lengths = cache_seqlens.tolist()
    for b, length in enumerate(lengths):
        pages = block_table[b, : -(-length // page)].long()
        for rows, side in zip(sides, (k_pages, v_pages), strict=True):
            rows.append(side[pages].flatten(0, 1)[:length])
    k, v = (torch.cat([*rows, side[:0].flatten(0, 1)]) for rows, side in zip(sides, (k_pages, v_pages), strict=True))
    starts = [torch.tensor([0, *n], device=q.device).cumsum(0) for n in ([q.shape[1]] * batch, lengths)]
    out, lse = sparse_attention_varlen(q.flatten(0, 1), k, v, index, *starts, mask=mask, **options)
    out = out.view(*q.shape[:3], out.shape[-1])
    return (out if layout == "bshd" else out.transpose(1, 2)), lse.view(q.shape[2], batch, q.shape[1]).transpose(0, 1)


def element_mask(index: "BlockIndex", batch: int, heads: int) -> torch.Tensor:
    """bool [batch, heads, seq_q, seq_k] on the CPU: true where the query's block lists the key's block and both are
    valid tokens."""
    lists, counts = index.indices.cpu(), index.counts.cpu()
    many = -(-index.seq_k // index.block_k)
    listed = torch.arange(lists.shape[-1]) < counts[..., None]
    blocks = torch.zeros(*counts.shape, many + 1, dtype=torch.bool)  # the last one: what is not listed
    blocks = blocks.scatter(-1, torch.where(listed, lists.long(), many), True)[..., :many].expand(batch, heads, -1, -1)
    i, j = torch.arange(index.seq_q), torch.arange(index.seq_k)
    keep = blocks[:, :, i // index.block_q][:, :, :, j // index.block_k]
    sizes_q, sizes_k = (None if sizes is None else sizes.cpu() for sizes in (index.query_sizes, index.block_sizes))
    valid_q = valid_tokens(sizes_q, index.seq_q, index.block_q, i.device)
    valid_k = valid_tokens(sizes_k, index.seq_k, index.block_k, i.device)
    return keep & valid_q[..., :, None] & valid_k[..., None, :]

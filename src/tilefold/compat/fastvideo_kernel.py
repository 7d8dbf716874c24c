"""The functions of fastvideo-kernel 0.3 that its video models call, by tilefold's block-sparse attention: nothing to build, with
gradients, batch above 1, any head dim up to 256.

    from tilefold.compat.fastvideo_kernel import block_sparse_attn, block_sparse_attn_from_indices, video_sparse_attn

Contract: https://github.com/hao-ai-lab/FastVideo, fastvideo-kernel 0.3.5.  Method: VSA (Zhang et al. 2025, arXiv:2505.13389)."""

import math

import torch

from tilefold.check import check_whole
from tilefold.errors import ShapeError
from tilefold.sparse import BlockIndex, coarse, fuse, select
from tilefold.sparse_api import sparse_attention

__all__ = ["block_sparse_attn", "block_sparse_attn_from_indices", "video_sparse_attn"]

Pair = tuple[torch.Tensor, torch.Tensor]


def block_sparse_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_map: torch.Tensor, variable_block_sizes: torch.Tensor
) -> Pair:
    """Attention of each query block over the KV blocks that are true in its row.

    Args:
        q, k, v: [batch, heads, seq, dim] fp16, bf16 or fp32, whole blocks of seq / blocks tokens, a power of two of at least 16.
        block_map: bool [batch or 1, heads or 1, query blocks, KV blocks].
        variable_block_sizes: integers [KV blocks]: the valid tokens at the start of each KV block.

    Returns:
        (out [batch, heads, seq, dim], lse [batch, heads, seq] fp32: base-2 logarithm, as there).  Both are differentiable.

    Raises as `sparse_attention`; ShapeError where seq is no multiple of the blocks."""
    blocks = _block(q, block_map.shape[-2], "q"), _block(k, block_map.shape[-1], "k")
    index = BlockIndex.from_map(
        block_map, block_q=blocks[0], block_k=blocks[1], block_sizes=_sizes(variable_block_sizes)
    )
    return _attend(q, k, v, index)


def block_sparse_attn_from_indices(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_idx: torch.Tensor,
    q2k_num: torch.Tensor,
    variable_block_sizes: torch.Tensor,
) -> Pair:
    """The same with lists: q2k_idx int32 [batch or 1, heads or 1, query blocks, room], of which the first q2k_num
    [batch or 1, heads or 1, query blocks] of a row count."""
    blocks = _block(q, q2k_idx.shape[-2], "q"), _block(k, variable_block_sizes.numel(), "k")
    index = BlockIndex(q2k_idx.int(), q2k_num.int(), *blocks, q.shape[2], k.shape[2], _sizes(variable_block_sizes))
    return _attend(q, k, v, index)


def video_sparse_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variable_block_sizes: torch.Tensor,
    q_variable_block_sizes: torch.Tensor,
    topk: int,
    block_size: int | tuple[int, int, int] = (4, 4, 4),
    compress_attn_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """VSA: attention over block means, and over the tokens of the topk KV blocks that score highest there.

    Args:
        q, k, v: [batch, heads, seq, dim], whole blocks; what lies past a block's size may hold anything.
        variable_block_sizes, q_variable_block_sizes: integers [KV blocks], [query blocks]: valid tokens of each.
        topk: KV blocks of a query block, at least 1; all if there are fewer.
        block_size: (T, H, W) of a block, T H W tokens; one number stands for three, as there.
        compress_attn_weight: what the coarse branch is multiplied by, [batch or 1, heads or 1, seq or 1, dim or 1]; None: 1.

    Returns:
        coarse * compress_attn_weight + fine, like q; 0 past a query block's size.  Differentiable; the lists are not.

    Raises as `sparse_attention`; ShapeError where sizes and blocks do not fit seq; ValueRangeError for topk below 1."""
    block = math.prod((block_size,) * 3 if isinstance(block_size, int) else block_size)
    for name, x, sizes in (("q", q, q_variable_block_sizes), ("k", k, variable_block_sizes)):
        if _block(x, sizes.numel(), name) != block:
            raise ShapeError(
                f"{name} has {x.shape[2]} tokens in {sizes.numel()} blocks, expected blocks of {block} tokens"
            )
    check_whole("topk", topk, 1)
    sizes, query_sizes = _sizes(variable_block_sizes), _sizes(q_variable_block_sizes)
    means = coarse(q, k, v, kind="pooled", block=block, block_sizes=sizes, query_sizes=query_sizes, layout="bhsd")
    kept = min(topk, len(sizes))
    index = select(
        means.scores, method="top_k", top_k=kept, capacity=kept, block_q=block, block_k=block, block_sizes=sizes,
        query_sizes=query_sizes,
    ).index  # fmt: skip
    fine = sparse_attention(q, k, v, index, layout="bhsd")
    return fuse(means.out, fine, compress_attn_weight, layout="bhsd")


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: BlockIndex) -> Pair:
    out, lse = sparse_attention(q, k, v, index, layout="bhsd", return_lse=True)
    return out, lse / math.log(2)


def _block(x: torch.Tensor, blocks: int, name: str) -> int:
    """Tokens of a block."""
    if x.dim() != 4 or blocks < 1 or x.shape[2] % blocks:
        raise ShapeError(
            f"{name} has shape {list(x.shape)}, expected [batch, heads, seq, dim] with seq a multiple of {blocks} blocks"
        )
    return x.shape[2] // blocks


def _sizes(sizes: torch.Tensor) -> torch.Tensor:
    return sizes.flatten().int()

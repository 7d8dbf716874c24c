"""Attention of one layer's video tokens, and of text beside them, over the lists that a policy made or over all keys."""

import torch

from ..api import attention
from ..errors import DtypeError, ShapeError
from ..sparse import BlockIndex, GridTiling, coarse, fuse
from ..sparse.kept import every_block
from ..sparse_api import sparse_attention
from .site import Policy, Site, Text

Pair = tuple[torch.Tensor, torch.Tensor | None]


def lists_of(policy: Policy, q: torch.Tensor, k: torch.Tensor, site: Site) -> BlockIndex | None:
    """What a policy makes, without gradients; DtypeError or ShapeError naming it unless that fits the tiling's blocks."""
    with torch.no_grad():
        index: object = policy(q.detach(), k.detach(), site)
    if index is None:
        return None
    if not isinstance(index, BlockIndex):
        raise DtypeError(f"policy {policy!r} must return a BlockIndex or None, got {type(index).__name__}")
    tiling = site.tiling
    wanted = (tiling.slots, tiling.slots, tiling.padded, tiling.padded)
    if index.geometry != wanted:
        raise ShapeError(
            f"policy {policy!r} returned lists with (block_q, block_k, seq_q, seq_k) = {index.geometry}, expected {wanted} for "
            f"grid {tiling.grid} in cubes of {tiling.cube}"
        )
    return index


def attend_lists(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: BlockIndex | None, tiling: GridTiling, text: Text | None,
    scale: float,
) -> Pair:  # fmt: skip
    """(video, text): q, k, v in the tiled order over the lists (None: over all keys) and all text; text over everything."""
    if index is None:
        return attend_dense(q, k, v, tiling, text, scale)
    sizes = tiling.sizes(q.device)
    if text is None:
        return sparse_attention(
            q, k, v, index.with_tensors(index.indices, index.counts, sizes, sizes), scale=scale
        ), None
    k, v = torch.cat([k, text.k], 1), torch.cat([v, text.v], 1)
    length = text.q.shape[1]
    both = _joined_sizes(tiling, text, length)
    video = sparse_attention(q, k, v, _with_text(index, length, both, sizes), scale=scale)
    rows = -(-length // tiling.slots)
    lists = every_block(rows, tiling.block_count + rows, q.device)
    whole = BlockIndex(*lists, tiling.slots, tiling.slots, length, tiling.padded + length, both)
    return video, sparse_attention(text.q, k, v, whole, scale=scale)


def add_coarse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fine: torch.Tensor, gate: torch.Tensor, tiling: GridTiling, scale: float
) -> torch.Tensor:  # fmt: skip
    """fine + gate * coarse: attention among the means of the video's blocks, one result for all queries of a block."""
    sizes = tiling.sizes(q.device)
    means = coarse(
        q, k, v, kind="pooled", scale=scale, block=tiling.slots, block_sizes=sizes, query_sizes=sizes
    )  # fmt: skip
    return fuse(means.out, fine, gate)


def attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiling: GridTiling, text: Text | None, scale: float
) -> Pair:
    """The same over all keys; queries in padding slots attend, too."""
    if not tiling.even:
        k, v = tiling.untile(k), tiling.untile(v)
    if text is None:
        return attention(q, k, v, scale=scale), None
    mask, length = None, text.q.shape[1]
    if text.lengths is not None:
        place = torch.arange(k.shape[1] + length, device=q.device)
        mask = (place < k.shape[1] + text.lengths[:, None])[:, None, None, :]
    both = torch.cat([q, text.q], 1)
    out = attention(both, torch.cat([k, text.k], 1), torch.cat([v, text.v], 1), mask=mask, scale=scale)
    return out[:, : q.shape[1]], out[:, q.shape[1] :]


def _joined_sizes(tiling: GridTiling, text: Text, length: int) -> torch.Tensor | None:
    """Valid tokens of the video's blocks, then of the text's: int32 [blocks] or [batch, blocks]; None: all are whole."""
    if tiling.even and text.lengths is None:
        return None
    device = text.q.device
    starts = torch.arange(0, length, tiling.slots, device=device, dtype=torch.int32)
    valid = (length if text.lengths is None else text.lengths.to(torch.int32)[:, None]) - starts
    valid = valid.clamp(0, tiling.slots)
    video = tiling.block_sizes(device)
    return torch.cat([video.expand(*valid.shape[:-1], -1), valid], -1)


def _with_text(
    index: BlockIndex, length: int, sizes: torch.Tensor | None, query_sizes: torch.Tensor | None
) -> BlockIndex:
    """Lists of the video's query blocks with all text blocks in front: the order of a list changes nothing but rounding."""
    block, blocks = index.block_k, index.kv_blocks
    text = torch.arange(blocks, blocks - (-length // block), device=index.device, dtype=torch.int32)
    indices = torch.cat([text.expand(*index.indices.shape[:-1], -1), index.indices], -1)
    counts = index.counts + text.shape[0]
    return BlockIndex(indices, counts, block, block, index.seq_q, index.seq_k + length, sizes, query_sizes)

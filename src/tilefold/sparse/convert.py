"""Maps of blocks from what others hold: FlexAttention's masks, predicates; and the checks of compressed rows."""

from typing import TYPE_CHECKING

import torch

from ..check import check_whole
from ..errors import DtypeError, LayoutError, ShapeError
from .lists import lists_to_map, padded
from .predicates import check_geometry, check_predicate
from .validate import check_block, check_tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from .predicates import Predicate

__all__ = ["compressed_rows", "map_of_flex", "map_of_predicate"]


def compressed_rows(crow: torch.Tensor, col: torch.Tensor | None) -> torch.Tensor:
    """col, after checking crow [.., rows + 1] and col [.., entries] of `BlockIndex.from_csr`; reads no value."""
    if isinstance(crow, torch.Tensor) and crow.layout in (torch.sparse_csr, torch.sparse_bsr):
        raise LayoutError(
            f"crow is a tensor of layout {crow.layout}: pass its crow_indices() as crow and its col_indices() as col"
        )
    if not isinstance(col, torch.Tensor):
        raise DtypeError(f"col must be a torch.Tensor, the columns of crow's rows, got {type(col).__name__}")
    forms, kinds = "{0} / heads {0} / batch heads {0}", (torch.int32, torch.int64)
    check_tensor("crow", crow, forms.format("offsets"), kinds)
    check_tensor("col", col, forms.format("entries"), kinds, beside=("crow", crow))
    if crow.shape[:-1] != col.shape[:-1] or crow.shape[-1] == 0:
        raise ShapeError(
            f"crow has shape {tuple(crow.shape)} and col {tuple(col.shape)}: expected [..., Q blocks + 1] and [..., entries]"
        )
    return col


def map_of_flex(mask: "BlockMask") -> tuple[torch.Tensor, tuple[int, int], tuple[int, int]]:
    """(bool [batch, heads, Q blocks, KV blocks], (block_q, block_k), (seq_q, seq_k)) of a BlockMask's partial and full blocks."""
    if not hasattr(mask, "kv_num_blocks") or not hasattr(mask, "kv_indices"):
        raise DtypeError(f"mask must be a BlockMask of torch.nn.attention.flex_attention, got {type(mask).__name__}")
    seq_q, seq_k = mask.seq_lengths
    block_q, block_k = mask.BLOCK_SIZE
    for size in (block_q, block_k):
        check_block(f"mask has BLOCK_SIZE {(block_q, block_k)}: each", size)
    blocks = -(-seq_k // block_k)
    keep = lists_to_map(padded(mask.kv_indices, 4), padded(mask.kv_num_blocks, 3), blocks)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        keep = keep | lists_to_map(padded(mask.full_kv_indices, 4), padded(mask.full_kv_num_blocks, 3), blocks)
    return keep, (block_q, block_k), (seq_q, seq_k)


def map_of_predicate(
    predicate: "Predicate",
    shared: tuple[int, int],
    seq: tuple[int, int],
    block: tuple[int, int],
    device: torch.device | str | None,
) -> torch.Tensor:
    """bool [batch or 1, heads or 1, Q blocks, KV blocks], after checking every argument; shared: (batch, heads)."""
    check_predicate("predicate", predicate)
    sizes = [check_whole(name, n) for name, n in zip(("batch", "heads"), shared, strict=True)]
    for side, length, size in zip("qk", seq, block, strict=True):
        sizes.append(-(-check_whole(f"seq_{side}", length) // check_block(f"block_{side}", size)))
    check_geometry(predicate, seq, block)
    rows, columns = sizes[2:]
    i_b, i_h, i_q, i_k = (torch.arange(n, device=device) for n in sizes)
    keep = predicate(i_b[:, None, None, None], i_h[None, :, None, None], i_q[:, None], i_k[None, :])
    if not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool or keep.dim() > 4:
        kind = keep.dtype if isinstance(keep, torch.Tensor) else type(keep).__name__
        raise DtypeError(f"predicate must return a bool tensor of at most 4 dimensions, got {kind}")
    keep = padded(keep, 4)
    if any(n not in (1, m) for n, m in zip(keep.shape, sizes, strict=True)):
        raise ShapeError(
            f"predicate returned shape {tuple(keep.shape)}, which does not broadcast to [batch, heads, Q blocks, "
            f"KV blocks] = {sizes}"
        )
    return keep.expand(*keep.shape[:2], rows, columns)

"""Maps of blocks from what others hold: FlexAttention's masks, masks of tokens, predicates; and the checks of compressed rows."""

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..check import check_whole
from ..errors import DtypeError, LayoutError, ShapeError
from .lists import lists_to_map, padded
from .predicates import check_geometry, check_predicate
from .validate import check_block, check_tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from .predicates import MaskFunction, Predicate

Pair: TypeAlias = tuple[int, int]
"""Of queries and of keys; or of batch and heads."""

Place: TypeAlias = torch.device | str | None
AT_ONCE = 1 << 24  # elements of a mask of tokens that are made at a time


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


def map_of_flex(mask: "BlockMask", check: bool) -> tuple[torch.Tensor, Pair, Pair, bool]:
    """(bool [batch, heads, Q blocks, KV blocks], (block_q, block_k), (seq_q, seq_k), whether its mask also cuts inside
    blocks) of a BlockMask's partial and full blocks.  check: look at the numbers of partial blocks for the last."""
    if not hasattr(mask, "kv_num_blocks") or not hasattr(mask, "kv_indices"):
        raise DtypeError(f"mask must be a BlockMask of torch.nn.attention.flex_attention, got {type(mask).__name__}")
    seq_q, seq_k = mask.seq_lengths
    block_q, block_k = mask.BLOCK_SIZE
    for size in (block_q, block_k):
        check_block(f"mask has BLOCK_SIZE {(block_q, block_k)}: each", size)
    partial, full = maps_of_flex(mask)
    keep = partial if full is None else partial | full
    from torch.nn.attention.flex_attention import noop_mask

    cut = mask.mask_mod is not noop_mask and not (check and not bool(mask.kv_num_blocks.any()))
    return keep, (block_q, block_k), (seq_q, seq_k), cut


def maps_of_flex(mask: "BlockMask") -> tuple[torch.Tensor, torch.Tensor | None]:
    """bool [batch, heads, Q blocks, KV blocks] of a BlockMask's partial blocks, and of its full ones, if it tells them apart."""
    blocks = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    partial = lists_to_map(padded(mask.kv_indices, 4), padded(mask.kv_num_blocks, 3), blocks)
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        return partial, None
    return partial, lists_to_map(padded(mask.full_kv_indices, 4), padded(mask.full_kv_num_blocks, 3), blocks)


def kinds_of_mask_mod(
    mask_mod: Any, args: Any, shared: Pair, seq: Pair, block: Pair, device: Place, check: bool
) -> tuple[torch.Tensor, bool]:
    """(uint8 [batch or 1, heads or 1, Q blocks, KV blocks] of `ops.sparse.classify`, whether the mask also cuts inside blocks);
    shared: (batch, heads).  check: as for `map_of_mask`."""
    from ..ops.reads import reads  # here: lists without a kernel stay light
    from ..ops.sparse.classify import block_kinds

    grid = _checked(shared, seq, block)
    place = torch.empty(0, device=device).device  # with its number
    batch, heads = (n if read else min(n, 1) for n, read in zip(grid, reads(mask_mod)[1:], strict=True))
    kinds = block_kinds(mask_mod, args, (batch, heads, *seq), block, place)
    return kinds, not check or bool((kinds == 1).any())


def map_of_mask(
    mask: "MaskFunction", shared: Pair, seq: Pair, block: Pair, device: Place, check: bool
) -> tuple[torch.Tensor, bool]:
    """(bool [batch or 1, heads or 1, Q blocks, KV blocks], whether the mask also cuts inside blocks), after checking every
    argument; shared: (batch, heads).  check: compute the latter, and read it on the host; else it is True."""
    check_predicate("mask", mask, ("batch", "head", "q_index", "kv_index"))
    batch, heads = _checked(shared, seq, block)
    (seq_q, seq_k), (block_q, block_k) = seq, block
    rows = block_q * max(1, AT_ONCE // max(1, block_q * seq_k * batch * heads))
    i_b, i_h, i_q, i_k = (torch.arange(n, device=device) for n in (batch, heads, seq_q, seq_k))
    some, whole = [], []
    for start in range(0, max(1, seq_q), rows):
        these = i_q[start : start + rows]
        seen = mask(i_b[:, None, None, None], i_h[None, :, None, None], these[:, None], i_k[None, :])
        seen = _broadcast("mask", seen, (batch, heads, len(these), seq_k), "[batch, heads, queries, seq_k]")
        tail = (0, -seq_k % block_k, 0, -len(these) % block_q)
        shape = (*seen.shape[:2], -(-len(these) // block_q), block_q, -(-seq_k // block_k), block_k)
        some.append(torch.nn.functional.pad(seen, tail, value=False).view(shape).any(5).any(3))
        if check:
            whole.append(torch.nn.functional.pad(seen, tail, value=True).view(shape).all(5).all(3))
    keep = torch.cat(some, 2)
    return keep, bool((keep & ~torch.cat(whole, 2)).any()) if check else True


def map_of_predicate(predicate: "Predicate", shared: Pair, seq: Pair, block: Pair, device: Place) -> torch.Tensor:
    """bool [batch or 1, heads or 1, Q blocks, KV blocks], after checking every argument; shared: (batch, heads)."""
    check_predicate("predicate", predicate)
    batch, heads = _checked(shared, seq, block)
    check_geometry(predicate, seq, block)
    sizes = batch, heads, -(-seq[0] // block[0]), -(-seq[1] // block[1])
    i_b, i_h, i_q, i_k = (torch.arange(n, device=device) for n in sizes)
    keep = predicate(i_b[:, None, None, None], i_h[None, :, None, None], i_q[:, None], i_k[None, :])
    return _broadcast("predicate", keep, sizes, "[batch, heads, Q blocks, KV blocks]")


def _checked(shared: Pair, seq: Pair, block: Pair) -> Pair:
    """(batch, heads), after checking them, lengths and blocks."""
    for side, length, size in zip("qk", seq, block, strict=True):
        check_whole(f"seq_{side}", length)
        check_block(f"block_{side}", size)
    return check_whole("batch", shared[0]), check_whole("heads", shared[1])


def _broadcast(name: str, keep: object, sizes: tuple[int, int, int, int], dims: str) -> torch.Tensor:
    """What the function of that name returned as bool [batch or 1, heads or 1, rows, columns]."""
    if not isinstance(keep, torch.Tensor) or keep.dtype != torch.bool or keep.dim() > 4:
        kind = keep.dtype if isinstance(keep, torch.Tensor) else type(keep).__name__
        raise DtypeError(f"{name} must return a bool tensor of at most 4 dimensions, got {kind}")
    keep = padded(keep, 4)
    if any(n not in (1, m) for n, m in zip(keep.shape, sizes, strict=True)):
        raise ShapeError(
            f"{name} returned shape {tuple(keep.shape)}, which does not broadcast to {dims} = {list(sizes)}"
        )
    return keep.expand(*keep.shape[:2], *sizes[2:])

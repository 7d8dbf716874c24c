"""Ready predicates for `BlockIndex.from_predicate`: which KV blocks a query block sees, by their coordinates.

A predicate is a function of (batch, head, q_block, kv_block), int64 tensors that broadcast to [B, H, Q blocks, KV
blocks], and returns a bool tensor that does.  One that does not use batch or head makes lists that are shared over them.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from ..errors import ShapeError, ValueRangeError

__all__ = ["Predicate", "all_of", "any_of", "causal_blocks", "dilated", "sliding_tile", "video_window"]

Predicate: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, q_block, kv_block) -> bool, true where the query block sees the KV block."""


def _whole(name: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueRangeError(f"{name} must be an int of at least {low}, got {value!r}")
    return value


def sliding_tile(window: int | tuple[int, int]) -> Predicate:
    """KV blocks from `left` before to `right` after the query block's own number, inclusive; window: (left, right) or
    one int for both, in blocks.  Distances count block numbers: with different query and KV blocks give a predicate of
    your own."""
    left, right = (window, window) if isinstance(window, int) else window
    _whole("window", left, 0)
    _whole("window", right, 0)

    def predicate(
        batch: torch.Tensor, head: torch.Tensor, q_block: torch.Tensor, kv_block: torch.Tensor
    ) -> torch.Tensor:
        return (kv_block >= q_block - left) & (kv_block <= q_block + right)

    return predicate


def dilated(step: int, window: int | None = None) -> Predicate:
    """Every `step`-th KV block counted from the query block's own, on both sides, at most `window` of them on each side."""
    _whole("step", step, 1)
    reach = None if window is None else _whole("window", window, 0) * step

    def predicate(
        batch: torch.Tensor, head: torch.Tensor, q_block: torch.Tensor, kv_block: torch.Tensor
    ) -> torch.Tensor:
        distance = (kv_block - q_block).abs()
        keep = distance % step == 0
        return keep if reach is None else keep & (distance <= reach)

    return predicate


def causal_blocks(seq_q: int, seq_k: int, block_q: int = 64, block_k: int = 64) -> Predicate:
    """Every KV block of which some query of the block sees some key under a causal mask, aligned to the bottom right.

    Lengths and blocks in tokens.  The diagonal blocks are listed whole: mask inside them with a mask_mod or causal=True."""
    for name, value in (("seq_q", seq_q), ("seq_k", seq_k)):
        _whole(name, value, 0)
    for name, value in (("block_q", block_q), ("block_k", block_k)):
        _whole(name, value, 1)

    def predicate(
        batch: torch.Tensor, head: torch.Tensor, q_block: torch.Tensor, kv_block: torch.Tensor
    ) -> torch.Tensor:
        last_query = ((q_block + 1) * block_q).clamp(max=seq_q) - 1
        return kv_block * block_k <= last_query + (seq_k - seq_q)

    return predicate


def video_window(grid: Sequence[int], radii: int | Sequence[int], *, keep_size: bool = False) -> Predicate:
    """KV blocks within `radii` (t, h, w) of the query block on each axis of a video's grid (t, h, w), both in blocks.

    Block number = (t * H + h) * W + w.  Blocks past the end of the grid (text after video) are in no window and have
    none: join with `any_of`.  keep_size: at a border the window moves inside instead of being cut, so that every block
    sees as many (sliding tile attention, Zhang et al. 2025, arXiv:2502.04507)."""
    sizes = tuple(_whole("grid", n, 1) for n in grid)
    reach = (radii,) * 3 if isinstance(radii, int) else tuple(radii)
    if len(sizes) != 3 or len(reach) != 3:
        raise ShapeError(f"grid and radii must be (t, h, w), got {tuple(grid)!r} and {radii!r}")
    for radius in reach:
        _whole("radii", radius, 0)
    strides = (sizes[1] * sizes[2], sizes[2], 1)
    total = sizes[0] * strides[0]

    def predicate(
        batch: torch.Tensor, head: torch.Tensor, q_block: torch.Tensor, kv_block: torch.Tensor
    ) -> torch.Tensor:
        keep = (q_block < total) & (kv_block < total)
        for size, stride, radius in zip(sizes, strides, reach, strict=True):
            centre = q_block // stride % size
            if keep_size:
                low = min(radius, (size - 1) // 2)
                centre = centre.clamp(low, max(low, size - 1 - radius))
            keep = keep & ((kv_block // stride % size - centre).abs() <= radius)
        return keep

    return predicate


def any_of(*predicates: Predicate) -> Predicate:
    """True where at least one of the predicates is."""
    return _joined(predicates, torch.logical_or)


def all_of(*predicates: Predicate) -> Predicate:
    """True where all of the predicates are."""
    return _joined(predicates, torch.logical_and)


def _joined(predicates: tuple[Predicate, ...], join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Predicate:
    if not predicates:
        raise ValueRangeError("at least one predicate is needed, got none")

    def predicate(
        batch: torch.Tensor, head: torch.Tensor, q_block: torch.Tensor, kv_block: torch.Tensor
    ) -> torch.Tensor:
        keep = predicates[0](batch, head, q_block, kv_block)
        for other in predicates[1:]:
            keep = join(keep, other(batch, head, q_block, kv_block))
        return keep

    return predicate

"""Ready predicates for `BlockIndex.from_predicate`: which KV blocks a query block sees, by their coordinates.

A predicate is a function of (batch, head, q_block, kv_block), int64 tensors that broadcast to [B, H, Q blocks, KV
blocks], and returns a bool tensor that does.  One that does not use batch or head makes lists that are shared over them.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError, ValueRangeError
from .validate import check_block

Predicate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of (batch, head, q_block, kv_block), int64 tensors [B, 1, 1, 1], [1, H, 1, 1], [Q blocks, 1] and [1, KV blocks],
that returns a bool tensor which broadcasts with them: true where the query block sees the KV block.  It may have an attribute
`made_for`, a tuple of (maker, {name: value}) that says with which seq_q, seq_k, block_q or block_k, and with at least how many
"blocks" on either side, it may be used; `BlockIndex.from_predicate` refuses others."""

MaskFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of (batch, head, q_index, kv_index), the same of tokens: true where the query sees the key; for
`BlockIndex.from_mask`."""

Facts: TypeAlias = tuple[tuple[str, dict[str, int]], ...]


@dataclass(frozen=True)
class _Made:
    """A predicate that knows what it was made for."""

    function: Predicate
    made_for: Facts

    def __call__(self, batch: Tensor, head: Tensor, q_block: Tensor, kv_block: Tensor) -> Tensor:
        return self.function(batch, head, q_block, kv_block)


def check_predicate(
    name: str, predicate: object, arguments: tuple[str, ...] = ("batch", "head", "q_block", "kv_block")
) -> None:
    """DtypeError unless it is a function of four arguments."""
    wanted = f"{name} must be a function of ({', '.join(arguments)})"
    if not callable(predicate):
        raise DtypeError(f"{wanted}, got {predicate!r}")
    if torch.compiler.is_compiling() or isinstance(predicate, _Made):
        return
    try:
        signature = inspect.signature(predicate)
    except ValueError:  # of some functions written in C nobody knows it
        return
    try:
        signature.bind(*"bhqk")
    except TypeError:
        raise DtypeError(f"{wanted}, got one of {signature}") from None


def check_geometry(predicate: Predicate, seq: tuple[int, int], block: tuple[int, int]) -> None:
    """ValueRangeError unless the predicate was made for these lengths and blocks, (queries, keys), or for any."""
    given = {"seq_q": seq[0], "seq_k": seq[1], "block_q": block[0], "block_k": block[1]}
    facts: Any = getattr(predicate, "made_for", ())
    for maker, wanted in facts:
        for name, value in wanted.items():
            if name != "blocks":
                if given[name] != value:
                    raise ValueRangeError(
                        f"predicate was made by {maker} with {name}={value}, but from_predicate has {name}={given[name]}: they "
                        f"must be the same"
                    )
                continue
            for side in "qk":
                have = -(-given[f"seq_{side}"] // given[f"block_{side}"])
                if have < value:
                    raise ValueRangeError(
                        f"predicate was made by {maker} for a grid of {value} blocks, but from_predicate has only {have}: "
                        f"seq_{side}={given[f'seq_{side}']} in blocks of block_{side}={given[f'block_{side}']}"
                    )


def _whole(name: str, value: object, low: int, form: str = "an int") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueRangeError(f"{name} must be {form} of at least {low}, got {value!r}")
    return value


def sliding_tile(window: int | tuple[int, int]) -> Predicate:
    """KV blocks from `left` before to `right` after the query block's own number, inclusive; window: (left, right) or
    one int for both, in blocks.  Distances count block numbers: with different query and KV blocks give a predicate of
    your own."""
    form = "an int, or a pair (left, right) of ints,"
    if not isinstance(window, tuple | list):
        window = (window, window)
    elif len(window) != 2:
        raise ValueRangeError(f"window must be {form} of at least 0, got {window!r}")
    left, right = (_whole("window", side, 0, form) for side in window)

    return lambda batch, head, q_block, kv_block: (kv_block >= q_block - left) & (kv_block <= q_block + right)


def dilated(step: int, window: int | None = None) -> Predicate:
    """Every `step`-th KV block counted from the query block's own, on both sides, at most `window` of them on each side."""
    _whole("step", step, 1)
    reach = None if window is None else _whole("window", window, 0) * step

    def predicate(batch: Tensor, head: Tensor, q_block: Tensor, kv_block: Tensor) -> Tensor:
        distance = (kv_block - q_block).abs()
        keep = distance % step == 0
        return keep if reach is None else keep & (distance <= reach)

    return predicate


def causal_blocks(seq_q: int, seq_k: int, block_q: int = 64, block_k: int = 64) -> Predicate:
    """Every KV block of which some query of the block sees some key under a causal mask, aligned to the bottom right.

    Lengths and blocks in tokens, those that `BlockIndex.from_predicate` is given (it refuses others).  The diagonal
    blocks are listed whole: mask inside them with a mask_mod or causal=True."""
    for name, value in (("seq_q", seq_q), ("seq_k", seq_k)):
        _whole(name, value, 0)
    for name, value in (("block_q", block_q), ("block_k", block_k)):
        check_block(name, value)

    def predicate(batch: Tensor, head: Tensor, q_block: Tensor, kv_block: Tensor) -> Tensor:
        last_query = ((q_block + 1) * block_q).clamp(max=seq_q) - 1
        return kv_block * block_k <= last_query + (seq_k - seq_q)

    facts = {"seq_q": seq_q, "seq_k": seq_k, "block_q": block_q, "block_k": block_k}
    return _Made(predicate, (("causal_blocks", facts),))


def video_window(grid: Sequence[int], radii: int | Sequence[int], *, keep_size: bool = False) -> Predicate:
    """KV blocks within `radii` (t, h, w) of the query block on each axis of a video's grid (t, h, w), both in blocks.

    Block number = (t * H + h) * W + w; queries and keys both begin with the whole grid (`BlockIndex.from_predicate`
    refuses fewer blocks).  Blocks past the end of the grid (text after video) are in no window and have
    none: join with `any_of`.  keep_size: at a border the window moves inside instead of being cut, so that every block
    sees as many (sliding tile attention, Zhang et al. 2025, arXiv:2502.04507)."""
    if not isinstance(keep_size, bool):
        raise DtypeError(f"keep_size must be a bool, got {keep_size!r}")
    sizes = _on_axes("grid", grid, 1)
    reach = _on_axes("radii", (radii,) * 3 if isinstance(radii, int) else radii, 0)
    strides = (sizes[1] * sizes[2], sizes[2], 1)
    total = sizes[0] * strides[0]

    def predicate(batch: Tensor, head: Tensor, q_block: Tensor, kv_block: Tensor) -> Tensor:
        keep = (q_block < total) & (kv_block < total)
        for size, stride, radius in zip(sizes, strides, reach, strict=True):
            centre = q_block // stride % size
            if keep_size:
                low = min(radius, (size - 1) // 2)
                centre = centre.clamp(low, max(low, size - 1 - radius))
            keep = keep & ((kv_block // stride % size - centre).abs() <= radius)
        return keep

    return _Made(predicate, (("video_window", {"blocks": total}),))


def _on_axes(name: str, given: Any, low: int) -> tuple[int, ...]:
    if not isinstance(given, Sequence) or len(given) != 3:
        one = " or one int for all" if name == "radii" else ""
        raise ShapeError(f"{name} must be (t, h, w){one}, got {given!r}")
    return tuple(_whole(name, n, low, "(t, h, w), each an int") for n in given)


def any_of(*predicates: Predicate) -> Predicate:
    """True where at least one of the predicates is."""
    return _joined(predicates, torch.logical_or)


def all_of(*predicates: Predicate) -> Predicate:
    """True where all of the predicates are."""
    return _joined(predicates, torch.logical_and)


def _joined(predicates: tuple[Predicate, ...], join: Callable[[Tensor, Tensor], Tensor]) -> Predicate:
    if not predicates:
        raise ValueRangeError("at least one predicate is needed, got none")
    for i, one in enumerate(predicates):
        check_predicate(f"predicates[{i}]", one)
    made_for = tuple(fact for one in predicates for fact in getattr(one, "made_for", ()))

    def predicate(batch: Tensor, head: Tensor, q_block: Tensor, kv_block: Tensor) -> Tensor:
        return reduce(join, (one(batch, head, q_block, kv_block) for one in predicates))

    return _Made(predicate, made_for)

"""What a BlockIndex has to be: shapes and dtypes always, values on request."""

from typing import TYPE_CHECKING

import torch

from ..check import TensorSpec, bind
from ..errors import DtypeError, ShapeError, ValueRangeError
from .lists import live_entries

if TYPE_CHECKING:
    from .index import BlockIndex

__all__ = ["check_columns", "check_lists", "check_record", "check_tensor", "check_whole", "check_within_capacity"]

SMALLEST_BLOCK = 16

_SIZES = "{0} / batch|1 {0} / batch|1 heads|1 {0}"
_RECORD = (
    TensorSpec("indices", "batch|1 heads|1 q_blocks capacity", (torch.int32,), contiguous_last=True),
    TensorSpec("counts", "batch|1 heads|1 q_blocks", (torch.int32,), contiguous_last=True),
    TensorSpec("block_sizes", _SIZES.format("kv_blocks"), (torch.int32,), optional=True, contiguous_last=True),
    TensorSpec("query_sizes", _SIZES.format("q_blocks"), (torch.int32,), optional=True, contiguous_last=True),
)


def check_whole(name: str, value: object, low: int = 0) -> int:
    """An int of at least `low`; raises DtypeError or ValueRangeError."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise DtypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < low:
        raise ValueRangeError(f"{name} must be at least {low}, got {value}")
    return value  # type: ignore[return-value]


def check_tensor(
    name: str,
    value: torch.Tensor,
    dims: str,
    dtypes: tuple[torch.dtype, ...],
    beside: tuple[str, torch.Tensor] | None = None,
) -> None:
    """One tensor argument of a constructor; see `tilefold.check.bind`."""
    bind((TensorSpec(name, dims, dtypes),), {name: value}, beside=beside)


def check_columns(name: str, given: torch.Tensor, seq_k: int, block_k: int) -> None:
    """Raise ShapeError unless a map or scores [..., Q blocks, KV blocks] have as many KV blocks as seq_k makes."""
    blocks = -(-check_whole("seq_k", seq_k) // check_whole("block_k", block_k, 1))
    if given.shape[-1] != blocks:
        raise ShapeError(
            f"{name} has {given.shape[-1]} KV blocks, shape {tuple(given.shape)}; "
            f"expected {blocks} for seq_k {seq_k} in blocks of {block_k}"
        )


def check_record(index: "BlockIndex") -> None:
    """Types, shapes, devices and strides of a record; reads no value."""
    for name in ("block_q", "block_k"):
        size = check_whole(name, getattr(index, name))
        if size < SMALLEST_BLOCK or size & (size - 1):
            raise ValueRangeError(f"{name} must be a power of two and at least {SMALLEST_BLOCK} tokens, got {size}")
    for name in ("seq_q", "seq_k"):
        check_whole(name, getattr(index, name))
    tensors = dict(zip(("indices", "counts", "block_sizes", "query_sizes"), index.tensors(), strict=True))
    bind(_RECORD, tensors, known={"q_blocks": index.q_blocks, "kv_blocks": index.kv_blocks})


def check_within_capacity(wanted: torch.Tensor, capacity: int) -> None:
    """Raise if a row wants more entries than fit.  Reads values on the host."""
    _refuse(wanted, wanted > capacity, "counts", f"more than capacity {capacity}")


def check_lists(index: "BlockIndex") -> None:
    """Read every value on the host and raise ValueRangeError for the first that breaks the record's contract."""
    counts = index.counts
    _refuse(counts, (counts < 0) | (counts > index.capacity), "counts", f"expected 0 to capacity {index.capacity}")
    shape = torch.broadcast_shapes(index.indices.shape[:3], counts.shape)
    lists = index.indices.expand(*shape, -1)
    live = live_entries(counts, index.capacity).expand_as(lists)
    blocks = index.kv_blocks
    outside = live & ((lists < 0) | (lists >= blocks))
    _refuse(lists, outside, "indices", f"expected 0 to {blocks - 1}, the last KV block")
    ordered = torch.where(live, lists, -1).sort(-1).values
    again = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(again.any()):
        *row, entry = again.nonzero()[0].tolist()
        raise ValueRangeError(f"indices{row} lists KV block {int(ordered[(*row, entry)])} more than once")
    sides = (
        ("block_sizes", index.block_sizes, index.seq_k, index.block_k),
        ("query_sizes", index.query_sizes, index.seq_q, index.block_q),
    )
    for name, sizes, length, block in sides:
        if sizes is not None:
            start = torch.arange(sizes.shape[-1], device=sizes.device) * block
            wrong = (sizes < 0) | (sizes > (length - start).clamp(max=block))
            what = f"expected 0 to {block}, and no more tokens than a length of {length} leaves to this block"
            _refuse(sizes, wrong, name, what)


def _refuse(values: torch.Tensor, wrong: torch.Tensor, name: str, expected: str) -> None:
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueRangeError(f"{name}{place} is {int(values[tuple(place)])}, {expected}")

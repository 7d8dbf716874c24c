"""What a BlockIndex has to be: shapes and dtypes always, values on request."""

from typing import TYPE_CHECKING

import torch

from ..check import TensorSpec, bind, check_whole
from ..errors import DtypeError, ShapeError, ValueRangeError
from .lists import live_entries

if TYPE_CHECKING:
    from .index import BlockIndex

SMALLEST_BLOCK = 16

SIZES = "{0} / batch|1 {0} / batch|1 heads|1 {0}"
_RECORD = (
    TensorSpec("indices", "batch|1 heads|1 q_blocks capacity", (torch.int32,), contiguous_last=True),
    TensorSpec("counts", "batch|1 heads|1 q_blocks", (torch.int32,), contiguous_last=True),
    TensorSpec("block_sizes", SIZES.format("kv_blocks"), (torch.int32,), optional=True, contiguous_last=True),
    TensorSpec("query_sizes", SIZES.format("q_blocks"), (torch.int32,), optional=True, contiguous_last=True),
)


def check_tensor(
    name: str,
    value: torch.Tensor,
    dims: str,
    dtypes: tuple[torch.dtype, ...],
    beside: tuple[str, torch.Tensor] | None = None,
) -> None:
    """One tensor argument of a constructor; see `tilefold.check.bind`."""
    bind((TensorSpec(name, dims, dtypes),), {name: value}, beside=beside)


def check_block(name: str, value: object) -> int:
    """Tokens of a block: a power of two, at least 16; raises DtypeError or ValueRangeError."""
    size = check_whole(name, value, -(2**31))
    if size < SMALLEST_BLOCK or size & (size - 1):
        raise ValueRangeError(f"{name} must be a power of two and at least {SMALLEST_BLOCK} tokens, got {size}")
    return size


def check_grid(name: str, given: torch.Tensor, dims: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """A map, scores or lists of every row [batch or 1, heads or 1, ..]; the message says how a shared one gets its dimensions."""
    wanted = dims.split()
    if isinstance(given, torch.Tensor) and given.dim() == len(wanted) - 2:
        raise ShapeError(
            f"{name} has {given.dim()} dimensions, shape {tuple(given.shape)}; expected [{', '.join(wanted)}]: "
            f"{name}[None, None] shares it over batch and heads"
        )
    check_tensor(name, given, dims, dtypes)


def lengths_of(
    name: str, rows: int, columns: int | None, seq: tuple[int | None, int | None], block: tuple[int, int]
) -> tuple[int, int]:
    """(seq_q, seq_k), by default whole blocks, after checking them and block_q and block_k against the rows and columns (None:
    any) of the argument `name`; ShapeError names both."""
    found = []
    for side, blocks, length, size in zip("qk", (rows, columns), seq, block, strict=True):
        check_block(f"block_{side}", size)
        length = (blocks or 0) * size if length is None else check_whole(f"seq_{side}", length)
        if blocks is not None and blocks != -(-length // size):
            raise ShapeError(
                f"{name} has {blocks} {'Q' if side == 'q' else 'KV'} blocks; expected {-(-length // size)} for "
                f"seq_{side}={length} in blocks of block_{side}={size}"
            )
        found.append(length)
    return found[0], found[1]


def check_record(index: "BlockIndex") -> None:
    """Types, shapes, devices and strides of a record; reads no value."""
    for name in ("block_q", "block_k"):
        check_block(name, getattr(index, name))
    for name in ("seq_q", "seq_k"):
        check_whole(name, getattr(index, name))
    if not isinstance(index.masked, bool):
        raise DtypeError(f"masked must be a bool, got {index.masked!r}")
    tensors = dict(zip(("indices", "counts", "block_sizes", "query_sizes"), index.tensors(), strict=True))
    bind(_RECORD, tensors, known={"q_blocks": index.q_blocks, "kv_blocks": index.kv_blocks})


def check_within_capacity(name: str, wanted: torch.Tensor, capacity: int) -> None:
    """Raise if a row of the argument `name` wants more entries than fit.  Reads values on the host."""
    if bool((wanted > capacity).any()):
        place = (wanted > capacity).nonzero()[0].tolist()
        raise ValueRangeError(
            f"{name} row {place} has {int(wanted[tuple(place)])} blocks, more than capacity {capacity}"
        )


def check_csr(crow: torch.Tensor, col: torch.Tensor, blocks: int) -> None:
    """Compressed rows as they have to be, so that no entry is left out.  Reads values on the host."""
    entries = col.shape[-1]
    _refuse(crow[..., :1], crow[..., :1] != 0, "crow", "expected 0: the first row begins at the first entry")
    down = torch.nn.functional.pad(crow.diff(dim=-1) < 0, (1, 0), value=False)
    _refuse(crow, down, "crow", "less than the one before it: rows may not end before they begin")
    last = torch.arange(crow.shape[-1], device=crow.device) == crow.shape[-1] - 1
    _refuse(crow, last & (crow != entries), "crow", f"expected {entries}, the number of entries of col")
    _refuse(col, (col < 0) | (col >= blocks), "col", f"expected 0 to {blocks - 1}, the last KV block")


def check_lists(index: "BlockIndex", given: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
    """Read every value on the host and raise ValueRangeError for the first that breaks the record's contract.

    given: (indices, counts) from which the record's were made, if they may hold numbers that int32 does not."""
    indices, counts = given or (index.indices, index.counts)
    _refuse(counts, (counts < 0) | (counts > index.capacity), "counts", f"expected 0 to capacity {index.capacity}")
    shape = torch.broadcast_shapes(indices.shape[:3], counts.shape)
    lists = indices.expand(*shape, -1)
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
            seq = f"seq_{'k' if name == 'block_sizes' else 'q'}={length}"
            tail = length - (sizes.shape[-1] - 1) * block
            last = f" (the last block: {tail}, what {seq} leaves to it)" if tail < block else ""
            _refuse(sizes, wrong, name, f"expected 0 to {block}{last}")


def _refuse(values: torch.Tensor, wrong: torch.Tensor, name: str, expected: str) -> None:
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueRangeError(f"{name}{place} is {int(values[tuple(place)])}, {expected}")

"""What index tensors of packed and paged calls hold, read on the host: on request, and in the interpreter, where reading costs
nothing and a wrong value ends the process."""

import itertools

import torch

from ..errors import ValueRangeError
from .faults import name_in, too_long
from .source import Packed, Paged


def check_packed(packed: Packed, total_q: int, total_k: int, operation: str) -> None:
    """The values of cu_seqlens, and that no sequence is longer than the call says.  operation: whose arguments an error
    names."""
    check_side(operation, "q", packed.cu_q, total_q, packed.max_q)
    check_side(operation, "k", packed.cu_k, total_k, packed.max_k)


def check_inside(packed: Packed, total_q: int, total_k: int) -> None:
    """What the kernels need, and no more: the rest was looked at, or noted, by the function that was called."""
    check_offsets("cu_seqlens_q", packed.cu_q.tolist(), total_q)
    check_offsets("cu_seqlens_k", packed.cu_k.tolist(), total_k)


def check_side(operation: str, side: str, offsets: torch.Tensor, total: int, longest: int | None) -> None:
    """`check_packed` of queries, "q", or of keys, "k"; longest: None where the offsets do not say how long sequences are."""
    name, values = name_in(operation, f"cu_seqlens_{side}"), offsets.tolist()
    check_offsets(name, values, total)
    if values[0] > 0:
        raise ValueRangeError(
            f"{name} must begin at 0, got {values}: the {values[0]} rows before its first sequence would be in none"
        )
    for b, length in enumerate(offsets.diff().tolist()):
        if longest is not None and length > longest:
            raise ValueRangeError(too_long(operation, f"max_seqlen_{side}", b, length, longest))


def check_offsets(name: str, values: list[int], total: int) -> None:
    """No offset of a cu_seqlens of that name leads a kernel out of the rows that there are."""
    if values[0] < 0 or values[-1] > total or any(a > b for a, b in itertools.pairwise(values)):
        raise ValueRangeError(f"{name} must ascend from 0 to at most {total}, got {values}")


def check_pages(paged: Paged, pages: int, page_size: int, seq_k: int) -> None:
    """The values of cache_seqlens and of the table's entries that they reach: as check_offsets, only in the interpreter."""
    for b, length in enumerate(paged.cache_seqlens.tolist()):
        if not 0 <= length <= seq_k:
            raise ValueRangeError(f"cache_seqlens[{b}] is {length}, expected 0 to {seq_k}, the keys that index counts")
        for i, page in enumerate(paged.block_table[b, : -(-length // page_size)].tolist()):
            if pages == 0:
                raise ValueRangeError(f"cache_seqlens[{b}] is {length}, but k_pages has no pages")
            if not 0 <= page < pages:
                raise ValueRangeError(f"block_table[{b}, {i}] is {page}, expected 0 to {pages - 1}, the last page")

"""Shards whose borders are multiples of a block, and the rows of block lists that belong to one of them."""

from itertools import pairwise

import torch

from ..check import check_whole
from ..errors import DtypeError, ShapeError
from ..plan.parallel.sharding import Sharding, shard
from ..sparse import BlockIndex
from ..sparse.lists import sizes_by_row
from .group import check_sharding


def shard_blocks(tokens: int, ranks: int, block: int) -> Sharding:
    """Contiguous shards whose borders are multiples of `block`, as even as that allows; the last block may be a tail."""
    for name, value, least in (("tokens", tokens, 0), ("ranks", ranks, 1), ("block", block, 1)):
        check_whole(name, value, least)
    blocks = -(-tokens // block)
    ends = [min(tokens, blocks * r // ranks * block) for r in range(ranks + 1)]
    return shard(tokens, ranks, lengths=[b - a for a, b in pairwise(ends)])


def shard_index(index: BlockIndex, sharding: Sharding, rank: int) -> BlockIndex:
    """The rows of a whole index that belong to a rank's queries; KV blocks keep their numbers.

    For lists that every rank has (a fixed pattern, or made again on each); where a rank makes its own rows alone, they are what
    this returns: seq_q of its own queries, seq_k of all keys."""
    check_index(index)
    check_sharding(sharding)
    blocks = blocks_of(sharding, rank, index.block_q, "queries")
    if sharding.total != index.seq_q:
        raise ShapeError(f"index is of {index.seq_q} queries, the sharding of {sharding.total} tokens")
    rows = torch.tensor(blocks, dtype=torch.int64, device=index.device)
    sizes = None if index.query_sizes is None else sizes_by_row(index.query_sizes).index_select(2, rows)
    return BlockIndex(
        index.indices.index_select(2, rows), index.counts.index_select(2, rows), index.block_q, index.block_k,
        sharding.length(rank), index.seq_k, index.block_sizes, sizes, masked=index.masked,
    )  # fmt: skip


def check_index(index: object) -> None:
    """DtypeError unless it is a BlockIndex."""
    if not isinstance(index, BlockIndex):
        raise DtypeError(f"index must be a BlockIndex, got {type(index).__name__}")


def blocks_of(sharding: Sharding, rank: int, block: int, what: str) -> list[int]:
    """The numbers of a rank's blocks, in the order of its tokens."""
    if sharding.sequences != 1:
        raise ShapeError(f"the sharding of {what} has {sharding.sequences} packed sequences, block lists are of one")
    found: list[int] = []
    for start, stop in sharding.spans(rank):
        if start % block or (stop % block and stop != sharding.total):
            raise ShapeError(
                f"rank {rank} has {what} {start} to {stop}, which is no multiple of the blocks of {block}: use shard_blocks"
            )
        found += range(start // block, -(-stop // block))
    return found

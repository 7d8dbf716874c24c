"""Block-sparse attention over sequence shards: each rank gets the K/V blocks that its own lists name, and no others."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..check import FLOATS, bind, check_number, check_whole
from ..errors import DtypeError, ShapeError, Unsupported
from ..ops.call import check_heads, check_kinds
from ..plan.parallel.sharding import Sharding
from ..sparse import BlockIndex
from ..sparse.lists import sizes_by_row
from ..sparse_api import sparse_attention as _local
from .agree import agree
from .blocks import blocks_of, check_index
from .exchange import all_to_all, arrived, gather_flat, guarded, unpack
from .group import Ranks, check_device, check_sharding, ranks_of
from .job import call_facts, specs_of, wanted

_SPECS = specs_of("batch ", FLOATS)

Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Batch entry, KV head and block of each of many blocks."""


@dataclass(frozen=True, eq=False)
class BlockExchange:
    """Which K/V blocks travel for one index, made by `block_exchange`; used again for other tensors under the same lists.

    index: this rank's lists over the blocks that it will hold, own and received, `slots` a KV head.  give, take: for every rank
    the places of what it gets from here, and of what comes from it.  kv_heads: of K and V.  length: this rank's keys."""

    ranks: Ranks
    index: BlockIndex
    give: tuple[Places, ...]
    take: tuple[Places, ...]
    kv_heads: int
    length: int
    slots: int

    def __str__(self) -> str:
        return (
            f"BlockExchange of rank {self.ranks.rank} of {self.ranks.size}: blocks of {self.block} keys, "
            f"{self.blocks_sent} sent, {self.blocks_received} received, {self.slots} held a KV head"
        )

    @property
    def block(self) -> int:
        """Keys of a block."""
        return self.index.block_k

    @property
    def blocks_sent(self) -> int:
        """Blocks of one KV head (of all, where the lists are the same for all) that leave this rank."""
        return sum(places[0].numel() for r, places in enumerate(self.give) if r != self.ranks.rank)

    @property
    def blocks_received(self) -> int:
        """Blocks that come from other ranks, counted in the same way."""
        return sum(places[0].numel() for r, places in enumerate(self.take) if r != self.ranks.rank)

    def bytes_sent(self, k: torch.Tensor, v: torch.Tensor) -> int:
        """Bytes that leave this rank in a forward pass; as many come back as gradients."""
        return self.blocks_sent * self._row(k, v)

    def bytes_received(self, k: torch.Tensor, v: torch.Tensor) -> int:
        """Bytes that come from other ranks in a forward pass."""
        return self.blocks_received * self._row(k, v)

    def _row(self, k: torch.Tensor, v: torch.Tensor) -> int:
        shares = self.index_shares
        rows = k.shape[0] // shares[0] * self.block * (self.kv_heads // shares[1])
        return int(rows * (k.shape[3] + v.shape[3]) * k.element_size())

    @property
    def index_shares(self) -> tuple[int, int]:
        """Batch entries and KV heads with lists of their own."""
        return self.index.indices.shape[0], 1 if self.index.indices.shape[1] == 1 else self.kv_heads


def block_exchange(index: BlockIndex, sharding: Sharding, kv_heads: int, group: Any = None) -> BlockExchange:
    """Tell every rank which of its K/V blocks the others' lists name: a collective, once for lists that are used again.

    index: the lists of this rank's queries (seq_q of its own, seq_k of all tokens, KV blocks numbered over all of them).
    sharding: of the keys, borders at multiples of block_k (`shard_blocks`).  kv_heads: of K and V.
    What travels is one byte a KV block, KV head and batch entry with lists of their own.  The host reads how much each rank
    needs, so it waits for the device; the lists' own values stay there.

    Raises ShapeError, DtypeError, on every rank if the ranks' arguments differ; CommunicationError."""
    ranks = ranks_of(group)
    # the host waits for the counts in any case, so that every call is compared
    with agree(ranks, "block_exchange", getattr(index, "indices", None), always=True) as facts:
        check_index(index)
        check_sharding(sharding, ranks)
        if index.seq_k != sharding.total:
            raise ShapeError(f"index is of {index.seq_k} keys, the sharding of {sharding.total} tokens")
        check_whole("kv_heads", kv_heads, 1)
        if index.heads > 1 and index.heads % kv_heads:
            raise ShapeError(f"index has lists of {index.heads} heads, no multiple of {kv_heads} KV heads")
        blocks = [blocks_of(sharding, r, index.block_k, "keys") for r in range(ranks.size)]
        facts |= {
            "block_k": index.block_k,
            "keys of index": index.seq_k,
            "batch of index": index.indices.shape[0],
            "heads of index": index.indices.shape[1],
            "kv_heads": kv_heads,
            "sharding": sharding,
        }
    need = _needed(index, kv_heads)
    every = torch.empty((ranks.size, *need.shape), dtype=torch.uint8, device=need.device)
    with guarded(ranks.flat, "telling which blocks of keys its lists name"):
        gather_flat(every.view(-1), need.to(torch.uint8).view(-1), group=ranks.flat)
        arrived(need.device, ranks.flat, ranks.timeout)
    own = torch.tensor(blocks[ranks.rank], dtype=torch.int64, device=need.device)
    give = tuple(_places(every[r].index_select(2, own)) for r in range(ranks.size))
    slot = need.cumsum(2) - 1
    slots = max(1, int(need.sum(2).max()) if need.numel() else 0)
    take = []
    for r in range(ranks.size):
        theirs = torch.tensor(blocks[r], dtype=torch.int64, device=need.device)
        b, g, n = _places(need.index_select(2, theirs))
        take.append((b, g, slot[b, g, theirs[n]]))
    local = _compact(index, need, slot, slots)
    return BlockExchange(ranks, local, give, tuple(take), kv_heads, sharding.length(ranks.rank), slots)


def _needed(index: BlockIndex, kv_heads: int) -> torch.Tensor:
    """[batch, KV heads, KV blocks] bool, 1 for what the lists share: the blocks that are named at all."""
    indices, counts = index.indices, index.counts
    shape = torch.broadcast_shapes(indices.shape[:3], counts.shape)
    live = torch.arange(index.capacity, device=index.device) < counts.expand(shape)[..., None]
    named = torch.where(live, indices.expand(*shape, -1), index.kv_blocks).long()  # one past the last: nobody's
    need = torch.zeros((*shape[:2], index.kv_blocks + 1), dtype=torch.bool, device=index.device)
    need.scatter_(2, named.flatten(2), True)
    need = need[..., :-1]
    return need if shape[1] == 1 else need.unflatten(1, (kv_heads, -1)).any(2)


def _places(chosen: torch.Tensor) -> Places:
    b, g, n = chosen.nonzero(as_tuple=True)
    return b, g, n


def _compact(index: BlockIndex, need: torch.Tensor, slot: torch.Tensor, slots: int) -> BlockIndex:
    """The same lists over the blocks that are needed, in ascending order, one row of slots a KV head."""
    shape = torch.broadcast_shapes(index.indices.shape[:3], index.counts.shape)
    group = shape[1] // need.shape[1]
    by_head = slot.repeat_interleave(group, 1)
    safe = index.indices.expand(*shape, -1).clamp(0, max(0, index.kv_blocks - 1)).long().flatten(2)
    indices = by_head.gather(2, safe).clamp(0, slots - 1).to(torch.int32).view(*shape, index.capacity)
    sizes = None
    if index.block_sizes is not None or index.seq_k % index.block_k:
        starts = torch.arange(index.kv_blocks, device=index.device, dtype=torch.int32) * index.block_k
        valid = (index.seq_k - starts).clamp(max=index.block_k)[None, None]
        if index.block_sizes is not None:
            valid = torch.minimum(valid, sizes_by_row(index.block_sizes))
        batch = max(need.shape[0], valid.shape[0])
        heads = max(shape[1], valid.shape[1])
        wide = need.repeat_interleave(group, 1).expand(batch, heads, -1)
        at = torch.where(wide, by_head.expand(batch, heads, -1), slots)
        sizes = torch.zeros((batch, heads, slots + 1), dtype=torch.int32, device=index.device)
        sizes = sizes.scatter_(2, at, valid.expand(batch, heads, -1).to(torch.int32))[..., :-1].contiguous()
    counts = index.counts.expand(shape).contiguous()
    geometry = (index.block_q, index.block_k, index.seq_q, slots * index.block_k)
    return BlockIndex(indices, counts, *geometry, sizes, index.query_sizes, masked=index.masked)


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: BlockIndex,
    sharding: Sharding,
    *,
    group: Any = None,
    exchange: BlockExchange | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """`tilefold.sparse_attention` of tokens that are sharded over ranks: this rank's queries over the KV blocks that their lists
    name, wherever they lie.  A collective, and so is backward.

    Args:
        q: [batch, seq_q, heads, dim] of this rank's tokens; k, v: [batch, seq, kv_heads, dim or dim_v] of its own.
        index: the lists of this rank's queries, KV blocks numbered over all tokens: `shard_index`, or made here.
        sharding: of the keys: borders at multiples of block_k, see `shard_blocks`; shares may differ.
        exchange: from `block_exchange(index, sharding, kv_heads)`, where the same lists are used again (other layers, the next
            steps), on all ranks or on none; index and sharding have to be those it was made from: what they list is not read
            again.  Default: made here, which costs one small all-gather and a wait of the host.
        scale, softcap, return_lse: as of `tilefold.sparse_attention`.  Causal masks and mods are not served: give lists.

    Returns:
        out, like q with dim_v, and lse with return_lse; differentiable in q, k and v, once; the same bits every run.  Forward
        each named block of another rank travels once, backward its gradient, in k's dtype; sums over ranks are in fp32.
        Memory: `exchange.slots` blocks of K and V a KV head.

    Raises:
        As `tilefold.sparse_attention`; ShapeError on every rank if what ranks gave differs; CommunicationError."""
    if torch.compiler.is_compiling():
        raise Unsupported("tilefold.parallel.sparse_attention runs eagerly: call it outside torch.compile")
    ranks = exchange.ranks if isinstance(exchange, BlockExchange) else ranks_of(group)
    with agree(ranks, "sparse_attention", q) as facts:
        sizes = bind(_SPECS, {"q": q, "k": k, "v": v})
        check_device("q", q, ranks.flat)
        _check_call(sizes, index, scale, softcap, return_lse)
        if exchange is not None:
            _fits(sizes, index, exchange)
        facts |= call_facts(sizes, q, wanted(q, k, v)) | {"exchange given": exchange is not None}
    if exchange is None:
        exchange = block_exchange(index, sharding, sizes["kv_heads"], ranks)
        _fits(sizes, index, exchange)
    keys, values = _Fetch.apply(exchange, k, v)  # type: ignore[no-untyped-call]
    return _local(q, keys, values, exchange.index, scale=scale, softcap=softcap, return_lse=return_lse)


def _check_call(sizes: dict[str, int], index: Any, scale: Any, softcap: Any, return_lse: object) -> None:
    """What the local call would refuse, found before anything is exchanged, so that no other rank goes on alone."""
    check_index(index)
    if index.seq_q != sizes["seq_q"]:
        raise ShapeError(f"index is of {index.seq_q} queries, q has {sizes['seq_q']} tokens")
    if index.masked:
        raise Unsupported(
            "index was made from a mask that also cuts inside blocks (BlockIndex.masked), and sparse_attention of several ranks "
            "takes no mask_mod: make it with masked=False if blocks are meant whole"
        )
    check_heads(sizes)
    if scale is not None:
        check_number("scale", scale, above=0.0)
    check_number("softcap", softcap, low=0.0)
    check_kinds(return_lse)


def _fits(sizes: dict[str, int], index: BlockIndex, exchange: BlockExchange) -> None:
    """DtypeError or ShapeError unless the exchange was made for such tensors and lists."""
    if not isinstance(exchange, BlockExchange):
        raise DtypeError(
            f"exchange must be a BlockExchange, made by block_exchange, or None, got {type(exchange).__name__}"
        )
    made = exchange.index
    if (made.block_q, made.block_k, made.seq_q) != (index.block_q, index.block_k, index.seq_q):
        raise ShapeError(
            f"index has {index.seq_q} queries in blocks of {index.block_q} x {index.block_k}, the exchange is of {made.seq_q} in "
            f"blocks of {made.block_q} x {made.block_k}"
        )
    if (sizes["kv_heads"], sizes["seq_k"]) != (exchange.kv_heads, exchange.length):
        raise ShapeError(
            f"k has {sizes['seq_k']} tokens and {sizes['kv_heads']} heads, the exchange is of {exchange.length} and "
            f"{exchange.kv_heads}"
        )
    if exchange.index_shares[0] not in (1, sizes["batch"]):
        raise ShapeError(f"index has lists of a batch of {exchange.index_shares[0]}, q has {sizes['batch']}")


class _Fetch(torch.autograd.Function):
    """[batch, slots * block, kv_heads, dim] of K and V: own blocks and the others'; backward the gradients go home."""

    @staticmethod
    def forward(
        ctx: Any, exchange: BlockExchange, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange, ctx.dims = exchange, (k.shape, v.shape)
        views = [_by_block(_padded(t, exchange.block), exchange) for t in (k, v)]
        rows = _travel(exchange, views, exchange.give, exchange.take, "fetching the blocks of keys that its lists name")
        found = []
        for part, view in zip(rows, views, strict=True):
            whole = part[0].new_zeros((*view.shape[:2], exchange.slots, *view.shape[3:]))
            for places, values in zip(exchange.take, part, strict=True):
                whole[places] = values
            found.append(_by_token(whole))
        return found[0], found[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        exchange = ctx.exchange
        views = [_by_block(t, exchange) for t in (dk, dv)]
        rows = _travel(exchange, views, exchange.take, exchange.give, "returning the gradients of fetched blocks")
        found = []
        for part, shape in zip(rows, ctx.dims, strict=True):
            blocks = -(-shape[1] // exchange.block)
            like = part[0].new_zeros((shape[0], blocks * exchange.block, *shape[2:]), dtype=torch.float32)
            total = _by_block(like, exchange)  # a view: what is added there is added in like
            for places, values in zip(exchange.give, part, strict=True):
                total[places] += values.float()
            found.append(like[:, : shape[1]].to(dk.dtype))
        return None, found[0], found[1]


def _padded(t: torch.Tensor, block: int) -> torch.Tensor:
    missing = -t.shape[1] % block
    return torch.nn.functional.pad(t, (0, 0, 0, 0, 0, missing)) if missing else t


def _by_block(t: torch.Tensor, exchange: BlockExchange) -> torch.Tensor:
    """A view [B, G, blocks, batch / B, block, kv_heads / G, dim], B and G being those with lists of their own."""
    batch, groups = exchange.index_shares
    split: torch.Tensor = t.unflatten(2, (groups, -1)).unflatten(1, (-1, exchange.block)).unflatten(0, (batch, -1))
    return split.permute(0, 4, 2, 1, 3, 5, 6)


def _by_token(t: torch.Tensor) -> torch.Tensor:
    """Back to [batch, tokens, heads, dim]: a copy."""
    b, g, n, c, size, h, d = t.shape
    return t.permute(0, 3, 2, 4, 1, 5, 6).reshape(b * c, n * size, g * h, d)


def _travel(
    exchange: BlockExchange, views: list[torch.Tensor], give: tuple[Places, ...], take: tuple[Places, ...], what: str
) -> list[list[torch.Tensor]]:
    """For each tensor what comes from every rank; one message to each of them, with the blocks of all tensors."""
    parts = (view[places] for places in give for view in views)
    widths = sum(prod(view.shape[3:]) for view in views)
    counts = [places[0].numel() * widths for places in give]
    shapes = [[(places[0].numel(), *view.shape[3:]) for view in views] for places in take]
    sizes = [sum(map(prod, each)) for each in shapes]
    got = all_to_all(parts, counts, sizes, exchange.ranks.flat, what)
    pieces = [unpack(flat, each) for flat, each in zip(got, shapes, strict=True)]
    return [[piece[i] for piece in pieces] for i in range(len(views))]

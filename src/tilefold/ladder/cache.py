"""The paged rung's cache: blocks of keys and values, the table that finds them, and what they cost beside a contiguous cache."""

from dataclasses import dataclass

import torch

from tilefold.check import FLOATS, TensorSpec, bind
from tilefold.errors import ValueRangeError

BLOCK = 16
SPECS = (
    TensorSpec("k", "batch capacity kv_heads dim", FLOATS),
    TensorSpec("v", "batch capacity kv_heads dim", FLOATS, same_dtype_as="k"),
    TensorSpec("lengths", "batch", (torch.int32,), optional=True),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: given out in blocks, filled by keys and values, the difference; and what a contiguous cache would reserve."""

    allocated: int
    used: int
    wasted: int
    contiguous: int


@dataclass(frozen=True)
class PagedCache:
    """k, v [blocks, block size, kv_heads, dim]; table [batch, blocks of a sequence] int32; lengths [batch] int32; capacity: the
    longest that a sequence may become, which a contiguous cache would reserve for each."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    capacity: int

    def memory(self) -> Memory:
        """Of this cache.  Reads the lengths."""
        token = 2 * self.k.shape[2] * self.k.shape[3] * self.k.element_size()
        size, lengths = self.k.shape[1], self.lengths.tolist()
        allocated, used = sum(-(-n // size) for n in lengths) * size * token, sum(lengths) * token
        return Memory(allocated, used, allocated - used, len(lengths) * self.capacity * token)


def paged_cache(
    k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None = None, block: int = BLOCK, seed: int = 0
) -> PagedCache:
    """Copy contiguous k and v [batch, capacity, kv_heads, dim] into blocks of `block` keys, which lie in random order.

    lengths: [batch] int32, keys of each sequence; default: all.  Reads it.  ShapeError, DtypeError, DeviceError,
    LayoutError, ValueRangeError."""
    bind(SPECS, {"k": k, "v": v, "lengths": lengths})
    if type(block) is not int or block < 1:
        raise ValueRangeError(f"block must be an integer of at least 1, got {block!r}")
    batch, capacity, heads, dim = k.shape
    count = [capacity] * batch if lengths is None else lengths.tolist()
    if min(count, default=0) < 0 or max(count, default=0) > capacity:
        raise ValueRangeError(f"lengths must be {batch} numbers from 0 to {capacity}, got {count}")
    needed = [-(-n // block) for n in count]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.zeros(batch, max([1, *needed]), dtype=torch.int32)
    pools = [torch.zeros(max(1, sum(needed)), block, heads, dim, dtype=t.dtype, device=t.device) for t in (k, v)]
    first = 0
    for b, blocks in enumerate(needed):
        mine = order[first : first + blocks]
        table[b, :blocks] = mine
        key = torch.arange(count[b])
        place = mine[key // block].long() * block + key % block
        for pool, t in zip(pools, (k, v), strict=True):
            pool.view(-1, heads, dim)[place.to(t.device)] = t[b, : count[b]]
        first += blocks
    held = torch.tensor(count, dtype=torch.int32, device=k.device)
    return PagedCache(pools[0], pools[1], table.to(k.device), held, capacity)

"""Shared by the tests of the paged cache: what must hold of an allocator at any time, and reading a sequence back."""

from collections import Counter

import torch

from tilefold import quantize_kv
from tilefold.paged import PageAllocator, PagedKVCache


def audit(allocator: PageAllocator) -> None:
    """Every page is free, or owned by exactly as many sequences as its count says; no page is lost, none is there twice."""
    records = [allocator.find(id) for id in allocator.sequences]
    owners = Counter(page for one in records for page in one.pages)
    used = [page for page in owners if page >= 0]
    for page, count in owners.items():
        assert allocator.owners(page) == count, f"page {page}"
    free = [*allocator._returned, *range(allocator._unused, allocator.num_pages)]
    assert len(set(free)) == len(free) == allocator.free
    assert not set(free) & set(used)
    assert len(free) + len(used) == allocator.num_pages
    assert sorted(page for page in owners if page < 0) == sorted(allocator._host_owners)
    for one in records:
        assert len(set(one.pages)) == len(one.pages) == -(-one.length // allocator.page_size)
        assert one.length <= allocator.max_tokens
        if one.state == "swapped":
            assert one.writable == -1
        else:
            assert all(page >= 0 for page in one.pages)
            assert one.length <= one.writable <= len(one.pages) * allocator.page_size
            if one.writable > one.length:
                assert allocator.owners(one.pages[-1]) == 1, "rows of a page with two owners must not be writable"


def snapshot(allocator: PageAllocator) -> object:
    """Everything that a refused call must leave as it was."""
    records = [allocator.find(id) for id in allocator.sequences]
    return (
        [(one.id, tuple(one.pages), one.length, one.writable, one.state, one.moved, len(one.edits)) for one in records],
        tuple(allocator._returned), allocator._unused, tuple(allocator._owners), dict(allocator._host_owners),
        allocator.edited, allocator.moved, allocator.free,
    )  # fmt: skip


def rows_of(cache: PagedKVCache, sequence: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v) [length, kv_heads, dim] of a resident sequence, by its pages."""
    pages = torch.tensor(cache.pages(sequence), dtype=torch.int64, device=cache.device)
    n = cache.length(sequence)
    bits = cache.dtype if cache.dtype.itemsize > 1 else torch.uint8  # not every operator knows e4m3
    k, v = (x[layer].view(bits)[pages].flatten(0, 1)[:n].view(cache.dtype) for x in (cache.k, cache.v))
    return k, v


def coded(cache, layer, k, v):
    """[T, heads, dim] as a cache of 8 bits is to hold them."""
    return [
        quantize_kv(x[None], cache.dtype, scale=scale[layer])[0][0]
        for x, scale in ((k, cache.k_scale), (v, cache.v_scale))
    ]

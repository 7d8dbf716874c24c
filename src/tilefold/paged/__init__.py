"""A KV cache in pages: the allocator of pages, the tensors, batches over them, figures."""

from .allocator import PageAllocator
from .batch import CacheBatch
from .cache import PagedKVCache
from .statistics import CacheStatistics

__all__ = ["CacheBatch", "CacheStatistics", "PageAllocator", "PagedKVCache"]

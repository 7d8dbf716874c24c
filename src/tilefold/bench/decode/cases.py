"""What `tilefold bench decode` measures: one step of generation over a KV cache, as frozen records, and what it has to read."""

import random
from dataclasses import dataclass, replace
from typing import Any

from tilefold.bench.attention.cases import lognormal_lengths
from tilefold.bench.choice import of_size

# Dtype of the cache -> bytes of an element; "" is the queries' own.
CACHES = {"": 0, "fp8": 1, "int8": 1}
QUERY_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Each of len(lengths) sequences attends, with its `queries` newest tokens, all of its keys in the cache, those included.

    page: tokens of a page, 0 for a contiguous cache.  cache: "" (keys and values in the queries' dtype), "fp8" (e4m3) or "int8",
    both with a factor a KV head.  shared: values are the first dim_v columns of the keys (multi-head latent attention)."""

    lengths: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    dim_qk: int = 128
    dim_v: int = 128
    queries: int = 1
    page: int = 0
    cache: str = ""
    dtype: str = "bfloat16"
    shared: bool = False

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def uneven(self) -> bool:
        return min(self.lengths) < self.longest

    @property
    def causal(self) -> bool:
        """One query is the last key's: it sees all of them anyway."""
        return self.queries > 1

    @property
    def name(self) -> str:
        """What `--case` filters and result files keep, such as "b32_n8192_h32k8_d128_page16" or "b32_uneven12345_...": of uneven
        lengths the mean."""
        tokens = f"uneven{sum(self.lengths) // self.batch}" if self.uneven else f"n{self.longest}"
        dims = f"d{self.dim_qk}" + (f"v{self.dim_v}" if self.dim_v != self.dim_qk else "")
        parts = [f"b{self.batch}", tokens, f"h{self.heads}k{self.kv_heads}", dims]
        parts += [f"q{self.queries}"] if self.queries > 1 else []
        parts += ["mla"] if self.shared else []
        parts += [f"page{self.page}"] if self.page else []
        parts += [self.cache] if self.cache else []
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        return "_".join(parts)

    @property
    def plain(self) -> "DecodeCase":
        """The same numbers in a contiguous cache of the queries' dtype."""
        return replace(self, page=0, cache="")

    @property
    def pages(self) -> tuple[int, ...]:
        """How many pages each sequence has."""
        return tuple(-(-n // self.page) if self.page else 0 for n in self.lengths)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the cache."""
        return CACHES[self.cache] or QUERY_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """DRAM bytes that a step has to move: every key and value of the sequences once (shared ones once for both), the queries,
        the outputs, lengths, page numbers and factors."""
        columns = self.dim_qk + (0 if self.shared else self.dim_v)
        keys = sum(self.lengths) * self.kv_heads * columns * self.itemsize
        rows = self.batch * self.queries * self.heads * (self.dim_qk + self.dim_v) * QUERY_BYTES[self.dtype]
        return keys + rows + 4 * (self.batch + sum(self.pages) + (2 * self.kv_heads if self.cache else 0))

    @property
    def flops(self) -> int:
        """2 (dim_qk + dim_v) for each pair of a query head's row and a key that it sees."""
        seen = sum(n - self.queries + 1 + i for n in self.lengths for i in range(self.queries))
        return 2 * (self.dim_qk + self.dim_v) * self.heads * seen


def _uneven_and_balanced(batch: int, longest: int) -> tuple[DecodeCase, DecodeCase]:
    """Lognormal lengths from 1 to `longest`, both among them, in random order, and a batch of one length with as many keys."""
    drawn = sorted(min(n, longest) for n in lognormal_lengths(batch, longest // 10, sigma=1.6))
    lengths = [1, *drawn[1:-1], longest]
    random.Random(5).shuffle(lengths)
    return DecodeCase(tuple(lengths)), DecodeCase((sum(lengths) // batch,) * batch)


ONE, LONG, MANY, SHORT = (DecodeCase((n,) * batch) for batch, n in ((1, 8192), (1, 131072), (32, 8192), (64, 2048)))
UNEVEN = _uneven_and_balanced(32, 131072)
LATENT: dict[str, Any] = {"heads": 16, "kv_heads": 1, "dim_qk": 576, "dim_v": 512, "shared": True}
TINY = DecodeCase((70, 70), 4, 2, 16, 16)
CASES = {
    "full": (
        *(ONE, LONG, MANY, SHORT),
        *(replace(each, page=page) for each in (ONE, MANY, SHORT) for page in (16, 64, 256)),
        replace(LONG, page=16),
        *(replace(each, heads=28, kv_heads=4) for each in (ONE, MANY)),
        *(replace(each, queries=4) for each in (ONE, MANY)),
        replace(MANY, queries=4, page=16),
        *(replace(MANY, cache=cache, page=page) for cache in ("fp8", "int8") for page in (0, 16)),
        replace(ONE, cache="fp8"),
        *(replace(each, **LATENT) for each in (ONE, MANY)),
        replace(MANY, **LATENT, page=64),
        *(replace(each, page=page) for page in (16, 64) for each in UNEVEN),
        *(replace(each, dtype="float16") for each in (ONE, MANY)),
    ),
    "quick": (ONE, SHORT, replace(ONE, page=16), replace(SHORT, page=16), replace(SHORT, queries=4)),
    "tiny": (
        TINY,
        replace(TINY, page=16),
        replace(TINY, heads=7, kv_heads=1),
        replace(TINY, queries=4, page=16),
        replace(TINY, lengths=(5, 90, 33), page=16),
        replace(TINY, cache="fp8"),
        replace(TINY, cache="int8", page=16),
        replace(TINY, kv_heads=1, dim_qk=40, dim_v=32, shared=True),
        replace(TINY, dtype="float16"),
    ),
}


def decode_cases(size: str = "full") -> tuple[DecodeCase, ...]:
    """The cases of a size: "full", "quick" (a minute on a GPU) or "tiny" (without a GPU).  ValueRangeError for another one."""
    return of_size(size, CASES)

"""A call of attention over keys that lie in a cache: its record, its checks, its key."""

from typing import Any, NamedTuple

import torch

from ...check import FLOATS, TensorSpec, bind
from ...errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from ..bound import attribute
from ..call import Call, check_heads, check_integer, check_options, facts_of
from ..checked import checked_places
from ..faults import Watch

__all__ = ["Cache", "cache_values", "cached_key", "cached_shapes", "cached_sizes", "check_longest", "check_room",
           "check_scales", "check_values", "watched_cache"]  # fmt: skip

_INT = (torch.int32,)
QUANTISED = (torch.float8_e4m3fn, torch.int8)  # what a cache may hold with scales


class Cache(NamedTuple):
    """Where the keys of each sequence lie.  Nothing of it is read on the host.

    lengths: [batch] int32: keys of sequence b end at row lengths[b] + more of its cache; None: at the cache's end, or where
        cu_k says.
    pads: [batch] int32: the first pads[b] rows of its cache are no keys.
    batch_index: [batch] int32: whose part of k and v sequence b uses; None: its own.
    block_table: [batch, pages] int32: k and v are [pages, page size, kv heads, dim], and row j of sequence b is row
        j % size of page block_table[b, j // size].
    cu_q, cu_k: [batch + 1] int32: queries, and keys, are packed; the longest are max_q and max_k."""

    lengths: torch.Tensor | None = None
    pads: torch.Tensor | None = None
    batch_index: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    max_q: int = 0
    max_k: int = 0
    more: int = 0
    splits: int = 0


def cache_values(cache: Cache) -> dict[str, Any]:
    """Where keys lie, by the kernels' names, of what a call gives as "cache"."""
    names = {"Lengths": "lengths", "Pads": "pads", "BatchIndex": "batch_index", "Table": "block_table", "CuQ": "cu_q",
             "CuK": "cu_k"}  # fmt: skip
    slots = {name: attribute("cache", field, getattr(cache, field)) for name, field in names.items()}
    return {**slots, "stride_tb": 0 if cache.block_table is None else cache.block_table.stride(0), "more": cache.more}


def _names(cache: Cache) -> dict[str, str]:
    """What the caller calls the arguments: packed keys have other names than a cache's."""
    names = ("k", "v", "seqused_k", "leftpad_k") if cache.cu_k is not None else _CACHE_NAMES
    return dict(zip(("k", "v", "lengths", "pads"), names, strict=True))


_CACHE_NAMES = ("k_cache", "v_cache", "cache_seqlens", "cache_leftpad")


def _indices(names: dict[str, str]) -> tuple[TensorSpec, ...]:
    whole: dict[str, Any] = {"optional": True, "contiguous_last": True}
    each = (names["lengths"], names["pads"], "cache_batch_idx")
    return (
        *(TensorSpec(name, "batch", _INT, **whole) for name in each),
        TensorSpec("block_table", "batch max_pages", _INT, **whole),
        TensorSpec("cu_seqlens_q", "batch+1", _INT, **whole),
        TensorSpec("cu_seqlens_k", "batch+1", _INT, **whole),
        TensorSpec("alibi_slopes", "heads / batch heads", (torch.float32,), optional=True),
        TensorSpec("sinks", "heads", FLOATS, optional=True),
        TensorSpec("dropout_seed", "one", (torch.int64,), optional=True),
    )


def cached_sizes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    cache: Cache,
    quantised: bool = False,
    shared: bool = False,
) -> dict[str, int]:
    """Check everything that needs no device; sizes of all dimensions, "capacity" the most keys of a sequence.

    quantised: K and V may be of QUANTISED instead of q's dtype; shared: V is part of K, whose head dims the plan judges."""
    check_options(call)
    for name, value in (("num_splits", cache.splits), ("max_seqlen_q", cache.max_q), ("max_seqlen_k", cache.max_k)):
        check_integer(name, value)
        if isinstance(value, int) and value < 0:
            raise ValueRangeError(f"{name} must be at least 0, got {value}")
    last: dict[str, Any] = {"same_dtype_as": "q", "contiguous_last": True}
    paged, packed_k = cache.block_table is not None, cache.cu_k is not None and cache.block_table is None
    names = _names(cache)
    stored = (*FLOATS, *QUANTISED) if quantised else FLOATS
    if quantised and isinstance(k, torch.Tensor) and k.dtype in QUANTISED:
        last["same_dtype_as"] = names["k"]
    rows = "pages page_size" if paged else "total_k" if packed_k else "caches seq_k"
    specs = (
        TensorSpec("q", "total_q heads dim_qk" if cache.cu_q is not None else "batch seq_q heads dim_qk", FLOATS,
                   contiguous_last=True),
        TensorSpec(names["k"], f"{rows} kv_heads dim_qk", stored, **last),
        TensorSpec(names["v"], f"{rows} kv_heads dim_v", stored, **last),
    )  # fmt: skip
    sizes = bind(specs, {"q": q, names["k"]: k, names["v"]: v})
    if cache.cu_q is not None:
        if not isinstance(cache.cu_q, torch.Tensor):
            raise DtypeError(f"cu_seqlens_q must be a torch.Tensor or None, got {type(cache.cu_q).__name__}")
        if cache.cu_q.dim() != 1 or cache.cu_q.shape[0] < 1:
            raise ShapeError(f"cu_seqlens_q has shape {tuple(cache.cu_q.shape)}, expected [batch + 1]")
        sizes |= {"batch": cache.cu_q.shape[0] - 1, "seq_q": cache.max_q}
    given = {
        names["lengths"]: cache.lengths, names["pads"]: cache.pads, "cache_batch_idx": cache.batch_index,
        "block_table": cache.block_table, "cu_seqlens_q": cache.cu_q, "cu_seqlens_k": cache.cu_k,
        "alibi_slopes": call.alibi_slopes, "sinks": call.sinks, "dropout_seed": call.dropout_seed,
    }  # fmt: skip
    known = {**sizes, "batch+1": sizes["batch"] + 1, "one": 1}
    found = bind(_indices(names), given, known, beside=("q", q))
    sizes |= {name: size for name, size in found.items() if name == "max_pages"}
    # The plan looks at head dims where V is part of K; that the heads are whole is asked with dims that are.
    check_heads({**sizes, "dim_qk": 1, "dim_v": 1} if shared else sizes, names["k"], names["v"])
    if paged and cache.batch_index is not None:
        raise Unsupported(
            "cache_batch_idx and block_table were both given: the table's rows say which cache a sequence has"
        )
    if paged and sizes["page_size"] < 1:
        raise ShapeError(f"{names['k']} has shape {tuple(k.shape)}: a page must hold at least 1 key")
    if not paged and not packed_k and cache.batch_index is None and sizes["caches"] != sizes["batch"]:
        raise ShapeError(f"{names['k']} has {sizes['caches']} sequences, q has {sizes['batch']}: give cache_batch_idx")
    sizes["capacity"] = (
        sizes["max_pages"] * sizes["page_size"] if paged else cache.max_k if packed_k else sizes["seq_k"]
    )
    bind((_MASK,), {"mask": call.mask}, sizes, beside=("q", q))
    return sizes


_MASK = TensorSpec("mask", "batch|1 heads|1 seq_q|1 capacity", (torch.bool,), optional=True)


def check_longest(q: torch.Tensor, cache: Cache) -> None:
    """max_seqlen_q is given where queries are packed, and only there: without it no row would be computed."""
    if cache.cu_q is None and cache.max_q:
        raise ValueRangeError(f"max_seqlen_q is {cache.max_q}, but there are no cu_seqlens_q")
    if cache.cu_q is not None and q.shape[0] and not cache.max_q:
        raise ValueRangeError("max_seqlen_q must be given with cu_seqlens_q: at least the longest sequence, got 0")


def cached_shapes(sizes: dict[str, int], cache: Cache) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and lse."""
    heads = sizes["heads"]
    if cache.cu_q is not None:
        return (sizes["total_q"], heads, sizes["dim_v"]), (heads, sizes["total_q"])
    return (sizes["batch"], sizes["seq_q"], heads, sizes["dim_v"]), (sizes["batch"], heads, sizes["seq_q"])


def cached_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, cache: Cache) -> Any:
    """Everything that a launch depends on."""
    tensors = (q, k, v, call.alibi_slopes, call.sinks, call.mask, call.dropout_seed, *cache[:6])
    numbers = (call.window, call.causal, call.scale, call.softcap, call.dropout_p, *cache[6:])
    # lists, not generators: every call makes this key
    return tuple([None if t is None else facts_of(t) for t in tensors]), numbers, tuple(map(type, numbers))


def check_scales(scales: tuple[torch.Tensor | None, torch.Tensor | None], used: set[int]) -> None:
    """Factors are positive numbers: those of all heads, or of the pages or caches in `used`; others may belong to nobody."""
    for name, t in (("k_scale", scales[0]), ("v_scale", scales[1])):
        rows = (
            []
            if t is None
            else [("", t.tolist())]
            if t.dim() == 1
            else [(f"{i}, ", t[i].tolist()) for i in sorted(used)]
        )
        for row, values in rows:
            for i, value in enumerate(values):
                if not 0 < value < float("inf"):
                    raise ValueRangeError(f"{name}[{row}{i}] must be a number above 0, got {value}")


def check_values(cache: Cache, sizes: dict[str, int]) -> None:
    """What the index tensors hold: in the interpreter only, where reading costs nothing and wrong ones end the process."""
    if cache.batch_index is not None:
        for b, i in enumerate(cache.batch_index.tolist()):
            if not 0 <= i < sizes["caches"]:
                raise ValueRangeError(f"cache_batch_idx[{b}] is {i}, expected 0 to {sizes['caches'] - 1}")
    if cache.lengths is not None:
        ends = [n + cache.more for n in cache.lengths.tolist()]
    elif cache.cu_k is not None:
        ends = cache.cu_k.diff().tolist()
    else:
        ends = [sizes["capacity"]] * sizes["batch"]
    capacity, page = sizes["capacity"], sizes.get("page_size", 0)
    capacities = [capacity] * len(ends)
    if cache.cu_k is not None and not page:
        capacities = [sizes["total_k"] - first for first in cache.cu_k.tolist()[:-1]]
    for b, (end, room) in enumerate(zip(ends, capacities, strict=True)):
        if not 0 <= end <= room:
            raise ValueRangeError(f"{_names(cache)['lengths']}[{b}] leads to {end} keys, there is room for {room}")
        if cache.block_table is not None:
            for i, number in enumerate(cache.block_table[b, : -(-end // page)].tolist()):
                if not 0 <= number < sizes["pages"]:
                    raise ValueRangeError(f"block_table[{b}, {i}] is {number}, expected 0 to {sizes['pages'] - 1}")
    for b, pad in enumerate([] if cache.pads is None else cache.pads.tolist()):
        if pad < 0:
            raise ValueRangeError(f"{_names(cache)['pads']}[{b}] is {pad}, expected at least 0")


def check_room(sizes: dict[str, int]) -> None:
    """On the device a cache that does not exist counts as cache 0: there has to be one."""
    if sizes["batch"] and sizes.get("caches") == 0:
        raise ShapeError("k_cache has no caches: check='device' needs one, to be read where a number is out of range")


def watched_cache(cache: Cache, sizes: dict[str, int], watch: Watch) -> Cache:
    """The same places without what is out of range, of which the device takes note."""
    total = sizes.get("total_q", 0), sizes.get("total_k", LARGEST)
    limit = sizes["pages"] if cache.block_table is not None else sizes.get("caches", 0)
    places = (cache.cu_q, cache.cu_k, cache.lengths, cache.pads, cache.batch_index, cache.block_table)
    if all(t is None for t in places):
        return cache
    cu_q, cu_k, lengths, batch_index = checked_places(
        places,
        watch,
        total,
        (cache.max_q, cache.max_k),
        sizes["capacity"],
        cache.more,
        limit,
        sizes.get("page_size", 1),
    )
    return cache._replace(lengths=lengths, batch_index=batch_index, cu_q=cu_q, cu_k=cu_k)


LARGEST = (1 << 31) - 1

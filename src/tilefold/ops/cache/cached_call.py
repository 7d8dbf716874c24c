"""A call of attention over keys that lie in a cache: its checks, and its arguments by the kernels' names."""

import functools
from typing import Any

import torch

from ...check import CODED, FLOATS, TensorSpec, bind
from ...errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from ..bound import attribute
from ..call import Call, check_heads, check_integer, check_options
from ..checked import checked_places
from ..faults import Watch
from ..places import check_side
from ..source import UNSCALED, Cache, Scales

_INT = (torch.int32,)


IN_PLACE = Cache()  # keys are k and v, all of them


def cache_of(call: Call) -> Cache:
    """Where the keys of a call lie, as kernels of caches are told; dense and packed keys are caches, too."""
    source = call.source
    if isinstance(source, Cache):
        return source
    packed = call.packed
    return (
        IN_PLACE
        if packed is None
        else Cache(cu_q=packed.cu_q, cu_k=packed.cu_k, max_q=packed.max_q, max_k=packed.max_k)
    )


def cache_values(cache: Cache) -> dict[str, Any]:
    """Where keys lie, by the kernels' names, of a call with this source."""
    names = {"Lengths": "lengths", "Pads": "pads", "BatchIndex": "batch_index", "Table": "block_table", "CuQ": "cu_q",
             "CuK": "cu_k"}  # fmt: skip
    slots = {name: attribute("call", f"source.{field}", getattr(cache, field)) for name, field in names.items()}
    return {**slots, "stride_tb": 0 if cache.block_table is None else cache.block_table.stride(0), "more": cache.more}


def _names(cache: Cache) -> dict[str, str]:
    """What the caller calls the arguments: packed keys have other names than a cache's."""
    names = ("k", "v", "seqused_k", "leftpad_k") if cache.cu_k is not None else _CACHE_NAMES
    return dict(zip(("k", "v", "lengths", "pads"), names, strict=True))


_CACHE_NAMES = ("k_cache", "v_cache", "cache_seqlens", "cache_leftpad")


@functools.cache
def _indices(lengths: str, pads: str) -> tuple[TensorSpec, ...]:
    whole: dict[str, Any] = {"optional": True, "contiguous_last": True}
    each = (lengths, pads, "cache_batch_idx")
    return (
        *(TensorSpec(name, "batch", _INT, **whole) for name in each),
        TensorSpec("block_table", "batch max_pages", _INT, **whole),
        TensorSpec("cu_seqlens_q", "batch+1", _INT, **whole),
        TensorSpec("cu_seqlens_k", "batch+1", _INT, **whole),
        TensorSpec("alibi_slopes", "heads / batch heads", (torch.float32,), optional=True),
        TensorSpec("sinks", "heads", FLOATS, optional=True),
        TensorSpec("dropout_seed", "one", (torch.int64,), optional=True),
    )


@functools.cache
def _specs(
    k: str, v: str, rows: str, packed_q: bool, stored: tuple[torch.dtype, ...], like: str
) -> tuple[TensorSpec, ...]:
    last: dict[str, Any] = {"same_dtype_as": like, "contiguous_last": True}
    return (
        TensorSpec(
            "q", "total_q heads dim_qk" if packed_q else "batch seq_q heads dim_qk", FLOATS, contiguous_last=True
        ),
        TensorSpec(k, f"{rows} kv_heads dim_qk", stored, **last),
        TensorSpec(v, f"{rows} kv_heads dim_v", stored, **last),
    )


def cached_sizes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: Call,
    quantised: bool = False,
    shared: bool = False,
) -> dict[str, int]:
    """Check everything that needs no device; sizes of all dimensions, "capacity" the most keys of a sequence.

    quantised: K and V may be of CODED instead of q's dtype; shared: V is part of K, whose head dims the plan judges."""
    check_options(call)
    cache = cache_of(call)
    for name, value in (("num_splits", cache.splits), ("max_seqlen_q", cache.max_q), ("max_seqlen_k", cache.max_k)):
        check_integer(name, value)
        if isinstance(value, int) and value < 0:
            raise ValueRangeError(f"{name} must be at least 0, got {value}")
    paged, packed_k = cache.block_table is not None, cache.cu_k is not None and cache.block_table is None
    names = _names(cache)
    stored = (*FLOATS, *CODED) if quantised else FLOATS
    bytewise = quantised and isinstance(k, torch.Tensor) and k.dtype in CODED
    rows = "pages page_size" if paged else "total_k" if packed_k else "caches seq_k"
    specs = _specs(names["k"], names["v"], rows, cache.cu_q is not None, stored, names["k"] if bytewise else "q")
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
    found = bind(_indices(names["lengths"], names["pads"]), given, known, beside=("q", q))
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
    if call.mask is not None:
        bind((_MASK,), {"mask": call.mask}, sizes, beside=("q", q))
    return sizes


_MASK = TensorSpec(
    "mask", "batch|1 heads|1 seq_q|1 capacity", (torch.bool,), optional=True, besides="a value of tilefold.masks"
)


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


def check_scales(scales: Scales, used: set[int]) -> None:
    """Factors are positive numbers: those of all heads, or of the pages or caches in `used`; others may belong to nobody."""
    for name, t in (("k_scale", scales.k), ("v_scale", scales.v)):
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


def scale_strides(scales: torch.Tensor | None) -> tuple[int, int]:
    """(over pages or caches, over heads)."""
    if scales is None:
        return 0, 0
    return (scales.stride(0) if scales.dim() == 2 else 0), scales.stride(-1)


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


def check_contents(sizes: dict[str, int], q: torch.Tensor, k: torch.Tensor, call: Call) -> None:
    """Raise ValueRangeError, naming the entry, for lengths, offsets, caches, pages that do not exist, and scales that are not
    positive numbers.  Reads the device."""
    cache: Cache = call.source  # type: ignore[assignment]
    check_values(cache, sizes)
    if cache.cu_q is not None:
        check_side("attention_kvcache", "q", cache.cu_q, q.shape[0], cache.max_q)
    if call.scales is not UNSCALED:
        check_scales(call.scales, _used(cache, sizes))


def _used(cache: Cache, sizes: dict[str, int]) -> set[int]:
    """The pages, or caches, in which a call finds keys."""
    if cache.block_table is None:
        return set(range(sizes["caches"]) if cache.batch_index is None else cache.batch_index.tolist())
    lengths = [sizes["capacity"]] * sizes["batch"] if cache.lengths is None else cache.lengths.tolist()
    rows = zip(cache.block_table.tolist(), lengths, strict=True)
    return {page for row, n in rows for page in row[: -(-max(0, n + cache.more) // sizes["page_size"])]}


def check_room(sizes: dict[str, int]) -> None:
    """On the device a cache that does not exist counts as cache 0: there has to be one."""
    if sizes["batch"] and sizes.get("caches") == 0:
        raise ShapeError("k_cache has no caches: check='device' needs one, to be read where a number is out of range")


def watched_call(call: Call, sizes: dict[str, int], watch: Watch) -> Call:
    """The same call without what is out of range in its places, of which the device takes note."""
    cache = cache_of(call)
    total = sizes.get("total_q", 0), sizes.get("total_k", LARGEST)
    limit = sizes["pages"] if cache.block_table is not None else sizes.get("caches", 0)
    places = (cache.cu_q, cache.cu_k, cache.lengths, cache.pads, cache.batch_index, cache.block_table)
    if all(t is None for t in places):
        return call
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
    return call._replace(source=cache._replace(lengths=lengths, batch_index=batch_index, cu_q=cu_q, cu_k=cu_k))


LARGEST = (1 << 31) - 1

"""Appending new keys and values to a KV cache in place: check, launch; and the operator for torch's dispatcher."""

import inspect
from typing import Any, NamedTuple

import torch

from ...cache_formats import listed
from ...check import CODED, FLOATS, TensorSpec, bind, check_own_rows
from ...errors import DtypeError, ShapeError, Unsupported, ValueRangeError
from ..bound import Bound, Example, Launched, meta, strides_named
from ..call import check_integer
from ..checked import checked_places
from ..dense.attention_parts import sequence_strides
from ..device import device_of, interpreting, on_host
from ..faults import WORDS, Watch, note_of, require_kernels
from ..places import check_side
from ..records import recorded
from ..serve import function_at
from ..source import Scales, facts_of_values
from ..watch import is_watched
from .cached_call import check_scales, scale_strides
from .rotary import ELEMENTS, angles_of

LARGEST_DIM = 1024  # rows are copied whole, whatever the attention kernels take
BLOCK_SEQUENCES = 256  # offsets of sequences that one step of the search looks at
_INT = (torch.int32,)


class Append(NamedTuple):
    """The tensors and options of one call, in the operator's order; see `cache_append`."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    batch_index: torch.Tensor | None
    block_table: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    interleaved: bool
    cu: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q: torch.Tensor | None = None
    max_seqlen: int = 0
    operation: int = 0  # of a `Watch`, 0 without check="device"


GIVEN = ("K", "V", "Q", "KCache", "VCache", "QOut", "Cos", "Sin", "Cu", "Lengths", "BatchIndex", "Table", "KScale", "VScale",
         "Fault")  # fmt: skip
"""What a call gives to the kernel."""


def cache_append(call: Append, check: bool | Watch = False) -> torch.Tensor | None:
    """See `tilefold.kvcache_append`; returns the turned q, None without q.  No gradients: tensors are taken as detached."""
    for name, t in (("k", call.k), ("v", call.v), ("q", call.q)):
        if isinstance(t, torch.Tensor) and t.requires_grad:
            call = call._replace(**{name: t.detach()})  # type: ignore[arg-type]
    if isinstance(check, Watch):
        call = call._replace(operation=check.operation)
    traced = torch.compiler.is_compiling() or is_watched(call)
    turned: torch.Tensor = cache_append_op(*call) if traced else _launch(call, check is True)
    return None if call.q is None else turned


def _launch(call: Append, check: bool = False) -> torch.Tensor:
    p, q = _prepare(call), call.q
    turned = call.k.new_empty(0) if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if p.bound is not None:
        if check or (on_host(call.k_cache) and not call.operation):
            _check_values(p.shape, call, check)
        fault = note_of(call.k_cache.device) if call.operation else None
        call = _within(call, p.shape)
        p.bound(_given(call, None if q is None else turned, fault, p.more))
    return turned


def _given(call: Append, out: torch.Tensor | None, fault: torch.Tensor | None, native: bool) -> tuple[Any, ...]:
    """As GIVEN names it; native: the device itself converts to e4m3."""
    k_cache, v_cache = (
        t if native or t.dtype != torch.float8_e4m3fn else t.view(torch.uint8) for t in (call.k_cache, call.v_cache)
    )
    return (call.k, call.v, call.q, k_cache, v_cache, out, call.cos, call.sin, call.cu, call.lengths, call.batch_index,
            call.block_table, call.k_scale, call.v_scale, fault)  # fmt: skip


def _within(call: Append, n: dict[str, int]) -> Append:
    """With check="device": the call with offsets in range; the kernel takes note of the rest."""
    if not call.operation or call.cu is None:
        return call
    longest = call.max_seqlen or (1 << 31) - 1
    places = (call.cu, None, None, None, None, None)
    cu, _, _, _ = checked_places(places, Watch(call.operation), (n["tokens"], 0), (longest, 0))
    return call._replace(cu=cu)


def _check_values(n: dict[str, int], call: Append, asked: bool) -> None:
    """Where reading costs nothing, or where it is asked for: then a short rotary table is refused, too."""
    new = [n["seq_new"]] * n["batch"]
    if call.cu is not None:
        new = call.cu.diff().tolist()
        check_side("kvcache_append", "q", call.cu, n["tokens"], None)
        if call.max_seqlen and max(new, default=0) > call.max_seqlen:
            raise ValueRangeError(
                f"max_seqlen is {call.max_seqlen}, but cu_seqlens has a sequence of {max(new)} tokens"
            )
    lengths = call.lengths.tolist()
    for b, (length, more) in enumerate(zip(lengths, new, strict=True)):
        if not 0 <= length <= n["capacity"] - more:
            raise ValueRangeError(
                f"cache_seqlens[{b}] is {length}: {more} more tokens do not fit into {n['capacity']} rows"
            )
        if asked and call.cos is not None and more and length + more > n["positions"]:
            raise ValueRangeError(
                f"rotary_cos has {n['positions']} positions, cache_seqlens[{b}] = {length} and {more} more need {length + more}"
            )
        if call.block_table is not None and more:
            first, last = length // n["page"], (length + more - 1) // n["page"]
            for i, page in enumerate(call.block_table[b, first : last + 1].tolist(), first):
                if not 0 <= page < n["caches"]:
                    raise ValueRangeError(f"block_table[{b}, {i}] is {page}, expected 0 to {n['caches'] - 1}")
    for b, i in enumerate([] if call.batch_index is None else call.batch_index.tolist()):
        if not 0 <= i < n["caches"]:
            raise ValueRangeError(f"cache_batch_idx[{b}] is {i}, expected 0 to {n['caches'] - 1}")
    check_scales(Scales(None, call.k_scale, call.v_scale), _written(n, call, lengths, new))


def _written(n: dict[str, int], call: Append, lengths: list[int], new: list[int]) -> set[int]:
    """The pages, or caches, that get rows."""
    if call.block_table is None:
        own = range(n["batch"]) if call.batch_index is None else call.batch_index.tolist()
        return {i for i, more in zip(own, new, strict=True) if more}
    rows = zip(call.block_table.tolist(), lengths, new, strict=True)
    return {page for row, at, more in rows if more for page in row[at // n["page"] : (at + more - 1) // n["page"] + 1]}


# ---------------------------------------------------------------- the checks


def _specs(call: Append) -> tuple[TensorSpec, ...]:
    """Everything but the tables of angles.  Float caches have the dtype of k, coded ones any source's."""
    coded = isinstance(call.k_cache, torch.Tensor) and call.k_cache.dtype in CODED
    last: dict[str, Any] = {"contiguous_last": True}
    new = "tokens" if call.cu is not None else "batch seq_new"
    batch = "sequences" if call.cu is not None else "batch"
    source: dict[str, Any] = {} if coded else {"same_dtype_as": "k_cache"}
    return (
        TensorSpec("k_cache", "caches capacity kv_heads dim_qk", (*FLOATS, *CODED), **last),
        TensorSpec("v_cache", "caches capacity kv_heads dim_v", (*FLOATS, *CODED), same_dtype_as="k_cache", **last),
        TensorSpec("k", f"{new} kv_heads dim_qk", FLOATS, **source, **last),
        TensorSpec("v", f"{new} kv_heads dim_v", FLOATS, same_dtype_as="k", **last),
        TensorSpec("cache_seqlens", batch, _INT, **last),
        TensorSpec("cu_seqlens", "sequences+1", _INT, optional=True, **last),
        TensorSpec("cache_batch_idx", batch, _INT, optional=True, **last),
        TensorSpec("block_table", f"{batch} max_pages", _INT, optional=True, **last),
        TensorSpec("k_scale", "kv_heads / caches kv_heads", (torch.float32,), optional=True),
        TensorSpec("v_scale", "kv_heads / caches kv_heads", (torch.float32,), optional=True),
        TensorSpec("q", f"{new} heads dim_qk", FLOATS, same_dtype_as="k", optional=True, **last),
    )


def _sizes(call: Append) -> dict[str, int]:
    """Everything that is wrong with a call; its sizes, "capacity" that of a sequence, "page" 0 without pages."""
    if not isinstance(call.interleaved, bool):
        raise DtypeError(f"interleaved must be a bool, got {call.interleaved!r}")
    check_integer("max_seqlen", call.max_seqlen)
    if isinstance(call.max_seqlen, int) and call.max_seqlen < 0:
        raise ValueRangeError(f"max_seqlen must be at least 0, got {call.max_seqlen}")
    names = {"lengths": "cache_seqlens", "batch_index": "cache_batch_idx", "cu": "cu_seqlens"}
    n = bind(_specs(call), {names.get(name, name): value for name, value in call._asdict().items()})
    _check_factors(call)
    check_own_rows("k_cache", call.k_cache)
    check_own_rows("v_cache", call.v_cache)
    if not (1 <= n["dim_qk"] <= LARGEST_DIM and 1 <= n["dim_v"] <= LARGEST_DIM):
        raise Unsupported(f"k and v have head dims {n['dim_qk']} and {n['dim_v']}; accepted: 1 to {LARGEST_DIM}")
    if call.cu is not None:
        if n["sequences+1"] != n["sequences"] + 1:
            raise ShapeError(
                f"cu_seqlens has {n['sequences+1']} offsets, cache_seqlens {n['sequences']} sequences: expected [batch + 1] and "
                f"[batch]"
            )
        n |= {"batch": n["sequences"], "seq_new": call.max_seqlen}
    else:
        n["tokens"] = n["batch"] * n["seq_new"]
        if call.max_seqlen:
            raise ValueRangeError(f"max_seqlen is {call.max_seqlen}, but there are no cu_seqlens")
    n["page"] = 0
    if call.block_table is not None:
        if n["capacity"] < 1:
            raise ShapeError(f"k_cache has shape {tuple(call.k_cache.shape)}: a page must hold at least 1 key")
        n |= {"page": n["capacity"], "capacity": n["capacity"] * n["max_pages"]}
        if call.batch_index is not None:
            raise Unsupported(
                "cache_batch_idx and block_table were both given: the table's rows say which cache a sequence has"
            )
    if n["seq_new"] > n["capacity"]:
        given = "k has" if call.cu is None else "max_seqlen is"
        raise ShapeError(f"{given} {n['seq_new']} new tokens, the cache has room for {n['capacity']}")
    return n | _angles(call, n)


def _check_factors(call: Append) -> None:
    """They are there where the cache holds bytes, and only there."""
    held = str(call.k_cache.dtype).removeprefix("torch.")
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if scale is None and call.k_cache.dtype in CODED:
            raise ValueRangeError(f"{name} must be given with a cache of {held}: what is stored is divided by it")
        if scale is not None and call.k_cache.dtype not in CODED:
            raise DtypeError(
                f"{name} was given, but k_cache and v_cache hold {held}: factors belong to {listed('and')}"
            )


def _angles(call: Append, n: dict[str, int]) -> dict[str, int]:
    if (call.cos is None) != (call.sin is None):
        raise ValueRangeError("rotary_cos and rotary_sin come together")
    if call.cos is None or call.sin is None:
        if call.q is not None:
            raise ValueRangeError("q was given without rotary_cos and rotary_sin: there is nothing to do with it")
        return {"positions": 0, "pairs": 0}
    positions, pairs = angles_of(
        call.cos, call.sin, n["dim_qk"], ("k_cache", call.k_cache), ("rotary_cos", "rotary_sin")
    )
    return {"positions": positions, "pairs": pairs}


# ---------------------------------------------------------------- the first time


def _code(k_cache: torch.Tensor, native: bool) -> int:
    """How the kernel is to encode: a constant of `device.encode`."""
    from ...device import encode

    found = CODED.get(k_cache.dtype)
    return int(getattr(encode, "PLAIN" if found is None else found.written[not native]).value)


@recorded("cache_append", lambda call: facts_of_values(*call))
def _prepare(call: Append) -> Launched:
    """What follows from a call's key: sizes, the launch, and whether the device itself converts to e4m3."""
    n = _sizes(call)
    if call.operation:
        require_kernels(call.k_cache.device)
    if (own := function_at("kvcache_append", call.k_cache.device, call.interleaved)) is not None:
        return Launched(n, own, True)
    if call.k_cache.device.type == "meta":
        return _bind(call, n, True, 132)
    device = device_of(call.k_cache.device)
    return _bind(call, n, device.has("e4m3"), device.sms)


def _bind(call: Append, n: dict[str, int], native: bool, sms: int) -> Launched:
    """Grid, scalars and constants."""
    from ...kernels.cache.cache_append import cache_append as kernel

    heads = 0 if call.q is None else n["heads"]
    most = n["tokens"] * max(n["kv_heads"], heads)
    if n["batch"] == 0 or most == 0:
        return Launched(n, None, native)
    if most >= 1 << 30:
        raise Unsupported(
            f"k has {n['tokens']} tokens of {max(n['kv_heads'], heads)} heads: {most} rows, accepted: below 2^30"
        )
    width = 1 << (max(n["dim_qk"], n["dim_v"]) - 1).bit_length()
    rest = n["dim_qk"] - 2 * n["pairs"]
    rows = max(1, ELEMENTS // width)
    while rows > 1 and most < rows * sms:  # few tokens: over all SMs, a warp each
        rows //= 2
    constants = {
        "INTERLEAVED": call.interleaved,
        "CODE": _code(call.k_cache, native),
        "EMULATE": interpreting() and call.k.dtype == torch.bfloat16,
        "PAGE": n["page"],
        "DIM_QK": n["dim_qk"],
        "DIM_V": n["dim_v"],
        "PAIRS": n["pairs"],
        "BLOCK_M": rows,
        "BLOCK_B": min(BLOCK_SEQUENCES, 1 << (n["batch"] - 1).bit_length()),
        "BLOCK_P": 1 << max(0, n["pairs"] - 1).bit_length(),
        "BLOCK_QK": 1 << max(0, rest - 1).bit_length(),
        "BLOCK_V": 1 << (n["dim_v"] - 1).bit_length(),
    }
    own = -(-n["tokens"] * n["kv_heads"] // rows)
    programs = own + -(-n["tokens"] * heads // rows)
    if call.operation:
        programs += -(-n["tokens"] // rows)  # they look at the tensors that say where rows lie
    warps = max(1, min(4, rows * width // (ELEMENTS // 4)))
    values = _values(call, n, heads, own)
    return Launched(n, Bound.of(kernel, programs, GIVEN, values, constants, call.k.device, num_warps=warps), native)


def _values(call: Append, n: dict[str, int], heads: int, own: int) -> dict[str, Any]:
    """What all calls of a key share, by the kernel's names."""

    def rows(t: torch.Tensor | None) -> tuple[int, ...]:
        return (0, 0, 0) if t is None else sequence_strides(t, "bshd")

    table, cos, sin = call.block_table, call.cos, call.sin
    return {
        **n,
        "seq_new": max(1, n["seq_new"]),
        "pages": n["caches"],
        "seq_table": n["positions"],
        "heads": max(1, heads),
        "kv_programs": own,
        "operation": call.operation,
        "columns": 0 if table is None or not call.operation else table.shape[1],
        "stride_tb": 0 if table is None else table.stride(0),
        **strides_named("k", rows(call.k), "bmh"),
        **strides_named("v", rows(call.v), "bmh"),
        **strides_named("q", rows(call.q), "bmh"),
        "stride_om": heads * n["dim_qk"],
        "stride_oh": n["dim_qk"],
        **strides_named("x", call.k_cache.stride()[:3], "bnh"),
        **strides_named("y", call.v_cache.stride()[:3], "bnh"),
        "stride_c": 0 if cos is None else cos.stride(0),
        "stride_s": 0 if sin is None else sin.stride(0),
        **strides_named("k", scale_strides(call.k_scale), "pg"),
        **strides_named("v", scale_strides(call.v_scale), "pg"),
    }


# ---------------------------------------------------------------- the dispatcher


def _appended(*fields: Any) -> torch.Tensor:
    """`cache_append` for those who trace or watch, by the fields of `Append`; an empty tensor without q."""
    return _launch(Append(*fields))


def _fake(*fields: Any) -> torch.Tensor:
    call = Append(*fields)
    _sizes(call)
    return call.k.new_empty(0 if call.q is None else call.q.shape)


_ANY = inspect.Parameter.POSITIONAL_OR_KEYWORD
_appended.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            name, _ANY, annotation=kind, default=Append._field_defaults.get(name, inspect.Parameter.empty)
        )
        for name, kind in Append.__annotations__.items()
    ],
    return_annotation=torch.Tensor,
)
cache_append_op = torch.library.custom_op("tilefold::cache_append", _appended, mutates_args=("k_cache", "v_cache"))
cache_append_op.register_fake(_fake)


def example_launch(
    dtype: str, dim: int, page: int, pairs: int, cache: str = "", packed: bool = False, heads: int = 0, tokens: int = 64,
    native: bool = True, interleaved: bool = True, watched: bool = False,
) -> Example:  # fmt: skip
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time.

    cache: dtype of the caches, "" for that of the source; heads: of q, 0 for none; native: the device converts to e4m3;
    interleaved: a pair is of neighbours, else of both halves."""
    kind, held = getattr(torch, dtype), getattr(torch, cache or dtype)
    caches = meta(64, page or 4096, 2, dim, dtype=held)
    new = meta(*((tokens, 2, dim) if packed else (64, tokens // 64, 2, dim)), dtype=kind)
    q = meta(*new.shape[:-2], heads, dim, dtype=kind) if heads else None
    index = meta(64, dtype=torch.int32)
    cu = meta(65, dtype=torch.int32) if packed else None
    table = meta(64, 16, dtype=torch.int32) if page else None
    cos = meta(8192, pairs, dtype=kind) if pairs else None
    scale = meta(64, 2) if cache else None
    call = Append(caches, caches, new, new, index, None, table, cos, cos, interleaved, cu, scale, scale, q,
                  operation=3 if watched else 0)  # fmt: skip
    p = _bind(call, _sizes(call), native, 132)
    assert p.bound is not None
    fault = meta(WORDS, dtype=torch.int64) if watched else None
    return p.bound.example(_given(call, q, fault, native))

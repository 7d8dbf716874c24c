"""Appending new keys and values to a KV cache in place: check, launch; and the operator for torch's dispatcher."""

from typing import Any

import torch

from ..check import FLOATS, TensorSpec, bind, check_own_rows
from ..errors import ShapeError, Unsupported, ValueRangeError
from .call import MAX_HEAD_DIM, facts_of
from .device import device_of, interpreting
from .records import remember
from .rotary import ELEMENTS, angles_of
from .watch import is_watched

__all__ = ["cache_append", "example_launch"]

_CACHE: dict[Any, Any] = {}


def cache_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    batch_index: torch.Tensor | None,
    block_table: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """Write k and v, row i of sequence b, into row lengths[b] + i of the caches, k turned by the table's angles of that row.

    k_cache, v_cache: [caches, capacity, kv_heads, dim], or [pages, page size, kv_heads, dim] with block_table [batch, pages]
    int32.  k, v: [batch, seq, kv_heads, dim].  lengths, batch_index: [batch] int32, not read on the host.  cos, sin: [positions,
    pairs] or None.  Rows past the capacity are not written.  No gradients: tensors are taken as detached."""
    args = k_cache, v_cache, k.detach(), v.detach(), lengths, batch_index, block_table, cos, sin, interleaved
    if torch.compiler.is_compiling() or is_watched(args):
        cache_append_op(*args)
    else:
        _launch(*args)


def _launch(*args: Any) -> None:
    tensors, interleaved = args[:9], args[9]
    key = (*(facts_of(t) if isinstance(t, torch.Tensor) else type(t) for t in tensors), interleaved)
    found = _CACHE.get(key)
    if found is None:
        found = remember(_CACHE, key, _prepare(*args))
    launch, scalars = found
    if launch is not None:
        k_cache, v_cache, k, v, lengths, batch_index, block_table, cos, sin = tensors
        if interpreting():
            _check_values(scalars, lengths, batch_index, k_cache.shape[0])
        launch((k, v, k_cache, v_cache, cos, sin, lengths, batch_index, block_table, *scalars))


def _check_values(
    scalars: tuple[int, ...], lengths: torch.Tensor, batch_index: torch.Tensor | None, caches: int
) -> None:
    """Only in the interpreter, where reading costs nothing."""
    new, capacity = scalars[:2]
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= capacity - new:
            raise ValueRangeError(f"cache_seqlens[{b}] is {length}: {new} more tokens do not fit into {capacity} rows")
    for b, i in enumerate([] if batch_index is None else batch_index.tolist()):
        if not 0 <= i < caches:
            raise ValueRangeError(f"cache_batch_idx[{b}] is {i}, expected 0 to {caches - 1}")


def _sizes(*args: Any) -> dict[str, int]:
    """Everything that is wrong with the tensors; the sizes of their dimensions."""
    k_cache, v_cache, k, v, lengths, batch_index, block_table, cos, sin, _ = args
    last = {"same_dtype_as": "k_cache", "contiguous_last": True}
    specs = (
        TensorSpec("k_cache", "caches capacity kv_heads dim_qk", FLOATS, contiguous_last=True),
        TensorSpec("v_cache", "caches capacity kv_heads dim_v", FLOATS, **last),  # type: ignore[arg-type]
        TensorSpec("k", "batch seq_new kv_heads dim_qk", FLOATS, **last),  # type: ignore[arg-type]
        TensorSpec("v", "batch seq_new kv_heads dim_v", FLOATS, **last),  # type: ignore[arg-type]
        TensorSpec("cache_seqlens", "batch", (torch.int32,), contiguous_last=True),
        TensorSpec("cache_batch_idx", "batch", (torch.int32,), optional=True, contiguous_last=True),
        TensorSpec("block_table", "batch max_pages", (torch.int32,), optional=True, contiguous_last=True),
    )
    named = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": lengths,
             "cache_batch_idx": batch_index, "block_table": block_table}  # fmt: skip
    sizes = bind(specs, named)
    check_own_rows("k_cache", k_cache)
    check_own_rows("v_cache", v_cache)
    if max(sizes["dim_qk"], sizes["dim_v"]) > MAX_HEAD_DIM:
        raise Unsupported(
            f"k and v have head dims {sizes['dim_qk']} and {sizes['dim_v']}; accepted: 1 to {MAX_HEAD_DIM}"
        )
    sizes["page"] = 0
    if block_table is not None:
        sizes |= {"page": sizes["capacity"], "capacity": sizes["capacity"] * sizes["max_pages"]}
    if sizes["seq_new"] > sizes["capacity"]:
        raise ShapeError(f"k has {sizes['seq_new']} new tokens, the cache has room for {sizes['capacity']}")
    if (cos is None) != (sin is None):
        raise ValueRangeError("rotary_cos and rotary_sin come together")
    sizes |= {"positions": 0, "pairs": 0}
    if cos is not None:
        sizes["positions"], sizes["pairs"] = angles_of(cos, sin, sizes["dim_qk"], {}, ("k_cache", k_cache))
    return sizes


def _prepare(*args: Any) -> tuple[Any, tuple[int, ...]]:
    from ..kernels.cache_append import cache_append as kernel
    from .launch import Launch

    k_cache, v_cache, k, v, _, _, block_table, cos, sin, interleaved = args
    n = _sizes(*args)
    if k_cache.device.type != "meta":
        device_of(k_cache.device)
    if 0 in (n["batch"], n["seq_new"], n["kv_heads"]):
        return None, ()
    width = 1 << (max(n["dim_qk"], n["dim_v"]) - 1).bit_length()
    rest = n["dim_qk"] - 2 * n["pairs"]
    rows = max(1, min(1 << (n["seq_new"] - 1).bit_length(), ELEMENTS // width))
    constants = {
        "INTERLEAVED": interleaved,
        "EMULATE": interpreting() and k.dtype == torch.bfloat16,
        "PAGE": n["page"],
        "DIM_QK": n["dim_qk"],
        "DIM_V": n["dim_v"],
        "PAIRS": n["pairs"],
        "BLOCK_M": rows,
        "BLOCK_P": 1 << max(0, n["pairs"] - 1).bit_length(),
        "BLOCK_QK": 1 << max(0, rest - 1).bit_length(),
        "BLOCK_V": 1 << (n["dim_v"] - 1).bit_length(),
    }
    programs = -(-n["seq_new"] // rows) * n["kv_heads"] * n["batch"]
    scalars = (
        n["seq_new"], n["capacity"], n["positions"], n["kv_heads"], 0 if block_table is None else block_table.stride(0),
        *k.stride()[:3], *v.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
        0 if cos is None else cos.stride(0), 0 if sin is None else sin.stride(0),
    )  # fmt: skip
    return Launch(kernel, (programs, 1, 1), constants, {"num_warps": 4}, k.device.index or 0), scalars


@torch.library.custom_op("tilefold::cache_append", mutates_args=("k_cache", "v_cache"))
def cache_append_op(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    batch_index: torch.Tensor | None,
    block_table: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """`cache_append` for those who trace or watch."""
    _launch(k_cache, v_cache, k, v, lengths, batch_index, block_table, cos, sin, interleaved)


@cache_append_op.register_fake
def _(k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor,
      batch_index: torch.Tensor | None, block_table: torch.Tensor | None, cos: torch.Tensor | None,
      sin: torch.Tensor | None, interleaved: bool) -> None:  # fmt: skip
    _sizes(k_cache, v_cache, k, v, lengths, batch_index, block_table, cos, sin, interleaved)


def example_launch(dtype: str, dim: int, page: int, pairs: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time."""
    kind = getattr(torch, dtype)
    cache = torch.empty((64, page or 4096, 2, dim), dtype=kind, device="meta")
    new = torch.empty((64, 1, 2, dim), dtype=kind, device="meta")
    index = torch.empty(64, dtype=torch.int32, device="meta")
    table = torch.empty((64, 16), dtype=torch.int32, device="meta") if page else None
    cos = torch.empty((8192, pairs), dtype=kind, device="meta") if pairs else None
    launch, scalars = _prepare(cache, cache, new, new, index, None, table, cos, cos, True)
    return launch.fn, (new, new, cache, cache, cos, cos, index, None, table, *scalars), launch.keywords

"""Forward attention over a KV cache: check, plan, allocate, launch, merge; and the operator for torch's dispatcher."""

import math
from typing import Any

import torch

from ...errors import Unsupported
from ..bound import Bound, Example, Prepared, meta, run, strides_named
from ..call import Call, check_options, scale_of, window_of
from ..dense.attention_parts import GIVEN, kind_of, option_values, problem_of, sequence_strides, shared_values
from ..dense.split import Both, Split, bind_merge
from ..device import device_of, interpreting, on_host
from ..faults import Watch, require_kernels
from ..operator import Operation
from ..places import check_side
from ..records import recorded
from ..serve import function_at, plan_at
from ..source import Cache, key_of
from ..watch import is_transformed, is_watched, refuse_derivatives
from .cached_call import (
    cache_of,
    cache_values,
    cached_shapes,
    cached_sizes,
    check_room,
    check_values,
    watched_call,
)

BLOCK_SPLITS = 32  # partials that one step of the merge takes in
LEAST_ROWS = 16  # of a tile of the decode kernel


def attention_cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, check: bool | Watch = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of attention over keys in a cache; forward only: its backward pass raises Unsupported.

    q: [batch, seq_q, heads, dim], or [total_q, heads, dim] with cu_q; k, v and the rest: see `Cache`, the call's source.  Also of
    the call: causal, window, scale, softcap, alibi_slopes, sinks, dropout.  Results, masks and errors are those of `attention`,
    of each sequence with the keys that the cache says it has.  check: of index tensors, on the host or on the device."""
    tensors = (q, k, v, call.alibi_slopes, call.sinks)
    keys = ("k", "v") if cache_of(call).cu_k is not None else ("k_cache", "v_cache")
    refuse_derivatives(("q", *keys, "alibi_slopes", "sinks"), tensors, "attention over a KV cache")
    return ATTENTION_CACHED(q, k, v, call, check)  # type: ignore[no-any-return]


def check_cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, check: bool | Watch = False) -> None:
    """Raise what `attention_cached` would, for callers that write into the cache before they call it.

    What is being traced is left to the operator, which checks before anything runs."""
    if (
        torch.compiler.is_compiling()
        or is_transformed()
        or is_watched((q, k, v, call.alibi_slopes, call.sinks, *call.placement))
    ):
        return
    p = _prepare(q, k, v, call, check)
    if p.look is not None and p.bound is not None:
        p.look(p.sizes, q, k, call)


def _look(sizes: dict[str, int], q: torch.Tensor, k: torch.Tensor, call: Call) -> None:
    """What index tensors hold: on request, and in the interpreter, where reading costs nothing."""
    cache = cache_of(call)
    check_values(cache, sizes)
    name = "flash_attn_varlen_func"  # the public functions here have cu_seqlens_q alone, or the same names
    if cache.cu_q is not None:
        check_side(name, "q", cache.cu_q, q.shape[0], cache.max_q)
    if cache.cu_k is not None and cache.block_table is None:
        check_side(name, "k", cache.cu_k, k.shape[0], cache.max_k if cache.lengths is None else None)


def _replacing(
    p: Prepared, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, watch: Watch
) -> tuple[torch.Tensor, torch.Tensor]:
    """`run` where what is out of range is noted and replaced before the kernel."""
    check_room(p.sizes)
    call = watched_call(call, p.sizes, watch)
    return run(_prepare(q, k, v, call, None), q, k, v, call)


# ---------------------------------------------------------------- the first time


@recorded("attention_cached", key_of)
def _prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, check: bool | Watch | None) -> Prepared:
    """The record of this call's shapes and options, which checks everything; check: of `attention_cached`, None for none."""
    sizes, cache = cached_sizes(q, k, v, call), cache_of(call)
    shapes = cached_shapes(sizes, cache)
    if isinstance(check, Watch):
        require_kernels(q.device)
    device = device_of(q.device, "attention_cached")
    if 0 in (*shapes[1], sizes["batch"], sizes["seq_q"]):
        return Prepared(None, *shapes, sizes=sizes)
    bound = bind_cached(q, k, v, call, sizes, device)
    look = _look if check is True or (check is False and on_host(q)) else None
    ways = _replacing if isinstance(check, Watch) else run
    return Prepared(None, *shapes, bound, look=look, sizes=sizes, run=ways)


def bind_cached(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sizes: dict[str, int], device: Any
) -> Any:
    """What the results of a checked call are made by."""
    from ...plan.cache.cached import plan_cached

    cache = cache_of(call)
    window = window_of(call.window, call.causal)
    problem = problem_of(q, k, v, call, {**sizes, "seq_k": sizes["capacity"]}, window)
    if (own := plan_at("attention_cached", problem, device, call)) is not None:
        return function_at("attention_cached", q.device, own)
    if (decode := _decoder(q, k, v, call, sizes, device)) is not None:
        return decode
    tile, splits = plan_cached(problem, device, cache.splits)
    few = few_queries(sizes)
    short = _decoder(q, k, v, call, {**sizes, "seq_q": few}, device) if _may_mix(call, cache, sizes) else None
    made = _bind(q, k, v, call, sizes, tile, splits, 0 if short is None else few + 1)
    # the short ones last: a merge of splits before it has no parts of these sequences
    return made if short is None else Both(made, short)


def few_queries(sizes: dict[str, int]) -> int:
    """Of a sequence that the decode kernel takes out of a packed batch: as many as fill its smallest tile."""
    return max(1, LEAST_ROWS // (sizes["heads"] // sizes["kv_heads"]))


def _may_mix(call: Call, cache: Cache, sizes: dict[str, int]) -> bool:
    """Several packed sequences, of which some may be decoding while the longest is a prompt."""
    return cache.cu_q is not None and sizes["batch"] > 1 and not cache.splits and not call.dropout_p


def _decoder(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sizes: dict[str, int], device: Any) -> Any:
    """The decode kernel, for the calls that it serves: few rows a KV head; None for the others."""
    from ...plan.cache.decode import decode_kernel_refusal, plan_decode
    from .decode import bind_decode, invariant_or_none, problem_of_decode

    problem = problem_of_decode(q, k, v, call, sizes, False)
    if (fixed := invariant_or_none(call, problem, device, None, cache_of(call).splits)) is not None:
        return bind_decode(q, k, v, call, sizes, fixed)
    if decode_kernel_refusal(problem.attention):
        return None
    return bind_decode(q, k, v, call, sizes, plan_decode(problem, device, cache_of(call).splits))


def _bind(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sizes: dict[str, int], tile: Any, splits: int,
    least_q: int = 0,
) -> Bound | Split:  # fmt: skip
    """Kernel, grid, scalars and constants; least_q: of the queries of sequences that are served."""
    from ...device import mods
    from ...kernels.cache.attention_cached import attention_cached as kernel
    from ...plan.problem import padded_head_dim, padded_value_dim

    cache = cache_of(call)
    n, paged = sizes, cache.block_table is not None
    out_shape, lse_shape = cached_shapes(sizes, cache)
    window = window_of(call.window, call.causal)
    rows = [sequence_strides(t, "bshd") for t in (q, k, v)]
    block_v = padded_value_dim(n["dim_v"], n["dim_qk"])
    emulate = interpreting() and q.dtype == torch.bfloat16
    constants = {
        "PAGE": n["page_size"] if paged else 0,
        "PADDED": cache.pads is not None,
        "KIND": kind_of(window),
        "EMULATE": emulate,
        "WIDE": rows[0][1] * tile.block_m >= 1 << 31 or n.get("page_size", 0) * max(rows[1][1], rows[2][1]) >= 1 << 31,
        "DIM_QK": n["dim_qk"],
        "DIM_V": n["dim_v"],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_QK": padded_head_dim(n["dim_qk"]),
        "BLOCK_V": block_v,
    }
    programs = -(-n["seq_q"] // tile.block_m) * n["heads"] * n["batch"]
    if programs >= 1 << 31:
        raise Unsupported(f"q has shape {tuple(q.shape)}: {programs} programs, a grid takes 2^31 - 1")
    scale = scale_of(call, n["dim_qk"])
    values = {
        **shared_values(n, scale, q, k, v, out_shape, "bshd"),
        **option_values(call, window, mods, float(call.softcap), q.dtype),
        **cache_values(cache),
        "least_q": least_q,
        "stride_os": math.prod(out_shape),
        "stride_ls": math.prod(lse_shape),
        **strides_named("l", (0 if cache.cu_q is not None else n["heads"] * n["seq_q"], lse_shape[-1]), "bh"),
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.maxnreg}
    bound = Bound.of(kernel, (programs, splits, 1), GIVEN, values, constants, q.device, **options)
    if splits == 1:
        return bound
    return Split(bound, bind_merge(out_shape, "bshd", splits, (block_v, BLOCK_SPLITS), emulate, q.device), splits)


# ---------------------------------------------------------------- the dispatcher


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, check: bool | Watch
) -> tuple[torch.Tensor, torch.Tensor]:
    out_shape, lse_shape = cached_shapes(cached_sizes(q, k, v, call), cache_of(call))
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)


ATTENTION_CACHED = Operation(
    "attention_cached",
    _prepare,
    _fake,
    "attention over a KV cache (block_table, seqused_k, leftpad_k, cache_seqlens) is forward only: call it under "
    "torch.no_grad(), or gather the keys and use attention or attention_varlen",
    lambda q, k, v, call, *others: check_options(call),
    (Cache,),
)


# ---------------------------------------------------------------- without a GPU


def example_launch(
    dtype: str,
    dim: int,
    page: int,
    seq_q: int = 1,
    causal: bool = True,
    splits: int = 4,
    device: str = "h200",
    dim_v: int = 0,
) -> Example:
    """(kernel, args, kwargs) of a call on tensors without memory: to compile ahead of time."""
    from ...plan.cache.cached import plan_cached
    from ...plan.device import device_named

    dt = getattr(torch, dtype)
    q = meta(2, seq_q, 8, dim, dtype=dt)
    k, v = (meta(64, page, 2, d, dtype=dt) if page else meta(2, 4096, 2, d, dtype=dt) for d in (dim, dim_v or dim))
    cache = Cache(
        meta(2, dtype=torch.int32), block_table=meta(2, 32, dtype=torch.int32) if page else None, splits=splits
    )
    call = Call(causal=causal, source=cache)
    sizes = cached_sizes(q, k, v, call)
    problem = problem_of(q, k, v, call, {**sizes, "seq_k": sizes["capacity"]}, window_of(None, causal))
    tile, parts = plan_cached(problem, device_named(device), splits)
    made = _bind(q, k, v, call, sizes, tile, parts)
    out, lse = (meta(*shape) for shape in cached_shapes(sizes, cache))
    bound = made.launch if isinstance(made, Split) else made
    return bound.example((q, k, v, out, lse, call))
